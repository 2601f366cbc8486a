//! Properties: any bytes get an answer, and what is accepted stays valid when it is instrumented.

use proptest::prelude::*;

use super::super::{ModuleError, ModuleLimits, check};
use super::controller;

/// One statement of a function that uses what a fork must copy.
fn statement() -> impl Strategy<Value = String> {
    prop_oneof![
        (0..3u32).prop_map(|i| format!("(data.drop {i})")),
        (0..2u32).prop_map(|i| format!("(elem.drop {i})")),
        (0..2u32).prop_map(|i| format!("(table.set {i} (i32.const 1) (ref.func $a))")),
        (0..2u32).prop_map(|i| format!("(drop (table.grow {i} (ref.null func) (i32.const 1)))")),
        any::<i32>().prop_map(|n| format!("(global.set $n (i32.const {n}))")),
        Just("(global.set $f (ref.func $b))".to_owned()),
        Just("(block (br 0) (data.drop 0))".to_owned()),
        Just("(if (global.get $n) (then (elem.drop 1) (return)))".to_owned()),
        Just("(unreachable)".to_owned()),
    ]
}

fn function() -> impl Strategy<Value = String> {
    prop::collection::vec(statement(), 0..8)
        .prop_map(|code| format!("(func (local i64 f32) {})", code.join(" ")))
}

fn module() -> impl Strategy<Value = Vec<u8>> {
    let functions = prop::collection::vec(function(), 0..6);
    (functions, any::<bool>(), any::<bool>()).prop_map(|(functions, start, imports)| {
        let imports = if imports {
            r#"(import "env" "aici_host_stop" (func))"#
        } else {
            ""
        };
        let start = if start { "(start $a)" } else { "" };
        let fields = format!(
            r#"(global $n (mut i32) (i32.const 1)) (global $f (mut funcref) (ref.null func))
            (table 2 funcref) (table 3 funcref) (data "a") (data (i32.const 0) "b") (data "c")
            (elem func $a) (elem declare func $a $b) (func $a) (func $b (param i64)) {start} {}"#,
            functions.join(" ")
        );
        controller(imports, &fields)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn ai_712_an_instrumented_module_is_valid(bytes in module()) {
        let module = super::accepted(&bytes);
        // It cannot be uploaded itself: it has reserved exports.
        let again = check(&module.instrumented, &ModuleLimits::default()).unwrap_err();
        prop_assert!(again.to_string().starts_with("invalid module: reserved export __sapwood_"));
        // Each export of the layout is there.
        let layout = &module.layout;
        prop_assert_eq!(layout.tables.len(), 2);
        prop_assert_eq!(layout.redrop.is_some(), layout.globals.len() > 2);
    }

    /// AI-311
    #[test]
    fn ai_601_any_bytes_get_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let error = check(&bytes, &ModuleLimits::default()).unwrap_err();
        prop_assert!(error.to_string().starts_with("invalid module: "));
        let headed = [b"\0asm\x01\0\0\0", &bytes[..]].concat();
        let error = check(&headed, &ModuleLimits::default()).unwrap_err();
        prop_assert!(error.to_string().starts_with("invalid module: "));
    }

    #[test]
    fn ai_601_damaged_modules_get_an_answer(
        bytes in module(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = bytes;
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        match check(&bytes, &ModuleLimits::default()) {
            Ok(module) => super::super::scan::validate(&module.instrumented).unwrap(),
            Err(error) => prop_assert!(matches!(error, ModuleError::Invalid(_))),
        }
    }
}
