//! [`ControllerState`]: what the host keeps beside an instance, and what its host functions work on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Mask, SharedMask, StepReport, Token};
use wasmtime::{Memory, StoreContextMut, UpdateDeadline};

use super::LiveInstance;
use super::budget::InstanceLimiter;
use super::failure::Abort;
use super::group::{GroupMark, Member};
use super::handles::HostHandles;
use super::log::LogBuffer;
use super::long_texts::LongTexts;
use super::random::SeededRandom;
use super::result::{RawResult, Waits};
use super::writes::StepWrites;
use crate::module::Abi;
use crate::trie::{HostModel, TokenView};

/// What an engine can do for controllers (AI-506); controllers ask for it by `aici_host_get_config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// A step may return several branches.
    pub fork: bool,
    /// A splice may take back committed tokens.
    pub backtrack: bool,
    /// A splice may append tokens.
    pub ff_tokens: bool,
    /// A module that imports `top_logits` gets them (AI-1009). No engine on a wire can do this.
    pub logits: bool,
}

impl Capabilities {
    /// Everything, as our engine can.
    pub const ALL: Self = Self {
        fork: true,
        backtrack: true,
        ff_tokens: true,
        logits: true,
    };

    /// What the engine of a wire without flags can do: everything of the protocol.
    pub const WIRE: Self = Self {
        logits: false,
        ..Self::ALL
    };

    fn of_name(self, name: &[u8]) -> bool {
        match name {
            b"fork" => self.fork,
            b"backtrack" => self.backtrack,
            b"ff_tokens" => self.ff_tokens,
            b"logits" => self.logits,
            _ => false,
        }
    }
}

/// What all instances of a request have in common. A fork shares it.
#[derive(Clone, Debug)]
pub(super) struct Surroundings {
    pub(super) model: Arc<HostModel>,
    pub(super) arg: Arc<str>,
    pub(super) abi: Abi,
    pub(super) capabilities: Capabilities,
    pub(super) timer_resolution: Duration,
    pub(super) result_bytes: usize,
    /// `None` in a controller's process, which is killed when it is late, and may have no second thread (AI-702).
    pub(super) long_texts: Option<Arc<LongTexts>>,
}

/// The best tokens of the last output row, with their log-probabilities.
pub(super) type BestTokens = Arc<[(Token, f32)]>;

/// The blobs that outlast a callback, so that a fork has them (AI-711).
#[derive(Clone, Debug, Default)]
pub(super) struct Blobs {
    /// Blob 2.
    pub(super) tokenized: Vec<u8>,
    /// Blob 4.
    pub(super) process_arg: Vec<u8>,
    /// Blob 5.
    pub(super) storage: Vec<u8>,
    /// Blob 6: why there is no constraint.
    pub(super) constraint_error: Vec<u8>,
    /// Blob 7.
    pub(super) forced: Vec<u8>,
}

impl Blobs {
    /// Bytes of those that a controller can make large.
    pub(super) fn bytes(&self) -> usize {
        self.tokenized.capacity() + self.storage.capacity() + self.forced.capacity()
    }
}

/// The data of an instance's store.
pub(super) struct ControllerState {
    pub(super) surroundings: Surroundings,
    pub(super) limiter: InstanceLimiter,
    pub(super) blobs: Blobs,
    /// Outlast a callback, as blobs do.
    pub(super) handles: HostHandles,
    /// `None`: nothing is drawn.
    pub(super) random: Option<SeededRandom>,
    /// Known once the module is instantiated; only its start function runs earlier.
    pub(super) memory: Option<Memory>,
    pub(super) best: BestTokens,
    /// The sequence, 0 before it is bound.
    pub(super) number: u32,
    /// What the clock of P2 controllers counts from.
    pub(super) instantiated: Instant,
    pub(super) result: RawResult,
    /// Limits `result.json`: `result_bytes`, and more at the start, where a P2 controller returns the whole prompt.
    pub(super) result_bytes: usize,
    pub(super) log: LogBuffer,
    pub(super) writes: StepWrites,
    deadline: Deadline,
    member: Member,
    /// Taken before the callback.
    mark: GroupMark,
    /// Counts the instance for as long as it takes memory.
    _live: LiveInstance,
}

/// When a callback is interrupted.
#[derive(Clone, Debug)]
pub(super) struct Deadline {
    /// `None`: never, as with `--run`.
    pub(super) at: Option<Instant>,
    /// Nobody waits for the result any more.
    pub(super) cancelled: Arc<AtomicBool>,
}

impl Deadline {
    /// Interrupts the callback if it must end. Called at each tick of the epoch clock while guest code runs.
    pub(super) fn check(&self) -> Result<(), Abort> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Abort::stop("cancelled"));
        }
        if self.at.is_some_and(|at| Instant::now() >= at) {
            return Err(Abort::limit(ErrorReason::TIMEOUT, "timeout"));
        }
        Ok(())
    }
}

impl ControllerState {
    pub(super) fn new(
        surroundings: Surroundings,
        limiter: InstanceLimiter,
        (member, live): (Member, LiveInstance),
        cancelled: Arc<AtomicBool>,
    ) -> Self {
        let result_bytes = surroundings.result_bytes;
        Self {
            surroundings,
            limiter,
            blobs: Blobs::default(),
            handles: HostHandles::default(),
            random: None,
            memory: None,
            best: BestTokens::default(),
            number: 0,
            instantiated: Instant::now(),
            result: RawResult::default(),
            result_bytes,
            log: LogBuffer::default(),
            writes: StepWrites::default(),
            deadline: Deadline {
                at: None,
                cancelled,
            },
            member,
            mark: GroupMark::default(),
            _live: live,
        }
    }

    pub(super) fn member(&self) -> &Member {
        &self.member
    }

    /// See [`Member::leave`].
    pub(super) fn leave(&mut self) {
        self.member.leave();
    }

    pub(super) fn set_deadline(&mut self, at: Option<Instant>) {
        self.deadline.at = at;
    }

    pub(super) fn check_deadline(&self) -> Result<(), Abort> {
        self.deadline.check()
    }

    /// How long the callback may go on; `None` without a limit.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let at = self.deadline.at?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    /// Charges handles and blobs, of which one has grown or is new.
    pub(super) fn charge_kept(&mut self) -> Result<(), Abort> {
        self.limiter.hold(self.handles.bytes() + self.blobs.bytes())
    }

    pub(super) fn token_view(&self) -> TokenView {
        match self.surroundings.abi {
            Abi::P1 => TokenView::Plain,
            Abi::P2 => TokenView::Named,
        }
    }

    pub(super) fn vocabulary(&self) -> usize {
        self.surroundings.model.vocabulary()
    }

    pub(super) fn capability(&self, name: &[u8]) -> bool {
        self.surroundings.capabilities.of_name(name)
    }

    /// Forgets what the last callback left, before the next one.
    pub(super) fn begin_call(&mut self, process_arg: Vec<u8>, deadline: Option<Instant>) {
        self.blobs.process_arg = process_arg;
        self.result = RawResult::default();
        self.mark = self.member.group().mark();
        self.set_deadline(deadline);
    }

    /// What a result that waits refers to.
    pub(super) const fn waits(&self) -> Waits<'_> {
        Waits {
            member: &self.member,
            mark: self.mark,
        }
    }

    /// Takes what the callbacks printed and wrote; the time is the caller's to add.
    pub(super) fn take_report(&mut self) -> StepReport {
        StepReport {
            logs: self.log.take(),
            storage: self.writes.take(),
            micros: 0,
        }
    }

    /// Adds what was printed since to a report of a failure.
    pub(super) fn append_after_error(&mut self, report: &mut StepReport) {
        let printed = self.log.take();
        self.log.push(report.logs.as_bytes());
        self.log.push_after_error(printed.as_bytes());
        report.logs = self.log.take();
    }

    /// Takes a mask that a controller wrote.
    pub(super) fn add_mask_words(&mut self, words: Vec<u32>) -> Result<u32, Abort> {
        let mask = Mask::from_words(words, self.vocabulary())
            .ok_or_else(|| Abort::trap("a mask of the wrong size"))?;
        self.add_mask(Arc::new(mask))
    }

    /// Takes a mask of a controller. Returns its handle (P2).
    ///
    /// A mask that allows no token would make the engine divide by zero or be ignored, so it becomes end-of-sequence
    /// alone (AI-237).
    pub(super) fn add_mask(&mut self, mut mask: SharedMask) -> Result<u32, Abort> {
        let union = self.surroundings.abi == Abi::P1;
        // P1: whether the union is empty is known after the callback only.
        if !union && mask.is_empty() {
            Arc::make_mut(&mut mask).allow(self.surroundings.model.eos());
            self.log.push(EMPTY_MASK.as_bytes());
        }
        let masks = &mut self.result.masks;
        if union && let Some(previous) = masks.pop() {
            Arc::make_mut(&mut mask).unite(&previous);
        }
        if masks.len() >= MASKS_MAX {
            let text = format!("more than {MASKS_MAX} masks in one callback");
            return Err(Abort::limit(ErrorReason::LIMIT, text));
        }
        let handle = u32::try_from(masks.len()).unwrap_or(u32::MAX);
        masks.push(mask);
        Ok(handle)
    }

    /// Takes the result of a callback that returned. An empty union of masks becomes end-of-sequence (AI-237).
    pub(super) fn take_result(&mut self) -> RawResult {
        let mut result = std::mem::take(&mut self.result);
        let union = self.surroundings.abi == Abi::P1;
        if union
            && let Some(mask) = result.masks.first_mut()
            && mask.is_empty()
        {
            Arc::make_mut(mask).allow(self.surroundings.model.eos());
            self.log.push(EMPTY_MASK.as_bytes());
        }
        result
    }
}

/// Token ids as the blob of them.
pub(super) fn token_blob(tokens: &[Token]) -> Vec<u8> {
    let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
    bytes.collect()
}

/// Interrupts late callbacks: installed as the store's epoch callback.
pub(super) fn on_epoch(
    context: &StoreContextMut<'_, ControllerState>,
) -> wasmtime::Result<UpdateDeadline> {
    context.data().check_deadline()?;
    Ok(UpdateDeadline::Continue(1))
}

const EMPTY_MASK: &str = "empty mask: only EOS allowed\n";
/// Each takes an eighth of a byte per token of the vocabulary, and more than branches are of no use.
pub(super) const MASKS_MAX: usize = 256;
