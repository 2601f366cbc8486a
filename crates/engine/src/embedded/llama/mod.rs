//! Safe wrappers of llama.cpp. With `guard.rs` the only module of this crate that contains `unsafe`.
//!
//! ```text
//!   LlamaBackend ──► LlamaModel (read only, shared) ──► LlamaContext, EncoderContext (one thread at a time)
//!                      │                                   ├── decode ──► output rows
//!                      └── vocabulary functions            └── ComputePool (ggml's worker threads, shared)
//! ```
//!
//! Three arguments justify all `SAFETY` comments in these files:
//! * **Ownership.** [`LlamaModel`], [`LlamaContext`], [`EncoderContext`] and `ComputePool` each hold the only pointer that frees their
//!   object. A context keeps its model alive through an `Arc`, and is freed before its thread pool.
//! * **Threads.** After loading, a `llama_model` and its vocabulary are only read, and llama.cpp documents its
//!   tokenizer functions as thread-safe. A `llama_context` may move between threads but is never used by two at once:
//!   every method that touches it takes `&mut self`, or reads numbers that never change.
//! * **Ranges.** Slots, tokens, positions and row indices are compared with the numbers that llama.cpp itself reported.
//!
//! Exceptions that llama.cpp throws (out of memory in `decode`, for one) become errors in [`super::guard::guarded`].

mod backends;
mod batch;
mod compute_pool;
mod context;
mod cpu_hooks;
mod encoder;
mod kernels;
mod model;
mod params;
pub(super) mod untouched;

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Once, OnceLock};
use std::time::Instant;

use llama_cpp_sys_2 as sys;
use sapwood_proto::steer::Token;

use self::batch::LlamaBatch;
use self::compute_pool::{ComputePool, TurnTaking};
use self::context::{THROWN, on_poll};
use self::params::set_context_params;
use super::guard::{guarded, throwing};
use super::thread_choice::ThreadChoice;
use crate::embedding::Pooling;
use crate::model::Interrupt;

use crate::llama_options::{LlamaOptions, Numa};

pub(super) use self::context::{
    CELLS_STEP, ContextSize, DecodeError, LlamaContext, SCORED_ROWS, SLOTS_MAX, ThreadLimits,
};
pub(super) use self::encoder::EncoderSize;
pub use self::kernels::{Kernels, KernelsError, kernels};
pub(super) use self::model::{LlamaModel, TokenAttributes};
pub(super) use self::params::{ModelParams, gpu_memory, has_gpu};

/// The version of ggml, llama.cpp's library of kernels.
pub(super) fn library_version() -> String {
    // SAFETY: returns a static string.
    let version = unsafe { sys::ggml_version() };
    // SAFETY: as above; it ends with a NUL byte.
    let version = unsafe { CStr::from_ptr(version) };
    version.to_string_lossy().into_owned()
}

/// Proof that llama.cpp is initialised and that its log is forwarded to `tracing`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LlamaBackend(());

impl LlamaBackend {
    /// Initialises llama.cpp, once per process. The placement on NUMA nodes is that of the first call.
    ///
    /// # Errors
    /// There are no kernels for this machine.
    pub(super) fn start(numa: Option<Numa>) -> Result<Self, KernelsError> {
        static ONCE: Once = Once::new();
        // First: llama.cpp itself would look for libraries where anyone may put them.
        kernels()?;
        forward_log();
        ONCE.call_once(|| {
            // SAFETY: neither takes borrowed data.
            unsafe {
                sys::llama_backend_init();
                untouched::install();
                let instructions = cpu_hooks::install();
                let _ = OWN_INSTRUCTIONS.set(instructions);
                tracing::debug!(instructions, "attention and products of our own");
                // After the start, which finds the CPU backend; before any model, whose memory is placed by it.
                if let Some(numa) = numa {
                    sys::llama_numa_init(numa_strategy(numa));
                }
            }
        });
        Ok(Self(()))
    }
}

/// The instructions that our attention and products use.
static OWN_INSTRUCTIONS: OnceLock<Option<&'static str>> = OnceLock::new();

/// Returns whether attention over 16-bit cells is ours: none of its numbers then depends on what is computed beside it.
pub(super) fn has_own_attention() -> bool {
    OWN_INSTRUCTIONS.get().is_some_and(Option::is_some)
}

/// Has ggml and llama.cpp log to `tracing`.
fn forward_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: it takes no borrowed data; `Once` excludes other threads while the global logger is set.
        unsafe { sys::llama_log_set(Some(log), ptr::null_mut()) };
    });
}

fn numa_strategy(numa: Numa) -> sys::ggml_numa_strategy {
    match numa {
        Numa::Distribute => sys::GGML_NUMA_STRATEGY_DISTRIBUTE,
        Numa::Isolate => sys::GGML_NUMA_STRATEGY_ISOLATE,
        Numa::Numactl => sys::GGML_NUMA_STRATEGY_NUMACTL,
    }
}

/// Returns the x86 features for which ggml's kernels were compiled; may be called before llama.cpp is initialised.
#[cfg(not(feature = "dynamic-backends"))]
pub(super) fn compiled_for() -> impl Iterator<Item = &'static str> {
    // SAFETY: these functions take nothing and return constants of the build.
    let features = unsafe {
        [
            ("AVX", sys::ggml_cpu_has_avx()),
            ("AVX2", sys::ggml_cpu_has_avx2()),
            ("BMI2", sys::ggml_cpu_has_bmi2()),
            ("F16C", sys::ggml_cpu_has_f16c()),
            ("FMA", sys::ggml_cpu_has_fma()),
            ("AVX-VNNI", sys::ggml_cpu_has_avx_vnni()),
            ("AVX512F", sys::ggml_cpu_has_avx512()),
            ("AVX512-VBMI", sys::ggml_cpu_has_avx512_vbmi()),
            ("AVX512-VNNI", sys::ggml_cpu_has_avx512_vnni()),
            ("AVX512-BF16", sys::ggml_cpu_has_avx512_bf16()),
        ]
    };
    features
        .into_iter()
        .filter(|&(_, compiled)| compiled != 0)
        .map(|(name, _)| name)
}

/// A llama.cpp context that keeps nothing between two batches.
#[derive(Debug)]
pub(super) struct EncoderContext {
    context: NonNull<sys::llama_context>,
    /// The KV cache of a decoder that embeds; encoders have none.
    memory: Option<NonNull<sys::llama_memory_i>>,
    /// It is computed by `llama_encode`.
    encodes: bool,
    /// Numbers that llama.cpp has for a text.
    width: usize,
    size: EncoderSize,
    batch: LlamaBatch,
    interrupt: Interrupt,
    threads: ThreadChoice,
    model: Arc<LlamaModel>,
    /// Declared last: dropped after the context that uses it.
    _pool: Arc<ComputePool>,
}

// SAFETY: see "Threads" above. The batch's pointers are filled and used within one call.
unsafe impl Send for EncoderContext {}

impl EncoderContext {
    /// Creates a context. Must be called before the model is shared: llama.cpp may still modify the model here.
    ///
    /// # Errors
    /// The error that llama.cpp logged.
    pub(super) fn new(
        model: Arc<LlamaModel>,
        size: EncoderSize,
        options: &LlamaOptions,
    ) -> Result<Self, String> {
        let texts = size.texts.clamp(1, SLOTS_MAX);
        let size = EncoderSize {
            texts,
            // llama.cpp asserts that a batch has room for one row per sequence.
            tokens: size.tokens.max(texts),
            ..size
        };
        let threads = size.threads.prefill_choice();
        // A long text takes seconds, and cannot be divided.
        let pool = ComputePool::new(threads.most(), size.poll, TurnTaking::Free)
            .ok_or("ggml could not make its threads")?;
        let params = encoder_params(size, options);
        let _ = LAST_ERROR.take();
        // SAFETY: the model is live and stays so through the `Arc`; the parameters hold no pointers of ours.
        let init = || unsafe { throwing::llama_init_from_model(model.model.as_ptr(), params) };
        let context = guarded(init)?;
        let context = NonNull::new(context).ok_or_else(take_last_error)?;
        let interrupt = Interrupt::default();
        // SAFETY: the context is live; the flag and the pool live as long as it does (fields of the same value).
        let memory = unsafe {
            let raw = context.as_ptr();
            pool.attach(context);
            let flag = Arc::as_ptr(&interrupt).cast_mut().cast();
            sys::llama_set_abort_callback(raw, Some(on_poll), flag);
            sys::llama_get_memory(raw)
        };
        let facts = model.facts();
        let width = match size.pooling {
            Pooling::Rank => facts.scores,
            _ => facts.embedding_numbers,
        };
        Ok(Self {
            context,
            memory: NonNull::new(memory),
            encodes: facts.encodes,
            width: width as usize,
            size,
            batch: LlamaBatch::new(size.tokens as usize),
            interrupt,
            threads,
            model,
            _pool: pool,
        })
    }

    /// Sets the flag that aborts a running call; it is polled between the nodes of the graph.
    pub(super) fn set_interrupt(&mut self, flag: Interrupt) {
        // SAFETY: the context is live and not computing. The old flag is dropped only after the new one is in place.
        unsafe {
            let data = Arc::as_ptr(&flag).cast_mut().cast();
            sys::llama_set_abort_callback(self.context.as_ptr(), Some(on_poll), data);
        }
        self.interrupt = flag;
    }

    /// Returns the numbers of a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Computes a batch of texts, and appends a row for each.
    pub(super) fn encode(
        &mut self,
        texts: &[&[Token]],
        rows: &mut Vec<f32>,
    ) -> Result<(), DecodeError> {
        let entries = self.size.entries(texts, &self.model)?;
        self.batch.clear();
        self.batch.fill(&entries);
        let (context, batch) = (self.context.as_ptr(), self.batch.raw());
        let threads = self.threads.threads(entries.len()).cast_signed();
        // SAFETY: the context is live and not computing.
        unsafe { sys::llama_set_n_threads(context, threads, threads) };
        let (began, encodes) = (Instant::now(), self.encodes);
        // SAFETY: `entries` has compared every number with the context's limits; the batch's arrays are as long as it says
        // and live during the call, which copies them.
        let call = || unsafe {
            if encodes {
                throwing::llama_encode(context, batch)
            } else {
                throwing::llama_decode(context, batch)
            }
        };
        let code = guarded(call).unwrap_or_else(|thrown| {
            tracing::error!(
                thrown,
                "llama.cpp threw an exception while encoding a batch"
            );
            THROWN
        });
        // SAFETY: the context is live. What the batch has left in the KV cache is not attended to by the next one.
        unsafe {
            sys::llama_synchronize(context);
            if let Some(memory) = self.memory {
                sys::llama_memory_clear(memory.as_ptr(), false);
            }
        }
        match code {
            0 => {}
            1 => return Err(DecodeError::Full),
            2 => return Err(DecodeError::Aborted),
            -1 => return Err(DecodeError::Invalid("llama.cpp refused the batch")),
            code => return Err(DecodeError::Broken(code)),
        }
        self.threads.observe(entries.len(), began.elapsed());
        for text in 0..texts.len() {
            let row = self.row(text).ok_or(DecodeError::Broken(0))?;
            rows.extend_from_slice(row);
        }
        Ok(())
    }

    /// The row of a text of the last batch, which succeeded.
    fn row(&self, text: usize) -> Option<&[f32]> {
        let sequence = i32::try_from(text).ok()?;
        // SAFETY: the context is live and not computing, and the call only reads.
        let row = unsafe { sys::llama_get_embeddings_seq(self.context.as_ptr(), sequence) };
        let row = NonNull::new(row)?;
        // SAFETY: with this pooling a row has so many floats, in a buffer that the context owns and does not touch before
        // its next call; `&self` is borrowed for as long.
        Some(unsafe { std::slice::from_raw_parts(row.as_ptr(), self.width) })
    }
}

impl Drop for EncoderContext {
    fn drop(&mut self) {
        // SAFETY: the only owner; model, flag and pool are dropped afterwards.
        unsafe { sys::llama_free(self.context.as_ptr()) };
    }
}

/// The parameters of a context of this size.
fn encoder_params(size: EncoderSize, options: &LlamaOptions) -> sys::llama_context_params {
    // SAFETY: a plain value is returned.
    let mut params = unsafe { sys::llama_context_default_params() };
    set_context_params(&mut params, options);
    #[cfg(test)]
    super::guard::set_throwing_graphs(&mut params);
    params.n_ctx = size.tokens;
    params.n_batch = size.tokens;
    params.n_ubatch = size.tokens;
    params.n_seq_max = size.texts;
    // Every token has an output before it is pooled. 0: as many as a batch has.
    params.n_outputs_max = 0;
    params.kv_unified = true;
    params.swa_full = true;
    params.embeddings = true;
    params.pooling_type = match size.pooling {
        Pooling::Mean => sys::LLAMA_POOLING_TYPE_MEAN,
        Pooling::Cls => sys::LLAMA_POOLING_TYPE_CLS,
        Pooling::Last => sys::LLAMA_POOLING_TYPE_LAST,
        Pooling::Rank => sys::LLAMA_POOLING_TYPE_RANK,
    };
    params.no_perf = true;
    params
}

thread_local! {
    /// The first error that llama.cpp has logged on this thread since it was last taken: its functions return only
    /// null.
    static LAST_ERROR: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn take_last_error() -> String {
    LAST_ERROR
        .with_borrow_mut(Option::take)
        .unwrap_or_else(|| "no reason given".to_owned())
}

/// Forwards llama.cpp's log. Its errors become warnings, because the caller reports their consequences; all else is
/// lowered.
unsafe extern "C" fn log(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml passes a NUL-terminated string that lives until this function returns.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let text = text.trim();
    if text.is_empty() || text == "." {
        return;
    }
    match level {
        sys::GGML_LOG_LEVEL_ERROR => {
            // No panic may cross into C, so a thread-local that is borrowed or destroyed is skipped.
            let _ = LAST_ERROR.try_with(|cell| {
                if let Ok(mut complaint) = cell.try_borrow_mut() {
                    complaint.get_or_insert_with(|| text.to_owned());
                }
            });
            tracing::warn!(target: "sapwood_engine::llama", "{text}");
        }
        // An option is of no use: because of a limit of the system, or the type that the key has.
        sys::GGML_LOG_LEVEL_WARN
            if ["failed to mlock", "Bad metadata override type"]
                .iter()
                .any(|part| text.contains(part)) =>
        {
            tracing::warn!(target: "sapwood_engine::llama", "{text}");
        }
        sys::GGML_LOG_LEVEL_WARN | sys::GGML_LOG_LEVEL_INFO => {
            tracing::debug!(target: "sapwood_engine::llama", "{text}");
        }
        _ => tracing::trace!(target: "sapwood_engine::llama", "{text}"),
    }
}
