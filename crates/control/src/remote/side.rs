//! The side channel: uploads and instances, several at once (AI-306).

mod queue;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::StepReport;
use serde::Deserialize;

use self::queue::{SideJob, SidePurpose};
pub(super) use self::queue::{
    SideQueue, StartCall, StartedInstance, StartingInstance, UploadError,
};
use super::epoch::{Epoch, lost};
use super::exchange::ANSWER_BYTES_KEPT;
use super::reply::{Reply, ReplyData, ReplyError, read_begun};
use crate::host::{CallFailure, Returned};
use crate::module::Abi;
use crate::wire::{MessageSlot, Received, SendError};

/// The side channel of a runtime.
pub(super) struct SideWire {
    pub(super) requests: MessageSlot,
    pub(super) responses: MessageSlot,
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

/// How old the memory in metrics may be, which are usually read every 15 s.
const STATS_EVERY: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(3600);
/// How long a new request may wait while answers are awaited.
const SLICE: Duration = Duration::from_millis(5);
