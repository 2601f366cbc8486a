//! The side channel: uploads and instances, several at once (AI-306).

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, StepWaker, Token};
use serde::Deserialize;

use super::epoch::{Epoch, lost};
use super::exchange::ANSWER_BYTES_KEPT;
use super::reply::{Reply, ReplyData, ReplyError, read_begun};
use super::request::{SideOp, SideRequest, WireAuth};
use crate::host::{CallFailure, Returned};
use crate::module::Abi;
use crate::wire::{MessageSlot, Received, SendError};

/// The side channel of a runtime.
pub(super) struct SideWire {
    pub(super) requests: MessageSlot,
    pub(super) responses: MessageSlot,
}

/// What is to be sent, and what has no answer yet.
#[derive(Default)]
pub(super) struct SideQueue {
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

struct SideJob {
    rid: String,
    message: Vec<u8>,
    limit: Duration,
    purpose: SidePurpose,
}

struct PendingJob {
    until: Instant,
    purpose: SidePurpose,
}

#[derive(Clone)]
enum SidePurpose {
    Upload(Arc<PendingUpload>),
    Start(Arc<StartingInstance>),
    Stats,
    /// Whatever the answer is.
    Nothing,
}

/// An upload that somebody waits for.
#[derive(Default)]
pub(super) struct PendingUpload {
    answer: Mutex<Option<Result<StoredModule, UploadError>>>,
    answered: Condvar,
}

/// What the runtime says of a module that it has stored.
#[derive(Debug, Default, Deserialize)]
pub(super) struct StoredModule {
    /// The id under which it did.
    #[serde(default)]
    pub(super) module_id: Option<String>,
}

/// What the runtime says of itself.
#[derive(Debug, Default, Deserialize)]
struct RuntimeStats {
    #[serde(default)]
    memory_bytes: u64,
}

/// When the runtime is asked what its controllers use: again and again as long as there are any, and until the memory of the
/// last ones is back.
#[derive(Debug, Default)]
struct StatsPolls {
    due: Option<Instant>,
}

impl StatsPolls {
    /// How long nothing is to be done.
    fn time(&mut self, epoch: &Epoch) -> Duration {
        // Also while instances start: then the answer to this is what shows that the runtime lives.
        let uses = epoch.own
            && (!epoch.table().is_empty() || epoch.memory.bytes() > 0 || epoch.side.is_asked());
        if !uses && self.due.is_none() {
            return LONGEST;
        }
        let now = Instant::now();
        let due = self.due.get_or_insert(now + STATS_EVERY);
        due.saturating_duration_since(now)
    }

    /// Whether it is time.
    fn take_due(&mut self) -> bool {
        let is_due = self.due.is_some_and(|due| due <= Instant::now());
        if is_due {
            self.due = None;
        }
        is_due
    }
}

/// Why a module was not taken.
#[derive(Clone, Debug)]
pub(super) enum UploadError {
    Refused(ReplyError),
    /// There is too much to do.
    Busy,
    /// The runtime ended.
    Lost,
}

/// Why a request is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NotQueued {
    Full,
    Closed,
}

/// What ran out of time.
#[derive(Default)]
struct Overdue {
    /// With the ids of their requests.
    starts: Vec<(String, Arc<StartingInstance>)>,
    /// Anything else: the runtime does not answer.
    is_hung: bool,
}

/// An instance that is starting.
pub(super) struct StartingInstance {
    /// Names it on the wire.
    pub(super) request: String,
    prompt: Vec<Token>,
    waker: Arc<dyn StepWaker>,
    state: Mutex<StartState>,
}

#[derive(Default)]
struct StartState {
    result: Option<Result<StartedInstance, CallFailure>>,
    /// Nobody waits for it any more.
    abandoned: bool,
}

/// An instance that has started.
pub(super) struct StartedInstance {
    /// Its sequence.
    pub(super) id: u64,
    /// Replaces the prompt.
    pub(super) prompt: Option<Vec<Token>>,
    pub(super) report: StepReport,
}

/// What an instance is started with.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartCall<'a> {
    pub(super) user: WireAuth<'a>,
    pub(super) module: &'a str,
    pub(super) arg: &'a str,
    pub(super) prompt: &'a [Token],
}

impl SideQueue {
    fn state(&self) -> MutexGuard<'_, SideState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a module and waits until the runtime has it.
    pub(super) fn upload(
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
    pub(super) fn start(
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
    pub(super) fn take_back(&self, starting: &Arc<StartingInstance>, own: bool, limit: Duration) {
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
    fn cancel(&self, rid: &str, limit: Duration) {
        // Refused only when the runtime is gone, and its instances with it.
        let _ = self.push(NOBODY, SideOp::Cancel { rid }, limit, SidePurpose::Nothing);
    }

    /// Lets the runtime drop an instance that no sequence was bound to.
    pub(super) fn abandon(&self, request: &str, limit: Duration) {
        let op = SideOp::Drop { req_id: request };
        // As above.
        let _ = self.push(NOBODY, op, limit, SidePurpose::Nothing);
    }

    /// Asks what the runtime's controllers use.
    fn ask_for_stats(&self, limit: Duration) {
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
    pub(super) fn close(&self, failure: &CallFailure) {
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
    fn next(&self, time: Duration) -> Option<Option<SideJob>> {
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

    fn take(&self, rid: &str) -> Option<SidePurpose> {
        Some(self.state().pending.remove(rid)?.purpose)
    }

    /// Whether there may be answers.
    fn is_asked(&self) -> bool {
        !self.state().pending.is_empty()
    }

    /// Whether something can be sent at once.
    fn can_send(&self) -> bool {
        let state = self.state();
        state.pending.len() < PENDING_MAX && (!state.queue.is_empty() || !state.urgent.is_empty())
    }

    /// Forgets the starts that have taken too long, and says which; a late answer is for nobody.
    fn take_overdue(&self, now: Instant) -> Overdue {
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
    fn fail(&self, failure: &CallFailure) {
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
    fn set(&self, result: Result<StoredModule, UploadError>) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.answered.notify_all();
    }
}

impl StartingInstance {
    fn state(&self) -> MutexGuard<'_, StartState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the result; returns it if nobody waits for it.
    fn set(&self, result: Result<StartedInstance, CallFailure>) -> Option<StartedInstance> {
        let mut state = self.state();
        if state.abandoned {
            return result.ok();
        }
        state.result = Some(result);
        None
    }

    fn fail(&self, failure: &CallFailure) {
        self.set(Err(failure.clone()));
        self.waker.wake();
    }

    /// The result, once.
    pub(super) fn poll(&self) -> Option<Result<StartedInstance, CallFailure>> {
        self.state().result.take()
    }

    /// Nobody waits for it any more. Returns the instance if it has started.
    pub(super) fn abandon(&self) -> Option<StartedInstance> {
        let mut state = self.state();
        state.abandoned = true;
        state.result.take()?.ok()
    }
}

/// Serves the side channel of `epoch` until its process ends, or has to be ended.
pub(super) fn run(epoch: &Epoch, mut wire: SideWire) {
    let mut answer = Vec::new();
    let mut polls = StatsPolls::default();
    while let Some(job) = epoch.side.next(polls.time(epoch)) {
        if let Some(job) = job
            && !send(epoch, &mut wire, &job)
        {
            return;
        }
        // While there is more to send, only what is there already is received.
        let until = match epoch.side.can_send() {
            true => Instant::now(),
            false => Instant::now() + SLICE,
        };
        // `receive` does not look at the time while there is a message: one that answers without end must not keep its limits
        // from being looked at.
        while epoch.side.is_asked() {
            match wire.responses.receive(&mut answer, Some(until)) {
                Ok(Received::Message) => match Reply::parse(&answer) {
                    Ok(reply) => take(epoch, reply),
                    Err(broken) => return epoch.kill(&broken.0),
                },
                Ok(Received::Nothing) => break,
                Ok(Received::TooLong(bytes)) => {
                    return epoch.kill(&format!("its side answer has {bytes} bytes"));
                }
                Err(error) => return epoch.kill(&error.to_string()),
            }
            if Instant::now() >= until {
                break;
            }
        }
        answer.clear();
        answer.shrink_to(ANSWER_BYTES_KEPT);
        if polls.take_due() {
            epoch.side.ask_for_stats(epoch.limits.upload);
        }
        if !settle_overdue(epoch) {
            return epoch.kill("it did not answer on the side channel in time");
        }
    }
}

/// Ends the starts that have taken too long. `false`: the runtime does not answer at all.
fn settle_overdue(epoch: &Epoch) -> bool {
    let overdue = epoch.side.take_overdue(Instant::now());
    // A foreign runtime is asked nothing else that would show whether it lives, and knows no `drop` (AI-851).
    if overdue.is_hung || !(epoch.own || overdue.starts.is_empty()) {
        for (_, starting) in overdue.starts {
            starting.fail(&lost());
        }
        return false;
    }
    for (rid, starting) in overdue.starts {
        let what = "the controller did not start in time";
        starting.fail(&CallFailure::new(ErrorReason::TIMEOUT, what));
        // Both: it may have started while the first is on its way.
        epoch.side.cancel(&rid, epoch.limits.upload);
        epoch.side.abandon(&starting.request, epoch.limits.upload);
    }
    true
}

/// Sends a request. `false`: the process has ended, or has to.
fn send(epoch: &Epoch, wire: &mut SideWire, job: &SideJob) -> bool {
    let end = Instant::now() + job.limit;
    loop {
        match wire.requests.send(&job.message) {
            Ok(()) => return true,
            Err(error @ (SendError::TooLarge { .. } | SendError::NoMemory)) => {
                let error = ReplyError {
                    text: error.to_string(),
                    is_user: true,
                };
                let data = Err(error);
                let rid = Some(job.rid.clone());
                take(epoch, Reply { rid, data });
                return true;
            }
            Err(SendError::Lost) if epoch.is_dead() => return false,
            Err(SendError::Lost) if Instant::now() >= end => {
                epoch.kill("it does not read the side channel");
                return false;
            }
            Err(SendError::Lost) => {}
        }
    }
}

fn take(epoch: &Epoch, reply: Reply<'_>) {
    // One without an id, or with another's, is for nobody: what was asked for runs out of time.
    let purpose = reply.rid.and_then(|rid| epoch.side.take(&rid));
    match purpose {
        Some(SidePurpose::Upload(upload)) => {
            // Of another shape it names no module.
            let stored = reply.data.map(|data| data.read().unwrap_or_default());
            upload.set(stored.map_err(UploadError::Refused));
        }
        Some(SidePurpose::Start(starting)) => begun(epoch, &starting, reply.data),
        Some(SidePurpose::Stats) => {
            let stats = reply.data.ok().and_then(|data| data.read().ok());
            let RuntimeStats { memory_bytes } = stats.unwrap_or_default();
            epoch.memory.set(memory_bytes);
        }
        Some(SidePurpose::Nothing) => {}
        None => tracing::debug!("an answer of the runtime belongs to no request"),
    }
}

fn begun(epoch: &Epoch, starting: &Arc<StartingInstance>, data: Result<ReplyData<'_>, ReplyError>) {
    let p2 = epoch.table().dialect() == Abi::P2;
    let (result, report) = match data {
        Err(error) => (
            Err(CallFailure::new(ErrorReason::INIT, error.text)),
            StepReport::default(),
        ),
        Ok(data) if p2 => read_begun(data, epoch.results),
        Ok(_) => (Ok(Returned::Begun { prompt: None }), StepReport::default()),
    };
    let started = result.map(|returned| {
        let prompt = match returned {
            Returned::Begun { prompt } => prompt,
            _ => None,
        };
        let waker = Arc::clone(&starting.waker);
        StartedInstance {
            id: epoch.table().insert(starting.request.clone(), waker),
            prompt: prompt.filter(|prompt| *prompt != starting.prompt),
            report,
        }
    });
    if let Some(unused) = starting.set(started) {
        epoch.table().free(unused.id, epoch.now());
    }
    drop_abandoned(epoch);
    starting.waker.wake();
}

/// Tells the runtime about instances that nobody will use.
pub(super) fn drop_abandoned(epoch: &Epoch) {
    let abandoned = epoch.table().take_abandoned();
    for request in abandoned {
        epoch.side.abandon(&request, epoch.limits.start);
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
/// How old the memory in metrics may be, which are usually read every 15 s.
const STATS_EVERY: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(3600);
/// How long a new request may wait while answers are awaited.
const SLICE: Duration = Duration::from_millis(5);
