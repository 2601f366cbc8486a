//! Safe wrappers of llama.cpp. With `guard.rs` the only module of this crate that contains `unsafe`.
//!
//! ```text
//!   LlamaBackend ──► LlamaModel (read only, shared) ──► LlamaContext, EncoderContext (one thread at a time)
//!                      │                                   ├── decode ──► output rows
//!                      └── vocabulary functions            └── ComputeThreads (ggml's worker threads)
//! ```
//!
//! Three arguments justify all `SAFETY` comments in these files:
//! * **Ownership.** [`LlamaModel`], [`LlamaContext`], [`EncoderContext`] and `ComputeThreads` each hold the only pointer that frees their
//!   object. A context keeps its model alive through an `Arc`, and is freed before its thread pool.
//! * **Threads.** After loading, a `llama_model` and its vocabulary are only read, and llama.cpp documents its
//!   tokenizer functions as thread-safe. A `llama_context` may move between threads but is never used by two at once:
//!   every method that touches it takes `&mut self`, or reads numbers that never change.
//! * **Ranges.** Slots, tokens, positions and row indices are compared with the numbers that llama.cpp itself reported.
//!
//! Exceptions that llama.cpp throws (out of memory in `decode`, for one) become errors in [`super::guard::guarded`].

mod batch;
mod context;
mod encoder;
mod model;

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::Once;

use llama_cpp_sys_2 as sys;

pub(super) use self::context::{
    CELLS_STEP, ContextSize, DecodeError, LlamaContext, SCORED_ROWS, SLOTS_MAX, ThreadLimits,
};
pub(super) use self::encoder::{EncoderContext, EncoderSize};
pub(super) use self::model::{LlamaModel, TokenAttributes};

/// Proof that llama.cpp is initialised and that its log is forwarded to `tracing`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LlamaBackend(());

impl LlamaBackend {
    /// Initialises llama.cpp, once per process. The caller has checked the CPU.
    pub(super) fn start() -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: neither takes borrowed data; `Once` excludes other threads while the global logger is set.
            unsafe {
                sys::llama_log_set(Some(log), ptr::null_mut());
                sys::llama_backend_init();
            }
        });
        Self(())
    }
}

/// Returns the x86 features for which ggml's kernels were compiled; may be called before llama.cpp is initialised.
pub(super) fn compiled_for() -> impl Iterator<Item = &'static str> {
    // SAFETY: these functions take nothing and return constants of the build.
    let features = unsafe {
        [
            ("AVX", sys::ggml_cpu_has_avx()),
            ("AVX2", sys::ggml_cpu_has_avx2()),
            ("BMI2", sys::ggml_cpu_has_bmi2()),
            ("F16C", sys::ggml_cpu_has_f16c()),
            ("FMA", sys::ggml_cpu_has_fma()),
            ("AVX512F", sys::ggml_cpu_has_avx512()),
        ]
    };
    features
        .into_iter()
        .filter(|&(_, compiled)| compiled != 0)
        .map(|(name, _)| name)
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
        sys::GGML_LOG_LEVEL_WARN | sys::GGML_LOG_LEVEL_INFO => {
            tracing::debug!(target: "sapwood_engine::llama", "{text}");
        }
        _ => tracing::trace!(target: "sapwood_engine::llama", "{text}"),
    }
}
