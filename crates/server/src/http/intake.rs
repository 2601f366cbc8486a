//! Charges a request body to the byte budget as it arrives (D-47), and gives up one that stops arriving (OA-911).
//!
//! Until the response begins, everything that arrived is held. From then on the body is a stream of messages, and only the
//! message that is not complete is held: a poll for more means that the reader has taken the others.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

use crate::auth::identity::CallerIdentity;
use crate::http::body_budget::{BodyBudget, BudgetFull, Reservation, overloaded};
use crate::http::drain_body::UnreadRemainder;
use crate::http::rejection::Rejection;
use crate::http::timeouts;
use crate::http::upload_pace::UploadPace;

/// State shared by a request's body, its reader and the middleware. Stands in the request's extensions.
pub(crate) struct BodyIntake {
    budget: Arc<BodyBudget>,
    caller: CallerIdentity,
    /// What still arrives is read and discarded, and is not charged.
    discarded: AtomicBool,
    /// The idle timeout does not apply.
    exempt: AtomicBool,
    /// Nothing more is read of it for now.
    held_back: AtomicBool,
    /// The first failure; later ones are consequences of it.
    failure: OnceLock<BodyFailure>,
    /// The budget also holds bytes that were decompressed from it.
    unpacked: AtomicBool,
    /// What is kept until the response begins; `None` from then on. One lock for both fields: a charge that was added after
    /// [`BodyIntake::answered`] would never be refunded.
    kept: Mutex<Option<KeptUntilAnswer>>,
    /// Bytes of an unneeded body that are read before its answer is sent.
    drain_bytes: u64,
    /// The idle timeout: the longest pause, and, while something is charged, the time in which [`UploadPace`]'s minimum must
    /// arrive.
    idle: Duration,
}

/// Why the rest of a body is not read. The middleware answers with it in place of the handler, which only sees a failed read
/// and cannot know the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyFailure {
    /// It stopped arriving.
    Stalled,
    /// It arrived too slowly for what it held.
    Slow,
    /// There was no room for it in the byte budget.
    Overloaded,
}

impl BodyFailure {
    /// The answer to its request.
    pub(crate) fn rejection(self) -> Rejection {
        match self {
            Self::Stalled => timeouts::stalled(),
            Self::Slow => timeouts::slow(),
            Self::Overloaded => overloaded(),
        }
    }
}

#[derive(Default)]
struct KeptUntilAnswer {
    reservations: Vec<Reservation>,
    /// The body, if its reader has dropped it before its end.
    leftover: Option<UnreadRemainder>,
}

/// How a body is divided into messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Each ends with a line feed.
    Lines,
    /// Each begins with a byte of flags and its length in four (gRPC).
    Grpc,
}

impl BodyIntake {
    /// For a body of `caller` of which nothing has arrived.
    pub(crate) fn new(
        budget: Arc<BodyBudget>,
        caller: CallerIdentity,
        drain_bytes: u64,
        idle: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            budget,
            caller,
            drain_bytes,
            idle,
            discarded: AtomicBool::new(false),
            exempt: AtomicBool::new(false),
            held_back: AtomicBool::new(false),
            failure: OnceLock::new(),
            unpacked: AtomicBool::new(false),
            kept: Mutex::new(Some(KeptUntilAnswer::default())),
        })
    }

    /// The same body, watched and charged.
    pub(crate) fn watching(self: &Arc<Self>, body: Body, framing: Framing) -> Body {
        // Nothing can arrive: a GET needs no watch.
        if body.is_end_stream() {
            return body;
        }
        Body::new(ChargedBody {
            body,
            reservation: self.reserve(),
            intake: Arc::clone(self),
            charged: 0,
            read: 0,
            begun: false,
            frame: None,
            pause: None,
            pace: UploadPace::new(self.idle),
            cutter: MessageBounds::new(framing),
        })
    }

    /// The bytes of an unneeded body that are read before its answer is sent.
    pub(crate) const fn drain_bytes(&self) -> u64 {
        self.drain_bytes
    }

    /// A reservation for something else that this request needs, such as unpacked bytes.
    pub(crate) fn reserve(&self) -> Reservation {
        self.budget.reserve(self.caller.clone())
    }

    /// The caller's number, by which the thread pool takes turns between callers.
    pub(crate) fn turn(&self) -> u64 {
        self.caller.number()
    }

    /// Holds `reservation` until the response begins; releases it at once if it has begun.
    pub(crate) fn keep(&self, reservation: Reservation) {
        // Most are empty, because small bodies are not charged.
        if !reservation.is_empty()
            && let Some(kept) = &mut *self.kept()
        {
            kept.reservations.push(reservation);
        }
    }

    /// Takes over the charge of a body that was read, which would be refunded when the response begins. For handlers that keep
    /// the body for longer.
    pub(crate) fn take_kept(&self) -> Vec<Reservation> {
        let mut kept = self.kept();
        let kept = kept.as_mut().map(|kept| &mut kept.reservations);
        kept.map(std::mem::take).unwrap_or_default()
    }

    /// The response begins: its input has been read, and all charges are refunded. Returns what was not read.
    pub(crate) fn answered(&self) -> Option<UnreadRemainder> {
        // Taken in a statement of its own: the refund takes the lock of the budget, and must not hold this one meanwhile.
        let kept = self.kept().take();
        kept?.leftover
    }

    fn kept(&self) -> MutexGuard<'_, Option<KeptUntilAnswer>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the response has begun.
    pub(crate) fn has_answered(&self) -> bool {
        self.kept().is_none()
    }

    /// From now on what arrives is only read to its end, without a charge.
    pub(crate) fn discard(&self) {
        self.discarded.store(true, Ordering::Relaxed);
    }

    /// Exempts the body from the idle timeout, or ends the exemption. Returns whether that is a change; the caller polls the
    /// body again then, because the timer is only started and stopped by a poll.
    pub(crate) fn exempt(&self, exempt: bool) -> bool {
        self.exempt.swap(exempt, Ordering::Relaxed) != exempt
    }

    /// Reads nothing more of the body, or goes on with it. Returns whether that is a change; the caller polls the body again
    /// then. For streams of messages whose earlier ones hold their [`share`](Self::share): the client is stopped through flow
    /// control, where the budget would refuse it.
    pub(crate) fn hold_back(&self, held: bool) -> bool {
        self.held_back.swap(held, Ordering::Relaxed) != held
    }

    /// Bytes that the messages of one stream may hold before it is held back: several streams of one caller fit its budget.
    pub(crate) fn share(&self) -> usize {
        self.budget.each() / STREAMS
    }

    /// Something that was reserved for this request found no room in the budget.
    pub(crate) fn overrun(&self) {
        self.give_up(BodyFailure::Overloaded);
    }

    fn give_up(&self, failure: BodyFailure) {
        // A second cause is a consequence of the first.
        let _ = self.failure.set(failure);
        self.discard();
    }

    /// Why it was given up, if it was.
    pub(crate) fn failure(&self) -> Option<BodyFailure> {
        self.failure.get().copied()
    }

    /// Notes whether unpacked bytes of it are charged: then its client has to keep sending, or it would hold them for nothing.
    pub(crate) fn holds_unpacked(&self, holds: bool) {
        self.unpacked.store(holds, Ordering::Relaxed);
    }

    fn is(&self, flag: &AtomicBool) -> bool {
        flag.load(Ordering::Relaxed)
    }
}

/// A body that is watched and charged.
struct ChargedBody {
    body: Body,
    intake: Arc<BodyIntake>,
    reservation: Reservation,
    /// Bytes that arrived and are still held.
    charged: usize,
    /// Bytes that arrived in all.
    read: u64,
    /// It was polled at least once: something may have been read.
    begun: bool,
    /// A frame that waits for room in the budget.
    frame: Option<Frame<Bytes>>,
    /// Runs while nothing arrives. Not while a frame waits for room in the budget: that wait is ours and not the client's.
    pause: Option<Pin<Box<Sleep>>>,
    pace: UploadPace,
    cutter: MessageBounds,
}

impl ChargedBody {
    /// Charges `more` bytes; pending while the budget has no room for them.
    fn poll_room(&mut self, more: usize, cx: &mut Context<'_>) -> Poll<Result<(), BudgetFull>> {
        // Checked for each piece, because a reader can give a body up while it arrives.
        if self.intake.is(&self.intake.discarded) {
            self.charged = 0;
            self.reservation.shrink(0);
            return Poll::Ready(Ok(()));
        }
        let retained = self.charged.saturating_add(more);
        ready!(self.reservation.poll_hold(retained, cx))?;
        self.charged = retained;
        Poll::Ready(Ok(()))
    }

    /// Runs the timers while nothing arrives; ready when one of them ends the body.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<BodyFailure> {
        if self.intake.is(&self.intake.exempt) {
            // Dropped and not paused: after the exemption the client gets a whole new limit.
            self.pause = None;
        } else {
            let idle = self.intake.idle;
            let pause = self.pause.get_or_insert_with(|| Box::pin(sleep(idle)));
            if pause.as_mut().poll(cx).is_ready() {
                return Poll::Ready(BodyFailure::Stalled);
            }
        }
        // A client that holds nothing of the budget may be as slow as it likes: a session over gRPC may be silent for hours.
        if self.reservation.is_empty() && !self.intake.is(&self.intake.unpacked) {
            self.pace.rest();
            return Poll::Pending;
        }
        self.pace.poll_late(cx).map(|()| BodyFailure::Slow)
    }

    /// Refunds what was charged, and returns the error for the reader.
    fn give_up(&mut self, failure: BodyFailure) -> axum::Error {
        self.intake.give_up(failure);
        self.charged = 0;
        self.reservation.shrink(0);
        // A gRPC status, because the library shows it to the client as it is, where it would make UNKNOWN of another error.
        axum::Error::new(failure.rejection().to_status())
    }
}

impl hyper::body::Body for ChargedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        this.begun = true;
        // A frame that waits for room comes first; until it has room no other is read, which stops the client through flow
        // control.
        if this.frame.is_none() {
            if this.intake.has_answered() {
                // A reader that asks for more has taken the complete messages; only the unfinished one is still in memory.
                this.charged = this.cutter.unfinished;
                this.reservation.shrink(this.charged);
            }
            if this.intake.is(&this.intake.held_back) {
                // Below the refund, because what was taken is not in memory. The wait is ours and not the client's.
                this.pause = None;
                this.pace.rest();
                return Poll::Pending;
            }
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let bytes = frame.data_ref().map_or(0, Bytes::len);
                    this.read += bytes as u64;
                    this.pace.came(bytes);
                    this.pause = None;
                    this.frame = Some(frame);
                }
                Poll::Ready(end) => return Poll::Ready(end),
                Poll::Pending => {
                    let failure = ready!(this.poll_late(cx));
                    return Poll::Ready(Some(Err(this.give_up(failure))));
                }
            }
        }
        let more = this
            .frame
            .as_ref()
            .and_then(Frame::data_ref)
            .map_or(0, Bytes::len);
        if ready!(this.poll_room(more, cx)).is_err() {
            // The waiting frame is discarded like the rest, which can still be read to its end.
            this.frame = None;
            return Poll::Ready(Some(Err(this.give_up(BodyFailure::Overloaded))));
        }
        let frame = this.frame.take();
        // Only once it is handed on: while it waits it is no part of what the reader has seen.
        if let Some(data) = frame.as_ref().and_then(Frame::data_ref) {
            this.cutter.pass(data);
        }
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.frame.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A reader drops a body when it has read all of it, before it has used it; or when it refuses the request.
impl Drop for ChargedBody {
    fn drop(&mut self) {
        if !self.body.is_end_stream() {
            let leftover = UnreadRemainder {
                body: std::mem::take(&mut self.body),
                read: self.read,
                begun: self.begun,
            };
            if let Some(kept) = &mut *self.intake.kept() {
                kept.leftover = Some(leftover);
            }
        }
        if !self.intake.is(&self.intake.discarded) {
            // The reader has the last byte and now parses the whole: the memory is in use until the response begins, and the
            // charge with it.
            let none = self.intake.reserve();
            let reservation = std::mem::replace(&mut self.reservation, none);
            self.intake.keep(reservation);
        }
    }
}

/// Finds where messages end in the bytes of a body.
struct MessageBounds {
    framing: Framing,
    /// Bytes of the message that has begun and not ended, its head included.
    unfinished: usize,
    /// The first bytes of its head, until that is complete.
    head: [u8; GRPC_HEAD],
    /// Bytes of its payload that are still to come.
    left: usize,
}

impl MessageBounds {
    const fn new(framing: Framing) -> Self {
        Self {
            framing,
            unfinished: 0,
            head: [0; GRPC_HEAD],
            left: 0,
        }
    }

    fn pass(&mut self, data: &[u8]) {
        match self.framing {
            // Only the last line feed counts: every message before it is complete.
            Framing::Lines => match data.iter().rposition(|byte| *byte == b'\n') {
                Some(end) => self.unfinished = data.len() - end - 1,
                None => self.unfinished += data.len(),
            },
            Framing::Grpc => self.pass_grpc(data),
        }
    }

    fn pass_grpc(&mut self, mut data: &[u8]) {
        while let Some(first) = data.first() {
            // Byte by byte, because a frame of HTTP/2 may end anywhere, within the head too.
            if self.unfinished < GRPC_HEAD {
                self.head[self.unfinished] = *first;
                self.unfinished += 1;
                data = &data[1..];
                if self.unfinished == GRPC_HEAD {
                    let [_, length @ ..] = self.head;
                    self.left = u32::from_be_bytes(length) as usize;
                }
            } else {
                let part = self.left.min(data.len());
                self.left -= part;
                self.unfinished += part;
                data = &data[part..];
            }
            // After the head as well as after the payload: a message may be empty.
            if self.unfinished >= GRPC_HEAD && self.left == 0 {
                self.unfinished = 0;
            }
        }
    }
}

const GRPC_HEAD: usize = 5;
/// Streams of one caller whose held messages fill its budget. Each may have a further message that is being read, and counts twice
/// meanwhile: five streams of messages of 4 MiB fit.
const STREAMS: usize = 16;

#[cfg(test)]
mod tests;
