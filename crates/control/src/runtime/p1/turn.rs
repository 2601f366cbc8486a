//! [`P1Live`]: one sequence of a P1 engine, and where its callbacks are.
//!
//! ```text
//!   Idle ── post op ──► Post ──► Pre ──► Idle        Idle ── mid op ──► Mid ──► Idle
//!     └──── none ────────────────►│ ▲
//!                  fast-forward   ▼ │
//!                             FastForward
//! ```
//!
//! A late callback keeps its stage; the next request waits for it instead of starting another one.

use std::time::Instant;

use sapwood_proto::steer::{SharedMask, StepReport, Token};

use super::super::answer::{EMPTY_MASK, Label, SeqResult, SeqValue};
use super::super::pending::Member;
use super::super::sequence::{
    CallFailure, Callback, MidReturned, Outcome, Returned, Sequence, Waiting,
};
use super::super::table::{
    Failure, LateSteps, OpError, PhaseLimit, StepConfig, Turn, TurnProgress, controller_id, merge,
};
use crate::host::PreRounds;

/// One sequence.
#[derive(Debug)]
pub(super) struct P1Live<S> {
    sequence: S,
    member: Member,
    stage: Stage,
    /// Of the request that is being answered.
    progress: TurnProgress,
    late: LateSteps,
    /// What the callbacks of the phase printed and wrote so far.
    report: StepReport,
    /// The splice that the last `mid` returned: its backtrack in the controller's count, and its tokens.
    splice: Option<(u32, Vec<Token>)>,
    /// What the last `pre` waits for.
    wait: Option<Waiting>,
    /// What `pre` is answered until the next mid or post (AI-316).
    repeated: Option<SeqValue>,
    /// What `pre` and `post` gave so far.
    turn: PreTurn,
    /// What `mid` gave.
    mid: Option<MidTurn>,
}

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Post,
    Pre(PreRounds),
    FastForward(PreRounds),
    Mid,
}

/// The results of post and pre.
#[derive(Debug, Default)]
pub(super) struct PreTurn {
    pub(super) post: Option<SeqResult>,
    pub(super) pre: Option<SeqResult>,
    /// The sequence has ended with an error.
    pub(super) failure: Option<Failure>,
}

/// The result of mid.
#[derive(Debug)]
pub(super) struct MidTurn {
    pub(super) result: SeqResult,
    pub(super) row: MidRow,
    /// The sequence has ended with an error.
    pub(super) failure: Option<Failure>,
}

/// The row of a sequence.
#[derive(Debug)]
pub(super) enum MidRow {
    All,
    None,
    /// The end-of-sequence token alone.
    End,
    Only(Token),
    Mask(SharedMask),
}

impl<S: Sequence> P1Live<S> {
    pub(super) fn new(sequence: S, member: Member) -> Self {
        Self {
            sequence,
            member,
            stage: Stage::Idle,
            progress: TurnProgress::Idle,
            late: LateSteps::default(),
            report: StepReport::default(),
            splice: None,
            wait: None,
            repeated: None,
            turn: PreTurn::default(),
            mid: None,
        }
    }

    /// Starts the callbacks of a `post_pre_process`, with what the post op says was done.
    pub(super) fn begin(&mut self, id: u64, post: Option<(u32, Vec<Token>)>, now: Instant) {
        self.progress = self.asked();
        if self.owes_an_answer() && post.is_none() {
            // A late `pre` ended between two of these requests: this answer has its result.
            self.progress = TurnProgress::Ended;
            return;
        }
        if post.is_none()
            && let Some(value) = self.repeated.clone()
        {
            return self.end_pre(value);
        }
        self.repeated = None;
        if post.is_none()
            && let Some(wait) = self.wait.take_if(|wait| !wait.is_over(now))
        {
            // Its callback is not run: the answer is that of the last one (AI-1005).
            self.suspend(Some(wait));
            self.progress = TurnProgress::Idle;
            return;
        }
        self.wait = None;
        let in_mid = self.is_in_mid();
        match (&self.stage, post) {
            (_, Some(_)) if self.owes_an_answer() => {
                let (failure, answer) = still_running(id);
                self.turn.post = Some(answer);
                self.fail_turn(failure);
            }
            // Nothing was appended in the skipped step, so there is nothing to be reported.
            (_, post) if in_mid && post.as_ref().is_none_or(|(_, tokens)| tokens.is_empty()) => {
                let report = StepReport::default;
                self.turn.post =
                    post.map(|_| SeqResult::new(Some(SeqValue::Post { stop: false }), report()));
                self.turn.pre = Some(SeqResult::new(Some(pre_value(false, 1)), report()));
                self.progress = TurnProgress::Ended;
            }
            (_, Some(_)) if in_mid => {
                let (failure, answer) = still_running(id);
                self.turn.post = Some(answer);
                self.fail_turn(failure);
            }
            (Stage::Idle, None) => self.call_pre(PreRounds::default()),
            (Stage::Idle, Some((backtrack, tokens))) => {
                let backtrack = self.own_backtrack(backtrack, &tokens);
                self.stage = Stage::Post;
                let post = Callback::Post { backtrack, tokens };
                // `pre` follows also where `post` stops (AI-401), so nothing has to be decided between them.
                self.sequence.call_all([post, Callback::Pre]);
            }
            (_, None) => {}
            (_, Some(_)) => {
                let (failure, answer) = still_running(id);
                self.turn.post = Some(answer);
                self.fail_turn(failure);
            }
        }
    }

    /// What a request that asks for callbacks begins with.
    const fn asked(&self) -> TurnProgress {
        match self.stage {
            Stage::Idle => TurnProgress::Running,
            _ => TurnProgress::Late,
        }
    }

    /// Its mid was skipped, and no answer had its result yet: it is still running, or has ended between two requests.
    const fn is_in_mid(&self) -> bool {
        matches!(self.stage, Stage::Mid) || self.mid.is_some()
    }

    /// A late `pre` has ended, and no answer had its result yet.
    const fn owes_an_answer(&self) -> bool {
        self.turn.pre.is_some()
    }

    /// The controller's count of removed tokens: without the sampled one, which it never saw (AI-406).
    fn own_backtrack(&mut self, backtrack: u32, tokens: &[Token]) -> u32 {
        match self.splice.take() {
            // Engines differ in what they report after a splice, so the controller's own number decides.
            Some((own, spliced)) if spliced == tokens => own,
            _ => backtrack.saturating_sub(1),
        }
    }

    /// Answers `pre` with a suspension.
    fn suspend(&mut self, wait: Option<Waiting>) {
        self.wait.clone_from(&wait);
        self.end_pre(SeqValue::Pre {
            suspend: true,
            num_forks: 1,
            ff_tokens: Vec::new(),
            wait,
        });
    }

    fn call_pre(&mut self, rounds: PreRounds) {
        self.stage = Stage::Pre(rounds);
        self.sequence.call(Callback::Pre);
    }

    fn fail_turn(&mut self, failure: Failure) {
        if self.turn.pre.is_none() {
            self.turn.pre = Some(failure.answer(Label::Pre));
        }
        self.turn.failure = Some(failure);
        self.progress.end();
    }

    /// Whether the answer waits for a `pre` that does the work of `mid`.
    pub(super) fn is_awaited_for_mid(&self) -> bool {
        self.progress.is_awaited() && self.sequence.needs_mid_time()
    }

    /// Ends a `post_pre_process`: what is not there by now is late.
    pub(super) fn end(&mut self, config: &StepConfig, now: Instant) -> PreTurn {
        if std::mem::take(&mut self.progress).is_awaited() {
            let limit = PhaseLimit {
                deadline: config.pre_step_time,
                wait: if self.sequence.needs_mid_time() {
                    config.mid_wait()
                } else {
                    config.pre_wait()
                },
                answers_last: false,
            };
            if let Some(line) = self.late.add(config, limit, now) {
                let mut pre = SeqResult::new(Some(pre_value(true, 1)), StepReport::default());
                pre.log(&line);
                self.turn.pre = Some(pre);
            } else {
                let (failure, answer) = Failure::worker("timeout");
                if matches!(self.stage, Stage::Post) {
                    self.turn.post = Some(answer);
                }
                self.fail_turn(failure);
            }
        } else if !self.is_in_mid() {
            self.late.clear();
        }
        if config.repeats_pre
            && let Some(pre) = &self.turn.pre
        {
            self.repeated = pre.forward();
        }
        std::mem::take(&mut self.turn)
    }

    /// Starts the callback of a `mid_process`.
    pub(super) fn begin_mid(&mut self, id: u64, fork_group: Vec<u32>) {
        self.progress = self.asked();
        self.wait = None;
        self.repeated = None;
        match self.stage {
            // It was late, its step was skipped, and it has ended since: this answer has its result.
            Stage::Idle if self.mid.is_some() => self.progress = TurnProgress::Ended,
            Stage::Idle if !self.owes_an_answer() => {
                self.stage = Stage::Mid;
                self.sequence.call(Callback::Mid { fork_group });
            }
            // It was late and its step was skipped: the same callback goes on.
            Stage::Mid => {}
            Stage::Idle | Stage::Post | Stage::Pre(_) | Stage::FastForward(_) => {
                let (failure, result) = still_running(id);
                self.end_with(result, MidRow::All, Some(failure));
            }
        }
    }

    /// Ends a `mid_process`: what is not there by now is late.
    pub(super) fn end_mid(&mut self, config: &StepConfig, now: Instant) -> MidTurn {
        self.progress = TurnProgress::Idle;
        if let Some(mut turn) = self.mid.take() {
            self.late.clear();
            turn.replace_empty_mask();
            return turn;
        }
        let limit = PhaseLimit {
            deadline: config.step_time,
            wait: config.mid_wait(),
            answers_last: false,
        };
        if let Some(line) = self.late.add(config, limit, now)
            && config.late_mid_skips
        {
            // Takes back what the engine samples: nothing happens in this step.
            let skipped = SeqValue::Splice {
                ff_tokens: Vec::new(),
                backtrack: 1,
            };
            let mut result = SeqResult::new(Some(skipped), StepReport::default());
            result.log(&line);
            return MidTurn {
                result,
                row: MidRow::All,
                failure: None,
            };
        }
        let (failure, result) = Failure::worker("timeout");
        MidTurn {
            result,
            row: MidRow::All,
            failure: Some(failure),
        }
    }

    /// Makes a clone for `child`.
    pub(super) fn fork(
        &mut self,
        id: u64,
        child: u64,
        config: &StepConfig,
    ) -> Result<Self, OpError> {
        if !matches!(self.stage, Stage::Idle) || self.owes_an_answer() || self.mid.is_some() {
            return Err(OpError::of(still_running(id)));
        }
        let member = self.member.fork(config.forks, config.sequences);
        let member = member.map_err(Failure::op_error)?;
        let forked = self.sequence.fork();
        let mut sequence = forked.map_err(|failure| Failure::op_error(failure.message))?;
        sequence.bind(controller_id(child));
        let mut clone = Self::new(sequence, member);
        clone.splice.clone_from(&self.splice);
        Ok(clone)
    }

    fn take(&mut self, outcome: Outcome) {
        merge(&mut self.report, outcome.report);
        match (std::mem::take(&mut self.stage), outcome.result) {
            (stage, Err(failure)) => self.fail(&stage, &failure),
            (Stage::Post, Ok(Returned::Post { stop })) => {
                let report = std::mem::take(&mut self.report);
                self.turn.post = Some(SeqResult::new(Some(SeqValue::Post { stop }), report));
                self.stage = Stage::Pre(PreRounds::default());
            }
            (
                Stage::Pre(rounds),
                Ok(Returned::Pre {
                    num_forks,
                    suspend,
                    ff_tokens,
                    wait,
                }),
            ) => self.take_pre(rounds, (num_forks, suspend, wait), ff_tokens),
            (Stage::FastForward(rounds), Ok(Returned::Post { stop: false })) => {
                self.call_pre(rounds);
            }
            (Stage::FastForward(_), Ok(Returned::Post { stop: true })) => {
                self.end_pre(pre_value(false, 0));
            }
            (Stage::Mid, Ok(Returned::Mid(returned))) => self.take_mid(returned),
            (stage, Ok(_)) => self.fail(&stage, &CallFailure::unexpected()),
        }
    }

    fn take_pre(
        &mut self,
        mut rounds: PreRounds,
        (num_forks, suspend, wait): (u32, bool, Option<Waiting>),
        ff_tokens: Vec<Token>,
    ) {
        if !ff_tokens.is_empty() && num_forks == 1 && !suspend {
            return match rounds.add(ff_tokens) {
                Ok(post) => {
                    self.stage = Stage::FastForward(rounds);
                    self.sequence.call(post);
                }
                Err(failure) => self.fail_pre(&failure.message),
            };
        }
        let forwards = !ff_tokens.is_empty();
        // The answer has the tokens of all rounds. Engines append them and then fork, but append nothing to a sequence that
        // is suspended.
        let forwarded = forwards || !rounds.is_empty();
        match (num_forks, suspend, forwards) {
            // As when its post stops: an engine does not append to a sequence that ends.
            (0, false, _) => self.end_pre(pre_value(false, 0)),
            (1, true, _) if forwarded => self.fail_pre("can't suspend when returning ff_tokens"),
            (_, false, true) if num_forks != 1 => {
                self.fail_pre("can't fork when returning ff_tokens");
            }
            (_, true, _) if num_forks != 1 => self.fail_pre("can't fork when suspending"),
            (_, true, _) => self.suspend(wait),
            (_, false, _) => self.end_pre(SeqValue::Pre {
                suspend,
                num_forks,
                ff_tokens: rounds.finish(),
                wait: None,
            }),
        }
    }

    fn end_pre(&mut self, value: SeqValue) {
        let report = std::mem::take(&mut self.report);
        self.turn.pre = Some(SeqResult::new(Some(value), report));
        self.progress.end();
    }

    fn fail_pre(&mut self, message: &str) {
        let report = std::mem::take(&mut self.report);
        self.turn.pre = Some(SeqResult::callback_error(Label::Pre, message, report));
        self.fail_turn(Failure::Callback);
    }

    fn take_mid(&mut self, returned: MidReturned) {
        // An earlier one that no post answered is over.
        self.splice = None;
        let report = std::mem::take(&mut self.report);
        let (value, row) = match returned {
            MidReturned::Stop => (None, MidRow::End),
            MidReturned::Sample(Some(mask)) => (None, MidRow::Mask(mask)),
            // As much as no mask, after the softmax.
            MidReturned::Sample(None) => (None, MidRow::None),
            MidReturned::Splice {
                backtrack,
                ff_tokens,
            } => {
                self.splice = Some((backtrack, ff_tokens.clone()));
                let (row, counted) = match (backtrack, ff_tokens.first()) {
                    (0, Some(first)) => (MidRow::Only(*first), 0),
                    // The engine counts the token that it is about to sample.
                    (own, _) => (MidRow::All, own.saturating_add(1)),
                };
                let value = SeqValue::Splice {
                    ff_tokens,
                    backtrack: counted,
                };
                (Some(value), row)
            }
        };
        self.end_with(SeqResult::new(value, report), row, None);
    }

    fn end_with(&mut self, result: SeqResult, row: MidRow, failure: Option<Failure>) {
        self.mid = Some(MidTurn {
            result,
            row,
            failure,
        });
        self.progress.end();
    }

    fn fail(&mut self, stage: &Stage, failure: &CallFailure) {
        let report = std::mem::take(&mut self.report);
        match stage {
            Stage::Mid => {
                let (failure, result) = Failure::of_call(failure, Label::Mid, report);
                self.end_with(result, MidRow::All, Some(failure));
            }
            Stage::Post => {
                let (failure, result) = Failure::of_call(failure, Label::Post, report);
                self.turn.post = Some(result);
                self.fail_turn(failure);
            }
            Stage::Idle | Stage::Pre(_) | Stage::FastForward(_) => {
                let (failure, result) = Failure::of_call(failure, Label::Pre, report);
                self.turn.pre = Some(result);
                self.fail_turn(failure);
            }
        }
    }
}

impl<S: Sequence> Turn for P1Live<S> {
    fn advance(&mut self) -> TurnProgress {
        // Also of a sequence that nobody waits for: a late callback that is done by now has its results in the next answer.
        while !matches!(self.stage, Stage::Idle)
            && self.turn.failure.is_none()
            && let Some(outcome) = self.sequence.poll()
        {
            self.take(outcome);
        }
        self.progress
    }
}

impl MidTurn {
    /// With an empty mask the engine would divide by zero, or sample as if there were none (AI-237).
    fn replace_empty_mask(&mut self) {
        if let MidRow::Mask(mask) = &self.row
            && mask.count() == 0
        {
            self.row = MidRow::End;
            self.result.log(EMPTY_MASK);
        }
    }
}

const fn pre_value(suspend: bool, num_forks: u32) -> SeqValue {
    SeqValue::Pre {
        suspend,
        num_forks,
        ff_tokens: Vec::new(),
        wait: None,
    }
}

fn still_running(id: u64) -> (Failure, SeqResult) {
    Failure::worker(format!("sequence {id} is still running"))
}
