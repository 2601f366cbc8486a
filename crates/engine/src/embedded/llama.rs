//! Safe wrappers of llama.cpp. With `guard.rs` the only file of this crate that contains `unsafe`.
//!
//! ```text
//!   Backend ──► Model (read only, shared) ──► Context (one thread at a time) ──► decode ──► rows
//!                 └── vocabulary functions          └── Pool (ggml's worker threads)
//! ```
//!
//! Three arguments carry all `SAFETY` comments below:
//! * **Ownership.** [`LlamaModel`], [`LlamaContext`] and [`ComputeThreads`] each hold the only pointer that frees their object. A context
//!   keeps its model alive through an `Arc`, and is freed before its pool.
//! * **Threads.** After loading, a `llama_model` and its vocabulary are only read, and llama.cpp documents its tokenizer
//!   functions as thread-safe. A `llama_context` may move between threads but is never used by two at once: every
//!   method that touches it takes `&mut self`, or reads numbers that never change.
//! * **Ranges.** Slots, tokens, positions and row indices are compared with the numbers that llama.cpp itself reported.
//!
//! What llama.cpp throws (out of memory in `decode`, say) ends in [`guarded`], as an error.

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

/// Proof that llama.cpp is initialised and that its log goes to `tracing`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LlamaBackend(());

impl LlamaBackend {
    /// Initialises llama.cpp, once per process. The caller has checked the CPU.
    pub(super) fn start() -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: both take no borrowed data; `Once` keeps other threads out while the global logger is set.
            unsafe {
                sys::llama_log_set(Some(log), ptr::null_mut());
                sys::llama_backend_init();
            }
        });
        Self(())
    }
}

/// The x86 features for which ggml's kernels were compiled; may be asked before anything else is.
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
    /// The first error that llama.cpp logged on this thread since it was last taken: its functions return only null.
    static COMPLAINT: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn take_complaint() -> String {
    COMPLAINT
        .with_borrow_mut(Option::take)
        .unwrap_or_else(|| "no reason given".to_owned())
}

/// llama.cpp talks much; only its errors are worth a warning, since their consequences are reported by us.
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
            // No panic may reach C: a busy or dead cell is passed over.
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

/// What a model is, as llama.cpp reports it.
#[derive(Clone, Debug)]
pub(super) struct LlamaFacts {
    pub(super) description: String,
    pub(super) parameters: u64,
    pub(super) weight_bytes: u64,
    /// Its state is not a list of cells, so it cannot be cut back.
    pub(super) recurrent: bool,
    /// It turns a prefix into a next token, which is all we can serve.
    pub(super) generates: bool,
    pub(super) sliding_window: u32,
}

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenAttributes {
    pub(super) control: bool,
    pub(super) end: bool,
}

impl LlamaModel {
    /// Loads a file. `progress` is called with fractions from 0 to 1 on this thread, and stops the loading by returning false;
    /// a panic in it ends the process.
    ///
    /// # Errors
    /// What llama.cpp logged.
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

    /// What it is.
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

    /// The chat template in its metadata.
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

    /// Tokens in the vocabulary; more than 0.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Whether texts are split before byte pairs are merged.
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

    /// What a token is; ids outside the vocabulary are nothing special.
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

    /// The text of a token as the model's file has it.
    pub(super) fn text(&self, token: Token) -> String {
        let Some(id) = self.id(token) else {
            return String::new();
        };
        // SAFETY: the vocabulary is live and the id is in it; the answer is a NUL-terminated string that it owns, copied at
        // once.
        let text =
            unsafe { CStr::from_ptr(sys::llama_vocab_get_text(self.vocabulary.as_ptr(), id)) };
        text.to_string_lossy().into_owned()
    }

    /// How a token is found in a text before anything is split, if it is.
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

    /// The token before raw text, if the model wants one there; and the one itself, for templates.
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

    /// The token that ends a text.
    pub(super) fn end(&self) -> Option<Token> {
        // SAFETY: the vocabulary is live.
        self.named(unsafe { sys::llama_vocab_eos(self.vocabulary.as_ptr()) })
    }

    /// The token that ends a turn.
    pub(super) fn end_of_turn(&self) -> Option<Token> {
        // SAFETY: the vocabulary is live.
        self.named(unsafe { sys::llama_vocab_eot(self.vocabulary.as_ptr()) })
    }

    /// The bytes of a token; with `special`, also those of control tokens.
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
            // A token that cannot be written has no text.
            let Ok(written) = written else {
                return Vec::new();
            };
            // A negative answer is the room that was missing altogether.
            let needed = written.unsigned_abs() as usize;
            let fits = written >= 0;
            bytes.resize(needed, 0);
            if fits {
                return bytes;
            }
        }
    }

    /// The tokens of a text, without any added at its ends. With `special`, control tokens' texts become those tokens.
    ///
    /// A text above 256 MiB gives none: no context holds it, and llama.cpp counts in 32 bits.
    /// What has no token, in a vocabulary without tokens for single bytes, is left out: llama.cpp throws there for some kinds of
    /// vocabularies, and leaves it out for the others.
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
        // Never more tokens than bytes, but for a space that some vocabularies put before the text.
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

/// What stands for a pass that has thrown, beside llama.cpp's own codes.
const THROWN: i32 = i32::MIN;

/// ggml's worker threads for one context.
#[derive(Debug)]
struct ComputeThreads(NonNull<sys::ggml_threadpool>);

impl ComputeThreads {
    fn new(threads: u32, poll: u32) -> Option<Self> {
        // More would overrun the fixed mask of CPUs.
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

/// Most threads that one pass may use.
pub(super) const THREADS_MAX: u32 = 256;

/// The cells of a cache, or of each slot that has its own, are a multiple of this.
pub(super) const CELLS_STEP: u32 = 256;

/// Most slots that llama.cpp keeps apart.
pub(super) const SLOTS_MAX: u32 = 256;

/// Rows of a batch beside one for each slot, for tokens that are scored.
pub(super) const SCORED_ROWS: u32 = 64;

/// The size of a context.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContextSize {
    /// Tokens of all slots together.
    pub(super) cells: u32,
    /// Whether each slot has an equal part of the cells to itself, rather than all sharing all.
    pub(super) per_slot: bool,
    pub(super) batch_tokens: u32,
    pub(super) slots: u32,
    pub(super) threads: u32,
    /// How long workers spin before they sleep, 0 to 100.
    pub(super) poll: u32,
}

/// Why a batch was not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecodeError {
    /// No room in the cache; nothing changed.
    Full,
    /// The interrupt was seen.
    Aborted,
    /// An argument is out of range: a defect of the caller. Nothing was computed.
    Invalid(&'static str),
    /// llama.cpp failed, with its code.
    Broken(i32),
}

/// A cache of cells and what computes in it.
///
/// Where slots share their cells, one batch is one pass (physical and logical batch size are equal). Where they are apart,
/// it is a pass for each run of neighbouring slots with as many tokens each. Either way a batch that fails leaves every slot
/// of a model that can be cut back as it was.
#[derive(Debug)]
pub(super) struct LlamaContext {
    context: NonNull<sys::llama_context>,
    memory: NonNull<sys::llama_memory_i>,
    /// Tokens in each slot.
    cells_held: Vec<u32>,
    /// The last batch that named each slot, by number.
    named: Vec<u64>,
    batches: u64,
    cells: u32,
    /// Cells of its own that each slot has, if they are apart.
    own: Option<u32>,
    batch_tokens: u32,
    rows: u32,
    batch: LlamaBatch,
    interrupt: Interrupt,
    /// Tokens that a sliding-window layer attends to; 0 if every layer attends to all.
    window: u32,
    /// Its state is not a list of cells.
    recurrent: bool,
    model: Arc<LlamaModel>,
    /// Declared last: dropped after the context that uses it.
    _pool: ComputeThreads,
}

// SAFETY: see "Threads" above. The batch's pointers are filled and used within one call.
unsafe impl Send for LlamaContext {}

impl LlamaContext {
    /// Makes a context. Must happen before the model is shared: llama.cpp may still adjust it here.
    ///
    /// # Errors
    /// What llama.cpp logged.
    pub(super) fn new(model: Arc<LlamaModel>, size: ContextSize) -> Result<Self, String> {
        let slots = size.slots.clamp(1, SLOTS_MAX);
        // llama.cpp asserts that a row fits for each slot, and pads cells on its own.
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
        // One row per slot, and some for slots that want several.
        let rows = slots.saturating_add(SCORED_ROWS).min(batch_tokens);
        params.n_outputs_max = rows;
        params.n_outputs_max_per_seq = rows;
        params.n_threads = threads.cast_signed();
        params.n_threads_batch = threads.cast_signed();
        // Slots that share their cells fork without a copy, and all tokens look at all cells.
        params.kv_unified = !size.per_slot;
        // As many cells for sliding-window layers as for the others, so that most of such models' prefixes can be cut
        // back and forked too. It is no promise: llama.cpp gives cells outside their sequence's window to whoever comes,
        // hence `can_resume`.
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

    /// Cells in the cache.
    pub(super) fn cells(&self) -> u32 {
        self.cells
    }

    /// Cells that each slot has to itself, if slots do not share them.
    #[cfg(test)]
    pub(super) fn own(&self) -> Option<u32> {
        self.own
    }

    /// Entries that fit into a batch.
    pub(super) fn batch_tokens(&self) -> u32 {
        self.batch_tokens
    }

    /// Rows that a batch may want.
    pub(super) fn rows(&self) -> u32 {
        self.rows
    }

    /// Slots.
    pub(super) fn slots(&self) -> u32 {
        self.cells_held.len() as u32
    }

    /// The flag that aborts a running pass; polled between the nodes of the graph.
    pub(super) fn set_interrupt(&mut self, flag: Interrupt) {
        // SAFETY: the context is live and not computing. The old flag is dropped only after the new one is in place.
        unsafe {
            let data = Arc::as_ptr(&flag).cast_mut().cast();
            sys::llama_set_abort_callback(self.context.as_ptr(), Some(on_poll), data);
        }
        self.interrupt = flag;
    }

    /// Computes a batch. After an error other than [`DecodeError::Broken`] the slots of a model that can be cut back hold
    /// what they held.
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

    /// Removes what passes of a batch have left in its slots although a later pass failed.
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

    /// The logits after the entry at `index` of the last batch, if that batch succeeded and wanted them there.
    /// The caller may overwrite them: the next batch writes them anew.
    pub(super) fn row(&mut self, index: usize) -> Option<&mut [f32]> {
        let index = self.batch.wanted(index)?;
        // SAFETY: the last decode succeeded and its batch wanted a row at this index.
        let row = unsafe { sys::llama_get_logits_ith(self.context.as_ptr(), index) };
        let row = NonNull::new(row)?;
        // SAFETY: a row has one float per token of the vocabulary, in a buffer that the context owns and does not touch
        // before its next call; `&mut self` is borrowed for as long.
        Some(unsafe { std::slice::from_raw_parts_mut(row.as_ptr(), self.model.size as usize) })
    }

    /// Makes the empty slot `to` hold the first `tokens` tokens of `from`.
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
        // A whole copy is said as one, which recurrent models can do; from cells of its own nothing else can be copied.
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

    /// Whether a slot cut to its first `tokens` tokens holds all that the token after them attends to (D-48).
    pub(super) fn can_resume(&self, slot: u32, tokens: u32) -> bool {
        let Some(&retained) = self.cells_held.get(slot as usize) else {
            return false;
        };
        if tokens == 0 || tokens >= retained {
            // Nothing is attended to, or nothing is cut: llama.cpp itself keeps what the end of a sequence sees.
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

    /// Keeps the first `tokens` tokens of a slot; false if this model cannot.
    pub(super) fn truncate(&mut self, slot: u32, tokens: u32) -> bool {
        let Some(retained) = self.cells_held.get_mut(slot as usize) else {
            return false;
        };
        if tokens >= *retained {
            return tokens == *retained;
        }
        // Removing everything never fails, also where removing a part does.
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

    /// Empties a slot, whatever llama.cpp kept there after a failure.
    pub(super) fn clear(&mut self, slot: u32) {
        if let Some(retained) = self.cells_held.get_mut(slot as usize) {
            *retained = 0;
            // SAFETY: as in `truncate`.
            unsafe { sys::llama_memory_seq_rm(self.memory.as_ptr(), slot.cast_signed(), -1, -1) };
        }
    }

    /// Tokens in a slot.
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

/// Asked by ggml's first thread before each node of the graph.
unsafe extern "C" fn on_poll(data: *mut c_void) -> bool {
    // SAFETY: the address of the context's `DecodeSignals`, which its `Arc` keeps alive.
    unsafe { &*data.cast::<DecodeSignals>() }.pulse()
}

/// The arrays of a `llama_batch`, kept from batch to batch; in the order of slots, which is that of the cells.
#[derive(Debug)]
struct LlamaBatch {
    /// The entries, in the order of their slots.
    order: Vec<usize>,
    /// Where each entry stands in that order.
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
        // Each token belongs to one slot: a list of length one, in place. Made last: `slots` no longer moves.
        self.lists
            .extend(self.slots.iter_mut().map(|slot| &raw mut *slot));
    }

    /// Where an entry of the batch stands, if it wants a row.
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
