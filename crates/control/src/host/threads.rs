//! [`ThreadInstance`]: one sequence's controller on a thread of the host, as an engine's thread sees it.
//!
//! ```text
//!   start ─► Busy ─(all calls done)─► Idle ─(call, fork)─► Busy …
//!   fork  ─► Awaiting ─(the parent's worker has made the copy)─► as start
//!            any ─(a failure)─► Failed: calls return `Previous WASM Error`
//! ```
//!
//! A fork is made by a worker too, between the parent's calls: it is queued like a call. So the copy is of the state at
//! the moment of [`ThreadInstance::fork`], and the engine's thread never copies memory.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, StepWaker, Token};

use super::budget::InstanceLimiter;
use super::callback::Callback;
use super::config::ControllerRandom;
use super::controller::{Controller, Outcome};
use super::failure::CallFailure;
use super::group::{Group, Member};
use super::program::Program;
use super::random::SeededRandom;
use super::start::Start;
use super::state::{BestTokens, ControllerState, Surroundings};
use super::workers::{NextWork, Work};
use super::{Host, LiveInstance};

/// A controller of one sequence. Its calls run one after the other, in order, on threads of the host. Dropping it
/// interrupts a call that is running.
pub(super) struct ThreadInstance(Arc<Slot>);

/// The part of an instance that its worker shares.
pub(super) struct Slot {
    host: Host,
    program: Program,
    surroundings: Surroundings,
    group: Arc<Group>,
    waker: Arc<dyn StepWaker>,
    cancelled: Arc<AtomicBool>,
    inner: Mutex<SlotState>,
}

struct SlotState {
    phase: SlotPhase,
    /// Absent while it runs, before it exists, and after a failure.
    controller: Option<Box<Controller>>,
    /// At most a few: callers wait for outcomes before they go on.
    jobs: VecDeque<SlotJob>,
    outcomes: VecDeque<Outcome>,
    number: u32,
    best: BestTokens,
    running_since: Option<Instant>,
    /// The [`ThreadInstance`] is gone. Forks that it had asked for are still made.
    dropped: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SlotPhase {
    Awaiting,
    Idle,
    Busy,
    Failed,
}

enum SlotJob {
    Start(Vec<Token>, Registered),
    Call(Callback),
    Fork(Arc<Slot>, Registered),
}

/// The right to one more instance: counted against the request and the host.
struct Registered {
    member: Member,
    live: LiveInstance,
}

impl ThreadInstance {
    /// Queues the start of an instance: its outcome is [`Returned::Begun`](super::Returned::Begun), or a failure.
    pub(super) fn start(host: &Host, program: &Program, mut start: Start) -> Self {
        let prompt = std::mem::take(&mut start.prompt);
        let slot = Slot::of_start(host, program, start);
        let registered = if program.steers() {
            slot.register()
        } else {
            let text = "this module has no callbacks to steer a sequence";
            Err(CallFailure::new(ErrorReason::INIT, text))
        };
        match registered {
            Ok(registered) => slot.push([SlotJob::Start(prompt, registered)]),
            Err(failure) => slot.fail(failure),
        }
        Self(slot)
    }

    /// Sets the id that the controller sees in the calls from now on. Called before them.
    pub(super) fn bind(&self, id: u32) {
        self.0.lock().number = id;
    }

    /// Sets the best tokens of the last output row, which the calls from now on see.
    pub(super) fn show_best_tokens(&self, best: &[(Token, f32)]) {
        self.0.lock().best = best.into();
    }

    /// Queues several calls with one wake-up of a worker. Each has an outcome.
    pub(super) fn call_all<const N: usize>(&self, callbacks: [Callback; N]) {
        self.0.push(callbacks.map(SlotJob::Call));
    }

    /// The next outcome, if there is one. The waker is called when one is there.
    pub(super) fn poll(&self) -> Option<Outcome> {
        self.0.lock().outcomes.pop_front()
    }

    /// When the call that is running began; `None` if none is, or it still waits for a thread.
    pub(super) fn running_since(&self) -> Option<Instant> {
        self.0.lock().running_since
    }

    /// Makes an instance in the same state, after the calls queued so far. The copy is made in the background: if it
    /// fails, the first outcome of the new instance is a failure (AI-714).
    ///
    /// # Errors
    /// The request or the host has as many instances as it may have.
    pub(super) fn fork(&self) -> Result<Self, CallFailure> {
        let parent = &self.0;
        let child = Slot::new(
            parent.host.clone(),
            parent.program.clone(),
            parent.surroundings.clone(),
            Arc::clone(&parent.group),
            Arc::clone(&parent.waker),
        );
        let registered = child.register()?;
        let best = Arc::clone(&parent.lock().best);
        child.lock().best = best;
        parent.push([SlotJob::Fork(Arc::clone(&child), registered)]);
        Ok(Self(child))
    }
}

impl Drop for ThreadInstance {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.dropped = true;
        inner.jobs.retain(|job| matches!(job, SlotJob::Fork(..)));
        if inner.jobs.is_empty() {
            self.0.cancelled.store(true, Ordering::Relaxed);
        }
        let controller = if inner.phase == SlotPhase::Idle {
            inner.controller.take()
        } else {
            None
        };
        drop(inner);
        if let Some(mut controller) = controller {
            // At once: the engine may ask for another sequence in the same request (AI-413).
            controller.leave();
            self.0.host.workers().push(Work::Discard(controller));
        }
    }
}

/// See [`Host::run_main`].
pub(super) fn run_main(
    host: &Host,
    program: &Program,
    start: Start,
) -> (Result<(), CallFailure>, StepReport) {
    let slot = Slot::of_start(host, program, start);
    let Some(main) = program.main() else {
        let text = "the module exports neither aici_main nor main";
        return (
            Err(CallFailure::new(ErrorReason::INIT, text)),
            StepReport::default(),
        );
    };
    match slot.register() {
        Ok(registered) => Controller::run_main(program, slot.state(registered), main),
        Err(failure) => (Err(failure), StepReport::default()),
    }
}

impl Slot {
    fn of_start(host: &Host, program: &Program, start: Start) -> Arc<Self> {
        let config = host.config();
        let surroundings = Surroundings {
            model: start.model,
            arg: start.arg,
            abi: program.abi(),
            capabilities: start.capabilities,
            timer_resolution: config.timer_resolution,
            result_bytes: config.result_bytes,
            long_texts: Some(Arc::clone(host.long_texts())),
        };
        Self::new(
            host.clone(),
            program.clone(),
            surroundings,
            start.group,
            start.waker,
        )
    }

    fn new(
        host: Host,
        program: Program,
        surroundings: Surroundings,
        group: Arc<Group>,
        waker: Arc<dyn StepWaker>,
    ) -> Arc<Self> {
        Arc::new(Self {
            host,
            program,
            surroundings,
            group,
            waker,
            cancelled: Arc::default(),
            inner: Mutex::new(SlotState {
                phase: SlotPhase::Awaiting,
                controller: None,
                jobs: VecDeque::new(),
                outcomes: VecDeque::new(),
                number: 0,
                best: BestTokens::default(),
                running_since: None,
                dropped: false,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        // Nothing that can panic runs under the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self) -> Result<Registered, CallFailure> {
        let (member, live) = self.host.enter(&self.group)?;
        Ok(Registered { member, live })
    }

    /// Queues jobs, and wakes a worker if none has this slot.
    fn push(self: &Arc<Self>, jobs: impl IntoIterator<Item = SlotJob>) {
        let mut inner = self.lock();
        if inner.phase == SlotPhase::Failed {
            let mut children = Vec::new();
            for job in jobs {
                match job {
                    SlotJob::Fork(child, _) => children.push(child),
                    _ => inner.outcomes.push_back(failed(CallFailure::previous())),
                }
            }
            drop(inner);
            self.waker.wake();
            for child in children {
                child.fail(CallFailure::previous());
            }
            return;
        }
        inner.jobs.extend(jobs);
        let starts = matches!(inner.jobs.front(), Some(SlotJob::Start(..)));
        // A fork that is not made yet starts with what `install` finds queued.
        if inner.phase == SlotPhase::Idle || (inner.phase == SlotPhase::Awaiting && starts) {
            inner.phase = SlotPhase::Busy;
            drop(inner);
            self.schedule(starts);
        }
    }

    fn schedule(self: &Arc<Self>, starts: bool) {
        let config = self.host.config();
        let slot = Arc::clone(self);
        self.host.workers().push(Work::Run {
            slot,
            starts,
            // Of a start too, which may go on for longer: others need the processor.
            late_after: config.step_time + config.grace_time,
        });
    }

    /// Does all that is queued. Called by one worker at a time, which [`SlotPhase::Busy`] ensures. Returns when more is to be
    /// expected.
    pub(super) fn run(self: Arc<Self>) -> NextWork {
        let mut controller = self.lock().controller.take();
        let mut next = NextWork::Soon;
        loop {
            let mut inner = self.lock();
            inner.running_since = None;
            let Some(job) = inner.jobs.pop_front() else {
                if inner.phase == SlotPhase::Busy && !inner.dropped {
                    inner.phase = SlotPhase::Idle;
                    inner.controller = controller.take();
                }
                drop(inner);
                // Freed without the lock, where the sequence is gone.
                if let Some(mut controller) = controller {
                    controller.leave();
                }
                return next;
            };
            inner.running_since = Some(Instant::now());
            next = match &job {
                SlotJob::Call(callback) if callback.ends_round() => NextWork::AfterPass,
                _ => NextWork::Soon,
            };
            let (number, best) = (inner.number, Arc::clone(&inner.best));
            drop(inner);
            let child = match &job {
                SlotJob::Fork(child, _) => Some(Arc::clone(child)),
                _ => None,
            };
            // A defect in a host function ends this sequence and no other (AI-742).
            let done = catch_unwind(AssertUnwindSafe(|| {
                self.execute(job, controller.take(), (number, best))
            }));
            let outcome;
            (controller, outcome) = done.unwrap_or_else(|_| {
                tracing::error!("a host function panicked");
                let text = "the controller could not be run";
                let failure = CallFailure::new(ErrorReason::TRAP, text);
                match child {
                    // A fork has no outcome of the parent's: the child has it, and the parent's next call fails.
                    Some(child) => {
                        self.lock().phase = SlotPhase::Failed;
                        child.fail(failure);
                        (None, None)
                    }
                    None => (None, Some(failed(failure))),
                }
            });
            if let Some(outcome) = outcome {
                self.publish(outcome);
            }
        }
    }

    /// Does one thing. Returns the guest, unless it failed.
    fn execute(
        &self,
        job: SlotJob,
        controller: Option<Box<Controller>>,
        (number, best): (u32, BestTokens),
    ) -> (Option<Box<Controller>>, Option<Outcome>) {
        let config = self.host.config();
        match (job, controller) {
            (SlotJob::Start(prompt, registered), _) => {
                let state = self.state(registered);
                let (controller, outcome) =
                    Controller::start(&self.program, state, &prompt, config);
                (controller, Some(outcome))
            }
            (SlotJob::Call(callback), Some(mut controller)) => {
                controller.show_best_tokens(best);
                let outcome = controller.call(&callback, number, config);
                (outcome.result.is_ok().then_some(controller), Some(outcome))
            }
            (SlotJob::Call(..), None) => (None, Some(failed(CallFailure::previous()))),
            (SlotJob::Fork(child, registered), Some(mut controller)) => {
                child.install(controller.fork(child.state(registered)));
                (Some(controller), None)
            }
            (SlotJob::Fork(child, _), None) => {
                child.fail(CallFailure::previous());
                (None, None)
            }
        }
    }

    /// The state of a first instance; a fork has some of its parent's instead.
    fn state(&self, registered: Registered) -> ControllerState {
        let config = self.host.config();
        let budget = Arc::clone(self.host.budget());
        let limiter = InstanceLimiter::new(budget, config.memory_bytes, config.table_elements);
        let mut state = ControllerState::new(
            self.surroundings.clone(),
            limiter,
            (registered.member, registered.live),
            Arc::clone(&self.cancelled),
        );
        state.random = match config.random {
            ControllerRandom::Off => None,
            ControllerRandom::Seeded => Some(SeededRandom::new(self.group.seed())),
        };
        state
    }

    fn publish(&self, outcome: Outcome) {
        let mut inner = self.lock();
        if outcome.result.is_err() {
            inner.phase = SlotPhase::Failed;
        }
        inner.outcomes.push_back(outcome);
        // Whoever queued two calls waits for the second, so one wake-up is enough.
        let last = !inner
            .jobs
            .iter()
            .any(|job| matches!(job, SlotJob::Call(..)));
        drop(inner);
        if last {
            self.host.workers().wake_soon(&self.waker);
        }
    }

    /// Takes the copy that the parent's worker has made.
    fn install(self: &Arc<Self>, controller: Result<Box<Controller>, CallFailure>) {
        let controller = match controller {
            Ok(controller) => controller,
            Err(failure) => return self.fail(failure),
        };
        let mut inner = self.lock();
        if inner.dropped && inner.jobs.is_empty() {
            drop(inner);
            return drop(controller);
        }
        inner.controller = Some(controller);
        inner.phase = SlotPhase::Idle;
        if !inner.jobs.is_empty() {
            inner.phase = SlotPhase::Busy;
            drop(inner);
            self.schedule(false);
        }
    }

    /// Ends an instance that never came to be. Queued calls fail with it, as the first of them shows.
    fn fail(&self, failure: CallFailure) {
        let mut inner = self.lock();
        inner.phase = SlotPhase::Failed;
        inner.outcomes.push_back(failed(failure));
        let jobs = std::mem::take(&mut inner.jobs);
        drop(inner);
        self.waker.wake();
        for job in jobs {
            if let SlotJob::Fork(child, _) = job {
                child.fail(CallFailure::previous());
            }
        }
    }
}

fn failed(failure: CallFailure) -> Outcome {
    Outcome {
        result: Err(failure),
        report: StepReport::default(),
    }
}
