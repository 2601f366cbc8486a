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
use crate::params::{
    GenerationParams, JsonCoercion, PRIORITY_MOST, ParamSpec, SAMPLER_PARAMS, joined,
};
use crate::steer::{ConstraintChoice, ConstraintKind, ControllerChoice, Token};

/// The settings of a request to a text model; fields that are not set have the model's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// One response per flush.
    pub stream: bool,
    /// Whether the prompt is excluded from the output; `None`: the model's default (TR-405).
    pub exclude_prompt: Option<bool>,
    /// The generation parameters.
    pub params: GenerationParams,
    /// Clips `max_tokens`, also where the model has a default; a request without either gets it.
    pub max_tokens_limit: Option<u32>,
    /// Time limit of the whole request.
    pub timeout: Option<Duration>,
    /// Steers the request (TR-1305).
    pub controller: Option<ControllerChoice>,
    /// Constrains the text (TR-1305).
    pub constraint: Option<ConstraintChoice>,
    /// The text behind the place that the model fills in after its prompt.
    pub suffix: Option<String>,
    /// The tools that the model may call, as JSON that is not read here.
    pub tools: Option<String>,
    /// Variables of the chat template.
    pub template_args: Option<Map<String, Value>>,
}

/// The fields of a request, most of them of sampling. If several names set the same value, the later name wins.
const FIELDS: [&str; 58] = joined(&[
    &[
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
        "repeat_last_n",
        "penalty_last_n",
    ],
    &SAMPLER_PARAMS,
    &[
        "lora_name",
        "lora",
        "random_seed",
        "seed",
        "stop",
        "bad_words",
        "stop_token_ids",
        "end_id",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "n",
        "num_return_sequences",
        "best_of",
        "use_beam_search",
        "guided_decoding",
        "structured_outputs",
        "beam_width",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
    ],
    &BESIDE_SAMPLING,
]);

/// The fields that are patterns: a request has one of them at most.
const PATTERNS: [&str; 3] = ["json_schema", "regex", "grammar"];

/// The fields that count as parameters beside the object of sampling too: they are none of its fields in vLLM, so that nobody sends
/// them there, and without them the text would be another one, or come at another time.
const BESIDE_SAMPLING: [&str; 8] = [
    "suffix",
    "controller",
    "controller_arg",
    "json_schema",
    "regex",
    "grammar",
    "timeout",
    "priority",
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
        let mut fields = fields(signature, mapped, &mut settings, limits)?;
        settings.suffix = suffix(fields.remove("suffix"))?;
        // In the order of the names, so that only this decides which one wins.
        for name in FIELDS {
            // `null` means absent in `sampling_parameters`; a parameter is never null (TR-307).
            if let Some(value) = fields.get(name).filter(|value| !value.is_null()) {
                settings.set(name, value, limits)?;
            }
        }
        settings.steer(&fields)?;
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

    /// TR-1305: reads the fields that only make sense together.
    fn steer(&mut self, fields: &BTreeMap<String, Value>) -> Result<(), InvalidRequest> {
        // Clients send empty strings for fields that they do not use (TR-401).
        let nothing = |value: &Value| value.is_null() || value.as_str() == Some("");
        let given = |name: &str| fields.get(name).filter(|value| !nothing(value));
        let arg = given("controller_arg");
        if let Some(controller) = given("controller") {
            let choice = ControllerChoice::from_json(controller, arg);
            self.controller = Some(choice.map_err(InvalidRequest::Controller)?);
        } else if arg.is_some() {
            return Err(InvalidRequest::ArgWithoutController);
        }
        let with = |name| Some((name, given(name)?));
        let mut patterns = PATTERNS.into_iter().filter_map(with);
        match (patterns.next(), patterns.next()) {
            (Some((one, _)), Some((other, _))) => Err(InvalidRequest::Constraints(one, other)),
            (Some((name, value)), None) => {
                self.constraint = Some(Field { name, value }.constraint()?);
                Ok(())
            }
            (None, _) => Ok(()),
        }
    }

    fn limit(&mut self, limits: &RequestLimits) {
        if limits.new_tokens > 0 {
            // Clipped instead of refused (TR-404): a request without a value gets the limit too, unless the model has a
            // default.
            let most = limits.new_tokens;
            self.params.max_tokens = self.params.max_tokens.map(|asked| asked.min(most));
            self.max_tokens_limit = Some(most);
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
            "end_id" => match field.integer("a token id, or -1", -1, i128::from(u32::MAX))? {
                // -1: no token ends the output.
                -1 => self.params.ignore_eos = Some(true),
                id => {
                    let stops = Token::try_from(id).into_iter().map(|token| vec![token]);
                    self.params.stop_sequences.extend(stops);
                }
            },
            "timeout" => {
                let range = "a number of microseconds";
                let time = field.integer(range, 0, i128::from(u64::MAX))?;
                let time = Duration::from_micros(u64::try_from(time).unwrap_or(u64::MAX));
                self.timeout = (!time.is_zero()).then_some(time);
            }
            "priority" => {
                let range = "an integer of 64 bits";
                let least = i128::from(i64::MIN);
                let lower_first = field.integer(range, least, i128::from(u64::MAX))?;
                // The protocol runs the lowest value first, the core the highest. It has no bounds; what is beyond ours counts
                // as the bound, because its clients may send any number.
                let most = i128::from(PRIORITY_MOST);
                let clamped = lower_first.saturating_neg().clamp(-most, most);
                self.params.priority = i32::try_from(clamped).ok();
            }
            // The best of as many as are asked for are all of them. `n` was set before.
            "best_of" => {
                let most = i128::from(self.params.n.unwrap_or(1));
                let range = "an integer";
                if !field.is_empty()
                    && field.integer(range, i128::from(i64::MIN), i128::from(u64::MAX))? > most
                {
                    return Err(InvalidRequest::Unsupported(name.into()));
                }
            }
            // Read together, once all fields are known.
            "controller" | "controller_arg" => {}
            name if PATTERNS.contains(&name) => {}
            _ => match ParamSpec::named(parameter(name)) {
                Some(param) => {
                    let ranges = limits.ranges();
                    let coercion = JsonCoercion::FromText;
                    // Only `lora` can be set already: by `lora_name`.
                    let named = (name == "lora").then(|| self.params.lora.clone());
                    let set = self.params.set_json(param, value, &ranges, coercion);
                    set.map_err(|error| field.wrong(&error.must))?;
                    if named
                        .flatten()
                        .is_some_and(|named| self.params.lora != Some(named))
                    {
                        return Err(
                            field.wrong("the adapter of `lora_name`, or left out beside it")
                        );
                    }
                }
                None => field.harmless()?,
            },
        }
        Ok(())
    }
}

/// The name of a field in the table of parameters.
fn parameter(field: &str) -> &str {
    match field {
        "max_new_tokens" | "max_completion_tokens" => "max_tokens",
        "min_length" => "min_tokens",
        "random_seed" => "seed",
        "repeat_last_n" => "penalty_last_n",
        "num_return_sequences" => "n",
        "logprobs" => "top_logprobs",
        "lora_name" => "lora",
        same => same,
    }
}

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
            InputRole::Tools => settings.tools = tools(&input.name, tensor)?,
            InputRole::TemplateArgs => {
                settings.template_args = template_args(&input.name, tensor, limits)?;
            }
            InputRole::Sampling(field) => {
                let values = tensor.data.values();
                let values = values.ok_or_else(|| InvalidRequest::Utf8(input.name.clone()))?;
                finite(field, tensor)?;
                declared.push((field, only(values, input.shape != [1])));
            }
            // A neutral value asks for nothing: only one that would have an effect is refused (TR-401).
            InputRole::Unsupported if does_something(tensor) => {
                return Err(InvalidRequest::Unsupported(input.name.clone()));
            }
            InputRole::Image if does_something(tensor) => {
                return Err(InvalidRequest::Unsupported(input.name.clone()));
            }
            _ => {}
        }
    }
    // vLLM's backend ignores the parameters as soon as the object is there (TR-403).
    let counts = |name: &str| json.is_none() || BESIDE_SAMPLING.contains(&name);
    let parameters = mapped.parameters.iter().filter(|(name, _)| counts(name));
    let parameters = parameters.map(|(name, value)| (name.clone(), value.to_json()));
    fields.extend(parameters.filter(hides));
    if let Some(tensor) = json {
        fields.extend(sampling_json(tensor, limits)?.into_iter().filter(hides));
    }
    let declared = declared.into_iter();
    let declared = declared.map(|(field, value)| (field.clone(), value));
    fields.extend(declared.filter(hides));
    Ok(fields)
}

/// Refuses NaN and infinity, which have no JSON form: as `null` they would count as absent.
fn finite(name: &str, tensor: &Tensor) -> Result<(), InvalidRequest> {
    let TensorData::Float(numbers) = &tensor.data else {
        return Ok(());
    };
    match numbers.iter().find(|number| !number.is_finite()) {
        None => Ok(()),
        Some(number) => Err(Field {
            name,
            value: &Value::String(number.to_string()),
        }
        .wrong("a finite number")),
    }
}

/// Whether a field replaces one of its name from a place that counts less. An empty suffix is none (TR-401).
fn hides((name, value): &(String, Value)) -> bool {
    name != "suffix" || !(value.is_null() || value.as_str() == Some(""))
}

/// The suffix, unless it is empty. Moved out of the fields, because it may be as long as a prompt.
fn suffix(value: Option<Value>) -> Result<Option<String>, InvalidRequest> {
    match value {
        None => Ok(None),
        Some(Value::String(suffix)) => {
            check_shared("suffix", suffix.len())?;
            Ok(Some(suffix))
        }
        Some(value) => Err(Field {
            name: "suffix",
            value: &value,
        }
        .wrong("a text")),
    }
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
    match bounded_json::read(text, bounds(limits)) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(InvalidRequest::SamplingJson(
            "it is a JSON value of another type".into(),
        )),
        Err(JsonUnread::Syntax(error)) => Err(InvalidRequest::SamplingJson(error.to_string())),
        Err(unread) => Err(InvalidRequest::SamplingJson(unread.to_string())),
    }
}

/// Bytes of the tools, of the variables of the template, and of the suffix.
const SHARED_MAX: usize = 1 << 20;

/// The bounds of JSON within a JSON string: the limits of the body have not seen what is in it.
const fn bounds(limits: &RequestLimits) -> JsonBounds {
    JsonBounds {
        values: limits.json_members,
        entries: limits.json_members,
    }
}

/// The tools, unless there are none.
fn tools(name: &str, tensor: &Tensor) -> Result<Option<String>, InvalidRequest> {
    let Some(text) = json_text(tensor).filter(|text| *text != b"null" && *text != b"[]") else {
        return Ok(None);
    };
    check_shared(name, text.len())?;
    let text = std::str::from_utf8(text).map_err(|_| InvalidRequest::Utf8(name.into()))?;
    Ok(Some(text.to_owned()))
}

/// Each row of a batch has a copy of what all of them share, and of what is read from it.
fn check_shared(name: &str, bytes: usize) -> Result<(), InvalidRequest> {
    if bytes <= SHARED_MAX {
        return Ok(());
    }
    Err(InvalidRequest::Field {
        field: name.into(),
        range: format!("at most {SHARED_MAX} bytes"),
        got: format!("{bytes} bytes"),
    })
}

/// The variables of the chat template, unless there are none.
fn template_args(
    name: &str,
    tensor: &Tensor,
    limits: &RequestLimits,
) -> Result<Option<Map<String, Value>>, InvalidRequest> {
    let Some(text) = json_text(tensor).filter(|text| *text != b"null") else {
        return Ok(None);
    };
    check_shared(name, text.len())?;
    match bounded_json::read(text, bounds(limits)) {
        Ok(Value::Object(map)) => Ok((!map.is_empty()).then_some(map)),
        _ => Err(InvalidRequest::Field {
            field: name.into(),
            range: "a JSON object".into(),
            got: shown(String::from_utf8_lossy(text)),
        }),
    }
}

/// The text of an input that is JSON, unless it is empty (TR-401).
fn json_text(tensor: &Tensor) -> Option<&[u8]> {
    let TensorData::Bytes(list) = &tensor.data else {
        return None;
    };
    let text = list.iter().next()?.trim_ascii();
    (!text.is_empty()).then_some(text)
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

    /// The constraint of a field that is a pattern.
    fn constraint(self) -> Result<ConstraintChoice, InvalidRequest> {
        let schema = |text: String| ConstraintChoice::new(ConstraintKind::JsonSchema, text);
        match (self.name, self.value) {
            // A declared input that accepts JSON has its text already (TR-1306); `sampling_parameters` has the value.
            ("json_schema", Value::String(text)) => Ok(schema(text.clone())),
            ("json_schema", value @ (Value::Object(_) | Value::Bool(_))) => {
                Ok(schema(value.to_string()))
            }
            ("json_schema", _) => Err(self.wrong("a JSON Schema")),
            ("grammar", Value::String(text)) => Ok(ConstraintChoice::grammar(text.as_str())),
            (_, Value::String(text)) => {
                Ok(ConstraintChoice::new(ConstraintKind::Regex, text.as_str()))
            }
            _ => Err(self.wrong("a string")),
        }
    }

    /// Whether it says nothing: clients send empty strings for fields that they do not use (TR-401).
    fn is_empty(self) -> bool {
        match self.value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(members) => members.is_empty(),
            Value::Bool(_) | Value::Number(_) => false,
        }
    }

    /// Whether it is false, in the spellings of clients that send everything as texts or numbers.
    fn is_false(self) -> bool {
        match self.value {
            Value::Bool(flag) => !flag,
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::String(text) => ["false", "False", "0"].contains(&&**text),
            _ => false,
        }
    }

    /// Accepts a field without effect here, unless its value would require one.
    fn harmless(self) -> Result<(), InvalidRequest> {
        let nothing = match self.name {
            // A beam of 1 is ordinary sampling (TR-401).
            "beam_width" => {
                let one = self.integer("1", i128::from(i64::MIN), i128::from(u64::MAX))? == 1;
                return if one {
                    Ok(())
                } else {
                    Err(InvalidRequest::Beam)
                };
            }
            "use_beam_search" => self.is_empty() || self.is_false(),
            "prompt_logprobs" => {
                self.integer("0", i128::from(i64::MIN), i128::from(u64::MAX))? == 0
            }
            _ => self.is_empty(),
        };
        if nothing {
            Ok(())
        } else {
            Err(InvalidRequest::Unsupported(self.name.into()))
        }
    }
}
