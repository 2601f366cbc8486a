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
    /// 2 for mirostat 2.
    pub mirostat: Option<u32>,
    /// As [`MirostatSampling::tau`](crate::api::MirostatSampling::tau).
    pub mirostat_tau: Option<f32>,
    /// As [`MirostatSampling::eta`](crate::api::MirostatSampling::eta).
    pub mirostat_eta: Option<f32>,
    /// The length at which a request that sets none ends. No file has it: it is a default of a server.
    pub max_tokens: Option<u32>,
}

impl RecommendedSampling {
    /// Returns it without values that are out of a request's range, because a file may contain anything, and without
    /// those that say nothing: what turns a sampler off, or belongs to one that is off. Converters write these too, and
    /// they are no recommendation.
    #[must_use]
    pub fn valid(self) -> Self {
        let is_fraction = |value: &f32| (0.0..=1.0).contains(value);
        let repetition_penalty = self
            .repetition_penalty
            .filter(|&value| value > 0.0 && value <= 10.0);
        let has_penalty = repetition_penalty.is_some_and(|penalty| penalty != 1.0);
        let xtc_probability = self
            .xtc_probability
            .filter(|value| *value > 0.0 && is_fraction(value));
        // Of mirostat there is version 2 only.
        let mirostat = self.mirostat.filter(|value| *value == 2);
        let of_mirostat = |value: Option<f32>| value.filter(|_| mirostat.is_some());
        Self {
            temperature: self
                .temperature
                .filter(|value| (0.0..=100.0).contains(value)),
            // Any number is valid: 0 is off, and more than the vocabulary keeps everything.
            top_k: self.top_k,
            top_p: self.top_p.filter(|&value| value > 0.0 && value <= 1.0),
            min_p: self.min_p.filter(|value| (0.0..1.0).contains(value)),
            repetition_penalty,
            penalty_last_n: self
                .penalty_last_n
                .filter(|&value| value >= -1 && has_penalty),
            xtc_probability,
            xtc_threshold: self
                .xtc_threshold
                .filter(|value| is_fraction(value) && xtc_probability.is_some()),
            mirostat,
            mirostat_tau: of_mirostat(self.mirostat_tau)
                .filter(|value| (0.0..=100.0).contains(value)),
            mirostat_eta: of_mirostat(self.mirostat_eta).filter(is_fraction),
            max_tokens: self.max_tokens.filter(|tokens| *tokens > 0),
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
            max_tokens: recommended.max_tokens,
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
            penalty_last_n: None,
            xtc_probability: Some(value),
            xtc_threshold: Some(value),
            mirostat: Some(2),
            mirostat_tau: Some(value),
            mirostat_eta: Some(value),
            max_tokens: None,
        };
        assert_eq!(all(0.5).valid(), all(0.5));
        let mirostat = RecommendedSampling {
            mirostat: Some(2),
            ..RecommendedSampling::default()
        };
        for wild in [f32::NAN, f32::INFINITY, -1.0, 101.0] {
            assert_eq!(all(wild).valid(), mirostat, "{wild}");
        }
    }

    #[test]
    fn d_53_what_is_off_is_no_recommendation() {
        let none = RecommendedSampling::default();
        let window = |repetition_penalty, penalty_last_n| RecommendedSampling {
            repetition_penalty,
            penalty_last_n: Some(penalty_last_n),
            ..none
        };
        for penalised in [window(Some(1.1), -1), window(Some(1.1), 64)] {
            assert_eq!(penalised.valid(), penalised);
        }
        assert_eq!(window(Some(1.1), -2).valid().penalty_last_n, None);
        assert_eq!(window(Some(1.0), 64).valid().penalty_last_n, None);
        for version in [None, Some(0), Some(1)] {
            let off = RecommendedSampling {
                mirostat: version,
                mirostat_tau: Some(5.0),
                mirostat_eta: Some(0.1),
                xtc_probability: version.map(|_| 0.0),
                xtc_threshold: Some(0.1),
                ..window(None, 64)
            };
            assert!(off.valid().is_empty(), "{version:?}");
        }
    }
}
