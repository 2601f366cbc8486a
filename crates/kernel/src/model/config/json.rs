//! Encodes a [`GenerateConfig`] as the JSON of EV-602, for other servers.
//!
//! The inverse of [`GenerateConfig::from_json`]. Fields that have a meaning in this process only (`priority`,
//! `follower`) are not written: they concern the queue of this process.

use serde_json::{Map, Value, json};

use super::{FORBIDDING, GenerateConfig, PromptMode, unimplemented};
use crate::Result;

impl GenerateConfig {
    /// The fields that are set, under their names.
    ///
    /// # Errors
    /// `Unimplemented` for values that JSON has no field for: scoring, and stops of several tokens.
    pub(crate) fn to_json(&self) -> Result<Map<String, Value>> {
        if self.scored.is_some() || self.prompt_logprobs {
            return Err(unimplemented("scoring by a server elsewhere"));
        }
        let mut out = Map::new();
        for (name, value) in self.numbers() {
            out.extend(value.map(|value| (name.to_owned(), value)));
        }
        let flags = [
            ("ignore_eos", self.ignore_eos),
            ("skip_special_tokens", self.skip_special_tokens),
        ];
        for (name, value) in flags {
            out.extend(value.map(|value| (name.to_owned(), value.into())));
        }
        for (name, texts) in [("stop", &self.stop), ("bad_words", &self.bad_words)] {
            if !texts.is_empty() {
                out.insert(name.into(), json!(texts));
            }
        }
        if !self.stop_sequences.is_empty() {
            out.insert("stop_token_ids".into(), self.single_stops()?);
        }
        if !self.logit_bias.is_empty() {
            let bias = self.logit_bias.iter();
            // Minus infinity is what -100 and below stand for (D-20).
            let bias = bias.map(|(id, bias)| (id.to_string(), float(bias.max(FORBIDDING))));
            out.insert("logit_bias".into(), Value::Object(bias.collect()));
        }
        let mode = match self.prompt_mode {
            PromptMode::Auto => None,
            PromptMode::Chat => Some("chat"),
            PromptMode::Raw => Some("raw"),
        };
        out.extend(mode.map(|mode| ("prompt_mode".to_owned(), mode.into())));
        out.extend(
            self.template_args
                .clone()
                .map(|args| ("template_args".to_owned(), args)),
        );
        Ok(out)
    }

    fn numbers(&self) -> [(&'static str, Option<Value>); 12] {
        let whole = |number: Option<u32>| number.map(Value::from);
        [
            ("max_tokens", whole(self.max_tokens)),
            ("min_tokens", whole(self.min_tokens)),
            ("top_k", whole(self.top_k)),
            ("top_logprobs", whole(self.top_logprobs)),
            ("n", whole(self.n)),
            ("seed", self.seed.map(Value::from)),
            ("temperature", self.temperature.map(float)),
            ("top_p", self.top_p.map(float)),
            ("min_p", self.min_p.map(float)),
            ("repetition_penalty", self.repetition_penalty.map(float)),
            ("presence_penalty", self.presence_penalty.map(float)),
            ("frequency_penalty", self.frequency_penalty.map(float)),
        ]
    }

    fn single_stops(&self) -> Result<Value> {
        let single = |stop: &Vec<u32>| match stop[..] {
            [token] => Some(token),
            _ => None,
        };
        let tokens: Option<Vec<u32>> = self.stop_sequences.iter().map(single).collect();
        let tokens = tokens
            .ok_or_else(|| unimplemented("a stop of several tokens at a server elsewhere"))?;
        Ok(json!(tokens))
    }
}

/// Converts through the decimal text: 0.7 stays 0.7 instead of the nearest 32-bit value widened to 64 bits. A value
/// that is not finite has no JSON form; servers refuse it.
fn float(number: f32) -> Value {
    let read = number.to_string().parse::<f64>().ok();
    read.map_or(Value::Null, Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A config that is written is read back unchanged.
    #[test]
    fn d_20_a_config_that_leaves_this_process_is_read_as_it_was_meant() {
        let all = GenerateConfig {
            max_tokens: Some(7),
            min_tokens: Some(2),
            temperature: Some(0.7),
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.05),
            repetition_penalty: Some(1.1),
            presence_penalty: Some(-0.5),
            frequency_penalty: Some(0.25),
            seed: Some(u64::MAX),
            stop: vec!["END".into()],
            stop_sequences: vec![vec![3], vec![9]],
            bad_words: vec!["bad".into()],
            ignore_eos: Some(true),
            skip_special_tokens: Some(false),
            top_logprobs: Some(3),
            logit_bias: [(4, f32::NEG_INFINITY), (5, 1.5)].into(),
            n: Some(2),
            prompt_mode: PromptMode::Raw,
            template_args: Some(json!({"thinking": false})),
            ..GenerateConfig::default()
        };
        for config in [
            all,
            GenerateConfig::default(),
            GenerateConfig {
                prompt_mode: PromptMode::Chat,
                ..GenerateConfig::default()
            },
        ] {
            let read = GenerateConfig::from_json(config.to_json().unwrap()).unwrap();
            assert_eq!(read, config);
        }
    }

    #[test]
    fn d_5_what_json_cannot_say_is_unimplemented() {
        for config in [
            GenerateConfig {
                scored: Some(vec![1]),
                ..GenerateConfig::default()
            },
            GenerateConfig {
                prompt_logprobs: true,
                ..GenerateConfig::default()
            },
            GenerateConfig {
                stop_sequences: vec![vec![1, 2]],
                ..GenerateConfig::default()
            },
        ] {
            let error = config.to_json().unwrap_err();
            assert_eq!(error.code().name(), "unimplemented");
        }
    }
}
