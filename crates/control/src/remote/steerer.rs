//! [`RemoteSteer`]: one sequence that a runtime in another process steers.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Begun, Branch, Mid, Post, Pre, Sample, Splice, Steer, SteerCall, SteerFailure,
    Steered, StepReport, StepWaker, Token,
};

use super::epoch::{Epoch, lost};
use super::reply::CallResult;
use super::request::WireAuth;
use super::side::{StartCall, StartingInstance, drop_abandoned};
use crate::host::{MidReturned, Program, Returned, Waiting};
use crate::module::{Abi, ModuleId};
use crate::runtime::LIST_MAX;
use crate::steer::p2::{self, Following};
use crate::steer::{add_report, failure_of, unexpected};

/// A sequence's part of a runtime in another process.
pub(super) struct RemoteSteer {
    epoch: Arc<Epoch>,
    place: SteerPlace,
    steps: RemoteSteps,
    watched: bool,
    report: StepReport,
    /// Our own runtime's: the module is in use as long as this is held.
    program: Option<Program>,
}

/// Where the sequence is in the runtime.
enum SteerPlace {
    /// Not there.
    New(Box<NewSequence>),
    Starting(Arc<StartingInstance>),
    /// In the table, under this id.
    There(u64),
    Failed,
}

/// What its instance will be started with.
struct NewSequence {
    user: String,
    is_admin: bool,
    module: String,
    arg: String,
}

enum RemoteSteps {
    P1 {
        /// The result of the next `mid`, which a `pre` that nobody had asked for decided.
        instead: Option<Steered<Mid>>,
        /// Tokens that the controller knows already.
        known: Option<Vec<Token>>,
    },
    P2 {
        /// What follows a sampled token, of each branch of the last result.
        following: Vec<Following>,
        /// To be appended in the next step.
        forced: Vec<Token>,
        /// What the last result, which had no effect, waits for. The runtime answers without running the callback until
        /// that is over.
        wait: Option<Waiting>,
        /// The answer that ended the wait.
        answered: Option<CallResult>,
    },
}

impl RemoteSteer {
    pub(super) fn new(
        epoch: Arc<Epoch>,
        module: ModuleId,
        program: Option<Program>,
        call: SteerCall<'_>,
    ) -> Self {
        let dialect = epoch.table().dialect();
        Self {
            epoch,
            place: SteerPlace::New(Box::new(NewSequence {
                user: call.user.name.to_owned(),
                is_admin: call.user.is_admin,
                module: module.to_string(),
                arg: call.arg.to_owned(),
            })),
            steps: match dialect {
                Abi::P1 => RemoteSteps::P1 {
                    instead: None,
                    known: None,
                },
                Abi::P2 => RemoteSteps::P2 {
                    following: Vec::new(),
                    forced: Vec::new(),
                    wait: None,
                    answered: None,
                },
            },
            watched: call.watched,
            report: StepReport::default(),
            program,
        }
    }

    fn id(&self) -> Steered<u64> {
        match self.place {
            SteerPlace::There(id) => Ok(id),
            _ => Err(SteerFailure {
                reason: ErrorReason::TRAP,
                message: "the controller has failed before".to_owned(),
            }),
        }
    }

    /// A failure ends the sequence in the runtime.
    fn settle<T>(&mut self, result: Steered<T>) -> Steered<T> {
        if result.is_err() {
            self.take_printed();
            self.leave();
        }
        result
    }

    fn take_printed(&mut self) {
        if let SteerPlace::There(id) = self.place {
            let report = self.epoch.table().take_report(id);
            add_report(&mut self.report, report);
        }
    }

    fn leave(&mut self) {
        let id = match std::mem::replace(&mut self.place, SteerPlace::Failed) {
            SteerPlace::New(_) | SteerPlace::Failed => return,
            SteerPlace::There(id) => id,
            SteerPlace::Starting(starting) => match starting.abandon() {
                Some(started) => started.id,
                None => {
                    let epoch = &self.epoch;
                    epoch
                        .side
                        .take_back(&starting, epoch.own, epoch.limits.upload);
                    return;
                }
            },
        };
        self.epoch.table().free(id, self.epoch.now());
        drop_abandoned(&self.epoch);
        self.epoch.notify();
    }

    fn try_pre(&mut self) -> Steered<Option<Pre>> {
        let id = self.id()?;
        let now = self.epoch.now();
        let mut table = self.epoch.table();
        if let Some(lost) = table.lost() {
            return Err(failure_of(lost));
        }
        match &mut self.steps {
            RemoteSteps::P2 {
                forced,
                wait,
                answered,
                ..
            } => {
                if let Some(waiting) = wait
                    && answered.is_none()
                {
                    match table.poll_mid(id) {
                        Some(result)
                            if !still_waits(&result) || waiting.is_over(Instant::now()) =>
                        {
                            *answered = Some(result);
                        }
                        // Asked again in the next step: at once would be as often as it can answer.
                        Some(_) => return Ok(Some(Pre::Wait)),
                        None => {
                            table.ask_mid(id, now);
                            return Ok(Some(Pre::Wait));
                        }
                    }
                }
                *wait = None;
                Ok(Some(Pre::Run {
                    fast_forward: std::mem::take(forced),
                }))
            }
            RemoteSteps::P1 { .. } => match table.poll_pre(id) {
                Some(result) => pre_of(result).map(Some),
                None => {
                    table.ask_pre(id, now);
                    Ok(None)
                }
            },
        }
    }

    fn try_mid(&mut self) -> Steered<Option<Mid>> {
        let id = self.id()?;
        if let RemoteSteps::P1 { instead, .. } = &mut self.steps
            && let Some(instead) = instead.take()
        {
            return instead.map(Some);
        }
        let answered = match &mut self.steps {
            RemoteSteps::P1 { .. } => None,
            RemoteSteps::P2 { answered, .. } => answered.take(),
        };
        let answered = answered.or_else(|| self.epoch.table().poll_mid(id));
        let Some(result) = answered else {
            return self.ask_again(id);
        };
        let returned = result.map_err(|failure| failure_of(&failure))?;
        match (&mut self.steps, returned) {
            (RemoteSteps::P1 { .. }, Returned::Mid(returned)) => Ok(Some(mid_of(returned))),
            (
                RemoteSteps::P2 {
                    following, wait, ..
                },
                Returned::Branches(branches),
            ) => {
                let mid = p2::decide(branches, following)?;
                // Of this sequence: branch 0.
                *wait = following.first().and_then(|it| it.wait().cloned());
                Ok(Some(mid))
            }
            _ => Err(unexpected()),
        }
    }

    /// There is no answer of `mid`, perhaps because the table has dropped it: a `pre` that nobody asked for may come after
    /// the question, and changes what it was about. Nothing happens while the answer is on its way.
    fn ask_again(&mut self, id: u64) -> Steered<Option<Mid>> {
        let mut table = self.epoch.table();
        if let RemoteSteps::P1 { known, .. } = &mut self.steps
            && let Some(unasked) = table.poll_pre(id)
        {
            return mid_instead(unasked, known).map(Some);
        }
        table.ask_mid(id, self.epoch.now());
        Ok(None)
    }
}

impl Steer for RemoteSteer {
    fn begin(&mut self, prompt: &[Token], waker: &Arc<dyn StepWaker>) {
        let SteerPlace::New(new) = &self.place else {
            return;
        };
        let call = StartCall {
            user: WireAuth {
                user: &new.user,
                is_admin: new.is_admin,
            },
            module: &new.module,
            arg: &new.arg,
            prompt,
        };
        let starting = self.epoch.side.start(call, self.epoch.limits.start, waker);
        self.place = SteerPlace::Starting(starting);
    }

    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        let SteerPlace::Starting(starting) = &self.place else {
            return Err(unexpected());
        };
        let Some(result) = starting.poll() else {
            return Ok(None);
        };
        match result {
            Ok(started) => {
                if self.watched {
                    add_report(&mut self.report, started.report);
                    self.epoch.table().watch(started.id);
                }
                self.place = SteerPlace::There(started.id);
                Ok(Some(Begun {
                    prompt: started.prompt,
                }))
            }
            Err(failure) => {
                self.place = SteerPlace::Failed;
                Err(failure_of(&failure))
            }
        }
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let result = self.try_pre();
        self.settle(result)
    }

    fn mid_begin(&mut self, _group: &[u32]) {
        // A sequence that has failed shows in `mid_poll`. The runtime knows the group by itself.
        let SteerPlace::There(id) = self.place else {
            return;
        };
        let mut table = self.epoch.table();
        if let RemoteSteps::P1 { instead, known } = &mut self.steps
            && let Some(unasked) = table.poll_pre(id)
        {
            *instead = Some(mid_instead(unasked, known));
            return;
        }
        if let RemoteSteps::P2 {
            answered: Some(_), ..
        } = &self.steps
        {
            return;
        }
        table.ask_mid(id, self.epoch.now());
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        let result = self.try_mid();
        self.settle(result)
    }

    fn flush(&mut self) {
        // Called for every sequence of a step: the first call does it.
        if self.epoch.table().flush() {
            self.epoch.notify();
        }
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let id = self.id()?;
        let mut table = self.epoch.table();
        let fits = match &mut self.steps {
            RemoteSteps::P1 { known, .. } => {
                let known = known.take();
                let is_known = appended.backtrack == 0 && known.as_deref() == Some(appended.tokens);
                is_known || table.happened(id, appended)
            }
            RemoteSteps::P2 {
                following,
                forced,
                wait,
                answered,
            } => {
                // Also where another steerer has changed the text of a sequence that waits.
                (*wait, *answered) = (None, None);
                let fits = table.happened(id, appended);
                // Of the parent, branch 0; a fork has its own at this place.
                let following = std::mem::take(following).into_iter().next();
                if let (Some(sampled), Some(following)) = (appended.sampled, following) {
                    *forced = following.after(sampled);
                    // At once, because a clone's first op may go out before the engine appends them.
                    let appended = Appended {
                        tokens: forced,
                        ..Appended::default()
                    };
                    fits && table.happened(id, appended)
                } else {
                    fits
                }
            }
        };
        drop(table);
        if fits {
            return Ok(Post::Continue);
        }
        let message = format!("more than {LIST_MAX} tokens in one step");
        self.settle(Err(SteerFailure {
            reason: ErrorReason::BAD_RESULT,
            message,
        }))
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        let id = self.id()?;
        let forked = self.epoch.table().fork(id, index);
        let forked = forked.ok_or_else(|| failure_of(&lost()))?;
        let steps = match &self.steps {
            RemoteSteps::P1 { .. } => RemoteSteps::P1 {
                instead: None,
                known: None,
            },
            RemoteSteps::P2 {
                following, forced, ..
            } => {
                let following = following.get(index as usize).cloned();
                RemoteSteps::P2 {
                    wait: following.as_ref().and_then(|it| it.wait().cloned()),
                    following: following.into_iter().collect(),
                    forced: forced.clone(),
                    answered: None,
                }
            }
        };
        Ok(Box::new(Self {
            epoch: Arc::clone(&self.epoch),
            place: SteerPlace::There(forked),
            steps,
            watched: self.watched,
            report: StepReport::default(),
            program: self.program.clone(),
        }))
    }

    /// A controller sees a sampled EOS token and decides itself (AI-804).
    fn ends_at_eos(&self) -> bool {
        false
    }

    fn may_backtrack(&self) -> bool {
        true
    }

    /// The runtime has limits of its own, and is ended if it exceeds them (AI-851).
    fn limits_itself(&self) -> bool {
        true
    }

    fn take_report(&mut self) -> Option<StepReport> {
        self.take_printed();
        let report = std::mem::take(&mut self.report);
        (!report.is_empty()).then_some(report)
    }
}

impl Drop for RemoteSteer {
    fn drop(&mut self) {
        self.leave();
    }
}

impl fmt::Debug for RemoteSteer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteSteer").finish_non_exhaustive()
    }
}

/// Whether nothing happens to the sequence but that it waits.
fn still_waits(result: &CallResult) -> bool {
    let branches = match result {
        Ok(Returned::Branches(branches)) => &branches[..],
        _ => return false,
    };
    matches!(branches, [only] if only.is_noop() && only.wait.is_some())
}

fn pre_of(result: CallResult) -> Steered<Pre> {
    match result.map_err(|failure| failure_of(&failure))? {
        Returned::Pre {
            suspend: true,
            wait: Some(_),
            ..
        } => Ok(Pre::Wait),
        Returned::Pre { suspend: true, .. } => Ok(Pre::Suspend),
        Returned::Pre { num_forks: 0, .. } => Ok(Pre::Stop),
        Returned::Pre {
            num_forks: 1,
            ff_tokens: fast_forward,
            ..
        } => Ok(Pre::Run { fast_forward }),
        Returned::Pre { num_forks, .. } => Ok(Pre::Fork(num_forks)),
        _ => Err(unexpected()),
    }
}

/// What a `pre` that nobody asked for says instead of a mask; `known` gets the tokens that the controller has appended.
fn mid_instead(result: CallResult, known: &mut Option<Vec<Token>>) -> Steered<Mid> {
    Ok(match pre_of(result)? {
        Pre::Stop => Mid::Stop,
        Pre::Suspend | Pre::Wait => Mid::One(Branch::Noop),
        Pre::Fork(sequences) => Mid::Fork((0..sequences).map(|_| Branch::Noop).collect()),
        Pre::Run { fast_forward } => {
            *known = Some(fast_forward.clone());
            Mid::One(Branch::Splice(Splice {
                backtrack: 0,
                tokens: fast_forward,
            }))
        }
    })
}

fn mid_of(returned: MidReturned) -> Mid {
    match returned {
        MidReturned::Stop => Mid::Stop,
        MidReturned::Sample(mask) => Mid::One(Branch::Sample(Sample {
            mask,
            ..Sample::default()
        })),
        MidReturned::Splice {
            backtrack: 0,
            ff_tokens,
        } if ff_tokens.is_empty() => Mid::One(Branch::Noop),
        MidReturned::Splice {
            backtrack,
            ff_tokens: tokens,
        } => Mid::One(Branch::Splice(Splice { backtrack, tokens })),
    }
}
