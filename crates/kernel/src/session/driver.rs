//! The task of a session: receives messages, starts and ends actions, runs the timers (D-2).
//!
//! ```text
//!   every poll:  orders ─► messages (until paused), timer ─► chores of the machine ─► runs ─► timer, wake the transport once
//!                          └◄──────────────────────────── while busy ─────────────────────┘
//! ```

use std::sync::Arc;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::{Reason, Status, WireMessage};
use sapwood_proto::session::SessionOutput;
use sapwood_session::{Live, SessionPump};

use super::intake::MessageIntake;
use super::link::SessionLink;
use super::runs::Runs;
use super::{Observe, SessionCommand, SessionGuard};

/// The state of a session's task.
pub(super) struct Driver<I, O, W> {
    pub(super) link: SessionLink,
    pub(super) pump: SessionPump,
    pub(super) observer: W,
    pub(super) intake: MessageIntake<I>,
    pub(super) orders: Option<O>,
    pub(super) runs: Runs,
    /// Refuses new actions, and leaves when none is running (EV-960).
    pub(super) finishing: bool,
    /// The bytes retained by the session when the observer was last called.
    pub(super) retained: u64,
    /// Last, because fields are dropped in their order: the session ends after its runs.
    pub(super) _ends: SessionGuard,
}

impl<I, O, W> Driver<I, O, W>
where
    I: Stream<Item = Result<WireMessage, Status>>,
    O: Stream<Item = SessionCommand> + Unpin,
    W: Observe,
{
    /// Polls the session until it is over; all runs are dropped by then.
    pub(super) fn poll_session(&mut self, cx: &mut Context<'_>) -> Poll<Option<Arc<Status>>> {
        // First: what this poll does wakes many runs, and they are polled below without scheduling the task again.
        self.runs.attend(cx.waker());
        self.poll_orders(cx);
        // One turn of visits for each poll of this task, so that other sessions get theirs in between (D-27).
        let mut begins = true;
        for _ in 0..ROUNDS {
            let mut busy = self.poll_messages(cx, std::mem::take(&mut begins));
            if let Poll::Ready(closed) = self.handle_chores() {
                return Poll::Ready(self.over(closed));
            }
            let (observer, link) = (&mut self.observer, &self.link);
            busy |= self.runs.poll(cx, |ended| {
                observer.action_ended(ended.failure.as_deref());
                let stats = link.with(|live| live.machine().stats());
                observer.counted(&stats);
            });
            self.leave_if_idle(cx);
            // A run that was woken after it was polled makes `rest` fail: sleeping now would lose that wake-up.
            if !busy && self.runs.rest() {
                let (retained, again) = self.pump.rest(cx);
                self.account(retained);
                if !again {
                    return Poll::Pending;
                }
                // `rest` has declared the task asleep, but it goes on.
                self.runs.attend(cx.waker());
            }
        }
        // There is always more to do: yield to the transport and to other sessions.
        let (retained, _) = self.pump.rest(cx);
        self.account(retained);
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    pub(super) fn over(&mut self, closed: Option<Arc<Status>>) -> Option<Arc<Status>> {
        // The runs first: dropping them still changes the counters and the bytes that are reported below.
        self.runs.give_up();
        let (stats, retained) = self.link.with(|live| {
            let machine = live.machine();
            (machine.stats(), machine.retained_bytes())
        });
        self.observer.counted(&stats);
        self.account(retained);
        self.observer.over(closed.as_deref());
        self.link.flush();
        closed
    }

    fn poll_orders(&mut self, cx: &mut Context<'_>) {
        while let Some(orders) = &mut self.orders {
            match orders.poll_next_unpin(cx) {
                Poll::Pending => return,
                // A stream that has ended must not be polled again.
                Poll::Ready(None) => self.orders = None,
                Poll::Ready(Some(SessionCommand::Finish)) => {
                    self.finishing = true;
                    self.link.with(|live| live.machine().calls().drain());
                }
                Poll::Ready(Some(SessionCommand::Leave)) => self.leave(),
                Poll::Ready(Some(SessionCommand::Revoke)) => {
                    let message =
                        "the key of this session is no longer valid: open one with another";
                    self.abort(Status::new(Reason::Revoked, message));
                }
            }
        }
    }

    /// EV-960: once nothing runs and everything is sent, a session with a pending [`SessionCommand::Finish`] is over.
    fn leave_if_idle(&self, cx: &mut Context<'_>) {
        if !self.finishing || !self.runs.is_empty() {
            return;
        }
        // A session that is over has its own status, and is not reported as leaving.
        let idle = |live: &mut Live| live.closed().is_none() && live.poll_emptied(cx).is_ready();
        if self.link.with(idle) {
            self.leave();
        }
    }

    fn leave(&self) {
        let message = "the server is shutting down: open a session elsewhere";
        self.abort(Status::new(Reason::GoingAway, message));
    }

    fn abort(&self, status: Status) {
        self.link.with(|live| {
            live.machine().abort(status);
        });
    }

    /// Takes received messages and passes them to the machine, and handles its timers. `true`: there may be more.
    fn poll_messages(&mut self, cx: &mut Context<'_>, begins: bool) -> bool {
        // The chore `Resume` wakes this task once reading may continue.
        let more = !self.pump.is_paused() && self.intake.poll(cx);
        let intake = &mut self.intake;
        let (retained, continues) = self.pump.turn(cx, |live, now| {
            let machine = live.machine();
            if begins {
                machine.nodes().begin_turn();
            }
            intake.hand_over(machine, now);
        });
        // Before the next turn, which may pass the end: a session that is over retains nothing that could be counted.
        self.account(retained);
        // What waits while reading is paused waits for the runs, not for another round.
        continues || !self.pump.is_paused() && (more || self.intake.is_waiting())
    }

    fn handle_chores(&mut self) -> Poll<Option<Arc<Status>>> {
        while let Some(chore) = self.pump.next_chore() {
            match chore {
                SessionOutput::Start(start) => {
                    self.observer.action_began();
                    if let Some(ended) = self.runs.start(&start) {
                        self.observer.action_ended(ended.failure.as_deref());
                    }
                }
                SessionOutput::Refused(status) => self.observer.action_refused(&status),
                SessionOutput::Cancel { action, by } => self.runs.cancel(action, by),
                // The machine emits nothing after it, so no chore is lost here.
                SessionOutput::Close(status) => return Poll::Ready(status),
                // Reading continues with the next round; the remaining chores concern clients.
                _ => {}
            }
        }
        Poll::Pending
    }

    /// EV-801: if all sessions together hold too much, the one that asked for more is aborted.
    fn account(&mut self, retained: u64) {
        let retained = retained + self.runs.aside_bytes();
        // The observer shares a counter with all sessions, and most polls change nothing.
        if retained == self.retained {
            return;
        }
        self.retained = retained;
        if let Err(status) = self.observer.retains(retained) {
            self.abort(status);
        }
    }
}

/// Rounds of one poll before other tasks get to run.
const ROUNDS: u32 = 16;
