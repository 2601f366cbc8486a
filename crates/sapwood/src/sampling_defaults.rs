//! Sampling defaults of `chat` and `run` (D-53): what the model recommends, else common values. The faces keep their
//! protocols' defaults.

use sapwood_engine::recommended::RecommendedSampling;
use sapwood_proto::params::GenerationParams;
use serde_json::{Map, Value};

/// The values used where the model recommends none.
const USUAL: RecommendedSampling = RecommendedSampling {
    temperature: Some(0.7),
    top_k: None,
    top_p: Some(0.95),
    min_p: Some(0.05),
    repetition_penalty: None,
    penalty_last_n: None,
    xtc_probability: None,
    xtc_threshold: None,
    mirostat: None,
    mirostat_tau: None,
    mirostat_eta: None,
    max_tokens: None,
};

/// Adds the values that `config` does not set, in either spelling.
pub(crate) fn fill(config: &mut Map<String, Value>, mut recommended: RecommendedSampling) {
    // All or nothing: values are chosen together, and a recommended temperature does not fit another one's `min_p`.
    let max_tokens = recommended.max_tokens.take();
    let recommended = if recommended.is_empty() {
        USUAL
    } else {
        recommended
    };
    // Mirostat takes the place of the samplers that drop tokens: of those that the user has chosen, nothing would be left.
    let dropped_by_user = DROPPING.iter().any(|name| is_set(config, name));
    let recommended = RecommendedSampling {
        // 0 and not nothing: a server whose model has it as a default recommends it too.
        mirostat: recommended
            .mirostat
            .map(|version| if dropped_by_user { 0 } else { version }),
        mirostat_tau: recommended.mirostat_tau.filter(|_| !dropped_by_user),
        mirostat_eta: recommended.mirostat_eta.filter(|_| !dropped_by_user),
        max_tokens,
        ..recommended
    };
    let recommended = GenerationParams::from(recommended).to_json();
    for (name, value) in recommended.unwrap_or_default() {
        if !is_set(config, &name) {
            config.insert(name, value);
        }
    }
}

/// The parameters that mirostat ignores.
const DROPPING: [&str; 7] = [
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "samplers",
];

/// Whether the user has set a parameter: GENERATE takes both spellings.
pub(crate) fn is_set(config: &Map<String, Value>, name: &str) -> bool {
    config.keys().any(|key| plain(key) == plain(name))
}

/// `topP` is `top_p`.
fn plain(key: &str) -> String {
    key.replace('_', "").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn d_53_the_model_recommends_and_the_user_decides() {
        let gemma = RecommendedSampling {
            temperature: Some(1.0),
            top_k: Some(64),
            ..RecommendedSampling::default()
        };
        let none = RecommendedSampling::default();
        let surprise = RecommendedSampling {
            temperature: Some(0.9),
            mirostat: Some(2),
            mirostat_tau: Some(5.0),
            ..none
        };
        for (sent, recommended, expect) in [
            (
                json!({}),
                none,
                json!({"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}),
            ),
            (json!({}), gemma, json!({"temperature": 1.0, "top_k": 64})),
            (
                json!({"temperature": 0, "topP": 1, "max_tokens": 5}),
                none,
                json!({"temperature": 0, "topP": 1, "max_tokens": 5, "min_p": 0.05}),
            ),
            (
                json!({"top_k": 1}),
                gemma,
                json!({"top_k": 1, "temperature": 1.0}),
            ),
            (
                json!({}),
                surprise,
                json!({"temperature": 0.9, "mirostat": 2, "mirostat_tau": 5.0}),
            ),
            // A length is no way to sample.
            (
                json!({}),
                RecommendedSampling {
                    max_tokens: Some(9),
                    ..none
                },
                json!({"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "max_tokens": 9}),
            ),
            (
                json!({"topP": 0.5}),
                surprise,
                json!({"topP": 0.5, "temperature": 0.9, "mirostat": 0}),
            ),
            (
                json!({"samplers": ["top_k"]}),
                surprise,
                json!({"samplers": ["top_k"], "temperature": 0.9, "mirostat": 0}),
            ),
        ] {
            let mut config = sent.as_object().unwrap().clone();
            fill(&mut config, recommended);
            assert_eq!(Value::Object(config), expect, "{sent}");
        }
    }
}
