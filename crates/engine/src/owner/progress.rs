//! [`ProgressReports`]: reports the progress of requests that have no token yet (LM-921).
//!
//! Without followers this costs nothing; with some, the order of the queue is found once for all of them, at most ten times a
//! second and in a twentieth of the time.

use std::collections::HashMap;
use std::time::Duration;

use sapwood_proto::time::Time;

use super::requests::Requests;
use super::sequence::RequestJob;
use super::step_clock::StepClock;
use crate::queue::QueuePace;
use crate::request_phase::RequestPhase;

/// The least interval between reports.
const EVERY: Duration = Duration::from_millis(100);
/// And it is at least so many times as long as a report takes: every stream waits for it.
const COST_SHARE: u32 = 20;

/// When followers are notified next.
#[derive(Debug, Default)]
pub(super) struct ProgressReports {
    due: Option<Time>,
}

/// The position of a request in the queue.
struct FollowerPosition {
    ahead: u32,
    /// Number of its sequences that wait.
    waiting: usize,
}

impl ProgressReports {
    /// Starts the timer for a request with a follower.
    pub(super) fn start(&mut self, now: Time) {
        self.due.get_or_insert(now + EVERY);
    }

    /// When the next report is due, if there is a follower.
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Publishes its phase to every follower, if the interval has passed.
    pub(super) fn publish(
        &mut self,
        requests: &Requests,
        pace: &QueuePace,
        clock: &StepClock,
        now: Time,
    ) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        let positions = positions(requests);
        let mut followed = false;
        for (index, job) in requests.jobs.iter().filter(|(_, job)| !job.ended) {
            let Some(follower) = &job.submission.follower else {
                continue;
            };
            followed = true;
            if let Some(phase) = phase(requests, job, positions.get(&index), pace) {
                follower.publish(phase);
                job.outbox.wake();
            }
        }
        // The timer stops with the last follower, so that an engine without followers is not woken for them.
        let took = clock.now_or(now).since(now);
        self.due = followed.then(|| now + EVERY.max(took * COST_SHARE));
    }
}

/// Returns the requests that have waiting sequences, each with the position of the first of these.
fn positions(requests: &Requests) -> HashMap<usize, FollowerPosition> {
    let mut positions = HashMap::new();
    for key in requests.scheduler.admission_order() {
        let ahead = u32::try_from(positions.len()).unwrap_or(u32::MAX);
        // `ahead` counts requests, not sequences: the map has one entry for each request met so far.
        let fresh = FollowerPosition { ahead, waiting: 0 };
        let job = requests.sequences[key].job;
        positions.entry(job).or_insert(fresh).waiting += 1;
    }
    positions
}

fn phase(
    requests: &Requests,
    job: &RequestJob,
    position: Option<&FollowerPosition>,
    pace: &QueuePace,
) -> Option<RequestPhase> {
    // With one of its sequences running, a request no longer waits.
    let waits = position.filter(|position| position.waiting == job.members.len());
    let eta = |position: &FollowerPosition| pace.after(position.ahead.saturating_add(1));
    match (waits, job.first_token) {
        (Some(position), None) => Some(RequestPhase::Waits {
            ahead: position.ahead,
            eta: eta(position),
        }),
        // Its own admission was measured, so there is an estimate.
        (Some(position), Some(_)) => Some(RequestPhase::Displaced {
            eta: eta(position).unwrap_or_default(),
        }),
        (None, None) => {
            let members = job.members.iter();
            let computed = members.map(|&key| requests.sequences[key].computed).max();
            let prompt = job.submission.prompt.len();
            let computed = computed.unwrap_or(0).min(prompt);
            Some(RequestPhase::Prefill {
                // A prompt is shorter than the context, which is a u32.
                computed: u32::try_from(computed).unwrap_or(u32::MAX),
                prompt: u32::try_from(prompt).unwrap_or(u32::MAX),
            })
        }
        (None, Some(_)) => None,
    }
}
