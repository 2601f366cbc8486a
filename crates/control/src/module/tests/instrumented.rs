//! What instrumentation adds. That forks are exact is the host's test.

use std::collections::BTreeMap;

use wasmparser::{Export, ExternalKind, Parser, Payload};

use super::super::{CheckedModule, ForkLayout, ForkTable};
use super::{accepted, controller};

/// Exports of the instrumented module, by name.
fn exports(module: &CheckedModule) -> BTreeMap<String, (ExternalKind, u32)> {
    let sections = Parser::new(0).parse_all(&module.instrumented);
    sections
        .filter_map(|payload| match payload.unwrap() {
            Payload::ExportSection(section) => Some(section),
            _ => None,
        })
        .flatten()
        .map(Result::unwrap)
        .map(|Export { name, kind, index }| (name.to_owned(), (kind, index)))
        .collect()
}

#[test]
fn ai_712_mutable_globals_and_tables_are_exported() {
    let module = accepted(&controller(
        r#"(import "env" "aici_host_stop" (func))"#,
        r#"
        (global i32 (i32.const 1)) (global $n (mut i32) (i32.const 0)) (global (mut v128) (v128.const i64x2 1 2))
        (table $quiet 2 funcref) (table $busy 2 externref)
        (func (table.set $busy (i32.const 0) (ref.null extern)))
        "#,
    ));
    assert_eq!(
        module.layout,
        ForkLayout {
            globals: vec![
                "__sapwood_global_1".to_owned(),
                "__sapwood_global_2".to_owned()
            ],
            tables: vec![
                ForkTable {
                    export: "__sapwood_table_0".to_owned(),
                    written: false
                },
                ForkTable {
                    export: "__sapwood_table_1".to_owned(),
                    written: true
                },
            ],
            functions: vec![],
            start: None,
            redrop: None,
        }
    );
    let exports = exports(&module);
    assert_eq!(exports["__sapwood_global_1"], (ExternalKind::Global, 1));
    assert_eq!(exports["__sapwood_global_2"], (ExternalKind::Global, 2));
    assert_eq!(exports["__sapwood_table_1"], (ExternalKind::Table, 1));
    assert_eq!(exports["aici_mid_process"], (ExternalKind::Func, 3));
}

#[test]
fn ai_712_tables_that_the_code_writes_are_noted() {
    let written = |code: &str| {
        let fields = format!(
            "(table $a 4 funcref) (table $b 4 funcref) (elem $e funcref (ref.null func)) (func {code})"
        );
        let tables = accepted(&controller("", &fields)).layout.tables;
        [tables[0].written, tables[1].written]
    };
    assert_eq!(written(""), [false, false]);
    assert_eq!(
        written("(drop (table.get $a (i32.const 0)))"),
        [false, false]
    );
    assert_eq!(
        written("(table.set $b (i32.const 0) (ref.null func))"),
        [false, true]
    );
    assert_eq!(
        written("(drop (table.grow $b (ref.null func) (i32.const 1)))"),
        [false, true]
    );
    assert_eq!(
        written("(table.fill $a (i32.const 0) (ref.null func) (i32.const 1))"),
        [true, false]
    );
    assert_eq!(
        written("(table.copy $b $a (i32.const 0) (i32.const 0) (i32.const 1))"),
        [false, true]
    );
    assert_eq!(
        written("(table.init $b $e (i32.const 0) (i32.const 0) (i32.const 1))"),
        [false, true]
    );
}

#[test]
fn ai_712_functions_are_exported_where_references_must_be_translated() {
    let functions = |fields: &str| {
        let fields = format!(
            r#"{fields} (table $t 4 funcref) (func $a) (func $b) (func $c) (func $d (export "d"))
            (elem (table $t) (i32.const 0) func 0 $a)"#
        );
        let import = r#"(import "env" "aici_host_stop" (func))"#;
        accepted(&controller(import, &fields)).layout.functions
    };
    // Nothing mutable can hold a reference.
    assert!(functions("(global funcref (ref.func $b))").is_empty());
    let names = |indices: &[u32]| -> Vec<String> {
        indices
            .iter()
            .map(|index| format!("__sapwood_function_{index}"))
            .collect()
    };
    // Indices 1 to 3 are the callbacks.
    assert_eq!(
        functions("(global (mut funcref) (ref.func $b))"),
        names(&[0, 4, 5])
    );
    let code = "(func (table.set $t (i32.const 0) (ref.func $d)))";
    // The additional function comes first here, so each index is one higher.
    assert_eq!(functions(code), names(&[0, 5, 8]));
    let expressions =
        "(func (table.grow $t (ref.null func) (i32.const 1)) drop) (elem funcref (ref.func $c))";
    assert_eq!(functions(expressions), names(&[0, 5, 7]));
}

/// AI-604
#[test]
fn ai_711_the_start_function_is_exported_and_does_not_start() {
    let module = accepted(&controller("", "(func $s (nop)) (start $s)"));
    assert_eq!(module.layout.start.as_deref(), Some("__sapwood_start"));
    assert_eq!(exports(&module)["__sapwood_start"], (ExternalKind::Func, 3));
    let mut payloads = Parser::new(0).parse_all(&module.instrumented);
    assert!(!payloads.any(|payload| matches!(payload.unwrap(), Payload::StartSection { .. })));
    // It may be a function of the host.
    let import = r#"(import "env" "aici_host_stop" (func $stop))"#;
    let module = accepted(&controller(import, "(start $stop)"));
    assert_eq!(exports(&module)["__sapwood_start"], (ExternalKind::Func, 0));
}

#[test]
fn ai_711_drops_are_flagged_and_can_be_repeated() {
    let fields = r#"
        (table 4 funcref) (elem $e func 0) (data $d "abc") (data $kept "d")
        (func (export "drops") (param i32)
            (if (local.get 0) (then (data.drop $d)))
            (elem.drop $e)
            (return) (data.drop $d))"#;
    let module = accepted(&controller("", fields));
    // The module has no global of its own; order is that of the list of dropped segments.
    assert_eq!(
        module.layout.globals,
        ["__sapwood_global_0", "__sapwood_global_1"]
    );
    assert_eq!(module.layout.redrop.as_deref(), Some("__sapwood_redrop"));
    assert_eq!(
        exports(&module)["__sapwood_redrop"],
        (ExternalKind::Func, 4)
    );
    let bodies: Vec<Vec<u8>> = Parser::new(0)
        .parse_all(&module.instrumented)
        .filter_map(|payload| match payload.unwrap() {
            Payload::CodeSectionEntry(body) => Some(body.as_bytes().to_vec()),
            _ => None,
        })
        .collect();
    let (drop_data, drop_element) = ([0xfc, 9, 0], [0xfc, 13, 0]);
    let flag = |global: u8| [0x41, 1, 0x24, global];
    let (if_then, end) = ([0x04, 0x40], [0x0b]);
    let drops = [
        &[0u8, 0x20, 0][..],
        &if_then,
        &drop_data,
        &flag(0),
        &end,
        &drop_element,
        &flag(1),
        &[0x0f],
        &drop_data,
        &flag(0),
        &end,
    ];
    assert_eq!(bodies[3], drops.concat());
    let redrop = [
        &[0u8, 0x23, 0][..],
        &if_then,
        &drop_data,
        &end,
        &[0x23, 1],
        &if_then,
        &drop_element,
        &end,
        &end,
    ];
    assert_eq!(bodies[4], redrop.concat());
}

#[test]
fn ai_712_everything_else_is_copied() {
    // Without anything to fork and without a start function, nothing is added.
    let bytes = controller("", r#"(data (i32.const 0) "abc")"#);
    assert_eq!(accepted(&bytes).instrumented, bytes);
    assert_eq!(accepted(&bytes).layout, ForkLayout::default());
    // Function names stay, other custom sections go.
    let named = controller("", r#"(func $named_function) (@custom "producers" "x")"#);
    let instrumented = accepted(&named).instrumented;
    let contains = |text: &[u8]| {
        instrumented
            .windows(text.len())
            .any(|window| window == text)
    };
    assert!(contains(b"named_function") && !contains(b"producers"));
}
