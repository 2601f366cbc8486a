//! Recovers from a panic that reached the owner: every request ends with one error, and the owner starts with empty
//! state.
//!
//! The state after an interrupted step is undefined, so none of it is reused: sequences, slots and KV cells are
//! dropped. Only the model remains, with all of its slots released. The other machines keep only buffers, which they
//! clear before they fill them, and timers, which have no effect without requests.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use super::requests::Requests;
use super::{EngineOwner, StepReport};
use crate::api::EngineError;

impl EngineOwner {
    /// Ends every request with an error and clears all state. The model is lost if it cannot release its slots, or if
    /// there was no request that could have caused the panic: then the next step would panic as well.
    pub(super) fn recover(&mut self, now: Time) -> StepReport {
        let requests = &mut self.requests;
        requests.stats.panics.add(1);
        tracing::error!(
            model = self.info.name,
            "a step of the engine panicked: all requests of this model fail, and the engine continues"
        );
        let message = "the engine failed in this step and has started again: try again";
        let cause = EngineError::internal(ErrorReason::ENGINE_PANIC, message);
        // Read before the requests end. A lost model is excluded, because it has no requests either, and its own error
        // must stay.
        let was_idle = requests.jobs.is_empty() && !self.admission.is_lost();
        // The events of the interrupted step are dropped: a part of a step would reach readers as if it were a whole
        // one.
        requests.output.clear();
        // The requests end before the slots are released, so that no sequence refers to a slot that is free. Commands
        // in the inbox were not part of the step and are served by the next one.
        end_all(requests, &cause);
        requests.scheduler = requests.scheduler.emptied();
        if !requests.slots.reset() || was_idle {
            self.admission.lose(cause);
        }
        requests.report = StepReport {
            // The step number continues, because events of later steps must not repeat it.
            step: requests.report.step,
            wake_at: Some(now).filter(|_| !was_idle),
            ..StepReport::default()
        };
        requests.report.clone()
    }
}

/// Ends every request with an error and drops its sequences.
pub(super) fn end_all(requests: &mut Requests, error: &EngineError) {
    // Steerers, followers and wakers are foreign code, which may panic again when it is dropped or called.
    requests.opening.clear();
    requests.fuel.clear();
    for (_, mut job) in std::mem::take(&mut requests.jobs) {
        if job.started.is_none() && !job.ended {
            requests.queue.refund(&job.submission);
        }
        // A request that had ended lost its last event with the step's output. Its outbox sends the error in place of
        // it, but the request was counted already.
        if !job.ended {
            requests.stats.failed.add(1);
        }
        job.outbox.fail(error.clone());
        fenced(move || drop(job));
    }
    for (_, sequence) in std::mem::take(&mut requests.sequences) {
        fenced(move || drop(sequence));
    }
}

/// Returns whether a call returned without a panic.
pub(super) fn fenced(call: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(call)).is_ok()
}
