//! The task of a session: receives messages, starts and ends actions, runs the timers (D-2).
//!
//! ```text
//!   every poll:  orders ─► messages (until paused) ─► chores of the machine ─► runs ─► timers ─► wake the transport once
//!                          └◄───────────────────────────── while busy ─────────────────────┘
//! ```

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::{Reason, Status, WireMessage};
use sapwood_proto::session::{ActionStart, SessionOutput};
use sapwood_proto::time::Time;
use sapwood_session::Live;
use tokio::time::{Sleep, sleep_until};

use super::intake::MessageIntake;
use super::link::SessionLink;
use super::runs::Runs;
use super::{Observe, SessionCommand};

/// The state of a session's task.
pub(super) struct Driver<I, O, W> {
    pub(super) link: SessionLink,
    pub(super) observer: W,
    pub(super) intake: MessageIntake<I>,
    pub(super) orders: Option<O>,
    pub(super) runs: Runs,
    pub(super) timer: Option<(Time, Pin<Box<Sleep>>)>,
    /// Refuses new actions, and leaves when none is running (EV-960).
    pub(super) finishing: bool,
    /// The bytes retained by the session when the observer was last called.
    pub(super) retained: u64,
}

impl<I, O, W> Driver<I, O, W>
where
    I: Stream<Item = Result<WireMessage, Status>>,
    O: Stream<Item = SessionCommand> + Unpin,
    W: Observe,
{
    /// Polls the session until it is over; all runs are dropped by then.
    pub(super) fn poll_session(&mut self, cx: &mut Context<'_>) -> Poll<Option<Arc<Status>>> {
        self.runs.attend(cx.waker());
        self.link.with(|live| live.machine().nodes().begin_turn());
        self.poll_orders(cx);
        for _ in 0..ROUNDS {
            let more = self.poll_incoming(cx);
            if let Poll::Ready(closed) = self.poll_chores(cx) {
                return Poll::Ready(self.over(closed));
            }
            let mut busy = self.poll_runs(cx) || more;
            busy |= self.poll_timer(cx);
            self.leave_if_idle(cx);
            if !busy && self.runs.rest() {
                // The runs may have left chores, whose waker `poll_chores` has registered, and messages for the
                // transport.
                self.link.flush();
                return Poll::Pending;
            }
        }
        // There is always more to do: yield to the transport and to other sessions.
        self.link.flush();
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    pub(super) fn over(&mut self, closed: Option<Arc<Status>>) -> Option<Arc<Status>> {
        self.runs.give_up();
        self.report();
        let retained = self.link.with(|live| live.machine().retained_bytes());
        self.account(retained);
        self.observer.over(closed.as_deref());
        self.link.flush();
        closed
    }

    fn poll_orders(&mut self, cx: &mut Context<'_>) {
        while let Some(orders) = &mut self.orders {
            match orders.poll_next_unpin(cx) {
                Poll::Pending => return,
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

    /// Takes received messages and passes them to the machine. `true`: there may be more.
    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> bool {
        // The chore `Resume` wakes this task once reading may continue.
        let paused = |live: &mut Live| live.machine().inbound_paused();
        if self.link.with(paused) {
            return false;
        }
        let more = self.intake.poll(cx);
        if !self.intake.is_waiting() {
            return more;
        }
        let (now, intake) = (self.link.now(), &mut self.intake);
        let retained = self.link.with(|live| {
            let machine = live.machine();
            intake.hand_over(machine, now);
            machine.retained_bytes()
        });
        self.account(retained);
        more || self.intake.is_waiting()
    }

    fn poll_chores(&mut self, cx: &mut Context<'_>) -> Poll<Option<Arc<Status>>> {
        loop {
            match self.link.with(|live| live.poll_chore(cx)) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(SessionOutput::Start(start)) => self.start(&start),
                Poll::Ready(SessionOutput::Refused(status)) => {
                    self.observer.action_refused(&status)
                }
                Poll::Ready(SessionOutput::Cancel { action, by }) => self.runs.cancel(action, by),
                Poll::Ready(SessionOutput::Close(status)) => return Poll::Ready(status),
                // Reading continues with the next round; the remaining chores concern clients.
                Poll::Ready(_) => {}
            }
        }
    }

    fn start(&mut self, start: &ActionStart) {
        self.observer.action_began();
        if let Some(ended) = self.runs.start(start) {
            self.observer.action_ended(ended.failure.as_deref());
        }
    }

    /// Polls the runs. `true`: one has ended, or there is more to do.
    fn poll_runs(&mut self, cx: &Context<'_>) -> bool {
        let (observer, link) = (&mut self.observer, &self.link);
        self.runs.poll(cx, |ended| {
            observer.action_ended(ended.failure.as_deref());
            let stats = link.with(|live| live.machine().stats());
            observer.counted(&stats);
        })
    }

    /// Handles timers. `true`: one has expired.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> bool {
        let now = self.link.now();
        let (next, retained) = self.link.with(|live| {
            let machine = live.machine();
            (machine.wake_at(now), machine.retained_bytes())
        });
        // Every round passes here, including those in which runs have written, so the retained bytes are reported here.
        self.account(retained);
        let Some(next) = next else {
            return false;
        };
        let instant = self.link.instant(next);
        match &mut self.timer {
            // Nearly every message postpones a timeout: an early wake-up once in a while is cheaper than resetting the
            // timer each time.
            Some((set, _)) if *set <= next => {}
            Some((set, sleep)) => {
                *set = next;
                sleep.as_mut().reset(instant);
            }
            None => self.timer = Some((next, Box::pin(sleep_until(instant)))),
        }
        let Some((_, sleep)) = &mut self.timer else {
            return false;
        };
        if sleep.as_mut().poll(cx).is_pending() {
            return false;
        }
        self.timer = None;
        let now = self.link.now();
        self.link.with(|live| live.machine().tick(now));
        true
    }

    fn report(&mut self) {
        let stats = self.link.with(|live| live.machine().stats());
        self.observer.counted(&stats);
    }

    /// EV-801: if all sessions together hold too much, the one that asked for more is aborted.
    fn account(&mut self, retained: u64) {
        let retained = retained + self.runs.aside_bytes();
        if retained == self.retained {
            return;
        }
        self.retained = retained;
        if let Err(status) = self.observer.retains(retained) {
            self.link.with(|live| {
                live.machine().abort(status);
            });
        }
    }
}

/// Rounds of one poll before other tasks get to run.
const ROUNDS: u32 = 16;
