//! Negotiation of version 2 with MODEL_INFO (LM-901 to LM-905).

use std::sync::Arc;

use bytes::{BufMut as _, BytesMut};
use bytestring::ByteString;
use serde::Serialize;

use super::outbox::Outbox;
use super::request_reader::model_name;
use crate::lmtp::json::RawValue;
use crate::lmtp::port::{Config, LmtpOutput};
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::{
    ConnectionLimits, Feature, Features, LmtpError, LmtpModelInfo, LmtpReason, Load, ModelLookup,
    StreamId, write,
};

/// The version that we support.
const VERSION: u8 = 2;

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
    controller_arg: usize,
    ttl_s: u64,
    window: u32,
    load_wait_s: u64,
    resume_items: usize,
    resume_bytes: usize,
    resume_grace_s: u64,
}

/// The answer to MODEL_INFO, once all of it is known.
#[derive(Debug)]
struct ModelInfoReply {
    id: StreamId,
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
            controller_arg: limits.max_controller_arg_bytes,
            ttl_s: limits.max_buffer_ttl.as_secs(),
            window: limits.max_window,
            load_wait_s: limits.load_wait.as_secs(),
            resume_items: limits.resume_items,
            resume_bytes: limits.resume_bytes,
            resume_grace_s: limits.resume_grace.as_secs(),
        }
    }
}

/// A question to the shell. No input is handled until it is answered.
#[derive(Debug)]
enum ResumeQuestion {
    /// A name for this session; the negotiating client is answered after that.
    Name(ModelInfoReply),
    /// The session that this request resumes.
    Resume {
        id: StreamId,
        wanted: Vec<WantedStream>,
    },
}

/// A stream that a client resumes.
#[derive(Debug)]
pub(super) struct WantedStream {
    pub(super) stream: StreamId,
    /// The number of the first item that the client has not received.
    pub(super) from: u64,
}

/// What client and server have agreed on (LM-903), and the name by which the session can be resumed.
///
/// Invariants: after an answer to MODEL_INFO the feature `resume` is in force only if the session has a name, since
/// nothing can be resumed without; before it `question` asks for one, or the subprotocol has granted all features
/// (LM-905). While there is a question, no input is handled: its answer decides what the next message means.
#[derive(Debug)]
pub(super) struct Negotiation {
    /// The negotiated features.
    pub(super) features: Features,
    /// The name with which its client can resume the session.
    pub(super) name: Option<ByteString>,
    /// A question that the shell has to answer before further input is handled.
    question: Option<ResumeQuestion>,
}

impl Negotiation {
    pub(super) const fn new(config: &Config) -> Self {
        Self {
            features: if config.negotiated {
                config.features
            } else {
                Features::NONE
            },
            name: None,
            question: None,
        }
    }

    /// Whether input has to wait for an answer of the shell.
    pub(super) const fn is_waiting(&self) -> bool {
        self.question.is_some()
    }

    /// Withdraws the question to the shell, because the connection ends. Returns the id of the request that waited.
    pub(super) fn withdraw(&mut self) -> Option<StreamId> {
        Some(match self.question.take()? {
            ResumeQuestion::Name(introduction) => introduction.id,
            ResumeQuestion::Resume { id, .. } => id,
        })
    }

    /// Handles MODEL_INFO about the model with this name. Answered from memory, at once (LM-332); negotiated features
    /// apply to the messages after it (LM-903).
    pub(super) fn model_info(
        &mut self,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        config: &Config,
        out: &mut Outbox,
    ) {
        let found = model_name(members, config).and_then(|name| {
            let model = models.describe(&name).map_err(LmtpError::model)?;
            // Read before anything changes: a bad shape leaves the connection as it was (LM-902).
            Ok((name, model, asked(members)?))
        });
        let (name, model, asked) = match found {
            Ok(found) => found,
            Err(error) => return out.request_failed(id, &error),
        };
        let version = asked.map(|asked| {
            // All versions below 2 are equivalent.
            let version = u8::try_from(asked.version).unwrap_or(VERSION).min(VERSION);
            let agreed = asked.features.and(config.features);
            // In force for the next message, which the client may have sent without waiting for the answer (LM-903).
            self.features = if version < VERSION {
                Features::NONE
            } else {
                agreed
            };
            version
        });
        // A client that has negotiated by subprotocol reads the limits here (LM-905).
        let version = version.or_else(|| config.negotiated.then_some(VERSION));
        let introduction = ModelInfoReply {
            id: id.clone(),
            name,
            model,
            agreed: version.map(|version| (version, models.load())),
        };
        if introduction.agreed.is_some()
            // Names are issued only on request: the shell's registry has a limited number of them.
            && self.features.has(Feature::Resume)
            && self.name.is_none()
        {
            self.question = Some(ResumeQuestion::Name(introduction));
            out.events.push_back(LmtpOutput::Name);
        } else {
            self.introduce(&introduction, out);
        }
    }

    /// Sends the answer. Without a name the session cannot be resumed, so that feature is not granted.
    fn introduce(&mut self, introduction: &ModelInfoReply, out: &mut Outbox) {
        let ModelInfoReply {
            id,
            name,
            model,
            agreed,
        } = introduction;
        if self.name.is_none() {
            // The shell had no room for another session that can be resumed, or does not know whose this one is.
            self.features = self.features.without(Feature::Resume);
        }
        let answer = agreed.map(|(version, load)| NegotiatedFeatures {
            version,
            features: self.features.names().collect(),
            session: self.name.as_deref().unwrap_or_default(),
            limits: AdvertisedLimits::of(&out.limits),
            load,
        });
        out.messages.notice(|out: &mut BytesMut| {
            write::model_info(out, id, name, model, |out| {
                if let Some(answer) = &answer {
                    out.put_slice(b",\"lmtp\":");
                    write::json(out, answer);
                }
            });
        });
    }

    /// Answers [`LmtpOutput::Name`].
    pub(super) fn named(&mut self, name: Option<ByteString>, out: &mut Outbox) {
        if let Some(question) = self
            .question
            .take_if(|question| matches!(question, ResumeQuestion::Name(_)))
            && let ResumeQuestion::Name(introduction) = question
        {
            self.name = name;
            self.introduce(&introduction, out);
        }
    }

    /// Handles RESUME: the client continues streams of another connection. Its answer waits for the shell's.
    pub(super) fn resume(&mut self, id: &StreamId, members: &PayloadMembers<'_>, out: &mut Outbox) {
        match wanted(members, &out.limits) {
            Err(error) => out.request_failed(id, &error),
            // Its own name: this session is not lost, and it cannot hand its streams to itself.
            Ok((session, _)) if self.name.as_ref() == Some(&session) => {
                out.request_failed(id, &stream_gone_error());
            }
            Ok((session, wanted)) => {
                let id = id.clone();
                self.question = Some(ResumeQuestion::Resume { id, wanted });
                out.events.push_back(LmtpOutput::Resume(session));
            }
        }
    }

    /// The RESUME that waits for an answer: its id and the streams that it wants.
    pub(super) fn take_resume(&mut self) -> Option<(StreamId, Vec<WantedStream>)> {
        match self.question.take() {
            Some(ResumeQuestion::Resume { id, wanted }) => Some((id, wanted)),
            _ => None,
        }
    }
}

fn wanted(
    members: &PayloadMembers<'_>,
    limits: &ConnectionLimits,
) -> Result<(ByteString, Vec<WantedStream>), LmtpError> {
    let wrong = |what| LmtpError::new(LmtpReason::InvalidValue, what);
    let session = members.value("session").ok_or_else(|| {
        let message = "'session' is required: the name that the session was given";
        LmtpError::new(LmtpReason::MissingRequiredParameter, message)
    })?;
    let shape = "'streams' must be a list of {\"stream_id\": id, \"after_seq\": number}";
    let name = "'session' must be the name that the session was given";
    let session = session.string().ok_or_else(|| wrong(name))?;
    let mut wanted = Vec::new();
    let streams = members.value("streams").and_then(RawValue::elements);
    for stream in streams.ok_or_else(|| wrong(shape))? {
        // As many live streams as a connection may have, and as many ended ones.
        if wanted.len() == 2 * limits.max_streams {
            return Err(wrong(
                "'streams' names more streams than a connection can leave",
            ));
        }
        // Without `after_seq` the client has received nothing. A value of the wrong type becomes `None`, an error
        // below.
        let (mut id, mut after) = (None, Some(-1));
        for (name, value) in stream.members().ok_or_else(|| wrong(shape))? {
            match &*name {
                "stream_id" => id = Some(read::id(value, limits)?),
                "after_seq" => after = value.integer(),
                _ => {}
            }
        }
        let from = after.and_then(|after| u64::try_from(after.saturating_add(1)).ok());
        let (Some(stream), Some(from)) = (id, from) else {
            return Err(wrong(shape));
        };
        wanted.push(WantedStream { stream, from });
    }
    Ok((ByteString::from(&*session), wanted))
}

/// The one error for a session that cannot be resumed: unknown, expired, and another caller's are not distinguished.
pub(super) fn stream_gone_error() -> LmtpError {
    let message = "there is no session of this name to resume; send the requests again";
    LmtpError::new(LmtpReason::StreamGone, message)
}

/// The features requested, if any are.
fn asked(members: &PayloadMembers<'_>) -> Result<Option<RequestedFeatures>, LmtpError> {
    let lmtp = members
        .value("data")
        .and_then(|data| read::member(data, "lmtp"));
    let Some(lmtp) = lmtp.filter(|lmtp| !lmtp.is_null()) else {
        return Ok(None);
    };
    let wrong = || {
        let message = "'data.lmtp' must be {\"version\": 2, \"features\": [names] or \"all\"}";
        LmtpError::new(LmtpReason::InvalidValue, message)
    };
    let version = read::member(lmtp, "version").and_then(RawValue::integer);
    // Version 1 and later ones are valid requests; what is agreed is decided by the caller (LM-902).
    let version = version.filter(|version| *version >= 1).ok_or_else(wrong)?;
    let features = read::member(lmtp, "features").ok_or_else(wrong)?;
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
