//! The `configs` of an action: typed messages in, one JSON object and the common options out (EV-509).

use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message;
use prost_types::{Any, Struct, Value as Proto, value::Kind};
use sapwood_proto::clip::shown;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::generated::sapwood::v1::{GenerateConfig, LoraAdapter, LoraAdapters};
use sapwood_proto::params::LORA_USES_MAX;
use serde_json::{Map, Number, Value, json};

use crate::Result;
use crate::error::Error;
use crate::model::snake;
use crate::name::Name;
use crate::spec::Spec;

/// The decoded `configs` of an action.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Configs {
    /// For the function's input `config`; `None` if nothing was sent.
    pub(super) function: Option<Map<String, Value>>,
    /// Timeout of the action (EV-950), if a Struct has it; the session itself has decoded `sapwood.v1.ActionOptions`.
    pub(super) timeout: Option<Duration>,
}

impl Configs {
    /// Decodes the configs of an action of the function `spec`.
    ///
    /// # Errors
    /// `UNKNOWN_CONFIG`, `DUPLICATE_CONFIG` or `BAD_CONFIG`.
    pub(super) fn read(spec: &Spec, configs: &[Any]) -> Result<Self> {
        let mut read = Self::default();
        let generates = spec.input("config").is_some();
        for any in configs {
            // EV-509: the type name is the part after the last slash, whatever host precedes it.
            let name = any.type_url.rsplit('/').next().unwrap_or_default();
            match name {
                GENERATE if generates => {
                    let config = GenerateConfig::decode(any.value.as_slice())
                        .map_err(|_| undecodable(name))?;
                    read.take_function(name, generate_json(config)?)?;
                }
                // For clients that cannot encode our messages: the same fields by their JSON names (EV-509).
                STRUCT => {
                    let object =
                        Struct::decode(any.value.as_slice()).map_err(|_| undecodable(name))?;
                    read.take_struct(generates, object)?;
                }
                _ => return Err(unknown(spec, name, generates)),
            }
        }
        Ok(read)
    }

    fn take_function(&mut self, name: &str, config: Map<String, Value>) -> Result<()> {
        if self.function.replace(config).is_some() {
            return Err(duplicate(name));
        }
        Ok(())
    }

    /// A Struct is the function's config; for a function without one, it has the options of every action.
    fn take_struct(&mut self, generates: bool, object: Struct) -> Result<()> {
        let mut fields = object_json(object, 0)?;
        if generates {
            fields = fields
                .into_iter()
                // JSON names may be camelCase, as proto3-JSON writes them.
                .map(|(name, value)| (snake(&name), value))
                .collect();
            return self.take_function(STRUCT, fields);
        }
        for (name, value) in &fields {
            let text = value.as_str().filter(|_| name == "timeout");
            let seconds = text.and_then(|text| text.strip_suffix('s')?.parse::<f64>().ok());
            let span = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            let Some(span) = span else {
                return Err(bad(
                    name,
                    "is no option of every action; there is `timeout`, for example \"30s\"",
                ));
            };
            self.timeout = Some(span);
        }
        Ok(())
    }
}

/// The types that the function takes, for LIST_ACTIONS.
pub(super) fn types(spec: &Spec) -> Vec<&'static str> {
    let function = spec.input("config").map(|_| GENERATE);
    function.into_iter().chain([OPTIONS]).collect()
}

fn unknown(spec: &Spec, name: &str, generates: bool) -> Error {
    let taken = if generates {
        "sapwood.v1.GenerateConfig, sapwood.v1.ActionOptions"
    } else {
        OPTIONS
    };
    let why = format!(
        "{} takes no config of type {:?}; it takes {taken} and google.protobuf.Struct",
        spec.name,
        // The name is the client's text: it is cut before it goes into a message.
        shown(name)
    );
    Error::argument("configs", why).because(ErrorReason::UNKNOWN_CONFIG)
}

fn duplicate(name: &str) -> Error {
    Error::argument("configs", format!("{name} is given twice"))
        .because(ErrorReason::DUPLICATE_CONFIG)
}

fn undecodable(name: &str) -> Error {
    bad(name, "cannot be decoded")
}

fn bad(field: &str, why: &str) -> Error {
    Error::argument(Name::shared(field), why).because(ErrorReason::BAD_CONFIG)
}

/// Every field that is set, under its name; unset fields are omitted, so that defaults apply.
fn generate_json(config: GenerateConfig) -> Result<Map<String, Value>> {
    let mut out = numbers(&config)?;
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            out.insert(name.into(), value);
        }
    };
    put("seed", config.seed.map(Value::from));
    put("ignore_eos", config.ignore_eos.map(Value::from));
    let include_stop = config.include_stop_str_in_output;
    put("include_stop_str_in_output", include_stop.map(Value::from));
    put(
        "dry_sequence_breakers",
        filled(config.dry_sequence_breakers),
    );
    put("samplers", filled(config.samplers));
    put("lora", config.lora.map(adapters).transpose()?);
    put("prompt_mode", config.prompt_mode.map(Value::from));
    put("stop", filled(config.stop));
    put("bad_words", filled(config.bad_words));
    put("stop_token_ids", filled(config.stop_token_ids));
    put(
        "logit_bias",
        biases(&config.logit_bias, &config.logit_bias_texts)?,
    );
    if let Some(format) = config.response_format {
        let fields = [("type", format.r#type), ("schema", format.schema)];
        let mut object = texts(fields);
        if let Some(choices) = filled(format.choices) {
            object.insert("choices".into(), choices);
        }
        put("response_format", Some(Value::Object(object)));
    }
    if let Some(controller) = config.controller {
        let fields = [("module", controller.module), ("arg", controller.arg)];
        put("controller", Some(Value::Object(texts(fields))));
    }
    if let Some(args) = config.template_args {
        put("template_args", Some(Value::Object(object_json(args, 0)?)));
    }
    Ok(out)
}

/// The list that `lora` is in JSON.
fn adapters(config: LoraAdapters) -> Result<Value> {
    if config.adapters.len() > LORA_USES_MAX {
        let must = format!("must have at most {LORA_USES_MAX} adapters");
        return Err(bad("lora", &must));
    }
    let object = |adapter: LoraAdapter| {
        let mut object = texts([("name", adapter.name)]);
        object.extend(adapter.id.map(|id| ("id".into(), id.into())));
        if let Some(scale) = adapter.scale {
            object.insert("scale".into(), float("lora", scale)?);
        }
        Ok(Value::Object(object))
    };
    config.adapters.into_iter().map(object).collect()
}

/// The fields that are numbers.
fn numbers(config: &GenerateConfig) -> Result<Map<String, Value>> {
    let mut out = Map::new();
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            out.insert(name.into(), value);
        }
    };
    for (name, value) in [
        ("temperature", config.temperature),
        ("top_p", config.top_p),
        ("min_p", config.min_p),
        ("repetition_penalty", config.repetition_penalty),
        ("presence_penalty", config.presence_penalty),
        ("frequency_penalty", config.frequency_penalty),
        ("dry_multiplier", config.dry_multiplier),
        ("dry_base", config.dry_base),
        ("xtc_probability", config.xtc_probability),
        ("xtc_threshold", config.xtc_threshold),
        ("typical_p", config.typical_p),
        ("top_n_sigma", config.top_n_sigma),
        ("mirostat_tau", config.mirostat_tau),
        ("mirostat_eta", config.mirostat_eta),
        ("dynatemp_range", config.dynatemp_range),
        ("dynatemp_exponent", config.dynatemp_exponent),
    ] {
        put(name, value.map(|value| float(name, value)).transpose()?);
    }
    for (name, value) in [
        ("max_tokens", config.max_tokens),
        ("min_tokens", config.min_tokens),
        ("top_k", config.top_k),
        ("top_logprobs", config.top_logprobs),
        ("n", config.n),
        ("dry_allowed_length", config.dry_allowed_length),
        ("mirostat", config.mirostat),
    ] {
        put(name, value.map(Value::from));
    }
    for (name, value) in [
        ("penalty_last_n", config.penalty_last_n),
        ("dry_penalty_last_n", config.dry_penalty_last_n),
    ] {
        put(name, value.map(Value::from));
    }
    Ok(out)
}

/// Pairs, in which a text of digits is not taken for a token id. Without texts an object, which has one bias for each id.
fn biases(tokens: &BTreeMap<u32, f32>, texts: &BTreeMap<String, f32>) -> Result<Option<Value>> {
    let number = |bias: &f32| float("logit_bias", *bias);
    if texts.is_empty() {
        let tokens = tokens.iter();
        let object = tokens.map(|(id, bias)| Ok((id.to_string(), number(bias)?)));
        let object = object.collect::<Result<Map<_, _>>>()?;
        return Ok((!object.is_empty()).then_some(Value::Object(object)));
    }
    let tokens = tokens
        .iter()
        .map(|(id, bias)| Ok(json!([id, number(bias)?])));
    let texts = texts
        .iter()
        .map(|(text, bias)| Ok(json!([text, number(bias)?])));
    Ok(Some(Value::Array(
        tokens.chain(texts).collect::<Result<_>>()?,
    )))
}

fn texts<const N: usize>(fields: [(&str, Option<String>); N]) -> Map<String, Value> {
    let set = fields
        .into_iter()
        .filter_map(|(name, text)| Some((name.to_owned(), Value::from(text?))));
    set.collect()
}

fn filled<T: Into<Value>>(list: Vec<T>) -> Option<Value> {
    (!list.is_empty()).then(|| Value::from(list))
}

/// EV-603: JSON has no NaN, so it is refused here.
fn float(field: &str, value: f32) -> Result<Value> {
    let number =
        Number::from_f64(f64::from(value)).ok_or_else(|| bad(field, "must be a finite number"))?;
    Ok(Value::Number(number))
}

fn object_json(object: Struct, depth: usize) -> Result<Map<String, Value>> {
    let fields = object.fields.into_iter();
    fields
        .map(|(name, value)| Ok((name, value_json(value, depth)?)))
        .collect()
}

fn value_json(value: Proto, depth: usize) -> Result<Value> {
    // The conversion recurses, so the client's value must not choose the depth of the stack.
    if depth > DEPTH_MAX {
        return Err(bad("google.protobuf.Struct", "is nested too deeply"));
    }
    Ok(match value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(value)) => value.into(),
        Some(Kind::StringValue(text)) => text.into(),
        Some(Kind::NumberValue(number)) => number_json(number)?,
        Some(Kind::StructValue(object)) => Value::Object(object_json(object, depth + 1)?),
        Some(Kind::ListValue(list)) => {
            let items = list
                .values
                .into_iter()
                .map(|item| value_json(item, depth + 1));
            Value::Array(items.collect::<Result<_>>()?)
        }
    })
}

/// A Struct has doubles only: a whole number is taken as an integer.
fn number_json(number: f64) -> Result<Value> {
    #[allow(
        clippy::cast_possible_truncation,
        reason = "whole and within 2^53, so exact"
    )]
    if number.fract() == 0.0 && number.abs() <= WHOLE_MAX {
        return Ok(Value::from(number as i64));
    }
    let number = Number::from_f64(number).ok_or_else(|| {
        bad(
            "google.protobuf.Struct",
            "holds a number that is not finite",
        )
    })?;
    Ok(Value::Number(number))
}

const GENERATE: &str = "sapwood.v1.GenerateConfig";
const OPTIONS: &str = "sapwood.v1.ActionOptions";
const STRUCT: &str = "google.protobuf.Struct";
const DEPTH_MAX: usize = 64;
/// 2^53: above it, not every integer is a double.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
