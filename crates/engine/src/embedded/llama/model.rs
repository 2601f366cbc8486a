//! [`LlamaModel`]: weights and vocabulary. Its `SAFETY` comments refer to the arguments in [`super`].

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use llama_cpp_sys_2 as sys;
use sapwood_proto::steer::Token;

use super::super::guard::{guarded, throwing};
use super::super::mapped::MappedFile;
use super::compute_pool::{ComputePool, TurnTaking};
use super::params::ModelParams;
use super::{LAST_ERROR, take_last_error};
use crate::tokenizer_json::AddedToken;

/// A loaded model: weights and vocabulary, read only.
#[derive(Debug)]
pub(in super::super) struct LlamaModel {
    pub(super) model: NonNull<sys::llama_model>,
    vocabulary: NonNull<sys::llama_vocab>,
    size: u32,
    /// llama.cpp keeps the addresses in it.
    params: ModelParams,
    /// LoRA adapters. The model frees them.
    adapters: Vec<NonNull<sys::llama_adapter_lora>>,
    /// Dropped after the model is freed.
    _mapped: Option<MappedFile>,
}

// SAFETY: see "Threads" above; nothing in a loaded model is bound to the thread that loaded it.
unsafe impl Send for LlamaModel {}
// SAFETY: see "Threads" above: shared use is reading.
unsafe impl Sync for LlamaModel {}

/// The properties of a model, as llama.cpp reports them.
#[derive(Clone, Debug)]
pub(in super::super) struct LlamaFacts {
    pub(in super::super) description: String,
    pub(in super::super) parameters: u64,
    pub(in super::super) weight_bytes: u64,
    /// Its state is recurrent, not a list of KV cells, so it cannot be truncated.
    pub(in super::super) recurrent: bool,
    /// It predicts the next token of a prefix; no other kind of model can be served.
    pub(in super::super) generates: bool,
    pub(in super::super) sliding_window: u32,
    /// Attention heads of all layers.
    pub(in super::super) heads: u64,
    /// It is an encoder that `llama_encode` computes. Those with a decoder too are not supported.
    pub(in super::super) encodes: bool,
    /// Numbers of a pooled row.
    pub(in super::super) embedding_numbers: u32,
    /// Numbers of its classification head; at least 1.
    pub(in super::super) scores: u32,
}

/// The tokens that the file asks for around texts.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct SpecialEnds {
    /// BOS or CLS.
    pub(in super::super) begin: Option<Token>,
    /// EOS; SEP for WordPiece vocabularies, which always end a text with it.
    pub(in super::super) end: Option<Token>,
    /// SEP, before the second of two texts.
    pub(in super::super) separator: Option<Token>,
    /// Whether the vocabulary is WordPiece.
    pub(in super::super) is_word_piece: bool,
}

/// The attributes of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct TokenAttributes {
    pub(in super::super) control: bool,
    pub(in super::super) end: bool,
}

impl LlamaModel {
    /// Loads a file. `progress` is called with fractions from 0 to 1 on this thread, and stops the loading by returning
    /// false; a panic in it ends the process.
    ///
    /// # Errors
    /// The error that llama.cpp logged.
    pub(in super::super) fn load(
        path: &Path,
        params: ModelParams,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Self, String> {
        let path = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| "the path contains a NUL byte".to_owned())?;
        let mut progress = progress;
        let kept = params;
        let mut params = kept.raw();
        params.progress_callback = Some(on_progress);
        params.progress_callback_user_data = (&raw mut progress).cast();
        let _ = LAST_ERROR.take();
        // SAFETY: the path is NUL-terminated, the parameters' arrays live in `kept`, and `progress` outlives the call, which
        // is the last to use its address.
        let load = || unsafe { throwing::llama_model_load_from_file(path.as_ptr(), params) };
        let model = guarded(load)?;
        let model = NonNull::new(model).ok_or_else(take_last_error)?;
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
            params: kept,
            adapters: Vec::new(),
            _mapped: None,
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

    /// Keeps the record of its file until it is freed.
    pub(in super::super) fn keep(&mut self, mapped: Option<MappedFile>) {
        self._mapped = mapped;
    }

    /// Loads a LoRA adapter, for the contexts that are created later.
    ///
    /// # Errors
    /// The error that llama.cpp logged.
    pub(in super::super) fn add_adapter(&mut self, path: &Path) -> Result<(), String> {
        let path = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| "the path contains a NUL byte".to_owned())?;
        let model = self.model.as_ptr();
        let _ = LAST_ERROR.take();
        // SAFETY: the model is live and, through `&mut self`, not shared yet; the path is NUL-terminated.
        let load = || unsafe { throwing::llama_adapter_lora_init(model, path.as_ptr()) };
        let adapter = NonNull::new(guarded(load)?).ok_or_else(take_last_error)?;
        self.adapters.push(adapter);
        Ok(())
    }

    /// Lets a context of this model compute with its adapters, scaled by these factors, from the next decode call on.
    /// Those that have no factor are off, as those with 0 are.
    pub(super) fn apply_adapters(&self, context: NonNull<sys::llama_context>, scales: &[f32]) {
        let mut adapters: Vec<_> = self.adapters.iter().map(|it| it.as_ptr()).collect();
        let mut scales = scales.to_vec();
        let count = adapters.len().min(scales.len());
        // SAFETY: the context is live and not computing, and both arrays have at least `count` elements, which are
        // copied. The adapters live as long as the model, which the context keeps alive.
        unsafe {
            let (adapters, scales) = (adapters.as_mut_ptr(), scales.as_mut_ptr());
            sys::llama_set_adapters_lora(context.as_ptr(), adapters, count, scales);
        }
    }

    /// Returns how many layers a GPU was asked to compute, the output included.
    pub(in super::super) fn gpu_layers(&self) -> u32 {
        self.params.gpu_layers()
    }

    /// Returns the threads for a context of this model, whose calls take turns with those of other models if the CPU computes
    /// them.
    ///
    /// # Errors
    /// The threads cannot be made.
    pub(super) fn compute_pool(&self, threads: u32, poll: u32) -> Result<Arc<ComputePool>, String> {
        let turns = match self.gpu_layers() {
            0 => TurnTaking::Shared,
            _ => TurnTaking::Free,
        };
        let pool = ComputePool::new(threads, poll, turns);
        pool.ok_or_else(|| "ggml could not make its threads".to_owned())
    }

    /// Returns its properties.
    pub(in super::super) fn facts(&self) -> LlamaFacts {
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
                heads: heads(
                    sys::llama_model_n_head(model),
                    sys::llama_model_n_layer(model),
                ),
                encodes: sys::llama_model_has_encoder(model)
                    && !sys::llama_model_has_decoder(model),
                embedding_numbers: u32::try_from(sys::llama_model_n_embd_out(model)).unwrap_or(0),
                scores: sys::llama_model_n_cls_out(model).max(1),
            }
        }
    }

    /// Returns the chat template in its metadata.
    pub(in super::super) fn chat_template(&self) -> Option<String> {
        self.template(None)
    }

    /// Returns the template for a query and a document in its metadata.
    pub(in super::super) fn rerank_template(&self) -> Option<String> {
        self.template(Some(c"rerank"))
    }

    fn template(&self, name: Option<&CStr>) -> Option<String> {
        let name = name.map_or(ptr::null(), CStr::as_ptr);
        // SAFETY: the model is live; the name is NUL-terminated, and a null one asks for the default template.
        let text = unsafe { sys::llama_model_chat_template(self.model.as_ptr(), name) };
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
    pub(in super::super) fn size(&self) -> u32 {
        self.size
    }

    /// Returns whether the vocabulary is byte-pair (BPE), which splits texts before it merges pairs.
    pub(in super::super) fn is_byte_pair(&self) -> bool {
        // SAFETY: the vocabulary is live.
        unsafe { sys::llama_vocab_type(self.vocabulary.as_ptr()) == sys::LLAMA_VOCAB_TYPE_BPE }
    }

    pub(super) fn id(&self, token: Token) -> Option<sys::llama_token> {
        (token < self.size)
            .then(|| i32::try_from(token).ok())
            .flatten()
    }

    fn to_token(&self, token: sys::llama_token) -> Option<Token> {
        u32::try_from(token).ok().filter(|&token| token < self.size)
    }

    /// Returns the attributes of a token; ids outside the vocabulary have none.
    pub(in super::super) fn kind(&self, token: Token) -> TokenAttributes {
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
    pub(in super::super) fn text(&self, token: Token) -> String {
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
    pub(in super::super) fn added_token(&self, token: Token) -> Option<AddedToken> {
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
    pub(in super::super) fn bos(&self) -> (bool, Option<Token>) {
        let vocabulary = self.vocabulary.as_ptr();
        // SAFETY: the vocabulary is live; both only read.
        let (wanted, token) = unsafe {
            (
                sys::llama_vocab_get_add_bos(vocabulary),
                sys::llama_vocab_bos(vocabulary),
            )
        };
        (wanted, self.to_token(token))
    }

    /// Returns the EOS token.
    pub(in super::super) fn end(&self) -> Option<Token> {
        // SAFETY: the vocabulary is live.
        self.to_token(unsafe { sys::llama_vocab_eos(self.vocabulary.as_ptr()) })
    }

    /// Returns the tokens for fill in the middle: of the prefix, the suffix and the middle.
    pub(in super::super) fn infill(&self) -> [Option<Token>; 3] {
        let vocabulary = self.vocabulary.as_ptr();
        // SAFETY: the vocabulary is live; all of these only read.
        let tokens = unsafe {
            [
                sys::llama_vocab_fim_pre(vocabulary),
                sys::llama_vocab_fim_suf(vocabulary),
                sys::llama_vocab_fim_mid(vocabulary),
            ]
        };
        tokens.map(|token| self.to_token(token))
    }

    /// Returns the tokens around texts.
    pub(in super::super) fn special_ends(&self) -> SpecialEnds {
        let vocabulary = self.vocabulary.as_ptr();
        // SAFETY: the vocabulary is live; all of these only read.
        let (kind, adds_end, adds_separator, separator) = unsafe {
            (
                sys::llama_vocab_type(vocabulary),
                sys::llama_vocab_get_add_eos(vocabulary),
                sys::llama_vocab_get_add_sep(vocabulary),
                sys::llama_vocab_sep(vocabulary),
            )
        };
        let (adds_begin, begin) = self.bos();
        let separator = self.to_token(separator);
        let is_word_piece = kind == sys::LLAMA_VOCAB_TYPE_WPM;
        SpecialEnds {
            begin: begin.filter(|_| adds_begin),
            end: match separator {
                Some(separator) if is_word_piece => Some(separator),
                _ => self.end().filter(|_| adds_end),
            },
            separator: separator.filter(|_| adds_separator),
            is_word_piece,
        }
    }

    /// Returns the EOT token, which ends a turn.
    pub(in super::super) fn end_of_turn(&self) -> Option<Token> {
        // SAFETY: the vocabulary is live.
        self.to_token(unsafe { sys::llama_vocab_eot(self.vocabulary.as_ptr()) })
    }

    /// Returns the bytes of a token; with `special`, also those of control tokens.
    pub(in super::super) fn piece(&self, token: Token, special: bool) -> Vec<u8> {
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
    pub(in super::super) fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
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
                .filter_map(|token| self.to_token(token))
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

fn heads(of_layer: i32, layers: i32) -> u64 {
    let positive = |number: i32| u64::try_from(number).unwrap_or(0);
    positive(of_layer) * positive(layers)
}
