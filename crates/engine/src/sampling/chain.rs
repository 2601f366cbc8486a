//! The steps of a [`SamplerChain`]: samplers that few requests use, and every sampler in an order of the request's own.
//!
//! Each step works on the list of candidates that the steps before it have left. The formulas are those of llama.cpp's
//! samplers of the same names.

use sapwood_proto::params::SamplerStep;
use sapwood_proto::steer::Token;

use super::vector::{self, Candidate};
use super::{SampleParams, Sampler, TemperatureScale, narrow, narrow_by, nucleus, random};
use crate::api::{MirostatSampling, SamplerChain};

impl Sampler {
    /// Draws as [`Sampler::pick`] does, by the steps of a chain.
    pub(super) fn pick_by_chain(
        &mut self,
        row: &[f32],
        best: Candidate,
        chain: &SamplerChain,
        draw: &SampleParams<'_>,
    ) -> (Token, Option<f32>) {
        // Greedy in any order of the steps, so that 0 means the same with every sampler.
        if draw.temperature() <= 0.0 {
            return (best.1, None);
        }
        self.blocks
            .reaching(row, f32::NEG_INFINITY, &mut self.candidates);
        let done = chain.first_penalties().len();
        for step in &chain.order.steps()[done..] {
            self.step(*step, chain, draw);
            // What a step has brought to minus infinity cannot be drawn. Penalties may do that to all that is left.
            self.candidates
                .retain(|(logit, _)| *logit > f32::NEG_INFINITY);
            if self.candidates.is_empty() {
                return (best.1, None);
            }
        }
        move_best_to_front(&mut self.candidates);
        let uniform = random::uniform(draw.seed, draw.choice, draw.index);
        match &chain.mirostat {
            Some(mirostat) => {
                let (token, threshold) =
                    draw_mirostat(&mut self.candidates, mirostat, draw.mirostat, uniform);
                (token, Some(threshold))
            }
            None => {
                let scale = scale(&self.candidates);
                let token = vector::draw_from_sorted(&self.candidates, scale, uniform);
                (token, None)
            }
        }
    }

    fn step(&mut self, step: SamplerStep, chain: &SamplerChain, draw: &SampleParams<'_>) {
        let candidates = &mut self.candidates;
        let sampling = draw.sampling;
        match step {
            SamplerStep::Penalties => {
                if let Some(history) = draw.history {
                    history.penalise_candidates(candidates, sampling, &mut self.marked);
                }
            }
            SamplerStep::Dry => {
                if let Some(history) = draw.history {
                    let scratch = &mut self.dry;
                    history.penalise_repetition_of_candidates(candidates, draw.tokens, scratch);
                }
            }
            SamplerStep::Temperature => apply_temperature(candidates, chain, draw.temperature()),
            SamplerStep::TopNSigma => {
                let is_typical = |token| !self.dry.is_penalised(token);
                keep_top_n_sigma(candidates, chain.top_n_sigma, is_typical);
            }
            SamplerStep::TopK => {
                let top_k = sampling.top_k as usize;
                if top_k < candidates.len() {
                    vector::part(candidates, top_k);
                    candidates.truncate(top_k);
                }
            }
            SamplerStep::TypicalP => keep_typical(candidates, chain.typical_p),
            SamplerStep::TopP => {
                let scale = scale(candidates);
                let wanted = f64::from(sampling.top_p) * scale.total(candidates);
                narrow(candidates, scale, wanted);
                vector::sort(candidates);
                nucleus(candidates, scale, wanted);
            }
            SamplerStep::MinP => {
                let floor = scale(candidates).max + sampling.min_p.ln();
                candidates.retain(|(logit, _)| *logit >= floor);
            }
            SamplerStep::Xtc => {
                // A number of its own: the one that draws the token must not depend on whether this step acts.
                let uniform = random::uniform(draw.seed ^ XTC_SEED, draw.choice, draw.index);
                if uniform < f64::from(chain.xtc_probability) {
                    exclude_top_choices(candidates, chain.xtc_threshold);
                }
            }
        }
    }
}

/// Separates the random numbers of XTC from those of the draw.
const XTC_SEED: u64 = 0x7874_635f_6472_6177;

/// The weights of logits that have their temperature already.
fn scale(candidates: &[Candidate]) -> TemperatureScale {
    let logits = candidates.iter().map(|(logit, _)| *logit);
    TemperatureScale {
        max: logits.fold(f32::NEG_INFINITY, f32::max),
        scale: 1.0,
    }
}

/// Most draws are decided by the best candidate, and where rounding leaves none, it is the one that is drawn.
fn move_best_to_front(candidates: &mut [Candidate]) {
    let best = (0..candidates.len()).min_by(|&left, &right| {
        let (left, right) = (&candidates[left], &candidates[right]);
        vector::better(left, right)
    });
    candidates.swap(0, best.unwrap_or(0));
}

/// Keeps only the best candidate.
fn keep_best(candidates: &mut Vec<Candidate>) {
    if candidates.len() > 1 {
        vector::part(candidates, 1);
        candidates.truncate(1);
    }
}

/// Divides the logits by the temperature. With a range the temperature is between `temperature - range` and
/// `temperature + range`, by the entropy of the candidates as a fraction of the largest possible one, to the power of
/// the exponent. Source: kalomaze's dynamic temperature, <https://github.com/ggml-org/llama.cpp/pull/4972>.
fn apply_temperature(candidates: &mut Vec<Candidate>, chain: &SamplerChain, temperature: f32) {
    let range = chain.dynatemp_range;
    let temperature = if range > 0.0 && candidates.len() > 1 {
        let least = (temperature - range).max(0.0);
        let most = temperature + range;
        #[expect(clippy::cast_precision_loss, reason = "a vocabulary is below 2^32")]
        let largest = (candidates.len() as f64).ln();
        let normalised = (entropy(candidates) / largest).clamp(0.0, 1.0);
        let follows = normalised.powf(f64::from(chain.dynatemp_exponent));
        #[expect(clippy::cast_possible_truncation, reason = "it is between two f32")]
        let dynamic = (f64::from(least) + f64::from(most - least) * follows) as f32;
        dynamic
    } else {
        temperature
    };
    // A temperature this low leaves nothing but the best; the quotients would be infinite.
    if !(scale(candidates).max / temperature).is_finite() {
        return keep_best(candidates);
    }
    for (logit, _) in candidates {
        *logit /= temperature;
    }
}

/// The entropy of the candidates, in nats.
fn entropy(candidates: &[Candidate]) -> f64 {
    let scale = scale(candidates);
    let total = scale.total(candidates);
    let terms = candidates.iter().map(|&(logit, _)| {
        let weight = scale.weight(logit);
        weight * f64::from(logit - scale.max)
    });
    // Σ -p ln p, where p is weight / total and ln weight the difference of the logits.
    (total.ln() - terms.sum::<f64>() / total).max(0.0)
}

/// Keeps candidates whose logits are at most `n` standard deviations below the best. Source: Tang et al., "Top-nσ: Not
/// All Logits Are You Need", arXiv:2411.07641.
///
/// Mean and deviation are those of the tokens that `counts` accepts, if there are any. What DRY has penalised does not
/// count: its penalties grow exponentially, and with a single one of them no token would be dropped.
fn keep_top_n_sigma(candidates: &mut Vec<Candidate>, n: f32, counts: impl Fn(Token) -> bool) {
    let any = candidates.iter().any(|(_, token)| counts(*token));
    let counted = candidates
        .iter()
        .filter(|(_, token)| !any || counts(*token));
    let logits = counted.map(|(logit, _)| f64::from(*logit));
    #[expect(clippy::cast_precision_loss, reason = "a vocabulary is below 2^32")]
    let count = logits.clone().count() as f64;
    let mean = logits.clone().sum::<f64>() / count;
    let variance = logits.map(|logit| (logit - mean).powi(2)).sum::<f64>() / count;
    let floor = f64::from(scale(candidates).max) - f64::from(n) * variance.sqrt();
    candidates.retain(|(logit, _)| f64::from(*logit) >= floor);
}

/// Keeps the candidates whose information is closest to the entropy, until they have more than the probability `p`.
/// Source: Meister et al., "Locally Typical Sampling", arXiv:2202.00666.
fn keep_typical(candidates: &mut Vec<Candidate>, p: f32) {
    let scale = scale(candidates);
    let total = scale.total(candidates);
    let entropy = entropy(candidates);
    let log_total = total.ln();
    let distance = |logit: f32| {
        let information = log_total - f64::from(logit - scale.max);
        (information - entropy).abs()
    };
    let closer = |left: &Candidate, right: &Candidate| {
        let tie = || vector::better(left, right);
        distance(left.0)
            .total_cmp(&distance(right.0))
            .then_with(tie)
    };
    let wanted = f64::from(p) * total;
    // Before sorting: at first every token of the vocabulary is a candidate. More than `wanted`, so the next number.
    narrow_by(candidates, scale, wanted.next_up(), closer);
    candidates.sort_unstable_by(closer);
    let mut sum = 0.0;
    let reached = candidates.iter().position(|(logit, _)| {
        sum += scale.weight(*logit);
        sum > wanted
    });
    candidates.truncate(reached.map_or(candidates.len(), |last| last + 1));
}

/// Drops all but the least likely of the candidates that reach `threshold`. Source: P. E. Weidmann, "Exclude Top Choices",
/// <https://github.com/oobabooga/text-generation-webui/pull/6335>.
fn exclude_top_choices(candidates: &mut Vec<Candidate>, threshold: f32) {
    let scale = scale(candidates);
    let wanted = f64::from(threshold) * scale.total(candidates);
    let reaches = |candidate: &Candidate| scale.weight(candidate.0) >= wanted;
    let top = candidates.iter().copied().filter(reaches);
    let Some(last) = top.max_by(vector::better) else {
        return;
    };
    candidates.retain(|candidate| *candidate == last || !reaches(candidate));
}

/// Draws among the candidates whose surprise is at most `threshold` bits. Returns the token, and the threshold of the next
/// draw, which moves against the error of this one. Source: Basu et al., "Mirostat: A Neural Text Decoding Algorithm that
/// Directly Controls Perplexity", arXiv:2007.14966; version 2 is that of its authors without the estimate of s.
fn draw_mirostat(
    candidates: &mut Vec<Candidate>,
    mirostat: &MirostatSampling,
    threshold: f32,
    uniform: f64,
) -> (Token, f32) {
    let scale = scale(candidates);
    let least = scale.total(candidates) * f64::from(-threshold).exp2();
    if least > 1.0 {
        // The best has the weight 1, and even that is too little.
        keep_best(candidates);
    } else {
        candidates.retain(|(logit, _)| scale.weight(*logit) >= least);
    }
    let token = vector::draw_from_sorted(candidates, scale, uniform);
    let drawn = candidates.iter().find(|(_, drawn)| *drawn == token);
    let weight = drawn.map_or(1.0, |(logit, _)| scale.weight(*logit));
    let surprise = -(weight / scale.total(candidates)).log2();
    #[expect(clippy::cast_possible_truncation, reason = "bits, a few dozen at most")]
    let error = surprise as f32 - mirostat.tau;
    (token, threshold - mirostat.eta * error)
}

#[cfg(test)]
mod tests;
