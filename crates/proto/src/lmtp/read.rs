//! The members of client messages, checked.
//!
//! Owns: which members there are, their types and ranges, and the order in which they are looked at (LM-302). Refuses to
//! know: streams and what else is live.

use std::borrow::Cow;
use std::sync::Arc;

use super::json::{Malformed, Value, is_space, value};
use super::{Fault, Generate, Id, Limits, Model, Reason, Score};
use crate::steer::Token;

/// One `TYPE JSON` unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command<'a> {
    /// The type, whatever it is.
    pub(super) word: &'a str,
    /// The payload, whatever it is.
    pub(super) payload: Value<'a>,
}

/// Reads the message at the beginning of `text`, and returns it with the messages behind it (LM-201, LM-204).
pub(super) fn command(text: &str) -> Result<(Command<'_>, &str), Malformed> {
    let (word, rest) = text
        .split_once(' ')
        .ok_or(Malformed("expected a type, one space, and JSON"))?;
    if word.is_empty() || word.bytes().any(is_space) {
        return Err(Malformed("expected a type, one space, and JSON"));
    }
    let (payload, rest) = value(rest)?;
    let next = rest.trim_start_matches(|c: char| u8::try_from(c).is_ok_and(is_space));
    if !next.is_empty() && !rest[..rest.len() - next.len()].contains('\n') {
        return Err(Malformed("something stands behind the value"));
    }
    Ok((Command { word, payload }, next))
}

/// The members of a payload by name; of repeated ones the last (LM-205).
#[derive(Debug)]
pub(super) struct Members<'a> {
    known: [Option<Value<'a>>; NAMES.len()],
    /// The first unknown name, and how many there are.
    unknown: Option<(Cow<'a, str>, u64)>,
}

const NAMES: [&str; 22] = [
    "stream_id",
    "model",
    "prompt",
    "scored",
    "max_tokens",
    "temperature",
    "top_logprobs",
    "logit_bias",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
    "seed",
    "stop_tokens",
    "stop",
    "min_tokens",
    "ignore_eos",
    "num_samples",
    "data",
];

impl<'a> Members<'a> {
    /// The members of an object; nothing else has any.
    pub(super) fn of(payload: Value<'a>) -> Option<Self> {
        let mut members = Self {
            known: [None; NAMES.len()],
            unknown: None,
        };
        for (name, value) in payload.members()? {
            if let Some(at) = NAMES.iter().position(|known| *known == name) {
                members.known[at] = Some(value);
            } else {
                let (_, count) = members.unknown.get_or_insert((name, 0));
                *count += 1;
            }
        }
        Some(members)
    }

    /// A member that is there and not null.
    fn get(&self, name: &str) -> Option<Value<'a>> {
        let at = NAMES.iter().position(|known| *known == name)?;
        self.known[at].filter(|value| !value.is_null())
    }

    /// How many unknown members there are.
    pub(super) fn unknown(&self) -> u64 {
        self.unknown.as_ref().map_or(0, |(_, count)| *count)
    }

    /// The id to echo. JSON alone can be echoed: the bare words cannot, nor raw line ends inside a list.
    pub(super) fn id(&self, limits: &Limits) -> Result<Id, Fault> {
        let value = self
            .get("stream_id")
            .ok_or_else(|| Fault::new(Reason::MissingRequiredParameter, "'stream_id'"))?;
        let json = value.as_str();
        if json.len() > limits.max_id_bytes {
            let message = format!("'stream_id' has more than {} bytes", limits.max_id_bytes);
            return Err(Fault::new(Reason::InvalidValue, message));
        }
        let strict = serde_json::from_str::<serde::de::IgnoredAny>(json).is_ok();
        if !strict || json.bytes().any(|byte| byte < b' ') {
            let message = "'stream_id' must be JSON on one line, without NaN and Infinity";
            return Err(Fault::new(Reason::InvalidValue, message));
        }
        Ok(Id::new(json))
    }

    /// The model's name, if one is given.
    pub(super) fn model(&self, limits: &Limits) -> Result<Option<Cow<'a, str>>, Fault> {
        let Some(value) = self.get("model") else {
            return Ok(None);
        };
        let name = value
            .string()
            .ok_or_else(|| wrong_type("model", "a string"))?;
        if name.len() > limits.max_model_bytes {
            return Err(Fault::model(Reason::ModelNotFound));
        }
        Ok(Some(name))
    }

    /// A number in range, as an f32; `None` where the member is absent.
    fn number(
        &self,
        name: &str,
        range: &'static str,
        is_in: impl Fn(f32) -> bool,
    ) -> Result<Option<f32>, Fault> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value.number().ok_or_else(|| wrong_type(name, "a number"))? as f32;
        if is_in(number) {
            Ok(Some(number))
        } else {
            Err(out_of_range(name, range))
        }
    }

    /// An integer in range; `None` where the member is absent.
    fn integer(
        &self,
        name: &str,
        range: &'static str,
        is_in: impl Fn(i128) -> bool,
    ) -> Result<Option<i128>, Fault> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = integer(value).ok_or_else(|| wrong_type(name, "an integer"))?;
        let number = number.map_err(|_| out_of_range(name, range))?;
        if is_in(number) {
            Ok(Some(number))
        } else {
            Err(out_of_range(name, range))
        }
    }

    /// A count, which may be larger than anything here can be.
    fn count(&self, name: &str, range: &'static str, least: i128) -> Result<Option<u32>, Fault> {
        let number = self.integer(name, range, |number| number >= least)?;
        Ok(number.map(|number| u32::try_from(number.max(0)).unwrap_or(u32::MAX)))
    }

    /// Token ids; `[null]` is `[]` in a prompt (LM-303).
    fn tokens(&self, name: &str, model: &Model) -> Result<Vec<Token>, Fault> {
        let value = self.get(name).ok_or_else(|| {
            Fault::new(
                Reason::MissingRequiredParameter,
                format!("'{name}' is required: a list of token ids"),
            )
        })?;
        let elements = value
            .elements()
            .ok_or_else(|| wrong_type(name, "a list of token ids"))?;
        let mut ids = Vec::new();
        for (index, element) in elements.enumerate() {
            if name == "prompt"
                && element.is_null()
                && value.elements().into_iter().flatten().nth(1).is_none()
            {
                return Ok(Vec::new());
            }
            ids.push(token(name, index, element, model)?);
        }
        Ok(ids)
    }
}

/// GENERATE.
pub(super) fn generate(
    members: &Members<'_>,
    model: &Model,
    limits: &Limits,
    strict: bool,
) -> Result<Generate, Fault> {
    let default = Generate::default();
    let prompt = opened(members.tokens("prompt", model)?, model)?;
    let penalty = |number: f32| (-100.0..=100.0).contains(&number);
    let generate = Generate {
        max_tokens: members
            .count("max_tokens", "at least 1", 1)?
            .unwrap_or(default.max_tokens),
        temperature: members
            .number("temperature", "0 to 100", |t| (0.0..=100.0).contains(&t))?
            .unwrap_or(default.temperature),
        top_logprobs: top_logprobs(members, limits)?.unwrap_or(default.top_logprobs),
        logit_bias: biases(members, model, limits)?,
        top_p: members
            .number("top_p", "above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?
            .unwrap_or(default.top_p),
        top_k: members
            .count("top_k", "at least -1", -1)?
            .unwrap_or(default.top_k),
        min_p: members
            .number("min_p", "at least 0 and below 1", |p| {
                (0.0..1.0).contains(&p)
            })?
            .unwrap_or(default.min_p),
        repetition_penalty: members
            .number("repetition_penalty", "above 0 and at most 10", |p| {
                p > 0.0 && p <= 10.0
            })?
            .unwrap_or(default.repetition_penalty),
        presence_penalty: members
            .number("presence_penalty", "-100 to 100", penalty)?
            .unwrap_or(default.presence_penalty),
        frequency_penalty: members
            .number("frequency_penalty", "-100 to 100", penalty)?
            .unwrap_or(default.frequency_penalty),
        seed: seed(members)?,
        stop_tokens: stop_tokens(members, model, limits)?,
        stop: stops(members, model, limits)?,
        min_tokens: members
            .count("min_tokens", "at least 0", 0)?
            .unwrap_or(default.min_tokens),
        ignore_eos: ignore_eos(members)?,
        priority: default.priority,
        prompt,
    };
    match members.integer("num_samples", "1", |_| true)? {
        None | Some(1) => {}
        Some(_) => {
            let message = "'num_samples' other than 1 is not supported; send several messages";
            return Err(Fault::new(Reason::UnsupportedOperation, message));
        }
    }
    if let Some((name, _)) = members.unknown.as_ref().filter(|_| strict) {
        let name = super::write::cut(name, 64);
        let message = format!("unknown member '{name}'");
        return Err(Fault::new(Reason::UnknownParameter, message));
    }
    // D-23.
    fits(
        generate.prompt.len() < model.max_context,
        generate.prompt.len(),
        model,
    )?;
    Ok(generate)
}

/// SCORE; other members are ignored.
pub(super) fn score(members: &Members<'_>, model: &Model) -> Result<Score, Fault> {
    let prompt = members.tokens("prompt", model)?;
    let scored = members.tokens("scored", model)?;
    if scored.is_empty() {
        return Err(out_of_range("scored", "a list with at least one token id"));
    }
    let length = prompt.len() + scored.len();
    fits(length <= model.max_context, length, model)?;
    Ok(Score { prompt, scored })
}

/// The prompt that generation starts from: an empty one begins a text (LM-303).
fn opened(prompt: Vec<Token>, model: &Model) -> Result<Vec<Token>, Fault> {
    if !prompt.is_empty() {
        return Ok(prompt);
    }
    let first = model.bos.or_else(|| model.eos.first().copied());
    let first = first.ok_or_else(|| {
        let message = "'prompt' must not be empty: the model has no token that begins a text";
        Fault::new(Reason::InvalidValue, message)
    })?;
    Ok(vec![first])
}

fn fits(does: bool, length: usize, model: &Model) -> Result<(), Fault> {
    if does {
        return Ok(());
    }
    let message = format!(
        "{length} tokens do not fit the context of {} tokens; shorten the prompt",
        model.max_context
    );
    Err(Fault::new(Reason::ContextLengthExceeded, message))
}

fn top_logprobs(members: &Members<'_>, limits: &Limits) -> Result<Option<u32>, Fault> {
    let count = members.count("top_logprobs", "0 or more", 0)?;
    match count {
        Some(count) if count > limits.max_top_logprobs => {
            let message = format!("'top_logprobs' must be at most {}", limits.max_top_logprobs);
            Err(Fault::new(Reason::InvalidValue, message))
        }
        count => Ok(count),
    }
}

/// Ascending, of each id the last, ids outside the vocabulary left out (LM-305).
fn biases(
    members: &Members<'_>,
    model: &Model,
    limits: &Limits,
) -> Result<Arc<[(Token, f32)]>, Fault> {
    let Some(value) = members.get("logit_bias") else {
        return Ok(Arc::default());
    };
    let refused = |what: &'static str| Fault::new(Reason::InvalidValue, what);
    let entries = value
        .members()
        .ok_or_else(|| refused("'logit_bias' must be an object from token ids to numbers"))?;
    let mut biases = Vec::new();
    for (at, (key, bias)) in entries.enumerate() {
        if at == limits.max_biases {
            return Err(refused("'logit_bias' has too many entries"));
        }
        let digits = key.strip_prefix('-').unwrap_or(&key);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refused("'logit_bias' has a key that is no integer"));
        }
        let bias = bias
            .number()
            .filter(|bias| !bias.is_nan() && *bias < f64::INFINITY)
            .ok_or_else(|| refused("'logit_bias' has a value that is no number below Infinity"))?;
        if let Some(token) = key.parse().ok().filter(|token| *token < model.vocab_size) {
            // What only f64 can hold is as good as the largest f32.
            biases.push((token, (bias as f32).min(f32::MAX)));
        }
    }
    // Stable: of repeated ids the last stands last, and is kept.
    biases.sort_by_key(|(token, _)| *token);
    biases.dedup_by(|later, kept| {
        let same = later.0 == kept.0;
        if same {
            kept.1 = later.1;
        }
        same
    });
    let forbidden = biases.iter().filter(|(_, bias)| *bias == f32::NEG_INFINITY);
    if forbidden.count() == model.vocab_size as usize {
        let message = "'logit_bias' forbids every token; allow at least one";
        return Err(Fault::new(Reason::ConstraintFailed, message));
    }
    Ok(biases.into())
}

/// Signed and unsigned 64 bits alike (D-20).
fn seed(members: &Members<'_>) -> Result<Option<u64>, Fault> {
    let bits = |number: i128| {
        let negative = |_| i64::try_from(number).map(i64::cast_unsigned);
        u64::try_from(number).or_else(negative).ok()
    };
    let in_range = |number| bits(number).is_some();
    let number = members.integer("seed", "64 bits, signed or not", in_range)?;
    Ok(number.and_then(bits))
}

fn ignore_eos(members: &Members<'_>) -> Result<bool, Fault> {
    match members.get("ignore_eos") {
        None => Ok(false),
        Some(value) => value
            .boolean()
            .ok_or_else(|| wrong_type("ignore_eos", "true or false")),
    }
}

fn stop_tokens(
    members: &Members<'_>,
    model: &Model,
    limits: &Limits,
) -> Result<Vec<Vec<Token>>, Fault> {
    let name = "stop_tokens";
    let Some(value) = members.get(name) else {
        return Ok(Vec::new());
    };
    let lists = value
        .elements()
        .ok_or_else(|| wrong_type(name, "a list of token ids or of lists of them"))?;
    let mut stops = Vec::new();
    for (index, list) in lists.enumerate() {
        if index == limits.max_stop_lists {
            let wanted = format!("at most {} sequences", limits.max_stop_lists);
            return Err(out_of_range(name, &wanted));
        }
        let mut ids = Vec::new();
        match list.elements() {
            None => ids.push(token(name, index, list, model)?),
            Some(elements) => {
                for element in elements {
                    if ids.len() == limits.max_stop_ids {
                        let wanted = format!("sequences of at most {} ids", limits.max_stop_ids);
                        return Err(out_of_range(name, &wanted));
                    }
                    ids.push(token(name, index, element, model)?);
                }
            }
        }
        if ids.is_empty() {
            return Err(out_of_range(name, "sequences of at least one id"));
        }
        stops.push(ids);
    }
    Ok(stops)
}

fn stops(members: &Members<'_>, model: &Model, limits: &Limits) -> Result<Vec<String>, Fault> {
    let name = "stop";
    let wrong = || wrong_type(name, "a string or a list of strings");
    let Some(value) = members.get(name) else {
        return Ok(Vec::new());
    };
    let mut stops = Vec::new();
    if let Some(elements) = value.elements() {
        for element in elements {
            if stops.len() == limits.max_stops {
                let wanted = format!("at most {} strings", limits.max_stops);
                return Err(out_of_range(name, &wanted));
            }
            stops.push(element.string().ok_or_else(wrong)?.into_owned());
        }
    } else {
        stops.push(value.string().ok_or_else(wrong)?.into_owned());
    }
    let fits = |stop: &String| !stop.is_empty() && stop.len() <= limits.max_stop_bytes;
    if !stops.iter().all(fits) {
        let wanted = format!("strings of 1 to {} bytes", limits.max_stop_bytes);
        return Err(out_of_range(name, &wanted));
    }
    if !stops.is_empty() && model.tokenizer.is_none() {
        let message = "'stop' needs a tokenizer, and this model has none; send 'stop_tokens'";
        return Err(Fault::new(Reason::UnsupportedOperation, message));
    }
    Ok(stops)
}

/// One token id; `index` is its place, for the message.
fn token(name: &str, index: usize, value: Value<'_>, model: &Model) -> Result<Token, Fault> {
    let wrong = || {
        let message = format!("'{name}' must hold integers; index {index} is none");
        Fault::new(Reason::InvalidType, message)
    };
    let id = integer(value).ok_or_else(wrong)?.ok();
    let id = id.and_then(|id| Token::try_from(id).ok());
    id.filter(|id| *id < model.vocab_size).ok_or_else(|| {
        let last = model.vocab_size.saturating_sub(1);
        let message = format!("'{name}' must hold ids of 0 to {last}; index {index} is none");
        Fault::new(Reason::InvalidValue, message)
    })
}

/// The number is not finite, so it is no integer, but a number all the same.
struct NotFinite;

/// An integer, or a number that is beyond all; `None` for anything else.
fn integer(value: Value<'_>) -> Option<Result<i128, NotFinite>> {
    match value.integer() {
        Some(number) => Some(Ok(number)),
        None => (!value.number()?.is_finite()).then_some(Err(NotFinite)),
    }
}

fn wrong_type(name: &str, wanted: &str) -> Fault {
    Fault::new(Reason::InvalidType, format!("'{name}' must be {wanted}"))
}

fn out_of_range(name: &str, wanted: &str) -> Fault {
    Fault::new(Reason::InvalidValue, format!("'{name}' must be {wanted}"))
}

#[cfg(test)]
mod tests;
