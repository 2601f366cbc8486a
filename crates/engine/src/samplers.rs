//! Parameters of the samplers that few requests use: DRY, and the [`SamplerChain`].

use std::sync::Arc;

use sapwood_proto::params::{GenerationParams, SamplerOrder, SamplerStep};

/// The parameters of DRY; see [`Sampling::dry`](crate::api::Sampling::dry).
#[derive(Clone, Debug, PartialEq)]
pub struct DrySampling {
    /// The penalty of a token that would continue a repetition of `allowed_length` tokens; above 0.
    pub multiplier: f32,
    /// The factor for each further token of the repetition; at least 1.
    pub base: f32,
    /// The fewest tokens that are a repetition; at least 1.
    pub allowed_length: u32,
    /// The number of tokens that are compared, the last ones; -1: all.
    pub penalty_last_n: i32,
    /// Texts that no repetition crosses.
    pub sequence_breakers: Vec<String>,
}

/// The steps of sampling of a request that has samplers beside top-k, top-p, min-p and the penalties, or another order.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerChain {
    /// The steps that do something.
    pub order: SamplerOrder,
    /// Keep the most typical tokens with this probability.
    pub typical_p: f32,
    /// Keep tokens at most this many standard deviations below the best.
    pub top_n_sigma: f32,
    /// The probability with which XTC acts.
    pub xtc_probability: f32,
    /// The probability from which on a token is one of XTC's top choices.
    pub xtc_threshold: f32,
    /// How far the temperature follows the entropy; 0 is off.
    pub dynatemp_range: f32,
    /// The exponent of the normalised entropy.
    pub dynatemp_exponent: f32,
    /// Mirostat 2, in place of the steps that drop tokens.
    pub mirostat: Option<MirostatSampling>,
}

/// The parameters of mirostat 2.
#[derive(Clone, Debug, PartialEq)]
pub struct MirostatSampling {
    /// The surprise that it aims at, in bits.
    pub tau: f32,
    /// The learning rate.
    pub eta: f32,
}

impl DrySampling {
    /// Returns DRY as the parameters set it; `None` if it is off.
    pub(crate) fn of(params: &GenerationParams) -> Option<Arc<Self>> {
        let multiplier = params.dry_multiplier.unwrap_or(0.0);
        let penalty_last_n = params.dry_penalty_last_n.unwrap_or(-1);
        if multiplier <= 0.0 || penalty_last_n == 0 {
            return None;
        }
        let breakers = params.dry_sequence_breakers.clone();
        Some(Arc::new(Self {
            multiplier,
            base: params.dry_base.unwrap_or(1.75),
            allowed_length: params.dry_allowed_length.unwrap_or(2).max(1),
            penalty_last_n,
            sequence_breakers: breakers
                .unwrap_or_else(|| SEQUENCE_BREAKERS.map(String::from).to_vec()),
        }))
    }
}

/// The sequence breakers of llama.cpp.
const SEQUENCE_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

impl SamplerChain {
    /// Returns the chain of the parameters; `None` if the sampler's own order does the same. `order` has no step that
    /// does nothing, apart from the temperature.
    pub(crate) fn of(params: &GenerationParams, order: SamplerOrder) -> Option<Arc<Self>> {
        let mirostat = (params.mirostat == Some(2)).then(|| MirostatSampling {
            tau: params.mirostat_tau.unwrap_or(5.0),
            eta: params.mirostat_eta.unwrap_or(0.1),
        });
        let range = params.dynatemp_range.unwrap_or(0.0);
        let order = order.filtered(|step| match step {
            SamplerStep::Penalties | SamplerStep::Dry | SamplerStep::Temperature => true,
            _ => mirostat.is_none(),
        });
        let is_special = |step: &SamplerStep| {
            matches!(
                step,
                SamplerStep::TopNSigma | SamplerStep::TypicalP | SamplerStep::Xtc
            )
        };
        let is_dynamic = range > 0.0 && order.contains(SamplerStep::Temperature);
        let is_needed = mirostat.is_some()
            || is_dynamic
            || !order.is_default_order()
            || order.steps().iter().any(is_special);
        is_needed.then(|| {
            Arc::new(Self {
                order,
                typical_p: params.typical_p.unwrap_or(1.0),
                top_n_sigma: params.top_n_sigma.unwrap_or(0.0),
                xtc_probability: params.xtc_probability.unwrap_or(0.0),
                xtc_threshold: params.xtc_threshold.unwrap_or(XTC_THRESHOLD),
                dynatemp_range: range,
                dynatemp_exponent: params.dynatemp_exponent.unwrap_or(1.0),
                mirostat,
            })
        })
    }

    /// Returns the penalties that come before all other steps.
    pub(crate) fn first_penalties(&self) -> &[SamplerStep] {
        let steps = self.order.steps();
        let is_penalty =
            |step: &SamplerStep| matches!(step, SamplerStep::Penalties | SamplerStep::Dry);
        let others = steps.iter().position(|step| !is_penalty(step));
        &steps[..others.unwrap_or(steps.len())]
    }
}

/// Returns the steps that do something, in the order of the parameters. The temperature is always one of them, because a
/// steerer may set it.
pub(crate) fn active_steps(params: &GenerationParams) -> SamplerOrder {
    let below_one = |value: Option<f32>| value.is_some_and(|value| value < 1.0);
    let above_zero = |value: Option<f32>| value.is_some_and(|value| value > 0.0);
    let is_penalty = |value: Option<f32>, off: f32| value.is_some_and(|value| value != off);
    params
        .samplers
        .unwrap_or_default()
        .filtered(|step| match step {
            SamplerStep::Penalties => {
                params.penalty_last_n != Some(0)
                    && (is_penalty(params.repetition_penalty, 1.0)
                        || is_penalty(params.presence_penalty, 0.0)
                        || is_penalty(params.frequency_penalty, 0.0))
            }
            SamplerStep::Dry => above_zero(params.dry_multiplier),
            SamplerStep::Temperature => true,
            SamplerStep::TopNSigma => above_zero(params.top_n_sigma),
            SamplerStep::TopK => params.top_k.is_some_and(|top_k| top_k > 0),
            SamplerStep::TypicalP => below_one(params.typical_p),
            SamplerStep::TopP => below_one(params.top_p),
            SamplerStep::MinP => above_zero(params.min_p),
            // No two tokens have more than half of the probability each.
            SamplerStep::Xtc => {
                above_zero(params.xtc_probability)
                    && params.xtc_threshold.unwrap_or(XTC_THRESHOLD) <= 0.5
            }
        })
}

/// llama.cpp's default.
const XTC_THRESHOLD: f32 = 0.1;
