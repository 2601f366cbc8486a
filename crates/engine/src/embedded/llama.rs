//! Safe wrappers of llama.cpp. With `guard.rs` the only file of this crate that contains `unsafe`.
//!
//! ```text
//!   LlamaBackend ──► LlamaModel (read only, shared) ──► LlamaContext (one thread at a time)
//!                      │                                   ├── decode ──► output rows
//!                      └── vocabulary functions            └── ComputeThreads (ggml's worker threads)
//! ```
//!
//! Three arguments justify all `SAFETY` comments below:
//! * **Ownership.** [`LlamaModel`], [`LlamaContext`] and [`ComputeThreads`] each hold the only pointer that frees their
//!   object. A context keeps its model alive through an `Arc`, and is freed before its thread pool.
//! * **Threads.** After loading, a `llama_model` and its vocabulary are only read, and llama.cpp documents its
//!   tokenizer functions as thread-safe. A `llama_context` may move between threads but is never used by two at once:
//!   every method that touches it takes `&mut self`, or reads numbers that never change.
//! * **Ranges.** Slots, tokens, positions and row indices are compared with the numbers that llama.cpp itself reported.
//!
//! Exceptions that llama.cpp throws (out of memory in `decode`, for one) become errors in [`guarded`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Once};

use llama_cpp_sys_2 as sys;
use sapwood_proto::steer::Token;

use super::guard::{guarded, throwing};

use crate::model::{BatchEntry, DecodeSignals, Interrupt};
use crate::tokenizer_json::AddedToken;

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
    static COMPLAINT: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn take_complaint() -> String {
    COMPLAINT
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
            let _ = COMPLAINT.try_with(|cell| {
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

/// A loaded model: weights and vocabulary, read only.
#[derive(Debug)]
pub(super) struct LlamaModel {
    model: NonNull<sys::llama_model>,
    vocabulary: NonNull<sys::llama_vocab>,
    size: u32,
}

// SAFETY: see "Threads" above; nothing in a loaded model is bound to the thread that loaded it.
unsafe impl Send for LlamaModel {}
// SAFETY: see "Threads" above: shared use is reading.
unsafe impl Sync for LlamaModel {}

/// The properties of a model, as llama.cpp reports them.
#[derive(Clone, Debug)]
pub(super) struct LlamaFacts {
    pub(super) description: String,
    pub(super) parameters: u64,
    pub(super) weight_bytes: u64,
    /// Its state is recurrent, not a list of KV cells, so it cannot be truncated.
    pub(super) recurrent: bool,
    /// It predicts the next token of a prefix; no other kind of model can be served.
    pub(super) generates: bool,
    pub(super) sliding_window: u32,
}

/// The attributes of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenAttributes {
    pub(super) control: bool,
    pub(super) end: bool,
}

impl LlamaModel {
    /// Loads a file. `progress` is called with fractions from 0 to 1 on this thread, and stops the loading by returning
    /// false; a panic in it ends the process.
    ///
    /// # Errors
    /// The error that llama.cpp logged.
    pub(super) fn load(
        _: LlamaBackend,
        path: &Path,
        gpu_layers: u32,
        mmap: bool,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Self, String> {
        let path = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| "the path contains a NUL byte".to_owned())?;
        let mut progress = progress;
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.n_gpu_layers = i32::try_from(gpu_layers).unwrap_or(i32::MAX);
        params.load_mode = if mmap {
            sys::LLAMA_LOAD_MODE_MMAP
        } else {
            sys::LLAMA_LOAD_MODE_NONE
        };
        params.progress_callback = Some(on_progress);
        params.progress_callback_user_data = (&raw mut progress).cast();
        let _ = COMPLAINT.take();
        // SAFETY: the path is NUL-terminated, and `progress` outlives the call, which is the last to use its address.
        let load = || unsafe { throwing::llama_model_load_from_file(path.as_ptr(), params) };
        let model = guarded(load)?;
        let model = NonNull::new(model).ok_or_else(take_complaint)?;
        // SAFETY: the model is live; its vocabulary lives as long as it does.
        let vocabulary = unsafe { sys::llama_model_get_vocab(model.as_ptr()) };
        let Some(vocabulary) = NonNull::new(vocabulary.cast_mut()) else {
            // SAFETY: the model is live and this is its only owner.
            unsafe { sys::llama_model_free(model.as_ptr()) };
            return Err("the model has no vocabulary".to_owned());
        };
        // From here on `Drop` frees the model.
        let mut this = Self {
            model,
            vocabulary,
            size: 0,
        };
        // SAFETY: the vocabulary is live. A model without a tokenizer (type NONE) would abort in its functions.
        let size = unsafe {
            if sys::llama_vocab_type(vocabulary.as_ptr()) == sys::LLAMA_VOCAB_TYPE_NONE {
                return Err("the model has no tokenizer".to_owned());
            }
            sys::llama_vocab_n_tokens(vocabulary.as_ptr())
        };
        this.size = u32::try_from(size).unwrap_or(0);
        if this.size == 0 {
            Err("the vocabulary is empty".to_owned())
        } else {
            Ok(this)
        }
    }

    /// Returns its properties.
    pub(super) fn facts(&self) -> LlamaFacts {
        let model = self.model.as_ptr();
        let mut description = [0_u8; 256];
        // SAFETY: the model is live, the buffer has the length passed, and all of these only read.
        unsafe {
            sys::llama_model_desc(model, description.as_mut_ptr().cast(), description.len());
            LlamaFacts {
                description: CStr::from_bytes_until_nul(&description)
                    .map(|text| text.to_string_lossy().into_owned())
                    .unwrap_or_default(),
                parameters: sys::llama_model_n_params(model),
                weight_bytes: sys::llama_model_size(model),
                recurrent: sys::llama_model_is_recurrent(model)
                    || sys::llama_model_is_hybrid(model),
                generates: sys::llama_model_has_decoder(model)
                    && !sys::llama_model_has_encoder(model)
                    && !sys::llama_model_is_diffusion(model),
                sliding_window: u32::try_from(sys::llama_model_n_swa(model)).unwrap_or(0),
            }
        }
    }

    /// Returns the chat template in its metadata.
    pub(super) fn chat_template(&self) -> Option<String> {
        // SAFETY: the model is live; a null name asks for the default template.
        let text = unsafe { sys::llama_model_chat_template(self.model.as_ptr(), ptr::null()) };
        if text.is_null() {
            return None;
        }
        // SAFETY: a non-null answer is a NUL-terminated string owned by the model, copied here at once.
        Some(
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned(),
        )
    }

    /// Returns the number of tokens in the vocabulary; more than 0.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Returns whether the vocabulary is byte-pair (BPE), which splits texts before it merges pairs.
    pub(super) fn is_byte_pair(&self) -> bool {
        // SAFETY: the vocabulary is live.
        unsafe { sys::llama_vocab_type(self.vocabulary.as_ptr()) == sys::LLAMA_VOCAB_TYPE_BPE }
    }

    fn id(&self, token: Token) -> Option<sys::llama_token> {
        (token < self.size)
            .then(|| i32::try_from(token).ok())
            .flatten()
    }

    fn named(&self, token: sys::llama_token) -> Option<Token> {
        u32::try_from(token).ok().filter(|&token| token < self.size)
    }

    /// Returns the attributes of a token; ids outside the vocabulary have none.
    pub(super) fn kind(&self, token: Token) -> TokenAttributes {
        let Some(id) = self.id(token) else {
            return TokenAttributes {
                control: false,
                end: false,
            };
        };
        let vocabulary = self.vocabulary.as_ptr();
        // SAFETY: the vocabulary is live and the id is in it.
        let (attributes, end) = unsafe {
            (
                sys::llama_vocab_get_attr(vocabulary, id),
                sys::llama_vocab_is_eog(vocabulary, id),
            )
        };
        let control = sys::LLAMA_TOKEN_ATTR_CONTROL | sys::LLAMA_TOKEN_ATTR_UNKNOWN;
        TokenAttributes {
            control: attributes & control != 0,
            end,
        }
    }

    /// Returns the text of a token as the model's file has it.
    pub(super) fn text(&self, token: Token) -> String {
        let Some(id) = self.id(token) else {
            return String::new();
        };
        // SAFETY: the vocabulary is live and the id is in it; the result is a NUL-terminated string that it owns,
        // copied at once.
        let text =
            unsafe { CStr::from_ptr(sys::llama_vocab_get_text(self.vocabulary.as_ptr(), id)) };
        text.to_string_lossy().into_owned()
    }

    /// Returns how a token is found in a text before the text is split, if it is.
    pub(super) fn found(&self, token: Token) -> Option<AddedToken> {
        let id = self.id(token)?;
        // SAFETY: the vocabulary is live and the id is in it.
        let attributes = unsafe { sys::llama_vocab_get_attr(self.vocabulary.as_ptr(), id) };
        let is = |attribute| attributes & attribute != 0;
        let control = is(sys::LLAMA_TOKEN_ATTR_CONTROL) || is(sys::LLAMA_TOKEN_ATTR_UNKNOWN);
        let found = control || is(sys::LLAMA_TOKEN_ATTR_USER_DEFINED);
        found.then(|| AddedToken {
            token,
            control,
            takes_left: is(sys::LLAMA_TOKEN_ATTR_LSTRIP),
            takes_right: is(sys::LLAMA_TOKEN_ATTR_RSTRIP),
        })
    }

    /// Returns whether the model wants a BOS token before raw text; and the BOS token itself, for templates.
    pub(super) fn bos(&self) -> (bool, Option<Token>) {
        let vocabulary = self.vocabulary.as_ptr();
        // SAFETY: the vocabulary is live; both only read.
        let (wanted, token) = unsafe {
            (
                sys::llama_vocab_get_add_bos(vocabulary),
                sys::llama_vocab_bos(vocabulary),
            )
        };
        (wanted, self.named(token))
    }

    /// Returns the EOS token.
    pub(super) fn end(&self) -> Option<Token> {
        // SAFETY: the vocabulary is live.
        self.named(unsafe { sys::llama_vocab_eos(self.vocabulary.as_ptr()) })
    }

    /// Returns the EOT token, which ends a turn.
    pub(super) fn end_of_turn(&self) -> Option<Token> {
        // SAFETY: the vocabulary is live.
        self.named(unsafe { sys::llama_vocab_eot(self.vocabulary.as_ptr()) })
    }

    /// Returns the bytes of a token; with `special`, also those of control tokens.
    pub(super) fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        let Some(id) = self.id(token) else {
            return Vec::new();
        };
        let mut bytes = vec![0_u8; 64];
        loop {
            let room = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
            let (vocabulary, buffer) = (self.vocabulary.as_ptr(), bytes.as_mut_ptr().cast());
            // SAFETY: the vocabulary is live, the id is in it, and `room` is not more than the buffer.
            let written = guarded(|| unsafe {
                throwing::llama_token_to_piece(vocabulary, id, buffer, room, 0, special)
            });
            // A token that cannot be converted has no text.
            let Ok(written) = written else {
                return Vec::new();
            };
            // A negative result is the size that the buffer needs.
            let needed = written.unsigned_abs() as usize;
            let fits = written >= 0;
            bytes.resize(needed, 0);
            if fits {
                return bytes;
            }
        }
    }

    /// Tokenises a text, without adding BOS or EOS. With `special`, control tokens' texts become those tokens.
    ///
    /// A text above 256 MiB gives no tokens: it fits in no context, and llama.cpp counts in 32 bits. In a vocabulary
    /// without tokens for single bytes, text that has no token is dropped: for some kinds of vocabularies llama.cpp
    /// throws there, and for the others it drops the text itself.
    pub(super) fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        let why = match self.try_tokenize(text, special) {
            Ok(tokens) => return tokens,
            Err(why) => why,
        };
        tracing::debug!(why, "a text has characters without tokens");
        let mut known: HashMap<char, bool> = HashMap::new();
        let mut has_token = |letter: char| {
            *known.entry(letter).or_insert_with(|| {
                let alone = letter.encode_utf8(&mut [0; 4]).to_owned();
                self.try_tokenize(&alone, false).is_ok()
            })
        };
        let rest: String = text.chars().filter(|letter| has_token(*letter)).collect();
        self.try_tokenize(&rest, special).unwrap_or_default()
    }

    fn try_tokenize(&self, text: &str, special: bool) -> Result<Vec<Token>, String> {
        const BYTES_MAX: usize = 256 << 20;
        if text.is_empty() || text.len() > BYTES_MAX {
            return Ok(Vec::new());
        }
        // Never more tokens than bytes, except for a space that some vocabularies add before the text.
        let mut tokens = vec![0 as sys::llama_token; text.len() + 8];
        loop {
            // Cannot truncate: both are below 2^29.
            let (length, room) = (text.len() as i32, tokens.len() as i32);
            let (from, to) = (text.as_ptr().cast(), tokens.as_mut_ptr());
            let vocabulary = self.vocabulary.as_ptr();
            // SAFETY: the vocabulary is live, and both lengths are those of the buffers.
            let count = guarded(|| unsafe {
                throwing::llama_tokenize(vocabulary, from, length, to, room, false, special)
            })?;
            let Ok(count) = usize::try_from(count) else {
                let needed = count.unsigned_abs() as usize;
                if needed <= tokens.len() || needed > 2 * BYTES_MAX {
                    return Ok(Vec::new());
                }
                tokens.resize(needed, 0);
                continue;
            };
            tokens.truncate(count);
            return Ok(tokens
                .into_iter()
                .filter_map(|token| self.named(token))
                .collect());
        }
    }
}

impl Drop for LlamaModel {
    fn drop(&mut self) {
        // SAFETY: this is the only owner, and no context is left: each holds an `Arc` of it.
        unsafe { sys::llama_model_free(self.model.as_ptr()) };
    }
}

unsafe extern "C" fn on_progress(fraction: f32, data: *mut c_void) -> bool {
    // SAFETY: `LlamaModel::load` passes the address of its `&mut dyn FnMut`, which lives until the loading returns.
    let progress = unsafe { &mut *data.cast::<&mut dyn FnMut(f32) -> bool>() };
    progress(fraction)
}

/// The result of a decode call that threw an exception; distinct from llama.cpp's own codes.
const THROWN: i32 = i32::MIN;

/// ggml's worker threads for one context.
#[derive(Debug)]
struct ComputeThreads(NonNull<sys::ggml_threadpool>);

impl ComputeThreads {
    fn new(threads: u32, poll: u32) -> Option<Self> {
        // More threads would overrun ggml's fixed CPU mask.
        let threads = i32::try_from(threads.clamp(1, THREADS_MAX)).ok()?;
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::ggml_threadpool_params_default(threads) };
        params.poll = poll.min(100);
        // SAFETY: the parameters are copied; the pool is freed by `Drop`.
        NonNull::new(unsafe { sys::ggml_threadpool_new(&raw mut params) }).map(Self)
    }
}

impl Drop for ComputeThreads {
    fn drop(&mut self) {
        // SAFETY: the only owner; the context that used it was freed before.
        unsafe { sys::ggml_threadpool_free(self.0.as_ptr()) };
    }
}

/// The maximum of threads of one decode call.
pub(super) const THREADS_MAX: u32 = 256;

/// The number of KV cells, or of those of each slot with a per-slot KV cache, is a multiple of this.
pub(super) const CELLS_STEP: u32 = 256;

/// The maximum of slots (sequences) of llama.cpp.
pub(super) const SLOTS_MAX: u32 = 256;

/// Output rows of a batch for scored tokens, in addition to one for each slot.
pub(super) const SCORED_ROWS: u32 = 64;

/// The size of a context.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContextSize {
    /// KV cells of all slots together.
    pub(super) cells: u32,
    /// Per-slot KV: each slot has an equal part of the cells to itself. Otherwise unified KV: all slots share all
    /// cells.
    pub(super) per_slot: bool,
    pub(super) batch_tokens: u32,
    pub(super) slots: u32,
    pub(super) threads: u32,
    /// How long idle worker threads spin before they sleep, 0 to 100.
    pub(super) poll: u32,
}

/// Why a batch was not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecodeError {
    /// No room in the KV cache; nothing changed.
    Full,
    /// The interrupt was seen.
    Aborted,
    /// An argument is out of range: a defect of the caller. Nothing was computed.
    Invalid(&'static str),
    /// llama.cpp failed, with its code.
    Broken(i32),
}

/// A KV cache, and the llama.cpp context that computes in it.
///
/// With a unified KV cache, one batch is one ubatch (physical and logical batch size are equal). With a per-slot KV
/// cache, it is one ubatch for each run of neighbouring slots with the same number of tokens. Either way a batch that
/// fails leaves every slot of a model that can be truncated as it was.
#[derive(Debug)]
pub(super) struct LlamaContext {
    context: NonNull<sys::llama_context>,
    memory: NonNull<sys::llama_memory_i>,
    /// Number of tokens in each slot.
    cells_held: Vec<u32>,
    /// The number of the last batch that had entries of each slot.
    named: Vec<u64>,
    batches: u64,
    cells: u32,
    /// KV cells of each slot, with a per-slot KV cache.
    own: Option<u32>,
    batch_tokens: u32,
    rows: u32,
    batch: LlamaBatch,
    interrupt: Interrupt,
    /// Tokens that a sliding-window layer attends to; 0 if every layer attends to all.
    window: u32,
    /// Its state is recurrent, not a list of KV cells.
    recurrent: bool,
    model: Arc<LlamaModel>,
    /// Declared last: dropped after the context that uses it.
    _pool: ComputeThreads,
}

// SAFETY: see "Threads" above. The batch's pointers are filled and used within one call.
unsafe impl Send for LlamaContext {}

impl LlamaContext {
    /// Creates a context. Must be called before the model is shared: llama.cpp may still modify the model here.
    ///
    /// # Errors
    /// The error that llama.cpp logged.
    pub(super) fn new(model: Arc<LlamaModel>, size: ContextSize) -> Result<Self, String> {
        let slots = size.slots.clamp(1, SLOTS_MAX);
        // llama.cpp asserts that a batch has room for one row per slot, and pads the number of cells itself.
        let batch_tokens = size.batch_tokens.max(slots);
        let cells = size.cells.max(batch_tokens).next_multiple_of(CELLS_STEP);
        let threads = size.threads.clamp(1, THREADS_MAX);
        let pool =
            ComputeThreads::new(threads, size.poll).ok_or("ggml could not start its threads")?;
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::llama_context_default_params() };
        params.n_ctx = cells;
        params.n_batch = batch_tokens;
        params.n_ubatch = batch_tokens;
        params.n_seq_max = slots;
        // One output row per slot, and some for slots with several scored tokens.
        let rows = slots.saturating_add(SCORED_ROWS).min(batch_tokens);
        params.n_outputs_max = rows;
        params.n_outputs_max_per_seq = rows;
        params.n_threads = threads.cast_signed();
        params.n_threads_batch = threads.cast_signed();
        // With a unified KV cache a fork copies nothing, but every token attends over all cells.
        params.kv_unified = !size.per_slot;
        // Allocates as many cells for sliding-window layers as for the others, so that most prefixes of such models can
        // be truncated and forked too. It is no guarantee: llama.cpp reuses cells that have left their sequence's
        // window, hence `can_resume`.
        params.swa_full = true;
        params.no_perf = true;
        let _ = COMPLAINT.take();
        // SAFETY: the model is live and stays so through the `Arc`; the parameters hold no pointers of ours.
        let init = || unsafe { throwing::llama_init_from_model(model.model.as_ptr(), params) };
        let context = guarded(init)?;
        let context = NonNull::new(context).ok_or_else(take_complaint)?;
        let interrupt = Interrupt::default();
        // SAFETY: the context is live; the flag and the pool live as long as it does (fields of the same value).
        let (memory, cells, own, batch_tokens) = unsafe {
            let raw = context.as_ptr();
            sys::llama_attach_threadpool(raw, pool.0.as_ptr(), pool.0.as_ptr());
            sys::llama_set_abort_callback(
                raw,
                Some(on_poll),
                Arc::as_ptr(&interrupt).cast_mut().cast(),
            );
            (
                sys::llama_get_memory(raw),
                sys::llama_n_ctx(raw),
                sys::llama_n_ctx_seq(raw),
                sys::llama_n_batch(raw),
            )
        };
        let Some(memory) = NonNull::new(memory) else {
            // SAFETY: the only owner frees it, before the pool.
            unsafe { sys::llama_free(context.as_ptr()) };
            return Err("the model keeps no state between tokens".to_owned());
        };
        let batch = LlamaBatch::new(batch_tokens as usize);
        let (retained, named) = (vec![0; slots as usize], vec![0; slots as usize]);
        let batches = 0;
        let facts = model.facts();
        Ok(Self {
            context,
            memory,
            cells_held: retained,
            named,
            batches,
            cells,
            own: size.per_slot.then_some(own),
            batch_tokens,
            rows,
            batch,
            interrupt,
            window: facts.sliding_window,
            recurrent: facts.recurrent,
            model,
            _pool: pool,
        })
    }

    /// Returns the number of KV cells.
    pub(super) fn cells(&self) -> u32 {
        self.cells
    }

    /// Returns the number of KV cells of each slot, with a per-slot KV cache.
    #[cfg(test)]
    pub(super) fn own(&self) -> Option<u32> {
        self.own
    }

    /// Returns the maximum of entries of a batch.
    pub(super) fn batch_tokens(&self) -> u32 {
        self.batch_tokens
    }

    /// Returns the maximum of output rows of a batch.
    pub(super) fn rows(&self) -> u32 {
        self.rows
    }

    /// Returns the number of slots.
    pub(super) fn slots(&self) -> u32 {
        self.cells_held.len() as u32
    }

    /// Sets the flag that aborts a running decode call; it is polled between the nodes of the graph.
    pub(super) fn set_interrupt(&mut self, flag: Interrupt) {
        // SAFETY: the context is live and not computing. The old flag is dropped only after the new one is in place.
        unsafe {
            let data = Arc::as_ptr(&flag).cast_mut().cast();
            sys::llama_set_abort_callback(self.context.as_ptr(), Some(on_poll), data);
        }
        self.interrupt = flag;
    }

    /// Decodes a batch. After an error other than [`DecodeError::Broken`] the slots of a model that can be truncated
    /// are unchanged.
    pub(super) fn decode(&mut self, entries: &[BatchEntry]) -> Result<(), DecodeError> {
        self.batch.clear();
        self.check(entries)?;
        self.batch.fill(entries);
        let (context, batch) = (self.context.as_ptr(), self.batch.raw());
        // SAFETY: `check` has compared every number with the context's limits; the batch's arrays are as long as it
        // says and live during the call, which copies them.
        let decode = || unsafe { throwing::llama_decode(context, batch) };
        let code = guarded(decode).unwrap_or_else(|thrown| {
            tracing::error!(thrown, "llama.cpp failed within a pass");
            THROWN
        });
        if code == 0 {
            for entry in entries {
                self.cells_held[entry.slot as usize] += 1;
            }
            return Ok(());
        }
        self.batch.clear();
        self.take_back(entries);
        Err(match code {
            1 => DecodeError::Full,
            2 => DecodeError::Aborted,
            -1 => DecodeError::Invalid("llama.cpp refused the batch"),
            code => DecodeError::Broken(code),
        })
    }

    /// Rolls back the slots of a failed batch: ubatches before the failed one have added tokens to them.
    fn take_back(&mut self, entries: &[BatchEntry]) {
        if self.own.is_none() {
            return;
        }
        for entry in entries {
            let retained = self.cells_held[entry.slot as usize].cast_signed();
            // SAFETY: the memory lives with its context, and `check` has found the slot in range.
            unsafe {
                let memory = self.memory.as_ptr();
                sys::llama_memory_seq_rm(memory, entry.slot.cast_signed(), retained, -1);
            }
        }
    }

    fn check(&mut self, entries: &[BatchEntry]) -> Result<(), DecodeError> {
        self.batches += 1;
        if entries.is_empty() || entries.len() > self.batch_tokens as usize {
            return Err(DecodeError::Invalid("a batch is empty or too large"));
        }
        let (mut rows, reach) = (0, self.own.unwrap_or(self.cells));
        for (index, entry) in entries.iter().enumerate() {
            let Some(&retained) = self.cells_held.get(entry.slot as usize) else {
                return Err(DecodeError::Invalid("a slot is out of range"));
            };
            if self.model.id(entry.token).is_none() {
                return Err(DecodeError::Invalid("a token is outside the vocabulary"));
            }
            let expected = match index.checked_sub(1).map(|before| entries[before]) {
                Some(before) if before.slot == entry.slot => before.position + 1,
                _ if self.named[entry.slot as usize] == self.batches => {
                    return Err(DecodeError::Invalid("the entries of a slot are apart"));
                }
                _ => retained,
            };
            self.named[entry.slot as usize] = self.batches;
            if entry.position != expected || entry.position >= reach {
                return Err(DecodeError::Invalid(
                    "a position does not follow its slot's last",
                ));
            }
            rows += usize::from(entry.row);
        }
        if rows > self.rows as usize {
            Err(DecodeError::Invalid("more rows than there is room for"))
        } else {
            Ok(())
        }
    }

    /// Returns the logits after the entry at `index` of the last batch, if that batch succeeded and the entry requested
    /// an output row. The caller may overwrite them: the next batch writes them anew.
    pub(super) fn row(&mut self, index: usize) -> Option<&mut [f32]> {
        let index = self.batch.wanted(index)?;
        // SAFETY: the last decode succeeded and its batch wanted a row at this index.
        let row = unsafe { sys::llama_get_logits_ith(self.context.as_ptr(), index) };
        let row = NonNull::new(row)?;
        // SAFETY: a row has one float per token of the vocabulary, in a buffer that the context owns and does not touch
        // before its next call; `&mut self` is borrowed for as long.
        Some(unsafe { std::slice::from_raw_parts_mut(row.as_ptr(), self.model.size as usize) })
    }

    /// Copies the first `tokens` tokens of `from` into the empty slot `to`.
    pub(super) fn fork(&mut self, from: u32, to: u32, tokens: u32) -> Result<(), DecodeError> {
        let (Some(&source), Some(&target)) = (
            self.cells_held.get(from as usize),
            self.cells_held.get(to as usize),
        ) else {
            return Err(DecodeError::Invalid("a slot is out of range"));
        };
        if from == to || target != 0 || tokens > source {
            return Err(DecodeError::Invalid(
                "a fork wants an empty slot and no more than its source holds",
            ));
        }
        if tokens == 0 {
            return Ok(());
        }
        // A whole copy is requested as such, because recurrent models support only that, and so does a per-slot KV
        // cache.
        let whole = tokens == source || self.own.is_some();
        let until = if whole { -1 } else { tokens.cast_signed() };
        // SAFETY: the memory lives with its context, and both slots are in range.
        unsafe {
            let memory = self.memory.as_ptr();
            sys::llama_memory_seq_cp(memory, from.cast_signed(), to.cast_signed(), -1, until);
        }
        self.cells_held[to as usize] = if whole { source } else { tokens };
        if self.truncate(to, tokens) {
            Ok(())
        } else {
            Err(DecodeError::Invalid(
                "a model that cannot be cut back was to be",
            ))
        }
    }

    /// Returns whether a slot truncated to its first `tokens` tokens holds every position that the token after them
    /// attends to (D-48).
    pub(super) fn can_resume(&self, slot: u32, tokens: u32) -> bool {
        let Some(&retained) = self.cells_held.get(slot as usize) else {
            return false;
        };
        if tokens == 0 || tokens >= retained {
            // Nothing is attended to, or nothing is truncated: llama.cpp retains the window at the end of a sequence
            // itself.
            return tokens <= retained;
        }
        if self.recurrent || self.window == 0 {
            return !self.recurrent;
        }
        // SAFETY: the memory lives with its context, and the slot is in range; the call only reads.
        let oldest =
            unsafe { sys::llama_memory_seq_pos_min(self.memory.as_ptr(), slot.cast_signed()) };
        // The token at position `tokens` attends to itself and the `window - 1` before it; layers that attend to chunks
        // or to half of the window on either side attend to fewer.
        let first = (tokens + 1).saturating_sub(self.window);
        u32::try_from(oldest).is_ok_and(|oldest| oldest <= first)
    }

    /// Truncates a slot to its first `tokens` tokens; returns false if this model cannot.
    pub(super) fn truncate(&mut self, slot: u32, tokens: u32) -> bool {
        let Some(retained) = self.cells_held.get_mut(slot as usize) else {
            return false;
        };
        if tokens >= *retained {
            return tokens == *retained;
        }
        // Removing everything never fails, even on models where removing a part does.
        let from = if tokens == 0 {
            -1
        } else {
            tokens.cast_signed()
        };
        // SAFETY: the memory lives with its context, and the slot is in range.
        let done =
            unsafe { sys::llama_memory_seq_rm(self.memory.as_ptr(), slot.cast_signed(), from, -1) };
        if done {
            *retained = tokens;
        }
        done
    }

    /// Empties a slot, whatever state llama.cpp left there after a failure.
    pub(super) fn clear(&mut self, slot: u32) {
        if let Some(retained) = self.cells_held.get_mut(slot as usize) {
            *retained = 0;
            // SAFETY: as in `truncate`.
            unsafe { sys::llama_memory_seq_rm(self.memory.as_ptr(), slot.cast_signed(), -1, -1) };
        }
    }

    /// Returns the number of tokens in a slot.
    pub(super) fn cells_held(&self, slot: u32) -> u32 {
        self.cells_held.get(slot as usize).copied().unwrap_or(0)
    }
}

impl Drop for LlamaContext {
    fn drop(&mut self) {
        // SAFETY: the only owner; model, flag and pool are dropped afterwards.
        unsafe { sys::llama_free(self.context.as_ptr()) };
    }
}

/// Called by ggml's first thread before each node of the graph; returns true to abort.
unsafe extern "C" fn on_poll(data: *mut c_void) -> bool {
    // SAFETY: the address of the context's `DecodeSignals`, which its `Arc` keeps alive.
    unsafe { &*data.cast::<DecodeSignals>() }.pulse()
}

/// The arrays of a `llama_batch`, reused for every batch; sorted by slot, because each slot's cells are adjacent.
#[derive(Debug)]
struct LlamaBatch {
    /// The indices of the entries, sorted by slot.
    order: Vec<usize>,
    /// The position of each entry in that order.
    ranks: Vec<i32>,
    tokens: Vec<sys::llama_token>,
    positions: Vec<sys::llama_pos>,
    slots: Vec<sys::llama_seq_id>,
    counts: Vec<i32>,
    lists: Vec<*mut sys::llama_seq_id>,
    rows: Vec<i8>,
}

impl LlamaBatch {
    fn new(room: usize) -> Self {
        Self {
            order: Vec::with_capacity(room),
            ranks: vec![0; room],
            tokens: Vec::with_capacity(room),
            positions: Vec::with_capacity(room),
            slots: Vec::with_capacity(room),
            counts: vec![1; room],
            lists: Vec::with_capacity(room),
            rows: Vec::with_capacity(room),
        }
    }

    fn clear(&mut self) {
        self.order.clear();
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.lists.clear();
        self.rows.clear();
    }

    fn fill(&mut self, entries: &[BatchEntry]) {
        self.order.extend(0..entries.len());
        // Entries of one slot stay in their order.
        self.order.sort_by_key(|&index| entries[index].slot);
        for (location, &index) in (0..).zip(&self.order) {
            let entry = entries[index];
            self.ranks[index] = location;
            self.tokens.push(entry.token.cast_signed());
            self.positions.push(entry.position.cast_signed());
            self.slots.push(entry.slot.cast_signed());
            self.rows.push(i8::from(entry.row));
        }
        // Each token belongs to one slot: a list of length one, in place. Built last, because pushing to `slots` may
        // move it.
        self.lists
            .extend(self.slots.iter_mut().map(|slot| &raw mut *slot));
    }

    /// Returns the position of an entry in the batch, if it requested an output row.
    fn wanted(&self, index: usize) -> Option<i32> {
        let position = *self.ranks.get(..self.order.len())?.get(index)?;
        let row = *self.rows.get(usize::try_from(position).ok()?)?;
        (row != 0).then_some(position)
    }

    fn raw(&mut self) -> sys::llama_batch {
        sys::llama_batch {
            n_tokens: self.tokens.len() as i32,
            token: self.tokens.as_mut_ptr(),
            embd: ptr::null_mut(),
            pos: self.positions.as_mut_ptr(),
            n_seq_id: self.counts.as_mut_ptr(),
            seq_id: self.lists.as_mut_ptr(),
            logits: self.rows.as_mut_ptr(),
        }
    }
}
