//! What is accepted, and what is found in it.

use super::super::{Abi, ENV, HOST_FUNCTIONS, MainExport, ModuleId, WASI};
use super::{P1_CALLBACKS, P2_CALLBACKS, accepted, controller, module};

const MEMORY: &str = r#"(memory (export "memory") 1)"#;

#[test]
fn ai_602_the_interface_is_recognised() {
    let p1 = accepted(&module(&format!("{MEMORY} {P1_CALLBACKS}")));
    assert_eq!((p1.abi, p1.steers, p1.main), (Abi::P1, true, None));
    let p2 = accepted(&module(&format!("{MEMORY} {P2_CALLBACKS}")));
    assert_eq!((p2.abi, p2.steers, p2.main), (Abi::P2, true, None));

    let import = r#"(import "env" "aici_host_return_logit_bias" (func (param i32)))"#;
    let p1 = accepted(&module(&format!("{import} {MEMORY} {P1_CALLBACKS}")));
    assert_eq!(p1.abi, Abi::P1);
    assert_eq!(p1.imports, ["env.aici_host_return_logit_bias"]);
    // Exports of P1 are ignored, whatever they are.
    let import = r#"(import "env" "aici_host_return_logit_bias" (func (param i32) (result i32)))"#;
    let odd = r#"(func (export "aici_pre_process") (result i64) (i64.const 0))"#;
    let p2 = accepted(&controller(import, odd));
    assert_eq!((p2.abi, p2.steers), (Abi::P2, true));
    assert_eq!((Abi::P1.name(), Abi::P2.name()), ("p1", "p2"));
}

/// Listings show them, and the limit of imports is a thousand.
#[test]
fn ai_1003_an_import_is_listed_once() {
    let stop = r#"(import "env" "aici_host_stop" (func))"#;
    let token = r#"(import "env" "aici_host_eos_token" (func (result i32)))"#;
    let found = accepted(&controller(&format!("{stop} {token} {stop}"), ""));
    assert_eq!(
        found.imports,
        ["env.aici_host_stop", "env.aici_host_eos_token"]
    );
}

#[test]
fn ai_604_a_main_function_alone_is_good_for_running() {
    let main = r#"(func (export "main") (param i32 i32) (result i32) (i32.const 0))"#;
    let found = accepted(&module(&format!("{MEMORY} {main}")));
    assert_eq!((found.steers, found.main), (false, Some(MainExport::Main)));
    let aici_main = r#"(func (export "aici_main") (param i32))"#;
    let create = r#"(func (export "aici_create") (result i32) (i32.const 1))"#;
    let found = accepted(&module(&format!("{MEMORY} {main} {create} {aici_main}")));
    assert_eq!(
        (found.steers, found.main),
        (false, Some(MainExport::AiciMain))
    );
    let message = super::refusal(&module(&format!("{MEMORY} {aici_main}")));
    assert_eq!(message, "invalid module: missing export aici_create");
    // With the callbacks it does both. A `main` of another type is a by-product.
    let found = accepted(&controller("", aici_main));
    assert_eq!(
        (found.steers, found.main),
        (true, Some(MainExport::AiciMain))
    );
    let found = accepted(&controller("", r#"(func (export "main"))"#));
    assert_eq!((found.steers, found.main), (true, None));
}

#[test]
fn ai_604_init_and_panic_are_optional() {
    let found = accepted(&controller("", ""));
    assert_eq!((found.has_init, found.has_panic), (false, false));
    let found = accepted(&controller(
        "",
        r#"(func (export "aici_init")) (func (export "aici_panic"))"#,
    ));
    assert_eq!((found.has_init, found.has_panic), (true, true));
}

/// AI-607
#[test]
fn ai_606_every_host_function_can_be_imported() {
    let mut count = 0;
    let types = |letters: &str| letters.replace('i', "i32 ").replace('I', "i64 ");
    for function in HOST_FUNCTIONS {
        let import = format!(
            r#"(import "{}" "{}" (func (param {}) (result {})))"#,
            function.module,
            function.name,
            types(function.params),
            types(function.results)
        );
        let extra =
            if function.params == "i" && function.results.is_empty() && function.module == ENV {
                P1_CALLBACKS
            } else {
                P2_CALLBACKS
            };
        let found = accepted(&module(&format!("{import} {MEMORY} {extra}")));
        assert_eq!(
            found.imports,
            [format!("{}.{}", function.module, function.name)]
        );
        count += usize::from(function.module == WASI);
    }
    assert_eq!(count, 46, "functions of preview 1");
}

#[test]
fn ai_603_what_compilers_emit_is_accepted() {
    accepted(&controller(
        "",
        r#"
        (global i32 (i32.add (i32.const 8) (i32.const 8)))
        (global (mut externref) (ref.null extern))
        (table $t 4 funcref)
        (elem (table $t) (i32.const 0) func $many)
        (data (offset (i32.add (i32.const 8) (i32.const 8))) "abc")
        (func $many (param i32) (result i32 i64)
            (i32.extend8_s (local.get 0)) (i64.trunc_sat_f64_s (f64.const 1.5)))
        (func (param v128) (result i32)
            (memory.copy (i32.const 0) (i32.const 8) (i32.const 8))
            (memory.fill (i32.const 0) (i32.const 0) (i32.const 8))
            (table.set $t (i32.const 1) (ref.func $many))
            (i8x16.extract_lane_s 0 (local.get 0)))
        "#,
    ));
}

#[test]
fn ai_311_the_id_is_of_the_uploaded_bytes() {
    let bytes = controller("", "(global (mut i32) (i32.const 0))");
    let found = accepted(&bytes);
    assert_ne!(found.instrumented, bytes);
    assert_eq!(found.id, ModuleId::of(&bytes));
    let text = found.id.to_string();
    assert_eq!(text.len(), 64);
    assert_eq!(ModuleId::parse(&text), Some(found.id));
    let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(ModuleId::of(b"abc").to_string(), known);
    assert_eq!(ModuleId::parse(&text.to_uppercase()), Some(found.id));
    for bad in [&text[1..], &format!("{text}0"), &"g".repeat(64)] {
        assert_eq!(ModuleId::parse(bad), None, "{bad}");
    }
}
