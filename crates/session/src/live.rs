//! A session together with the wakers of the tasks that wait for it.
//!
//! A shell keeps a [`Live`] behind its own lock, and calls the wakers that [`Live::settle`] collects after it has
//! released that lock, so that no task is woken into a held lock. Both shells stay thin because of it: the server's,
//! which runs functions, and the client's, which has handles (D-2).
//!
//! ```text
//!   reader ── poll_read ──┐                  ┌── Ready(cursor) ──► its waker
//!   producer ─ poll_room ─┤ machine ─ poll ──┼── Writable ───────► all producers' wakers
//!   transport ─ message ──┤                  ├── message pending ► the transport's waker
//!   worker ─── poll_work ─┤                  ├── Start, Cancel ► its waker, where there is one
//!   owner ──── as_owner ──┘                  └── everything else ► a chore, and the owner's waker
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ahash::RandomState;
use smallvec::SmallVec;

use sapwood_proto::evergreen::{Dialect, Reason, Status, WireMessage};
use sapwood_proto::session::{
    CancelledBy, CursorId, CursorRead, LeafOrder, SessionMachine, SessionOutput,
};
use sapwood_proto::time::Time;

/// Wakers to be called once the lock is released.
pub type Wakers = SmallVec<[Waker; 4]>;

/// The machine and its waiters.
#[derive(Debug)]
pub struct Live {
    machine: SessionMachine,
    readers: HashMap<CursorId, Waker, RandomState>,
    producers: Vec<Waker>,
    /// Wakers of tasks that wait for the end of the session.
    enders: Vec<Waker>,
    transport: Option<Waker>,
    owner: Option<Waker>,
    /// Waker of the task that waits until nothing is left to send.
    emptied: Option<Waker>,
    chores: VecDeque<SessionOutput>,
    /// Actions to start and to cancel, if a worker separate from the owner runs them.
    work: Option<VecDeque<SessionOutput>>,
    worker: Option<Waker>,
    closed: Option<Option<Arc<Status>>>,
    /// We have half-closed; the transport still has to be closed.
    half_closed: bool,
    /// Number of the current connection, counted from 0 (EV-941).
    connection: u64,
    /// What our client speaks on it; the machine itself knows no dialects.
    dialect: Dialect,
    /// The connection was certainly lost, rather than possibly closed by the peer.
    cut: bool,
    woken: Wakers,
}

impl Live {
    /// Wraps `machine`, with no waiting tasks.
    #[must_use]
    pub fn new(machine: SessionMachine) -> Self {
        Self {
            machine,
            // The machine assigns cursor ids, so outside input cannot choose colliding keys: fixed seeds are safe.
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
            dialect: Dialect::Grpc,
            cut: false,
            woken: Wakers::new(),
        }
    }

    /// The state machine. Call [`Live::settle`] after changing it.
    pub const fn machine(&mut self) -> &mut SessionMachine {
        &mut self.machine
    }

    /// Returns what a cursor yields next; registers the waker if that is pending.
    pub fn poll_read(&mut self, cursor: CursorId, cx: &mut Context<'_>) -> Poll<CursorRead> {
        match self.machine.nodes().read(cursor) {
            CursorRead::Pending => {
                self.readers.insert(cursor, cx.waker().clone());
                Poll::Pending
            }
            read => Poll::Ready(read),
        }
    }

    /// Closes a cursor and removes its waker.
    pub fn close_cursor(&mut self, cursor: CursorId) {
        self.readers.remove(&cursor);
        self.machine.nodes().close(cursor);
    }

    /// Waits for room for output; also ready once the session is over.
    pub fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // A session that is over never becomes writable: the producer must not wait, its next write fails.
        if self.closed.is_some() || self.machine.nodes().has_room() {
            return Poll::Ready(());
        }
        keep_among(&mut self.producers, cx);
        Poll::Pending
    }

    /// Waits until the session is over, with the status of an abort if there was one.
    pub fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<Option<Arc<Status>>> {
        if let Some(closed) = &self.closed {
            return Poll::Ready(closed.clone());
        }
        keep_among(&mut self.enders, cx);
        Poll::Pending
    }

    /// Returns the next message for the transport; an error if there will be none, with the status of the abort if the
    /// session was aborted. Messages of an aborted session are dropped (EV-901).
    pub fn poll_message(
        &mut self,
        now: Time,
        cx: &mut Context<'_>,
    ) -> Poll<Result<WireMessage, Option<Arc<Status>>>> {
        // Messages come before the end: what was queued when the session finished in good order is still sent.
        if let Some(message) = self.machine.next_message(now) {
            if !self.machine.has_message() {
                self.woken.extend(self.emptied.take());
            }
            return Poll::Ready(Ok(message));
        }
        // Taking the last message may have been the last step towards the end of the session.
        self.settle();
        if let Some(closed) = &self.closed {
            return Poll::Ready(Err(closed.clone()));
        }
        if self.half_closed {
            return Poll::Ready(Err(None));
        }
        // One waker is enough: a connection that has been replaced is woken by `take_over`, and does not wait again.
        keep(&mut self.transport, cx);
        Poll::Pending
    }

    /// Takes further messages, until there are none, or a count or a number of payload bytes is reached.
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

    /// Waits until the transport has taken all messages.
    pub fn poll_emptied(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.machine.has_message() {
            return Poll::Ready(());
        }
        keep(&mut self.emptied, cx);
        Poll::Pending
    }

    /// Runs `act` for the owner of the session, and takes the outputs that only the owner can handle. The owner is woken
    /// when there are more, but not for what it takes here: it would only be scheduled once more for nothing.
    pub fn as_owner(
        &mut self,
        cx: &Context<'_>,
        chores: &mut VecDeque<SessionOutput>,
        act: impl FnOnce(&mut Self),
    ) {
        // `settle` finds no owner to wake. The waker is put back afterwards, unless the owner's task has changed it.
        let owner = self.owner.take();
        act(self);
        self.settle();
        chores.append(&mut self.chores);
        self.owner = owner;
        keep(&mut self.owner, cx);
    }

    /// Hands actions of the peer to a worker instead of the owner from now on. `false` if there is a worker already.
    pub fn acquire_worker(&mut self) -> bool {
        let free = self.work.is_none();
        self.work.get_or_insert_default();
        free
    }

    /// Returns the next action to start or to cancel; `None` once the session is over.
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

    /// Removes the worker: actions that it has not started go back to the owner.
    pub fn release_worker(&mut self) {
        self.chores.extend(self.work.take().into_iter().flatten());
        // These chores do not pass through `settle`, which would wake the owner for new ones.
        self.woken.extend(self.owner.take());
    }

    /// Number of the current connection; a transport with another number has been replaced.
    #[must_use]
    pub const fn connection(&self) -> u64 {
        self.connection
    }

    /// The connection is lost. The owner is notified of the new timeout, or of the end of the session.
    pub fn lost(&mut self, now: Time) {
        self.cut = true;
        self.machine.lost(now);
        self.woken.extend(self.owner.take());
    }

    /// The connection has ended in good order: the peer has half-closed. On a connection that was cut since, this is
    /// ignored: the peer half-closes again on the new one if it reconnects (EV-940).
    pub fn end_of_input(&mut self, now: Time) {
        if !(self.cut && self.machine.is_down()) {
            self.machine.end_of_input(now);
        }
    }

    /// The transport was dropped without knowing whether the connection was lost. A peer that had half-closed before
    /// that has left, and does not reconnect (EV-940).
    pub fn let_go(&mut self, now: Time) {
        if self.machine.is_half_closed() {
            self.machine.abort(session_ended());
        }
        // `lost` means that the peer did not leave. That is unknown here, so an end of input that is still unread must
        // count.
        self.lost(now);
        self.cut = false;
    }

    /// A new connection replaces the old one, whose task is notified. Returns its number, unless the session is over.
    pub fn take_over(&mut self, now: Time) -> Option<u64> {
        self.lost(now);
        // A session without resume has ended with the loss of its old connection.
        if self.machine.is_closed() {
            return None;
        }
        self.connection += 1;
        // The half-close was sent on the lost connection only, so it is sent again on the new one.
        self.half_closed = false;
        // The old connection sees the new number when it is polled, and ends with `SUPERSEDED` (EV-941).
        self.woken.extend(self.transport.take());
        Some(self.connection)
    }

    /// The dialect of our client on the current connection: gRPC unless set.
    #[must_use]
    pub const fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Sets the dialect of our client, who may return in another one than before (EV-941). Call it before
    /// [`Self::returned`], which queues in the new order what was not received.
    pub const fn set_dialect(&mut self, dialect: Dialect) {
        self.dialect = dialect;
        self.machine
            .set_leaf_order(LeafOrder::for_client_of(dialect));
    }

    /// The new connection is established.
    pub fn returned(&mut self, now: Time) {
        self.machine.returned(now);
        self.flush();
    }

    /// Ends the session after a panic of the machine, unless it is over.
    pub fn fail(&mut self) {
        if self.closed.is_none() && !self.machine.is_closed() {
            let message = "the session ended unexpectedly";
            self.machine.abort(Status::new(Reason::Function, message));
        }
    }

    /// The result of the session, once it is over.
    #[must_use]
    pub const fn closed(&self) -> Option<&Option<Arc<Status>>> {
        self.closed.as_ref()
    }

    /// Drains the machine's outputs and collects the wakers of the tasks that they concern.
    pub fn settle(&mut self) {
        // The owner is woken once at the end, and only for chores: most outputs concern readers and producers.
        let before = self.chores.len();
        while let Some(output) = self.machine.poll() {
            if let SessionOutput::Cancel {
                by: CancelledBy::Deadline,
                ..
            } = output
            {
                // The outputs of that action have ended: its producer must not wait until there is room for them, and
                // until then hold what it has.
                self.woken.extend(self.producers.drain(..));
            }
            match output {
                SessionOutput::Ready(cursor) => self.woken.extend(self.readers.remove(&cursor)),
                SessionOutput::Writable => self.woken.extend(self.producers.drain(..)),
                SessionOutput::HalfClose => self.half_closed = true,
                SessionOutput::Close(status) => {
                    self.closed = Some(status.clone());
                    // The transport is missing here: `flush` wakes it.
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

    /// Wakes the transport as well, if there is something for it. Separate from [`Live::settle`], so that a shell can
    /// write many fragments and wake the transport once (D-6).
    pub fn flush(&mut self) {
        if self.closed.is_some() || self.half_closed || self.machine.has_message() {
            self.woken.extend(self.transport.take());
        }
    }

    /// Takes the collected wakers, to be called once the lock is released; `None` if there are none, which is the usual
    /// case.
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

/// Stores one waker per task, however often it polls.
fn keep_among(wakers: &mut Vec<Waker>, cx: &Context<'_>) {
    if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
        wakers.push(cx.waker().clone());
    }
}
