//! Calls steerers: `pre` before the batch, `mid` during the decode call, `post` after a token.
//!
//! Each call catches panics: a panic fails the request of its sequence.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::params::CHOICES_MAX;
use sapwood_proto::steer::{Mask, Mid, Post, Pre, Steer, SteerFailure, Steered, Token};
use sapwood_proto::time::Time;

use super::EngineOwner;
use super::sequence::{RunningSequence, SteerPhase, Steering};
use crate::api::{ChoiceEnd, EngineError, FinishReason, Tokens};
use crate::scheduler::SequenceKey;
use crate::stats::Counter;

/// The poll interval of a steerer while there is no other work (AI-813).
pub(super) const MIN_WAIT: Duration = Duration::from_millis(1);
/// A steerer fails when it has been late for this many times its deadline (`steer_ms`): ten steps, if a decode call
/// takes no longer than the deadline (AI-812). Measured as elapsed time, because steps may be far shorter or longer.
const LATE_TIMES_MAX: u32 = 10;
/// Steps in a row in which all sequences of a request may be suspended.
const SUSPENDED_STEPS_MAX: u32 = 3;

/// A validated result of `mid`, for the engine; `Waits` for every result that keeps the output row for later.
pub(super) enum Middle {
    Sample {
        mask: Option<Mask>,
        bias: Vec<(Token, f32)>,
        temperature: Option<f32>,
    },
    Splice {
        backtrack: u32,
        tokens: Vec<Token>,
    },
    Stop,
    Waits,
}

/// Limits against which the results of steerers are checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct SteerRules {
    /// `mid` is late if it takes longer than this.
    pub(super) deadline_budget: Duration,
    /// The size that masks must have.
    pub(super) vocabulary: usize,
}

/// Converts the failure of a steerer into the error of its request.
pub(super) fn to_engine_error(failure: SteerFailure) -> EngineError {
    EngineError::new(Code::ControllerFailed, failure.reason, failure.message)
}

fn bad_result(message: impl Into<String>) -> SteerFailure {
    SteerFailure {
        reason: "bad-result",
        message: message.into(),
    }
}

/// Calls a steerer; converts its panic into a failure and counts it.
fn fenced<T>(panics: &Counter, call: impl FnOnce() -> Steered<T>) -> Steered<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_panic| {
        panics.add(1);
        Err(SteerFailure {
            reason: "trap",
            message: "the controller panicked".to_owned(),
        })
    })
}

impl RunningSequence {
    /// Returns whether its `mid` has begun and has no result yet.
    pub(super) fn is_late(&self) -> bool {
        self.steering
            .as_ref()
            .is_some_and(|steering| matches!(steering.phase, SteerPhase::Begun(_)))
    }

    /// Polls the result of `mid`. Without a steerer, sampling is unrestricted.
    pub(super) fn poll_mid(
        &mut self,
        now: Time,
        rules: SteerRules,
        panics: &Counter,
    ) -> Steered<Middle> {
        let Some(steering) = &mut self.steering else {
            return Ok(Middle::Sample {
                mask: None,
                bias: Vec::new(),
                temperature: None,
            });
        };
        let SteerPhase::Begun(since) = steering.phase else {
            // The row was cached before a new round, and `pre` comes first in a round.
            return Ok(Middle::Waits);
        };
        let polled = fenced(panics, || steering.steer.mid_poll(now))?;
        let Some(mid) = polled else {
            if now.since(since) < rules.deadline_budget {
                return Ok(Middle::Waits);
            }
            // Counts from the first poll that found it late: a long decode call before that is not the steerer's fault.
            let late = now.since(*steering.late.get_or_insert(now));
            if late < rules.deadline_budget * LATE_TIMES_MAX {
                return Ok(Middle::Waits);
            }
            let allowed = (rules.deadline_budget * LATE_TIMES_MAX).as_millis();
            let message = format!("the controller was late for more than {allowed} ms");
            return Err(SteerFailure {
                reason: "timeout",
                message,
            });
        };
        steering.late = None;
        steering.phase = SteerPhase::Pre;
        match mid {
            Mid::Sample {
                mask,
                bias,
                temperature,
            } => {
                if mask
                    .as_ref()
                    .is_some_and(|mask| mask.vocabulary() != rules.vocabulary)
                {
                    return Err(bad_result("the mask is not over the model's vocabulary"));
                }
                if temperature.is_some_and(|temperature| !(0.0..=100.0).contains(&temperature)) {
                    return Err(bad_result("temperature must be from 0 to 100"));
                }
                if bias.iter().any(|(_, bias)| bias.is_nan() || *bias > 1e30) {
                    return Err(bad_result("a bias must be a finite number"));
                }
                Ok(Middle::Sample {
                    mask,
                    bias,
                    temperature,
                })
            }
            Mid::Splice { backtrack, tokens } => Ok(Middle::Splice { backtrack, tokens }),
            Mid::Noop => Ok(Middle::Waits),
            Mid::Stop => Ok(Middle::Stop),
        }
    }
}

impl EngineOwner {
    /// Calls `pre` of every running steerer whose round begins. Returns true if one of them forked or a sequence
    /// yielded its slot, so that sequences can be admitted again.
    pub(super) fn ask_pre(&mut self, now: Time) -> bool {
        let born = self.numbers;
        let mut order = std::mem::take(&mut self.scratch.order);
        order.clear();
        order.extend(
            self.scheduler
                .running()
                .filter(|&key| self.sequences[key].steering.is_some()),
        );
        for &key in &order {
            // A sibling may have failed in this loop and ended its request.
            if self.sequences.contains(key) && self.sequences[key].asleep_until.is_none() {
                self.ask_pre_of(key, now);
            }
        }
        self.scratch.order = order;
        self.find_deadlocks();
        let yielded = self.yield_slots();
        self.numbers > born || yielded
    }

    /// Suspended sequences yield their slots to waiting ones if no other slots are left: a parent may wait for the
    /// output of its own child (D-49). Returns true if one did.
    fn yield_slots(&mut self) -> bool {
        if self.report.suspended.is_empty() {
            return false;
        }
        let mut wanted = self.scheduler.missing_slots(|key| self.is_eligible(key));
        let mut order = std::mem::take(&mut self.scratch.order);
        order.clear();
        order.extend(
            self.scheduler
                .running()
                .filter(|&key| self.sequences[key].is_suspended()),
        );
        let before = wanted;
        // The youngest first: it may wait for an older one.
        for &key in order.iter().rev() {
            if wanted == 0 {
                break;
            }
            self.scheduler.yield_slot(key);
            wanted -= 1;
        }
        self.scratch.order = order;
        wanted < before
    }

    fn ask_pre_of(&mut self, key: SequenceKey, now: Time) {
        let sequence = &mut self.sequences[key];
        let Some(steering) = &mut sequence.steering else {
            return;
        };
        steering.suspended = false;
        let cached = sequence.cached_row.is_some();
        if steering.phase != SteerPhase::Pre {
            return;
        }
        let pre = fenced(&self.inbox.stats.panics, || steering.steer.pre());
        match pre {
            Ok(Pre::Run { fast_forward }) => {
                steering.phase = SteerPhase::Ready;
                if fast_forward.is_empty() {
                    if cached {
                        self.begin_mid_of(key, now);
                    }
                    return;
                }
                sequence.cached_row = None;
                match self.check_splice(key, 0, &fast_forward) {
                    Ok(()) => {
                        self.append_forced(key, 0, 0, &fast_forward, now);
                        self.finish_if_full(key);
                    }
                    Err(failure) => {
                        self.fail(self.sequences[key].job, to_engine_error(failure), true)
                    }
                }
            }
            Ok(Pre::Suspend) => {
                steering.suspended = true;
                let number = sequence.number;
                self.report.suspended.push(number);
            }
            Ok(Pre::Fork(branches)) => self.fork(key, branches, now),
            Ok(Pre::Stop) => self.finish(
                key,
                ChoiceEnd {
                    reason: FinishReason::Controller,
                    stop: None,
                },
            ),
            Err(failure) => self.fail(self.sequences[key].job, to_engine_error(failure), true),
        }
    }

    /// Forks a sequence: adds choices, each with a copy of its output so far.
    fn fork(&mut self, key: SequenceKey, branches: u32, now: Time) {
        let job = self.sequences[key].job;
        let more = branches.saturating_sub(1);
        if self.jobs[job].next_choice.saturating_add(more) > CHOICES_MAX {
            let message = format!("a request may have {CHOICES_MAX} choices, forks included");
            self.fail(
                job,
                to_engine_error(SteerFailure {
                    reason: "limit",
                    message,
                }),
                true,
            );
            return;
        }
        for index in 1..=more {
            if let Err(failure) = self.branch(key, index) {
                self.fail(job, to_engine_error(failure), true);
                return;
            }
        }
        if let Some(steering) = &mut self.sequences[key].steering {
            steering.phase = SteerPhase::Ready;
        }
        if self.sequences[key].cached_row.is_some() {
            self.begin_mid_of(key, now);
        }
    }

    fn branch(&mut self, key: SequenceKey, index: u32) -> Steered<()> {
        let parent = &mut self.sequences[key];
        let Some(steering) = &mut parent.steering else {
            return Ok(());
        };
        let steer: Box<dyn Steer> =
            fenced(&self.inbox.stats.panics, || steering.steer.fork(index))?;
        let mut child = Steering::new(steer);
        child.phase = SteerPhase::Ready;
        child.output.clone_from(&steering.output);
        let job = parent.job;
        // Before the prompt is computed, the branch waits for its parent to compute it, and then shares it.
        let after = (!parent.can_share_prompt()).then_some(key);
        let born = self.enqueue(job, Some(child), after);
        let (text, shown) = self.replay(key);
        let parent = &self.sequences[key];
        let (tokens, history, appended) = (
            parent.tokens.clone(),
            parent.history.clone(),
            parent.appended,
        );
        let sent = parent
            .steering
            .as_ref()
            .map_or_else(Vec::new, |steering| steering.output.clone());
        let branch = &mut self.sequences[born];
        (branch.tokens, branch.history, branch.appended, branch.text) =
            (tokens, history, appended, text);
        if !sent.is_empty() {
            // The branch's first event repeats the output before the fork, so that every choice is complete (AI-933).
            self.emit_tokens(
                born,
                Tokens {
                    tokens: sent.into(),
                    text: shown.into(),
                    ..Tokens::default()
                },
            );
        }
        Ok(())
    }

    /// Fails requests all of whose sequences have been suspended for too many steps.
    fn find_deadlocks(&mut self) {
        if self.report.suspended.is_empty() {
            return;
        }
        let mut stuck = Vec::new();
        for (index, job) in &mut self.jobs {
            let suspended = |&key: &SequenceKey| self.sequences[key].is_suspended();
            let all = !job.members.is_empty() && job.members.iter().all(suspended);
            // `pre` is only called for sequences with a slot, so the limit grows by one step for each sequence without
            // one.
            let runs = |&&key: &&SequenceKey| self.scheduler.is_running(key);
            let asked = job.members.iter().filter(runs).count();
            job.suspended_steps = match (all, asked) {
                (false, _) => 0,
                (true, 0) => job.suspended_steps,
                (true, _) => job.suspended_steps + 1,
            };
            let unasked = u32::try_from(job.members.len() - asked).unwrap_or(u32::MAX);
            if job.suspended_steps > SUSPENDED_STEPS_MAX.saturating_add(unasked) {
                stuck.push(index);
            }
        }
        for job in stuck {
            let message = format!(
                "every sequence was suspended in more than {SUSPENDED_STEPS_MAX} steps in a row"
            );
            self.fail(
                job,
                to_engine_error(SteerFailure {
                    reason: "deadlock",
                    message,
                }),
                true,
            );
        }
    }

    /// Starts `mid` for every sequence that gets an output row in this batch, before the decode call (AI-811).
    pub(super) fn begin_mid(&mut self, now: Time) {
        for index in 0..self.scratch.shares.len() {
            let share = self.scratch.shares[index];
            if self.sequences[share.key].pending() == share.tokens {
                self.begin_mid_of(share.key, now);
            }
        }
    }

    fn begin_mid_of(&mut self, key: SequenceKey, now: Time) {
        let Some(steering) = &mut self.sequences[key].steering else {
            return;
        };
        if steering.phase != SteerPhase::Ready {
            return;
        }
        steering.phase = SteerPhase::Begun(now);
        let begun = fenced(&self.inbox.stats.panics, || {
            steering.steer.mid_begin(now);
            Ok(())
        });
        if let Err(failure) = begun {
            // The failure is reported when the results of `mid` are collected; failing the request here would change
            // the batch that is being built.
            steering.steer = Box::new(PanickedSteerer(failure));
        }
    }

    /// Calls `post` with the appended tokens. `None`: the steerer failed, and with it its request.
    pub(super) fn report_post(
        &mut self,
        key: SequenceKey,
        backtrack: u32,
        tokens: &[Token],
        sampled: bool,
    ) -> Option<Post> {
        let sequence = &mut self.sequences[key];
        let job = sequence.job;
        let steering = sequence.steering.as_mut()?;
        let panics = &self.inbox.stats.panics;
        match fenced(panics, || steering.steer.post(backtrack, tokens, sampled)) {
            Ok(post) => Some(post),
            Err(failure) => {
                self.fail(job, to_engine_error(failure), true);
                None
            }
        }
    }

    /// Checks a splice: it stays within the output and the vocabulary (AI-826).
    pub(super) fn check_splice(
        &self,
        key: SequenceKey,
        backtrack: u32,
        tokens: &[Token],
    ) -> Steered<()> {
        let sequence = &self.sequences[key];
        let output = sequence.tokens.len() - sequence.prompt_tokens;
        if backtrack as usize > output {
            return Err(bad_result(format!(
                "backtrack {backtrack} past the beginning"
            )));
        }
        match tokens
            .iter()
            .find(|&&token| token >= self.info.vocabulary_tokens)
        {
            Some(token) => Err(bad_result(format!(
                "token {token} is outside the vocabulary"
            ))),
            None => Ok(()),
        }
    }
}

/// Replaces a steerer that panicked in `mid_begin`; every call returns the failure.
struct PanickedSteerer(SteerFailure);

impl Steer for PanickedSteerer {
    fn pre(&mut self) -> Steered<Pre> {
        Err(self.0.clone())
    }

    fn mid_begin(&mut self, _now: Time) {}

    fn mid_poll(&mut self, _now: Time) -> Steered<Option<Mid>> {
        Err(self.0.clone())
    }

    fn post(&mut self, _backtrack: u32, _tokens: &[Token], _sampled: bool) -> Steered<Post> {
        Err(self.0.clone())
    }

    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        Err(self.0.clone())
    }
}
