//! Reads and validates the members of client messages.

mod controller;
mod members;

use std::sync::Arc;

use super::json::{BadJson, RawValue, is_space, value};
use super::message::MAX_TOKENS;
use super::{
    ConnectionLimits, GenerateRequest, LmtpError, LmtpModelInfo, LmtpReason, Score, StreamId,
};
use crate::bounded_json::{self, JsonBounds};
use crate::params::{
    BIAS_MOST, Domain, GenerationParams, Interval, JsonCoercion, LORA_USES_MAX, LoraUse,
    ParamField, ParamRanges, ParamSpec, SamplerOrder, SamplerStep,
};
use crate::steer::Token;

pub(super) use self::controller::controller;
pub(super) use self::members::{PayloadMembers, known_params};

/// One `TYPE JSON` unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClientCommand<'a> {
    /// The type, not validated.
    pub(super) word: &'a str,
    /// The payload, not validated.
    pub(super) payload: RawValue<'a>,
}

/// Reads the message at the beginning of `text`, and returns it with the rest of the text (LM-201, LM-204).
pub(super) fn command(text: &str) -> Result<(ClientCommand<'_>, &str), BadJson> {
    let (word, rest) = text
        .split_once(' ')
        .ok_or(BadJson("expected a type, one space, and JSON"))?;
    // With a tab or line end in the word, the space that was found is not the one behind the type (LM-201).
    if word.is_empty() || word.bytes().any(is_space) {
        return Err(BadJson("expected a type, one space, and JSON"));
    }
    let (payload, rest) = value(rest)?;
    let next = rest.trim_start_matches(|c: char| u8::try_from(c).is_ok_and(is_space));
    // Only a newline separates two messages (LM-204).
    if !next.is_empty() && !rest[..rest.len() - next.len()].contains('\n') {
        return Err(BadJson("there is text after the value"));
    }
    Ok((ClientCommand { word, payload }, next))
}

/// The member of an object with this name; the last of repeated ones wins (LM-205).
pub(super) fn member<'a>(object: RawValue<'a>, name: &str) -> Option<RawValue<'a>> {
    let members = object.members()?.filter(|(own, _)| own == name);
    members.last().map(|(_, value)| value)
}

/// Reads GENERATE.
pub(super) fn generate(
    members: &PayloadMembers<'_>,
    model: &LmtpModelInfo,
    limits: &ConnectionLimits,
    strict: bool,
    prompt: Vec<Token>,
) -> Result<GenerateRequest, LmtpError> {
    // What the request leaves to the model stays unset: the model may have defaults of its own.
    let mut wanted = GenerateRequest {
        prompt: opened(prompt, model)?,
        params: GenerationParams::default(),
        controller: None,
    };
    let ranges = ParamRanges {
        top_logprobs: limits.max_top_logprobs,
        ..ParamRanges::LMTP
    };
    for (param, name, value) in members.params() {
        match (param.field(&mut wanted.params), param.domain(&ranges)) {
            (ParamField::Count(field), Domain::Count { least, most }) => {
                *field = Some(count(name, value, least, most)?);
            }
            (ParamField::Count(field), domain @ Domain::OneOf(values)) => {
                let number = integer(value).ok_or_else(|| wrong_type(name, "an integer"))?;
                let number = number.ok().and_then(|number| u32::try_from(number).ok());
                let number = number.filter(|number| values.contains(number));
                *field = Some(number.ok_or_else(|| out_of_range(name, &domain.to_string()))?);
            }
            (ParamField::Window(field), _) => *field = Some(window(name, value)?),
            (ParamField::Number(field), Domain::Number(range)) => {
                *field = Some(number(name, value, range)?);
            }
            (ParamField::Samplers(field), domain) => {
                *field = Some(samplers(name, value, &domain)?);
            }
            (ParamField::Lora(field), domain) => *field = Some(adapters(name, value, &domain)?),
            (ParamField::OptionalTexts(field), Domain::Texts { count, bytes }) => {
                *field = Some(texts(name, value, model, (count, bytes))?);
            }
            (ParamField::Seed(field), _) => *field = Some(seed(name, value)?),
            (ParamField::Flag(field), _) => *field = members.flag(name)?,
            (ParamField::Texts(field), _) => {
                let most = (limits.max_stops, limits.max_stop_bytes);
                *field = texts(name, value, model, most)?;
            }
            (ParamField::Tokens(field), _) => *field = sequences(name, value, model, limits)?,
            // Texts are no keys here (LM-305).
            (ParamField::Biases { tokens, .. }, _) => *tokens = biases(value, model, limits)?,
            // A row has the domain of its field.
            (ParamField::Count(_) | ParamField::Number(_) | ParamField::OptionalTexts(_), _) => {}
        }
    }
    refuse_unsupported(members, strict)?;
    // These two also bound the items of the stream, so they are known before the model answers.
    let max_tokens = model.default_max_tokens.unwrap_or(MAX_TOKENS);
    wanted.params.max_tokens.get_or_insert(max_tokens);
    let top_logprobs = wanted.top_logprobs();
    wanted.params.top_logprobs = Some(top_logprobs);
    // After all members (LM-302). The prompt must leave room for at least one token (D-23).
    let length = wanted.prompt.len();
    fits(model, length, |context| length < context)?;
    Ok(wanted)
}

fn refuse_unsupported(members: &PayloadMembers<'_>, strict: bool) -> Result<(), LmtpError> {
    match members.integer("num_samples", "1", |_| true)? {
        None | Some(1) => {}
        Some(_) => {
            let message = "'num_samples' other than 1 is not supported; send several messages";
            return Err(LmtpError::new(LmtpReason::UnsupportedOperation, message));
        }
    }
    if let Some((name, _)) = members.unknown.as_ref().filter(|_| strict) {
        let name = super::write::cut(name, 64);
        let message = format!("unknown member '{name}'");
        return Err(LmtpError::new(LmtpReason::UnknownParameter, message));
    }
    Ok(())
}

/// Reads SCORE; members beside these are ignored.
pub(super) fn score(
    members: &PayloadMembers<'_>,
    model: &LmtpModelInfo,
    prompt: Vec<Token>,
) -> Result<Score, LmtpError> {
    let score = Score {
        prompt,
        scored: members.tokens("scored", model)?,
        top_logprobs: 0,
        lora: lora(members)?,
    };
    score.checked(model)
}

/// Reads the adapters of SCORE, which would have other scores without them.
pub(super) fn lora(members: &PayloadMembers<'_>) -> Result<Option<Vec<LoraUse>>, LmtpError> {
    let name = "lora";
    let value = members.value(name);
    let read = value.map(|value| adapters(name, value, &Domain::Lora));
    read.transpose()
}

impl Score {
    /// Checks that there is something to score, and that it fits into the context (LM-313).
    pub(super) fn checked(self, model: &LmtpModelInfo) -> Result<Self, LmtpError> {
        if self.scored.is_empty() {
            return Err(out_of_range("scored", "a list with at least one token id"));
        }
        let length = self.prompt.len() + self.scored.len();
        fits(model, length, |context| length <= context)?;
        Ok(self)
    }
}

/// Reads lists of token ids from one member.
pub(super) fn token_lists(
    members: &PayloadMembers<'_>,
    name: &str,
    model: &LmtpModelInfo,
    max: usize,
) -> Result<Vec<Vec<Token>>, LmtpError> {
    let wrong = || wrong_type(name, "a list of lists of token ids");
    let lists = members
        .value(name)
        .and_then(RawValue::elements)
        .ok_or_else(wrong)?;
    let mut all = Vec::new();
    for list in lists {
        if all.len() == max {
            return Err(out_of_range(name, &format!("at most {max} lists")));
        }
        let ids = list.elements().ok_or_else(wrong)?.zip(0..);
        let ids = ids.map(|(element, index)| token(name, index, element, model));
        all.push(ids.collect::<Result<_, _>>()?);
    }
    if all.is_empty() {
        return Err(out_of_range(name, "at least one list"));
    }
    Ok(all)
}

/// Reads a list of inclusive ranges as ascending tokens; ids outside the vocabulary are ignored (LM-945). The cost is
/// linear in the number of ranges and the vocabulary, however much ranges overlap.
pub(super) fn ranges(
    members: &PayloadMembers<'_>,
    name: &str,
    size: u32,
) -> Result<impl Iterator<Item = Token> + use<>, LmtpError> {
    let wrong = || wrong_type(name, "a list of [first, last]");
    let lists = members
        .value(name)
        .and_then(RawValue::elements)
        .ok_or_else(wrong)?;
    // How many ranges begin minus how many end at each id; the running sum below is the number of ranges around it.
    let mut changes = vec![0_i32; size as usize + 1];
    for list in lists {
        let ends: Option<Vec<_>> = list
            .elements()
            .ok_or_else(wrong)?
            .map(RawValue::integer)
            .collect();
        let Some([first, last]) = ends.as_deref() else {
            return Err(wrong());
        };
        // Both are at most the vocabulary's size, so they fit.
        let first = usize::try_from((*first).max(0)).unwrap_or(usize::MAX);
        let behind = usize::try_from(last.saturating_add(1).clamp(0, i128::from(size)));
        let behind = behind.unwrap_or_default();
        if first < behind {
            changes[first] += 1;
            changes[behind] -= 1;
        }
    }
    let inside = changes.into_iter().scan(0, |open, change| {
        *open += change;
        Some(*open > 0)
    });
    let inside = (0..size).zip(inside).filter(|(_, inside)| *inside);
    Ok(inside.map(|(token, _)| token))
}

/// Reads an id to echo. Only strict JSON can be echoed: the bare words and raw line ends inside a list cannot.
pub(super) fn id(value: RawValue<'_>, limits: &ConnectionLimits) -> Result<StreamId, LmtpError> {
    let json = value.as_str();
    if json.len() > limits.max_id_bytes {
        let message = format!("'stream_id' has more than {} bytes", limits.max_id_bytes);
        return Err(LmtpError::new(LmtpReason::InvalidValue, message));
    }
    // JSON allows line ends inside a list, but on a line transport one would split the answer.
    let strict = serde_json::from_str::<serde::de::IgnoredAny>(json).is_ok();
    if !strict || json.bytes().any(|byte| byte < b' ') {
        let message = "'stream_id' must be JSON on one line, without NaN and Infinity";
        return Err(LmtpError::new(LmtpReason::InvalidValue, message));
    }
    Ok(StreamId::new(json))
}

/// The prompt that generation starts from: an empty one becomes BOS (LM-303).
fn opened(prompt: Vec<Token>, model: &LmtpModelInfo) -> Result<Vec<Token>, LmtpError> {
    // No BOS is added: LMQL has put it into its prompts already (section 13).
    if !prompt.is_empty() {
        return Ok(prompt);
    }
    let first = model.bos.or_else(|| model.eos.first().copied());
    let first = first.ok_or_else(|| {
        let message = "'prompt' must not be empty: the model has no token that begins a text";
        LmtpError::new(LmtpReason::InvalidValue, message)
    })?;
    Ok(vec![first])
}

/// Checks a length against the context. If the context is not known, the upstream server checks it.
fn fits(
    model: &LmtpModelInfo,
    length: usize,
    does: impl FnOnce(usize) -> bool,
) -> Result<(), LmtpError> {
    let Some(context) = model.max_context.filter(|context| !does(*context)) else {
        return Ok(());
    };
    let message =
        format!("{length} tokens do not fit the context of {context} tokens; shorten the prompt");
    Err(LmtpError::new(LmtpReason::ContextLengthExceeded, message))
}

/// Reads biases: ascending, the last one of repeated ids, without ids outside the vocabulary (LM-305).
fn biases(
    value: RawValue<'_>,
    model: &LmtpModelInfo,
    limits: &ConnectionLimits,
) -> Result<Arc<[(Token, f32)]>, LmtpError> {
    let refused = |what: &'static str| LmtpError::new(LmtpReason::InvalidValue, what);
    let entries = value
        .members()
        .ok_or_else(|| refused("'logit_bias' must be an object from token ids to numbers"))?;
    let mut biases = Vec::new();
    for (at, (key, bias)) in entries.enumerate() {
        // Counts all entries and not only known ids: the bound is on the work.
        if at == limits.max_biases {
            return Err(refused("'logit_bias' has too many entries"));
        }
        // A negative id is an integer outside the vocabulary, so it is ignored and not refused (LM-305).
        let digits = key.strip_prefix('-').unwrap_or(&key);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refused("'logit_bias' must have integers as keys"));
        }
        let bias = bias
            .number()
            .filter(|bias| !bias.is_nan() && *bias < f64::INFINITY)
            .ok_or_else(|| refused("'logit_bias' must have numbers below Infinity as values"))?;
        if let Some(token) = key.parse().ok().filter(|token| model.has_token(*token)) {
            // Any number is accepted (LM-305), and one above what the core takes counts as that.
            biases.push((token, (bias as f32).min(BIAS_MOST)));
        }
    }
    // Sorted once, because an object may have a million entries (LM-1307). The sort is stable: of repeated ids the last
    // one sent stays last, and is retained.
    biases.sort_by_key(|(token, _)| *token);
    biases.dedup_by(|later, retained| {
        let same = later.0 == retained.0;
        if same {
            retained.1 = later.1;
        }
        same
    });
    // Exact, because by now each id is in the vocabulary and occurs once.
    let forbidden = biases.iter().filter(|(_, bias)| *bias == f32::NEG_INFINITY);
    if model.is_all(forbidden.count()) {
        let message = "'logit_bias' forbids every token; allow at least one";
        return Err(LmtpError::new(LmtpReason::ConstraintFailed, message));
    }
    Ok(biases.into())
}

/// Reads a count. One beyond the type is no limit, if there is no maximum; a negative one that `least` allows means off,
/// as 0 does.
pub(super) fn count(
    name: &str,
    value: RawValue<'_>,
    least: i64,
    most: u32,
) -> Result<u32, LmtpError> {
    let number = integer(value).ok_or_else(|| wrong_type(name, "an integer"))?;
    let number = number.ok().filter(|number| *number >= least.into());
    let number = number.ok_or_else(|| match most {
        u32::MAX => out_of_range(name, &format!("at least {least}")),
        _ => out_of_range(name, &format!("{least} or more")),
    })?;
    let count = u32::try_from(number.max(0)).unwrap_or(u32::MAX);
    if count > most {
        return Err(out_of_range(name, &format!("at most {most}")));
    }
    Ok(count)
}

fn number(name: &str, value: RawValue<'_>, range: Interval) -> Result<f32, LmtpError> {
    // Checked as the f32 that is used: a double just outside of a range may round into it.
    let number = value.number().ok_or_else(|| wrong_type(name, "a number"))? as f32;
    if range.contains(number) {
        Ok(number)
    } else {
        Err(out_of_range(name, &format!("{range:#}")))
    }
}

/// Reads a number of tokens, or -1 for all.
fn window(name: &str, value: RawValue<'_>) -> Result<i32, LmtpError> {
    let number = integer(value).ok_or_else(|| wrong_type(name, "an integer"))?;
    let number = number.ok().and_then(|number| i32::try_from(number).ok());
    number
        .filter(|number| *number >= -1)
        .ok_or_else(|| out_of_range(name, &format!("-1 to {}", i32::MAX)))
}

/// Reads the names of sampling steps.
fn samplers(name: &str, value: RawValue<'_>, domain: &Domain) -> Result<SamplerOrder, LmtpError> {
    let wrong = || wrong_type(name, "a list of strings");
    let names = value.elements().ok_or_else(wrong)?;
    let mut read = Vec::new();
    // One more than there are steps shows that one of them is repeated, whatever follows.
    for step in names.take(SamplerStep::ALL.len() + 1) {
        read.push(step.string().ok_or_else(wrong)?);
    }
    let order = SamplerOrder::of_names(read.iter().map(|name| &**name));
    order.ok_or_else(|| out_of_range(name, &domain.to_string()))
}

/// Reads names of adapters and their scales.
fn adapters(name: &str, value: RawValue<'_>, domain: &Domain) -> Result<Vec<LoraUse>, LmtpError> {
    let wrong = || out_of_range(name, &domain.to_string());
    let bounds = JsonBounds {
        // An object counts eight and each of its members one; one entry too many is refused as such.
        values: (LORA_USES_MAX + 1) * 10 + 1,
        entries: LORA_USES_MAX,
    };
    let value = bounded_json::read(value.as_str().as_bytes(), bounds).map_err(|_| wrong())?;
    let param = ParamSpec::named(name).ok_or_else(wrong)?;
    let mut params = GenerationParams::default();
    let set = params.set_json(param, &value, &ParamRanges::LMTP, JsonCoercion::Strict);
    set.map_err(|_| wrong())?;
    Ok(params.lora.unwrap_or_default())
}

/// Reads a seed; signed and unsigned 64-bit numbers are accepted (D-20).
fn seed(name: &str, value: RawValue<'_>) -> Result<u64, LmtpError> {
    let number = integer(value).ok_or_else(|| wrong_type(name, "an integer"))?;
    let bits = number.ok().and_then(|number| {
        let negative = |_| i64::try_from(number).map(i64::cast_unsigned);
        u64::try_from(number).or_else(negative).ok()
    });
    bits.ok_or_else(|| out_of_range(name, "64 bits, signed or not"))
}

fn sequences(
    name: &str,
    value: RawValue<'_>,
    model: &LmtpModelInfo,
    limits: &ConnectionLimits,
) -> Result<Vec<Vec<Token>>, LmtpError> {
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
                    // While reading and not after: the message has room for a million ids (D-47).
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

fn texts(
    name: &str,
    value: RawValue<'_>,
    model: &LmtpModelInfo,
    (most, bytes): (usize, usize),
) -> Result<Vec<String>, LmtpError> {
    let wrong = || wrong_type(name, "a string or a list of strings");
    let mut stops = Vec::new();
    if let Some(elements) = value.elements() {
        for element in elements {
            if stops.len() == most {
                let wanted = format!("at most {most} strings");
                return Err(out_of_range(name, &wanted));
            }
            stops.push(element.string().ok_or_else(wrong)?.into_owned());
        }
    } else {
        stops.push(value.string().ok_or_else(wrong)?.into_owned());
    }
    let fits = |stop: &String| !stop.is_empty() && stop.len() <= bytes;
    if !stops.iter().all(fits) {
        let wanted = format!("strings of 1 to {bytes} bytes");
        return Err(out_of_range(name, &wanted));
    }
    if !stops.is_empty() && model.tokenizer.is_none() {
        let instead = if name == "stop" {
            "; send 'stop_tokens'"
        } else {
            ""
        };
        let message = format!("'{name}' needs a tokenizer, and this model has none{instead}");
        return Err(LmtpError::new(LmtpReason::UnsupportedOperation, message));
    }
    Ok(stops)
}

/// Reads one token id; `index` is its position, for the error message.
fn token(
    name: &str,
    index: usize,
    value: RawValue<'_>,
    model: &LmtpModelInfo,
) -> Result<Token, LmtpError> {
    let wrong = || {
        let message = format!("'{name}' must contain only integers; index {index} is not one");
        LmtpError::new(LmtpReason::InvalidType, message)
    };
    let id = integer(value).ok_or_else(wrong)?.ok();
    let id = id.and_then(|id| Token::try_from(id).ok());
    id.filter(|id| model.has_token(*id)).ok_or_else(|| {
        let last = model
            .vocab_size
            .map_or(Token::MAX, |size| size.saturating_sub(1));
        let message = format!("'{name}' must contain ids from 0 to {last}; index {index} does not");
        LmtpError::new(LmtpReason::InvalidValue, message)
    })
}

/// The number is not finite: not an integer, but not of a wrong type either.
struct NotFinite;

/// Reads an integer, or a number that is not finite; `None` for anything else.
fn integer(value: RawValue<'_>) -> Option<Result<i128, NotFinite>> {
    match value.integer() {
        Some(number) => Some(Ok(number)),
        None => (!value.number()?.is_finite()).then_some(Err(NotFinite)),
    }
}

fn wrong_type(name: &str, wanted: &str) -> LmtpError {
    LmtpError::new(
        LmtpReason::InvalidType,
        format!("'{name}' must be {wanted}"),
    )
}

fn out_of_range(name: &str, wanted: &str) -> LmtpError {
    LmtpError::new(
        LmtpReason::InvalidValue,
        format!("'{name}' must be {wanted}"),
    )
}

#[cfg(test)]
mod tests;
