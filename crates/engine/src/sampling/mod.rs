//! The sampler: draws one token from an output row of logits.
//!
//! The draw depends on seed, choice and position alone, so other sequences in the batch do not change it (D-21).
//!
//! ```text
//!   logits + bias ─► masks ─► [log-probabilities, D-22] ─► penalties ─► temperature ─► top-k ─► top-p ─► min-p ─► draw
//!                                                          └──────── or the steps of a chain, in its order ───────┘
//! ```
//!
//! Requests that use other samplers, or another order, have a [`SamplerChain`](crate::api::SamplerChain); all others
//! pay one branch for it.
//!
//! The draw visits the most likely token first. The order does not affect the distribution, and most draws select the
//! most likely token, so they are decided without looking at the rest.

mod chain;
mod counts;
mod dry;
mod history;
mod pool;
mod random;
mod token_set;
mod vector;

use std::cmp::Ordering;

use sapwood_proto::params::SamplerStep;
use sapwood_proto::steer::{Mask, Token};

use crate::api::Sampling;
use crate::ranking::RankedRow;

use dry::DryScratch;
pub(crate) use history::TokenHistory;
pub(crate) use pool::{RowTask, SamplerPool};
use token_set::TokenSet;
use vector::{Blocks, Candidate};

/// Everything that decides one token, beside the row.
#[derive(Debug)]
pub(crate) struct SampleParams<'a> {
    pub(crate) sampling: &'a Sampling,
    pub(crate) seed: u64,
    pub(crate) choice: u32,
    /// The index of the token in the output.
    pub(crate) index: u32,
    /// Tokens seen, if a penalty needs them.
    pub(crate) history: Option<&'a TokenHistory>,
    /// Prompt and output.
    pub(crate) tokens: &'a [Token],
    /// The state of mirostat: the surprise above which tokens are dropped.
    pub(crate) mirostat: f32,
    /// EOG and stop tokens that are masked below `min_tokens`.
    pub(crate) forbidden: &'a [Token],
    pub(crate) mask: Option<&'a Mask>,
    /// The request's bias.
    pub(crate) logit_bias: &'a [(Token, f32)],
    /// A steerer's bias, added to the request's.
    pub(crate) bias: &'a [(Token, f32)],
    /// A steerer's temperature, which replaces the request's.
    pub(crate) temperature: Option<f32>,
    pub(crate) top_logprobs: Option<u32>,
}

impl SampleParams<'_> {
    fn temperature(&self) -> f32 {
        self.temperature.unwrap_or(self.sampling.temperature)
    }
}

/// A sampled token with the requested log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) token: Token,
    /// NaN if not requested.
    pub(crate) logprob: f32,
    /// The rank among all tokens, the most likely being 1; `None` if not requested.
    pub(crate) rank: Option<u32>,
    pub(crate) top: Vec<(Token, f32)>,
    /// The state of mirostat after this draw; `None`: as before.
    pub(crate) mirostat: Option<f32>,
}

/// Why no token can be sampled from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SampleError {
    /// A logit is not a number, or positive infinity.
    #[error("the model gave a logit that is not a finite number")]
    NotANumber,
    /// Bias and masks leave no token.
    #[error("no token is allowed")]
    NothingAllowed,
    /// A defect of the sampler.
    #[error("the sampler failed")]
    Panicked,
}

/// Samples one row at a time; holds only scratch buffers.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    blocks: Blocks,
    candidates: Vec<Candidate>,
    /// A row built from a [`RankedRow`].
    row: Vec<f32>,
    /// The original logits of tokens that a penalty changed, each token once.
    penalised: Vec<(Token, f32)>,
    dry: DryScratch,
    /// Tokens that penalties apply to, while they are applied to candidates; else empty.
    marked: TokenSet,
}

/// Facts of a row before penalties change it.
struct RawRow {
    log_total: f32,
    top: Vec<(Token, f32)>,
}

/// Returns the rank of a token with this logit in a row: after every more likely one, and among equals the lowest id
/// first. The best tokens are known already; only for others is the row counted. `penalised` has the logits before
/// penalties.
fn rank(
    row: &[f32],
    penalised: &[(Token, f32)],
    (token, logit): (Token, f32),
    top: &[(Token, f32)],
) -> u32 {
    let found = top.iter().position(|(best, _)| *best == token);
    let before = |(other, is): (Token, f32)| is > logit || is == logit && other < token;
    let better = found.unwrap_or_else(|| {
        // The row has the logits after penalties. Counting over it and correcting for the few penalised tokens saves a
        // copy of the row.
        let now = (0..).zip(row.iter().copied()).filter(|one| before(*one));
        let then = penalised.iter().filter(|one| before(**one)).count();
        let changed = |(other, _): &&(Token, f32)| before((*other, row[*other as usize]));
        now.count() + then - penalised.iter().filter(changed).count()
    });
    u32::try_from(better).unwrap_or(u32::MAX).saturating_add(1)
}

impl Sampler {
    /// Samples a token from a row, which is overwritten.
    ///
    /// # Errors
    /// See [`SampleError`].
    pub(crate) fn sample(
        &mut self,
        row: &mut [f32],
        draw: &SampleParams<'_>,
    ) -> Result<Sample, SampleError> {
        constrain(row, draw);
        // After bias and masks: the reported log-probabilities include them (D-22, LM-411).
        let mut best = self.survey(row)?;
        let asked = draw
            .top_logprobs
            .map(|top| self.log_probabilities(row, best.0, top as usize));
        // Log-probabilities were taken before: penalties do not change what is reported.
        self.penalised.clear();
        self.dry.clear();
        if let Some(history) = draw.history {
            self.penalise(row, history, draw);
            // The penalties have changed the row, so the block maxima are stale.
            best = self.survey(row)?;
        }
        let (token, mirostat) = self.pick(row, best, draw);
        let Some(RawRow { log_total, top }) = asked else {
            return Ok(Sample {
                token,
                logprob: f32::NAN,
                rank: None,
                top: Vec::new(),
                mirostat,
            });
        };
        let changed = self
            .penalised
            .iter()
            .find(|(penalised, _)| *penalised == token);
        let logit = changed.map_or(row[token as usize], |&(_, before)| before);
        Ok(Sample {
            token,
            logprob: (logit - log_total).min(0.0),
            rank: Some(rank(row, &self.penalised, (token, logit), &top)),
            top,
            mirostat,
        })
    }

    /// Samples from a row in closed form; builds the whole row only if it must (D-11).
    pub(crate) fn sample_ranked(
        &mut self,
        ranking: &RankedRow,
        draw: &SampleParams<'_>,
    ) -> Result<Sample, SampleError> {
        let first = ranking.first();
        let sampling = draw.sampling;
        // Nothing may change the order or the weights of the row. A forbidden token that is not the first changes
        // neither the choice nor, without log-probabilities, anything else.
        let plain = sampling.chain.is_none()
            && sampling.logit_bias.is_empty()
            && draw.bias.is_empty()
            && draw.mask.is_none()
            && draw.history.is_none()
            && (draw.forbidden.is_empty()
                || draw.top_logprobs.is_none() && !draw.forbidden.contains(&first));
        let temperature = draw.temperature();
        // A draw below the certainty selects the first token whatever the others weigh, because a draw visits it first.
        let surely_first = temperature <= 0.0
            || sampling.top_k == 1
            || random::uniform(draw.seed, draw.choice, draw.index) < ranking.certainty(temperature);
        if plain && surely_first {
            let logprob = draw.top_logprobs.map_or(f32::NAN, |_| ranking.logprob(0));
            let top = draw
                .top_logprobs
                .map_or_else(Vec::new, |top| ranking.best(top as usize));
            return Ok(Sample {
                token: first,
                logprob,
                rank: draw.top_logprobs.map(|_| 1),
                top,
                mirostat: None,
            });
        }
        let mut row = std::mem::take(&mut self.row);
        ranking.fill(&mut row);
        let sample = self.sample(&mut row, draw);
        self.row = row;
        sample
    }

    /// Returns the best tokens with their log-probabilities; none of a row that cannot be sampled.
    pub(crate) fn best(&mut self, row: &[f32], count: usize) -> Vec<(Token, f32)> {
        let Ok(best) = self.survey(row) else {
            return Vec::new();
        };
        self.log_probabilities(row, best.0, count).top
    }

    /// Scores a given token: returns its log-probability, without bias, and the best `top`.
    ///
    /// # Errors
    /// See [`SampleError`].
    pub(crate) fn score_row(
        &mut self,
        row: &[f32],
        token: Token,
        top: usize,
    ) -> Result<Sample, SampleError> {
        let best = self.survey(row)?;
        let RawRow { log_total, top } = self.log_probabilities(row, best.0, top);
        let logit = row
            .get(token as usize)
            .copied()
            .unwrap_or(f32::NEG_INFINITY);
        Ok(Sample {
            token,
            logprob: (logit - log_total).min(0.0),
            rank: Some(rank(row, &[], (token, logit), &top)),
            top,
            mirostat: None,
        })
    }

    /// Scores a given token with a row in closed form.
    pub(crate) fn score_ranked(ranking: &RankedRow, token: Token, top: usize) -> Sample {
        let rank = ranking.rank(token);
        Sample {
            token,
            logprob: ranking.logprob(rank),
            rank: Some(u32::try_from(rank).unwrap_or(u32::MAX).saturating_add(1)),
            top: ranking.best(top),
            mirostat: None,
        }
    }

    /// Applies the penalties that come before every other step; at temperature 0 all of them.
    fn penalise(&mut self, row: &mut [f32], history: &TokenHistory, draw: &SampleParams<'_>) {
        let Some(chain) = &draw.sampling.chain else {
            history.penalise(row, draw.sampling, &mut self.penalised);
            history.penalise_repetition(row, draw.tokens, &mut self.dry, &mut self.penalised);
            return;
        };
        let steps = if draw.temperature() <= 0.0 {
            chain.order.steps()
        } else {
            chain.first_penalties()
        };
        for step in steps {
            match step {
                SamplerStep::Penalties => history.penalise(row, draw.sampling, &mut self.penalised),
                SamplerStep::Dry => {
                    history.penalise_repetition(
                        row,
                        draw.tokens,
                        &mut self.dry,
                        &mut self.penalised,
                    );
                }
                _ => {}
            }
        }
    }

    /// Returns the largest logit and its token, lowest id first; also computes the block maxima for later calls.
    fn survey(&mut self, row: &[f32]) -> Result<Candidate, SampleError> {
        if !self.blocks.survey(row) {
            return Err(SampleError::NotANumber);
        }
        let best = self.blocks.best(row).ok_or(SampleError::NothingAllowed)?;
        // An infinite logit has no finite log-probability, and its softmax is not a number.
        if best.0 == f32::INFINITY {
            Err(SampleError::NotANumber)
        } else {
            Ok(best)
        }
    }

    fn log_probabilities(&mut self, row: &[f32], max: f32, top: usize) -> RawRow {
        // Relative to the maximum, so that no exponential overflows.
        let log_total = max + vector::exp_total(row, max);
        self.blocks.top(row, top, &mut self.candidates);
        let mut top: Vec<_> = self
            .candidates
            .iter()
            .map(|&(logit, token)| (token, (logit - log_total).min(0.0)))
            .collect();
        // The list lives as long as its event is unread, and the collected vector may have spare capacity.
        top.shrink_to_fit();
        RawRow { log_total, top }
    }

    /// Draws a token of a row, to which the first penalties were applied; with it the next state of mirostat, if that moves.
    fn pick(
        &mut self,
        row: &[f32],
        best: Candidate,
        draw: &SampleParams<'_>,
    ) -> (Token, Option<f32>) {
        match &draw.sampling.chain {
            Some(chain) => self.pick_by_chain(row, best, chain, draw),
            None => (self.pick_by_default(row, best, draw), None),
        }
    }

    fn pick_by_default(&mut self, row: &[f32], best: Candidate, draw: &SampleParams<'_>) -> Token {
        let Sampling {
            top_k,
            top_p,
            min_p,
            ..
        } = *draw.sampling;
        let temperature = draw.temperature();
        // Greedy: no random number is drawn. Each draw depends on its position alone, so none has to be skipped for
        // later ones.
        if temperature <= 0.0 || top_k == 1 {
            return best.1;
        }
        let uniform = random::uniform(draw.seed, draw.choice, draw.index);
        let scale = TemperatureScale {
            max: best.0,
            scale: temperature.recip(),
        };
        let limited = (top_k > 0 && (top_k as usize) < row.len()) || top_p < 1.0 || min_p > 0.0;
        if !limited {
            return vector::draw_from_all(row, best.1, scale, uniform);
        }
        // `p >= min_p * p_max` as a bound on logits: no probability has to be computed.
        let floor = if min_p > 0.0 {
            scale.max + temperature * min_p.ln()
        } else {
            f32::NEG_INFINITY
        };
        // Top-k first, because then top-p is relative to the tokens that top-k left, as in llama.cpp and Transformers.
        // Top-p and min-p each keep a beginning of the sorted row, so the order of these two does not matter.
        if top_k > 0 && (top_k as usize) < row.len() {
            self.shortlist_by_count(row, scale, top_k as usize, top_p);
        } else {
            self.shortlist_by_floor(row, scale, floor, top_p);
        }
        let reaching = self
            .candidates
            .partition_point(|&(logit, _)| logit >= floor);
        // The best token always stays: rounding must not leave an empty list.
        self.candidates.truncate(reaching.max(1));
        vector::draw_from_sorted(&self.candidates, scale, uniform)
    }

    /// Returns the candidates that top-k and then top-p leave, best first.
    fn shortlist_by_count(
        &mut self,
        row: &[f32],
        temperature: TemperatureScale,
        top_k: usize,
        top_p: f32,
    ) {
        self.blocks.top(row, top_k, &mut self.candidates);
        if top_p < 1.0 {
            let total = temperature.total(&self.candidates);
            nucleus(&mut self.candidates, temperature, f64::from(top_p) * total);
        }
    }

    /// Returns the candidates that reach `floor`, as far as top-p leaves them, best first.
    fn shortlist_by_floor(
        &mut self,
        row: &[f32],
        temperature: TemperatureScale,
        floor: f32,
        top_p: f32,
    ) {
        if top_p >= 1.0 {
            self.blocks.reaching(row, floor, &mut self.candidates);
            vector::sort(&mut self.candidates);
            return;
        }
        // The nucleus of a confident row is small: first looks at the tokens near the best one, then further down.
        let wanted = f64::from(top_p) * vector::scaled_total(row, temperature);
        let mut reach = 2.0;
        loop {
            let near = temperature.max - reach / temperature.scale;
            self.blocks
                .reaching(row, near.max(floor), &mut self.candidates);
            // Below the reach of `exp` every weight is 0, so looking further finds nothing.
            let everything = near <= floor || reach > vector::EXP_REACH;
            if everything || temperature.total(&self.candidates) >= wanted {
                // Before sorting: in a flat row nearly every token is a candidate.
                narrow(&mut self.candidates, temperature, wanted);
                vector::sort(&mut self.candidates);
                nucleus(&mut self.candidates, temperature, wanted);
                return;
            }
            reach *= 1.5;
        }
    }
}

/// Converts logits into weights: `e^((logit - max) / temperature)`.
#[derive(Clone, Copy, Debug)]
struct TemperatureScale {
    max: f32,
    scale: f32,
}

impl TemperatureScale {
    fn weight(self, logit: f32) -> f64 {
        f64::from(vector::exp((logit - self.max) * self.scale))
    }

    fn total(self, candidates: &[Candidate]) -> f64 {
        let weights = candidates.iter().map(|&(logit, _)| self.weight(logit));
        weights.sum()
    }
}

/// Drops most candidates that are not among the best with `wanted` total weight, without sorting them.
fn narrow(candidates: &mut Vec<Candidate>, temperature: TemperatureScale, wanted: f64) {
    narrow_by(candidates, temperature, wanted, vector::better);
}

/// The same, where the best are the first ones by `order`.
fn narrow_by(
    candidates: &mut Vec<Candidate>,
    temperature: TemperatureScale,
    wanted: f64,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
) {
    let (mut start, mut end, mut left) = (0, candidates.len(), wanted);
    // A quickselect by weight: each round halves the part that contains the border of the nucleus.
    while end - start > SORTED {
        let middle = (end - start) / 2;
        candidates[start..end].select_nth_unstable_by(middle, &order);
        let weight = temperature.total(&candidates[start..start + middle]);
        if weight >= left {
            end = start + middle;
        } else {
            left -= weight;
            start += middle;
        }
    }
    candidates.truncate(end);
}

/// Up to this many candidates are sorted directly.
const SORTED: usize = 128;

/// Truncates the sorted candidates to the first ones with `wanted` total weight; retains all if they have less.
fn nucleus(sorted: &mut Vec<Candidate>, temperature: TemperatureScale, wanted: f64) {
    let mut total = 0.0;
    let reached = sorted.iter().position(|&(logit, _)| {
        total += temperature.weight(logit);
        total >= wanted
    });
    if let Some(last) = reached {
        sorted.truncate(last + 1);
    }
}

/// Applies bias and masks, which also affect the reported log-probabilities.
fn constrain(row: &mut [f32], draw: &SampleParams<'_>) {
    // Several biases for one token add up; ids outside the row are ignored (LM-305).
    for &(token, bias) in draw.logit_bias.iter().chain(draw.bias) {
        if let Some(logit) = row.get_mut(token as usize) {
            *logit += bias;
        }
    }
    // After the bias, which could otherwise lift a forbidden token again.
    for &token in draw.forbidden {
        if let Some(logit) = row.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    if let Some(mask) = draw.mask {
        vector::apply(row, mask);
    }
}

#[cfg(test)]
mod tests;
