//! [`ProcessInstance`]: one sequence's controller in a process of its own, seen from an engine's thread.
//!
//! ```text
//!   start ─► awaited ─(Hello)─► alive ─(a failure, a kill, the end of its socket)─► failed: `Previous WASM Error`
//!   fork  ─► awaited, as its parent's process works off what is queued before
//! ```
//!
//! Calls are queued in the socket: the process takes them in order. What it sends is received by the poller's thread, or
//! by an engine's thread that waits for it.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use sapwood_proto::error_reason::ErrorReason;

use super::asked::{Asked, AskedCall};
use super::message::{self, LaunchedModule, StartMessage};
use super::processes::Processes;
use super::slot::{HELLO_TIME, KILL_TIME, ProcessSlot, SlotState, SlotSurroundings, no_process};
use crate::host::Host;
use crate::host::budget::MEMORY_EXHAUSTED;
use crate::host::callback::Callback;
use crate::host::config::ControllerRandom;
use crate::host::controller::Outcome;
use crate::host::failure::CallFailure;
use crate::host::program::Program;
use crate::host::result::ResultLimits;
use crate::host::start::Start;

/// A controller of one sequence, in its process. Dropping it ends the process.
pub(in crate::host) struct ProcessInstance(Arc<ProcessSlot>);

impl ProcessInstance {
    /// Asks for a process that starts an instance.
    ///
    /// # Errors
    /// A limit is reached, or the system has no process to give.
    pub(in crate::host) fn start(
        host: &Host,
        processes: &Arc<Processes>,
        program: &Program,
        start: Start,
    ) -> Result<Self, CallFailure> {
        let (member, live) = host.enter(&start.group)?;
        if !program.steers() {
            let text = "this module has no callbacks to steer a sequence";
            return Err(CallFailure::new(ErrorReason::INIT, text));
        }
        let module = LaunchedModule {
            id: *program.id().as_bytes(),
            abi: program.abi(),
            start: program.layout().start.clone(),
            vocabulary: start.model.vocabulary(),
            eos: start.model.eos(),
        };
        let limits = ResultLimits {
            vocabulary: module.vocabulary,
            branches: start.group.forks_max() as usize,
        };
        let first = StartMessage {
            arg: start.arg,
            prompt: start.prompt,
            capabilities: start.capabilities,
            forks_max: start.group.forks_max(),
            variables: *start.group.variables().limits(),
            seed: match host.config().random {
                ControllerRandom::Off => None,
                ControllerRandom::Seeded => Some(start.group.seed()),
            },
        };
        let surroundings = SlotSurroundings {
            host: host.clone(),
            processes: Arc::clone(processes),
            group: start.group,
            waker: start.waker,
            limits,
        };
        let made = ProcessSlot::make(surroundings, (member, live));
        let (slot, theirs) = made.map_err(|error| no_process(&error))?;
        // Before the process exists, or it could say hello to nobody.
        let mut inner = slot.lock();
        inner.asked.push_back(Asked::Start);
        slot.send(&mut inner, first.message(), None);
        slot.set_deadline(&mut inner, Some(HELLO_TIME));
        drop(inner);
        let launched = match program.artefact() {
            Some(artefact) => artefact
                .try_clone_to_owned()
                .and_then(|artefact| processes.launch(&module, artefact, &theirs)),
            None => Err(io::ErrorKind::InvalidInput.into()),
        };
        if let Err(error) = launched {
            tracing::warn!(%error, "no process for a controller");
            // Its socket has no other end any more, so the poller forgets it.
            slot.fail(&no_process(&error));
        }
        Ok(Self(slot))
    }

    pub(in crate::host) fn bind(&self, id: u32) {
        self.0.lock().id = id;
    }

    pub(in crate::host) fn call_all<const N: usize>(&self, callbacks: [Callback; N]) {
        let slot = &self.0;
        let mut inner = slot.lock();
        match std::mem::replace(&mut inner.state, SlotState::Failed) {
            SlotState::Good => inner.state = SlotState::Good,
            SlotState::Failing(failure) => {
                inner.fail_calls(N, failure);
                drop(inner);
                return slot.around.waker.wake();
            }
            SlotState::Failed => {
                inner.fail_calls(N, CallFailure::previous());
                drop(inner);
                return slot.around.waker.wake();
            }
        }
        let config = slot.around.host.config();
        let mut messages = Vec::new();
        for callback in callbacks {
            messages.extend(message::call(inner.id, &callback));
            inner.asked.push_back(Asked::Call {
                kind: AskedCall::of(&callback),
                late: callback.step_time(config).saturating_add(config.grace_time),
                time: callback.time_limit(config).saturating_add(KILL_TIME),
                mark: slot.around.group.mark(),
            });
        }
        let first = inner.asked.len() == N;
        slot.send(&mut inner, messages, None);
        if first {
            slot.begin_next(&mut inner);
        }
    }

    pub(in crate::host) fn poll(&self) -> Option<Outcome> {
        self.0.lock().outcomes.pop_front()
    }

    pub(in crate::host) fn running_since(&self) -> Option<Instant> {
        self.0.lock().running_since
    }

    /// Asks the process to clone itself, after the calls queued so far.
    pub(in crate::host) fn fork(&self) -> Result<Self, CallFailure> {
        let parent = &self.0;
        let (member, live) = parent.around.host.enter(&parent.around.group)?;
        let made = ProcessSlot::make(parent.around.clone(), (member, live));
        let (child, theirs) = made.map_err(|error| no_process(&error))?;
        let mut inner = parent.lock();
        if !matches!(inner.state, SlotState::Good) {
            drop(inner);
            child.fail(&CallFailure::previous());
            return Ok(Self(child));
        }
        // If the parent is busy, it may have more by the time it is cloned, which is then added.
        let charged = inner.charged;
        if !child.charge(charged) {
            drop(inner);
            child.fail(&CallFailure::new(ErrorReason::MEMORY, MEMORY_EXHAUSTED));
            return Ok(Self(child));
        }
        child.lock().is_awaited = true;
        inner.asked.push_back(Asked::Fork {
            slot: Arc::clone(&child),
            charged,
        });
        let first = inner.asked.len() == 1;
        parent.send(&mut inner, message::bare(message::FORK), Some(theirs));
        if first {
            parent.begin_next(&mut inner);
        }
        drop(inner);
        Ok(Self(child))
    }
}

impl Drop for ProcessInstance {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.dropped = true;
        // At once: the engine may ask for another sequence in the same request (AI-413).
        inner.member.leave();
        inner.end_if_unwanted();
    }
}
