//! The embedded model: implements the engine's [`Model`] with llama.cpp.
//!
//! ```text
//!   load: CPU ── header (gguf) ── memory ── LlamaModel ── LlamaContext ──► Embedded ──► the owner's thread
//!                                               └── LlamaVocabulary ──► every thread
//! ```
//!
//! The limits of a model are in its [`ModelInfo`]: the state of recurrent and hybrid models cannot be truncated, so
//! `truncates` is false for them. Whether equal requests give equal tokens whatever else runs (`deterministic`, D-21) depends on
//! the weights, the processor and the KV cache: see `equal_answers`.

mod draft;
mod embedding;
mod equal_answers;
mod gpu_turn;
mod guard;
mod identity;
mod instructions;
mod kind;
mod llama;
mod load;
mod load_error;
mod lora;
mod mapped;
mod marks;
mod memory;
mod outline;
mod plan;
pub mod random;
mod source;
mod start_line;
mod state_rows;
#[cfg(test)]
mod tests;
mod thread_choice;
mod thread_log;
mod tokenizer_json;
mod trial;
mod vocabulary;
mod window;
mod work_buffer;

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

pub use self::draft::DraftOptions;
pub use self::embedding::{
    EmbeddedEncoder, EmbeddingOptions, embeds, lacks_memory_embedding, load_embedding,
};
pub use self::llama::{Kernels, KernelsError, kernels};
pub use self::load::{LoadOptions, lacks_memory, load};
pub use self::load_error::LoadError;
pub use self::memory::available as available_memory;
pub use self::outline::outline;
pub use self::source::ModelSource;
use self::vocabulary::LlamaVocabulary;
use crate::api::{EngineError, ModelInfo, SharedVocabulary};
use crate::model::{
    BatchEntry, Capacity, CheckpointTerms, DecodeStop, Interrupt, Model, OutputRow, RowFinder,
    SlotId, SlotPurpose, ThreadNumbers, WarmTimes,
};

/// A loaded model with its KV cache.
#[derive(Debug)]
pub struct Embedded {
    info: ModelInfo,
    vocabulary: Arc<LlamaVocabulary>,
    context: llama::LlamaContext,
    /// What the warm-up measured.
    warm_times: Option<WarmTimes>,
    thread_log: thread_log::ThreadLog,
    /// Memory for saved slots.
    saved_slots: memory::SavedSlotsLimit,
    origin: identity::ModelOrigin,
    /// Whether sequences may be so long that a model with two sets of position factors uses those for long contexts.
    long_rope: bool,
    /// The draft model that was loaded with it, until it is taken.
    draft: Option<Box<Self>>,
}

/// Returns how many cells of cached prefixes a token may scan, so that this takes a fiftieth of its time. A small model does
/// little for a token beside scanning, and a copy of its state is small; a large one is the other way round.
fn idle_cells_max(token: Option<Duration>, steps_of_cell: u64) -> usize {
    // What llama.cpp's attention takes on a processor core to find that a cell is not of this sequence, for each head of each
    // layer. Several threads share it, and may keep more cells than this: rather too few.
    const STEP_NANOS: u128 = 1;
    const SHARE: u128 = 50;
    let token = token.map_or(0, |token| token.as_nanos());
    let cell = STEP_NANOS * u128::from(steps_of_cell.max(1));
    usize::try_from(token / SHARE / cell)
        .unwrap_or(usize::MAX)
        .max(IDLE_CELLS_MIN)
}

/// Cells that cached prefixes may always keep.
const IDLE_CELLS_MIN: usize = 256;

impl Embedded {
    /// Logs which numbers of threads were found to be the best.
    fn log_threads(&mut self, now: Time) {
        let verdicts = self.context.take_thread_verdicts();
        if let Some(threads) = self.thread_log.observe(verdicts, now) {
            tracing::info!(
                model = self.info.name,
                threads,
                "chose numbers of threads by what calls took"
            );
        }
    }
}

impl Model for Embedded {
    fn info(&self) -> ModelInfo {
        self.info.clone()
    }

    fn vocabulary(&self) -> SharedVocabulary {
        Arc::clone(&self.vocabulary) as SharedVocabulary
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            slots: self.context.slots(),
            cells: self.context.cells(),
            batch_tokens: self.context.batch_tokens(),
            rows: self.context.rows(),
            computes_together: self.context.computes_together(),
        }
    }

    fn warm_times(&self) -> Option<WarmTimes> {
        self.warm_times
    }

    fn threads(&self) -> Option<ThreadNumbers> {
        Some(self.context.thread_numbers())
    }

    fn interrupt(&mut self, flag: Interrupt) {
        self.context.set_interrupt(flag);
    }

    fn open(&mut self, slot: SlotId, _: &SlotPurpose<'_>) {
        // A free slot is empty, except after a fork or a truncation that failed; a call into llama.cpp is saved
        // otherwise.
        if self.context.cells_held(slot) > 0 {
            self.context.clear(slot);
        }
    }

    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32) {
        // The owner meets the trait's preconditions, so this cannot fail; if it did, decode would refuse the slot.
        if let Err(failure) = self.context.fork(from, to, tokens) {
            tracing::error!(
                ?failure,
                from,
                to,
                tokens,
                "a slot cannot be forked: later tokens of the new slot will be refused"
            );
        }
    }

    fn finish_fork(&mut self, slot: SlotId, tokens: u32) -> bool {
        self.context.finish_fork();
        self.context.cells_held(slot) == tokens
    }

    fn forks_later(&self) -> bool {
        self.context.forks_later()
    }

    fn is_copied_later(&self, slot: SlotId) -> bool {
        self.context.is_copied_later(slot)
    }

    fn fork_bytes(&self, from: SlotId) -> usize {
        self.context.fork_bytes(from)
    }

    fn truncate(&mut self, slot: SlotId, tokens: u32) {
        if !self.context.truncate(slot, tokens) {
            tracing::error!(
                slot,
                tokens,
                "a slot cannot be truncated: later tokens of it will be refused"
            );
        }
    }

    fn can_resume(&self, slot: SlotId, tokens: u32) -> bool {
        self.context.can_resume(slot, tokens)
    }

    fn set_adapters(&mut self, scales: &[f32]) {
        self.context.set_adapters(scales);
    }

    fn release(&mut self, slot: SlotId) {
        self.context.clear(slot);
    }

    fn idle_cells_max(&self) -> usize {
        if !self.context.scans_all_cells() {
            return usize::MAX;
        }
        let token = self.warm_times.map(|times| times.token);
        idle_cells_max(token, self.context.scan_steps())
    }

    fn saved_bytes_max(&self) -> usize {
        self.saved_slots.bytes()
    }

    fn restores_in_part(&self) -> bool {
        self.context.restores_in_part()
    }

    fn saved_size(&mut self, slot: SlotId) -> usize {
        self.context.saved_size(slot)
    }

    fn save(&mut self, slot: SlotId) -> Option<Vec<u8>> {
        self.context.save(slot)
    }

    fn row_finder(&self) -> Option<RowFinder> {
        Some(state_rows::find_rows)
    }

    fn saved_identity(&self) -> Option<String> {
        let identity = self.origin.identity(self.context.caches(), self.long_rope);
        let unknown = |error: &std::io::Error| {
            tracing::warn!(%error, "the model's file cannot be read: its prefixes are not saved");
        };
        identity.inspect_err(unknown).ok()
    }

    fn restore(&mut self, slot: SlotId, state: &[u8], tokens: u32) -> bool {
        self.context.restore(slot, state, tokens)
    }

    fn checkpoint_terms(&self) -> Option<CheckpointTerms> {
        self.context.checkpoint_terms()
    }

    fn checkpoint_size(&mut self, slot: SlotId) -> usize {
        self.context.checkpoint_size(slot)
    }

    fn checkpoint(&mut self, slot: SlotId) -> Option<Vec<u8>> {
        self.context.checkpoint(slot)
    }

    fn rewind(&mut self, slot: SlotId, checkpoint: &[u8], tokens: u32) -> bool {
        self.context.rewind(slot, checkpoint, tokens)
    }

    fn decode(&mut self, batch: &[BatchEntry], now: Time) -> Result<(), DecodeStop> {
        let failure = match self.context.decode(batch) {
            Ok(()) => {
                self.log_threads(now);
                return Ok(());
            }
            Err(failure) => failure,
        };
        let moves_states = self.context.moves_states();
        let failed = |message: &str, has_begun: bool| {
            let error = EngineError::internal(ErrorReason::NONE, message);
            Err(match has_begun && moves_states {
                true => DecodeStop::SlotsLost(error),
                false => DecodeStop::Failed(error),
            })
        };
        match failure {
            llama::DecodeError::Full => Err(DecodeStop::Full),
            llama::DecodeError::NotBegun => Err(DecodeStop::Aborted),
            // The slots are as they were before the call, so the same batch may be tried again.
            llama::DecodeError::Aborted if self.info.truncates => Err(DecodeStop::Aborted),
            // The state of a model that does not truncate has advanced and cannot be rolled back.
            llama::DecodeError::Aborted => failed("the model was interrupted", true),
            llama::DecodeError::Invalid(what) => {
                tracing::error!(what, "the batch is invalid, and its requests fail");
                failed("the model refused the batch", false)
            }
            llama::DecodeError::Broken(code) => {
                tracing::error!(code, "llama.cpp failed to decode a batch");
                failed("the model failed", true)
            }
        }
    }

    fn waited(&self) -> Duration {
        self.context.waited()
    }

    fn row(&mut self, index: usize, _: Time) -> OutputRow<'_> {
        match self.context.row(index) {
            Some(logits) => OutputRow::Logits(logits),
            None => OutputRow::Failed(EngineError::internal(
                ErrorReason::NONE,
                "the model returned no output row",
            )),
        }
    }

    fn rows(&mut self, indexes: &[usize]) -> Vec<Option<&mut [f32]>> {
        self.context.rows_of(indexes)
    }
}
