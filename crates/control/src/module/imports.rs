//! [`HOST_FUNCTIONS`]: every function that a module may import, with its exact signature (AI-606, AI-607).

use std::fmt;

use wasmparser::{FuncType, ValType};

use super::{Abi, ModuleError};

/// A function of the host. Types are one letter each: `i` is i32, `I` is i64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFunction {
    /// The import module.
    pub module: &'static str,
    /// The import's name.
    pub name: &'static str,
    /// Its parameters.
    pub params: &'static str,
    /// Its results.
    pub results: &'static str,
}

/// The import module of the controller interface.
pub const ENV: &str = "env";

/// The import module of WASI preview 1.
pub const WASI: &str = "wasi_snapshot_preview1";

/// The import module of our additions (AI-1007): a module that imports from it runs on Sapwood only.
pub const SAPWOOD: &str = "sapwood";

/// The function whose result type tells the two interfaces apart; in the table it stands once for each (AI-602).
const RETURN_LOGIT_BIAS: &str = "aici_host_return_logit_bias";

/// The imports of a module, checked.
#[derive(Debug, Default)]
pub(super) struct CheckedImports {
    /// As `module.name`, each once, in order.
    pub(super) names: Vec<String>,
    /// The interface that [`RETURN_LOGIT_BIAS`] shows, if it is imported.
    pub(super) abi: Option<Abi>,
}

impl CheckedImports {
    /// Checks one import and adds it. `signature` is `None` if it is not a function.
    pub(super) fn add(
        &mut self,
        module: &str,
        name: &str,
        signature: Option<&FuncType>,
    ) -> Result<(), ModuleError> {
        let Some(signature) = signature else {
            return Err(ModuleError::invalid(format_args!(
                "import {module}.{name} is not a function; only functions can be imported"
            )));
        };
        if !matches!(module, ENV | WASI | SAPWOOD) {
            return Err(ModuleError::invalid(format_args!(
                "unknown import {module}.{name}; import from {ENV}, {WASI} or {SAPWOOD} only"
            )));
        }
        // At most two have one name.
        let mut named = HOST_FUNCTIONS
            .iter()
            .filter(|known| known.module == module && known.name == name)
            .peekable();
        let Some(first) = named.peek().copied() else {
            return Err(ModuleError::invalid(format_args!(
                "unknown import {module}.{name}"
            )));
        };
        if !named.any(|known| known.has_signature(signature)) {
            return Err(ModuleError::invalid(format_args!(
                "import {module}.{name} has signature {}, expected {}",
                Signature(signature),
                Letters(first)
            )));
        }
        if name == RETURN_LOGIT_BIAS {
            self.add_return_logit_bias(signature)?;
        }
        // Once each: a module may import one function a thousand times, and listings show these names.
        let name = format!("{module}.{name}");
        if !self.names.contains(&name) {
            self.names.push(name);
        }
        Ok(())
    }

    fn add_return_logit_bias(&mut self, signature: &FuncType) -> Result<(), ModuleError> {
        let abi = if signature.results().is_empty() {
            Abi::P1
        } else {
            Abi::P2
        };
        // The host links by name, so one module cannot have both.
        if self.abi.is_some_and(|earlier| earlier != abi) {
            return Err(ModuleError::invalid(format_args!(
                "import {ENV}.{RETURN_LOGIT_BIAS} has two signatures"
            )));
        }
        self.abi = Some(abi);
        Ok(())
    }
}

impl HostFunction {
    fn has_signature(&self, signature: &FuncType) -> bool {
        has_types(signature.params(), self.params) && has_types(signature.results(), self.results)
    }
}

/// Whether a function's parameters or results are these; see [`HostFunction`] for the letters.
pub(super) fn has_types(types: &[ValType], letters: &str) -> bool {
    types.len() == letters.len()
        && types
            .iter()
            .zip(letters.bytes())
            .all(|(ty, letter)| match letter {
                b'i' => *ty == ValType::I32,
                _ => *ty == ValType::I64,
            })
}

/// Shows a signature as `(i32, i32) -> i32`.
pub(super) struct Signature<'a>(pub(super) &'a FuncType);

impl fmt::Display for Signature<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_list(f, self.0.params().iter())?;
        match self.0.results() {
            [] => Ok(()),
            [one] => write!(f, " -> {one}"),
            several => {
                f.write_str(" -> ")?;
                show_list(f, several.iter())
            }
        }
    }
}

/// Shows the signature of a host function, as [`Signature`] does.
struct Letters<'a>(&'a HostFunction);

impl fmt::Display for Letters<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_list(f, self.0.params.bytes().map(letter_name))?;
        self.0
            .results
            .bytes()
            .try_for_each(|letter| write!(f, " -> {}", letter_name(letter)))
    }
}

const fn letter_name(letter: u8) -> &'static str {
    if letter == b'i' { "i32" } else { "i64" }
}

fn show_list(
    f: &mut fmt::Formatter<'_>,
    types: impl Iterator<Item = impl fmt::Display>,
) -> fmt::Result {
    f.write_str("(")?;
    for (index, ty) in types.enumerate() {
        if index > 0 {
            f.write_str(", ")?;
        }
        write!(f, "{ty}")?;
    }
    f.write_str(")")
}

const fn env(name: &'static str, params: &'static str, results: &'static str) -> HostFunction {
    HostFunction {
        module: ENV,
        name,
        params,
        results,
    }
}

const fn sapwood(name: &'static str, params: &'static str, results: &'static str) -> HostFunction {
    HostFunction {
        module: SAPWOOD,
        name,
        params,
        results,
    }
}

/// All but one return an error number.
const fn wasi(name: &'static str, params: &'static str) -> HostFunction {
    HostFunction {
        module: WASI,
        name,
        params,
        results: "i",
    }
}

/// Every function that a module may import.
pub const HOST_FUNCTIONS: &[HostFunction] = &[
    env("aici_host_read_blob", "iii", "i"),
    env("aici_host_module_arg", "", "i"),
    env("aici_host_process_arg", "", "i"),
    env("aici_host_tokens", "", "i"),
    env("aici_host_token_trie", "", "i"),
    env("aici_host_tokenize", "ii", "i"),
    env(RETURN_LOGIT_BIAS, "i", ""),
    env(RETURN_LOGIT_BIAS, "i", "i"),
    env("aici_host_self_seq_id", "", "i"),
    env("aici_host_return_process_result", "ii", ""),
    env("aici_host_storage_cmd", "ii", "i"),
    env("aici_host_eos_token", "", "i"),
    env("aici_host_get_config", "ii", "i"),
    env("aici_host_stop", "", ""),
    sapwood("constraint_new", "iiii", "i"),
    sapwood("constraint_consume", "ii", "i"),
    sapwood("constraint_rollback", "ii", ""),
    sapwood("constraint_mask", "i", "i"),
    sapwood("constraint_ff", "i", "i"),
    sapwood("mask_and", "ii", "i"),
    sapwood("mask_or", "ii", "i"),
    sapwood("mask_not", "i", "i"),
    sapwood("mask_return", "i", "i"),
    sapwood("prefix_mask", "ii", "i"),
    sapwood("token_bytes", "iii", "i"),
    sapwood("free", "i", ""),
    sapwood("top_logits", "ii", "i"),
    wasi("args_get", "ii"),
    wasi("args_sizes_get", "ii"),
    wasi("clock_res_get", "ii"),
    wasi("clock_time_get", "iIi"),
    wasi("environ_get", "ii"),
    wasi("environ_sizes_get", "ii"),
    wasi("fd_advise", "iIIi"),
    wasi("fd_allocate", "iII"),
    wasi("fd_close", "i"),
    wasi("fd_datasync", "i"),
    wasi("fd_fdstat_get", "ii"),
    wasi("fd_fdstat_set_flags", "ii"),
    wasi("fd_fdstat_set_rights", "iII"),
    wasi("fd_filestat_get", "ii"),
    wasi("fd_filestat_set_size", "iI"),
    wasi("fd_filestat_set_times", "iIIi"),
    wasi("fd_pread", "iiiIi"),
    wasi("fd_prestat_dir_name", "iii"),
    wasi("fd_prestat_get", "ii"),
    wasi("fd_pwrite", "iiiIi"),
    wasi("fd_read", "iiii"),
    wasi("fd_readdir", "iiiIi"),
    wasi("fd_renumber", "ii"),
    wasi("fd_seek", "iIii"),
    wasi("fd_sync", "i"),
    wasi("fd_tell", "ii"),
    wasi("fd_write", "iiii"),
    wasi("path_create_directory", "iii"),
    wasi("path_filestat_get", "iiiii"),
    wasi("path_filestat_set_times", "iiiiIIi"),
    wasi("path_link", "iiiiiii"),
    wasi("path_open", "iiiiiIIii"),
    wasi("path_readlink", "iiiiii"),
    wasi("path_remove_directory", "iii"),
    wasi("path_rename", "iiiiii"),
    wasi("path_symlink", "iiiii"),
    wasi("path_unlink_file", "iii"),
    wasi("poll_oneoff", "iiii"),
    HostFunction {
        module: WASI,
        name: "proc_exit",
        params: "i",
        results: "",
    },
    wasi("proc_raise", "i"),
    wasi("random_get", "ii"),
    wasi("sched_yield", ""),
    wasi("sock_accept", "iii"),
    wasi("sock_recv", "iiiiii"),
    wasi("sock_send", "iiiii"),
    wasi("sock_shutdown", "ii"),
];
