//! Sampling parameters that a model file recommends (D-53).

use sapwood_proto::params::GenerationParams;
use serde::Deserialize;

/// The recommendation, `general.sampling.*` in GGUF. A key that is missing is `None`. Faces ignore it: it is for
/// programs that ask on behalf of a person who has set nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecommendedSampling {
    /// As [`Sampling::temperature`](crate::api::Sampling::temperature).
    pub temperature: Option<f32>,
    /// As [`Sampling::top_k`](crate::api::Sampling::top_k).
    pub top_k: Option<u32>,
    /// As [`Sampling::top_p`](crate::api::Sampling::top_p).
    pub top_p: Option<f32>,
    /// As [`Sampling::min_p`](crate::api::Sampling::min_p).
    pub min_p: Option<f32>,
    /// As [`Sampling::repetition_penalty`](crate::api::Sampling::repetition_penalty).
    pub repetition_penalty: Option<f32>,
    /// As [`Sampling::penalty_last_n`](crate::api::Sampling::penalty_last_n).
    pub penalty_last_n: Option<i32>,
    /// As [`SamplerChain::xtc_probability`](crate::api::SamplerChain::xtc_probability).
    pub xtc_probability: Option<f32>,
    /// As [`SamplerChain::xtc_threshold`](crate::api::SamplerChain::xtc_threshold).
    pub xtc_threshold: Option<f32>,
    /// 0, or 2 for mirostat 2.
    pub mirostat: Option<u32>,
    /// As [`MirostatSampling::tau`](crate::api::MirostatSampling::tau).
    pub mirostat_tau: Option<f32>,
    /// As [`MirostatSampling::eta`](crate::api::MirostatSampling::eta).
    pub mirostat_eta: Option<f32>,
}

impl RecommendedSampling {
    /// Returns it without values that are out of a request's range, because a file may contain anything.
    #[must_use]
    pub fn valid(self) -> Self {
        let is_fraction = |value: &f32| (0.0..=1.0).contains(value);
        Self {
            temperature: self
                .temperature
                .filter(|value| (0.0..=100.0).contains(value)),
            // Any number is valid: 0 is off, and more than the vocabulary keeps everything.
            top_k: self.top_k,
            top_p: self.top_p.filter(|&value| value > 0.0 && value <= 1.0),
            min_p: self.min_p.filter(|value| (0.0..1.0).contains(value)),
            repetition_penalty: self
                .repetition_penalty
                .filter(|&value| value > 0.0 && value <= 10.0),
            penalty_last_n: self.penalty_last_n.filter(|&value| value >= -1),
            xtc_probability: self.xtc_probability.filter(is_fraction),
            xtc_threshold: self.xtc_threshold.filter(is_fraction),
            // Of mirostat there is version 2 only.
            mirostat: self.mirostat.filter(|value| [0, 2].contains(value)),
            mirostat_tau: self
                .mirostat_tau
                .filter(|value| (0.0..=100.0).contains(value)),
            mirostat_eta: self.mirostat_eta.filter(is_fraction),
        }
    }

    /// Returns whether nothing is recommended.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl From<RecommendedSampling> for GenerationParams {
    fn from(recommended: RecommendedSampling) -> Self {
        Self {
            temperature: recommended.temperature,
            top_k: recommended.top_k,
            top_p: recommended.top_p,
            min_p: recommended.min_p,
            repetition_penalty: recommended.repetition_penalty,
            penalty_last_n: recommended.penalty_last_n,
            xtc_probability: recommended.xtc_probability,
            xtc_threshold: recommended.xtc_threshold,
            mirostat: recommended.mirostat,
            mirostat_tau: recommended.mirostat_tau,
            mirostat_eta: recommended.mirostat_eta,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d_53_recommendations_out_of_range_are_dropped() {
        let all = |value| RecommendedSampling {
            temperature: Some(value),
            top_k: None,
            top_p: Some(value),
            min_p: Some(value),
            repetition_penalty: Some(value),
            xtc_probability: Some(value),
            xtc_threshold: Some(value),
            mirostat_tau: Some(value),
            mirostat_eta: Some(value),
            ..RecommendedSampling::default()
        };
        assert_eq!(all(0.5).valid(), all(0.5));
        for wild in [f32::NAN, f32::INFINITY, -1.0, 101.0] {
            assert!(all(wild).valid().is_empty(), "{wild}");
        }
        for (mirostat, penalty_last_n, valid) in [(0, -1, true), (2, 64, true), (1, -2, false)] {
            let recommended = RecommendedSampling {
                mirostat: Some(mirostat),
                penalty_last_n: Some(penalty_last_n),
                ..RecommendedSampling::default()
            };
            assert_eq!(recommended.valid() == recommended, valid, "{mirostat}");
            assert_eq!(recommended.valid().is_empty(), !valid, "{mirostat}");
        }
    }
}
