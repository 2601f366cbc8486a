//! [`GenerateConfig`]: how a model is asked, typed or read from JSON.
//!
//! Input `config` of a model comes in two forms. JSON, from Evergreen and from people, has the ranges of EV-602. A face
//! in this process that has decoded its own wire format passes [`GenerateConfig::into_chunk`] instead: no JSON is
//! written or read, and the ranges are the core's (D-20), which the engine checks once, when the request is submitted.

use std::sync::Arc;

use sapwood_engine::api::GenerationRequest;
use sapwood_engine::request_phase::Follower;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::params::{
    BIAS_TEXT_BYTES_MAX, BIAS_TEXTS_MAX, GenerationParams, JsonCoercion, ParamError, ParamRanges,
    ParamSpec,
};
use sapwood_proto::steer::{
    ConstraintChoice, ControllerChoice, InvalidChoice, Token, VariablesSharer,
};
use serde_json::{Map, Value, json};

use super::sampling_defaults::SamplingDefaults;
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::name::{Mime, Name};

/// How a model is asked. What is not set has the model's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateConfig {
    /// The generation parameters, in the core's ranges; a call out of range fails with `BAD_CONFIG` and the name of the
    /// field. `priority` has no JSON form.
    pub params: GenerationParams,
    /// The temperature of the caller's protocol, where neither `params` nor the model sets one. It has no JSON form.
    pub default_temperature: Option<f32>,
    /// Clips `max_tokens`, whoever sets it; where nobody does, this is it. It has no JSON form.
    pub max_tokens_limit: Option<u32>,
    /// Receives the phase of the request before its first token. It has no JSON form: only a face in this process can
    /// set it.
    pub follower: Option<Follower>,
    /// Score these tokens as the output instead of generating one (LM-311). It has no JSON form.
    pub scored: Option<Vec<Token>>,
    /// Report prompt logprobs, with the first tokens of choice 0 (LM-974). It has no JSON form.
    pub prompt_logprobs: bool,
    /// Steers the request. Its output is then a tree of choices (D-25).
    pub controller: Option<ControllerChoice>,
    /// Shares the variables of the controller. It has no JSON form: only a face in this process can set it.
    pub sharer: Option<VariablesSharing>,
    /// Constrains the text; together with a controller the masks of both are intersected (D-38).
    pub constraint: Option<ConstraintChoice>,
    /// Emit the engine's events as they are, for readers that can take back text, and the reports of steerers with them:
    /// each event is one chunk without data whose `inner` is an
    /// [`EngineEvent`](sapwood_engine::api::EngineEvent). The first has the tokens of the prompt in its metadata. There
    /// are no other chunks but the last, which carries the metadata; an error of the request is the error of the run. It has no JSON form.
    pub watched: bool,
    /// How the prompt is tokenised.
    pub prompt_mode: PromptMode,
    /// Further variables of the chat template; an object.
    pub template_args: Option<Value>,
}

/// Shares the variables of a request with somebody outside of it (AI-1006).
#[derive(Clone, Debug)]
pub struct VariablesSharing(pub Arc<dyn VariablesSharer>);

/// Equal if it is the same one.
impl PartialEq for VariablesSharing {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl From<GenerationParams> for GenerateConfig {
    fn from(params: GenerationParams) -> Self {
        Self {
            params,
            ..Self::default()
        }
    }
}

/// How the prompt is tokenised (EV-607).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptMode {
    /// By the chat template, if there is one.
    #[default]
    Auto,
    /// By the chat template.
    Chat,
    /// Without a template. Leaves of token ids are accepted in this mode only.
    Raw,
}

impl GenerateConfig {
    /// A chunk that carries this config to a model's input `config` as a typed value. It has no bytes: if the model is
    /// on another server, its connector writes the format of that server.
    #[must_use]
    pub fn into_chunk(self) -> Chunk {
        Chunk::empty().with_mime(Mime::JSON).with_inner(self)
    }

    /// Decodes the fields. A name is accepted in snake or camel case; `null` means not set.
    ///
    /// # Errors
    /// `Argument` with reason `BAD_CONFIG`, naming the field: unknown, of a wrong type, or out of range.
    pub(crate) fn from_json(fields: Map<String, Value>) -> Result<Self> {
        let mut config = Self::default();
        // The two spell one value, so that neither can be read alone.
        let (mut controller, mut arg) = (None, None);
        let mut texts = None;
        for (key, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            match snake(key).as_str() {
                "controller" => controller = Some(value),
                "controller_arg" => arg = Some(value),
                "logit_bias_texts" => texts = Some(value),
                field => config.set(field, value)?,
            }
        }
        // After the others: `logit_bias` may have texts too, and takes the place of what was there.
        if let Some(texts) = texts {
            config.add_bias_texts(texts)?;
        }
        if let Some(controller) = controller {
            config.controller =
                Some(ControllerChoice::from_json(controller, arg).map_err(invalid_choice)?);
        } else if arg.is_some() {
            return Err(bad("controller_arg", "needs a controller"));
        }
        Ok(config)
    }

    /// The message has texts in a field of its own, because its keys are typed (EV-509). Here too a key of digits is a
    /// text.
    fn add_bias_texts(&mut self, value: &Value) -> Result<()> {
        let must = || {
            let why = format!(
                "must be an object from at most {BIAS_TEXTS_MAX} texts of 1 to {BIAS_TEXT_BYTES_MAX} bytes to false or \
                 numbers in [-100, 100]"
            );
            bad("logit_bias_texts", &why)
        };
        let few = |texts: &&Map<String, Value>| texts.len() <= BIAS_TEXTS_MAX;
        let texts = value.as_object().filter(few).ok_or_else(must)?;
        let pairs = texts.iter().map(|(text, bias)| json!([text, bias]));
        let mut read = Self::default();
        read.set("logit_bias", &pairs.collect())
            .map_err(|_| must())?;
        let texts = &mut read.params.logit_bias_texts;
        self.params.logit_bias_texts.append(texts);
        Ok(())
    }

    fn set(&mut self, field: &str, value: &Value) -> Result<()> {
        // The table of D-20 knows the ranges of each face; a text or a bool is not taken for a number here.
        if let Some(param) = ParamSpec::named(field) {
            let (ranges, coercion) = (&ParamRanges::EVERGREEN, JsonCoercion::Strict);
            let set = self.params.set_json(param, value, ranges, coercion);
            return set.map_err(out_of_range);
        }
        match field {
            "response_format" => {
                self.constraint =
                    ConstraintChoice::from_response_format(value).map_err(invalid_choice)?;
            }
            "prompt_mode" => self.prompt_mode = prompt_mode(value)?,
            "template_args" => {
                if !value.is_object() {
                    return Err(bad(field, "must be an object"));
                }
                self.template_args = Some(value.clone());
            }
            _ => return Err(bad(field, "is not a field of GenerateConfig")),
        }
        Ok(())
    }

    /// Encodes the fields that are set as the JSON of EV-602, for other servers: the inverse of [`Self::from_json`]. What
    /// concerns this process only, its queue and its followers, is not written.
    ///
    /// # Errors
    /// `Unimplemented` for values that JSON has no field for: scoring, watching, and stops of several tokens.
    pub(crate) fn to_json(&self) -> Result<Map<String, Value>> {
        if self.scored.is_some() || self.prompt_logprobs {
            return Err(unimplemented("scoring by a model on another server"));
        }
        if self.watched || self.sharer.is_some() {
            return Err(unimplemented(
                "watching the steps of a model on another server",
            ));
        }
        let mut out = self.params.to_json().ok_or_else(|| {
            unimplemented("a stop sequence of several tokens for a model on another server")
        })?;
        let mode = match self.prompt_mode {
            PromptMode::Auto => None,
            PromptMode::Chat => Some("chat"),
            PromptMode::Raw => Some("raw"),
        };
        out.extend(mode.map(|mode| ("prompt_mode".to_owned(), mode.into())));
        let args = self.template_args.clone();
        out.extend(args.map(|args| ("template_args".to_owned(), args)));
        let controller = self.controller.as_ref().map(ControllerChoice::to_json);
        out.extend(controller.map(|value| ("controller".to_owned(), value)));
        let format = self.constraint.as_ref();
        let format = format.map(ConstraintChoice::to_response_format);
        out.extend(format.map(|value| ("response_format".to_owned(), value)));
        Ok(out)
    }

    /// Checks that every token id in the config exists.
    ///
    /// # Errors
    /// `BAD_CONFIG`.
    pub(crate) fn check_vocabulary(&self, tokens: u32) -> Result<()> {
        let outside = |id: &Token| *id >= tokens;
        let why = format!("names a token outside the vocabulary of {tokens}");
        if self.params.stop_sequences.iter().flatten().any(outside) {
            return Err(bad("stop_token_ids", &why));
        }
        if self.params.logit_bias.iter().any(|(id, _)| outside(id)) {
            return Err(bad("logit_bias", &why));
        }
        Ok(())
    }

    /// Resolves what neither the caller nor the model leaves open: the caller's parameters first, then the model's
    /// defaults, then those of the caller's protocol. Every reader of a config does this once.
    ///
    /// # Errors
    /// `BAD_CONFIG` for a parameter that does not go with a default of the model.
    pub(crate) fn settled(mut self, defaults: &SamplingDefaults) -> Result<Self> {
        // Given tokens are scored: nothing is sampled, and nothing ends them.
        if self.scored.is_none() {
            defaults.fill(&mut self.params).map_err(out_of_range)?;
        }
        let temperature = self.default_temperature.take();
        let params = &mut self.params;
        params.temperature = params.temperature.or(temperature);
        if let Some(most) = self.max_tokens_limit.take() {
            params.max_tokens = Some(params.max_tokens.map_or(most, |max| max.min(most)));
        }
        Ok(self)
    }

    /// Applies the set fields to a request.
    pub(crate) fn apply(self, request: &mut GenerationRequest) {
        request.params = self.params;
        request.scored = self.scored;
        request.prompt_logprobs = self.prompt_logprobs;
        request.follower = self.follower;
    }
}

fn out_of_range(error: ParamError) -> Error {
    bad(error.name, &format!("must be {}", error.must))
}

fn invalid_choice(error: InvalidChoice) -> Error {
    bad(error.field, &error.why)
}

/// `BAD_CONFIG` for this field.
pub(super) fn bad(field: &str, why: &str) -> Error {
    Error::argument(Name::shared(field), why).because(ErrorReason::BAD_CONFIG)
}

fn unimplemented(what: &str) -> Error {
    Error::Unimplemented { what: what.into() }
}

/// A field's name as the schema writes it.
pub(crate) fn snake(key: &str) -> String {
    let mut out = String::with_capacity(key.len() + 4);
    for letter in key.chars() {
        if letter.is_ascii_uppercase() {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    out
}

fn prompt_mode(value: &Value) -> Result<PromptMode> {
    match value.as_str() {
        Some("auto" | "") => Ok(PromptMode::Auto),
        Some("chat") => Ok(PromptMode::Chat),
        Some("raw") => Ok(PromptMode::Raw),
        _ => Err(bad("prompt_mode", "must be auto, chat or raw")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A config that is written is read back unchanged.
    #[test]
    fn d_20_a_config_survives_its_json_form_unchanged() {
        let all = GenerateConfig {
            params: GenerationParams {
                max_tokens: Some(7),
                temperature: Some(0.7),
                seed: Some(u64::MAX),
                stop: vec!["END".into()],
                stop_sequences: vec![vec![3], vec![9]],
                skip_special_tokens: Some(false),
                logit_bias: [(4, f32::NEG_INFINITY), (5, 1.5)].into(),
                ..GenerationParams::default()
            },
            prompt_mode: PromptMode::Raw,
            template_args: Some(json!({"thinking": false})),
            controller: Some(ControllerChoice {
                id: "mine.picker-latest".into(),
                arg: r#"{"n": 1}"#.into(),
            }),
            constraint: Some(ConstraintChoice::options(&["a".into(), "b".into()])),
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
    fn ev_509_the_texts_of_biases_have_their_field_in_json_too() {
        let read = |fields: Value| {
            let Value::Object(fields) = fields else {
                panic!("an object")
            };
            let params = GenerateConfig::from_json(fields)?.params;
            Ok::<_, Error>((params.logit_bias.to_vec(), params.logit_bias_texts))
        };
        let both =
            json!({"logitBiasTexts": {"7": -100, "no": 0.5}, "logit_bias": [["a", 1], [7, 1.5]]});
        let (tokens, texts) = read(both).unwrap();
        let expected = [("a", 1.0), ("7", f32::NEG_INFINITY), ("no", 0.5)];
        let expected = expected.map(|(text, bias)| (text.to_owned(), bias));
        assert_eq!((tokens, texts), (vec![(7, 1.5)], expected.to_vec()));
        let many = |count: usize| -> Value {
            let texts = (0..count).map(|at| (at.to_string(), json!(1)));
            texts.collect::<Map<_, _>>().into()
        };
        assert!(read(json!({"logit_bias_texts": many(BIAS_TEXTS_MAX)})).is_ok());
        for bad in [
            json!([["a", 1]]),
            json!({"a": 101}),
            json!({"a": true}),
            json!({"": 1}),
            many(BIAS_TEXTS_MAX + 1),
        ] {
            let error = read(json!({"logit_bias_texts": bad.clone()})).unwrap_err();
            assert!(
                matches!(&error, Error::Argument { name, .. } if *name == *"logit_bias_texts"),
                "{bad}: {error:?}"
            );
        }
    }

    #[test]
    fn d_5_a_config_without_a_json_form_is_unimplemented() {
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
                watched: true,
                ..GenerateConfig::default()
            },
            GenerateConfig::from(GenerationParams {
                stop_sequences: vec![vec![1, 2]],
                ..GenerationParams::default()
            }),
        ] {
            let error = config.to_json().unwrap_err();
            assert_eq!(error.code().name(), "unimplemented");
        }
    }
}
