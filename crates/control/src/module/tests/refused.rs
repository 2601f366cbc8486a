//! Each rule, with the exact text of its refusal.

use std::time::{Duration, Instant};

use super::super::{ModuleError, ModuleLimits, check};
use super::{P1_CALLBACKS, P2_CALLBACKS, controller, module, refusal};

#[track_caller]
fn refused(bytes: &[u8], expected: &str) {
    assert_eq!(refusal(bytes), format!("invalid module: {expected}"));
}

/// AI-311
#[test]
fn ai_601_bytes_that_are_no_module_are_refused() {
    refused(b"", "not a Wasm module in binary form");
    refused(b"(module)", "not a Wasm module in binary form");
    refused(b"\0asm", "unexpected end-of-file (at offset 0x4)");
    let whole = controller("", "");
    for length in 4..whole.len() {
        assert!(refusal(&whole[..length]).starts_with("invalid module: "));
    }
    let end = whole.len() + 1;
    let longer = [&whole[..], &[0]].concat();
    let expected = format!("unexpected end-of-file (at offset {end:#x})");
    refused(&longer, &expected);
}

#[test]
fn ai_1019_components_are_refused() {
    let refused = |bytes: &[u8]| refused(bytes, "components are not supported yet");
    refused(b"\0asm\x0d\0\x01\0");
    refused(&wat::parse_str("(component (core module))").unwrap());
}

#[test]
fn ai_601_a_module_needs_an_exported_memory() {
    refused(&module(P2_CALLBACKS), "missing export memory, a memory");
    let hidden = format!("(memory 1) {P2_CALLBACKS}");
    refused(&module(&hidden), "missing export memory, a memory");
    let function = format!(r#"(memory 1) (func (export "memory")) {P2_CALLBACKS}"#);
    refused(&module(&function), "missing export memory, a memory");
    let two = format!(r#"(memory (export "memory") 1) (memory 1) {P2_CALLBACKS}"#);
    refused(&module(&two), "more than one memory");
}

#[test]
fn ai_601_only_functions_can_be_imported() {
    let refused = |import: &str, name: &str| {
        let fields = format!("{import} {P2_CALLBACKS}");
        let expected = format!("import {name} is not a function; only functions can be imported");
        refused(&module(&fields), &expected);
    };
    refused(
        r#"(import "env" "memory" (memory 1)) (export "memory" (memory 0))"#,
        "env.memory",
    );
    let memory = r#"(memory (export "memory") 1)"#;
    refused(
        &format!(r#"(import "env" "table" (table 1 funcref)) {memory}"#),
        "env.table",
    );
    refused(
        &format!(r#"(import "env" "__stack_pointer" (global (mut i32))) {memory}"#),
        "env.__stack_pointer",
    );
    refused(
        &format!(r#"(import "GOT.mem" "x" (global i32)) {memory}"#),
        "GOT.mem.x",
    );
}

/// AI-606
/// AI-607
/// AI-1007
#[test]
fn ai_601_imports_are_known_functions_with_their_exact_signatures() {
    let refused = |import: &str, expected: &str| refused(&controller(import, ""), expected);
    refused(
        r#"(import "env" "aici_host_print" (func (param i32 i32)))"#,
        "unknown import env.aici_host_print",
    );
    refused(
        r#"(import "wasi_snapshot_preview1" "path_teleport" (func))"#,
        "unknown import wasi_snapshot_preview1.path_teleport",
    );
    refused(
        r#"(import "wasi_unstable" "fd_write" (func (param i32 i32 i32 i32) (result i32)))"#,
        "unknown import wasi_unstable.fd_write; import from env, wasi_snapshot_preview1 or sapwood only",
    );
    refused(
        r#"(import "sapwood" "constraint_old" (func (param i32 i32 i32 i32) (result i32)))"#,
        "unknown import sapwood.constraint_old",
    );
    refused(
        r#"(import "sapwood" "constraint_new" (func (param i32 i32) (result i32)))"#,
        "import sapwood.constraint_new has signature (i32, i32) -> i32, \
         expected (i32, i32, i32, i32) -> i32",
    );
    refused(
        r#"(import "env" "aici_host_read_blob" (func (param i32 i64) (result f32 v128)))"#,
        "import env.aici_host_read_blob has signature (i32, i64) -> (f32, v128), \
         expected (i32, i32, i32) -> i32",
    );
    refused(
        r#"(import "wasi_snapshot_preview1" "fd_seek" (func (param i32 i32 i32 i32) (result i32)))"#,
        "import wasi_snapshot_preview1.fd_seek has signature (i32, i32, i32, i32) -> i32, \
         expected (i32, i64, i32, i32) -> i32",
    );
    refused(
        r#"(import "env" "aici_host_stop" (func (result i32)))"#,
        "import env.aici_host_stop has signature () -> i32, expected ()",
    );
    refused(
        r#"(import "env" "aici_host_return_logit_bias" (func (param i32) (result i64)))"#,
        "import env.aici_host_return_logit_bias has signature (i32) -> i64, expected (i32)",
    );
    refused(
        r#"(import "env" "aici_host_return_logit_bias" (func (param i32)))
           (import "env" "aici_host_return_logit_bias" (func (param i32) (result i32)))"#,
        "import env.aici_host_return_logit_bias has two signatures",
    );
    // A long name is not repeated in full.
    let long = "x".repeat(90_000);
    let message = refusal(&controller(
        &format!(r#"(import "env" "{long}" (func))"#),
        "",
    ));
    assert!(message.len() < 300 && message.starts_with("invalid module: unknown import env.xxx"));
}

#[test]
fn ai_603_other_features_are_refused_by_name() {
    let refused = |fields: &str, feature: &str| {
        let message = refusal(&controller("", fields));
        assert!(message.starts_with("invalid module: "), "{message}");
        assert!(
            message.contains(feature),
            "{message} does not name {feature}"
        );
    };
    let memory64 = format!(r#"(memory (export "memory") i64 1) {P2_CALLBACKS}"#);
    assert!(refusal(&module(&memory64)).contains("memory64"));
    let shared = format!(r#"(memory (export "memory") 1 1 shared) {P2_CALLBACKS}"#);
    assert!(refusal(&module(&shared)).contains("threads"));
    refused("(func (drop (i32.atomic.load (i32.const 0))))", "threads");
    refused("(func $f (return_call $f))", "tail calls");
    refused("(tag $t) (func (throw $t))", "exceptions");
    refused("(type (struct))", "gc");
    refused(
        "(func (param v128) (result v128) \
         (i8x16.relaxed_swizzle (local.get 0) (local.get 0)))",
        "relaxed SIMD",
    );
    refused(
        "(type $t (func)) (func (param (ref $t)) (call_ref $t (local.get 0)))",
        "reference",
    );
    refused(
        "(func (result i64 i64) (i64.mul_wide_u (i64.const 1) (i64.const 1)))",
        "wide arithmetic",
    );
}

#[test]
fn ai_601_code_is_validated() {
    let message = refusal(&controller("", r#"(func (result i32) (nop))"#));
    assert!(
        message.starts_with("invalid module: type mismatch: expected i32 but nothing on stack"),
        "{message}"
    );
}

#[test]
fn ai_604_a_missing_callback_is_found_at_upload() {
    for (callbacks, count) in [(P1_CALLBACKS, 5), (P2_CALLBACKS, 3)] {
        let memory = r#"(memory (export "memory") 1)"#;
        let lines: Vec<&str> = callbacks.trim().lines().collect();
        assert_eq!(lines.len(), count);
        for missing in 0..count {
            let mut kept = lines.clone();
            let name = kept.remove(missing).split('"').nth(1).unwrap();
            // One of these decides which interface it is, so what is missing then is the other.
            let message = refusal(&module(&format!("{memory} {}", kept.join(" "))));
            assert_eq!(message, format!("invalid module: missing export {name}"));
            // A main function does not excuse it.
            let main = r#"(func (export "main") (param i32 i32) (result i32) (i32.const 0))"#;
            let message = refusal(&module(&format!("{memory} {main} {}", kept.join(" "))));
            assert_eq!(message, format!("invalid module: missing export {name}"));
        }
    }
    refused(
        &module(r#"(memory (export "memory") 1)"#),
        "missing export aici_create",
    );
    // A P2 import and P1 exports: those are ignored, so this is P2.
    let imports = r#"(import "env" "aici_host_return_logit_bias" (func (param i32) (result i32)))"#;
    let p1 = P1_CALLBACKS.replace("aici_mid_process", "other");
    let fields = format!(r#"{imports} (memory (export "memory") 1) {p1}"#);
    refused(&module(&fields), "missing export aici_mid_process");
    // A P1 import: everything of P1 is needed.
    let imports = r#"(import "env" "aici_host_return_logit_bias" (func (param i32)))"#;
    refused(&controller(imports, ""), "missing export aici_pre_process");
}

#[test]
fn ai_604_a_callback_of_another_type_is_refused() {
    let refused = |from: &str, to: &str, expected: &str| {
        let callbacks = P2_CALLBACKS.replace(from, to);
        assert_ne!(callbacks, P2_CALLBACKS);
        let fields =
            format!(r#"(memory (export "memory") 1) (global $g i32 (i32.const 0)) {callbacks}"#);
        refused(&module(&fields), expected);
    };
    refused(
        r#"(func (export "aici_create") (result i32) (i32.const 1))"#,
        r#"(func (export "aici_create"))"#,
        "export aici_create has the wrong signature ()",
    );
    refused(
        r#"(func (export "aici_mid_process") (param i32))"#,
        r#"(func (export "aici_mid_process") (param i32 i64))"#,
        "export aici_mid_process has the wrong signature (i32, i64)",
    );
    refused(
        r#"(func (export "aici_mid_process") (param i32))"#,
        r#"(export "aici_mid_process" (global $g))"#,
        "export aici_mid_process is not a function",
    );
    super::super::tests::refused::refused(
        &controller(
            "",
            r#"(func (export "aici_init") (result i32) (i32.const 0))"#,
        ),
        "export aici_init has the wrong signature () -> i32",
    );
}

#[test]
fn ai_712_reserved_exports_are_refused() {
    for name in ["__sapwood_", "__sapwood_global_0", "__sapwood_x"] {
        let export = format!(r#"(func (export "{name}"))"#);
        refused(&controller("", &export), &format!("reserved export {name}"));
    }
    super::accepted(&controller("", r#"(func (export "__sapwood"))"#));
}

#[test]
fn ai_1090_limits_of_modules() {
    let bytes = |limits: ModuleLimits, module: &[u8]| check(module, &limits).map(|_| ());
    let invalid = |text: &str| Err(ModuleError::Invalid(text.to_owned()));
    let base = ModuleLimits::default();

    let plain = controller("", "");
    let at = |module_bytes| ModuleLimits {
        module_bytes,
        ..base
    };
    assert_eq!(bytes(at(plain.len()), &plain), Ok(()));
    let limit = plain.len() - 1;
    assert_eq!(
        bytes(at(limit), &plain),
        Err(ModuleError::TooLarge { limit })
    );

    let at = |functions| ModuleLimits { functions, ..base };
    assert_eq!(bytes(at(3), &plain), Ok(()));
    assert_eq!(bytes(at(2), &plain), invalid("more than 2 functions"));

    let at = |memory_bytes| ModuleLimits {
        memory_bytes,
        ..base
    };
    assert_eq!(bytes(at(65_536), &plain), Ok(()));
    assert_eq!(
        bytes(at(65_535), &plain),
        invalid("its memory begins with 65536 bytes; an instance may have 65535")
    );

    let tables = controller("", "(table 100000 funcref) (table 0 externref)");
    assert_eq!(bytes(base, &tables), Ok(()));
    let tables = controller("", "(table 100001 funcref)");
    let expected = invalid("a table of more than 100000 elements");
    assert_eq!(bytes(base, &tables), expected);
    let tables = controller("", "(table 0 funcref) (table 0 funcref) (table 0 funcref)");
    assert_eq!(bytes(base, &tables), invalid("more than 2 tables"));

    let globals = controller(
        "",
        "(global (mut i32) (i32.const 0)) (global (mut i64) (i64.const 0))",
    );
    let at = |mutable_globals| ModuleLimits {
        mutable_globals,
        ..base
    };
    assert_eq!(bytes(at(2), &globals), Ok(()));
    assert_eq!(
        bytes(at(1), &globals),
        invalid("more than 1 mutable globals")
    );

    let drops = controller(
        "",
        r#"(data "a") (data "b") (func (data.drop 0) (data.drop 1) (data.drop 0))"#,
    );
    let at = |dropped_segments| ModuleLimits {
        dropped_segments,
        ..base
    };
    assert_eq!(bytes(at(2), &drops), Ok(()));
    assert_eq!(bytes(at(1), &drops), invalid("drops more than 1 segments"));

    let table = |targets| {
        let code = format!(
            "(func (block (br_table {}(i32.const 0))))",
            "0 ".repeat(targets)
        );
        controller("", &code)
    };
    // The last one is the default and does not count.
    assert_eq!(bytes(base, &table(100_001)), Ok(()));
    let expected = invalid("a branch table of more than 100000 targets");
    assert_eq!(bytes(base, &table(100_002)), expected);

    let import = r#"(import "env" "aici_host_stop" (func))"#;
    assert_eq!(bytes(base, &controller(&import.repeat(1000), "")), Ok(()));
    let expected = invalid("more than 1000 imports");
    assert_eq!(bytes(base, &controller(&import.repeat(1001), "")), expected);
}

/// AI-732
#[test]
fn ai_601_validation_takes_a_bounded_time() {
    let code = |operators: usize| controller("", &format!("(func {})", "nop ".repeat(operators)));
    let limits = ModuleLimits {
        check_time: Duration::ZERO,
        ..ModuleLimits::default()
    };
    // The clock is read each 4,096 operators; the callbacks and ends have five.
    assert!(check(&code(4090), &limits).is_ok());
    let error = check(&code(4096), &limits).unwrap_err();
    let expected = "invalid module: compilation took longer than 0 s";
    assert_eq!(error.to_string(), expected);

    // Each call is two bytes, and moves 2,000 values.
    let many = "i32 ".repeat(1000);
    let calls = "(call $many) ".repeat(1 << 16);
    let hostile = format!(
        "(func $many (param {many}) (result {many}) unreachable) (func unreachable {calls} unreachable)"
    );
    let limits = ModuleLimits {
        check_time: Duration::from_millis(20),
        ..ModuleLimits::default()
    };
    let started = Instant::now();
    let error = check(&controller("", &hostile), &limits).unwrap_err();
    assert!(
        matches!(error, ModuleError::CompileTimeout { .. }),
        "{error}"
    );
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// Counts that no allocation may follow, and a section that claims more than there is.
#[test]
fn ai_601_counts_are_not_believed() {
    for section in 1..=13 {
        let mut bytes = b"\0asm\x01\0\0\0".to_vec();
        bytes.extend([section, 5, 0xff, 0xff, 0xff, 0xff, 0x0f]);
        assert!(refusal(&bytes).starts_with("invalid module: "));
        let mut bytes = b"\0asm\x01\0\0\0".to_vec();
        bytes.extend([section, 0xff, 0xff, 0xff, 0xff, 0x0f, 1]);
        assert!(refusal(&bytes).starts_with("invalid module: "));
    }
}
