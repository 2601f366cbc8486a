//! A session with the wakers of the tasks that wait for it.
//!
//! A shell keeps one behind a lock of its own and calls the wakers that [`Live::settle`] collects after it has let go,
//! so that nobody wakes into a held lock. Both shells, a server's over functions and a client's over handles, are thin
//! because of it (D-2).
//!
//! ```text
//!   reader ── poll_read ──┐                  ┌── Ready(cursor) ──► its waker
//!   producer ─ poll_room ─┤ machine ─ poll ──┼── Writable ───────► all producers' wakers
//!   transport ─ message ──┤                  ├── a message waits ► the transport's waker
//!   worker ─── poll_work ─┤                  ├── Start, Cancel ► its waker, where there is one
//!   owner ── poll_chore ──┘                  └── everything else ► a chore, and the owner's waker
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ahash::RandomState;
use smallvec::SmallVec;

use super::{CursorId, CursorRead, SessionMachine, SessionOutput};
use crate::evergreen::{Reason, Status, WireMessage};
use crate::time::Time;

/// Wakers to be called once the lock is released.
pub type Wakers = SmallVec<[Waker; 4]>;

/// The machine and its waiters.
#[derive(Debug)]
pub struct Live {
    machine: SessionMachine,
    readers: HashMap<CursorId, Waker, RandomState>,
    producers: Vec<Waker>,
    /// Those who wait for the end.
    enders: Vec<Waker>,
    transport: Option<Waker>,
    owner: Option<Waker>,
    /// Waits until nothing is left to send.
    emptied: Option<Waker>,
    chores: VecDeque<SessionOutput>,
    /// What a worker apart from the owner is to run and to stop, if there is one.
    work: Option<VecDeque<SessionOutput>>,
    worker: Option<Waker>,
    closed: Option<Option<Arc<Status>>>,
    /// We have said our last word, and it is on its way.
    half_closed: bool,
    /// Which connection is the session's, counted from 0 (EV-941).
    connection: u64,
    /// It was lost for sure, and not perhaps let go by the peer.
    cut: bool,
    woken: Wakers,
}

impl Live {
    /// `machine`, with nobody waiting.
    #[must_use]
    pub fn new(machine: SessionMachine) -> Self {
        Self {
            machine,
            // Ids of cursors are made by the machine, so nobody outside can choose them to collide.
            readers: HashMap::with_hasher(RandomState::with_seeds(1, 2, 3, 4)),
            producers: Vec::new(),
            enders: Vec::new(),
            transport: None,
            owner: None,
            emptied: None,
            chores: VecDeque::new(),
            work: None,
            worker: None,
            closed: None,
            half_closed: false,
            connection: 0,
            cut: false,
            woken: Wakers::new(),
        }
    }

    /// The state machine. Call [`Live::settle`] after changing it.
    pub const fn machine(&mut self) -> &mut SessionMachine {
        &mut self.machine
    }

    /// What a cursor yields next; pending leaves the waker.
    pub fn poll_read(&mut self, cursor: CursorId, cx: &mut Context<'_>) -> Poll<CursorRead> {
        match self.machine.read(cursor) {
            CursorRead::Pending => {
                self.readers.insert(cursor, cx.waker().clone());
                Poll::Pending
            }
            read => Poll::Ready(read),
        }
    }

    /// Ends a cursor and forgets who waits at it.
    pub fn close_cursor(&mut self, cursor: CursorId) {
        self.readers.remove(&cursor);
        self.machine.close(cursor);
    }

    /// Whether there is room for output, or the session is over and nobody needs to wait any more.
    pub fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.closed.is_some() || self.machine.has_room() {
            return Poll::Ready(());
        }
        keep_among(&mut self.producers, cx);
        Poll::Pending
    }

    /// Waits until the session is over, however it ends.
    pub fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<Option<Arc<Status>>> {
        if let Some(closed) = &self.closed {
            return Poll::Ready(closed.clone());
        }
        keep_among(&mut self.enders, cx);
        Poll::Pending
    }

    /// The next message for the transport; or that there will be none any more, and with which status the session was
    /// aborted, if it was. Messages of an aborted session are dropped (EV-901).
    pub fn poll_message(
        &mut self,
        now: Time,
        cx: &mut Context<'_>,
    ) -> Poll<Result<WireMessage, Option<Arc<Status>>>> {
        if let Some(message) = self.machine.next_message(now) {
            if !self.machine.has_message() {
                self.woken.extend(self.emptied.take());
            }
            return Poll::Ready(Ok(message));
        }
        // Handing out the last message may have been what the end waited for.
        self.settle();
        if let Some(closed) = &self.closed {
            return Poll::Ready(Err(closed.clone()));
        }
        if self.half_closed {
            return Poll::Ready(Err(None));
        }
        keep(&mut self.transport, cx);
        Poll::Pending
    }

    /// Takes further messages, until there are none, or so many, or of so many bytes of payload.
    pub fn take_messages(
        &mut self,
        now: Time,
        most: usize,
        bytes: usize,
        into: &mut VecDeque<WireMessage>,
    ) {
        let mut taken = 0;
        while into.len() < most && taken < bytes {
            let Some(message) = self.machine.next_message(now) else {
                break;
            };
            taken += message.payload_bytes();
            into.push_back(message);
        }
        if !self.machine.has_message() {
            self.woken.extend(self.emptied.take());
        }
    }

    /// Waits until the transport has taken everything there is.
    pub fn poll_emptied(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.machine.has_message() {
            return Poll::Ready(());
        }
        keep(&mut self.emptied, cx);
        Poll::Pending
    }

    /// The next thing that only the owner of the session can do.
    pub fn poll_chore(&mut self, cx: &mut Context<'_>) -> Poll<SessionOutput> {
        if let Some(chore) = self.chores.pop_front() {
            return Poll::Ready(chore);
        }
        keep(&mut self.owner, cx);
        Poll::Pending
    }

    /// From here on actions of the peer are a worker's business and no chores. `false`: there is a worker.
    pub fn acquire_worker(&mut self) -> bool {
        let free = self.work.is_none();
        self.work.get_or_insert_default();
        free
    }

    /// The next action to start or to stop; `None` once the session is over.
    pub fn poll_work(&mut self, cx: &mut Context<'_>) -> Poll<Option<SessionOutput>> {
        if self.closed.is_some() {
            return Poll::Ready(None);
        }
        if let Some(work) = self.work.as_mut().and_then(VecDeque::pop_front) {
            return Poll::Ready(Some(work));
        }
        keep(&mut self.worker, cx);
        Poll::Pending
    }

    /// There is no worker any more: what is not begun is the owner's again.
    pub fn release_worker(&mut self) {
        self.chores.extend(self.work.take().into_iter().flatten());
        self.woken.extend(self.owner.take());
    }

    /// Which connection is the session's; a transport with another number has been taken over from.
    #[must_use]
    pub const fn connection(&self) -> u64 {
        self.connection
    }

    /// The connection is lost. The owner learns of the new time-out, or of the end.
    pub fn lost(&mut self, now: Time) {
        self.cut = true;
        self.machine.lost(now);
        self.woken.extend(self.owner.take());
    }

    /// The connection gives nothing more, in good order: the peer's last word. Of a connection that was cut since it means
    /// nothing; who comes back says it again (EV-940).
    pub fn end_of_input(&mut self, now: Time) {
        if !(self.cut && self.machine.is_down()) {
            self.machine.end_of_input(now);
        }
    }

    /// The transport was let go, and cannot say whether the connection was lost. A peer that has said its last word before
    /// has left then, and nobody comes back (EV-940).
    pub fn let_go(&mut self, now: Time) {
        if self.machine.is_half_closed() {
            self.machine.abort(session_ended());
        }
        self.lost(now);
        self.cut = false;
    }

    /// A new connection takes over; the task of the old one is notified. Its number, if the session is not over.
    pub fn take_over(&mut self, now: Time) -> Option<u64> {
        self.lost(now);
        if self.machine.is_closed() {
            return None;
        }
        self.connection += 1;
        // Said on the connection that is lost; on the new one it is the last word again, not the first.
        self.half_closed = false;
        self.woken.extend(self.transport.take());
        Some(self.connection)
    }

    /// The new connection stands.
    pub fn returned(&mut self, now: Time) {
        self.machine.returned(now);
        self.flush();
    }

    /// The machine has panicked: ends the session, unless it is over.
    pub fn fail(&mut self) {
        if self.closed.is_none() && !self.machine.is_closed() {
            let message = "the session ended unexpectedly";
            self.machine.abort(Status::new(Reason::Function, message));
        }
    }

    /// How the session ended, once it has.
    #[must_use]
    pub const fn closed(&self) -> Option<&Option<Arc<Status>>> {
        self.closed.as_ref()
    }

    /// Takes what the machine asks for to those who wait for it.
    pub fn settle(&mut self) {
        let before = self.chores.len();
        while let Some(output) = self.machine.poll() {
            match output {
                SessionOutput::Ready(cursor) => self.woken.extend(self.readers.remove(&cursor)),
                SessionOutput::Writable => self.woken.extend(self.producers.drain(..)),
                SessionOutput::HalfClose => self.half_closed = true,
                SessionOutput::Close(status) => {
                    self.closed = Some(status.clone());
                    self.woken
                        .extend(self.readers.drain().map(|(_, waker)| waker));
                    self.woken.extend(self.producers.drain(..));
                    self.woken.extend(self.enders.drain(..));
                    self.woken.extend(self.worker.take());
                    self.chores.push_back(SessionOutput::Close(status));
                }
                SessionOutput::Start(_) | SessionOutput::Cancel { .. } if self.work.is_some() => {
                    self.work.get_or_insert_default().push_back(output);
                    self.woken.extend(self.worker.take());
                }
                chore => self.chores.push_back(chore),
            }
        }
        if self.chores.len() > before {
            self.woken.extend(self.owner.take());
        }
    }

    /// Wakes the transport as well, if there is something for it. Kept apart from [`Live::settle`], so that a shell can
    /// write many fragments and wake once (D-6).
    pub fn flush(&mut self) {
        if self.closed.is_some() || self.half_closed || self.machine.has_message() {
            self.woken.extend(self.transport.take());
        }
    }

    /// Everybody to be woken, once the lock is released; `None` if there is nobody, as nearly always.
    pub fn take_woken(&mut self) -> Option<Wakers> {
        (!self.woken.is_empty()).then(|| std::mem::take(&mut self.woken))
    }
}

fn session_ended() -> Status {
    Status::new(Reason::Cancelled, "the connection was lost")
}

fn keep(position: &mut Option<Waker>, cx: &Context<'_>) {
    match position {
        Some(waker) if waker.will_wake(cx.waker()) => {}
        position => *position = Some(cx.waker().clone()),
    }
}

/// One waker for each task, however often it polls.
fn keep_among(wakers: &mut Vec<Waker>, cx: &Context<'_>) {
    if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
        wakers.push(cx.waker().clone());
    }
}
