//! Dispatches messages, and admits or refuses streams.

use std::sync::Arc;

use bytestring::ByteString;

use super::extended::{ExtendedStream, SampleKey, number};
use super::{LmtpSession, LmtpStream};
use crate::lmtp::port::{LmtpOutput, StreamDemand, StreamKey, StreamStart};
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::{Feature, LmtpError, LmtpModelInfo, LmtpReason, ModelLookup, StreamId, write};
use crate::time::Time;

/// A request that has passed all checks.
pub(super) struct AdmittedRequest {
    pub(super) name: ByteString,
    pub(super) model: Arc<LmtpModelInfo>,
    /// The work of each sample; at least one.
    pub(super) works: Vec<StreamDemand>,
    pub(super) extended: Option<ExtendedStream>,
}

impl LmtpSession {
    pub(super) fn command(
        &mut self,
        word: &str,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        now: Time,
    ) {
        let id = members.id(&self.config.limits);
        let Some(feature) = feature(word) else {
            let shown: String = word.chars().take(WORD_CHARS).collect();
            let message = format!("Unknown command: {shown}");
            let error = LmtpError::new(LmtpReason::UnknownCommand, message);
            return self.notice(id.ok().as_ref(), &error);
        };
        if let Some(feature) = feature.filter(|feature| !self.features.has(*feature)) {
            let message = if self.features.is_empty() {
                "version 2 was not negotiated on this connection".into()
            } else {
                format!("feature '{}' was not negotiated", feature.name())
            };
            let error = LmtpError::new(LmtpReason::NotNegotiated, message);
            return self.notice(id.ok().as_ref(), &error);
        }
        let id = match id {
            Ok(id) => id,
            Err(error) => return self.notice(None, &error),
        };
        match word {
            "GENERATE" | "SCORE" if self.is_in_use(&id) => {
                let error = LmtpError::new(LmtpReason::DuplicateStream, "stream_id is in use");
                self.notice(Some(&id), &error);
            }
            "GENERATE" | "SCORE" => self.open(word, id, members, models, now),
            "MODEL_INFO" => self.model_info(&id, members, models),
            "CANCEL" => self.cancel(&id, members, models, now),
            "TOKENIZE" => self.tokenize(&id, members, models),
            "DETOKENIZE" => self.detokenize(&id, members, models),
            "BUFFER" => self.buffer(&id, members, models, now),
            "MASK" => self.mask(&id, members, models),
            "RESUME" => self.resume(&id, members, models),
            "ACK" => self.acknowledge(&id, members, now),
            // All other types belong to features that cannot be negotiated.
            _ => {}
        }
    }

    /// Opens a stream, or refuses it with the first rule that it breaks (LM-302).
    pub(super) fn open(
        &mut self,
        word: &str,
        id: StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        now: Time,
    ) {
        let admitted = match self.retry(word, &id, members, models, now) {
            Ok(true) => return,
            Ok(false) => self.admit(word, &id, members, models, now),
            Err(error) => Err(error),
        };
        match admitted {
            Ok(admitted) => {
                self.begin(&id, admitted);
                self.warn_of_unknown(word, &id, members);
            }
            Err(error)
                if error.reason == LmtpReason::ModelLoading
                    && self.wait_for_model(word, &id, members, now) => {}
            Err(error) => {
                self.stats.refused += 1;
                self.refuse(&id, &error);
            }
        }
    }

    fn admit(
        &mut self,
        word: &str,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        now: Time,
    ) -> Result<AdmittedRequest, LmtpError> {
        let (name, model) = self.model(members, models)?;
        let (works, extended) = if self.features.is_empty() {
            let prompt = members.tokens("prompt", &model)?;
            (vec![self.work(word, members, &model, prompt)?], None)
        } else {
            self.extended(word, id, members, models, (&name, &model), now)?
        };
        if self.draining {
            let message = "the server is shutting down; ask another";
            return Err(LmtpError::new(LmtpReason::Draining, message));
        }
        let limits = &self.config.limits;
        if self.streams.len() + self.loading.len() + works.len() > limits.max_streams {
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

    /// The work of a request with this prompt, without its samples.
    pub(super) fn work(
        &mut self,
        word: &str,
        members: &PayloadMembers<'_>,
        model: &LmtpModelInfo,
        prompt: Vec<crate::steer::Token>,
    ) -> Result<StreamDemand, LmtpError> {
        let limits = &self.config.limits;
        if word == "SCORE" {
            return Ok(StreamDemand::Score(read::score(members, model, prompt)?));
        }
        self.stats.unknown_parameters += members.unknown();
        let strict = self.config.strict_parameters;
        let generate = read::generate(members, model, limits, strict, prompt)?;
        Ok(StreamDemand::Generate(generate))
    }

    fn begin(&mut self, id: &StreamId, admitted: AdmittedRequest) {
        let first = StreamKey(self.admitted);
        let is_extended = admitted.extended.is_some();
        let extended = admitted.extended.as_ref();
        let prompt_logprobs = extended.is_some_and(|stream| stream.prompt_logprobs);
        let statuses = extended.is_some_and(|stream| stream.features.has(Feature::Status));
        self.ids.insert(id.clone(), first);
        // A stream without numbers has no replay buffer. One that is left under the same id belongs to another stream,
        // and a client that resumes this one must not be given its items.
        self.replays.remove(id);
        if let Some(extended) = admitted.extended {
            let due = extended.deadline.into_iter().chain(extended.first_due);
            self.due.extend(due.map(|due| (due, first)));
            let (request, window) = (extended.request, extended.window);
            if request.is_some() || window.is_some() {
                self.replays.begin(first, id, request, window);
            }
            self.extended.insert(first, extended);
        }
        for (work, index) in admitted.works.into_iter().zip(0..) {
            let key = StreamKey(self.admitted);
            self.admitted += 1;
            self.stats.streams += 1;
            let (left, top) = match &work {
                StreamDemand::Generate(wanted) => {
                    (u64::from(wanted.max_tokens), Some(wanted.top_logprobs))
                }
                StreamDemand::Score(wanted) => {
                    let top = Some(wanted.top_logprobs).filter(|top| *top > 0);
                    (wanted.scored.len() as u64, top)
                }
            };
            let stream = LmtpStream {
                id: id.clone(),
                left,
                top,
                scores: matches!(work, StreamDemand::Score(_)),
                part: is_extended.then_some(SampleKey { first, index }),
            };
            self.streams.insert(key, stream);
            self.events
                .push_back(LmtpOutput::Start(Box::new(StreamStart {
                    stream: key,
                    sample: index,
                    name: admitted.name.clone(),
                    model: Arc::clone(&admitted.model),
                    work,
                    // The status and the prompt's log-probabilities are the same for all samples, so only the first one
                    // reports them.
                    statuses: statuses && index == 0,
                    prompt_logprobs: prompt_logprobs && index == 0,
                })));
        }
    }

    /// Refuses a request: its only item is the error, as the first one (LM-963).
    pub(super) fn refuse(&mut self, id: &StreamId, cause: &LmtpError) {
        let (frame, error) = (
            self.config.limits.max_frame_out,
            self.config.limits.max_error_bytes,
        );
        let seq = self.features.has(Feature::Resume).then_some(0);
        self.outbound.item(frame, |out| {
            write::failure(out, id, cause, error, |out| number(out, seq));
        });
        if !self.config.coalesce {
            self.outbound.end_items();
        }
    }

    /// Whether the end of a stream with this id was not sent yet.
    pub(super) fn is_in_use(&self, id: &StreamId) -> bool {
        self.ids.contains_key(id) || self.replays.has_unsent(id) || self.loading.has(id)
    }

    pub(super) fn model(
        &self,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
    ) -> Result<(ByteString, Arc<LmtpModelInfo>), LmtpError> {
        let name = self.model_name(members)?;
        let model = models.find(&name).map_err(LmtpError::model)?;
        Ok((name, model))
    }

    /// The model's name in the request, or the default.
    pub(super) fn model_name(&self, members: &PayloadMembers<'_>) -> Result<ByteString, LmtpError> {
        let named = members.model(&self.config.limits)?;
        let named = named.map(|name| ByteString::from(&*name));
        named
            .or_else(|| self.config.default_model.clone())
            .ok_or_else(|| {
                let message = "'model' is required: the name of a model";
                LmtpError::new(LmtpReason::MissingRequiredParameter, message)
            })
    }
}

/// The feature that a message of this type requires; `None` if there is no such type.
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
