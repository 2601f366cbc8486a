//! [`EncoderContext`]: computes one pooled row for each of several texts. Its `SAFETY` comments refer to the arguments in
//! [`super`].

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use llama_cpp_sys_2 as sys;
use sapwood_proto::steer::Token;

use super::super::guard::{guarded, throwing};
use super::super::thread_choice::ThreadChoice;
use super::batch::LlamaBatch;
use super::context::{ComputeThreads, DecodeError, SLOTS_MAX, THROWN, on_poll};
use super::model::LlamaModel;
use super::{LAST_ERROR, ThreadLimits, take_last_error};
use crate::embedding::Pooling;
use crate::model::{BatchEntry, Interrupt};

/// The size of a context.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct EncoderSize {
    /// Tokens of a batch, and so of a text: it is computed at once, because a token may attend to those after it.
    pub(in super::super) tokens: u32,
    /// Texts of a batch; at least 1.
    pub(in super::super) texts: u32,
    pub(in super::super) pooling: Pooling,
    pub(in super::super) threads: ThreadLimits,
    /// How long idle worker threads spin before they sleep, 0 to 100.
    pub(in super::super) poll: u32,
}

impl EncoderSize {
    fn params(self) -> sys::llama_context_params {
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::llama_context_default_params() };
        params.n_ctx = self.tokens;
        params.n_batch = self.tokens;
        params.n_ubatch = self.tokens;
        params.n_seq_max = self.texts;
        // Every token has an output before it is pooled. 0: as many as a batch has.
        params.n_outputs_max = 0;
        params.kv_unified = true;
        params.swa_full = true;
        params.embeddings = true;
        params.pooling_type = match self.pooling {
            Pooling::Mean => sys::LLAMA_POOLING_TYPE_MEAN,
            Pooling::Cls => sys::LLAMA_POOLING_TYPE_CLS,
            Pooling::Last => sys::LLAMA_POOLING_TYPE_LAST,
            Pooling::Rank => sys::LLAMA_POOLING_TYPE_RANK,
        };
        params.no_perf = true;
        params
    }
}

/// A llama.cpp context that keeps nothing between two batches.
#[derive(Debug)]
pub(in super::super) struct EncoderContext {
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
    _pool: ComputeThreads,
}

// SAFETY: see "Threads" above. The batch's pointers are filled and used within one call.
unsafe impl Send for EncoderContext {}

impl EncoderContext {
    /// Creates a context. Must be called before the model is shared: llama.cpp may still modify the model here.
    ///
    /// # Errors
    /// The error that llama.cpp logged.
    pub(in super::super) fn new(model: Arc<LlamaModel>, size: EncoderSize) -> Result<Self, String> {
        let texts = size.texts.clamp(1, SLOTS_MAX);
        let size = EncoderSize {
            texts,
            // llama.cpp asserts that a batch has room for one row per sequence.
            tokens: size.tokens.max(texts),
            ..size
        };
        let threads = size.threads.prefill_choice();
        let pool = ComputeThreads::new(threads.most(), size.poll)
            .ok_or("ggml could not start its threads")?;
        let params = size.params();
        let _ = LAST_ERROR.take();
        // SAFETY: the model is live and stays so through the `Arc`; the parameters hold no pointers of ours.
        let init = || unsafe { throwing::llama_init_from_model(model.model.as_ptr(), params) };
        let context = guarded(init)?;
        let context = NonNull::new(context).ok_or_else(take_last_error)?;
        let interrupt = Interrupt::default();
        // SAFETY: the context is live; the flag and the pool live as long as it does (fields of the same value).
        let memory = unsafe {
            let raw = context.as_ptr();
            sys::llama_attach_threadpool(raw, pool.0.as_ptr(), pool.0.as_ptr());
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
    pub(in super::super) fn set_interrupt(&mut self, flag: Interrupt) {
        // SAFETY: the context is live and not computing. The old flag is dropped only after the new one is in place.
        unsafe {
            let data = Arc::as_ptr(&flag).cast_mut().cast();
            sys::llama_set_abort_callback(self.context.as_ptr(), Some(on_poll), data);
        }
        self.interrupt = flag;
    }

    /// Returns the numbers of a row.
    pub(in super::super) fn width(&self) -> usize {
        self.width
    }

    /// Computes a batch of texts, and appends a row for each.
    pub(in super::super) fn encode(
        &mut self,
        texts: &[&[Token]],
        rows: &mut Vec<f32>,
    ) -> Result<(), DecodeError> {
        let entries = self.entries(texts)?;
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

    /// The entries of a batch, each text a sequence of its own.
    fn entries(&self, texts: &[&[Token]]) -> Result<Vec<BatchEntry>, DecodeError> {
        let tokens: usize = texts.iter().map(|text| text.len()).sum();
        if texts.is_empty() || texts.len() > self.size.texts as usize {
            return Err(DecodeError::Invalid("a batch has no texts, or too many"));
        }
        if tokens > self.size.tokens as usize || texts.iter().any(|text| text.is_empty()) {
            return Err(DecodeError::Invalid(
                "a batch is too large, or has an empty text",
            ));
        }
        let mut entries = Vec::with_capacity(tokens);
        for (slot, text) in (0..).zip(texts) {
            for (position, &token) in (0..).zip(*text) {
                self.model
                    .id(token)
                    .ok_or(DecodeError::Invalid("a token is not in the vocabulary"))?;
                entries.push(BatchEntry {
                    slot,
                    position,
                    token,
                    row: true,
                });
            }
        }
        Ok(entries)
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
