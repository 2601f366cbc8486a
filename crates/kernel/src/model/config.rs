//! [`GenerateConfig`]: the generation parameters of a call, typed or read from JSON.
//!
//! Input `config` of a model comes in two forms. JSON, from Evergreen and from people, has the ranges of EV-602. A face
//! in this process that has decoded its own wire format passes [`GenerateConfig::into_chunk`] instead: no JSON is
//! written or read, and the ranges are the core's (D-20), which the engine checks once, when the request is submitted.

mod json;

use std::sync::Arc;

use sapwood_engine::api::GenerationRequest;
use sapwood_engine::request_phase::Follower;
use sapwood_proto::steer::Token;
use serde_json::{Map, Value};

use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::limits;
use crate::name::{Mime, Name};

/// Maximum number of stop texts or bad words, and of bytes in each.
const TEXTS_MAX: usize = 16;
const TEXT_BYTES_MAX: usize = 256;
const TOP_LOGPROBS_MAX: u32 = 20;
/// A bias at or below this value forbids the token, for clients that write it so (D-20).
const FORBIDDING: f32 = -100.0;

/// Generation parameters that are set. Everything else takes the model's default. Ranges are those of
/// [`api`](sapwood_engine::api) and are checked there; a call out of range fails with `BAD_CONFIG` and the name of the
/// field.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateConfig {
    /// Tokens per choice at most; not set: the rest of the context.
    pub max_tokens: Option<u32>,
    /// No end of sequence and no stop before this many tokens.
    pub min_tokens: Option<u32>,
    /// 0 to 100; 0 takes the most likely token.
    pub temperature: Option<f32>,
    /// Above 0, at most 1.
    pub top_p: Option<f32>,
    /// 0 is off.
    pub top_k: Option<u32>,
    /// 0 to below 1.
    pub min_p: Option<f32>,
    /// Above 0, at most 10.
    pub repetition_penalty: Option<f32>,
    /// -100 to 100.
    pub presence_penalty: Option<f32>,
    /// -100 to 100.
    pub frequency_penalty: Option<f32>,
    /// Equal seeds give equal tokens.
    pub seed: Option<u64>,
    /// Texts that end a choice.
    pub stop: Vec<String>,
    /// Token sequences that end a choice; a single stop token is a sequence of one.
    pub stop_sequences: Vec<Vec<Token>>,
    /// Texts that must not occur in an output (TR-401).
    pub bad_words: Vec<String>,
    /// Continue past the end of sequence.
    pub ignore_eos: Option<bool>,
    /// Whether control tokens are left out of the text, as is usual; with `false` their names are part of it.
    pub skip_special_tokens: Option<bool>,
    /// Alternatives reported with each token, 0 to 1,000; not set: no log-probabilities, unless their port is read.
    pub top_logprobs: Option<u32>,
    /// Added to the logits; minus infinity forbids. Shared, so that it is not copied from call to call.
    pub logit_bias: Arc<[(Token, f32)]>,
    /// Choices, 1 to 64.
    pub n: Option<u32>,
    /// A waiting request with a higher priority is scheduled first.
    pub priority: Option<i32>,
    /// Receives the phase of the request before its first token. It has no JSON form: only a face in this process can
    /// set it.
    pub follower: Option<Follower>,
    /// Score these tokens as the output instead of generating one (LM-311).
    pub scored: Option<Vec<Token>>,
    /// Report prompt logprobs, with the first tokens of choice 0 (LM-974). It has no JSON form.
    pub prompt_logprobs: bool,
    /// How the prompt is tokenised.
    pub prompt_mode: PromptMode,
    /// Further variables of the chat template; an object.
    pub template_args: Option<Value>,
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

    /// A bias as meant by clients that write -100 for a forbidden token (D-20).
    #[must_use]
    pub const fn bias(written: f32) -> f32 {
        if written <= FORBIDDING {
            f32::NEG_INFINITY
        } else {
            written
        }
    }

    /// Decodes the fields. A name is accepted in snake or camel case; `null` means not set.
    ///
    /// # Errors
    /// `Argument` with reason `BAD_CONFIG`, naming the field: unknown, of a wrong type, or out of range;
    /// `Unimplemented` for features that this build does not have.
    pub(crate) fn from_json(fields: Map<String, Value>) -> Result<Self> {
        let mut config = Self::default();
        let given = |name: &str| fields.get(name).is_some_and(|value| !value.is_null());
        if given("controller") && given("response_format") {
            return Err(bad("controller", "cannot be combined with response_format"));
        }
        for (key, value) in &fields {
            if !value.is_null() {
                config.set(&snake(key), value)?;
            }
        }
        Ok(config)
    }

    fn set(&mut self, field: &str, value: &Value) -> Result<()> {
        match field {
            "max_tokens" => self.max_tokens = Some(integer(field, value, 0, u32::MAX)?),
            "min_tokens" => self.min_tokens = Some(integer(field, value, 0, u32::MAX)?),
            "temperature" => {
                self.temperature = Some(number(
                    field,
                    value,
                    |x| (0.0..=2.0).contains(&x),
                    "0 to 2",
                )?)
            }
            "top_p" => {
                self.top_p = Some(number(
                    field,
                    value,
                    |x| x > 0.0 && x <= 1.0,
                    "above 0, at most 1",
                )?)
            }
            "top_k" => self.top_k = Some(integer(field, value, 0, u32::MAX)?),
            "min_p" => {
                self.min_p = Some(number(
                    field,
                    value,
                    |x| (0.0..1.0).contains(&x),
                    "0 to below 1",
                )?)
            }
            "repetition_penalty" => {
                self.repetition_penalty = Some(number(
                    field,
                    value,
                    |x| x > 0.0 && x <= 10.0,
                    "above 0, at most 10",
                )?);
            }
            "presence_penalty" => self.presence_penalty = Some(penalty(field, value)?),
            "frequency_penalty" => self.frequency_penalty = Some(penalty(field, value)?),
            "seed" => self.seed = Some(seed(value)?),
            "stop" => self.stop = texts(field, value)?,
            "bad_words" => self.bad_words = texts(field, value)?,
            "stop_token_ids" => self.stop_sequences = token_ids(field, value)?,
            "ignore_eos" => self.ignore_eos = Some(flag(field, value)?),
            "skip_special_tokens" => self.skip_special_tokens = Some(flag(field, value)?),
            "top_logprobs" => self.top_logprobs = Some(integer(field, value, 0, TOP_LOGPROBS_MAX)?),
            "logit_bias" => self.logit_bias = logit_bias(value)?,
            "n" => self.n = Some(integer(field, value, 1, limits::CHOICES_MAX)?),
            "response_format" => response_format(value)?,
            "controller" => return Err(unimplemented("a controller")),
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

    /// Checks that every token id in the config exists.
    ///
    /// # Errors
    /// `BAD_CONFIG`.
    pub(crate) fn check_vocabulary(&self, tokens: u32) -> Result<()> {
        let outside = |id: &Token| *id >= tokens;
        let why = format!("names a token outside the vocabulary of {tokens}");
        if self.stop_sequences.iter().flatten().any(outside) {
            return Err(bad("stop_token_ids", &why));
        }
        if self.logit_bias.iter().any(|(id, _)| outside(id)) {
            return Err(bad("logit_bias", &why));
        }
        Ok(())
    }

    /// Applies the set fields to a request.
    pub(crate) fn apply(self, request: &mut GenerationRequest) {
        fn put<T>(target: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *target = value;
            }
        }
        let sampling = &mut request.sampling;
        put(&mut sampling.temperature, self.temperature);
        put(&mut sampling.top_p, self.top_p);
        put(&mut sampling.top_k, self.top_k);
        put(&mut sampling.min_p, self.min_p);
        put(&mut sampling.repetition_penalty, self.repetition_penalty);
        put(&mut sampling.presence_penalty, self.presence_penalty);
        put(&mut sampling.frequency_penalty, self.frequency_penalty);
        sampling.logit_bias = self.logit_bias;
        sampling.seed = self.seed;
        request.max_tokens = self.max_tokens;
        put(&mut request.min_tokens, self.min_tokens);
        put(&mut request.ignore_eos, self.ignore_eos);
        put(&mut request.skip_special_tokens, self.skip_special_tokens);
        put(&mut request.n, self.n);
        put(&mut request.priority, self.priority);
        request.stop = self.stop;
        request.stop_sequences = self.stop_sequences;
        request.bad_words = self.bad_words;
        request.scored = self.scored;
        request.prompt_logprobs = self.prompt_logprobs;
        request.follower = self.follower;
    }
}

/// `BAD_CONFIG` for this field.
pub(super) fn bad(field: &str, why: &str) -> Error {
    Error::argument(Name::shared(field), why).because("BAD_CONFIG")
}

fn unimplemented(what: &str) -> Error {
    Error::Unimplemented { what: what.into() }
}

/// A field's name as the schema writes it.
pub(super) fn snake(key: &str) -> String {
    let mut out = String::with_capacity(key.len() + 4);
    for letter in key.chars() {
        if letter.is_ascii_uppercase() {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    out
}

fn integer(field: &str, value: &Value, min: u32, max: u32) -> Result<u32> {
    // A protobuf Struct has doubles only: a whole number is taken as an integer.
    let whole = |x: f64| x.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&x);
    let number = match value.as_u64() {
        Some(number) => u32::try_from(number).ok(),
        None => value.as_f64().filter(|x| whole(*x)).map(|x| x as u32),
    };
    number
        .filter(|number| (min..=max).contains(number))
        .ok_or_else(|| bad(field, &format!("must be an integer, {min} to {max}")))
}

fn number(field: &str, value: &Value, in_range: impl Fn(f32) -> bool, range: &str) -> Result<f32> {
    #[allow(clippy::cast_possible_truncation, reason = "the field is a float")]
    let number = value.as_f64().map(|number| number as f32);
    // NaN is in no range, so it is refused here too.
    number
        .filter(|number| in_range(*number))
        .ok_or_else(|| bad(field, &format!("must be a number, {range}")))
}

fn penalty(field: &str, value: &Value) -> Result<f32> {
    number(field, value, |x| (-2.0..=2.0).contains(&x), "-2 to 2")
}

/// JSON writes 64 bits as a number or, in proto3's way, as a string.
fn seed(value: &Value) -> Result<u64> {
    let text = value.as_str().and_then(|text| text.parse().ok());
    let double = value
        .as_f64()
        .filter(|x| x.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(x))
        .map(|x| x as u64);
    value
        .as_u64()
        .or(text)
        .or(double)
        .ok_or_else(|| bad("seed", "must be an integer of 64 bits, not negative"))
}

fn flag(field: &str, value: &Value) -> Result<bool> {
    let flag = value.as_bool();
    flag.ok_or_else(|| bad(field, "must be true or false"))
}

fn texts(field: &str, value: &Value) -> Result<Vec<String>> {
    let wrong = || {
        let why = format!("must be at most {TEXTS_MAX} strings of 1 to {TEXT_BYTES_MAX} bytes");
        bad(field, &why)
    };
    let list = match value {
        Value::String(one) => vec![one.clone()],
        _ => serde_json::from_value::<Vec<String>>(value.clone()).map_err(|_| wrong())?,
    };
    let fits = |text: &String| (1..=TEXT_BYTES_MAX).contains(&text.len());
    if list.len() <= TEXTS_MAX && list.iter().all(fits) {
        Ok(list)
    } else {
        Err(wrong())
    }
}

/// Makes each token a sequence of its own.
fn token_ids(field: &str, value: &Value) -> Result<Vec<Vec<Token>>> {
    let list = value
        .as_array()
        .ok_or_else(|| bad(field, "must be a list of token ids"))?;
    list.iter()
        .map(|id| Ok(vec![integer(field, id, 0, u32::MAX)?]))
        .collect()
}

fn logit_bias(value: &Value) -> Result<Arc<[(Token, f32)]>> {
    let field = "logit_bias";
    let object = value
        .as_object()
        .ok_or_else(|| bad(field, "must be an object of token ids and biases"))?;
    object
        .iter()
        .map(|(id, bias)| {
            let id = id
                .parse()
                .map_err(|_| bad(field, "has a key that is no token id"))?;
            let bias = number(
                field,
                bias,
                |x| (-100.0..=100.0).contains(&x),
                "-100 to 100",
            )?;
            Ok((id, GenerateConfig::bias(bias)))
        })
        .collect()
}

/// Format text is the default output; JSON shapes need native constraints.
fn response_format(value: &Value) -> Result<()> {
    const KINDS: [&str; 5] = ["json_object", "json_schema", "regex", "choice", "lark"];
    match value.get("type").and_then(Value::as_str) {
        None | Some("text") if value.is_object() => Ok(()),
        Some(kind) if KINDS.contains(&kind) => {
            Err(unimplemented("response_format other than text"))
        }
        _ => Err(bad(
            "response_format",
            "has an unknown type; there are text, json_object, json_schema, regex, choice and lark",
        )),
    }
}

fn prompt_mode(value: &Value) -> Result<PromptMode> {
    match value.as_str() {
        Some("auto" | "") => Ok(PromptMode::Auto),
        Some("chat") => Ok(PromptMode::Chat),
        Some("raw") => Ok(PromptMode::Raw),
        _ => Err(bad("prompt_mode", "must be auto, chat or raw")),
    }
}
