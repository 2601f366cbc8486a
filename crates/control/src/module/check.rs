//! [`check`]: the rules of a controller on top of those of Wasm (AI-601, AI-602, AI-604).

use wasmparser::types::{Types, TypesRef};
use wasmparser::{Export, ExternalKind, FuncType, TypeRef};

use super::imports::{CheckedImports, Signature, has_types};
use super::instrument::instrument;
use super::scan::Scan;
use super::{Abi, CheckedModule, MainExport, ModuleError, ModuleId, ModuleLimits, RESERVED_PREFIX};

/// Checks the bytes of a module and instruments it. Takes time and memory in proportion to the bytes, and accepts any.
///
/// # Errors
/// The first broken rule, as `invalid module: …`, naming the import, export, feature or limit.
pub fn check(bytes: &[u8], limits: &ModuleLimits) -> Result<CheckedModule, ModuleError> {
    if bytes.len() > limits.module_bytes {
        return Err(ModuleError::TooLarge {
            limit: limits.module_bytes,
        });
    }
    if !bytes.starts_with(b"\0asm") {
        return Err(ModuleError::invalid("not a Wasm module in binary form"));
    }
    let (scan, types) = Scan::run(bytes, limits)?;
    let imports = check_imports(&scan, &types)?;
    let exports = CheckedExports::of(&scan, types.as_ref())?;
    let abi = exports.abi(imports.abi);
    let steers = exports.steers(abi)?;
    let (instrumented, layout) = instrument(bytes, &scan)?;
    Ok(CheckedModule {
        id: ModuleId::of(bytes),
        abi,
        steers,
        main: exports.main,
        has_init: exports.has(INIT),
        has_panic: exports.has(PANIC),
        imports: imports.names,
        instrumented,
        layout,
    })
}

fn check_imports(scan: &Scan<'_>, types: &Types) -> Result<CheckedImports, ModuleError> {
    let types = types.as_ref();
    let mut checked = CheckedImports::default();
    for import in &scan.imports {
        let signature = match import.ty {
            TypeRef::Func(index) => Some(types[types.core_type_at_in_module(index)].unwrap_func()),
            _ => None,
        };
        checked.add(import.module, import.name, signature)?;
    }
    Ok(checked)
}

/// A function that a module exports for the host.
struct Callback {
    name: &'static str,
    params: &'static str,
    results: &'static str,
    /// The interfaces that need it: P1, P2.
    needed: [bool; 2],
}

/// Positions in [`CALLBACKS`].
const INIT: usize = 0;
const PANIC: usize = 1;
const CREATE: usize = 2;
const PRE: usize = 4;
const POST: usize = 6;

const CALLBACKS: [Callback; 7] = {
    const fn callback(
        name: &'static str,
        params: &'static str,
        results: &'static str,
        needed: [bool; 2],
    ) -> Callback {
        Callback {
            name,
            params,
            results,
            needed,
        }
    }
    [
        callback("aici_init", "", "", [false, false]),
        callback("aici_panic", "", "", [false, false]),
        callback("aici_create", "", "i", [true, true]),
        callback("aici_init_prompt", "i", "", [true, true]),
        callback("aici_pre_process", "i", "", [true, false]),
        callback("aici_mid_process", "i", "", [true, true]),
        callback("aici_post_process", "i", "", [true, false]),
    ]
};

/// The exports that have a meaning.
struct CheckedExports<'a> {
    callbacks: [Option<FoundExport<'a>>; CALLBACKS.len()],
    main: Option<MainExport>,
}

/// An export with the name of a callback; its signature if it is a function.
#[derive(Clone, Copy)]
struct FoundExport<'a>(Option<&'a FuncType>);

impl<'a> CheckedExports<'a> {
    fn of(scan: &Scan<'_>, types: TypesRef<'a>) -> Result<Self, ModuleError> {
        let mut exports = Self {
            callbacks: [None; CALLBACKS.len()],
            main: None,
        };
        let (mut memory, mut main) = (false, None);
        for export in &scan.exports {
            let signature = signature(export, types);
            let is = |params, results| {
                signature.is_some_and(|signature| {
                    has_types(signature.params(), params) && has_types(signature.results(), results)
                })
            };
            match export.name {
                name if name.starts_with(RESERVED_PREFIX) => {
                    let error = format_args!("reserved export {name}");
                    return Err(ModuleError::invalid(error));
                }
                "memory" => memory = export.kind == ExternalKind::Memory,
                // With another signature they are by-products of a compiler, not meant for the host.
                "aici_main" if is("i", "") => exports.main = Some(MainExport::AiciMain),
                "main" if is("ii", "i") => main = Some(MainExport::Main),
                name => {
                    if let Some(index) = CALLBACKS.iter().position(|known| known.name == name) {
                        exports.callbacks[index] = Some(FoundExport(signature));
                    }
                }
            }
        }
        if !memory {
            return Err(ModuleError::invalid("missing export memory, a memory"));
        }
        exports.main = exports.main.or(main);
        Ok(exports)
    }

    const fn has(&self, callback: usize) -> bool {
        self.callbacks[callback].is_some()
    }

    /// The interface, from the import that shows it, else from the exports (AI-602).
    fn abi(&self, imported: Option<Abi>) -> Abi {
        match imported {
            Some(abi) => abi,
            None if self.has(PRE) || self.has(POST) => Abi::P1,
            None => Abi::P2,
        }
    }

    /// Returns whether the module can steer; if not, it must be good for `--run` (AI-604).
    fn steers(&self, abi: Abi) -> Result<bool, ModuleError> {
        // Without any callback of a step, a main function is what the module is for. With one, a missing other one is
        // a mistake that must not wait for the first request.
        let runs_alone =
            self.main.is_some() && self.callbacks[CREATE + 1..].iter().all(Option::is_none);
        for (index, callback) in CALLBACKS.iter().enumerate() {
            let needed = callback.needed[abi as usize] && !runs_alone;
            let needed_by_main = index == CREATE && self.main == Some(MainExport::AiciMain);
            let optional = matches!(index, INIT | PANIC | CREATE);
            match self.callbacks[index] {
                None if needed || needed_by_main => {
                    let error = format_args!("missing export {}", callback.name);
                    return Err(ModuleError::invalid(error));
                }
                // What the interface does not call may be anything.
                Some(found) if needed || optional => found.check(callback)?,
                _ => {}
            }
        }
        Ok(!runs_alone)
    }
}

impl FoundExport<'_> {
    fn check(self, callback: &Callback) -> Result<(), ModuleError> {
        let Some(signature) = self.0 else {
            return Err(ModuleError::invalid(format_args!(
                "export {} is not a function",
                callback.name
            )));
        };
        if has_types(signature.params(), callback.params)
            && has_types(signature.results(), callback.results)
        {
            return Ok(());
        }
        Err(ModuleError::invalid(format_args!(
            "export {} has the wrong signature {}",
            callback.name,
            Signature(signature)
        )))
    }
}

fn signature<'a>(export: &Export<'_>, types: TypesRef<'a>) -> Option<&'a FuncType> {
    (export.kind == ExternalKind::Func).then(|| {
        // The validator has checked the index.
        let id = types.core_function_at(export.index);
        types.get(id).map(|ty| ty.unwrap_func())
    })?
}
