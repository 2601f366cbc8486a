//! Reports the progress of requests that have no token yet (LM-921).
//!
//! Without followers this costs nothing; with some, the queue is sorted once for all of them, ten times a second.

use std::collections::HashMap;
use std::time::Duration;

use sapwood_proto::time::Time;

use super::EngineOwner;
use super::sequence::RequestJob;
use crate::request_phase::RequestPhase;

/// The interval between reports.
const EVERY: Duration = Duration::from_millis(100);

/// The position of a request in the queue.
struct FollowerPosition {
    ahead: u32,
    /// Number of its sequences that wait.
    waiting: usize,
}

impl EngineOwner {
    /// Starts the timer for a request with a follower.
    pub(super) fn follow_from(&mut self, now: Time) {
        self.phases_due.get_or_insert(now + EVERY);
    }

    /// Publishes its phase to every follower, if the interval has passed.
    pub(super) fn report_phases(&mut self, now: Time) {
        if self.phases_due.is_none_or(|due| now < due) {
            return;
        }
        let line = self.line();
        let mut followed = false;
        for (index, job) in self.jobs.iter().filter(|(_, job)| !job.ended) {
            let Some(follower) = &job.follower else {
                continue;
            };
            followed = true;
            if let Some(phase) = self.phase(job, line.get(&index)) {
                follower.publish(phase);
                job.outbox.wake();
            }
        }
        self.phases_due = followed.then(|| now + EVERY);
    }

    /// Returns the requests that have waiting sequences, each with the position of the first of these.
    fn line(&self) -> HashMap<usize, FollowerPosition> {
        let mut line = HashMap::new();
        for key in self.scheduler.line() {
            let ahead = u32::try_from(line.len()).unwrap_or(u32::MAX);
            let fresh = FollowerPosition { ahead, waiting: 0 };
            let position = line.entry(self.sequences[key].job).or_insert(fresh);
            position.waiting += 1;
        }
        line
    }

    fn phase(&self, job: &RequestJob, position: Option<&FollowerPosition>) -> Option<RequestPhase> {
        let waits = position.filter(|position| position.waiting == job.members.len());
        let eta = |position: &FollowerPosition| self.pace.after(position.ahead.saturating_add(1));
        match (waits, job.first_token) {
            (Some(position), None) => Some(RequestPhase::Waits {
                ahead: position.ahead,
                eta: eta(position),
            }),
            // Its own end has shown a pace.
            (Some(position), Some(_)) => Some(RequestPhase::Displaced {
                eta: eta(position).unwrap_or_default(),
            }),
            (None, None) => {
                let computed = job.members.iter().map(|&key| self.sequences[key].computed);
                let prompt = job.prompt.len();
                let computed = computed.max().unwrap_or(0).min(prompt);
                Some(RequestPhase::Prefill {
                    // A prompt is shorter than the context, which is a u32.
                    computed: u32::try_from(computed).unwrap_or(u32::MAX),
                    prompt: u32::try_from(prompt).unwrap_or(u32::MAX),
                })
            }
            (None, Some(_)) => None,
        }
    }
}
