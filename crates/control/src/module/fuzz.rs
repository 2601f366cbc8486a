//! Fuzz entry point: arbitrary bytes, and modules made from them, as uploads.
//!
//! Invariants: whatever comes is answered; what is accepted is still valid when it is instrumented, has the exports that
//! its layout names, and cannot be uploaded a second time if it has any of them.

use std::collections::HashSet;

use wasm_encoder::{
    CodeSection, EntityType, ExportKind, ExportSection, Function, FunctionSection, ImportSection,
    MemorySection, MemoryType, Module, TypeSection, ValType,
};
use wasmparser::{Parser, Payload};

use super::{CheckedModule, ModuleError, ModuleLimits, RESERVED_PREFIX, check};

/// Checks `bytes` as a module: as they are if the first one is even, else what `wasm-smith` makes of them.
///
/// # Panics
/// If an invariant does not hold.
pub fn module(bytes: &[u8]) {
    let Some((form, rest)) = bytes.split_first() else {
        return;
    };
    if form % 2 == 0 {
        upload(rest);
        return;
    }
    if let Some(module) = made(*form, rest) {
        upload(&module);
    }
}

fn upload(bytes: &[u8]) {
    let limits = ModuleLimits::default();
    match check(bytes, &limits) {
        Ok(module) => accepted(&module),
        Err(error) => assert!(matches!(error, ModuleError::Invalid(_)), "{error}"),
    }
}

fn accepted(module: &CheckedModule) {
    super::scan::validate(&module.instrumented).expect("an instrumented module is valid");
    let layout = &module.layout;
    let added: Vec<&String> = [&layout.globals, &layout.functions]
        .into_iter()
        .flatten()
        .chain(layout.tables.iter().map(|table| &table.export))
        .chain(&layout.start)
        .chain(&layout.redrop)
        .collect();
    let exports = exports(&module.instrumented);
    for name in &added {
        assert!(name.starts_with(RESERVED_PREFIX) && exports.contains(*name));
    }
    if !added.is_empty() {
        let again = check(&module.instrumented, &ModuleLimits::default());
        assert!(matches!(again, Err(ModuleError::Invalid(_))));
    }
}

fn exports(module: &[u8]) -> HashSet<String> {
    let mut names = HashSet::new();
    for payload in Parser::new(0).parse_all(module) {
        if let Ok(Payload::ExportSection(exports)) = payload {
            let found = exports.into_iter().flatten();
            names.extend(found.map(|export| export.name.to_owned()));
        }
    }
    names
}

/// A random module with the exports of a controller. `None`: there are too few bytes for one.
fn made(form: u8, bytes: &[u8]) -> Option<Vec<u8>> {
    let has = |bit: u8| form & (1 << bit) != 0;
    let config = wasm_smith::Config {
        module_shape: Some(shape(has(1))),
        max_instructions: 300,
        max_memory32_bytes: 1 << 20,
        max_table_elements: 1_000,
        max_data_segments: 8,
        max_element_segments: 8,
        bulk_memory_enabled: true,
        simd_enabled: has(2),
        // Beyond what is accepted, one at a time.
        threads_enabled: has(3) && has(4),
        tail_call_enabled: has(3) && !has(4),
        gc_enabled: has(5) && has(6),
        exceptions_enabled: has(5) && !has(6),
        memory64_enabled: has(7) && has(6),
        relaxed_simd_enabled: has(7) && !has(6),
        ..wasm_smith::Config::default()
    };
    let mut bytes = arbitrary::Unstructured::new(bytes);
    let module = wasm_smith::Module::new(config, &mut bytes).ok()?;
    Some(module.to_bytes())
}

/// The imports and exports of a controller of either generation.
fn shape(is_p1: bool) -> Vec<u8> {
    const I32: ValType = ValType::I32;
    let mut types = TypeSection::new();
    // By index: the host's functions first, then the callbacks.
    types.ty().function([], []);
    types.ty().function([I32], []);
    types.ty().function([I32, I32], []);
    types.ty().function([], [I32]);
    let mut imports = ImportSection::new();
    let host = [
        ("aici_host_stop", 0),
        ("aici_host_return_process_result", 2),
    ];
    for (name, ty) in host {
        imports.import(super::ENV, name, EntityType::Function(ty));
    }
    let mut callbacks = vec![("aici_create", 3), ("aici_init_prompt", 1)];
    callbacks.push(("aici_mid_process", 1));
    if is_p1 {
        callbacks.extend([("aici_pre_process", 1), ("aici_post_process", 1)]);
    }
    let (mut functions, mut code) = (FunctionSection::new(), CodeSection::new());
    let mut exports = ExportSection::new();
    exports.export("memory", ExportKind::Memory, 0);
    for ((name, ty), index) in callbacks.into_iter().zip(2..) {
        functions.function(ty);
        exports.export(name, ExportKind::Func, index);
        let mut body = Function::new([]);
        body.instructions().unreachable().end();
        code.function(&body);
    }
    let mut memories = MemorySection::new();
    memories.memory(MemoryType {
        minimum: 1,
        maximum: Some(16),
        memory64: false,
        shared: false,
        page_size_log2: None,
    });
    let mut module = Module::new();
    module.section(&types).section(&imports).section(&functions);
    module.section(&memories).section(&exports).section(&code);
    module.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the target would explore refusals alone.
    #[test]
    fn many_made_modules_are_accepted() {
        let (mut accepted, mut made_modules) = (0, 0);
        for seed in 0..64_u32 {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state.to_be_bytes()[0]
            };
            let bytes: Vec<u8> = std::iter::repeat_with(&mut next).take(2_000).collect();
            if let Some(module) = made(1 | (seed as u8 & 6), &bytes) {
                made_modules += 1;
                accepted += u32::from(check(&module, &ModuleLimits::default()).is_ok());
            }
        }
        assert!(
            2 * accepted > made_modules && made_modules > 32,
            "{accepted} of {made_modules}"
        );
    }
}
