//! Generation parameters as JSON: read by name, and written for other servers.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{
    Domain, FORBIDDING, GenerationParams, PARAMS, ParamError, ParamField, ParamRanges, ParamSpec,
};
use crate::bounded_json::{self, JsonBounds};
use crate::steer::Token;

/// How much a protocol forgives in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonCoercion {
    /// A value has its JSON type. Whole numbers may be written as `1.0`, because a protobuf `Struct` has doubles only,
    /// and integers of 64 bits as strings, as proto3 writes them.
    Strict,
    /// Also texts of numbers, of flags and of objects, as in parameters that can only be strings, and lists with empty
    /// texts, which clients send for "none" (Triton).
    FromText,
}

impl GenerationParams {
    /// Sets the parameter of `param` from JSON.
    ///
    /// # Errors
    /// The value has another type, or is outside of `ranges`.
    pub fn set_json(
        &mut self,
        param: &ParamSpec,
        value: &Value,
        ranges: &ParamRanges,
        coercion: JsonCoercion,
    ) -> Result<(), ParamError> {
        let domain = param.domain(ranges);
        let json = JsonParam { value, coercion };
        json.read_into(&domain, param.field(self))
            .ok_or_else(|| ParamError::new(param.name, &domain))
    }

    /// Returns the parameters that are set, as typed JSON under their names; `priority` is not among them. `None` if
    /// there is a stop of several tokens, which JSON has no form for.
    #[must_use]
    pub fn to_json(&self) -> Option<Map<String, Value>> {
        // `ParamSpec::field` borrows mutably; the clone also gives its texts away below.
        let mut params = self.clone();
        let mut out = Map::new();
        for param in PARAMS {
            let value = match param.field(&mut params) {
                ParamField::Count(value) => value.map(Value::from),
                ParamField::Number(value) => value.map(float_to_json),
                ParamField::Seed(value) => value.map(Value::from),
                ParamField::Flag(value) => value.map(Value::from),
                ParamField::Texts(texts) => {
                    (!texts.is_empty()).then(|| std::mem::take(texts).into())
                }
                ParamField::Tokens(stops) => {
                    let single = |stop: &Vec<Token>| match stop[..] {
                        [token] => Some(Value::from(token)),
                        _ => None,
                    };
                    let tokens: Option<Vec<Value>> = stops.iter().map(single).collect();
                    let tokens = tokens?;
                    (!tokens.is_empty()).then_some(Value::Array(tokens))
                }
                ParamField::Biases(biases) => {
                    // Minus infinity has no JSON form; it is what -100 and below stand for (D-20).
                    let written = |bias: f32| float_to_json(bias.max(FORBIDDING));
                    let object: Map<_, _> = biases
                        .iter()
                        .map(|(id, bias)| (id.to_string(), written(*bias)))
                        .collect();
                    (!object.is_empty()).then_some(Value::Object(object))
                }
            };
            out.extend(value.map(|value| (param.name.to_owned(), value)));
        }
        Some(out)
    }
}

/// Converts through the decimal text: 0.7 stays 0.7 instead of the nearest number of 32 bits widened to 64. A value
/// that is not finite has no JSON form; servers refuse its `null`.
#[must_use]
pub fn float_to_json(number: f32) -> Value {
    let read = number.to_string().parse::<f64>().ok();
    read.map_or(Value::Null, Value::from)
}

/// One value as it was sent.
#[derive(Clone, Copy)]
struct JsonParam<'a> {
    value: &'a Value,
    coercion: JsonCoercion,
}

impl JsonParam<'_> {
    fn read_into(self, domain: &Domain, field: ParamField<'_>) -> Option<()> {
        match (domain, field) {
            (Domain::Count { least, most }, ParamField::Count(field)) => {
                *field = Some(self.count(*least, *most)?);
            }
            (Domain::Number(range), ParamField::Number(field)) => {
                let number = self.number()?;
                *field = Some(range.contains(number).then_some(number)?);
            }
            (Domain::Seed, ParamField::Seed(field)) => *field = Some(self.seed()?),
            (Domain::Flag, ParamField::Flag(field)) => *field = Some(self.flag()?),
            (Domain::Texts { count, bytes }, ParamField::Texts(field)) => {
                *field = self.texts(*count, *bytes)?;
            }
            (Domain::Tokens, ParamField::Tokens(field)) => field.extend(self.tokens()?),
            (Domain::Biases { count, each }, ParamField::Biases(field)) => {
                *field = self.biases(*count, |bias| each.contains(bias))?;
            }
            _ => return None,
        }
        Some(())
    }

    /// An integer within `i128`, which holds every integer of 64 bits of either sign.
    fn integer(self) -> Option<i128> {
        match self.value {
            Value::Number(number) => {
                let exact = number.as_i64().map(i128::from);
                let exact = exact.or_else(|| number.as_u64().map(i128::from));
                let whole = |x: &f64| x.fract() == 0.0 && x.abs() <= WHOLE_MAX;
                #[allow(clippy::cast_possible_truncation, reason = "it is whole and small")]
                exact.or_else(|| number.as_f64().filter(whole).map(|x| x as i128))
            }
            Value::String(text) if self.coercion == JsonCoercion::FromText => {
                text.trim().parse().ok()
            }
            _ => None,
        }
    }

    fn count(self, least: i64, most: u32) -> Option<u32> {
        let number = self
            .integer()
            .filter(|number| *number >= i128::from(least))?;
        if number < 0 {
            // The way in which some protocols write "off".
            return Some(0);
        }
        match u32::try_from(number) {
            Ok(number) => (number <= most).then_some(number),
            // Triton's inputs have 64 bits; what no count reaches is no limit.
            Err(_) => (most == u32::MAX && self.coercion == JsonCoercion::FromText).then_some(most),
        }
    }

    fn number(self) -> Option<f32> {
        let number = match self.value {
            Value::String(text) if self.coercion == JsonCoercion::FromText => {
                text.trim().parse().ok()
            }
            other => other.as_f64(),
        };
        #[allow(clippy::cast_possible_truncation, reason = "parameters have 32 bits")]
        number.map(|number: f64| number as f32)
    }

    fn seed(self) -> Option<u64> {
        // Under both coercions: proto3 writes 64-bit integers as strings in JSON.
        let text = self
            .value
            .as_str()
            .and_then(|text| text.trim().parse().ok());
        text.or_else(|| u64::try_from(self.integer()?).ok())
    }

    fn flag(self) -> Option<bool> {
        match (self.value, self.coercion) {
            (Value::Bool(flag), _) => Some(*flag),
            (Value::String(text), JsonCoercion::FromText) => text.parse().ok(),
            _ => None,
        }
    }

    fn texts(self, count: usize, bytes: usize) -> Option<Vec<String>> {
        let none = |text: &&str| text.is_empty() && self.coercion == JsonCoercion::FromText;
        let list: Vec<&str> = match self.value {
            // A single text for a list of one, as OpenAI's `stop` allows.
            Value::String(one) => vec![one],
            Value::Array(list) => list.iter().map(Value::as_str).collect::<Option<_>>()?,
            _ => return None,
        };
        let list: Vec<String> = list
            .into_iter()
            .filter(|text| !none(text))
            .map(str::to_owned)
            .collect();
        let fits = |text: &String| (1..=bytes).contains(&text.len());
        (list.len() <= count && list.iter().all(fits)).then_some(list)
    }

    /// Each token becomes a sequence of its own.
    fn tokens(self) -> Option<Vec<Vec<Token>>> {
        let id = |value| Self { value, ..self }.integer();
        let list = self.value.as_array()?.iter();
        list.map(|value| Some(vec![Token::try_from(id(value)?).ok()?]))
            .collect()
    }

    fn biases(self, count: usize, in_range: impl Fn(f32) -> bool) -> Option<Arc<[(Token, f32)]>> {
        // Bounded while it is read: the text was a single value to whoever bounded the request.
        let bounds = JsonBounds {
            values: count.saturating_add(8),
            entries: count,
        };
        let text = self.value.as_str();
        let text = text.filter(|_| self.coercion == JsonCoercion::FromText);
        let read = text.and_then(|text| bounded_json::read(text.as_bytes(), bounds).ok());
        let object = read.as_ref().unwrap_or(self.value).as_object()?;
        // An object that did not come as text was parsed under the wider bounds of its request.
        if object.len() > count {
            return None;
        }
        let bias = |value| {
            // Only the whole parameter may be a text; numbers within it have their JSON type.
            let strict = JsonCoercion::Strict;
            let number = JsonParam {
                value,
                coercion: strict,
            }
            .number();
            number.filter(|number| in_range(*number))
        };
        object
            .iter()
            .map(|(id, value)| Some((id.parse().ok()?, GenerationParams::bias(bias(value)?))))
            .collect()
    }
}

/// 2^53: above it, not every integer is a double.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
