//! [`Combined`]: several steerers of one sequence, as one (AI-803).
//!
//! What one of them forces is checked with the others ([`Steer::would_accept`]) and reported to them as if the engine had
//! done it, so each of them steers as if it were alone. A part that has a result keeps it until all have one.
//!
//! ```text
//!   part:  Asked ── a result of pre ──► Answered ── all have one ──► Ready ── mid_begin ──► Computing ──► Decided
//!           ▲ ▲                            │                                                               │ │
//!           │ └── it suspends, or another part forces tokens                     all have decided, no noop │ │
//!           └──────────────────────────────────────────────────────────────────────────────────────────────┘ │
//!                                                   another part's noop: it keeps its decision (Decided) ◄────┘
//! ```
//!
//! A step of the engine either forks or appends forced tokens. Where one part asks for a fork in `pre` and another has
//! forced tokens, one of both waits in `Answered` for `mid`:
//!
//! - The fork comes first if its part was asked before any token was forced: the copies are of that moment. In `mid` the
//!   forced tokens are a splice of every branch.
//! - Else the tokens come first, and `mid` forks into branches that do nothing in this round.

use std::sync::Arc;

use super::{
    Appended, Begun, Branch, Mid, Post, Pre, Sample, SharedMask, Splice, Steer, SteerFailure,
    Steered, StepReport, StepWaker, Token,
};
use crate::error_reason::ErrorReason;
use crate::params::CHOICES_MAX;

/// Rounds of forced tokens within one step (AI-405).
const FORCED_ROUNDS_MAX: u32 = 10;

/// Several steerers of one sequence: masks are intersected, biases joined, and the sequence stops or suspends if one of
/// them demands it. A fork forks all of them.
pub struct Combined {
    parts: Vec<Part>,
    /// The first part that has not begun; later ones begin with its prompt.
    begun: usize,
    /// A prompt that a part demanded.
    prompt: Vec<Token>,
    prompt_replaced: bool,
    waker: Option<Arc<dyn StepWaker>>,
    /// Tokens that parts have forced in this step and that all have accepted.
    forced: Vec<Token>,
    forced_rounds: u32,
    /// A part stopped when it received forced tokens.
    stopping: bool,
    /// The parts of each branch of the fork that [`Steer::mid_poll`] has just returned.
    branches: Vec<Vec<PartPhase>>,
}

/// One of the steerers.
struct Part {
    steer: Box<dyn Steer>,
    phase: PartPhase,
}

#[derive(Clone, Debug, PartialEq)]
enum PartPhase {
    /// `pre` comes next, or has no result yet.
    Asked,
    /// `pre` has this result.
    Answered(Pre),
    /// `pre` returned run; `mid_begin` comes next.
    Ready,
    /// `mid` has no result yet.
    Computing,
    /// `mid` has this result.
    Decided(Mid),
}

impl PartPhase {
    /// Returns whether `pre` has a result after which `mid` comes next.
    fn runs(&self) -> bool {
        match self {
            Self::Answered(Pre::Run { fast_forward }) => fast_forward.is_empty(),
            Self::Answered(Pre::Fork(_)) => false,
            Self::Answered(_) => true,
            _ => false,
        }
    }

    /// The tokens that its part has forced in `pre`, and that are not appended yet.
    fn waiting_tokens(&self) -> Option<&[Token]> {
        match self {
            Self::Answered(Pre::Run { fast_forward }) if !fast_forward.is_empty() => {
                Some(fast_forward)
            }
            _ => None,
        }
    }

    /// The sequences of a fork that its part has asked for in `pre`, and that has not happened yet.
    fn waiting_fork(&self) -> Option<u32> {
        match self {
            Self::Answered(Pre::Fork(sequences)) => Some(*sequences),
            _ => None,
        }
    }
}

impl Combined {
    /// Combines steerers, which must not have begun. Where several decide, earlier ones win.
    #[must_use]
    #[expect(
        clippy::new_ret_no_self,
        reason = "one steerer alone needs no combination"
    )]
    pub fn new(mut steerers: Vec<Box<dyn Steer>>) -> Box<dyn Steer> {
        if steerers.len() == 1
            && let Some(only) = steerers.pop()
        {
            return only;
        }
        let part = |steer| Part {
            steer,
            phase: PartPhase::Asked,
        };
        Box::new(Self {
            parts: steerers.into_iter().map(part).collect(),
            begun: 0,
            prompt: Vec::new(),
            prompt_replaced: false,
            waker: None,
            forced: Vec::new(),
            forced_rounds: 0,
            stopping: false,
            branches: Vec::new(),
        })
    }

    fn begin_next(&mut self) {
        if let (Some(part), Some(waker)) = (self.parts.get_mut(self.begun), &self.waker) {
            part.steer.begin(&self.prompt, waker);
        }
    }

    /// Asks the parts that have no result of `pre`. Returns whether all have one now.
    fn ask(&mut self) -> Steered<bool> {
        let mut all = true;
        for part in &mut self.parts {
            if part.phase == PartPhase::Asked {
                match part.steer.pre()? {
                    Some(pre) => part.phase = PartPhase::Answered(pre),
                    None => all = false,
                }
            }
        }
        Ok(all)
    }

    /// The results of `pre`. Parts that keep a decision of an earlier round have none.
    fn answers(&self) -> impl Iterator<Item = &Pre> {
        self.parts.iter().filter_map(|part| match &part.phase {
            PartPhase::Answered(pre) => Some(pre),
            _ => None,
        })
    }

    /// Applies the longest of the forced tokens to all parts. Returns false if nobody forces any.
    fn force(&mut self) -> Steered<bool> {
        let forced = self.answers().filter_map(|pre| match pre {
            Pre::Run { fast_forward } => Some(fast_forward),
            _ => None,
        });
        let Some(forced) = forced.max_by_key(|tokens| tokens.len()).cloned() else {
            return Ok(false);
        };
        if forced.is_empty() {
            return Ok(false);
        }
        self.forced_rounds += 1;
        if self.forced_rounds > FORCED_ROUNDS_MAX {
            return Err(bad_result("too many rounds of forced tokens in one step"));
        }
        for part in &mut self.parts {
            let own = match std::mem::replace(&mut part.phase, PartPhase::Asked) {
                PartPhase::Answered(Pre::Run { fast_forward }) => fast_forward,
                _ => Vec::new(),
            };
            let Some(others) = forced.strip_prefix(&*own) else {
                return Err(refused());
            };
            if others.is_empty() {
                // It forced all of them itself, and goes on to `mid`.
                part.phase = PartPhase::Ready;
                continue;
            }
            // It has seen its own tokens. After the others it is asked again, as after any step.
            if !part.steer.would_accept(0, others)? {
                return Err(refused());
            }
            let appended = Appended {
                backtrack: 0,
                tokens: others,
                sampled: None,
            };
            self.stopping |= part.steer.post(appended)? == Post::Stop;
        }
        self.forced.extend(forced);
        Ok(true)
    }

    /// The result of `pre` when all parts have one and nobody forces tokens any more; `None`: tokens were forced, and some
    /// parts have to be asked again.
    fn combine_pre(&mut self) -> Steered<Option<Pre>> {
        if self.stopping || self.answers().any(|pre| *pre == Pre::Stop) {
            // Tokens that are forced already come before the end.
            self.stopping = true;
            return Ok(Some(self.run()));
        }
        // A part that does not know what it waits for is asked in every step, and with it the sequence.
        for suspended in [Pre::Suspend, Pre::Wait] {
            if self.answers().any(|pre| *pre == suspended) {
                self.ask_suspended_again();
                return Ok(Some(suspended));
            }
        }
        let forks = self.answers().filter_map(|pre| match pre {
            Pre::Fork(sequences) => Some(*sequences),
            _ => None,
        });
        let forks: Vec<u32> = forks.collect();
        match forks[..] {
            [] if self.force()? => Ok(None),
            [] => Ok(Some(self.run())),
            // The fork waits for `mid`.
            [_] if !self.forced.is_empty() => Ok(Some(self.run())),
            [sequences] => {
                // The tokens that others force wait for `mid`.
                for part in &mut self.parts {
                    if matches!(part.phase, PartPhase::Answered(Pre::Fork(_))) {
                        part.phase = PartPhase::Ready;
                    }
                }
                self.run();
                Ok(Some(Pre::Fork(sequences)))
            }
            _ => Err(bad_result("two controllers of one sequence fork at once")),
        }
    }

    fn ask_suspended_again(&mut self) {
        for part in &mut self.parts {
            if let PartPhase::Answered(Pre::Suspend | Pre::Wait) = part.phase {
                part.phase = PartPhase::Asked;
            }
        }
    }

    /// The parts take part in the step.
    fn run(&mut self) -> Pre {
        for part in &mut self.parts {
            if part.phase.runs() {
                part.phase = PartPhase::Ready;
            }
        }
        self.forced_rounds = 0;
        if self.stopping && self.forced.is_empty() {
            return Pre::Stop;
        }
        Pre::Run {
            fast_forward: std::mem::take(&mut self.forced),
        }
    }

    /// The result of `mid` when all parts have one.
    fn combine_mid(&mut self) -> Steered<Mid> {
        let decided = |part: &Part| match &part.phase {
            PartPhase::Decided(mid) => mid.clone(),
            phase => match phase.waiting_tokens() {
                Some(tokens) => Mid::One(Branch::Splice(Splice {
                    backtrack: 0,
                    tokens: tokens.to_vec(),
                })),
                // Cannot occur: only called when all have decided.
                None => Mid::One(Branch::Noop),
            },
        };
        let mids: Vec<Mid> = self.parts.iter().map(decided).collect();
        if mids.contains(&Mid::Stop) {
            return Ok(Mid::Stop);
        }
        let forks = mids.iter().filter_map(|mid| match mid {
            Mid::Fork(branches) => Some(branches.len()),
            _ => None,
        });
        let forks: Vec<usize> = forks.collect();
        let sequences = match forks[..] {
            [] => 1,
            [sequences] => sequences,
            _ => return Err(bad_result("two controllers of one sequence fork at once")),
        };
        let mut combined = Vec::new();
        let mut phases = Vec::new();
        for index in 0..sequences {
            let branches: Vec<&Branch> = mids
                .iter()
                .filter_map(|mid| match mid {
                    Mid::One(branch) => Some(branch),
                    Mid::Fork(branches) => branches.get(index),
                    Mid::Stop => None,
                })
                .collect();
            let branch = self.combine_branch(&branches)?;
            phases.push(self.phases_after(&branch, &branches));
            combined.push(branch);
        }
        let own = phases.first().cloned().unwrap_or_default();
        for (part, phase) in self.parts.iter_mut().zip(own) {
            part.phase = phase;
        }
        if forks.is_empty() {
            let only = combined.pop();
            return Ok(Mid::One(only.unwrap_or(Branch::Noop)));
        }
        // For `fork`, which the engine calls next.
        self.branches = phases;
        Ok(Mid::Fork(combined))
    }

    /// Makes the fork that had to wait until forced tokens were appended. Its part computes in the next round, when it
    /// knows its siblings; the others go on with what they have.
    fn fork_late(&mut self, sequences: u32) -> Mid {
        for part in &mut self.parts {
            if part.phase.waiting_fork().is_some() {
                part.phase = PartPhase::Ready;
            }
        }
        // One more than there may be is enough to be refused.
        let branches = sequences.clamp(1, CHOICES_MAX + 1);
        Mid::Fork(vec![Branch::Noop; branches as usize])
    }

    fn combine_branch(&mut self, branches: &[&Branch]) -> Steered<Branch> {
        // The step is skipped if one of them skips it, and the others keep their decisions.
        if branches.contains(&&Branch::Noop) {
            return Ok(Branch::Noop);
        }
        let mut splices = branches.iter().filter_map(|branch| match branch {
            Branch::Splice(splice) => Some(splice),
            _ => None,
        });
        if let Some(splice) = splices.next() {
            if splices.any(|other| other != splice) {
                return Err(bad_result("two controllers of one sequence splice at once"));
            }
            self.check_accepted(splice.backtrack, &splice.tokens)?;
            return Ok(Branch::Splice(splice.clone()));
        }
        let mut combined = Sample::default();
        for branch in branches {
            if let Branch::Sample(sample) = branch {
                join(&mut combined, sample)?;
            }
        }
        Ok(Branch::Sample(combined))
    }

    /// The phases of the parts after a combined decision of one branch: after a noop, those that did not ask for it keep
    /// what they have decided.
    fn phases_after(&self, combined: &Branch, branches: &[&Branch]) -> Vec<PartPhase> {
        let phase = |(part, branch): (&Part, &&Branch)| match branch {
            // Until they are appended.
            _ if part.phase.waiting_tokens().is_some() => part.phase.clone(),
            Branch::Noop => PartPhase::Asked,
            kept if *combined == Branch::Noop => PartPhase::Decided(Mid::One((*kept).clone())),
            _ => PartPhase::Asked,
        };
        self.parts.iter().zip(branches).map(phase).collect()
    }

    /// Checks that every part would allow these tokens. A part that decided on them in `mid` is asked as well, which
    /// allows them.
    fn check_accepted(&mut self, backtrack: u32, tokens: &[Token]) -> Steered<()> {
        for part in &mut self.parts {
            let accepted = match part.phase.waiting_tokens() {
                // Its state is already that after them.
                Some(own) => backtrack == 0 && own == tokens,
                None => part.steer.would_accept(backtrack, tokens)?,
            };
            if !accepted {
                return Err(refused());
            }
        }
        Ok(())
    }
}

impl Part {
    /// Reports what was appended, but not the tokens that it has forced itself.
    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let Some(own) = self.phase.waiting_tokens() else {
            return self.steer.post(appended);
        };
        // A step at the limit of a sequence appends fewer.
        if appended.backtrack > 0 || !own.starts_with(appended.tokens) {
            return Err(refused());
        }
        self.phase = PartPhase::Asked;
        Ok(Post::Continue)
    }
}

/// Adds a part's demands to those of the parts before it.
fn join(combined: &mut Sample, sample: &Sample) -> Steered<()> {
    if let Some(mask) = &sample.mask {
        combined.mask = Some(match combined.mask.take() {
            // Shared, not copied, if only one has a mask.
            None => SharedMask::clone(mask),
            Some(mut both) if both.vocabulary() == mask.vocabulary() => {
                Arc::make_mut(&mut both).intersect(mask);
                both
            }
            Some(_) => return Err(bad_result("two masks are over different vocabularies")),
        });
    }
    combined.bias.extend_from_slice(&sample.bias);
    combined.temperature = combined.temperature.or(sample.temperature);
    combined.splices.extend_from_slice(&sample.splices);
    Ok(())
}

fn bad_result(message: &str) -> SteerFailure {
    SteerFailure {
        reason: ErrorReason::BAD_RESULT,
        message: message.to_owned(),
    }
}

fn refused() -> SteerFailure {
    SteerFailure {
        reason: ErrorReason::CONSTRAINT_FAILED,
        message: "a constraint does not allow the tokens that a controller forces".to_owned(),
    }
}

impl Steer for Combined {
    fn best_tokens_wanted(&self) -> usize {
        let wanted = self
            .parts
            .iter()
            .map(|part| part.steer.best_tokens_wanted());
        wanted.max().unwrap_or(0)
    }

    fn show_best_tokens(&mut self, best: &[(Token, f32)]) {
        for part in &mut self.parts {
            let wanted = part.steer.best_tokens_wanted().min(best.len());
            if wanted > 0 {
                part.steer.show_best_tokens(&best[..wanted]);
            }
        }
    }

    fn seed(&mut self, seed: u64) {
        for part in &mut self.parts {
            part.steer.seed(seed);
        }
    }

    fn begin(&mut self, prompt: &[Token], waker: &Arc<dyn StepWaker>) {
        self.prompt = prompt.to_vec();
        self.waker = Some(Arc::clone(waker));
        // One after the other, because each may replace the prompt with which the next one begins.
        self.begin_next();
    }

    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        while let Some(part) = self.parts.get_mut(self.begun) {
            let Some(begun) = part.steer.begin_poll()? else {
                return Ok(None);
            };
            if let Some(prompt) = begun.prompt {
                self.prompt = prompt;
                self.prompt_replaced = true;
            }
            self.begun += 1;
            self.begin_next();
        }
        let prompt = std::mem::take(&mut self.prompt);
        Ok(Some(Begun {
            prompt: self.prompt_replaced.then_some(prompt),
        }))
    }

    fn bind(&mut self, number: u32) {
        for part in &mut self.parts {
            part.steer.bind(number);
        }
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        self.branches.clear();
        loop {
            if !self.ask()? {
                return Ok(None);
            }
            // A part that forces tokens again and again ends after `FORCED_ROUNDS_MAX` rounds.
            if let Some(pre) = self.combine_pre()? {
                return Ok(Some(pre));
            }
        }
    }

    fn mid_begin(&mut self, group: &[u32]) {
        for part in &mut self.parts {
            if part.phase == PartPhase::Ready {
                part.phase = PartPhase::Computing;
                part.steer.mid_begin(group);
            }
        }
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        if self.stopping {
            return Ok(Some(Mid::Stop));
        }
        let mut all = true;
        for part in &mut self.parts {
            if part.phase == PartPhase::Computing {
                match part.steer.mid_poll()? {
                    Some(mid) => part.phase = PartPhase::Decided(mid),
                    None => all = false,
                }
            }
        }
        if !all {
            return Ok(None);
        }
        let mut forks = self.parts.iter().map(|part| part.phase.waiting_fork());
        match forks.find_map(|fork| fork) {
            Some(sequences) => Ok(Some(self.fork_late(sequences))),
            None => self.combine_mid().map(Some),
        }
    }

    fn flush(&mut self) {
        for part in &mut self.parts {
            part.steer.flush();
        }
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        self.branches.clear();
        // A conditional splice is known only now. An unconditional one was checked before.
        let conditional = appended
            .sampled
            .is_some_and(|sampled| appended.tokens != [sampled] || appended.backtrack > 0);
        if conditional {
            self.check_accepted(appended.backtrack, appended.tokens)?;
        }
        let mut post = Post::Continue;
        for part in &mut self.parts {
            // All of them, also after one that stops: each has to see the whole output.
            if part.post(appended)? == Post::Stop {
                post = Post::Stop;
            }
        }
        Ok(post)
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        let phases = usize::try_from(index)
            .ok()
            .and_then(|index| self.branches.get(index));
        let phases = phases.cloned().unwrap_or_else(|| {
            let phases = self.parts.iter().map(|part| part.phase.clone());
            phases.collect()
        });
        let mut parts = Vec::new();
        for (part, phase) in self.parts.iter_mut().zip(phases) {
            let steer = part.steer.fork(index)?;
            parts.push(Part { steer, phase });
        }
        Ok(Box::new(Self {
            parts,
            begun: self.begun,
            prompt: Vec::new(),
            prompt_replaced: false,
            waker: self.waker.clone(),
            forced: self.forced.clone(),
            forced_rounds: self.forced_rounds,
            stopping: self.stopping,
            branches: Vec::new(),
        }))
    }

    fn would_accept(&mut self, backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        for part in &mut self.parts {
            if !part.steer.would_accept(backtrack, tokens)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn ends_at_eos(&self) -> bool {
        // A controller among them decides itself.
        self.parts.iter().all(|part| part.steer.ends_at_eos())
    }

    fn may_backtrack(&self) -> bool {
        self.parts.iter().any(|part| part.steer.may_backtrack())
    }

    fn limits_itself(&self) -> bool {
        // Which of them is late cannot be told from outside.
        self.parts.iter().any(|part| part.steer.limits_itself())
    }

    fn take_report(&mut self) -> Option<StepReport> {
        let reports = self.parts.iter_mut();
        let reports = reports.filter_map(|part| part.steer.take_report());
        reports.reduce(|mut all, report| {
            all.logs.push_str(&report.logs);
            all.storage.extend(report.storage);
            all.micros = all.micros.saturating_add(report.micros);
            all
        })
    }
}

#[cfg(test)]
mod tests;
