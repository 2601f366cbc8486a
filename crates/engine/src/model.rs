//! What the owner thread needs from a model: slots that hold sequences, a batch, and a row per sampled position.
//!
//! A model computes rows; everything else is decided by its caller, who keeps every promise written here as "the
//! owner".
//!
//! ```text
//!   slot:  free ── open ──► empty ── decode ──► holds n tokens ── truncate ──► holds fewer
//!                            └── fork (a copy of another slot's first tokens) ──┘      │
//!   any state ── release ──► free ◄──────────────────────────────────────────────────┘
//! ```
//!
//! All slots share one cache of [`Capacity::cells`] cells, one cell per token; slots that were forked share the cells
//! of their common tokens. The owner counts cells; a model that runs out all the same says [`DecodeStop::Full`]. A model whose slots
//! have cells of their own has so many that the count never ends before the slots do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use crate::api::{EngineError, FinishReason, ModelInfo, SharedVocabulary};
use crate::ranking::RankedRow;

/// The number of a place for one sequence in the model's cache, below [`Capacity::slots`].
pub type SlotId = u32;

/// What the engine's shell and a running [`Model::decode`] tell each other.
pub type Interrupt = Arc<DecodeSignals>;

/// A flag that asks a running [`Model::decode`] to return early with [`DecodeStop::Aborted`], and the pulse by which the model
/// shows that it gets on within a long pass.
#[derive(Debug)]
pub struct DecodeSignals {
    raised: AtomicBool,
    began: Instant,
    /// Milliseconds from `began` to the last pulse.
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
    /// Asks a running pass to return.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::Release);
    }

    /// Takes that back.
    pub fn lower(&self) {
        self.raised.store(false, Ordering::Release);
    }

    /// For the model, at short intervals within a pass: it gets on. True if it is asked to return.
    pub fn pulse(&self) -> bool {
        let elapsed = self.began.elapsed().as_millis();
        let elapsed = u64::try_from(elapsed).unwrap_or(u64::MAX);
        self.pulse_ms.store(elapsed, Ordering::Relaxed);
        self.raised.load(Ordering::Relaxed)
    }

    /// How long ago the last pulse was.
    #[must_use]
    pub fn since_pulse(&self) -> Duration {
        let pulse = Duration::from_millis(self.pulse_ms.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(pulse)
    }
}

/// What a model has room for. Fixed while it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Slots: those of running sequences ([`ModelInfo::parallel`]) and those kept for their prefixes. At least 1.
    pub slots: u32,
    /// Tokens that all slots hold together, shared ones counted once. At least [`ModelInfo::context_tokens`].
    pub cells: u32,
    /// Entries of one batch. At least [`ModelInfo::parallel`].
    pub batch_tokens: u32,
    /// Rows of one batch. At least [`ModelInfo::parallel`]; scoring uses what is beyond that.
    pub rows: u32,
}

/// What a slot is opened for. Real models need none of it; a scripted model computes its rows from it.
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
    /// Where.
    pub slot: SlotId,
    /// Its index in the sequence, from 0: always the number of tokens that the slot holds before it.
    pub position: u32,
    /// The token; always below the vocabulary's size.
    pub token: Token,
    /// Whether the owner will ask for the row after this token.
    pub row: bool,
}

/// Why a batch was not computed. Unless said otherwise the slots hold what they held before the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeStop {
    /// The cache has no room for the batch. The owner makes room and tries a smaller one.
    Full,
    /// The [`Interrupt`] was seen. The same batch may be tried again.
    Aborted,
    /// The batch failed. The owner ends the sequences in it and releases their slots; the others go on.
    Failed(EngineError),
    /// The model is lost. The owner ends everything and refuses what comes.
    Dead(EngineError),
}

/// What follows the last token of a slot.
#[derive(Debug)]
pub enum OutputRow<'a> {
    /// A logit for each token of the vocabulary. The owner overwrites it.
    Logits(&'a mut [f32]),
    /// The same, in closed form: only the owner knows whether the whole vector is needed (D-11).
    Ranked(RankedRow),
    /// There is no row before this instant. The owner takes the last token back and decodes it again then.
    NotBefore(Time),
    /// The choice ends here, without a further token.
    End(FinishReason),
    /// The request ends here.
    Failed(EngineError),
}

/// A model, called from the owner's thread only.
///
/// A panic in [`Model::decode`] ends the sequences of the batch, a panic in [`Model::row`] ends that one, and one in any
/// other call ends all; the owner then releases their slots and goes on, so after a panic `release` must still work.
pub trait Model: Send {
    /// What it is and can do; the same at every call.
    fn info(&self) -> ModelInfo;

    /// Its vocabulary; the same at every call.
    fn vocabulary(&self) -> SharedVocabulary;

    /// What it has room for; the same at every call.
    fn capacity(&self) -> Capacity;

    /// Hands over the flag that aborts a running [`Model::decode`]; called once, before anything else. The owner's
    /// shell raises it when the engine is dropped, so that a long pass does not delay the end. A model whose passes may
    /// be long calls [`DecodeSignals::pulse`] within them, so that nobody takes it for stuck (OA-901).
    fn interrupt(&mut self, _flag: Interrupt) {}

    /// Makes a free slot an empty sequence.
    fn open(&mut self, slot: SlotId, opening: &SlotPurpose<'_>);

    /// Copies the first `tokens` tokens of `from` into `to`, which is open and empty. `from` holds at least as many;
    /// exactly as many if the model does not truncate ([`ModelInfo::truncates`]).
    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32);

    /// Keeps the first `tokens` tokens of a slot that holds at least as many. Never called with fewer than it holds
    /// on a model that does not truncate.
    fn truncate(&mut self, slot: SlotId, tokens: u32);

    /// Whether a slot, cut to its first `tokens` tokens or copied so far, still holds every position that the next token
    /// attends to (D-48). A model whose layers see a window of tokens drops those before the window, so that a slot
    /// which has gone on may be too short to go back in. The owner asks before each [`Model::fork`] and each
    /// [`Model::truncate`] with fewer tokens than the slot holds, and computes anew where the answer is no.
    fn can_resume(&self, _slot: SlotId, _tokens: u32) -> bool {
        true
    }

    /// Frees a slot.
    fn release(&mut self, slot: SlotId);

    /// Computes the batch: at most [`Capacity::batch_tokens`] entries, those of one slot together and in order, with at
    /// most [`Capacity::rows`] rows.
    ///
    /// # Errors
    /// See [`DecodeStop`].
    fn decode(&mut self, batch: &[BatchEntry], now: Time) -> Result<(), DecodeStop>;

    /// The row of the entry at `index` in the last batch, which wanted one. Asked at most once per entry, before the
    /// next batch; not after its slot was cut back before the entry, or released.
    fn row(&mut self, index: usize, now: Time) -> OutputRow<'_>;

    /// Whether the token at `output`, counted from 0 after the prompt, is reported together with the one that
    /// follows it. A model that plays a server of larger pieces says so; all others tell of each as it comes.
    fn joins(&self, _slot: SlotId, _output: usize) -> bool {
        false
    }
}
