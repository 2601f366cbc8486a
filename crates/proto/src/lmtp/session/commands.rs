//! Dispatches the messages of a client, and admits or refuses its streams.

use std::sync::Arc;

use bytes::BytesMut;

use super::LmtpSession;
use super::cancel::{ids, named_streams};
use super::request_reader::{RequestReader, StreamRequest, model, refuse_unagreed, work};
use super::streams::AdmittedRequest;
use super::text::RequestSubject;
use crate::lmtp::port::{Config, StreamUpdate};
use crate::lmtp::read::PayloadMembers;
use crate::lmtp::{Feature, Features, LmtpError, LmtpReason, ModelLookup, StreamFinish, write};
use crate::time::Time;

fn unknown_command(word: &str) -> LmtpError {
    let shown: String = word.chars().take(WORD_CHARS).collect();
    LmtpError::new(
        LmtpReason::UnknownCommand,
        format!("Unknown command: {shown}"),
    )
}

fn not_negotiated(feature: Feature, features: Features) -> LmtpError {
    let message = if features.is_empty() {
        "version 2 was not negotiated on this connection".into()
    } else {
        format!("feature '{}' was not negotiated", feature.name())
    };
    LmtpError::new(LmtpReason::NotNegotiated, message)
}

impl LmtpSession {
    /// Handles a message of any type.
    pub(super) fn command(
        &mut self,
        word: &str,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        now: Time,
    ) {
        let features = self.negotiation.features;
        // Not an error yet: an unknown type is reported even if the id is missing or invalid (LM-203).
        let id = members.id(&self.config.limits);
        let Some(feature) = feature(word) else {
            let error = unknown_command(word);
            return self.outbox.notice(id.ok().as_ref(), &error);
        };
        if let Some(feature) = feature.filter(|feature| !features.has(*feature)) {
            let error = not_negotiated(feature, features);
            return self.outbox.notice(id.ok().as_ref(), &error);
        }
        let id = match id {
            Ok(id) => id,
            Err(error) => return self.outbox.notice(None, &error),
        };
        match word {
            // A MSG, because an error item would end the live stream that has this id (LM-508).
            "GENERATE" | "SCORE" if self.is_in_use(&id) => {
                let error = LmtpError::new(LmtpReason::DuplicateStream, "stream_id is in use");
                self.outbox.notice(Some(&id), &error);
            }
            "GENERATE" | "SCORE" => {
                let request = StreamRequest {
                    word,
                    id: &id,
                    members,
                    features,
                    received: now,
                };
                self.open(request, models, now);
            }
            "MODEL_INFO" => {
                let (config, out) = (&self.config, &mut self.outbox);
                self.negotiation
                    .model_info(&id, members, models, config, out);
            }
            "CANCEL" => {
                let reply = self.cancel(members, models, now);
                self.outbox.reply(&id, reply);
            }
            "TOKENIZE" | "DETOKENIZE" | "BUFFER" | "MASK" => {
                let reply = self
                    .subject(members, models)
                    .and_then(|subject| match word {
                        "TOKENIZE" => subject.tokenize(members),
                        "DETOKENIZE" => subject.detokenize(members),
                        "BUFFER" => self.buffers.change(members, &subject, now),
                        _ => self.masks.change(members, &subject),
                    });
                self.outbox.reply(&id, reply);
            }
            "RESUME" => match check_model(members, models, &self.config) {
                Ok(()) => self.negotiation.resume(&id, members, &mut self.outbox),
                Err(error) => self.outbox.request_failed(&id, &error),
            },
            // Never answered, not even with an error: a client sends many.
            "ACK" => {
                let replays = &mut self.streams.replays;
                if let (Some(first), Some(below)) = (replays.named(&id), acknowledged(members)) {
                    replays.acknowledge(first, below, now);
                }
            }
            // All other types belong to features that cannot be negotiated.
            _ => {}
        }
    }

    /// Opens a stream, or refuses it with the first rule that it breaks (LM-302).
    pub(super) fn open(
        &mut self,
        request: StreamRequest<'_, '_>,
        models: &dyn ModelLookup,
        now: Time,
    ) {
        let live = self.streams.len();
        // `defer` stands in a guard, so that a request for which there is no room to wait is refused by the last arm.
        match self.admit(request, models, now) {
            Ok(admitted) => {
                self.streams.begin(request.id, admitted, &mut self.outbox);
                self.warn_of_unknown(request);
            }
            // While draining nothing is deferred: with its model loaded, the request would be refused as well (LM-509).
            Err(error)
                if error.reason == LmtpReason::ModelLoading
                    && !self.draining
                    && self.loading.defer(&request, &self.config.limits, live) => {}
            Err(error) => {
                self.stats.refused += 1;
                let numbered = request.features.has(Feature::Resume);
                self.outbox.refuse(request.id, &error, numbered);
            }
        }
    }

    fn admit(
        &mut self,
        request: StreamRequest<'_, '_>,
        models: &dyn ModelLookup,
        now: Time,
    ) -> Result<AdmittedRequest, LmtpError> {
        let members = request.members;
        refuse_unagreed(members)?;
        // The base protocol takes the short path: no lookup of a vocabulary and no state beside the stream (LM-610).
        let (name, model, works, extended) = if request.features.is_empty() {
            let (name, model) = model(members, models, &self.config)?;
            let prompt = members.tokens("prompt", &model)?;
            let (config, stats) = (&self.config, &mut self.stats);
            let work = work(request.word, members, &model, config, stats, prompt)?;
            (name, model, vec![work], None)
        } else {
            let subject = self.subject(members, models)?;
            let reader = RequestReader {
                request,
                subject: &subject,
                config: &self.config,
                buffers: &mut self.buffers,
                masks: &mut self.masks,
                stats: &mut self.stats,
            };
            let (works, extended) = reader.read(now)?;
            (subject.name, subject.model, works, Some(extended))
        };
        // Room is checked last: a client whose request is wrong is told so, not to come again later (LM-302).
        if self.draining {
            let message = "the server is shutting down; ask another";
            return Err(LmtpError::new(LmtpReason::Draining, message));
        }
        let limits = &self.config.limits;
        // Each sample counts, since each is work of its own in the batch. An ended stream counts until its end is sent:
        // nothing else limits how many ends wait.
        let open = self.streams.len() + self.streams.replays.ended_behind_windows();
        if open + self.loading.len() + works.len() > limits.max_streams {
            let message = format!(
                "{} streams are open on this connection; wait for one to end",
                limits.max_streams
            );
            return Err(LmtpError {
                retry_after: Some(limits.retry_after),
                ..LmtpError::new(LmtpReason::ServerOverloaded, message)
            });
        }
        Ok(AdmittedRequest {
            name,
            model,
            works,
            extended,
        })
    }

    /// Warns of an ignored member of a request, once the request was accepted.
    fn warn_of_unknown(&mut self, request: StreamRequest<'_, '_>) {
        let name = request.members.first_unknown();
        // Dropped if there is no room, as any status (LM-923). SCORE ignores unknown members by rule (LM-207).
        let name = name.filter(|_| request.word == "GENERATE" && self.outbox.has_room());
        if let Some(name) = name.filter(|_| request.features.has(Feature::Status)) {
            let message = format!("ignored: '{}'", write::cut(name, NAME_BYTES));
            self.outbox
                .status(Some(request.id), &StreamUpdate::Warning { message });
        }
    }

    /// What a request without a stream is about.
    fn subject(
        &self,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
    ) -> Result<RequestSubject, LmtpError> {
        let (name, model) = model(members, models, &self.config)?;
        Ok(RequestSubject {
            vocabulary: models.vocabulary(&name),
            name,
            model,
            limits: Arc::clone(&self.config.limits),
        })
    }

    /// Ends each named live stream at once. Returns the members of the answer, which follows the ends.
    fn cancel(
        &mut self,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        now: Time,
    ) -> Result<BytesMut, LmtpError> {
        check_model(members, models, &self.config)?;
        let named = named_streams(members, &self.config.limits)?.unwrap_or_else(|| {
            let waiting = self.loading.ids().cloned();
            self.streams.in_order().chain(waiting).collect()
        });
        let (mut cancelled, mut unknown) = (Vec::new(), Vec::new());
        let out = &mut self.outbox;
        for stream in named {
            // A stream that ended by itself before this message is `unknown`: it has its natural end (LM-961).
            if let Some(key) = self.streams.named(&stream) {
                self.streams
                    .end_early(key, &StreamFinish::Cancelled, out, now);
                cancelled.push(stream);
            } else if self.loading.cancel(&stream, out) {
                cancelled.push(stream);
            } else {
                unknown.push(stream);
            }
        }
        let mut reply = BytesMut::new();
        ids(&mut reply, "cancelled", &cancelled);
        ids(&mut reply, "unknown", &unknown);
        Ok(reply)
    }
}

/// The number below which an ACK acknowledges all items; `None` if it has none, and then it is ignored.
fn acknowledged(members: &PayloadMembers<'_>) -> Option<u64> {
    let seq = members.integer("seq", "0 or more", |seq| seq >= 0);
    let below = seq.ok().flatten().and_then(|seq| u64::try_from(seq).ok())?;
    // `seq` is the highest item that the client has received (LM-952).
    Some(below.saturating_add(1))
}

/// Checks the model of a request about streams: every request names one that its caller may use (section 3). It does
/// not have to be ready, because the streams may be waiting for it (LM-322).
fn check_model(
    members: &PayloadMembers<'_>,
    models: &dyn ModelLookup,
    config: &Config,
) -> Result<(), LmtpError> {
    match model(members, models, config) {
        Err(LmtpError {
            reason: LmtpReason::ModelLoading | LmtpReason::EngineError,
            ..
        })
        | Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Maximum bytes shown of an ignored member's name.
const NAME_BYTES: usize = 64;

/// The feature that a message of this type requires: `None` if there is no such type, `Some(None)` for the base
/// protocol.
fn feature(word: &str) -> Option<Option<Feature>> {
    Some(match word {
        "GENERATE" | "SCORE" | "MODEL_INFO" => None,
        "CANCEL" => Some(Feature::Cancel),
        "TOKENIZE" | "DETOKENIZE" => Some(Feature::Text),
        "BUFFER" => Some(Feature::Buffers),
        "MASK" => Some(Feature::Masks),
        "RESUME" => Some(Feature::Resume),
        "ACK" => Some(Feature::Window),
        _ => return None,
    })
}

/// Maximum characters shown of an unknown type (LM-203).
const WORD_CHARS: usize = 64;
