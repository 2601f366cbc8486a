//! Sessions whose clients come back (LM-964, LM-965).
//!
//! Owns: how a session waits for its client, and what of it a new one takes over. Refuses to know: where sessions are kept,
//! and who may have which; the shell looks for them by name.
//!
//! ```text
//!   open ── lose ──► held ── resume_grace ──► closed
//!     └───────┴──── resumed, by another session ──► gone from here
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use bytestring::ByteString;

use super::cancel::ids;
use super::extended::{Extended, Part};
use super::loading::Loading;
use super::negotiation::Introduction;
use super::rings::Ring;
use super::{Phase, Session, Stream};
use crate::lmtp::json::Value;
use crate::lmtp::outbound::Outbound;
use crate::lmtp::port::{Output, StreamKey};
use crate::lmtp::read::{self, Members};
use crate::lmtp::{Fault, Id, Models, Reason, write};
use crate::time::Time;

/// What the shell was asked. Nothing is read until it has answered.
#[derive(Debug)]
pub(super) enum Question {
    /// What is this session to be called? Then whoever negotiates is answered.
    Name(Introduction),
    /// Where is the session that this request comes back to?
    Resume { id: Id, wanted: Vec<Wanted> },
}

impl Question {
    /// The request that waits for it.
    pub(super) const fn id(&self) -> &Id {
        match self {
            Self::Name(introduction) => &introduction.id,
            Self::Resume { id, .. } => id,
        }
    }
}

/// A stream that a client comes back to.
#[derive(Debug)]
pub(super) struct Wanted {
    stream: Id,
    /// The number of the first item that it has not got.
    from: u64,
}

/// A stream that leaves its session.
struct Leaving {
    ring: Ring,
    first: StreamKey,
    /// `None` if it has ended.
    extended: Option<Extended>,
    samples: BTreeMap<StreamKey, Stream>,
}

impl Session {
    /// The connection is gone, and its client did not say goodbye. Whoever can come back is waited for; everybody else has
    /// hung up. Returns whether the session waits.
    pub fn lose(&mut self, now: Time) -> bool {
        let ends = !matches!(self.phase, Phase::Open | Phase::HalfClosed);
        if ends || self.name.is_none() {
            self.hang_up();
            return false;
        }
        let limits = Arc::clone(&self.config.limits);
        self.phase = Phase::Held(now + limits.resume_grace);
        self.outbound = Outbound::default();
        self.question = None;
        self.loading = Loading::default();
        let lost: Vec<_> = self.ids.values().copied().collect();
        for first in lost {
            if !self.rings.is_numbered(first) {
                drop(self.dissolve(first, None, now));
            }
        }
        if self.parked.take().is_some() {
            self.events.push_back(Output::Unpark);
        }
        for first in self.rings.hold(&limits) {
            self.park_stream(first);
        }
        true
    }

    /// Whether it waits for its client.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        matches!(self.phase, Phase::Held(_))
    }

    /// Answers [`Output::Name`]: by this name the client comes back; `None` if it cannot.
    pub fn named(&mut self, name: Option<ByteString>) {
        if let Some(question) = self
            .question
            .take_if(|question| matches!(question, Question::Name(_)))
            && let Question::Name(introduction) = question
        {
            self.name = name;
            self.introduce(&introduction);
        }
    }

    /// The client wants to go on with what another connection has begun.
    pub(super) fn resume(&mut self, id: &Id, members: &Members<'_>, models: &dyn Models) {
        let asked = self.model(members, models);
        match asked.and_then(|_| self.wanted(members)) {
            Err(fault) => self.request_failed(id, &fault),
            Ok((session, _)) if self.name.as_ref() == Some(&session) => {
                self.request_failed(id, &gone());
            }
            Ok((session, wanted)) => {
                let id = id.clone();
                self.question = Some(Question::Resume { id, wanted });
                self.events.push_back(Output::Resume(session));
            }
        }
    }

    fn wanted(&self, members: &Members<'_>) -> Result<(ByteString, Vec<Wanted>), Fault> {
        let wrong = |what| Fault::new(Reason::InvalidValue, what);
        let session = members.value("session").ok_or_else(|| {
            let message = "'session' is required: the name that the session was given";
            Fault::new(Reason::MissingRequiredParameter, message)
        })?;
        let shape = "'streams' must be a list of {\"stream_id\": id, \"after_seq\": number}";
        let name = "'session' must be the name that the session was given";
        let session = session.string().ok_or_else(|| wrong(name))?;
        let limits = &self.config.limits;
        let mut wanted = Vec::new();
        let streams = members.value("streams").and_then(Value::elements);
        for stream in streams.ok_or_else(|| wrong(shape))? {
            // As many live ones, and as many that have ended.
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
            wanted.push(Wanted { stream, from });
        }
        Ok((ByteString::from(&*session), wanted))
    }

    /// Answers [`Output::Resume`] with that session, whose connection must be gone; `None` if there is none of that name
    /// for this client. Both must count time from the same origin. Returns which work goes on here, and under which key;
    /// all other work of that session is to be stopped.
    pub fn resumed(&mut self, from: Option<Self>, now: Time) -> Vec<(StreamKey, StreamKey)> {
        let mut moved = Vec::new();
        let Some(Question::Resume { id, wanted }) = self.question.take() else {
            return moved;
        };
        let Some(mut from) = from.filter(|from| from.name.is_some()) else {
            self.request_failed(&id, &gone());
            return moved;
        };
        let (mut resumed, mut gone, mut conflict) = (Vec::new(), Vec::new(), Vec::new());
        for Wanted { stream, from: seq } in wanted {
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
                Some(leaving) => {
                    self.take_over(leaving, seq, now, &mut moved);
                    self.stats.resumed += 1;
                    resumed.push(stream);
                }
                None => gone.push(stream),
            }
        }
        self.buffers
            .take_over(from.buffers, now, &self.config.limits);
        self.masks.take_over(from.masks, &self.config.limits);
        self.outbound.notice(|out| {
            write::answer(out, &id, |out| {
                ids(out, "resumed", &resumed);
                ids(out, "gone", &gone);
                ids(out, "conflict", &conflict);
            });
        });
        self.park(now);
        moved
    }

    /// A stream leaves with everything from this item on, if that is still known and there is room for it.
    fn leave(&mut self, id: &Id, seq: u64, room: usize) -> Option<Leaving> {
        let first = self.rings.named(id)?;
        if !self.rings.is_numbered(first) || !self.rings.reaches(first, seq) {
            return None;
        }
        let open = self
            .extended
            .get(&first)
            .map_or(0, |extended| extended.open);
        if usize::try_from(open).is_ok_and(|open| open > room) {
            return None;
        }
        let ring = self.rings.take(first)?;
        let extended = self.extended.remove(&first);
        let keys = extended.iter().flat_map(|extended| extended.keys(first));
        let samples = keys.filter_map(|key| Some((key, self.streams.remove(&key)?)));
        let samples = samples.collect();
        self.ids.remove(id);
        Some(Leaving {
            ring,
            first,
            extended,
            samples,
        })
    }

    fn take_over(
        &mut self,
        leaving: Leaving,
        seq: u64,
        now: Time,
        moved: &mut Vec<(StreamKey, StreamKey)>,
    ) {
        let first = StreamKey(self.admitted);
        let samples = leaving
            .extended
            .as_ref()
            .map_or(1, |extended| extended.samples);
        self.admitted += u64::from(samples);
        if let Some(extended) = leaving.extended {
            self.ids.insert(extended.id.clone(), first);
            let due = extended.deadline.into_iter().chain(extended.first_due);
            self.due.extend(due.map(|due| (due, first)));
            self.extended.insert(first, extended);
        }
        for (old, mut stream) in leaving.samples {
            let key = StreamKey(first.0 + (old.0 - leaving.first.0));
            stream.part = stream.part.map(|part| Part { first, ..part });
            self.streams.insert(key, stream);
            moved.push((old, key));
        }
        let grace = self.config.limits.resume_grace;
        self.rings.resume(first, leaving.ring, seq, (now, grace));
    }
}

/// The one answer to whoever cannot go on: unknown, over, and somebody else's are the same.
fn gone() -> Fault {
    let message = "there is no session of this name to come back to; send the requests again";
    Fault::new(Reason::StreamGone, message)
}
