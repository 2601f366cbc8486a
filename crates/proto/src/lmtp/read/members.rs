//! [`PayloadMembers`]: the members of a message that its negotiated features know.

use std::borrow::Cow;

use super::super::json::RawValue;
use super::super::{
    ConnectionLimits, Feature, Features, LmtpError, LmtpModelInfo, LmtpReason, StreamId,
};
use super::{id, integer, out_of_range, token, wrong_type};
use crate::params::{ParamSpec, SAMPLER_PARAMS, joined};
use crate::steer::Token;

/// The members of a payload by name; the last one wins (LM-205).
#[derive(Debug)]
pub(in super::super) struct PayloadMembers<'a> {
    // Indexed by position in `NAMES`: reading a message of the base protocol allocates nothing (LM-610).
    known: [Option<RawValue<'a>>; NAMES.len()],
    /// Members of version 2 whose feature was negotiated; without that they are unknown (LM-207).
    added: Vec<(&'static str, RawValue<'a>)>,
    /// Whether a controller is requested without its feature.
    controller: bool,
    /// The first unknown name, and the number of unknown members.
    pub(super) unknown: Option<(Cow<'a, str>, u64)>,
    /// The whole object, as sent.
    source: &'a str,
}

/// Members of the base protocol. The first [`LMQL`] are those of LMQL's own client, in its order (LM-301): a reference
/// server knows no others (LM-703).
const NAMES: [&str; 40] = joined(&[
    &[
        "max_tokens",
        "temperature",
        "top_logprobs",
        "model",
        "prompt",
        "stream_id",
        "logit_bias",
        "top_p",
        "top_k",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "length_penalty",
        "seed",
        "min_p",
        "penalty_last_n",
    ],
    &SAMPLER_PARAMS,
    &[
        "lora",
        "include_stop_str_in_output",
        "stop",
        "stop_tokens",
        "min_tokens",
        "ignore_eos",
        "num_samples",
        "scored",
        "data",
    ],
]);

const LMQL: usize = 13;

/// Members of version 2, with the feature that each belongs to.
const ADDED: [(&str, Feature); 35] = [
    ("prompt_text", Feature::Text),
    ("messages", Feature::Text),
    ("add_generation_prompt", Feature::Text),
    ("add_bos", Feature::Text),
    ("text", Feature::Text),
    ("skip_special", Feature::Text),
    ("echo_prompt_tokens", Feature::Text),
    ("top_text", Feature::Text),
    ("scored_text", Feature::Text),
    ("tokens", Feature::Text),
    ("buffer", Feature::Buffers),
    ("from", Feature::Buffers),
    ("append", Feature::Buffers),
    ("append_text", Feature::Buffers),
    ("ttl_s", Feature::Buffers),
    ("drop", Feature::Buffers),
    ("prefix", Feature::Buffers),
    ("keep", Feature::Buffers),
    ("mask", Feature::Masks),
    ("allow", Feature::Masks),
    ("deny", Feature::Masks),
    ("bitmap", Feature::Masks),
    ("streams", Feature::Cancel),
    ("deadline_ms", Feature::Cancel),
    ("ttft_ms", Feature::Cancel),
    ("priority", Feature::Cancel),
    ("n", Feature::Samples),
    ("scored_many", Feature::Samples),
    ("prompt_logprobs", Feature::Samples),
    ("session", Feature::Resume),
    // A second time: `streams` is known with either feature.
    ("streams", Feature::Resume),
    ("window", Feature::Window),
    ("seq", Feature::Window),
    ("controller", Feature::Controllers),
    ("controller_arg", Feature::Controllers),
];

/// The generation parameters that a peer with these features knows, each with its member's name, in the order of writing.
pub(in super::super) fn known_params(
    features: Features,
) -> impl Iterator<Item = (&'static str, &'static ParamSpec)> {
    // A peer that has negotiated anything is no reference server.
    let base = if features.is_empty() {
        LMQL
    } else {
        NAMES.len()
    };
    let added = ADDED
        .iter()
        .filter(move |(_, feature)| features.has(*feature));
    let names = NAMES[..base].iter().chain(added.map(|(name, _)| name));
    // Our sessions take it from anybody, but servers before this feature ignore it, and compute something else.
    let names = names.filter(move |name| **name != "lora" || features.has(Feature::Lora));
    names.filter_map(|name| Some((*name, ParamSpec::of_lmtp(name)?)))
}

impl<'a> PayloadMembers<'a> {
    /// Reads the members of an object; `None` for any other value.
    pub(in super::super) fn of(payload: RawValue<'a>, features: Features) -> Option<Self> {
        let mut members = Self {
            known: [None; NAMES.len()],
            added: Vec::new(),
            controller: false,
            unknown: None,
            source: payload.as_str(),
        };
        let added = |name: &str| {
            let added = ADDED.iter().filter(|_| !features.is_empty());
            let mut added = added.filter(|(_, feature)| features.has(*feature));
            added
                .find(|(added, _)| *added == name)
                .map(|(name, _)| *name)
        };
        for (name, value) in payload.members()? {
            if let Some(at) = NAMES.iter().position(|known| *known == name) {
                members.known[at] = Some(value);
            } else if let Some(name) = added(&name) {
                // The last of repeated members wins (LM-205).
                members.added.retain(|(earlier, _)| *earlier != name);
                members.added.push((name, value));
            } else {
                // Unknown here, but a request for it must not pass as an ignored member: its output would be
                // unconstrained.
                members.controller |= name == "controller" && !value.is_null();
                // Only the first name is retained: a message can have a million unknown members.
                let (_, count) = members.unknown.get_or_insert((name, 0));
                *count += 1;
            }
        }
        Some(members)
    }

    /// The object as sent.
    pub(in super::super) const fn source(&self) -> &'a str {
        self.source
    }

    /// Returns a member that is present and not null.
    pub(in super::super) fn value(&self, name: &str) -> Option<RawValue<'a>> {
        let value = match NAMES.iter().position(|known| *known == name) {
            Some(at) => self.known[at],
            None => self
                .added
                .iter()
                .find(|(added, _)| *added == name)
                .map(|(_, value)| *value),
        };
        value.filter(|value| !value.is_null())
    }

    /// The generation parameters that are present and not null, in the order of their names above.
    pub(super) fn params(
        &self,
    ) -> impl Iterator<Item = (&'static ParamSpec, &'static str, RawValue<'a>)> {
        let known = NAMES.into_iter().zip(self.known);
        let known = known.filter_map(|(name, value)| Some((name, value?)));
        let all = known.chain(self.added.iter().copied());
        let given = all.filter(|(_, value)| !value.is_null());
        given.filter_map(|(name, value)| Some((ParamSpec::of_lmtp(name)?, name, value)))
    }

    /// The one of these members that is present, if any is.
    pub(in super::super) fn one_of(
        &self,
        names: &[&'static str],
    ) -> Result<Option<&'static str>, LmtpError> {
        let mut given = names.iter().filter(|name| self.value(name).is_some());
        let first = given.next();
        if given.next().is_some() {
            let message = format!("'{}' exclude each other; send one", names.join("', '"));
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        Ok(first.copied())
    }

    /// Whether a controller is requested although that feature was not negotiated.
    pub(in super::super) const fn names_controller(&self) -> bool {
        self.controller
    }

    /// The name of the first unknown member.
    pub(in super::super) fn first_unknown(&self) -> Option<&str> {
        self.unknown.as_ref().map(|(name, _)| &**name)
    }

    /// Number of unknown members.
    pub(in super::super) fn unknown(&self) -> u64 {
        self.unknown.as_ref().map_or(0, |(_, count)| *count)
    }

    /// Reads the id to echo.
    pub(in super::super) fn id(&self, limits: &ConnectionLimits) -> Result<StreamId, LmtpError> {
        // LM-206 fixes this text.
        let value = self
            .value("stream_id")
            .ok_or_else(|| LmtpError::new(LmtpReason::MissingRequiredParameter, "'stream_id'"))?;
        id(value, limits)
    }

    /// Reads a boolean; `None` if the member is absent.
    pub(in super::super) fn flag(&self, name: &str) -> Result<Option<bool>, LmtpError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        let flag = value.boolean();
        flag.map(Some)
            .ok_or_else(|| wrong_type(name, "true or false"))
    }

    /// Reads the name of a buffer, mask or other object that the client has named.
    pub(in super::super) fn name(
        &self,
        name: &str,
        limits: &ConnectionLimits,
    ) -> Result<Option<String>, LmtpError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        let text = value.string().ok_or_else(|| wrong_type(name, "a name"))?;
        if text.is_empty() || text.len() > limits.max_name_bytes {
            let range = format!("a name of 1 to {} bytes", limits.max_name_bytes);
            return Err(out_of_range(name, &range));
        }
        Ok(Some(text.into_owned()))
    }

    /// Reads the model's name, if there is one.
    pub(in super::super) fn model(
        &self,
        limits: &ConnectionLimits,
    ) -> Result<Option<Cow<'a, str>>, LmtpError> {
        let Some(value) = self.value("model") else {
            return Ok(None);
        };
        let name = value
            .string()
            .ok_or_else(|| wrong_type("model", "a string"))?;
        // No model has such a name, so the answer is that for an unknown one (section 10).
        if name.len() > limits.max_model_bytes {
            return Err(LmtpError::model(LmtpReason::ModelNotFound));
        }
        Ok(Some(name))
    }

    /// Reads an integer in range; `None` if the member is absent.
    pub(in super::super) fn integer(
        &self,
        name: &str,
        range: &'static str,
        is_in: impl Fn(i128) -> bool,
    ) -> Result<Option<i128>, LmtpError> {
        let Some(value) = self.value(name) else {
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

    /// Reads token ids; in a prompt `[null]` is `[]` (LM-303).
    pub(in super::super) fn tokens(
        &self,
        name: &str,
        model: &LmtpModelInfo,
    ) -> Result<Vec<Token>, LmtpError> {
        let value = self.value(name).ok_or_else(|| {
            LmtpError::new(
                LmtpReason::MissingRequiredParameter,
                format!("'{name}' is required: a list of token ids"),
            )
        })?;
        let elements = value
            .elements()
            .ok_or_else(|| wrong_type(name, "a list of token ids"))?;
        // Looks at two elements only: the list may have a million. LMQL sends `[null]` if its tokenizer has no BOS.
        let mut first_two = value.elements().into_iter().flatten();
        let only = first_two.next().filter(|_| first_two.next().is_none());
        if name == "prompt" && only.is_some_and(RawValue::is_null) {
            return Ok(Vec::new());
        }
        let ids = elements
            .zip(0..)
            .map(|(element, index)| token(name, index, element, model));
        ids.collect()
    }
}
