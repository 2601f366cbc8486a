//! Recovers from a panic that reached the owner: every request ends with one error, and the owner starts with empty
//! state.
//!
//! The state after an interrupted step is undefined, so none of it is reused: sequences, slots and KV cells are
//! dropped. Only the model remains, with all of its slots released.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sapwood_proto::code::Code;
use sapwood_proto::time::Time;

use super::{EngineOwner, Scratch, StepReport};
use crate::api::EngineError;
use crate::prefix_cache::PrefixCache;
use crate::sampling::Sampler;
use crate::scheduler::Scheduler;

impl EngineOwner {
    /// Ends every request with an error and clears all state. The model is lost if it cannot release its slots, or if
    /// there was no request that could have caused the panic: then the next step would panic as well.
    pub(super) fn recover(&mut self, now: Time) -> StepReport {
        self.inbox.stats.panics.add(1);
        tracing::error!(
            model = self.info.name,
            "a step panicked; every request of the model ends"
        );
        let message = "the engine failed in this step and has begun anew: try again";
        let cause = EngineError::new(Code::Internal, "engine_panic", message);
        let was_idle = self.jobs.is_empty() && self.dead.is_none();
        self.outgoing.clear();
        self.scratch = Scratch::default();
        self.sampler = Sampler::default();
        self.end_requests(&cause);
        let capacity = self.model.capacity();
        self.scheduler = Scheduler::new(self.info.parallel as usize, self.config.ageing_turns);
        self.cache = PrefixCache::new(capacity, self.info.truncates);
        (self.next_deadline, self.phases_due) = (None, None);
        let released = (0..capacity.slots).all(|slot| fenced(|| self.model.release(slot)));
        if !released || was_idle {
            self.inbox.stats.dead.set(1);
            self.dead = Some(cause);
        }
        self.report = StepReport {
            step: self.report.step,
            wake_at: Some(now).filter(|_| !was_idle),
            ..StepReport::default()
        };
        self.report.clone()
    }

    fn end_requests(&mut self, error: &EngineError) {
        // Steerers, followers and wakers are foreign code, which may panic again when it is dropped or called.
        for mut job in std::mem::take(&mut self.jobs)
            .into_iter()
            .map(|(_, job)| job)
        {
            if job.started.is_none() && !job.ended {
                self.inbox.queue.leave(job.turn.caller, job.prompt.len());
            }
            if !job.ended {
                self.inbox.stats.failed.add(1);
            }
            job.outbox.fail(error.clone());
            fenced(move || drop(job));
        }
        for (_, sequence) in std::mem::take(&mut self.sequences) {
            fenced(move || drop(sequence));
        }
    }
}

/// Returns whether a call returned without a panic.
pub(super) fn fenced(call: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(call)).is_ok()
}
