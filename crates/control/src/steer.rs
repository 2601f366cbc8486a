//! Controllers as the engine sees them: [`ControllerSteer`] is a [`Steer`] over an [`Instance`], [`ModelControllers`]
//! opens them by name.
//!
//! Both generations of modules steer alike (the table after AI-609; in-process the engine applies branches itself):
//!
//! | engine | P1 module | P2 module |
//! |---|---|---|
//! | `post` | `post` and the next `pre`, in one hand-off | kept |
//! | `pre` | the result; `ff_tokens` are reported to `post`, and `pre` runs again | run |
//! | `mid` | `mid` | `mid_process` with what was kept; branches become a fork |

mod one_end;
mod p1;
pub(crate) mod p2;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Begun, Mid, OutsideWrite, Post, Pre, RequestVariables, Steer, SteerCall,
    SteerFailure, SteerRefusal, SteerSource, SteerUser, Steered, StepReport, StepWaker, Token,
    VariableWrite, VariablesSharer,
};

pub use self::one_end::{Ends, OneEnd};
use self::p1::P1Steps;
use self::p2::P2Steps;
use crate::controllers::Controllers;
use crate::host::{
    CallFailure, Capabilities, Group, Host, Instance, Outcome, Program, Returned, Start,
    VariablesLimits,
};
use crate::module::Abi;
use crate::trie::HostModel;

/// Finds a program by a controller's name, with the permissions of the user.
pub trait FindProgram: Send + Sync {
    /// The program that `name` means now.
    ///
    /// # Errors
    /// There is none, the user may not run it, or it cannot be loaded.
    fn find(&self, user: SteerUser<'_>, name: &str) -> Result<Program, SteerRefusal>;
}

impl<F> FindProgram for F
where
    F: Fn(SteerUser<'_>, &str) -> Result<Program, SteerRefusal> + Send + Sync,
{
    fn find(&self, user: SteerUser<'_>, name: &str) -> Result<Program, SteerRefusal> {
        self(user, name)
    }
}

impl FindProgram for Controllers<Host> {
    fn find(&self, user: SteerUser<'_>, name: &str) -> Result<Program, SteerRefusal> {
        Self::find(self, user, name)
    }
}

/// Gets the processor time of each run of a controller's callbacks, on the threads that poll them: it must be quick. In P2
/// a step is one run; in P1 `post` and the `pre` after it are one each, and `mid` is another.
pub type StepObserver = Arc<dyn Fn(Duration) + Send + Sync>;

/// Limits of one request with a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Live sequences of it.
    pub forks: u32,
    /// Bytes of the controller's argument.
    pub arg_bytes: usize,
    /// Its variables.
    pub variables: VariablesLimits,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            forks: 16,
            arg_bytes: 1 << 20,
            variables: VariablesLimits::default(),
        }
    }
}

/// The Wasm controllers of one model.
pub struct ModelControllers {
    host: Host,
    programs: Arc<dyn FindProgram>,
    model: Arc<HostModel>,
    capabilities: Capabilities,
    limits: RequestLimits,
    step_observer: StepObserver,
}

impl ModelControllers {
    /// Controllers for `model`, whose engine can do what `capabilities` says.
    #[must_use]
    pub fn new(
        host: Host,
        programs: Arc<dyn FindProgram>,
        model: Arc<HostModel>,
        capabilities: Capabilities,
        limits: RequestLimits,
    ) -> Self {
        Self {
            host,
            programs,
            model,
            capabilities,
            limits,
            step_observer: Arc::new(|_| {}),
        }
    }

    /// Lets `observer` have the time of each callback.
    #[must_use]
    pub fn with_step_observer(self, step_observer: StepObserver) -> Self {
        Self {
            step_observer,
            ..self
        }
    }
}

impl SteerSource for ModelControllers {
    fn open(&self, call: SteerCall<'_>) -> Result<Box<dyn Steer>, SteerRefusal> {
        if call.arg.len() > self.limits.arg_bytes {
            return Err(SteerRefusal {
                code: Code::InvalidRequest,
                reason: ErrorReason::BAD_CONFIG,
                message: format!(
                    "the argument of the controller has {} bytes, the limit is {}",
                    call.arg.len(),
                    self.limits.arg_bytes
                ),
            });
        }
        let program = self.programs.find(call.user, call.controller)?;
        if !program.steers() {
            return Err(SteerRefusal {
                code: Code::InvalidRequest,
                reason: ErrorReason::INVALID_MODULE,
                message:
                    "this module has no callbacks to steer a sequence: it can only be run once"
                        .to_owned(),
            });
        }
        let group = Group::new(self.limits.forks, self.limits.variables);
        group.set_caller(call.user.name);
        if let Some(sharer) = call.sharer {
            share(&group, sharer)?;
        }
        let request = Request {
            host: self.host.clone(),
            program,
            model: Arc::clone(&self.model),
            capabilities: self.capabilities,
            group,
            watched: call.watched,
            step_observer: Arc::clone(&self.step_observer),
        };
        Ok(Box::new(ControllerSteer::new(request, call.arg.into())))
    }
}

/// Sets what the request came with, and shares its variables (AI-1006).
fn share(group: &Arc<Group>, sharer: &dyn VariablesSharer) -> Result<(), SteerRefusal> {
    for (name, value) in sharer.take_initial() {
        let write = VariableWrite {
            name,
            value,
            append: false,
            when_version_is: None,
        };
        if let OutsideWrite::OverLimit(message) = group.write(&write) {
            return Err(SteerRefusal {
                code: Code::InvalidRequest,
                reason: ErrorReason::BAD_CONFIG,
                message: format!("vars: {message}"),
            });
        }
    }
    sharer.opened(Arc::clone(group) as _);
    Ok(())
}

impl fmt::Debug for ModelControllers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelControllers")
            .field("model", &self.model)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// What the sequences of a request have in common.
#[derive(Clone)]
struct Request {
    host: Host,
    program: Program,
    model: Arc<HostModel>,
    capabilities: Capabilities,
    group: Arc<Group>,
    /// Somebody reads the reports.
    watched: bool,
    step_observer: StepObserver,
}

/// A Wasm controller that steers one sequence.
pub struct ControllerSteer {
    request: Request,
    arg: Arc<str>,
    /// `None` until [`Steer::begin`], and after a failure.
    instance: Option<Instance>,
    steps: Steps,
    report: StepReport,
}

enum Steps {
    P1(P1Steps),
    P2(P2Steps),
}

impl ControllerSteer {
    fn new(request: Request, arg: Arc<str>) -> Self {
        let steps = match request.program.abi() {
            Abi::P1 => Steps::P1(P1Steps::default()),
            Abi::P2 => Steps::P2(P2Steps::default()),
        };
        Self {
            request,
            arg,
            instance: None,
            steps,
            report: StepReport::default(),
        }
    }

    fn calls(&mut self) -> Calls<'_> {
        Calls {
            instance: &mut self.instance,
            report: self.request.watched.then_some(&mut self.report),
            step_observer: &self.request.step_observer,
        }
    }
}

/// The parts of a steerer that steps use.
struct Calls<'s> {
    instance: &'s mut Option<Instance>,
    report: Option<&'s mut StepReport>,
    step_observer: &'s StepObserver,
}

impl Calls<'_> {
    fn instance(&mut self) -> Steered<&mut Instance> {
        self.instance.as_mut().ok_or_else(|| SteerFailure {
            reason: ErrorReason::TRAP,
            message: "the controller has failed before".to_owned(),
        })
    }

    /// The next result, if there is one. A failure ends the instance.
    fn poll(&mut self) -> Steered<Option<Returned>> {
        let Some(Outcome { result, report }) = self.instance()?.poll() else {
            return Ok(None);
        };
        // A start is no step, and one that was ended from outside has no time of its own.
        if report.micros > 0 || result.as_ref().is_ok_and(is_of_step) {
            (self.step_observer)(Duration::from_micros(report.micros));
        }
        if let Some(total) = &mut self.report {
            add_report(total, report);
        }
        match result {
            Ok(returned) => Ok(Some(returned)),
            Err(failure) => {
                *self.instance = None;
                Err(failure_of(&failure))
            }
        }
    }
}

impl Steer for ControllerSteer {
    fn best_tokens_wanted(&self) -> usize {
        if self.request.capabilities.logits && self.request.program.wants_best_tokens() {
            BEST_TOKENS
        } else {
            0
        }
    }

    fn show_best_tokens(&mut self, best: &[(Token, f32)]) {
        // After a failure there is nobody who could see them.
        if let Some(instance) = &mut self.instance {
            instance.show_best_tokens(best);
        }
    }

    fn seed(&mut self, seed: u64) {
        self.request.group.set_seed(seed);
    }

    fn begin(&mut self, prompt: &[Token], waker: &Arc<dyn StepWaker>) {
        let start = Start {
            model: Arc::clone(&self.request.model),
            arg: Arc::clone(&self.arg),
            prompt: prompt.to_vec(),
            group: Arc::clone(&self.request.group),
            capabilities: self.request.capabilities,
            waker: Arc::clone(waker),
        };
        self.instance = Some(Instance::start(
            &self.request.host,
            &self.request.program,
            start,
        ));
    }

    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        match self.calls().poll()? {
            None => Ok(None),
            Some(Returned::Begun { prompt }) => Ok(Some(Begun { prompt })),
            Some(_) => Err(unexpected()),
        }
    }

    fn bind(&mut self, number: u32) {
        if let Some(instance) = &mut self.instance {
            instance.bind(number);
        }
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let forks_max = self.request.group.forks_max();
        let mut calls = Calls {
            instance: &mut self.instance,
            report: self.request.watched.then_some(&mut self.report),
            step_observer: &self.request.step_observer,
        };
        match &mut self.steps {
            Steps::P1(steps) => steps.pre(&mut calls, forks_max),
            Steps::P2(steps) => Ok(Some(steps.pre())),
        }
    }

    fn mid_begin(&mut self, group: &[u32]) {
        // A failed instance shows in `mid_poll`.
        let Some(instance) = &mut self.instance else {
            return;
        };
        match &mut self.steps {
            Steps::P1(steps) => steps.mid_begin(instance, group),
            Steps::P2(steps) => steps.mid_begin(instance, group),
        }
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        let mut calls = Calls {
            instance: &mut self.instance,
            report: self.request.watched.then_some(&mut self.report),
            step_observer: &self.request.step_observer,
        };
        match &mut self.steps {
            Steps::P1(steps) => steps.mid_poll(&mut calls),
            Steps::P2(steps) => steps.mid_poll(&mut calls),
        }
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        match &mut self.steps {
            Steps::P1(steps) => {
                let mut calls = Calls {
                    instance: &mut self.instance,
                    report: None,
                    step_observer: &self.request.step_observer,
                };
                steps.post(calls.instance()?, appended);
            }
            Steps::P2(steps) => steps.post(appended),
        }
        Ok(Post::Continue)
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        let forked = self.calls().instance()?.fork();
        let instance = forked.map_err(|failure| failure_of(&failure))?;
        let steps = match &self.steps {
            Steps::P1(steps) => Steps::P1(steps.fork()),
            Steps::P2(steps) => Steps::P2(steps.fork(index)),
        };
        Ok(Box::new(Self {
            request: self.request.clone(),
            arg: Arc::clone(&self.arg),
            instance: Some(instance),
            steps,
            report: StepReport::default(),
        }))
    }

    /// A controller sees a sampled EOS token and decides itself (AI-804).
    fn ends_at_eos(&self) -> bool {
        false
    }

    /// Any controller may; which ones do is not known before they have.
    fn may_backtrack(&self) -> bool {
        true
    }

    fn take_report(&mut self) -> Option<StepReport> {
        let report = std::mem::take(&mut self.report);
        (!report.is_empty()).then_some(report)
    }
}

impl fmt::Debug for ControllerSteer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControllerSteer")
            .field("program", &self.request.program)
            .finish_non_exhaustive()
    }
}

/// Joins the reports of callbacks between two calls of `take_report`, which an engine makes once per step.
pub(crate) fn add_report(total: &mut StepReport, report: StepReport) {
    total.logs.push_str(&report.logs);
    // One callback prints at most this much; what several do in a step has the same limit, and keeps its end.
    if let Some(over) = total.logs.len().checked_sub(REPORT_LOG_BYTES_MAX) {
        let cut = total.logs.ceil_char_boundary(over);
        total.logs.drain(..cut);
    }
    total.storage.extend(report.storage);
    if let Some(over) = total.storage.len().checked_sub(REPORT_WRITES_MAX) {
        total.storage.drain(..over);
    }
    let mut bytes = 0_usize;
    let newest_first = total.storage.iter().rev();
    let kept = newest_first.take_while(|write| {
        bytes = bytes.saturating_add(write.held_bytes());
        bytes <= REPORT_BYTES_MAX
    });
    let kept = kept.count();
    total.storage.drain(..total.storage.len() - kept);
    total.micros = total.micros.saturating_add(report.micros);
}

/// Tokens that a module can ask for (AI-1009).
const BEST_TOKENS: usize = 64;
const REPORT_LOG_BYTES_MAX: usize = 64 << 10;
const REPORT_WRITES_MAX: usize = 4 * 1024;
/// Of variables that were written, between two reports: each waits until its reader has taken it.
const REPORT_BYTES_MAX: usize = 2 << 20;

/// The log is left out: those who watch a controller have it from the report, and the end, which names the cause, must
/// not be truncated.
pub(crate) fn failure_of(failure: &CallFailure) -> SteerFailure {
    SteerFailure {
        reason: failure.reason,
        message: clip::message(failure.without_log().to_owned()),
    }
}

const fn is_of_step(returned: &Returned) -> bool {
    !matches!(returned, Returned::Begun { .. })
}

/// The calls of an engine came in another order than [`Steer`] says.
pub(crate) fn unexpected() -> SteerFailure {
    SteerFailure {
        reason: ErrorReason::TRAP,
        message: "the controller was called out of order".to_owned(),
    }
}
