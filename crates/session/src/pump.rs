//! The part of a session's task that both sides share: messages and time go into the machine, and what only the owner
//! can handle comes out, in two lock rounds however much there is.
//!
//! ```text
//!   owner:  poll the transport ─► turn ─► chores: start, cancel, close ─► runs, if it has any ─► rest
//!                                   └─ one lock: pass messages,                                    └─ one lock: wake the
//!                                      tick, take chores                                              transport, timer
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::Context;

use sapwood_proto::session::SessionOutput;
use sapwood_proto::time::Time;
use tokio::time::{Sleep, sleep_until};

use crate::{Live, SessionClock, SharedSession};

/// Drives one session for its owner; see the module documentation.
pub struct SessionPump {
    shared: SharedSession,
    clock: SessionClock,
    /// Outputs of the machine that the owner has not handled.
    chores: VecDeque<SessionOutput>,
    timer: Option<(Time, Pin<Box<Sleep>>)>,
    paused: bool,
}

impl SessionPump {
    /// A pump for the session `shared`, whose times are those of `clock`.
    #[must_use]
    pub const fn new(shared: SharedSession, clock: SessionClock) -> Self {
        Self {
            shared,
            clock,
            chores: VecDeque::new(),
            timer: None,
            paused: false,
        }
    }

    /// Whether the transport is not to be read, as of the last turn (EV-802).
    #[must_use]
    pub const fn is_paused(&self) -> bool {
        self.paused
    }

    /// Takes the next output that only the owner can handle. [`SessionOutput::Close`] is the last.
    pub fn next_chore(&mut self) -> Option<SessionOutput> {
        self.chores.pop_front()
    }

    /// Runs `pass` on the session, which gives it the messages that have arrived; handles the timer; takes the chores.
    /// Returns the bytes that the session retains, and whether the transport can be read again after a pause.
    pub fn turn(
        &mut self,
        cx: &mut Context<'_>,
        pass: impl FnOnce(&mut Live, Time),
    ) -> (u64, bool) {
        let due = self.is_due(cx);
        // An expired timer is removed: it would stay ready, and every later turn would look due.
        if due {
            self.timer = None;
        }
        let now = self.clock.now();
        let chores = &mut self.chores;
        let (paused, retained) = self.shared.with(|live| {
            live.as_owner(cx, chores, |live| {
                // Before the timer: a message that has arrived postpones an idle timeout that is due in the same turn.
                pass(live, now);
                if due {
                    live.machine().tick(now);
                }
            });
            let machine = live.machine();
            // Asked last: what was passed may have filled the session.
            (machine.inbound_paused(), machine.retained_bytes())
        });
        let continues = std::mem::replace(&mut self.paused, paused) && !paused;
        (retained, continues)
    }

    /// Ends the poll of the owner: wakes the transport, once for all that was written since the last turn (D-6), and
    /// sets the timer. Returns the bytes that the session retains, and whether another turn is due at once.
    ///
    /// The timer is set here and not in the turn, because what the owner does after that can start one: a message that
    /// a run has written, and that the peer does not read, ends the session in the end (EV-803).
    pub fn rest(&mut self, cx: &mut Context<'_>) -> (u64, bool) {
        let now = self.clock.now();
        let (wake_at, retained) = self.shared.with(|live| {
            live.settle();
            live.flush();
            let machine = live.machine();
            (machine.wake_at(now), machine.retained_bytes())
        });
        // A new timer is polled once, or it would have no waker; its time may also have passed already.
        self.set_timer(wake_at);
        (retained, self.is_due(cx))
    }

    /// Whether the timer has expired; otherwise its waker is set.
    fn is_due(&mut self, cx: &mut Context<'_>) -> bool {
        let sleep = self.timer.as_mut().map(|(_, sleep)| sleep.as_mut());
        sleep.is_some_and(|sleep| sleep.poll(cx).is_ready())
    }

    fn set_timer(&mut self, wake_at: Option<Time>) {
        let Some(next) = wake_at else {
            self.timer = None;
            return;
        };
        let instant = self.clock.instant(next);
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
    }
}

impl fmt::Debug for SessionPump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionPump")
            .field("chores", &self.chores.len())
            .field("paused", &self.paused)
            .finish_non_exhaustive()
    }
}
