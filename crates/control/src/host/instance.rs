//! [`Instance`]: one sequence's controller, seen from an engine's thread: nothing here waits for a guest. It runs on a
//! thread of the host, or in a process of its own.

#[cfg(target_os = "linux")]
use std::collections::VecDeque;
use std::fmt;
#[cfg(target_os = "linux")]
use std::sync::Arc;
use std::time::Instant;

#[cfg(target_os = "linux")]
use sapwood_proto::steer::StepReport;
#[cfg(target_os = "linux")]
use sapwood_proto::steer::StepWaker;
use sapwood_proto::steer::Token;

use super::Host;
use super::callback::Callback;
use super::controller::Outcome;
use super::failure::CallFailure;
#[cfg(target_os = "linux")]
use super::process::ProcessInstance;
use super::program::Program;
use super::start::Start;
use super::threads::ThreadInstance;

/// A controller of one sequence. Its calls run one after the other, in order. Dropping it interrupts a call that is
/// running.
pub struct Instance(InstancePlace);

enum InstancePlace {
    Thread(ThreadInstance),
    #[cfg(target_os = "linux")]
    Process(ProcessInstance),
    /// It could not be started, and has this to say.
    #[cfg(target_os = "linux")]
    Nowhere(VecDeque<CallFailure>, Arc<dyn StepWaker>),
}

impl Instance {
    /// Queues the start of an instance: its outcome is [`Returned::Begun`](super::Returned::Begun), or a failure.
    #[must_use]
    pub fn start(host: &Host, program: &Program, start: Start) -> Self {
        #[cfg(target_os = "linux")]
        if let Some(processes) = host.processes() {
            let waker = Arc::clone(&start.waker);
            return match ProcessInstance::start(host, processes, program, start) {
                Ok(instance) => Self(InstancePlace::Process(instance)),
                Err(failure) => Self::nowhere(failure, &waker),
            };
        }
        Self(InstancePlace::Thread(ThreadInstance::start(
            host, program, start,
        )))
    }

    #[cfg(target_os = "linux")]
    fn nowhere(failure: CallFailure, waker: &Arc<dyn StepWaker>) -> Self {
        waker.wake();
        Self(InstancePlace::Nowhere(
            VecDeque::from([failure]),
            Arc::clone(waker),
        ))
    }

    /// Sets the id that the controller sees in the calls from now on. Called before them.
    pub fn bind(&mut self, id: u32) {
        match &self.0 {
            InstancePlace::Thread(instance) => instance.bind(id),
            #[cfg(target_os = "linux")]
            InstancePlace::Process(instance) => instance.bind(id),
            #[cfg(target_os = "linux")]
            InstancePlace::Nowhere(..) => {}
        }
    }

    /// Sets the best tokens of the last output row, which the calls from now on see. Only engines in this process have
    /// them, and those run controllers on threads.
    pub fn show_best_tokens(&mut self, best: &[(Token, f32)]) {
        if let InstancePlace::Thread(instance) = &self.0 {
            instance.show_best_tokens(best);
        }
    }

    /// Queues a call. Its outcome follows those of earlier calls; the caller keeps the number of open calls small.
    pub fn call(&mut self, callback: Callback) {
        self.call_all([callback]);
    }

    /// Queues several calls with one hand-over. Each has an outcome.
    pub fn call_all<const N: usize>(&mut self, callbacks: [Callback; N]) {
        match &mut self.0 {
            InstancePlace::Thread(instance) => instance.call_all(callbacks),
            #[cfg(target_os = "linux")]
            InstancePlace::Process(instance) => instance.call_all(callbacks),
            #[cfg(target_os = "linux")]
            InstancePlace::Nowhere(failures, waker) => {
                failures.extend(callbacks.map(|_| CallFailure::previous()));
                waker.wake();
            }
        }
    }

    /// The next outcome, if there is one. The waker is called when one is there.
    pub fn poll(&mut self) -> Option<Outcome> {
        match &mut self.0 {
            InstancePlace::Thread(instance) => instance.poll(),
            #[cfg(target_os = "linux")]
            InstancePlace::Process(instance) => instance.poll(),
            #[cfg(target_os = "linux")]
            InstancePlace::Nowhere(failures, _) => failures.pop_front().map(|failure| Outcome {
                result: Err(failure),
                report: StepReport::default(),
            }),
        }
    }

    /// When the call that is running began; `None` if none is, or it still waits.
    #[must_use]
    pub fn running_since(&self) -> Option<Instant> {
        match &self.0 {
            InstancePlace::Thread(instance) => instance.running_since(),
            #[cfg(target_os = "linux")]
            InstancePlace::Process(instance) => instance.running_since(),
            #[cfg(target_os = "linux")]
            InstancePlace::Nowhere(..) => None,
        }
    }

    /// Makes an instance in the same state, after the calls queued so far. The copy is made in the background: if it
    /// fails, the first outcome of the new instance is a failure (AI-714).
    ///
    /// # Errors
    /// The request or the host has as many instances as it may have, or the system gives no more.
    pub fn fork(&mut self) -> Result<Self, CallFailure> {
        match &self.0 {
            InstancePlace::Thread(instance) => Ok(Self(InstancePlace::Thread(instance.fork()?))),
            #[cfg(target_os = "linux")]
            InstancePlace::Process(instance) => Ok(Self(InstancePlace::Process(instance.fork()?))),
            #[cfg(target_os = "linux")]
            InstancePlace::Nowhere(_, waker) => Ok(Self::nowhere(CallFailure::previous(), waker)),
        }
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match &self.0 {
            InstancePlace::Thread(_) => "thread",
            #[cfg(target_os = "linux")]
            InstancePlace::Process(_) => "process",
            #[cfg(target_os = "linux")]
            InstancePlace::Nowhere(..) => "nowhere",
        };
        f.debug_tuple("Instance").field(&place).finish()
    }
}
