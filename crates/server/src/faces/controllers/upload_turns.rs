//! [`UploadTurns`]: whose module is compiled next.
//!
//! One upload runs at a time, because each takes a processor for seconds. Callers take turns: of one caller one upload may
//! wait, and it lets those of all others pass that wait when its caller's running one ends. So somebody who uploads without
//! a pause delays each other caller by one module at most.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::refusals;
use crate::http::rejection::Rejection;

/// The turns of all callers.
#[derive(Debug, Default)]
pub(super) struct UploadTurns(Arc<Mutex<TurnState>>);

/// Invariant: nothing waits unless something runs, and nobody waits twice but in entries whose receiver is gone.
#[derive(Debug, Default)]
struct TurnState {
    /// The caller whose upload runs.
    running: Option<u64>,
    waiting: VecDeque<WaitingUpload>,
}

#[derive(Debug)]
struct WaitingUpload {
    caller: u64,
    turn: oneshot::Sender<UploadTurn>,
}

/// The turn of an upload, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct UploadTurn(Arc<Mutex<TurnState>>);

impl UploadTurns {
    /// Waits for the turn of the caller with this number. Waiting here keeps no thread.
    ///
    /// # Errors
    /// As many uploads of this caller wait already as may, or it waited for too long.
    pub(super) async fn acquire(&self, caller: u64) -> Result<UploadTurn, Rejection> {
        let granted = {
            let mut state = locked(&self.0);
            if state.running.is_none() {
                state.running = Some(caller);
                return Ok(UploadTurn(Arc::clone(&self.0)));
            }
            // Of requests that were given up in the meantime.
            state.waiting.retain(|waiting| !waiting.turn.is_closed());
            let own = state
                .waiting
                .iter()
                .filter(|waiting| waiting.caller == caller);
            if own.count() >= WAITING_EACH_MAX {
                let message =
                    "Several uploads of yours are waiting already: send the next one after them.";
                return Err(refusals::overloaded(message));
            }
            let (turn, granted) = oneshot::channel();
            state.waiting.push_back(WaitingUpload { caller, turn });
            granted
        };
        // A turn that is granted in the moment in which this ends is dropped with the channel, and so ends too.
        match timeout(UPLOAD_WAIT, granted).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => Err(refusals::overloaded(
                "Other modules are being compiled: try again later.",
            )),
        }
    }
}

impl Drop for UploadTurn {
    fn drop(&mut self) {
        let mut state = locked(&self.0);
        let ended = state.running.take();
        state.waiting.retain(|waiting| !waiting.turn.is_closed());
        let others = |waiting: &WaitingUpload| Some(waiting.caller) != ended;
        let next = state.waiting.iter().position(others).unwrap_or_default();
        let Some(next) = state.waiting.remove(next) else {
            return;
        };
        state.running = Some(next.caller);
        let unsent = next.turn.send(Self(Arc::clone(&self.0)));
        drop(state);
        // A request that was given up just now: dropping its turn, for which the lock must be free, gives it to the next one.
        drop(unsent);
    }
}

fn locked(state: &Mutex<TurnState>) -> MutexGuard<'_, TurnState> {
    // Its operations leave nothing half done.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Uploads of one caller that may wait: each holds its module in memory, and a project may have several controllers.
const WAITING_EACH_MAX: usize = 4;
/// How long an upload waits for its turn: a module of usual size that is running has ended by then, on a busy machine too.
const UPLOAD_WAIT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;

    use futures::FutureExt;
    use sapwood_proto::code::Code;

    use super::*;

    /// Polls once: `None` while it waits.
    fn now<F: Future + Unpin>(waiting: &mut F) -> Option<F::Output> {
        waiting.now_or_never()
    }

    #[tokio::test(start_paused = true)]
    async fn d_54_who_uploads_without_a_pause_lets_others_pass() {
        let turns = UploadTurns::default();
        let first = turns.acquire(1).await.ok().unwrap();
        let mut second = pin!(turns.acquire(1));
        let mut other = pin!(turns.acquire(2));
        let mut third = pin!(turns.acquire(3));
        assert!(now(&mut second).is_none());
        assert!(now(&mut other).is_none());
        assert!(now(&mut third).is_none());
        drop(first);
        assert!(now(&mut second).is_none() && now(&mut third).is_none());
        let other = now(&mut other).unwrap().ok().unwrap();
        // The first caller has waited longer than the third, and the second caller's next one goes behind both.
        let mut again = pin!(turns.acquire(2));
        assert!(now(&mut again).is_none());
        drop(other);
        let second = now(&mut second).unwrap().ok().unwrap();
        drop(second);
        let third = now(&mut third).unwrap().ok().unwrap();
        assert!(now(&mut again).is_none());
        drop(third);
        drop(now(&mut again).unwrap().ok().unwrap());
        // Nobody is left, so the next one need not wait.
        assert!(turns.acquire(4).now_or_never().unwrap().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn d_54_few_uploads_of_a_caller_wait() {
        let turns = UploadTurns::default();
        let running = turns.acquire(1).await.ok().unwrap();
        let wait = || {
            let mut waiting = Box::pin(turns.acquire(1));
            assert!(now(&mut waiting).is_none());
            waiting
        };
        let mut waiting: Vec<_> = (0..WAITING_EACH_MAX).map(|_| wait()).collect();
        let refused = turns.acquire(1).await.err().unwrap();
        assert_eq!(refused.code, Code::Overloaded);
        assert!(refused.message.contains("of yours"), "{}", refused.message);
        // One that is given up waits no more, and is not waited for.
        waiting.pop();
        waiting.push(wait());
        let mut other = Box::pin(turns.acquire(2));
        assert!(now(&mut other).is_none());
        waiting.clear();
        drop(running);
        assert!(now(&mut other).unwrap().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn d_54_a_turn_that_nobody_takes_goes_to_the_next_one() {
        let turns = UploadTurns::default();
        let running = turns.acquire(1).await.ok().unwrap();
        let mut given_up = Box::pin(turns.acquire(2));
        let mut next = Box::pin(turns.acquire(3));
        assert!(now(&mut given_up).is_none() && now(&mut next).is_none());
        drop(running);
        // Granted, but its request is gone before it has seen that.
        drop(given_up);
        assert!(now(&mut next).unwrap().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn d_54_an_upload_does_not_wait_for_ever() {
        let turns = UploadTurns::default();
        let _running = turns.acquire(1).await.ok().unwrap();
        let refused = turns.acquire(2).await.err().unwrap();
        assert_eq!(refused.code, Code::Overloaded);
        // It is not taken for one that waits.
        let mut again = Box::pin(turns.acquire(2));
        assert!(now(&mut again).is_none());
    }
}
