//! [`ConstraintSteer`]: keeps one sequence within a grammar.

use std::collections::VecDeque;
use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Branch, Mask, Mid, Post, Pre, Sample, Steer, SteerFailure, Steered, StepReport,
    StepWaker, Token, VariableWrite,
};

use super::automaton::{Automaton, AutomatonError, Next};
use super::compile::Compiled;
use super::mask_workers::{MaskWorkers, PendingMask, Wanted};
use super::watchdog::Watch;

/// When a sequence ends, besides the end of its grammar, and what is then stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ending {
    /// Bytes of the text before the matched one.
    pub(super) prefix_bytes: usize,
    /// Tokens after the prefix; the token in which the prefix ends counts if it goes on after it.
    pub(super) max_tokens: Option<usize>,
    /// Ends the sequence when the matched text contains it.
    pub(super) stop: Option<String>,
    /// The variable that gets the matched text.
    pub(super) store_var: Option<String>,
}

impl Ending {
    /// The end of the matched part of `text` if it contains the stop string, which cannot begin before `from`.
    fn stop_at(&self, text: &[u8], from: usize) -> Option<usize> {
        let stop = self.stop.as_ref()?.as_bytes();
        let from = from.max(self.prefix_bytes).min(text.len());
        let found = text[from..]
            .windows(stop.len())
            .position(|part| part == stop);
        found.map(|at| from + at)
    }

    /// Where a stop string may begin that was not in the first `bytes` bytes.
    fn stop_from(&self, bytes: usize) -> usize {
        let len = self.stop.as_ref().map_or(0, String::len);
        bytes.saturating_sub(len.saturating_sub(1))
    }
}

/// A token of the sequence after its prompt.
#[derive(Clone, Copy)]
struct Committed {
    /// Bytes of the text with it. Equal to those before it for an EOG token, which the automaton never gets.
    bytes: usize,
    is_end: bool,
}

/// Where the automaton is.
enum Held {
    Here(Box<Automaton>),
    /// A worker computes the mask with it.
    Away(PendingMask),
    /// It was lost, with the reason.
    Lost(AutomatonError),
}

/// A native constraint of one sequence.
///
/// `committed` is what [`Steer::post`] reported and what [`Steer::pre`] forced, and the automaton has consumed exactly its
/// tokens that are no EOG tokens. `plan` is what must follow after them, as far as it is known: it is computed once, so that the tokens are
/// the same whether they are appended at once or sampled one by one (AI-843).
pub(super) struct ConstraintSteer {
    compiled: Arc<Compiled>,
    ending: Ending,
    workers: Arc<MaskWorkers>,
    fast_forward: bool,
    held: Held,
    watch: Arc<Watch>,
    committed: Vec<Committed>,
    plan: VecDeque<Token>,
    /// The result of a mask that was collected before it was asked for.
    next: Option<Result<Next, AutomatonError>>,
    waker: Option<Arc<dyn StepWaker>>,
    /// What is to be stored, once the matched text is complete.
    stored: Option<Vec<u8>>,
    /// What `pre` forced ends the sequence, so `mid` stops it.
    is_over: bool,
    /// All that must follow the committed tokens was forced already.
    is_forced: bool,
}

impl ConstraintSteer {
    pub(super) fn new(
        compiled: Arc<Compiled>,
        automaton: Automaton,
        ending: Ending,
        workers: Arc<MaskWorkers>,
        fast_forward: bool,
    ) -> Self {
        let watch = workers.watch(&automaton);
        Self {
            compiled,
            ending,
            workers,
            fast_forward,
            held: Held::Here(Box::new(automaton)),
            watch,
            committed: Vec::new(),
            plan: VecDeque::new(),
            next: None,
            waker: None,
            stored: None,
            is_over: false,
            is_forced: false,
        }
    }

    /// Returns the automaton, and collects the result of a mask if a worker has it.
    ///
    /// The engine calls nothing but [`Steer::mid_poll`] while a mask is missing, so this waits only for callers that do
    /// not follow the order of the interface.
    fn automaton(&mut self) -> Result<&mut Automaton, AutomatonError> {
        if let Held::Away(pending) = &mut self.held {
            let done = pending.wait();
            self.collect(done.ok_or(AutomatonError::Cancelled));
        }
        match &mut self.held {
            Held::Here(automaton) => Ok(automaton),
            Held::Lost(error) => Err(error.clone()),
            Held::Away(_) => Err(AutomatonError::Cancelled),
        }
    }

    fn collect(&mut self, done: Result<(Automaton, Result<Next, AutomatonError>), AutomatonError>) {
        match done {
            Ok((automaton, next)) => {
                self.held = Held::Here(Box::new(automaton));
                self.next = Some(next);
            }
            Err(error) => self.held = Held::Lost(error),
        }
    }

    /// Goes on without the automaton. This is the engine's thread, so a large one is freed elsewhere.
    fn lose(&mut self, error: AutomatonError) {
        let automaton = match std::mem::replace(&mut self.held, Held::Lost(error)) {
            Held::Here(automaton) => Some(*automaton),
            // If the mask is not complete, the drop of its `PendingMask` cancels it, and the worker frees the automaton.
            Held::Away(mut pending) => pending.poll().map(|(automaton, _)| automaton),
            Held::Lost(_) => None,
        };
        let fed = self.committed.iter().filter(|token| !token.is_end).count();
        if let Some(automaton) = automaton
            && let Some(large) = self.compiled.recycle(automaton, fed)
        {
            self.workers.free(Box::new(large));
        }
    }

    fn bytes(&self) -> usize {
        self.committed.last().map_or(0, |last| last.bytes)
    }

    fn has_ended(&self) -> bool {
        self.committed.last().is_some_and(|last| last.is_end)
    }

    /// Tokens that count for `max_tokens`.
    fn counted(&self) -> usize {
        let in_prefix = |token: &Committed| token.bytes <= self.ending.prefix_bytes;
        // The lengths never go down, so those within the prefix come first.
        self.committed.len() - self.committed.partition_point(in_prefix)
    }

    /// Keeps of a plan what comes before the sequence ends: a sequence that samples its tokens one by one stops there.
    fn limit_plan(&mut self, plan: &[Token]) -> Result<(), AutomatonError> {
        let mut text = Vec::new();
        let (mut bytes, mut counted) = (self.bytes(), self.counted());
        let prefix_bytes = self.ending.prefix_bytes;
        let stops = self.ending.stop.is_some();
        if stops {
            text.extend_from_slice(self.automaton()?.text());
        }
        self.plan.clear();
        for &token in plan {
            self.plan.push_back(token);
            let spelled = self.automaton()?.spelled(token);
            let from = self.ending.stop_from(bytes);
            bytes += spelled.len();
            counted += usize::from(bytes > prefix_bytes);
            if stops {
                text.extend_from_slice(&spelled);
            }
            if self.ending.max_tokens.is_some_and(|max| counted >= max)
                || self.ending.stop_at(&text, from).is_some()
            {
                break;
            }
        }
        Ok(())
    }

    fn rollback(&mut self, tokens: u32) -> Result<(), SteerFailure> {
        if tokens == 0 {
            return Ok(());
        }
        let tokens = tokens as usize;
        let Some(kept) = self.committed.len().checked_sub(tokens) else {
            return Err(past_the_beginning(tokens));
        };
        let fed = self.committed[kept..]
            .iter()
            .filter(|token| !token.is_end)
            .count();
        self.automaton()?.rollback(fed)?;
        self.committed.truncate(kept);
        self.plan.clear();
        self.stored = None;
        self.is_over = false;
        Ok(())
    }

    /// Takes what must follow, for `pre`: the engine appends it, and does not report it back. `None`: a worker still
    /// computes it.
    fn forced(&mut self) -> Result<Option<Vec<Token>>, AutomatonError> {
        if !self.fast_forward || self.has_ended() || self.is_over || self.is_forced {
            return Ok(Some(Vec::new()));
        }
        if self.plan.is_empty() {
            let Some(mut plan) = self.poll_forced()? else {
                return Ok(None);
            };
            // A grammar can force megabytes. The rest follows in later steps.
            self.is_forced = plan.len() <= FORCED_MAX;
            plan.truncate(FORCED_MAX);
            self.limit_plan(&plan)?;
        }
        let forced: Vec<Token> = self.plan.iter().copied().collect();
        if forced.is_empty() {
            return Ok(Some(forced));
        }
        let bytes_before = self.bytes();
        for &token in &forced {
            self.append(token)?;
        }
        self.is_over = self.check_end(bytes_before)? == Post::Stop;
        Ok(Some(forced))
    }

    /// The tokens that must follow. They are computed on a worker: a hostile grammar can make that long, and the engine's
    /// thread serves all requests.
    fn poll_forced(&mut self) -> Result<Option<Vec<Token>>, AutomatonError> {
        if matches!(self.held, Held::Here(_)) {
            self.compute(Wanted::Forced);
        }
        if let Held::Away(pending) = &mut self.held {
            let Some(done) = pending.poll() else {
                return Ok(None);
            };
            self.collect(Ok(done));
        }
        match (self.next.take(), &self.held) {
            (Some(Ok(Next::Forced(plan))), _) => Ok(Some(plan)),
            (Some(Err(error)), _) => Err(error),
            (None, Held::Lost(error)) => Err(error.clone()),
            // Nothing else was asked for.
            _ => Err(AutomatonError::Cancelled),
        }
    }

    fn append(&mut self, token: Token) -> Result<(), AutomatonError> {
        if self.compiled.ends.contains(&token) {
            if !self.automaton()?.is_complete()? {
                return Err(AutomatonError::Rejected(token));
            }
            let bytes = self.bytes();
            self.committed.push(Committed {
                bytes,
                is_end: true,
            });
            return Ok(());
        }
        if self.has_ended() {
            return Err(AutomatonError::Rejected(token));
        }
        let automaton = self.automaton()?;
        automaton.consume(token)?;
        let bytes = automaton.text().len();
        self.committed.push(Committed {
            bytes,
            is_end: false,
        });
        if self.plan.front() == Some(&token) {
            self.plan.pop_front();
        } else {
            self.plan.clear();
        }
        Ok(())
    }

    /// Ends the sequence after its last token or at a stop string, and stores the matched text then.
    fn check_end(&mut self, bytes_before: usize) -> Result<Post, AutomatonError> {
        let from = self.ending.stop_from(bytes_before);
        let (has_ended, counted) = (self.has_ended(), self.counted());
        let ending = self.ending.clone();
        let text = self.automaton()?.text();
        let stop = ending.stop_at(text, from);
        let is_full = ending.max_tokens.is_some_and(|max| counted >= max);
        if stop.is_none() && !is_full && !has_ended {
            return Ok(Post::Continue);
        }
        let end = stop.unwrap_or(text.len());
        let matched = text
            .get(ending.prefix_bytes..end)
            .unwrap_or_default()
            .to_vec();
        self.store(matched);
        // An EOG token ends the sequence by itself, with a finish reason of its own.
        Ok(if has_ended {
            Post::Continue
        } else {
            Post::Stop
        })
    }

    fn store(&mut self, matched: Vec<u8>) {
        if self.ending.store_var.is_some() {
            self.stored = Some(matched);
        }
    }

    fn begin_mask(&mut self) {
        // Without fast-forward the forced token is sampled, as the only one.
        self.compute(if self.fast_forward {
            Wanted::Mask
        } else {
            Wanted::Either
        });
    }

    fn compute(&mut self, wanted: Wanted) {
        let lost = Held::Lost(AutomatonError::Cancelled);
        match std::mem::replace(&mut self.held, lost) {
            Held::Here(automaton) => {
                let pending = self.workers.compute(
                    *automaton,
                    Arc::clone(&self.compiled),
                    wanted,
                    self.waker.clone(),
                );
                self.held = Held::Away(pending);
            }
            other => self.held = other,
        }
    }

    fn mid(&mut self, next: Next) -> Result<Mid, AutomatonError> {
        match next {
            Next::Forced(plan) => {
                self.limit_plan(&plan)?;
                self.planned()
            }
            Next::Allowed(mask) => Ok(sample(mask)),
            Next::Complete => {
                let prefix = self.ending.prefix_bytes;
                let text = self.automaton()?.text();
                let matched = text.get(prefix..).unwrap_or_default().to_vec();
                self.store(matched);
                Ok(Mid::Stop)
            }
        }
    }

    /// Samples the next token of the plan, which is the only one allowed.
    fn planned(&mut self) -> Result<Mid, AutomatonError> {
        let &token = self.plan.front().ok_or(AutomatonError::Empty)?;
        let mut mask = Mask::none(self.automaton()?.vocabulary());
        mask.allow(token);
        Ok(sample(Arc::new(mask)))
    }

    /// Runs what calls the library on the engine's thread. If that takes too long, the sequence ends.
    fn watched<T, E>(&mut self, call: impl FnOnce(&mut Self) -> Result<T, E>) -> Steered<T>
    where
        SteerFailure: From<E>,
    {
        let watch = Arc::clone(&self.watch);
        let result = watch.during(|| call(self));
        if watch.is_late() {
            self.lose(AutomatonError::Slow);
            return Err(AutomatonError::Slow.into());
        }
        Ok(result?)
    }

    fn post_watched(&mut self, appended: Appended<'_>) -> Steered<Post> {
        check_count(appended.tokens)?;
        self.next = None;
        self.is_forced = false;
        self.rollback(appended.backtrack)?;
        let bytes_before = self.bytes();
        for &token in appended.tokens {
            self.append(token)?;
        }
        // Another steerer may have replaced what this one allowed, also the result of a mask collected just now.
        self.next = None;
        Ok(self.check_end(bytes_before)?)
    }

    /// Whether these tokens could follow after taking back some.
    fn accepts(&mut self, backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        check_count(tokens)?;
        let backtrack = backtrack as usize;
        let Some(kept) = self.committed.len().checked_sub(backtrack) else {
            return Err(past_the_beginning(backtrack));
        };
        let fed = self.committed[kept..]
            .iter()
            .filter(|token| !token.is_end)
            .count();
        let ended = self.committed[..kept]
            .last()
            .is_some_and(|last| last.is_end);
        let ends = &self.compiled.ends;
        let text = tokens.iter().position(|token| ends.contains(token));
        let (text, end) = tokens.split_at(text.unwrap_or(tokens.len()));
        // Nothing follows an EOG token, and one is enough.
        if end.len() > 1 || (ended && !tokens.is_empty()) {
            return Ok(false);
        }
        let end = !end.is_empty();
        if fed == 0 && !end {
            return Ok(text.is_empty() || self.automaton()?.accepts(text)?);
        }
        // Not `copy`, which may drop grammars and copies states of any size: this is the engine's thread.
        let mut probe = self.automaton()?.fork()?;
        // A copy is cancelled on its own.
        let watch = self.workers.watch(&probe);
        let accepted = watch.during(|| {
            probe.rollback(fed)?;
            if !text.is_empty() && !probe.accepts(text)? {
                return Ok(false);
            }
            for &token in text {
                probe.consume(token)?;
            }
            Ok(!end || probe.is_complete()?)
        });
        if watch.is_late() {
            return Err(AutomatonError::Slow.into());
        }
        accepted
    }
}

/// Tokens that are forced in one step.
pub(super) const FORCED_MAX: usize = 1024;

/// A controller can force any number of tokens, and the automaton follows them on the engine's thread.
fn check_count(tokens: &[Token]) -> Result<(), AutomatonError> {
    match tokens.len() {
        0..=FORCED_MAX => Ok(()),
        more => Err(AutomatonError::TooMany(more)),
    }
}

fn sample(mask: Arc<Mask>) -> Mid {
    Mid::One(Branch::Sample(Sample {
        mask: Some(mask),
        ..Sample::default()
    }))
}

pub(super) fn past_the_beginning(tokens: usize) -> SteerFailure {
    SteerFailure {
        reason: ErrorReason::CONSTRAINT_FAILED,
        message: format!("backtrack {tokens} past the beginning"),
    }
}

impl Steer for ConstraintSteer {
    fn begin(&mut self, _prompt: &[Token], waker: &Arc<dyn StepWaker>) {
        self.waker = Some(Arc::clone(waker));
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let forced = self.watched(Self::forced)?;
        Ok(forced.map(|fast_forward| Pre::Run { fast_forward }))
    }

    fn mid_begin(&mut self, _group: &[u32]) {
        // A plan is already the answer, and so is a result that was collected early.
        if self.plan.is_empty() && self.next.is_none() && !self.has_ended() && !self.is_over {
            self.begin_mask();
        }
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        if self.has_ended() || self.is_over {
            return Ok(Some(Mid::Stop));
        }
        if !self.plan.is_empty() {
            return Ok(Some(self.planned()?));
        }
        if let Held::Away(pending) = &mut self.held {
            let Some(done) = pending.poll() else {
                return Ok(None);
            };
            self.collect(Ok(done));
        }
        match (self.next.take(), &self.held) {
            (Some(next), _) => Ok(Some(self.mid(next?)?)),
            (None, Held::Lost(error)) => Err(error.clone().into()),
            // `mid_begin` was not called, and nothing would ever answer.
            (None, _) => {
                self.begin_mask();
                Ok(None)
            }
        }
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        self.watched(|steer| steer.post_watched(appended))
    }

    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        let automaton = self.automaton()?.fork()?;
        let watch = self.workers.watch(&automaton);
        Ok(Box::new(Self {
            compiled: Arc::clone(&self.compiled),
            ending: self.ending.clone(),
            workers: Arc::clone(&self.workers),
            fast_forward: self.fast_forward,
            held: Held::Here(Box::new(automaton)),
            watch,
            committed: self.committed.clone(),
            plan: self.plan.clone(),
            next: self.next.clone(),
            waker: self.waker.clone(),
            stored: self.stored.clone(),
            is_over: self.is_over,
            is_forced: self.is_forced,
        }))
    }

    fn would_accept(&mut self, backtrack: u32, tokens: &[Token]) -> Steered<bool> {
        self.watched(|steer| steer.accepts(backtrack, tokens))
    }

    fn take_report(&mut self) -> Option<StepReport> {
        let value = self.stored.take()?;
        let name = self.ending.store_var.clone()?;
        Some(StepReport {
            storage: vec![VariableWrite {
                name,
                value,
                append: false,
                when_version_is: None,
            }],
            ..StepReport::default()
        })
    }
}

impl Drop for ConstraintSteer {
    fn drop(&mut self) {
        self.lose(AutomatonError::Cancelled);
        // The cache has dropped its grammar meanwhile, and no other sequence has it.
        if Arc::strong_count(&self.compiled) == 1 && self.compiled.is_large() {
            self.workers.free(Box::new(Arc::clone(&self.compiled)));
        }
    }
}
