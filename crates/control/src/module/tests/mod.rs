//! Modules are WAT text, compiled by the tests.

mod accepted;
mod forked;
mod instrumented;
mod random;
mod refused;

use super::{CheckedModule, ModuleLimits, check};

/// The callbacks of a P2 controller, without the memory.
const P2_CALLBACKS: &str = r#"
    (func (export "aici_create") (result i32) (i32.const 1))
    (func (export "aici_init_prompt") (param i32))
    (func (export "aici_mid_process") (param i32))"#;

const P1_CALLBACKS: &str = r#"
    (func (export "aici_create") (result i32) (i32.const 1))
    (func (export "aici_init_prompt") (param i32))
    (func (export "aici_pre_process") (param i32))
    (func (export "aici_mid_process") (param i32))
    (func (export "aici_post_process") (param i32))"#;

/// A complete P2 controller with more fields; those that import come first.
fn controller(imports: &str, fields: &str) -> Vec<u8> {
    wat::parse_str(format!(
        r#"(module {imports} (memory (export "memory") 1) {P2_CALLBACKS} {fields})"#
    ))
    .unwrap()
}

fn module(fields: &str) -> Vec<u8> {
    wat::parse_str(format!("(module {fields})")).unwrap()
}

#[track_caller]
fn refusal(bytes: &[u8]) -> String {
    check(bytes, &ModuleLimits::default())
        .unwrap_err()
        .to_string()
}

#[track_caller]
fn accepted(bytes: &[u8]) -> CheckedModule {
    let module = check(bytes, &ModuleLimits::default()).unwrap();
    // What is compiled must be valid too, under the same features.
    super::scan::validate(&module.instrumented).unwrap();
    module
}
