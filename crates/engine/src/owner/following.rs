//! Tells followers where their requests are while no token comes (LM-921).
//!
//! Owns: when they are told, and how a phase is found out. Refuses to know: who they are. Without a follower none of it
//! happens; with some, the line of those that wait is looked through once for all of them, ten times a second.

use std::collections::HashMap;
use std::time::Duration;

use sapwood_proto::time::Time;

use super::Owner;
use super::sequence::Job;
use crate::phase::Phase;

/// From one telling to the next.
const EVERY: Duration = Duration::from_millis(100);

/// Where a request stands among those that wait.
struct Place {
    ahead: u32,
    /// How many of its sequences wait.
    waiting: usize,
}

impl Owner {
    /// Somebody follows a request that came now.
    pub(super) fn follow_from(&mut self, now: Time) {
        self.phases_due.get_or_insert(now + EVERY);
    }

    /// Tells every follower where its request is, if it is time for that.
    pub(super) fn tell_phases(&mut self, now: Time) {
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
                follower.tell(phase);
                job.outbox.wake();
            }
        }
        self.phases_due = followed.then(|| now + EVERY);
    }

    /// The requests that have waiting sequences, each where the first of these stands.
    fn line(&self) -> HashMap<usize, Place> {
        let mut line = HashMap::new();
        for key in self.scheduler.line() {
            let ahead = u32::try_from(line.len()).unwrap_or(u32::MAX);
            let fresh = Place { ahead, waiting: 0 };
            let place = line.entry(self.sequences[key].job).or_insert(fresh);
            place.waiting += 1;
        }
        line
    }

    fn phase(&self, job: &Job, place: Option<&Place>) -> Option<Phase> {
        let waits = place.filter(|place| place.waiting == job.members.len());
        let eta = |place: &Place| self.pace.after(place.ahead.saturating_add(1));
        match (waits, job.first_token) {
            (Some(place), None) => Some(Phase::Waits {
                ahead: place.ahead,
                eta: eta(place),
            }),
            // Its own departure has shown a pace.
            (Some(place), Some(_)) => Some(Phase::Displaced {
                eta: eta(place).unwrap_or_default(),
            }),
            (None, None) => {
                let computed = job.members.iter().map(|&key| self.sequences[key].computed);
                let prompt = job.prompt.len();
                let computed = computed.max().unwrap_or(0).min(prompt);
                Some(Phase::Prefill {
                    // A prompt is shorter than the context, which is a u32.
                    computed: u32::try_from(computed).unwrap_or(u32::MAX),
                    prompt: u32::try_from(prompt).unwrap_or(u32::MAX),
                })
            }
            (None, Some(_)) => None,
        }
    }
}
