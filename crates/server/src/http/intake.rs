//! Charges a request body to the byte budget as it arrives (D-47).
//!
//! Until the answer begins everything that came is held; from then on the body is a stream of messages, and what is held is
//! the message that has not arrived whole: a poll for more means that the others were taken.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Frame, SizeHint};

use crate::auth::identity::CallerIdentity;
use crate::http::body_budget::{BodyBudget, BudgetFull, Reservation, overloaded};
use crate::http::drain_body::UnreadRemainder;
use crate::http::timeouts;
use crate::http::upload_pace::UploadPace;

/// What a request's body and its reader tell each other about its bytes. Stands in the request's extensions.
pub(crate) struct BodyIntake {
    budget: Arc<BodyBudget>,
    caller: CallerIdentity,
    /// The answer has begun.
    answered: AtomicBool,
    /// What still comes is read and thrown away.
    discarded: AtomicBool,
    overloaded: AtomicBool,
    /// It came so slowly that it was given up.
    slow: AtomicBool,
    /// What was unpacked of it is charged, beside what came.
    unpacked: AtomicBool,
    /// Charged until the answer begins.
    reservations: Mutex<Vec<Reservation>>,
    /// The body, where its reader has let it go before its end and the answer has not begun.
    leftover: Mutex<Option<UnreadRemainder>>,
    /// Bytes of a body that are read although nobody needs them.
    drain_bytes: u64,
    /// The time in which a client must send as much as [`UploadPace`] says of what is charged.
    pace: Duration,
}

/// How a body of many messages is cut into them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Each ends with a line feed.
    Lines,
    /// Each begins with a byte of flags and its length in four (gRPC).
    Grpc,
}

impl BodyIntake {
    /// Nothing has come yet of what `caller` sends.
    pub(crate) fn new(
        budget: Arc<BodyBudget>,
        caller: CallerIdentity,
        drain_bytes: u64,
        pace: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            budget,
            caller,
            drain_bytes,
            pace,
            leftover: Mutex::default(),
            answered: AtomicBool::new(false),
            discarded: AtomicBool::new(false),
            overloaded: AtomicBool::new(false),
            slow: AtomicBool::new(false),
            unpacked: AtomicBool::new(false),
            reservations: Mutex::default(),
        })
    }

    /// The same body, charged.
    pub(crate) fn charging(self: &Arc<Self>, body: Body, framing: Framing) -> Body {
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
            pace: UploadPace::new(self.pace),
            cutter: MessageBounds::new(framing),
        })
    }

    /// How many bytes of a body are read although nobody needs them.
    pub(crate) const fn drain_bytes(&self) -> u64 {
        self.drain_bytes
    }

    /// A reservation for something else that comes of this request.
    pub(crate) fn reserve(&self) -> Reservation {
        self.budget.reserve(self.caller.clone())
    }

    /// In whose turn slow work on it waits.
    pub(crate) fn turn(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.caller.hash(&mut hasher);
        hasher.finish()
    }

    /// Holds this until the answer begins.
    pub(crate) fn keep(&self, reservation: Reservation) {
        if !reservation.is_empty() && !self.is(&self.answered) {
            let mut reservations = self
                .reservations
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            reservations.push(reservation);
        }
    }

    /// The answer begins: what it is made of has been read. What has not been read comes back.
    pub(crate) fn answered(&self) -> Option<UnreadRemainder> {
        // The flag before the remainder is taken: a body that is dropped from here on sees it and leaves nothing behind
        // (see `Drop` of `ChargedBody`).
        self.answered.store(true, Ordering::Relaxed);
        let mut reservations = self
            .reservations
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        drop(std::mem::take(&mut *reservations));
        drop(reservations);
        self.leftover().take()
    }

    fn leftover(&self) -> MutexGuard<'_, Option<UnreadRemainder>> {
        self.leftover.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the answer has begun.
    pub(crate) fn has_answered(&self) -> bool {
        self.is(&self.answered)
    }

    /// What still comes is only read to its end.
    pub(crate) fn discard(&self) {
        self.discarded.store(true, Ordering::Relaxed);
    }

    /// A part of this request found no room.
    pub(crate) fn overrun(&self) {
        self.overloaded.store(true, Ordering::Relaxed);
        self.discard();
    }

    /// Whether a part of it found no room.
    pub(crate) fn is_overloaded(&self) -> bool {
        self.is(&self.overloaded)
    }

    /// Says whether something that was unpacked of it is charged: the client must not keep that for nothing either.
    pub(crate) fn holds_unpacked(&self, holds: bool) {
        self.unpacked.store(holds, Ordering::Relaxed);
    }

    /// Whether it was given up because it came too slowly.
    pub(crate) fn is_slow(&self) -> bool {
        self.is(&self.slow)
    }

    fn is(&self, flag: &AtomicBool) -> bool {
        flag.load(Ordering::Relaxed)
    }
}

/// A body that is charged.
struct ChargedBody {
    body: Body,
    intake: Arc<BodyIntake>,
    reservation: Reservation,
    /// Bytes that came and are not done with.
    charged: usize,
    /// Bytes that came in all.
    read: u64,
    /// The reader has asked for it.
    begun: bool,
    /// Came, and waits for room.
    frame: Option<Frame<Bytes>>,
    pace: UploadPace,
    cutter: MessageBounds,
}

impl ChargedBody {
    /// Waits for room for so many bytes more.
    fn poll_room(&mut self, more: usize, cx: &mut Context<'_>) -> Poll<Result<(), BudgetFull>> {
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

    /// While nothing comes; ready if what is charged has come too slowly.
    fn poll_slow(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.reservation.is_empty() && !self.intake.is(&self.intake.unpacked) {
            self.pace.rest();
            return Poll::Pending;
        }
        self.pace.poll_late(cx)
    }

    fn give_up(&mut self) -> axum::Error {
        self.intake.slow.store(true, Ordering::Relaxed);
        self.intake.discard();
        self.charged = 0;
        self.reservation.shrink(0);
        axum::Error::new(timeouts::slow().to_status())
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
        if this.frame.is_none() {
            if this.intake.is(&this.intake.answered) {
                // A reader that asks for more has taken the messages that came whole; only the unfinished one is still in
                // memory.
                this.charged = this.cutter.unfinished;
                this.reservation.shrink(this.charged);
            }
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let bytes = frame.data_ref().map_or(0, Bytes::len);
                    this.read += bytes as u64;
                    this.pace.came(bytes);
                    this.frame = Some(frame);
                }
                Poll::Ready(end) => return Poll::Ready(end),
                Poll::Pending => return this.poll_slow(cx).map(|()| Some(Err(this.give_up()))),
            }
        }
        let more = this
            .frame
            .as_ref()
            .and_then(Frame::data_ref)
            .map_or(0, Bytes::len);
        if ready!(this.poll_room(more, cx)).is_err() {
            this.intake.overrun();
            // What waited is thrown away with the rest, which can still be read.
            this.frame = None;
            // A status, because calls that run show it to their client.
            let status = overloaded().to_status();
            return Poll::Ready(Some(Err(axum::Error::new(status))));
        }
        let frame = this.frame.take();
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

/// A reader lets a body go when it has all of it, and not when it has done with it; or when it refuses the request.
impl Drop for ChargedBody {
    fn drop(&mut self) {
        if !self.body.is_end_stream() {
            // The flag is looked at under the lock: a body that is let go later would be kept for nobody.
            let mut leftover = self.intake.leftover();
            if !self.intake.has_answered() {
                *leftover = Some(UnreadRemainder {
                    body: std::mem::take(&mut self.body),
                    read: self.read,
                    begun: self.begun,
                });
            }
        }
        if !self.intake.is(&self.intake.discarded) {
            // A reader drops the body when it has the last byte, and then parses it: the memory is in use until the answer
            // begins, and so is its charge.
            let none = self.intake.reserve();
            let reservation = std::mem::replace(&mut self.reservation, none);
            self.intake.keep(reservation);
        }
    }
}

/// Where messages end, in bytes that pass by.
struct MessageBounds {
    framing: Framing,
    /// Bytes of the message that has begun and not ended.
    unfinished: usize,
    /// The beginning of it, as long as that is no whole head.
    head: [u8; GRPC_HEAD],
    /// Bytes of it that are still to come, behind its head.
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
            Framing::Lines => match data.iter().rposition(|byte| *byte == b'\n') {
                Some(end) => self.unfinished = data.len() - end - 1,
                None => self.unfinished += data.len(),
            },
            Framing::Grpc => self.pass_grpc(data),
        }
    }

    fn pass_grpc(&mut self, mut data: &[u8]) {
        while let Some(first) = data.first() {
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
            if self.unfinished >= GRPC_HEAD && self.left == 0 {
                self.unfinished = 0;
            }
        }
    }
}

const GRPC_HEAD: usize = 5;

#[cfg(test)]
mod tests;
