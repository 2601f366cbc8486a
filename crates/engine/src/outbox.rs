//! The bounded event queue from the owner to one reader, with wake-ups in both directions.
//!
//! Neither end takes a lock, so a reader cannot delay the owner. The sender keeps the queue bounded: a choice whose
//! unread token events reach the quota is parked. Reports of steerers count as well, large ones several times. A reader
//! sees whole steps only: published events become visible when it is woken, so the last token of a choice never arrives
//! without its `Finish`.
//!
//! ```text
//!   Sender ── publish ──► queue ──► RequestHandle          show and wake once per step
//!   Sender ◄── flags: closed, stop, room again ── RequestHandle, wakes the owner
//! ```

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::thread::Thread;

use crossbeam_queue::SegQueue;
use futures::Stream;
use futures::task::AtomicWaker;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::StepWaker;

use crate::api::{EngineError, EngineEvent, EventKind};

/// Wakes the owner after a change that the owner reads only when it is woken (D-7).
#[derive(Debug, Default)]
pub(crate) struct OwnerWaker {
    woken: AtomicBool,
    /// Wake-ups of steerers.
    steered: AtomicU32,
    /// Those of them that came before the present step. Only the owner writes it.
    steered_before: AtomicU32,
    closing: AtomicBool,
    /// Saved prefixes shall be dropped.
    trimming: AtomicBool,
    thread: OnceLock<Thread>,
}

impl OwnerWaker {
    /// Sets the thread to unpark. Without a thread, [`OwnerWaker::wake`] only sets the flag.
    pub(crate) fn set_thread(&self, thread: Thread) {
        // Each waker has one owner, whose thread calls this once.
        let _ = self.thread.set(thread);
    }

    pub(crate) fn wake(&self) {
        // The flag before `unpark`: the owner that returns from `park` must find it.
        self.woken.store(true, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Returns whether the owner was woken since the last call.
    pub(crate) fn is_observed(&self) -> bool {
        // A plain load first: the flag is rarely set, and a swap in every step would take the cache line from the
        // readers. `Acquire` pairs with `wake`, so that what was changed before the wake-up is seen.
        self.woken.load(Ordering::Relaxed) && self.woken.swap(false, Ordering::Acquire)
    }

    /// Starts a step, which sees every result that was there before.
    pub(crate) fn begin_step(&self) {
        self.steered_before.store(self.steered(), Ordering::Relaxed);
    }

    /// Counts the wake-ups of steerers, and wraps. What led to those counted is seen.
    pub(crate) fn steered(&self) -> u32 {
        // `Acquire` pairs with `StepWaker::wake`.
        self.steered.load(Ordering::Acquire)
    }

    /// Returns whether the owner was woken since [`OwnerWaker::begin_step`] and [`OwnerWaker::is_observed`].
    pub(crate) fn is_woken(&self) -> bool {
        self.steered() != self.steered_before() || self.woken.load(Ordering::Acquire)
    }

    /// What [`OwnerWaker::steered`] was when the present step began.
    pub(crate) fn steered_before(&self) -> u32 {
        self.steered_before.load(Ordering::Relaxed)
    }

    pub(crate) fn close(&self) {
        // Before the wake-up, or the owner could go back to sleep without having seen it.
        self.closing.store(true, Ordering::Release);
        self.wake();
    }

    /// Asks the owner to drop its saved prefixes.
    pub(crate) fn trim(&self) {
        self.trimming.store(true, Ordering::Release);
        self.wake();
    }

    /// Returns whether that was asked since the last call.
    pub(crate) fn is_trimmed(&self) -> bool {
        // A plain load first, as in `is_observed`.
        self.trimming.load(Ordering::Relaxed) && self.trimming.swap(false, Ordering::Acquire)
    }

    /// Returns the error for requests that lose their owner: the model was unloaded, or its thread ended unexpectedly.
    pub(crate) fn closed_error(&self) -> EngineError {
        let (reason, message) = if self.is_closing() {
            (ErrorReason::MODEL_UNLOADED, "the model was unloaded")
        } else {
            (ErrorReason::ENGINE_DEAD, "the engine stopped")
        };
        EngineError::new(Code::Unavailable, reason, message)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

/// For steerers, whose wake-ups are frequent: readers are not looked at for them.
impl StepWaker for OwnerWaker {
    fn wake(&self) {
        self.steered.fetch_add(1, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// What a reader has requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReaderRequest {
    /// Continue.
    Continue,
    /// End every choice here; the output so far remains valid.
    Stop,
    /// The reader was dropped.
    Closed,
}

const CONTINUE: u8 = 0;
const STOP: u8 = 1;
const CLOSED: u8 = 2;

#[derive(Debug)]
struct OutboxShared {
    queue: SegQueue<EngineEvent>,
    /// How many events the reader may have popped by now: those of whole steps.
    shown: AtomicU64,
    /// The weight of those. It is written before `shown` and may be ahead of it.
    shown_weight: AtomicU64,
    /// Weight of the events that were read, per choice. Only the reader writes it.
    read: Box<[AtomicU32]>,
    quota: u32,
    request: AtomicU8,
    /// A choice is parked, so the owner wants to be woken when there is room.
    parked: AtomicBool,
    ended: AtomicBool,
    reader: AtomicWaker,
    owner: Arc<OwnerWaker>,
}

/// Creates both ends for a request of at most `choices` choices, each with at most `quota` unread token events.
pub(crate) fn outbox(choices: u32, quota: u32, owner: Arc<OwnerWaker>) -> (Sender, RequestHandle) {
    let shared = Arc::new(OutboxShared {
        queue: SegQueue::new(),
        shown: AtomicU64::new(0),
        shown_weight: AtomicU64::new(0),
        read: (0..choices.max(1)).map(|_| AtomicU32::new(0)).collect(),
        quota: quota.max(1),
        request: AtomicU8::new(CONTINUE),
        parked: AtomicBool::new(false),
        ended: AtomicBool::new(false),
        reader: AtomicWaker::new(),
        owner,
    });
    let handle = RequestHandle {
        shared: Arc::clone(&shared),
        taken: 0,
        taken_weight: 0,
        prompt_tokens: 0,
        prompt_tail: String::new(),
        seed: 0,
    };
    let sender = Sender {
        shared,
        step: 0,
        published: 0,
        published_weight: 0,
        whole: false,
        reported: vec![0; choices.max(1) as usize].into(),
    };
    (sender, handle)
}

/// The owner's end. Dropping it before [`Sender::end`] sends the reader an error: the model was unloaded or the engine
/// stopped.
#[derive(Debug)]
pub(crate) struct Sender {
    shared: Arc<OutboxShared>,
    step: u64,
    published: u64,
    published_weight: u64,
    /// The last event of the request was published.
    whole: bool,
    /// Weight of the events that were published, per choice.
    reported: Box<[u32]>,
}

impl Sender {
    /// Returns whether the choice may produce another token event.
    pub(crate) fn has_room(&self, choice: u32) -> bool {
        self.room(choice) > 0
    }

    /// Returns how many token events the choice may still produce.
    pub(crate) fn room(&self, choice: u32) -> u32 {
        let choice = choice as usize;
        // Wrapping counters: only their difference matters, and it never exceeds the quota by more than one step, whose
        // reports weigh far less than the counters hold.
        let counts = self.reported.get(choice).zip(self.shared.read.get(choice));
        counts.map_or(0, |(sent, read)| {
            let unread = sent.wrapping_sub(read.load(Ordering::SeqCst));
            self.shared.quota.saturating_sub(unread)
        })
    }

    /// Asks the reader to wake the owner when it has made room. Check [`Sender::has_room`] again afterwards: the reader
    /// may have made room just before it could see this flag.
    pub(crate) fn park(&self) {
        // Already asked. In the single order of `SeqCst`, a reader that makes room after the check of `has_room` that
        // follows finds the flag, as it would after a store.
        if self.shared.parked.load(Ordering::SeqCst) {
            return;
        }
        // `SeqCst` on both sides: this store and the load in `has_room` concern different variables, and weaker
        // orderings allow the load to come first. Then the owner could park while the reader sees no flag, and neither
        // would wake the other.
        self.shared.parked.store(true, Ordering::SeqCst);
    }

    pub(crate) fn reader_request(&self) -> ReaderRequest {
        match self.shared.request.load(Ordering::Acquire) {
            CONTINUE => ReaderRequest::Continue,
            STOP => ReaderRequest::Stop,
            _ => ReaderRequest::Closed,
        }
    }

    /// Appends an event; the reader neither sees it nor is woken before [`Sender::wake`] or [`Sender::end`].
    pub(crate) fn publish(&mut self, event: EngineEvent) {
        self.step = event.step;
        // Read by `fail`, so that a panic after the last event adds no second one.
        self.whole |= matches!(event.kind, EventKind::Usage(_) | EventKind::Error(_));
        // Each choice has one `Finish`, and the request one last event, so these are bounded anyway.
        let weight = weight(&event.kind);
        if let Some(sent) = self.reported.get_mut(event.choice as usize) {
            *sent = sent.wrapping_add(weight);
        }
        self.published_weight += u64::from(weight);
        self.shared.queue.push(event);
        self.published += 1;
    }

    /// Ends the request with an error, unless its last event was published.
    pub(crate) fn fail(&mut self, error: EngineError) {
        if !self.whole {
            self.publish(EngineEvent {
                step: self.step,
                choice: 0,
                kind: EventKind::Error(error),
            });
        }
        self.end();
    }

    /// Marks the stream as complete.
    pub(crate) fn end(&self) {
        // `ended` after the events are visible: a reader that sees it looks at the queue once more and then ends its
        // stream.
        self.show();
        self.shared.ended.store(true, Ordering::Release);
    }

    pub(crate) fn wake(&self) {
        self.show();
        self.shared.reader.wake();
    }

    /// Makes all published events visible: the step is complete.
    fn show(&self) {
        let shared = &self.shared;
        // The weight first: a reader that sees the events must not find a weight below that of what it takes.
        shared
            .shown_weight
            .store(self.published_weight, Ordering::Release);
        shared.shown.store(self.published, Ordering::Release);
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.shared.ended.load(Ordering::Acquire) {
            let error = self.shared.owner.closed_error();
            self.fail(error);
        }
        self.wake();
    }
}

/// A request in progress: a stream of its events. Dropping it cancels the request before the next step (D-7).
///
/// The stream ends after `Usage` or `Error`. While it is not read, its choices are parked at their quota of unread
/// events, and no event is lost.
#[derive(Debug)]
pub struct RequestHandle {
    shared: Arc<OutboxShared>,
    /// Number of events popped.
    taken: u64,
    /// Their weight.
    taken_weight: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) prompt_tail: String,
    pub(crate) seed: u64,
}

impl RequestHandle {
    /// Returns the number of tokens of the prompt, as it was submitted: a steerer may replace it ([`TokenUsage`] has the
    /// tokens in the end).
    ///
    /// [`TokenUsage`]: crate::api::TokenUsage
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Returns the text of the last tokens of a prompt that a chat template rendered, with the names of its marked
    /// tokens ([`GenerationRequest::marked`]); empty for other prompts.
    ///
    /// [`GenerationRequest::marked`]: crate::api::GenerationRequest::marked
    #[must_use]
    pub fn prompt_tail(&self) -> &str {
        &self.prompt_tail
    }

    /// Returns the seed in use.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Ends every choice before the next step. Each then sends its held-back text and `Finish` with
    /// [`crate::api::FinishReason::Cancelled`]; `Usage` is last.
    pub fn stop(&self) {
        // Only from `CONTINUE`: `CLOSED` is final.
        let _ = self.shared.request.compare_exchange(
            CONTINUE,
            STOP,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        self.shared.owner.wake();
    }

    /// Returns the next event if one is available, without waiting.
    pub fn try_next(&mut self) -> Option<EngineEvent> {
        let shown = self.shared.shown.load(Ordering::Acquire);
        if self.taken == shown {
            return None;
        }
        let event = self.shared.queue.pop()?;
        self.taken += 1;
        let weight = weight(&event.kind);
        self.taken_weight += u64::from(weight);
        if weight > 0
            && let Some(read) = self.shared.read.get(event.choice as usize)
        {
            let count = read.load(Ordering::Relaxed).wrapping_add(weight);
            // The count is stored before `parked` is loaded: the owner sets `parked` and then loads the count, so one
            // of the two sees the other's write.
            read.store(count, Ordering::SeqCst);
        }
        // Waits until half a quota is free, so that the owner is not woken and parked again for every single token. Any
        // event may be the one that reaches this point: ends of other choices can follow the last tokens of a parked
        // one. The weight is loaded after the flag: what the owner had shown when it parked a choice is counted. Should
        // it have parked another one since, it asks again.
        if self.shared.parked.load(Ordering::SeqCst)
            && self.unread_weight() <= u64::from(self.shared.quota / 2)
            && self.shared.parked.swap(false, Ordering::SeqCst)
        {
            self.shared.owner.wake();
        }
        Some(event)
    }

    /// The weight of what is in the queue.
    fn unread_weight(&self) -> u64 {
        let shown = self.shared.shown_weight.load(Ordering::Acquire);
        shown.saturating_sub(self.taken_weight)
    }
}

/// What an event takes of its choice's quota. The same when it is published and when it is read.
fn weight(event: &EventKind) -> u32 {
    match event {
        EventKind::Tokens(_) => 1,
        EventKind::Report(report) => {
            // Steerers decide how long a report is: some bytes count as much as an event.
            let writes = report.storage.iter();
            let bytes = writes.fold(report.logs.len(), |bytes, write| {
                bytes.saturating_add(write.held_bytes())
            });
            u32::try_from(bytes / REPORT_BYTES)
                .unwrap_or(u32::MAX)
                .saturating_add(1)
        }
        // Each choice has one end, and the request one usage or error.
        EventKind::Finish(_) | EventKind::Failed(_) | EventKind::Usage(_) | EventKind::Error(_) => {
            0
        }
    }
}

/// Bytes of a report that count as much as an event of tokens.
const REPORT_BYTES: usize = 4096;

impl Stream for RequestHandle {
    type Item = EngineEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<EngineEvent>> {
        if let Some(event) = self.try_next() {
            return Poll::Ready(Some(event));
        }
        // Registered before the second look, so that an event which arrives in between wakes this task.
        self.shared.reader.register(cx.waker());
        // `ended` is loaded before the queue is checked, so everything published before the end is seen.
        let ended = self.shared.ended.load(Ordering::Acquire);
        match self.try_next() {
            Some(event) => Poll::Ready(Some(event)),
            None if ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        // A store, not an exchange: dropping replaces a stop that the owner has not seen.
        self.shared.request.store(CLOSED, Ordering::Release);
        if !self.shared.ended.load(Ordering::Acquire) {
            self.shared.owner.wake();
        }
    }
}

#[cfg(test)]
mod tests;
