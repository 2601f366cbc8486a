//! Negotiation of version 2 with MODEL_INFO (LM-901 to LM-905).

use std::sync::Arc;

use bytes::{BufMut as _, BytesMut};
use bytestring::ByteString;
use serde::Serialize;

use super::LmtpSession;
use super::resume::ResumeQuestion;
use crate::lmtp::json::RawValue;
use crate::lmtp::port::LmtpOutput;
use crate::lmtp::read::PayloadMembers;
use crate::lmtp::{
    ConnectionLimits, Feature, Features, LmtpError, LmtpModelInfo, LmtpReason, Load, ModelLookup,
    StreamId, write,
};

/// The version that we support.
const VERSION: i128 = 2;
/// The same, where it is in force without a request.
const NEGOTIATED: u8 = 2;

/// The request in `data.lmtp`.
struct RequestedFeatures {
    version: i128,
    features: Features,
}

/// The answer, beside the model's metadata.
#[derive(Serialize)]
struct NegotiatedFeatures<'a> {
    version: u8,
    features: Vec<&'static str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    session: &'a str,
    limits: AdvertisedLimits,
    load: Load,
}

/// The limits of a connection, by the names in the specification (LM-902).
#[derive(Serialize)]
struct AdvertisedLimits {
    max_message_in: usize,
    max_frame_out: usize,
    max_streams: usize,
    top_logprobs: u32,
    logit_bias: usize,
    stop: usize,
    stop_tokens: usize,
    n: u32,
    scored_many: usize,
    outbox_bytes: usize,
    text: usize,
    buffers: usize,
    masks: usize,
    ttl_s: u64,
    window: u32,
    load_wait_s: u64,
    resume_items: usize,
    resume_bytes: usize,
    resume_grace_s: u64,
}

/// The answer to MODEL_INFO, once all of it is known.
#[derive(Debug)]
pub(super) struct ModelInfoReply {
    pub(super) id: StreamId,
    name: ByteString,
    model: Arc<LmtpModelInfo>,
    /// The negotiated version, and the load of the server.
    agreed: Option<(u8, Load)>,
}

impl AdvertisedLimits {
    fn of(limits: &ConnectionLimits) -> Self {
        Self {
            max_message_in: limits.max_message_in,
            max_frame_out: limits.max_frame_out,
            max_streams: limits.max_streams,
            top_logprobs: limits.max_top_logprobs,
            logit_bias: limits.max_biases,
            stop: limits.max_stops,
            stop_tokens: limits.max_stop_lists,
            n: limits.max_samples,
            scored_many: limits.max_scored_many,
            outbox_bytes: limits.outbox_bytes,
            text: limits.max_text_bytes,
            buffers: limits.max_buffers,
            masks: limits.max_masks,
            ttl_s: limits.max_buffer_ttl.as_secs(),
            window: limits.max_window,
            load_wait_s: limits.load_wait.as_secs(),
            resume_items: limits.resume_items,
            resume_bytes: limits.resume_bytes,
            resume_grace_s: limits.resume_grace.as_secs(),
        }
    }
}

impl LmtpSession {
    /// Answered from memory, at once (LM-332); negotiated features apply to the messages after it (LM-903).
    pub(super) fn model_info(
        &mut self,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
    ) {
        let found = self.model_name(members).and_then(|name| {
            let model = models.describe(&name).map_err(LmtpError::model)?;
            Ok((name, model, asked(members)?))
        });
        let (name, model, asked) = match found {
            Ok(found) => found,
            Err(error) => return self.request_failed(id, &error),
        };
        let version = asked.map(|asked| {
            let version = asked.version.min(VERSION);
            let agreed = asked.features.and(self.config.features);
            self.features = if version < VERSION {
                Features::NONE
            } else {
                agreed
            };
            // All versions below 2 are equivalent.
            u8::try_from(version).unwrap_or(1)
        });
        // A client that has negotiated by subprotocol reads the limits here (LM-905).
        let version = version.or_else(|| self.config.negotiated.then_some(NEGOTIATED));
        let introduction = ModelInfoReply {
            id: id.clone(),
            name,
            model,
            agreed: version.map(|version| (version, models.load())),
        };
        if introduction.agreed.is_some()
            && self.features.has(Feature::Resume)
            && self.name.is_none()
        {
            self.question = Some(ResumeQuestion::Name(introduction));
            self.events.push_back(LmtpOutput::Name);
        } else {
            self.introduce(&introduction);
        }
    }

    /// Sends the answer. Without a name the session cannot be resumed, so that feature is not granted.
    pub(super) fn introduce(&mut self, introduction: &ModelInfoReply) {
        let ModelInfoReply {
            id,
            name,
            model,
            agreed,
        } = introduction;
        if self.name.is_none() {
            self.features = self.features.without(Feature::Resume);
        }
        let answer = agreed.map(|(version, load)| NegotiatedFeatures {
            version,
            features: self.features.names().collect(),
            session: self.name.as_deref().unwrap_or_default(),
            limits: AdvertisedLimits::of(&self.config.limits),
            load,
        });
        self.outbound.notice(|out: &mut BytesMut| {
            write::model_info(out, id, name, model, |out| {
                if let Some(answer) = &answer {
                    out.put_slice(b",\"lmtp\":");
                    write::json(out, answer);
                }
            });
        });
    }
}

/// The features requested, if any are.
fn asked(members: &PayloadMembers<'_>) -> Result<Option<RequestedFeatures>, LmtpError> {
    let lmtp = members.value("data").and_then(|data| named(data, "lmtp"));
    let Some(lmtp) = lmtp.filter(|lmtp| !lmtp.is_null()) else {
        return Ok(None);
    };
    let wrong = || {
        let message = "'data.lmtp' must be {\"version\": 2, \"features\": [names] or \"all\"}";
        LmtpError::new(LmtpReason::InvalidValue, message)
    };
    let version = named(lmtp, "version").and_then(RawValue::integer);
    let version = version.filter(|version| *version >= 1).ok_or_else(wrong)?;
    let features = named(lmtp, "features").ok_or_else(wrong)?;
    let features = match features.elements() {
        None if features.string().as_deref() == Some("all") => Features::ALL,
        None => return Err(wrong()),
        Some(names) => {
            let names: Option<Vec<_>> = names.map(RawValue::string).collect();
            Features::named(names.ok_or_else(wrong)?.iter().map(AsRef::as_ref))
        }
    };
    Ok(Some(RequestedFeatures { version, features }))
}

/// The last member with this name.
fn named<'a>(object: RawValue<'a>, name: &str) -> Option<RawValue<'a>> {
    let members = object.members()?.filter(|(own, _)| own == name);
    members.last().map(|(_, value)| value)
}
