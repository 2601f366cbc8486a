//! [`RowSampling`]: turns the output rows of a step into tokens. Logits and the steerer's mask give one token each.

mod ahead;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Branch, ConditionalSplice, Mask, Mid, Sample as SteeredSample, Splice, Token,
};
use sapwood_proto::time::Time;

use super::kv_slots::KvSlots;
use super::requests::Requests;
use super::sequence::{CachedRow, RunningSequence};
use super::steer_rounds;
use super::steering::SteerRules;
use super::step_clock::StepClock;
use crate::api::{EngineError, FinishReason};
use crate::model::OutputRow;
use crate::ranking::RankedRow;
use crate::sampling::{Sample, SampleError, SampleParams, Sampler};
use crate::scheduler::SequenceKey;
use crate::stats::Counter;
use crate::submission::RequestTerms;
use ahead::RowsAhead;

/// The logits of an output row.
pub(super) enum Logits<'a> {
    Whole(&'a mut [f32]),
    Ranked(RankedRow),
}

impl Logits<'_> {
    fn retain(self) -> CachedRow {
        match self {
            Logits::Whole(row) => CachedRow::Logits(row.to_vec()),
            Logits::Ranked(ranking) => CachedRow::Ranked(ranking),
        }
    }
}

impl CachedRow {
    /// The logits, which sampling overwrites.
    fn logits(&mut self) -> Logits<'_> {
        match self {
            Self::Logits(row) => Logits::Whole(row),
            Self::Ranked(ranking) => Logits::Ranked(ranking.clone()),
        }
    }
}

/// The result of one output row.
pub(super) enum RowOutcome {
    Sampled(Sample, SoleToken),
    Splice(StepSplice),
    /// Each branch goes on from the same row.
    Fork(Vec<Branch>, CachedRow),
    Finish(FinishReason),
    NotBefore(Time),
    /// The model or the request is at fault.
    Error(EngineError),
    /// The steerer is at fault.
    SteerFailed(EngineError),
    /// The row was cached for later; nothing was appended.
    Waits,
}

/// A splice, and the sampled token that it replaces, if one was sampled.
pub(super) struct StepSplice {
    pub(super) splice: Splice,
    pub(super) sampled: Option<Token>,
}

impl StepSplice {
    /// A splice that applies to a sampled token.
    fn after(conditional: ConditionalSplice, sampled: Token) -> Self {
        let mut splice = conditional.splice;
        if conditional.keeps_sampled {
            splice.tokens.insert(0, sampled);
        }
        Self {
            splice,
            sampled: Some(sampled),
        }
    }
}

/// Whether the steerer's mask allowed no other token, apart from further EOG tokens if it is one (AI-804).
pub(super) type SoleToken = bool;

/// What a request and the vocabulary demand of its samples.
struct RowTerms<'a> {
    request: &'a RequestTerms,
    /// The EOG tokens.
    ends: &'a [Token],
}

/// What forbids tokens of a row beside a steerer's mask, computed for each token.
struct RowLimits {
    /// EOG and stop tokens below `min_tokens`.
    forbidden: Vec<Token>,
    /// The tokens that both bad words and the steerer's mask allow; `None` without bad words.
    good: Option<Mask>,
    /// The steerer's mask allows nothing but EOG tokens.
    is_over: bool,
}

impl RowLimits {
    /// Whether the request itself may be why no token is left.
    fn may_blame(&self, request: &RequestTerms) -> bool {
        self.good.is_some() || !self.forbidden.is_empty() || !request.sampling.logit_bias.is_empty()
    }

    #[inline]
    fn of(sequence: &RunningSequence, terms: &RowTerms<'_>, mask: Option<&Mask>) -> Self {
        let RowTerms { request, ends } = *terms;
        let mut forbidden = Vec::new();
        if sequence.appended < request.min_tokens {
            forbidden.extend(ends.iter().copied().chain(request.single_stops()));
            // The mask wins: an output that a constraint has completed cannot be made longer.
            if mask.is_some_and(|mask| allows_only(mask, &forbidden)) {
                forbidden.clear();
            }
        }
        // Bad words and the steerer's mask apply together: only tokens that both allow remain.
        let good = request.bad_words.as_ref().map(|bad| {
            // Computed for every token: which tokens would complete a word depends on the output so far.
            let mut good = bad.mask(sequence.emitted());
            mask.iter().for_each(|mask| good.intersect(mask));
            good
        });
        // Counted only where it matters: a mask has a bit for each token.
        let has_biases = !request.sampling.logit_bias.is_empty();
        let is_over = has_biases && mask.is_some_and(|mask| allows_only(mask, ends));
        Self {
            forbidden,
            good,
            is_over,
        }
    }

    /// Returns everything that decides the token of the sequence's next row, beside the row.
    #[inline]
    fn params<'a>(
        &'a self,
        sequence: &'a RunningSequence,
        terms: &RowTerms<'a>,
        steered: &'a SteeredSample,
    ) -> SampleParams<'a> {
        let request = terms.request;
        let steering = sequence.steering.as_ref();
        SampleParams {
            sampling: &request.sampling,
            seed: request.seed,
            choice: sequence.choice,
            // Rolled-back and dropped tokens count as well, so that a position that is sampled again gets a new draw.
            index: sequence.appended.wrapping_add(sequence.dropped),
            history: sequence.history.as_ref(),
            tokens: &sequence.tokens,
            mirostat: sequence.mirostat,
            forbidden: &self.forbidden,
            mask: self.good.as_ref().or(steered.mask.as_deref()),
            logit_bias: match self.is_over {
                // The mask wins here too: a bias that forbids EOG tokens would fail a complete output.
                true => &[],
                false => &request.sampling.logit_bias,
            },
            bias: &steered.bias,
            temperature: steering.and_then(|steering| steering.temperature),
            top_logprobs: request.top_logprobs,
        }
    }
}

/// Samples and scores output rows.
pub(super) struct RowSampling {
    pub(super) sampler: Sampler,
    ahead: RowsAhead,
    rules: SteerRules,
    /// Buffers that retain their allocations. `missing`: sequences that wait for the result of `mid` in this step.
    order: Vec<SequenceKey>,
    missing: Vec<SequenceKey>,
}

impl RowSampling {
    /// `threads`: those that sample rows of one step; `None`: as many as there are processors.
    pub(super) fn new(rules: SteerRules, threads: Option<u32>) -> Self {
        Self {
            sampler: Sampler::default(),
            ahead: RowsAhead::new(threads),
            rules,
            order: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// Takes a token from every row that was cached for a late steerer, and from every output row of this step (pairs
    /// of a sequence and the index of the row's entry in the batch), as far as drafts are right.
    pub(super) fn collect(
        &mut self,
        requests: &mut Requests,
        rows: &[(SequenceKey, usize)],
        clock: &mut StepClock,
        now: Time,
    ) {
        self.missing.clear();
        // Taken out of `self`, which sampling borrows as a whole.
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        let waits = |&key: &SequenceKey| requests.sequences[key].cached_row.is_some();
        order.extend(requests.scheduler.running().filter(waits));
        self.collect_cached(requests, &order, now);
        self.order = order;
        // Cached rows come first: they belong to earlier steps. A sequence with a cached row computes nothing, so it
        // has no row in this batch.
        //
        // What is sampled ahead is what the loop would find: nothing in it changes a sequence of another request before its
        // row, and an ended one is skipped.
        self.ahead.sample(requests, rows);
        for &(key, index) in rows {
            match requests.sequences.get(key) {
                // An earlier row of this step is not available yet, and the slot was truncated to it.
                Some(sequence) if sequence.asleep_until.is_some() => {}
                // A row fails its request, and a later one forks another sequence: the branch has the key of a sequence
                // that was in the batch, but no slot.
                Some(sequence) if sequence.slot.is_none() => {}
                // Rows of one sequence are in the order of its tokens, so those of the prompt come before those of the
                // output.
                Some(sequence) if sequence.next_in_prompt().is_some() => {
                    self.score_prompt(requests, key, index, now);
                }
                Some(sequence) if sequence.scored => self.score(requests, key, index, now),
                // The row after a draft token that was not accepted.
                Some(sequence) if sequence.pending() > 0 => {}
                Some(_) => {
                    let outcome = match self.ahead.take(index) {
                        Some(sampled) => settle_ahead(requests, key, sampled),
                        None => self.sample_row(requests, key, index, now),
                    };
                    self.apply(requests, key, outcome, now);
                    requests.verify(key);
                }
                // An earlier row of this loop ended its request.
                None => {}
            }
        }
        self.gather(requests, clock);
    }

    /// Waits for steerers whose results are missing, as long as the step may; reports those that are missing still.
    fn gather(&mut self, requests: &mut Requests, clock: &mut StepClock) {
        let mut missing = std::mem::take(&mut self.missing);
        while missing.iter().any(|&key| is_missed_in_time(requests, key))
            && let Some(now) = clock.wait()
        {
            self.collect_cached(requests, &missing, now);
            std::mem::swap(&mut missing, &mut self.missing);
            self.missing.clear();
        }
        for &key in &missing {
            requests
                .report
                .late
                .extend(requests.sequences.get(key).map(|late| late.number));
        }
        self.missing = missing;
    }

    /// Takes a token from the cached rows of these sequences.
    fn collect_cached(&mut self, requests: &mut Requests, keys: &[SequenceKey], now: Time) {
        for &key in keys {
            // The failure of a sibling in this loop may have ended it.
            let sequence = requests.sequences.get_mut(key);
            let Some(sequence) = sequence.filter(|sequence| !sequence.is_suspended()) else {
                continue;
            };
            if let Some(row) = sequence.cached_row.take() {
                let outcome = self.sample_cached(requests, key, row, now);
                self.apply(requests, key, outcome, now);
            }
        }
    }

    #[inline]
    fn sample_row(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        index: usize,
        now: Time,
    ) -> RowOutcome {
        let panics = &requests.stats.panics;
        let sequence = &mut requests.sequences[key];
        let terms = RowTerms {
            request: &requests.jobs[sequence.job].submission.terms,
            ends: &requests.tokens.ends,
        };
        match logits(&mut requests.slots, panics, index, now) {
            Ok(row) => {
                self.show_best(sequence, &row, panics);
                self.decide(sequence, &terms, row, panics, now)
            }
            Err(outcome) => outcome,
        }
    }

    /// Shows the row to a steerer that wants to see it, once: a row that waits for its result is not shown again.
    #[inline]
    fn show_best(&mut self, sequence: &mut RunningSequence, row: &Logits<'_>, panics: &Counter) {
        let Some(steering) = &mut sequence.steering else {
            return;
        };
        let wanted = steering.best_wanted();
        if wanted > 0 {
            let best = match row {
                Logits::Whole(row) => self.sampler.best(row, wanted),
                Logits::Ranked(ranking) => ranking.best(wanted),
            };
            steering.show_best(&best, panics);
        }
    }

    fn sample_cached(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        mut row: CachedRow,
        now: Time,
    ) -> RowOutcome {
        let panics = &requests.stats.panics;
        let sequence = &mut requests.sequences[key];
        let terms = RowTerms {
            request: &requests.jobs[sequence.job].submission.terms,
            ends: &requests.tokens.ends,
        };
        self.decide(sequence, &terms, row.logits(), panics, now)
    }

    /// Asks the steerer, if there is one, and samples unless it decides otherwise.
    #[inline]
    fn decide(
        &mut self,
        sequence: &mut RunningSequence,
        terms: &RowTerms<'_>,
        row: Logits<'_>,
        panics: &Counter,
        now: Time,
    ) -> RowOutcome {
        let Some(steering) = &mut sequence.steering else {
            return self.sample(sequence, terms, row, &SteeredSample::default());
        };
        match steering.poll_mid(now, self.rules, panics) {
            Ok(Some(Mid::One(branch))) => self.follow(sequence, terms, row, branch),
            // Copied, because each branch that samples overwrites the row.
            Ok(Some(Mid::Fork(branches))) => RowOutcome::Fork(branches, row.retain()),
            Ok(Some(Mid::Stop)) => RowOutcome::Finish(FinishReason::Controller),
            // The sequence then needs no second decode call (AI-812).
            Ok(None) => retain_row(sequence, row),
            Err(failure) => RowOutcome::SteerFailed(failure.into()),
        }
    }

    /// Does what a steerer decided for one sequence.
    fn follow(
        &mut self,
        sequence: &mut RunningSequence,
        terms: &RowTerms<'_>,
        row: Logits<'_>,
        branch: Branch,
    ) -> RowOutcome {
        let steered = match branch {
            Branch::Sample(sample) => sample,
            Branch::Splice(splice) => {
                let sampled = None;
                return RowOutcome::Splice(StepSplice { splice, sampled });
            }
            // The row is sampled in a later step, after another round: nothing happens to the sequence (AI-505).
            Branch::Noop => return retain_row(sequence, row),
        };
        if let Some(steering) = &mut sequence.steering {
            steering.temperature = steered.temperature.or(steering.temperature);
        }
        match self.sample(sequence, terms, row, &steered) {
            RowOutcome::Sampled(sample, sole) => {
                let token = sample.token;
                let applies = |when: &[Token]| when.is_empty() || when.contains(&token);
                let mut splices = steered.splices.into_iter();
                match splices.find(|conditional| applies(&conditional.when_sampled)) {
                    Some(conditional) => RowOutcome::Splice(StepSplice::after(conditional, token)),
                    None => RowOutcome::Sampled(sample, sole),
                }
            }
            outcome => outcome,
        }
    }

    /// Forks a sequence at its output row, and lets each branch go on from a copy of it (AI-505).
    fn fork(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        branches: Vec<Branch>,
        row: &CachedRow,
        now: Time,
    ) {
        let sequences = u32::try_from(branches.len()).unwrap_or(u32::MAX);
        let keys = steer_rounds::fork(requests, key, sequences);
        for (key, branch) in keys.into_iter().zip(branches) {
            // Its copy has failed, or an earlier branch has ended the request.
            let Some(key) = key.filter(|&key| requests.sequences.contains(key)) else {
                continue;
            };
            let sequence = &mut requests.sequences[key];
            let terms = RowTerms {
                request: &requests.jobs[sequence.job].submission.terms,
                ends: &requests.tokens.ends,
            };
            let outcome = self.follow(sequence, &terms, row.clone().logits(), branch);
            self.apply(requests, key, outcome, now);
        }
    }

    /// Applies the outcome of a row to its sequence.
    #[inline]
    pub(super) fn apply(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        outcome: RowOutcome,
        now: Time,
    ) {
        match outcome {
            RowOutcome::Sampled(sample, sole) => requests.append_sampled(key, sample, sole, now),
            RowOutcome::Splice(splice) => requests.splice(key, &splice, now),
            RowOutcome::Fork(branches, row) => self.fork(requests, key, branches, &row, now),
            RowOutcome::Finish(reason) => requests.finish(key, reason, None),
            RowOutcome::NotBefore(until) => {
                let sequence = &mut requests.sequences[key];
                sequence.asleep_until = Some(until);
                // The model computes the row anew when it is available, so its token counts as not computed.
                let computed = sequence.computed - 1;
                requests.truncate(key, computed);
            }
            RowOutcome::Error(error) => requests.fail_request_of(key, error),
            RowOutcome::SteerFailed(error) => requests.fail_choice(key, error),
            RowOutcome::Waits if requests.sequences[key].is_in_mid() => self.missing.push(key),
            RowOutcome::Waits => {}
        }
    }

    #[inline]
    fn sample(
        &mut self,
        sequence: &mut RunningSequence,
        terms: &RowTerms<'_>,
        row: Logits<'_>,
        steered: &SteeredSample,
    ) -> RowOutcome {
        let mask = steered.mask.as_deref();
        let limits = RowLimits::of(sequence, terms, mask);
        let params = limits.params(sequence, terms, steered);
        let sampled = match row {
            Logits::Whole(row) => self.sampler.sample(row, &params),
            Logits::Ranked(ranking) => self.sampler.sample_ranked(&ranking, &params),
        };
        // The steerer is at fault if it alone leaves no token, the request otherwise.
        let forbids = |bias: &(Token, f32)| bias.1 == f32::NEG_INFINITY;
        let by_steerer = |mask: &Mask| {
            mask.count() == 0
                || !limits.may_blame(terms.request)
                || steered.bias.iter().any(forbids)
        };
        if matches!(sampled, Err(SampleError::NothingAllowed)) && mask.is_some_and(by_steerer) {
            return RowOutcome::SteerFailed(EngineError::new(
                Code::ControllerFailed,
                ErrorReason::CONSTRAINT_FAILED,
                SampleError::NothingAllowed.to_string(),
            ));
        }
        settle(sequence, terms.ends, mask, sampled)
    }
}

/// Returns what the result of the sampler means for a sequence, whose row had this mask of a steerer.
#[inline]
fn settle(
    sequence: &mut RunningSequence,
    ends: &[Token],
    mask: Option<&Mask>,
    sampled: Result<Sample, SampleError>,
) -> RowOutcome {
    match sampled {
        Ok(sample) => {
            sequence.mirostat = sample.mirostat.unwrap_or(sequence.mirostat);
            // The steerer's mask alone decides: bad words that leave a single token do not end an output.
            let sole =
                ends.contains(&sample.token) && mask.is_some_and(|mask| allows_only(mask, ends));
            RowOutcome::Sampled(sample, sole)
        }
        Err(error) => RowOutcome::Error(sample_error(&error)),
    }
}

/// The same for a row without a steerer that was sampled before its turn.
fn settle_ahead(
    requests: &mut Requests,
    key: SequenceKey,
    sampled: Result<Sample, SampleError>,
) -> RowOutcome {
    let sequence = &mut requests.sequences[key];
    settle(sequence, &requests.tokens.ends, None, sampled)
}

/// Retains a row, because the model overwrites its rows with the next batch. A branch without a slot gets the row again
/// when it has one.
fn retain_row(sequence: &mut RunningSequence, row: Logits<'_>) -> RowOutcome {
    sequence.cached_row = sequence.slot.is_some().then(|| row.retain());
    RowOutcome::Waits
}

/// Returns whether a mask allows no token but these.
fn allows_only(mask: &Mask, tokens: &[Token]) -> bool {
    let mut allowed: Vec<Token> = tokens.to_vec();
    allowed.retain(|&token| mask.allows(token));
    allowed.sort_unstable();
    allowed.dedup();
    mask.count() == allowed.len()
}

/// Returns whether the result of `mid` is missing and not late: steerers that are late already are not waited for.
fn is_missed_in_time(requests: &Requests, key: SequenceKey) -> bool {
    let sequence = requests.sequences.get(key);
    let steering = sequence.and_then(|sequence| sequence.steering.as_ref());
    steering.is_some_and(|steering| steering.is_in_mid() && !steering.is_late())
}

/// Returns the logits of an entry of the last batch, or the outcome that replaces a token.
pub(super) fn logits<'a>(
    slots: &'a mut KvSlots,
    panics: &Counter,
    index: usize,
    now: Time,
) -> Result<Logits<'a>, RowOutcome> {
    match slots.model().row(index, now, panics) {
        OutputRow::Logits(row) => Ok(Logits::Whole(row)),
        OutputRow::Ranked(ranking) => Ok(Logits::Ranked(ranking)),
        OutputRow::NotBefore(until) => Err(RowOutcome::NotBefore(until)),
        OutputRow::End(reason) => Err(RowOutcome::Finish(reason)),
        OutputRow::Failed(error) => Err(RowOutcome::Error(error)),
    }
}

pub(super) fn sample_error(error: &SampleError) -> EngineError {
    match error {
        SampleError::NotANumber | SampleError::Panicked => {
            EngineError::internal(ErrorReason::ENGINE_ERROR, error.to_string())
        }
        SampleError::NothingAllowed => {
            let message = "logit_bias, bad_words and min_tokens together allow no token";
            EngineError::invalid(ErrorReason::CONSTRAINT_FAILED, message)
        }
    }
}
