//! Detached sessions, and RESUME (LM-964, LM-965).
//!
//! ```text
//!   open ── lose ──► detached ── resume_grace ──► closed
//!     └────────┴──── resumed, by another session ──► streams moved there
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use bytestring::ByteString;

use super::cancel::ids;
use super::extended::{ExtendedStream, SampleKey};
use super::loading::Loading;
use super::negotiation::ModelInfoReply;
use super::replays::ReplayBuffer;
use super::{LmtpPhase, LmtpSession, LmtpStream};
use crate::lmtp::json::RawValue;
use crate::lmtp::outbound::LmtpOutbound;
use crate::lmtp::port::{LmtpOutput, StreamKey};
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::{LmtpError, LmtpReason, ModelLookup, StreamId, write};
use crate::time::Time;

/// A question to the shell. No input is handled until it is answered.
#[derive(Debug)]
pub(super) enum ResumeQuestion {
    /// A name for this session; the negotiating client is answered after that.
    Name(ModelInfoReply),
    /// The session that this request resumes.
    Resume {
        id: StreamId,
        wanted: Vec<WantedStream>,
    },
}

impl ResumeQuestion {
    /// The id of the request that waits for the answer.
    pub(super) const fn id(&self) -> &StreamId {
        match self {
            Self::Name(introduction) => &introduction.id,
            Self::Resume { id, .. } => id,
        }
    }
}

/// A stream that a client resumes.
#[derive(Debug)]
pub(super) struct WantedStream {
    stream: StreamId,
    /// The number of the first item that the client has not received.
    from: u64,
}

/// A stream that moves to another session.
struct DepartingStream {
    replay: ReplayBuffer,
    first: StreamKey,
    /// `None` if the stream has ended.
    extended: Option<ExtendedStream>,
    samples: BTreeMap<StreamKey, LmtpStream>,
}

impl LmtpSession {
    /// The connection is lost without a close. If the client can resume, the session is detached and waits for it;
    /// otherwise it hangs up. Returns whether the session waits.
    pub fn lose(&mut self, now: Time) -> bool {
        let ends = !matches!(self.phase, LmtpPhase::Open | LmtpPhase::HalfClosed);
        if ends || self.name.is_none() {
            self.hang_up();
            return false;
        }
        let limits = Arc::clone(&self.config.limits);
        self.phase = LmtpPhase::Detached(now + limits.resume_grace);
        self.outbound = LmtpOutbound::default();
        self.question = None;
        self.loading = Loading::default();
        let lost: Vec<_> = self.ids.values().copied().collect();
        for first in lost {
            if !self.replays.is_numbered(first) {
                drop(self.dissolve(first, None, now));
            }
        }
        if self.parked.take().is_some() {
            self.events.push_back(LmtpOutput::Unpark);
        }
        for first in self.replays.hold(&limits) {
            self.park_stream(first);
        }
        true
    }

    /// Whether the session waits for its client to resume.
    #[must_use]
    pub const fn is_detached(&self) -> bool {
        matches!(self.phase, LmtpPhase::Detached(_))
    }

    /// Answers [`LmtpOutput::Name`] with the name for resuming this session; `None` if it cannot be resumed.
    pub fn named(&mut self, name: Option<ByteString>) {
        if let Some(question) = self
            .question
            .take_if(|question| matches!(question, ResumeQuestion::Name(_)))
            && let ResumeQuestion::Name(introduction) = question
        {
            self.name = name;
            self.introduce(&introduction);
        }
    }

    /// Handles RESUME: the client continues streams of another connection.
    pub(super) fn resume(
        &mut self,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
    ) {
        let asked = self.model(members, models);
        match asked.and_then(|_| self.wanted(members)) {
            Err(error) => self.request_failed(id, &error),
            Ok((session, _)) if self.name.as_ref() == Some(&session) => {
                self.request_failed(id, &stream_gone_error());
            }
            Ok((session, wanted)) => {
                let id = id.clone();
                self.question = Some(ResumeQuestion::Resume { id, wanted });
                self.events.push_back(LmtpOutput::Resume(session));
            }
        }
    }

    fn wanted(
        &self,
        members: &PayloadMembers<'_>,
    ) -> Result<(ByteString, Vec<WantedStream>), LmtpError> {
        let wrong = |what| LmtpError::new(LmtpReason::InvalidValue, what);
        let session = members.value("session").ok_or_else(|| {
            let message = "'session' is required: the name that the session was given";
            LmtpError::new(LmtpReason::MissingRequiredParameter, message)
        })?;
        let shape = "'streams' must be a list of {\"stream_id\": id, \"after_seq\": number}";
        let name = "'session' must be the name that the session was given";
        let session = session.string().ok_or_else(|| wrong(name))?;
        let limits = &self.config.limits;
        let mut wanted = Vec::new();
        let streams = members.value("streams").and_then(RawValue::elements);
        for stream in streams.ok_or_else(|| wrong(shape))? {
            // As many live streams as a connection may have, and as many ended ones.
            if wanted.len() == 2 * limits.max_streams {
                return Err(wrong(
                    "'streams' names more streams than a connection can leave",
                ));
            }
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

    /// Answers [`LmtpOutput::Resume`] with that session, whose connection must be lost; `None` if this client has no
    /// session of that name. Both sessions must use the same time origin. Returns the work that continues here, with
    /// its old and new key; all other work of that session must be stopped.
    pub fn resumed(&mut self, from: Option<Self>, now: Time) -> Vec<(StreamKey, StreamKey)> {
        let mut moved = Vec::new();
        let Some(ResumeQuestion::Resume { id, wanted }) = self.question.take() else {
            return moved;
        };
        let Some(mut from) = from.filter(|from| from.name.is_some()) else {
            self.request_failed(&id, &stream_gone_error());
            return moved;
        };
        let (mut resumed, mut removed, mut conflict) = (Vec::new(), Vec::new(), Vec::new());
        for WantedStream { stream, from: seq } in wanted {
            if self.is_in_use(&stream) {
                conflict.push(stream);
                continue;
            }
            let room = self
                .config
                .limits
                .max_streams
                .saturating_sub(self.streams.len());
            match from.leave(&stream, seq, room) {
                Some(departing) => {
                    self.take_over(departing, seq, now, &mut moved);
                    self.stats.resumed += 1;
                    resumed.push(stream);
                }
                None => removed.push(stream),
            }
        }
        self.buffers
            .take_over(from.buffers, now, &self.config.limits);
        self.masks.take_over(from.masks, &self.config.limits);
        self.outbound.notice(|out| {
            write::answer(out, &id, |out| {
                ids(out, "resumed", &resumed);
                ids(out, "gone", &removed);
                ids(out, "conflict", &conflict);
            });
        });
        self.park(now);
        moved
    }

    /// Removes a stream with all its items from `seq` on, if they are still retained and there is room for it.
    fn leave(&mut self, id: &StreamId, seq: u64, room: usize) -> Option<DepartingStream> {
        let first = self.replays.named(id)?;
        if !self.replays.is_numbered(first) || !self.replays.reaches(first, seq) {
            return None;
        }
        let open = self
            .extended
            .get(&first)
            .map_or(0, |extended| extended.open);
        if usize::try_from(open).is_ok_and(|open| open > room) {
            return None;
        }
        let buffer = self.replays.take(first)?;
        let extended = self.extended.remove(&first);
        let keys = extended.iter().flat_map(|extended| extended.keys(first));
        let samples = keys.filter_map(|key| Some((key, self.streams.remove(&key)?)));
        let samples = samples.collect();
        self.ids.remove(id);
        Some(DepartingStream {
            replay: buffer,
            first,
            extended,
            samples,
        })
    }

    fn take_over(
        &mut self,
        departing: DepartingStream,
        seq: u64,
        now: Time,
        moved: &mut Vec<(StreamKey, StreamKey)>,
    ) {
        let first = StreamKey(self.admitted);
        let samples = departing
            .extended
            .as_ref()
            .map_or(1, |extended| extended.samples);
        self.admitted += u64::from(samples);
        if let Some(extended) = departing.extended {
            self.ids.insert(extended.id.clone(), first);
            let due = extended.deadline.into_iter().chain(extended.first_due);
            self.due.extend(due.map(|due| (due, first)));
            self.extended.insert(first, extended);
        }
        for (old, mut stream) in departing.samples {
            let key = StreamKey(first.0 + (old.0 - departing.first.0));
            stream.part = stream.part.map(|part| SampleKey { first, ..part });
            self.streams.insert(key, stream);
            moved.push((old, key));
        }
        let grace = self.config.limits.resume_grace;
        self.replays
            .resume(first, departing.replay, seq, (now, grace));
    }
}

/// The one error for a session that cannot be resumed: unknown, expired, and another caller's are not distinguished.
fn stream_gone_error() -> LmtpError {
    let message = "there is no session of this name to come back to; send the requests again";
    LmtpError::new(LmtpReason::StreamGone, message)
}
