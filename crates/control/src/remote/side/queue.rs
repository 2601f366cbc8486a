//! [`SideQueue`]: what is to be sent on the side channel, and what has no answer yet.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, StepWaker, Token};

use super::super::epoch::lost;
use super::super::reply::ReplyError;
use super::super::request::{SideOp, SideRequest, WireAuth};
use super::StoredModule;
use crate::host::CallFailure;

/// What is to be sent, and what has no answer yet.
#[derive(Default)]
pub(in crate::remote) struct SideQueue {
    state: Mutex<SideState>,
    changed: Condvar,
}

#[derive(Default)]
struct SideState {
    /// Uploads and starts, in their order.
    queue: VecDeque<SideJob>,
    /// Sent before them. Without a bound of their own: each drop follows a start, and one that is lost would leave an
    /// instance in the runtime for minutes.
    urgent: VecDeque<SideJob>,
    pending: HashMap<String, PendingJob>,
    last_rid: u64,
    closed: bool,
}

pub(super) struct SideJob {
    pub(super) rid: String,
    pub(super) message: Vec<u8>,
    pub(super) limit: Duration,
    purpose: SidePurpose,
}

struct PendingJob {
    until: Instant,
    purpose: SidePurpose,
}

#[derive(Clone)]
pub(super) enum SidePurpose {
    Upload(Arc<PendingUpload>),
    Start(Arc<StartingInstance>),
    Stats,
    /// Whatever the answer is.
    Nothing,
}

/// An upload that somebody waits for.
#[derive(Default)]
pub(in crate::remote) struct PendingUpload {
    answer: Mutex<Option<Result<StoredModule, UploadError>>>,
    answered: Condvar,
}

/// Why a module was not taken.
#[derive(Clone, Debug)]
pub(in crate::remote) enum UploadError {
    Refused(ReplyError),
    /// There is too much to do.
    Busy,
    /// The runtime ended.
    Lost,
}

/// Why a request is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotQueued {
    Full,
    Closed,
}

/// What ran out of time.
#[derive(Default)]
pub(super) struct Overdue {
    /// With the ids of their requests.
    pub(super) starts: Vec<(String, Arc<StartingInstance>)>,
    /// Anything else: the runtime does not answer.
    pub(super) is_hung: bool,
}

/// An instance that is starting.
pub(in crate::remote) struct StartingInstance {
    /// Names it on the wire.
    pub(in crate::remote) request: String,
    pub(super) prompt: Vec<Token>,
    pub(super) waker: Arc<dyn StepWaker>,
    state: Mutex<StartState>,
}

#[derive(Default)]
struct StartState {
    result: Option<Result<StartedInstance, CallFailure>>,
    /// Nobody waits for it any more.
    abandoned: bool,
}

/// An instance that has started.
pub(in crate::remote) struct StartedInstance {
    /// Its sequence.
    pub(in crate::remote) id: u64,
    /// Replaces the prompt.
    pub(in crate::remote) prompt: Option<Vec<Token>>,
    pub(in crate::remote) report: StepReport,
}

/// What an instance is started with.
#[derive(Clone, Copy, Debug)]
pub(in crate::remote) struct StartCall<'a> {
    pub(in crate::remote) user: WireAuth<'a>,
    pub(in crate::remote) module: &'a str,
    pub(in crate::remote) arg: &'a str,
    pub(in crate::remote) prompt: &'a [Token],
}

impl SideQueue {
    fn state(&self) -> MutexGuard<'_, SideState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a module and waits until the runtime has it.
    pub(in crate::remote) fn upload(
        &self,
        user: WireAuth<'_>,
        module: &[u8],
        limit: Duration,
    ) -> Result<StoredModule, UploadError> {
        use base64::Engine as _;
        let binary = base64::engine::general_purpose::STANDARD.encode(module);
        let upload = Arc::new(PendingUpload::default());
        let op = SideOp::MkModule { binary };
        let purpose = SidePurpose::Upload(Arc::clone(&upload));
        self.push(user, op, limit, purpose)
            .map_err(|refused| match refused {
                NotQueued::Full => UploadError::Busy,
                NotQueued::Closed => UploadError::Lost,
            })?;
        let mut answer = upload.answer.lock().unwrap_or_else(PoisonError::into_inner);
        // Ends: at the latest the time limit ends the runtime, and that answers everything.
        loop {
            if let Some(answer) = answer.take() {
                return answer;
            }
            answer = upload
                .answered
                .wait(answer)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Starts an instance.
    pub(in crate::remote) fn start(
        &self,
        call: StartCall<'_>,
        limit: Duration,
        waker: &Arc<dyn StepWaker>,
    ) -> Arc<StartingInstance> {
        let request = format!("r{}", self.next_number());
        let starting = Arc::new(StartingInstance {
            request: request.clone(),
            prompt: call.prompt.to_vec(),
            waker: Arc::clone(waker),
            state: Mutex::default(),
        });
        let op = SideOp::Instantiate {
            req_id: &request,
            prompt: call.prompt,
            module_id: call.module,
            module_arg: call.arg,
        };
        let purpose = SidePurpose::Start(Arc::clone(&starting));
        match self.push(call.user, op, limit, purpose) {
            Ok(()) => {}
            Err(NotQueued::Full) => {
                let what = "too many controllers are waiting to be started";
                let failure = CallFailure::new(ErrorReason::SERVER_OVERLOADED, what);
                starting.set(Err(failure));
            }
            Err(NotQueued::Closed) => {
                starting.set(Err(lost()));
            }
        }
        starting
    }

    /// Takes a start back that nobody waits for any more. Where it is sent already, our own runtime ends it; of another one,
    /// the instance is dropped when it has started.
    pub(in crate::remote) fn take_back(
        &self,
        starting: &Arc<StartingInstance>,
        own: bool,
        limit: Duration,
    ) {
        let mut state = self.state();
        let queued = state.queue.iter();
        let place = queued.enumerate().find(|(_, job)| job.purpose.is(starting));
        if let Some((place, _)) = place {
            state.queue.remove(place);
            return;
        }
        let mut pending = state.pending.iter();
        let sent = pending.find(|(_, job)| job.purpose.is(starting));
        let Some(rid) = sent.map(|(rid, _)| rid.clone()) else {
            return;
        };
        drop(state);
        if own {
            self.cancel(&rid, limit);
        }
    }

    /// Lets the runtime stop a request.
    pub(super) fn cancel(&self, rid: &str, limit: Duration) {
        // Refused only when the runtime is gone, and its instances with it.
        let _ = self.push(NOBODY, SideOp::Cancel { rid }, limit, SidePurpose::Nothing);
    }

    /// Lets the runtime drop an instance that no sequence was bound to.
    pub(in crate::remote) fn abandon(&self, request: &str, limit: Duration) {
        let op = SideOp::Drop { req_id: request };
        // As above.
        let _ = self.push(NOBODY, op, limit, SidePurpose::Nothing);
    }

    /// Asks what the runtime's controllers use.
    pub(super) fn ask_for_stats(&self, limit: Duration) {
        // As above.
        let _ = self.push(NOBODY, SideOp::Stats {}, limit, SidePurpose::Stats);
    }

    fn next_number(&self) -> u64 {
        let mut state = self.state();
        state.last_rid += 1;
        state.last_rid
    }

    fn push(
        &self,
        user: WireAuth<'_>,
        op: SideOp<'_>,
        limit: Duration,
        purpose: SidePurpose,
    ) -> Result<(), NotQueued> {
        let rid = self.next_number().to_string();
        // Without the lock: a module is long.
        let message = SideRequest {
            rid: rid.clone(),
            user,
            op,
        }
        .encode();
        let mut guard = self.state();
        let state = &mut *guard;
        if state.closed {
            return Err(NotQueued::Closed);
        }
        let queue = match purpose {
            SidePurpose::Upload(_) | SidePurpose::Start(_) if state.queue.len() >= QUEUE_MAX => {
                return Err(NotQueued::Full);
            }
            SidePurpose::Upload(_) | SidePurpose::Start(_) => &mut state.queue,
            SidePurpose::Stats | SidePurpose::Nothing => &mut state.urgent,
        };
        queue.push_back(SideJob {
            rid,
            message,
            limit,
            purpose,
        });
        drop(guard);
        self.changed.notify_one();
        Ok(())
    }

    /// The runtime is gone: everything is answered with that.
    pub(in crate::remote) fn close(&self, failure: &CallFailure) {
        let mut state = self.state();
        state.closed = true;
        let queued = std::mem::take(&mut state.queue);
        // Nobody waits for an answer to these.
        state.urgent.clear();
        let pending = std::mem::take(&mut state.pending);
        drop(state);
        self.changed.notify_all();
        let queued = queued.into_iter().map(|job| job.purpose);
        for purpose in queued.chain(pending.into_values().map(|job| job.purpose)) {
            purpose.fail(failure);
        }
    }

    /// Waits for something to do, but not longer than `time`. `None`: closed. `Some(None)`: there are answers to wait for,
    /// or the time has passed.
    pub(super) fn next(&self, time: Duration) -> Option<Option<SideJob>> {
        let end = Instant::now() + time;
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.pop() {
                let until = Instant::now() + job.limit;
                let purpose = job.purpose.clone();
                state
                    .pending
                    .insert(job.rid.clone(), PendingJob { until, purpose });
                return Some(Some(job));
            }
            let left = end.saturating_duration_since(Instant::now());
            if !state.pending.is_empty() || left.is_zero() {
                return Some(None);
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn take(&self, rid: &str) -> Option<SidePurpose> {
        Some(self.state().pending.remove(rid)?.purpose)
    }

    /// Whether there may be answers.
    pub(super) fn is_asked(&self) -> bool {
        !self.state().pending.is_empty()
    }

    /// Whether something can be sent at once.
    pub(super) fn can_send(&self) -> bool {
        let state = self.state();
        state.pending.len() < PENDING_MAX && (!state.queue.is_empty() || !state.urgent.is_empty())
    }

    /// Forgets the starts that have taken too long, and says which; a late answer is for nobody.
    pub(super) fn take_overdue(&self, now: Instant) -> Overdue {
        let mut overdue = Overdue::default();
        let mut state = self.state();
        state.pending.retain(|rid, job| match &job.purpose {
            _ if job.until > now => true,
            SidePurpose::Start(starting) => {
                overdue.starts.push((rid.clone(), Arc::clone(starting)));
                false
            }
            _ => {
                overdue.is_hung = true;
                true
            }
        });
        overdue
    }
}

impl SideState {
    /// The next request, if the runtime may have one more.
    fn pop(&mut self) -> Option<SideJob> {
        if self.pending.len() >= PENDING_MAX {
            return None;
        }
        self.urgent.pop_front().or_else(|| self.queue.pop_front())
    }
}

impl SidePurpose {
    pub(super) fn fail(&self, failure: &CallFailure) {
        match self {
            Self::Upload(upload) => upload.set(Err(UploadError::Lost)),
            Self::Start(starting) => starting.fail(failure),
            Self::Stats | Self::Nothing => {}
        }
    }

    /// Whether it is this start.
    fn is(&self, starting: &Arc<StartingInstance>) -> bool {
        match self {
            Self::Start(mine) => Arc::ptr_eq(mine, starting),
            _ => false,
        }
    }
}

impl PendingUpload {
    pub(super) fn set(&self, result: Result<StoredModule, UploadError>) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.answered.notify_all();
    }
}

impl StartingInstance {
    fn state(&self) -> MutexGuard<'_, StartState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the result; returns it if nobody waits for it.
    pub(super) fn set(
        &self,
        result: Result<StartedInstance, CallFailure>,
    ) -> Option<StartedInstance> {
        let mut state = self.state();
        if state.abandoned {
            return result.ok();
        }
        state.result = Some(result);
        None
    }

    pub(super) fn fail(&self, failure: &CallFailure) {
        self.set(Err(failure.clone()));
        self.waker.wake();
    }

    /// The result, once.
    pub(in crate::remote) fn poll(&self) -> Option<Result<StartedInstance, CallFailure>> {
        self.state().result.take()
    }

    /// Nobody waits for it any more. Returns the instance if it has started.
    pub(in crate::remote) fn abandon(&self) -> Option<StartedInstance> {
        let mut state = self.state();
        state.abandoned = true;
        state.result.take()?.ok()
    }
}

const NOBODY: WireAuth<'static> = WireAuth {
    user: "local",
    is_admin: false,
};
/// Requests without an answer; runtimes refuse more than 256 (section 11 of the page).
const PENDING_MAX: usize = 128;
/// Requests that are not sent yet.
const QUEUE_MAX: usize = 1_024;
