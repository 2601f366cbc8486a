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
}

impl RecommendedSampling {
    /// Returns it without values that are out of a request's range, because a file may contain anything.
    #[must_use]
    pub fn valid(self) -> Self {
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
        };
        assert_eq!(all(0.5).valid(), all(0.5));
        for wild in [f32::NAN, f32::INFINITY, -1.0, 101.0] {
            assert!(all(wild).valid().is_empty(), "{wild}");
        }
    }
}
