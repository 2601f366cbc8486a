//! Sampling defaults of `chat` and `run` (D-53): what the model recommends, else common values. The faces keep their
//! protocols' defaults.

use sapwood_engine::recommended::RecommendedSampling;
use serde_json::{Map, Value};

/// The values used where the model recommends none.
const USUAL: RecommendedSampling = RecommendedSampling {
    temperature: Some(0.7),
    top_k: None,
    top_p: Some(0.95),
    min_p: Some(0.05),
    repetition_penalty: None,
};

/// Adds the values that `config` does not set, in either spelling.
pub(crate) fn fill(config: &mut Map<String, Value>, recommended: RecommendedSampling) {
    let recommended = if recommended.is_empty() {
        USUAL
    } else {
        recommended
    };
    let float = |value: Option<f32>| {
        // Converts through the decimal text: 0.7 stays 0.7 instead of the nearest 32-bit value widened to 64 bits.
        let written = value.and_then(|value| value.to_string().parse::<f64>().ok());
        written.map(Value::from)
    };
    for (name, value) in [
        ("temperature", float(recommended.temperature)),
        ("top_k", recommended.top_k.map(Value::from)),
        ("top_p", float(recommended.top_p)),
        ("min_p", float(recommended.min_p)),
        ("repetition_penalty", float(recommended.repetition_penalty)),
    ] {
        let same = |key: &String| plain(key) == plain(name);
        if let Some(value) = value
            && !config.keys().any(same)
        {
            config.insert(name.to_owned(), value);
        }
    }
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
        ] {
            let mut config = sent.as_object().unwrap().clone();
            fill(&mut config, recommended);
            assert_eq!(Value::Object(config), expect, "{sent}");
        }
    }
}
