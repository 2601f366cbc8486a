//! Generation settings from tensors and parameters, one value per field in whichever way it was sent (TR-402 to
//! TR-408).

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value};

use super::limits::RequestLimits;
use super::refused::InvalidRequest;
use super::request::Mapped;
use super::signature::{InputRole, Signature};
use super::tensor::{Tensor, TensorData};
use crate::bounded_json::{self, JsonBounds, JsonUnread};
use crate::clip::shown;

/// The settings of a request to a text model; fields that are not set have the model's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// One response per flush.
    pub stream: bool,
    /// Whether the prompt is excluded from the output; `None`: the model's default (TR-405).
    pub exclude_prompt: Option<bool>,
    /// Maximum number of tokens.
    pub max_tokens: Option<u32>,
    /// Minimum number of tokens.
    pub min_tokens: Option<u32>,
    /// 0 selects the most likely token.
    pub temperature: Option<f32>,
    /// Nucleus sampling: keeps the smallest set of tokens with this probability.
    pub top_p: Option<f32>,
    /// Keeps this many of the most likely tokens; 0 is off.
    pub top_k: Option<u32>,
    /// Keeps tokens with at least this fraction of the probability of the most likely one.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens seen before.
    pub repetition_penalty: Option<f32>,
    /// Subtracted once from the logits of tokens generated before.
    pub presence_penalty: Option<f32>,
    /// Subtracted for each occurrence.
    pub frequency_penalty: Option<f32>,
    /// Equal seeds give equal text.
    pub seed: Option<u64>,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Strings that must not occur in the output.
    pub bad_words: Vec<String>,
    /// Stop tokens.
    pub stop_token_ids: Vec<u32>,
    /// Continue past the end-of-sequence token.
    pub ignore_eos: Option<bool>,
    /// Omit control tokens from text; with `false` they appear as their names.
    pub skip_special_tokens: Option<bool>,
    /// Number of choices.
    pub choices: Option<u32>,
    /// Number of alternatives beside each token's log-probability.
    pub top_logprobs: Option<u32>,
    /// Added to tokens' logits; -100 and below forbids a token.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Time limit of the whole request.
    pub timeout: Option<Duration>,
    /// Lower values run first; 0 is the default.
    pub priority: i64,
}

/// The sampling fields. If several names set the same value, the later name wins.
const FIELDS: &[&str] = &[
    "max_tokens",
    "max_new_tokens",
    "max_completion_tokens",
    "min_length",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "random_seed",
    "seed",
    "stop",
    "bad_words",
    "stop_token_ids",
    "end_id",
    "ignore_eos",
    "skip_special_tokens",
    "n",
    "num_return_sequences",
    "beam_width",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "timeout",
    "priority",
    "controller",
    "controller_arg",
    "regex",
    "grammar",
];

/// Whether a parameter of this name has a meaning for a text model.
pub(super) fn is_field(name: &str) -> bool {
    FIELDS.contains(&name)
}

impl Settings {
    /// Collects the settings of a request.
    ///
    /// # Errors
    /// The invalid field, with its range.
    pub fn of(
        signature: &Signature,
        mapped: &Mapped,
        limits: &RequestLimits,
    ) -> Result<Self, InvalidRequest> {
        let mut settings = Self::default();
        let fields = fields(signature, mapped, &mut settings, limits)?;
        // In the order of the names, so that only this decides which one wins.
        for name in FIELDS {
            if let Some(value) = fields.get(*name).filter(|value| !value.is_null()) {
                settings.set(name, value, limits)?;
            }
        }
        settings.limit(limits);
        // vLLM's backend refuses this; the TensorRT-LLM ensemble, whose client requests it by default, accepts it and
        // streams no prompt all the same (D-55).
        if settings.stream
            && settings.exclude_prompt == Some(false)
            && !signature.is_for_tensorrt_llm(mapped)
        {
            return Err(InvalidRequest::PromptInStream);
        }
        Ok(settings)
    }

    fn limit(&mut self, limits: &RequestLimits) {
        if limits.new_tokens > 0 {
            let most = limits.new_tokens;
            self.max_tokens = Some(self.max_tokens.map_or(most, |asked| asked.min(most)));
        }
    }

    fn set(
        &mut self,
        name: &str,
        value: &Value,
        limits: &RequestLimits,
    ) -> Result<(), InvalidRequest> {
        let field = Field { name, value };
        match name {
            "max_tokens" | "max_new_tokens" | "max_completion_tokens" => {
                self.max_tokens = Some(field.cut("at least 0")?);
            }
            "min_length" | "min_tokens" => self.min_tokens = Some(field.cut("at least 0")?),
            "temperature" => {
                self.temperature =
                    Some(field.number("in [0, 100]", |x| (0.0..=100.0).contains(&x))?);
            }
            "top_p" => self.top_p = Some(field.number("in (0, 1]", |x| x > 0.0 && x <= 1.0)?),
            "top_k" => {
                let retained = field.integer("at least -1", -1, i128::from(u32::MAX))?;
                self.top_k = Some(u32::try_from(retained).unwrap_or(0));
            }
            "min_p" => self.min_p = Some(field.number("in [0, 1)", |x| (0.0..1.0).contains(&x))?),
            "repetition_penalty" => {
                self.repetition_penalty =
                    Some(field.number("in (0, 10]", |x| x > 0.0 && x <= 10.0)?);
            }
            "presence_penalty" => self.presence_penalty = Some(field.penalty()?),
            "frequency_penalty" => self.frequency_penalty = Some(field.penalty()?),
            "random_seed" | "seed" => {
                let range = "an integer of 64 bits, not negative";
                let seed = field.integer(range, 0, i128::from(u64::MAX))?;
                self.seed = u64::try_from(seed).ok();
            }
            "stop" => self.stop = field.texts(limits)?,
            "bad_words" => self.bad_words = field.texts(limits)?,
            "stop_token_ids" => self.stop_token_ids.extend(field.tokens()?),
            "end_id" => match field.integer("a token id, or -1", -1, i128::from(u32::MAX))? {
                // No token ends the output.
                -1 => self.ignore_eos = Some(true),
                id => self.stop_token_ids.extend(u32::try_from(id)),
            },
            "ignore_eos" => self.ignore_eos = Some(field.flag()?),
            "skip_special_tokens" => self.skip_special_tokens = Some(field.flag()?),
            "n" | "num_return_sequences" => self.choices = Some(field.between(1, limits.choices)?),
            "logprobs" => self.top_logprobs = Some(field.between(0, TOP_LOGPROBS_MAX)?),
            "logit_bias" => self.logit_bias = field.biases(limits)?,
            "timeout" => {
                let range = "a number of microseconds";
                let time = field.integer(range, 0, i128::from(u64::MAX))?;
                let time = Duration::from_micros(u64::try_from(time).unwrap_or(u64::MAX));
                self.timeout = (!time.is_zero()).then_some(time);
            }
            "priority" => {
                let range = "an integer of 64 bits";
                let least = i128::from(i64::MIN);
                let priority = field.integer(range, least, i128::from(u64::MAX))?;
                self.priority = i64::try_from(priority).unwrap_or(i64::MAX);
            }
            _ => field.harmless()?,
        }
        Ok(())
    }
}

const TOP_LOGPROBS_MAX: u32 = 20;

/// Reads every field once: a declared input wins, then `sampling_parameters`, then the parameters, which only count
/// without it (TR-403). Also applies inputs that are not sampling fields.
fn fields(
    signature: &Signature,
    mapped: &Mapped,
    settings: &mut Settings,
    limits: &RequestLimits,
) -> Result<BTreeMap<String, Value>, InvalidRequest> {
    let mut fields = BTreeMap::new();
    let mut declared = Vec::new();
    let mut json = None;
    for (location, tensor) in &mapped.tensors {
        let Some(input) = signature.inputs.get(*location) else {
            continue;
        };
        match &input.role {
            InputRole::Stream => settings.stream = tensor.flag().unwrap_or(false),
            InputRole::ExcludePrompt => settings.exclude_prompt = tensor.flag(),
            InputRole::SamplingJson => json = Some(tensor),
            InputRole::Sampling(field) => {
                let values = tensor.data.values();
                let values = values.ok_or_else(|| InvalidRequest::Utf8(input.name.clone()))?;
                declared.push((field, only(values, input.shape != [1])));
            }
            InputRole::Unsupported if does_something(tensor) => {
                return Err(InvalidRequest::Unsupported(input.name.clone()));
            }
            InputRole::Image if does_something(tensor) => {
                return Err(InvalidRequest::Unsupported(input.name.clone()));
            }
            _ => {}
        }
    }
    match json {
        Some(tensor) => fields.extend(sampling_json(tensor, limits)?),
        None => fields.extend(
            mapped
                .parameters
                .iter()
                .map(|(name, value)| (name.clone(), value.to_json())),
        ),
    }
    fields.extend(
        declared
            .into_iter()
            .map(|(field, value)| (field.clone(), value)),
    );
    Ok(fields)
}

/// A single element is a scalar, unless the field is a list.
fn only(mut values: Vec<Value>, list: bool) -> Value {
    if values.len() == 1 && !list {
        values.remove(0)
    } else {
        Value::Array(values)
    }
}

/// Whether a tensor has an effect: false, empty data and empty strings have none.
fn does_something(tensor: &Tensor) -> bool {
    match &tensor.data {
        TensorData::Bool(list) => list.contains(&true),
        TensorData::Bytes(list) => list.iter().any(|text| !text.is_empty()),
        other => !other.is_empty(),
    }
}

/// TR-403: reads the fields of `sampling_parameters`.
fn sampling_json(
    tensor: &Tensor,
    limits: &RequestLimits,
) -> Result<Map<String, Value>, InvalidRequest> {
    let TensorData::Bytes(list) = &tensor.data else {
        return Ok(Map::new());
    };
    let Some(text) = list
        .iter()
        .next()
        .filter(|text| !text.trim_ascii().is_empty())
    else {
        return Ok(Map::new());
    };
    let bounds = JsonBounds {
        values: limits.json_members,
        entries: limits.json_members,
    };
    match bounded_json::read(text, bounds) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(InvalidRequest::SamplingJson("it is another value".into())),
        Err(JsonUnread::Syntax(error)) => Err(InvalidRequest::SamplingJson(error.to_string())),
        Err(unread) => Err(InvalidRequest::SamplingJson(unread.to_string())),
    }
}

/// One field as it was sent.
#[derive(Clone, Copy)]
struct Field<'a> {
    name: &'a str,
    value: &'a Value,
}

impl Field<'_> {
    fn wrong(self, range: &str) -> InvalidRequest {
        InvalidRequest::Field {
            field: self.name.into(),
            range: range.into(),
            got: shown(self.value),
        }
    }

    /// An integer, also as a string, or as a float without a fraction.
    fn integer(self, range: &str, least: i128, most: i128) -> Result<i128, InvalidRequest> {
        let whole = |x: &f64| x.fract() == 0.0 && x.abs() < 1e18;
        let number = match self.value {
            Value::String(text) => text.trim().parse().ok(),
            Value::Number(number) => {
                let exact = number.as_i64().map(i128::from);
                let exact = exact.or_else(|| number.as_u64().map(i128::from));
                #[allow(clippy::cast_possible_truncation, reason = "it is whole and small")]
                let float = || number.as_f64().filter(whole).map(|x| x as i128);
                exact.or_else(float)
            }
            _ => None,
        };
        let fits = number.filter(|number| (least..=most).contains(number));
        fits.ok_or_else(|| self.wrong(range))
    }

    /// A count of tokens; values beyond 32 bits mean no limit.
    fn cut(self, range: &str) -> Result<u32, InvalidRequest> {
        let number = self.integer(range, 0, i128::from(u64::MAX))?;
        Ok(u32::try_from(number).unwrap_or(u32::MAX))
    }

    fn between(self, least: u32, most: u32) -> Result<u32, InvalidRequest> {
        let range = format!("in [{least}, {most}]");
        let number = self.integer(&range, i128::from(least), i128::from(most))?;
        Ok(u32::try_from(number).unwrap_or(most))
    }

    fn number(self, range: &str, fits: impl Fn(f32) -> bool) -> Result<f32, InvalidRequest> {
        let number = match self.value {
            Value::String(text) => text.trim().parse().ok(),
            other => other.as_f64(),
        };
        #[allow(clippy::cast_possible_truncation, reason = "the field is a float")]
        let number = number.map(|number: f64| number as f32);
        // NaN is outside of every range.
        number
            .filter(|number| fits(*number))
            .ok_or_else(|| self.wrong(range))
    }

    fn penalty(self) -> Result<f32, InvalidRequest> {
        self.number("in [-2, 2]", |x| (-2.0..=2.0).contains(&x))
    }

    fn flag(self) -> Result<bool, InvalidRequest> {
        match self.value {
            Value::Bool(flag) => Ok(*flag),
            Value::String(text) if text == "true" => Ok(true),
            Value::String(text) if text == "false" => Ok(false),
            _ => Err(self.wrong("true or false")),
        }
    }

    /// Empty strings are dropped: a client sends `[""]`.
    fn texts(self, limits: &RequestLimits) -> Result<Vec<String>, InvalidRequest> {
        let range = || limits.texts_range();
        let list = match self.value {
            Value::String(one) => vec![one.clone()],
            Value::Array(list) => {
                let texts = list.iter().map(|text| text.as_str().map(str::to_owned));
                let texts: Option<Vec<String>> = texts.collect();
                texts.ok_or_else(|| self.wrong(&range()))?
            }
            _ => return Err(self.wrong(&range())),
        };
        let list: Vec<_> = list.into_iter().filter(|text| !text.is_empty()).collect();
        if list.len() > limits.stop_words || list.iter().any(|text| text.len() > limits.stop_bytes)
        {
            return Err(self.wrong(&range()));
        }
        Ok(list)
    }

    fn tokens(self) -> Result<Vec<u32>, InvalidRequest> {
        let range = "a list of token ids";
        let list = self.value.as_array().ok_or_else(|| self.wrong(range))?;
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        list.iter()
            .map(|value| id(value).ok_or_else(|| self.wrong(range)))
            .collect()
    }

    fn biases(self, limits: &RequestLimits) -> Result<BTreeMap<u32, f32>, InvalidRequest> {
        let range = format!(
            "an object of at most {} token ids with numbers in [-100, 100]",
            limits.biases
        );
        let wrong = || self.wrong(&range);
        // A parameter can only be a string.
        let bounds = JsonBounds {
            values: limits.biases + 1,
            entries: limits.biases,
        };
        let read = self
            .value
            .as_str()
            .and_then(|text| bounded_json::read(text.as_bytes(), bounds).ok());
        let object = read.as_ref().unwrap_or(self.value).as_object();
        let object = object
            .filter(|object| object.len() <= limits.biases)
            .ok_or_else(wrong)?;
        object
            .iter()
            .map(|(id, bias)| {
                let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
                #[allow(clippy::cast_possible_truncation, reason = "the field is a float")]
                let bias = bias.ok_or_else(wrong)? as f32;
                Ok((id.parse().map_err(|_| wrong())?, bias))
            })
            .collect()
    }

    /// Accepts a field without effect here, unless its value would require one.
    fn harmless(self) -> Result<(), InvalidRequest> {
        let nothing = match self.name {
            "beam_width" => {
                let one = self.integer("1", i128::from(i64::MIN), i128::from(u64::MAX))? == 1;
                return if one {
                    Ok(())
                } else {
                    Err(InvalidRequest::Beam)
                };
            }
            "prompt_logprobs" => {
                self.integer("0", i128::from(i64::MIN), i128::from(u64::MAX))? == 0
            }
            _ => self.value.as_str() == Some(""),
        };
        if nothing {
            Ok(())
        } else {
            Err(InvalidRequest::Unsupported(self.name.into()))
        }
    }
}
