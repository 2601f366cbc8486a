//! The Wasm engine's settings, and the compilation of checked modules.

use std::hash::{Hash, Hasher};

use rayon::{ThreadPool, ThreadPoolBuilder};
use sha2::{Digest, Sha256};
use wasmtime::{
    Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, RegallocAlgorithm,
    Strategy,
};

use super::artefact::Artefact;
use super::config::HostConfig;
use crate::module::{CheckedModule, ModuleError};

/// Compiles `module` to an artefact for [`Host::load`](super::Host::load) of a host with the same `config`.
///
/// Takes seconds and much memory for a large module, and compilers have defects, so a server calls it in a process of
/// its own (AI-732). Uses up to four cores, with threads that end soon after it returns, and reserves no memory for
/// instances.
///
/// # Errors
/// The compiler cannot compile it.
pub fn compile(config: &HostConfig, module: &CheckedModule) -> Result<Artefact, ModuleError> {
    let threads = compiler_threads();
    let mut settings = settings(config);
    settings.parallel_compilation(threads.is_some());
    let engine = Engine::new(&settings).map_err(|error| host_error(&error))?;
    match threads {
        Some(threads) => threads.install(|| compile_with(&engine, module)),
        None => compile_with(&engine, module),
    }
}

/// `None` with a single core, and where the system gives no more threads: compiled is on the caller's then.
fn compiler_threads() -> Option<ThreadPool> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(COMPILER_THREADS_MAX);
    if threads == 1 {
        return None;
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("compiler-{index}"))
        .stack_size(COMPILER_STACK_BYTES)
        .build();
    pool.inspect_err(|error| tracing::warn!(%error, "a module is compiled on one thread"))
        .ok()
}

pub(super) fn compile_with(
    engine: &Engine,
    module: &CheckedModule,
) -> Result<Artefact, ModuleError> {
    let compiled = engine.precompile_module(&module.instrumented);
    compiled.map(Artefact::vouched_for).map_err(|error| {
        // It passed our checks, so the compiler is at fault, or one of its own limits.
        tracing::warn!(module = %module.id, error = %format_args!("{error:#}"), "a controller cannot be compiled");
        ModuleError::CompileFailed
    })
}

/// An engine that runs instances: from a pool if the system has the address space, else one by one.
pub(super) fn running(config: &HostConfig) -> wasmtime::Result<Engine> {
    let mut pooled = settings(config);
    pooled.allocation_strategy(InstanceAllocationStrategy::Pooling(pool(config)));
    Engine::new(&pooled).or_else(|error| {
        // Every slot reserves 4 GiB of addresses, which a limit of the process or a small address space does not allow.
        tracing::warn!(error = %format_args!("{error:#}"), "no instance pool: controllers start more slowly");
        Engine::new(&settings(config))
    })
}

/// An engine that runs few instances in this process, or none: nothing is reserved for them.
#[cfg(target_os = "linux")]
pub(super) fn one_by_one(config: &HostConfig) -> wasmtime::Result<Engine> {
    Engine::new(&settings(config))
}

/// Names what an artefact depends on: engine version, compile options, CPU features.
pub(super) fn artefact_key(engine: &Engine) -> [u8; 32] {
    struct Hashed(Sha256);
    impl Hasher for Hashed {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }

        fn finish(&self) -> u64 {
            0
        }
    }
    let mut hashed = Hashed(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut hashed);
    hashed.0.finalize().into()
}

/// Everything that compiled code depends on. `module::check` refuses other features before the engine could (AI-603).
fn settings(config: &HostConfig) -> Config {
    let mut settings = Config::new();
    settings
        // Threads that nobody has counted would be started in a server.
        .parallel_compilation(false)
        .strategy(Strategy::Cranelift)
        .cranelift_regalloc_algorithm(RegallocAlgorithm::Backtracking)
        .epoch_interruption(true)
        .consume_fuel(config.fuel.is_some())
        .max_wasm_stack(config.stack_bytes)
        .wasm_simd(true)
        .wasm_bulk_memory(true)
        .wasm_multi_value(true)
        .wasm_reference_types(true)
        .wasm_extended_const(true)
        .wasm_function_references(false)
        .wasm_gc(false)
        .wasm_exceptions(false)
        .wasm_wide_arithmetic(false)
        .wasm_custom_page_sizes(false)
        .wasm_relaxed_simd(false)
        .wasm_tail_call(false)
        .wasm_multi_memory(false)
        .wasm_memory64(false);
    settings
}

fn pool(config: &HostConfig) -> PoolingAllocationConfig {
    // An instance is no longer counted a moment before its slot is free again, at most one on each thread.
    let ending = u32::try_from(config.kept_threads() + config.spare_threads).unwrap_or(u32::MAX);
    let slots = config.instances.saturating_add(ending);
    let mut pool = PoolingAllocationConfig::new();
    pool.total_core_instances(slots)
        // A table of `externref` makes the engine take a second one, for a heap that stays empty.
        .total_memories(slots.saturating_mul(2))
        .total_tables(slots.saturating_mul(TABLES))
        .max_tables_per_module(TABLES)
        .table_elements(config.table_elements)
        .max_memory_size(config.memory_bytes)
        .max_core_instance_size(INSTANCE_BYTES)
        .total_gc_heaps(slots)
        .max_unused_warm_slots(WARM_SLOTS)
        // Fresh pages are what a new instance costs, so the first ones of each slot are zeroed and kept.
        .linear_memory_keep_resident(KEPT_MEMORY_BYTES)
        .table_keep_resident(KEPT_TABLE_BYTES);
    pool
}

const TABLES: u32 = 2;
/// More would need more memory than a compiler child may have, for little: a server has other work.
const COMPILER_THREADS_MAX: usize = 4;
/// As much as a process's first thread has.
const COMPILER_STACK_BYTES: usize = 8 << 20;
/// What the engine itself keeps for an instance, mostly 32 bytes for each function that a reference can mean; at the
/// limit of a module's functions it is 8 MB.
const INSTANCE_BYTES: usize = 16 << 20;
/// Free slots that keep pages of their last instance: with the next line at most 64 MiB.
const WARM_SLOTS: u32 = 32;
const KEPT_MEMORY_BYTES: usize = 2 << 20;
const KEPT_TABLE_BYTES: usize = 16 << 10;

fn host_error(error: &wasmtime::Error) -> ModuleError {
    tracing::error!(error = %format_args!("{error:#}"), "the Wasm engine cannot be started");
    ModuleError::Host("the Wasm engine cannot be started".to_owned())
}
