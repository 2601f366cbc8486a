//! The trait that the owner thread needs from a model: slots that hold sequences, a batch to decode, and an output row
//! for each position that is sampled or scored.
//!
//! A model computes output rows; its only caller, the owner, decides everything else and meets every precondition
//! written here.
//!
//! The engine uses the terms of llama.cpp and vLLM:
//!
//! | term | meaning |
//! |---|---|
//! | KV cache, KV cell | the computed keys and values of all sequences; the share of one token of one sequence |
//! | slot | the place of one sequence in the KV cache: llama.cpp's `seq_id` |
//! | unified, per-slot KV cache | all slots share the cells, or each has its own |
//! | prefill, decode | computing tokens that are known; computing the last sampled token |
//! | batch, ubatch | the tokens of one decode call; the part of it that llama.cpp computes at once |
//! | logits, output row | a score for each token of the vocabulary, after one position |
//! | prefix cache | slots of ended sequences, whose first tokens a new sequence may copy |
//! | preempt | take a running sequence's cells; its tokens are computed again later |
//! | park | leave a sequence out of the batch while its reader is slow |
//! | EOG token | ends the output: end of sequence, end of turn and their kind |
//! | score | give the log-probabilities of known tokens instead of sampling |
//! | draft, verify, accept | speculative decoding: guess tokens, compute them in one decode call, and keep those that are then sampled |
//!
//! ```text
//!   slot:  free ── open ──► empty ── decode ──► holds n tokens ── truncate ──► holds fewer
//!                            └── fork (a copy of another slot's first tokens) ──┘      │
//!   any state ── release ──► free ◄──────────────────────────────────────────────────┘
//! ```
//!
//! A slot with recurrent or sliding-window layers loses what it had at fewer tokens. It is truncated by `rewind`, with a
//! checkpoint that was made there.
//!
//! All slots share one KV cache of [`Capacity::cells`] cells, one cell per token; slots that were forked share the
//! cells of their common tokens. The owner counts cells; a model that runs out nevertheless returns
//! [`DecodeStop::Full`]. A model with a per-slot KV cache reports so many cells that the slots run out before the count
//! does.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use crate::api::{EngineError, FinishReason, ModelInfo, SharedVocabulary};
use crate::ranking::RankedRow;

/// The number of a slot, which holds one sequence in the model's KV cache (`seq_id`); below [`Capacity::slots`].
pub type SlotId = u32;

/// The signals between the engine's thread handle and a running [`Model::decode`].
pub type Interrupt = Arc<DecodeSignals>;

/// A flag that asks a running [`Model::decode`] to return early with [`DecodeStop::Aborted`], and a pulse with which
/// the model shows progress within a long decode call.
#[derive(Debug)]
pub struct DecodeSignals {
    raised: AtomicBool,
    began: Instant,
    /// Milliseconds from the creation of these signals to the last pulse.
    pulse_ms: AtomicU64,
}

impl Default for DecodeSignals {
    fn default() -> Self {
        Self {
            raised: AtomicBool::new(false),
            began: Instant::now(),
            pulse_ms: AtomicU64::new(0),
        }
    }
}

impl DecodeSignals {
    /// Asks a running decode call to return.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::Release);
    }

    /// Clears the flag.
    pub fn lower(&self) {
        self.raised.store(false, Ordering::Release);
    }

    /// Called by the model at short intervals within a decode call: records progress. Returns true if the call should
    /// return.
    pub fn pulse(&self) -> bool {
        let elapsed = self.began.elapsed().as_millis();
        let elapsed = u64::try_from(elapsed).unwrap_or(u64::MAX);
        self.pulse_ms.store(elapsed, Ordering::Relaxed);
        // Relaxed: the flag carries no data, and seeing it one graph node later costs nothing.
        self.raised.load(Ordering::Relaxed)
    }

    /// Returns the time since the last pulse.
    #[must_use]
    pub fn since_pulse(&self) -> Duration {
        let pulse = Duration::from_millis(self.pulse_ms.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(pulse)
    }
}

/// The capacity of a model. Fixed while it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Slots: those of running sequences ([`ModelInfo::parallel`]) and those of cached prefixes. At least 1.
    pub slots: u32,
    /// KV cells: tokens that all slots hold together, shared ones counted once. At least [`ModelInfo::context_tokens`].
    pub cells: u32,
    /// Entries of one batch. At least [`ModelInfo::parallel`].
    pub batch_tokens: u32,
    /// Output rows of one batch. At least [`ModelInfo::parallel`]; scoring uses the rest.
    pub rows: u32,
    /// Whether a batch is computed at once, and not part by part where its sequences have different numbers of tokens, as with a KV
    /// cache per slot.
    pub computes_together: bool,
}

/// What decode calls take, as far as it is known before the first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmTimes {
    /// A call with one token.
    pub decode: Duration,
    /// What each further token of a prompt adds.
    pub token: Duration,
}

/// The numbers of threads that compute decode calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadNumbers {
    /// Of calls that compute one token of each sequence.
    pub decode: u32,
    /// Of calls with many tokens of a prompt.
    pub prefill: u32,
    /// Of calls with a few tokens of a sequence: drafts, and short prompts.
    pub few: u32,
}

/// The request that a slot is opened for. Real models ignore it; a scripted model computes its output rows from it.
#[derive(Clone, Copy, Debug)]
pub struct SlotPurpose<'a> {
    /// The prompt. Tokens after it are output, also when they are computed again after a preemption.
    pub prompt: &'a [Token],
    /// The seed of the request.
    pub seed: u64,
    /// Which choice of the request the sequence is.
    pub choice: u32,
    /// `max_tokens` as the request gave it.
    pub max_tokens: Option<u32>,
}

/// One token to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchEntry {
    /// The slot.
    pub slot: SlotId,
    /// Its index in the sequence, from 0: always the number of tokens that the slot holds before it.
    pub position: u32,
    /// The token; always below the vocabulary's size.
    pub token: Token,
    /// Whether the owner will ask for the output row after this token.
    pub row: bool,
}

/// How a slot that has gone on returns to an earlier length by a checkpoint ([`Model::checkpoint`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointTerms {
    /// A slot that never holds more tokens than this can be truncated to any number of them, and needs no checkpoint: a
    /// sliding window that is not full yet. 0 for a recurrent state.
    pub kept_tokens: u32,
    /// How many tokens fewer than those of a checkpoint a slot can be truncated to after it was rewound. With 1, a checkpoint
    /// after the last token of a prompt lets that token be computed again.
    pub slack: u32,
}

/// Why a batch was not computed. Unless said otherwise the slots hold what they held before the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeStop {
    /// The KV cache has no room for the batch. The owner makes room and tries again.
    Full,
    /// The [`Interrupt`] was seen. The same batch may be tried again.
    Aborted,
    /// The batch failed. The owner ends the requests with a sequence in it and releases their slots; the others
    /// continue.
    Failed(EngineError),
    /// The batch failed, and what any slot holds is undefined, also of those without an entry in it. The owner ends the requests
    /// that have a slot, and releases every slot; nothing of them is saved.
    SlotsLost(EngineError),
    /// The model is lost. The owner ends every request and refuses new ones.
    Dead(EngineError),
}

/// The output row of one position.
#[derive(Debug)]
pub enum OutputRow<'a> {
    /// A logit for each token of the vocabulary. The owner overwrites it.
    Logits(&'a mut [f32]),
    /// The same in closed form: only the owner can tell whether the whole vector is needed (D-11).
    Ranked(RankedRow),
    /// The output row is not available before this instant. The owner truncates the last token and decodes it again
    /// then.
    NotBefore(Time),
    /// The choice ends here, without a further token.
    End(FinishReason),
    /// The request ends here.
    Failed(EngineError),
}

/// A part of a saved state with a row of `row_bytes` bytes for each token, in the order of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowArea {
    /// Where the first row begins in the state, in bytes.
    pub start: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
}

/// A saved state whose parts with rows are known.
#[derive(Clone, Debug)]
pub struct StateRows<'a> {
    /// What [`Model::restore`] makes the slot of. The saved state itself, if its rows are in the order of the tokens.
    pub state: Cow<'a, [u8]>,
    /// In ascending order and without overlap.
    pub areas: Vec<RowArea>,
}

/// Finds the rows in a saved state of so many tokens; `None` if it has another form. Where the rows of two states are
/// equal, they are kept in memory once.
pub type RowFinder = fn(state: &[u8], tokens: usize) -> Option<StateRows<'_>>;

/// A model, called from the owner's thread only.
///
/// A panic in [`Model::decode`] ends the requests of the batch, a panic in [`Model::row`] ends that request, and one in
/// any other call ends all of them. The owner then releases their slots and continues, so `release` must still work
/// after a panic.
pub trait Model: Send {
    /// Returns what the model is and can do; the same at every call.
    fn info(&self) -> ModelInfo;

    /// Returns its vocabulary; the same at every call.
    fn vocabulary(&self) -> SharedVocabulary;

    /// Returns its capacity; the same at every call.
    fn capacity(&self) -> Capacity;

    /// Returns what decode calls took while the model was loaded; `None` if that was not measured.
    fn warm_times(&self) -> Option<WarmTimes> {
        None
    }

    /// Returns the present numbers of threads, if it computes with threads.
    fn threads(&self) -> Option<ThreadNumbers> {
        None
    }

    /// Receives the flag that aborts a running [`Model::decode`]; called once, before anything else. It is raised when
    /// the engine is dropped, so that a long decode call does not delay the shutdown. A model with long decode calls
    /// calls [`DecodeSignals::pulse`] within them, so that the watchdog does not report it as stalled (OA-901).
    fn interrupt(&mut self, _flag: Interrupt) {}

    /// Makes a free slot an empty sequence.
    fn open(&mut self, slot: SlotId, opening: &SlotPurpose<'_>);

    /// Copies the first `tokens` tokens of `from` into `to`, which is open and empty. `from` holds at least as many;
    /// exactly as many if the model does not truncate ([`ModelInfo::truncates`]).
    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32);

    /// Does what [`Model::fork`] into a slot has left undone. Returns false if the slot does not hold `tokens` tokens, for
    /// example for lack of memory: it can then only be released. Otherwise the slot is used as any other one; before, it can
    /// only be rewound or released.
    fn finish_fork(&mut self, _slot: SlotId, _tokens: u32) -> bool {
        true
    }

    /// Returns whether a fork is made by the next decode call only. Until then, its two slots can be neither saved nor rewound, nor
    /// be restored after they were released ([`Model::is_copied_later`]).
    fn forks_later(&self) -> bool {
        false
    }

    /// Returns whether the next decode call copies from this slot, or to it, whatever it then holds.
    fn is_copied_later(&self, _slot: SlotId) -> bool {
        false
    }

    /// Returns how many bytes a fork of this slot copies; 0 if the copy shares the cells of its source.
    fn fork_bytes(&self, _from: SlotId) -> usize {
        0
    }

    /// Truncates a slot to its first `tokens` tokens; it holds at least as many. Never called with fewer than it holds
    /// on a model that does not truncate.
    fn truncate(&mut self, slot: SlotId, tokens: u32);

    /// Returns whether a slot, truncated to its first `tokens` tokens or copied up to there, still holds every position
    /// that the next token attends to (D-48). A model with sliding-window attention drops the positions before the
    /// window, so a slot that has advanced may be unable to resume from an earlier position. The owner asks before each
    /// [`Model::fork`] and each [`Model::truncate`] with fewer tokens than the slot holds, and computes anew if the
    /// answer is no.
    fn can_resume(&self, _slot: SlotId, _tokens: u32) -> bool {
        true
    }

    /// Computes with other LoRA adapters from the next decode call on: `scales` has a factor for each of
    /// [`ModelInfo::adapters`], 0 for those that are off. Before the first call
    /// they are those that the model applies by default. Called again after a panic, and otherwise only if they change.
    fn set_adapters(&mut self, _scales: &[f32]) {}

    /// Frees a slot.
    fn release(&mut self, slot: SlotId);

    /// Returns how many cells cached prefixes may keep while other slots are decoded. Where every decoded token scans the
    /// cells of all slots, more would cost time; asked once, after the model was loaded.
    fn idle_cells_max(&self) -> usize {
        usize::MAX
    }

    /// Returns how many bytes of memory saved slots may take by default; 0 if slots cannot be saved.
    fn saved_bytes_max(&self) -> usize {
        0
    }

    /// Returns whether a slot that was restored can be truncated to any number of tokens and continue there.
    fn restores_in_part(&self) -> bool {
        self.info().truncates
    }

    /// Returns how many bytes [`Model::save`] would return; 0 if none.
    fn saved_size(&mut self, _slot: SlotId) -> usize {
        0
    }

    /// Returns the state of a slot as bytes, from which [`Model::restore`] of the same loaded model makes it again.
    /// `None` if that is not possible.
    fn save(&mut self, _slot: SlotId) -> Option<Vec<u8>> {
        None
    }

    /// Returns how the rows of the tokens are found in a saved state; `None` if it is not made of rows.
    fn row_finder(&self) -> Option<RowFinder> {
        None
    }

    /// Returns a text that two loaded models have in common only if one can restore what the other has saved: of the same
    /// weights, with the same settings. `None` if that is not known.
    fn saved_identity(&self) -> Option<String> {
        None
    }

    /// Fills an open, empty slot with a saved state, which held so many tokens. Returns false, with an empty slot, if that
    /// is not possible, for example for lack of cells.
    fn restore(&mut self, _slot: SlotId, _state: &[u8], _tokens: u32) -> bool {
        false
    }

    /// Returns how a slot that has gone on can return to an earlier length. `None`: by [`Model::truncate`] alone, or not at
    /// all.
    fn checkpoint_terms(&self) -> Option<CheckpointTerms> {
        None
    }

    /// Returns how many bytes [`Model::checkpoint`] would return; 0 if none.
    fn checkpoint_size(&mut self, _slot: SlotId) -> usize {
        0
    }

    /// Returns what a slot loses as it goes on: the state of recurrent layers, or the last window of sliding-window layers.
    /// `None` if that is not possible now.
    fn checkpoint(&mut self, _slot: SlotId) -> Option<Vec<u8>> {
        None
    }

    /// Shortens a slot to its first `tokens` tokens, at which a checkpoint was made of this slot or of another one with the
    /// same tokens. The slot holds at least as many. Returns false if that is not possible: what the slot then holds is
    /// undefined, and it can only be released.
    fn rewind(&mut self, _slot: SlotId, _checkpoint: &[u8], _tokens: u32) -> bool {
        false
    }

    /// Returns how much of the last [`Model::decode`] was waiting for other models, which says nothing about what its tokens
    /// cost.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }

    /// Decodes the batch, whose entries all have the same LoRA adapters: at most [`Capacity::batch_tokens`] entries, those
    /// of one slot adjacent and in order, with at
    /// most [`Capacity::rows`] output rows.
    ///
    /// # Errors
    /// See [`DecodeStop`].
    fn decode(&mut self, batch: &[BatchEntry], now: Time) -> Result<(), DecodeStop>;

    /// Returns the output row of the entry at `index` in the last batch, which requested one. Called at most once per
    /// entry, before the next batch; not after its slot was truncated before the entry, or released.
    fn row(&mut self, index: usize, now: Time) -> OutputRow<'_>;

    /// Returns the logits of several entries of the last batch, which requested output rows, so that they are sampled on
    /// several threads at once: one for each of `indexes`, which ascend; `None` where only [`Model::row`] tells what there
    /// is instead. It is not asked for those that were given. Empty: the model gives its rows one at a time.
    fn rows(&mut self, _indexes: &[usize]) -> Vec<Option<&mut [f32]>> {
        Vec::new()
    }

    /// Returns whether the token at `output`, counted from 0 after the prompt, is reported in one event with the token
    /// that follows it. Only a model that simulates a server with larger fragments returns true.
    fn joins(&self, _slot: SlotId, _output: usize) -> bool {
        false
    }
}
