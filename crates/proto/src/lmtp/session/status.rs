//! What the server tells of itself and of streams between their items (LM-921 to LM-923).
//!
//! Owns: how often, when not, and the words. Refuses to know: why; the shell says what happens.

use bytes::{BufMut as _, BytesMut};

use super::Session;
use super::extended::Part;
use crate::lmtp::port::{Status, StreamKey};
use crate::lmtp::read::Members;
use crate::lmtp::write::{self, member};
use crate::lmtp::{Feature, Id};
use crate::time::Time;

impl Session {
    /// Something happened to a stream that is worth telling. Told if its client wants it, not too often, and never in
    /// the way of items.
    pub fn status(&mut self, stream: StreamKey, status: &Status, now: Time) {
        let limits = &self.config.limits;
        // Nobody hears it while its client is away.
        if self.outbound.bytes > limits.outbox_low_bytes || self.is_held() {
            return;
        }
        let part = self.streams.get(&stream).and_then(|stream| stream.part);
        let Some(extended) = part.and_then(|part| self.extended.get_mut(&part.first)) else {
            return;
        };
        let wanted = extended.features.has(Feature::Status);
        let often = extended
            .told
            .is_some_and(|told| now < told + limits.status_interval);
        let due = match status {
            Status::Loading { .. } | Status::Queued { .. } => {
                now >= extended.began + limits.status_after
            }
            Status::Running => extended.waited,
            _ => true,
        };
        if !wanted || often || !due {
            return;
        }
        extended.told = Some(now);
        extended.waited |= matches!(status, Status::Loading { .. } | Status::Queued { .. });
        let id = extended.id.clone();
        self.tell(Some(&id), status);
    }

    /// A stream gives its first item after its client was told that it waits (LM-922).
    pub(super) fn tell_running(&mut self, part: Option<Part>) {
        let extended = part.and_then(|part| self.extended.get(&part.first));
        let waited = extended.filter(|extended| extended.fresh && extended.waited);
        if let Some(id) = waited.map(|extended| extended.id.clone())
            && self.outbound.bytes <= self.config.limits.outbox_low_bytes
        {
            self.tell(Some(&id), &Status::Running);
        }
    }

    /// Something happened to the connection. Such news is never dropped.
    pub(super) fn announce(&mut self, status: &Status) {
        if self.features.has(Feature::Status) {
            self.tell(None, status);
        }
    }

    /// Says which member of a request was ignored, once it was accepted.
    pub(super) fn warn_of_unknown(&mut self, word: &str, id: &Id, members: &Members<'_>) {
        let name = members.first_unknown().filter(|_| word == "GENERATE");
        let low = self.outbound.bytes <= self.config.limits.outbox_low_bytes;
        if let Some(name) = name.filter(|_| low && self.features.has(Feature::Status)) {
            let message = format!("ignored: '{}'", write::cut(name, NAME_BYTES));
            self.tell(Some(id), &Status::Warning { message });
        }
    }

    pub(super) fn tell(&mut self, id: Option<&Id>, status: &Status) {
        self.outbound
            .alone(b"STATUS [", |out| write(out, id, status));
    }
}

/// Bytes of an ignored member's name that are shown.
const NAME_BYTES: usize = 64;

fn write(out: &mut BytesMut, id: Option<&Id>, status: &Status) {
    out.put_slice(b"{\"stream_id\":");
    out.put_slice(id.map_or("null", Id::as_json).as_bytes());
    member(out, "event", status.name());
    let ms = |out: &mut BytesMut, name, span: Option<std::time::Duration>| {
        if let Some(span) = span {
            let ms = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
            member(out, name, &ms);
        }
    };
    match status {
        Status::Loading { progress, eta } => {
            if let Some(progress) = progress {
                member(out, "progress", progress);
            }
            ms(out, "eta_ms", *eta);
        }
        Status::Queued { position, eta } => {
            member(out, "queue_pos", position);
            ms(out, "eta_ms", *eta);
        }
        Status::Prefill { progress } => member(out, "progress", progress),
        Status::Throttled { retry_after } => ms(out, "retry_after_ms", Some(*retry_after)),
        Status::Warning { message } => member(out, "message", message),
        Status::Draining { deadline } => ms(out, "deadline_ms", *deadline),
        Status::Running | Status::Shutdown => {}
    }
    out.put_u8(b'}');
}
