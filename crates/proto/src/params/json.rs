//! Generation parameters as JSON: read by name, and written for other servers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::{
    BIAS_TEXT_BYTES_MAX, BIAS_TEXTS_MAX, Domain, FORBIDDING, GenerationParams, Interval,
    LORA_USES_MAX, LoraName, LoraUse, PARAMS, ParamError, ParamField, ParamRanges, ParamSpec,
    SamplerOrder, SamplerStep, lora,
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
                ParamField::Window(value) => value.map(Value::from),
                ParamField::Number(value) => value.map(float_to_json),
                ParamField::Seed(value) => value.map(Value::from),
                ParamField::Flag(value) => value.map(Value::from),
                ParamField::Texts(texts) => {
                    (!texts.is_empty()).then(|| std::mem::take(texts).into())
                }
                ParamField::OptionalTexts(texts) => texts.take().map(Value::from),
                ParamField::Samplers(order) => order.map(|order| {
                    let names = order.steps().iter().map(|step| step.name());
                    names.collect()
                }),
                ParamField::Lora(uses) => uses.as_ref().map(|uses| lora_to_json(uses)),
                ParamField::Tokens(stops) => {
                    let single = |stop: &Vec<Token>| match stop[..] {
                        [token] => Some(Value::from(token)),
                        _ => None,
                    };
                    let tokens: Option<Vec<Value>> = stops.iter().map(single).collect();
                    let tokens = tokens?;
                    (!tokens.is_empty()).then_some(Value::Array(tokens))
                }
                ParamField::Biases { tokens, texts } => biases_to_json(tokens, texts),
            };
            out.extend(value.map(|value| (param.name.to_owned(), value)));
        }
        Some(out)
    }
}

/// An object by token id, as all servers know it, with the sum of each token's biases. With texts among the keys, or a
/// sum that no bias may have, a list of pairs: in it a text of digits stays a text, and a token may occur again.
fn biases_to_json(tokens: &[(Token, f32)], texts: &[(String, f32)]) -> Option<Value> {
    // Minus infinity has no JSON form; it is what -100 and below stand for (D-20).
    let written = |bias: f32| float_to_json(bias.max(FORBIDDING));
    let mut sums: BTreeMap<Token, f32> = BTreeMap::new();
    for (id, bias) in tokens {
        *sums.entry(*id).or_default() += bias;
    }
    // A finite sum of -100 and below would forbid the token there.
    let range = Interval::closed(FORBIDDING, -FORBIDDING);
    let fits = |sum: f32| {
        sum == f32::NEG_INFINITY || range.contains(sum) && GenerationParams::bias(sum) == sum
    };
    // One bias of each token is written as it is, also where it is out of the range.
    let are_sums = sums.len() < tokens.len();
    if texts.is_empty() && !(are_sums && sums.values().any(|sum| !fits(*sum))) {
        let biases = sums.into_iter();
        let object: Map<_, _> = biases
            .map(|(id, bias)| (id.to_string(), written(bias)))
            .collect();
        return (!object.is_empty()).then_some(Value::Object(object));
    }
    let tokens = tokens.iter();
    let tokens = tokens.map(|(id, bias)| Value::Array(vec![(*id).into(), written(*bias)]));
    let texts = texts.iter();
    let texts = texts.map(|(text, bias)| Value::Array(vec![text.as_str().into(), written(*bias)]));
    Some(tokens.chain(texts).collect())
}

/// Objects, as llama-server's clients send them.
#[must_use]
pub fn lora_to_json(uses: &[LoraUse]) -> Value {
    let object = |LoraUse { adapter, scale }: &LoraUse| {
        let named = match adapter {
            LoraName::Name(name) => ("name".to_owned(), Value::from(name.as_str())),
            LoraName::Index(index) => ("id".to_owned(), Value::from(*index)),
        };
        let scale = scale.map(|scale| ("scale".to_owned(), float_to_json(scale)));
        Value::Object([named].into_iter().chain(scale).collect())
    };
    uses.iter().map(object).collect()
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

impl<'a> JsonParam<'a> {
    fn read_into(self, domain: &Domain, field: ParamField<'_>) -> Option<()> {
        match (domain, field) {
            (Domain::Count { least, most }, ParamField::Count(field)) => {
                *field = Some(self.count(*least, *most)?);
            }
            (Domain::OneOf(values), ParamField::Count(field)) => {
                let value = self.integer().and_then(|value| u32::try_from(value).ok())?;
                *field = Some(values.contains(&value).then_some(value)?);
            }
            (Domain::Window, ParamField::Window(field)) => {
                let window = self.integer().filter(|window| *window >= -1)?;
                *field = Some(i32::try_from(window).ok()?);
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
            (Domain::Texts { count, bytes }, ParamField::OptionalTexts(field)) => {
                let list = self.list_in_text(*count, 1)?;
                let list = JsonParam {
                    value: &list,
                    ..self
                };
                let texts = list.texts(*count, *bytes)?;
                if !texts.is_empty() || list.is_empty_list() {
                    *field = Some(texts);
                }
            }
            (Domain::Samplers, ParamField::Samplers(field)) => {
                let list = self.list_in_text(SamplerStep::ALL.len(), 1)?;
                let list = JsonParam {
                    value: &list,
                    ..self
                };
                let order = list.samplers()?;
                if !order.steps().is_empty() || list.is_empty_list() {
                    *field = Some(order);
                }
            }
            (Domain::Lora, ParamField::Lora(field)) => {
                // An object counts eight, its members one each, and the key is part of its member.
                let list = self.list_in_text(LORA_USES_MAX, 10)?;
                let list = JsonParam {
                    value: &list,
                    ..self
                };
                // An empty text is what clients of Triton send for "not set". As one of several adapters it is none.
                let unset =
                    self.coercion == JsonCoercion::FromText && self.value.as_str() == Some("");
                if !unset {
                    *field = Some(list.lora()?);
                }
            }
            (Domain::Tokens, ParamField::Tokens(field)) => field.extend(self.tokens()?),
            (Domain::Biases { count, each }, ParamField::Biases { tokens, texts }) => {
                (*tokens, *texts) = self.biases(*count, |bias| each.contains(bias))?;
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

    /// The list that a text has in JSON, in a parameter that can only be a string; another value as it is. A text that
    /// begins as a list and is none is refused: taken for the one element, nobody would notice. `each` bounds what an
    /// element counts ([`JsonBounds::values`]).
    fn list_in_text(self, count: usize, each: usize) -> Option<Cow<'a, Value>> {
        match self.value {
            Value::String(text)
                if self.coercion == JsonCoercion::FromText
                    && text.trim_start().starts_with('[') =>
            {
                let bounds = JsonBounds {
                    // The list itself, its elements, and one too many of these.
                    values: count.saturating_add(1).saturating_mul(each) + 1,
                    entries: count,
                };
                let list = bounded_json::read(text.as_bytes(), bounds).ok()?;
                Some(Cow::Owned(list))
            }
            other => Some(Cow::Borrowed(other)),
        }
    }

    /// Whether this is the list that means "none". Empty texts are what clients of Triton send for "not set".
    fn is_empty_list(self) -> bool {
        self.value.as_array().is_some_and(Vec::is_empty)
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

    /// The names of steps: a list, or in a parameter that can only be a string, with `;` or `,` between them.
    fn samplers(self) -> Option<SamplerOrder> {
        match self.value {
            Value::Array(list) => {
                // A name that is no string is unknown, as one that no step has.
                let texts = list.iter().map(|name| name.as_str().unwrap_or("?"));
                if self.coercion == JsonCoercion::FromText {
                    return SamplerOrder::of_names(texts.flat_map(listed));
                }
                SamplerOrder::of_names(texts)
            }
            Value::String(text) if self.coercion == JsonCoercion::FromText => {
                SamplerOrder::of_names(listed(text))
            }
            _ => None,
        }
    }

    /// Adapters: one name, or a list of names and objects.
    fn lora(self) -> Option<Vec<LoraUse>> {
        let list = match self.value {
            Value::Array(list) => list.as_slice(),
            one @ Value::String(_) => std::slice::from_ref(one),
            _ => return None,
        };
        // What did not come as text was parsed under the wider bounds of its request, so it is counted here.
        let uses: Vec<_> = list
            .iter()
            .take(LORA_USES_MAX + 1)
            .map(lora_use)
            .collect::<Option<_>>()?;
        lora::are_sound(&uses).then_some(uses)
    }

    /// Biases by token id and by text: an object whose keys are ids if they are whole numbers, or a list of pairs, as
    /// llama-server takes them.
    fn biases(self, count: usize, in_range: impl Fn(f32) -> bool) -> Option<ReadBiases> {
        // Bounded while it is read: the text was a single value to whoever bounded the request.
        let bounds = JsonBounds {
            // A pair has three values: itself, its key and its bias.
            values: count.saturating_mul(3).saturating_add(8),
            entries: count,
        };
        let text = self.value.as_str();
        let text = text.filter(|_| self.coercion == JsonCoercion::FromText);
        let read = text.and_then(|text| bounded_json::read(text.as_bytes(), bounds).ok());
        let mut biases = BiasReader {
            in_range,
            tokens: Vec::new(),
            texts: Vec::new(),
        };
        // What did not come as text was parsed under the wider bounds of its request, so it is counted here.
        match read.as_ref().unwrap_or(self.value) {
            Value::Object(object) if object.len() <= count => {
                for (key, value) in object {
                    // An integer is meant as an id, and as a text its bias would go to other tokens. Any other key is a
                    // text: "+5" too, which would be read as a number.
                    if is_integer(key) {
                        biases.add_token(key.parse().ok()?, value)?;
                    } else {
                        biases.add_text(key, value)?;
                    }
                }
            }
            Value::Array(list) if list.len() <= count => {
                for pair in list {
                    match pair.as_array()?.as_slice() {
                        [Value::String(text), value] => biases.add_text(text, value)?,
                        [id, value] => {
                            let coercion = JsonCoercion::Strict;
                            let id = JsonParam {
                                value: id,
                                coercion,
                            }
                            .integer()?;
                            biases.add_token(Token::try_from(id).ok()?, value)?;
                        }
                        _ => return None,
                    }
                }
            }
            _ => return None,
        }
        Some((biases.tokens.into(), biases.texts))
    }
}

/// A name, or an object with a name or llama-server's `id`, and perhaps a scale. Members of other names are refused: a
/// misspelt scale would be another answer.
fn lora_use(value: &Value) -> Option<LoraUse> {
    // Only the whole parameter may be a text; what is within it has its JSON type.
    let coercion = JsonCoercion::Strict;
    let object = match value {
        Value::String(name) => return Some(LoraUse::named(name)),
        other => other.as_object()?,
    };
    let mut adapter = None;
    let mut scale = None;
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let member = JsonParam { value, coercion };
        match &**name {
            // Only one of the two.
            "name" | "id" if adapter.is_some() => return None,
            "name" => adapter = Some(LoraName::Name(value.as_str()?.to_owned())),
            "id" => adapter = Some(LoraName::Index(u32::try_from(member.integer()?).ok()?)),
            "scale" => scale = Some(member.number()?),
            _ => return None,
        }
    }
    let adapter = adapter?;
    Some(LoraUse { adapter, scale })
}

fn listed(text: &str) -> impl Iterator<Item = &str> {
    let names = text.split([';', ',']).map(str::trim);
    names.filter(|name| !name.is_empty())
}

fn is_integer(key: &str) -> bool {
    let digits = key.strip_prefix('-').unwrap_or(key);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Biases by token id, and by text.
type ReadBiases = (Arc<[(Token, f32)]>, Vec<(String, f32)>);

/// Collects the biases of one parameter.
struct BiasReader<F> {
    in_range: F,
    tokens: Vec<(Token, f32)>,
    texts: Vec<(String, f32)>,
}

impl<F: Fn(f32) -> bool> BiasReader<F> {
    fn add_token(&mut self, token: Token, value: &Value) -> Option<()> {
        let bias = self.bias(value)?;
        self.tokens.push((token, bias));
        Some(())
    }

    fn add_text(&mut self, text: &str, value: &Value) -> Option<()> {
        let fits = (1..=BIAS_TEXT_BYTES_MAX).contains(&text.len());
        let bias = self.bias(value).filter(|_| fits)?;
        self.texts.push((text.to_owned(), bias));
        (self.texts.len() <= BIAS_TEXTS_MAX).then_some(())
    }

    /// A number, or `false`, which forbids the token.
    fn bias(&self, value: &Value) -> Option<f32> {
        if *value == Value::Bool(false) {
            return Some(f32::NEG_INFINITY);
        }
        // Only the whole parameter may be a text; numbers within it have their JSON type.
        let coercion = JsonCoercion::Strict;
        let number = JsonParam { value, coercion }.number();
        let number = number.filter(|number| (self.in_range)(*number));
        number.map(GenerationParams::bias)
    }
}

/// 2^53: above it, not every integer is a double.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
