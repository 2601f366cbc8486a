//! Checks uploaded modules, and rewrites them so that an instance can be forked exactly (AI-601 to AI-603, AI-712).
//!
//! [`check`] reads the bytes once, refuses what the host does not run, and returns a [`CheckedModule`]: what was found,
//! and the *instrumented* module, which is what gets compiled. Nothing here compiles or runs a module.
//!
//! # How the host instantiates an instrumented module
//!
//! 1. Instantiate it. It has no start section; active data and element segments are applied as usual.
//! 2. Call [`ForkLayout::start`], if there is one: the original start function.
//!
//! # How the host forks an instance
//!
//! 1. Instantiate the module, and do **not** call [`ForkLayout::start`]. Active segments are applied a second time, which
//!    step 2 makes invisible; they cannot fail, because they did not the first time. No code of the guest runs.
//! 2. Copy the linear memory: grow the export `memory` to the parent's size, then make all bytes equal.
//! 3. Set each of [`ForkLayout::globals`] to the parent's value.
//! 4. For each table of [`ForkLayout::tables`] that is [`written`](ForkTable::written): grow it to the parent's size, then
//!    set all elements. Tables that are not written need nothing: step 1 has filled them.
//! 5. Call [`ForkLayout::redrop`], if there is one: it drops the data and element segments that the parent had dropped,
//!    which it reads from globals that step 3 has set. It contains no code of the guest and always returns.
//!
//! *References.* A `funcref` belongs to one instance, so steps 3 and 4 translate it: [`ForkLayout::functions`] exports
//! every function that a reference can mean, and is empty if no mutable global and no written table can hold one. Find
//! the parent's function by comparing `Func::to_raw` of each of these exports, and take the export of the same name from
//! the child. A null reference stays null. An `externref` is always null, because no import makes one.

mod check;
mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod id;
mod imports;
mod instrument;
mod scan;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::check::check;
pub use self::error::ModuleError;
pub use self::id::ModuleId;
pub use self::imports::{ENV, HOST_FUNCTIONS, HostFunction, SAPWOOD, WASI};

/// Changes whenever instrumentation does, so that artefacts of an earlier form are compiled again (AI-321).
pub const INSTRUMENTATION_VERSION: u32 = 1;

/// All exports that instrumentation adds begin so; a module may not have such exports itself.
pub const RESERVED_PREFIX: &str = "__sapwood_";

/// Limits of a module (AI-1090). A module at a limit is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModuleLimits {
    /// Bytes of the upload.
    pub module_bytes: usize,
    /// Functions that it defines.
    pub functions: u32,
    /// Bytes of linear memory of an instance; the module's minimum must fit.
    pub memory_bytes: u64,
    /// Tables.
    pub tables: u32,
    /// Elements that a table begins with.
    pub table_elements: u64,
    /// Mutable globals; every fork copies them.
    pub mutable_globals: u32,
    /// Data and element segments that the code drops; every fork drops them again.
    pub dropped_segments: u32,
    /// How long validation may take; a module of tens of megabytes can be made so that it takes minutes.
    pub check_time: Duration,
}

impl Default for ModuleLimits {
    fn default() -> Self {
        Self {
            module_bytes: 64 << 20,
            functions: 200_000,
            memory_bytes: 64 << 20,
            tables: 2,
            table_elements: 100_000,
            mutable_globals: 10_000,
            dropped_segments: 10_000,
            check_time: Duration::from_secs(10),
        }
    }
}

/// The generation of the interface that a module was built for (AI-602).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Abi {
    /// `aici_pre_process`, `aici_mid_process`, `aici_post_process`.
    P1,
    /// `aici_mid_process` alone, with branches.
    P2,
}

impl Abi {
    /// `p1` or `p2`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::P1 => "p1",
            Self::P2 => "p2",
        }
    }
}

/// What `--run` calls, after `aici_init` (AI-604).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MainExport {
    /// `aici_main(h)`, with the result of `aici_create`.
    AiciMain,
    /// `main(0, 0) -> i32`.
    Main,
}

/// A module that passed every check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedModule {
    /// Of the original bytes.
    pub id: ModuleId,
    /// The interface of its callbacks.
    pub abi: Abi,
    /// It has all callbacks of [`CheckedModule::abi`], so that it can steer a sequence. If not, it has a
    /// [`CheckedModule::main`] and is good for `--run` alone.
    pub steers: bool,
    /// What `--run` calls, if there is such an export.
    pub main: Option<MainExport>,
    /// It exports `aici_init`.
    pub has_init: bool,
    /// It exports `aici_panic`.
    pub has_panic: bool,
    /// The imports, as `module.name`, in order.
    pub imports: Vec<String>,
    /// The rewritten module: to be compiled.
    pub instrumented: Vec<u8>,
    /// What a fork must copy.
    pub layout: ForkLayout,
}

/// The exports through which an instance is started and forked; the module's documentation has the steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForkLayout {
    /// Exports of all mutable globals.
    pub globals: Vec<String>,
    /// Exports of all tables.
    pub tables: Vec<ForkTable>,
    /// Exports of all functions that a reference in a mutable global or written table can mean.
    pub functions: Vec<String>,
    /// Export of the start function, `() -> ()`. It is the guest's: call it once, never in a fork.
    pub start: Option<String>,
    /// Export of the function that drops segments again, `() -> ()`. Call it in each fork, last.
    pub redrop: Option<String>,
}

/// A table of a [`ForkLayout`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForkTable {
    /// Its export.
    pub export: String,
    /// The code of the module can change it, so a fork must copy it.
    pub written: bool,
}
