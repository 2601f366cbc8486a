//! STATUS messages: the state of the server and of streams between items (LM-921 to LM-923).

use bytes::{BufMut as _, BytesMut};

use super::LmtpSession;
use super::extended::SampleKey;
use crate::lmtp::port::{StreamKey, StreamUpdate};
use crate::lmtp::read::PayloadMembers;
use crate::lmtp::write::{self, member};
use crate::lmtp::{Feature, StreamId};
use crate::time::Time;

impl LmtpSession {
    /// Handles a new status of a stream. It is sent if the client wants it, not too often, and never when items wait to
    /// be sent.
    pub fn status(&mut self, stream: StreamKey, status: &StreamUpdate, now: Time) {
        let limits = &self.config.limits;
        // Not sent while the session is detached.
        if self.outbound.bytes > limits.outbox_low_bytes || self.is_detached() {
            return;
        }
        let part = self.streams.get(&stream).and_then(|stream| stream.part);
        let Some(extended) = part.and_then(|part| self.extended.get_mut(&part.first)) else {
            return;
        };
        let wanted = extended.features.has(Feature::Status);
        let often = extended
            .notified
            .is_some_and(|reported| now < reported + limits.status_interval);
        let due = match status {
            StreamUpdate::Loading { .. } | StreamUpdate::Queued { .. } => {
                now >= extended.began + limits.status_after
            }
            StreamUpdate::Running => extended.waited,
            _ => true,
        };
        if !wanted || often || !due {
            return;
        }
        extended.notified = Some(now);
        extended.waited |= matches!(
            status,
            StreamUpdate::Loading { .. } | StreamUpdate::Queued { .. }
        );
        let id = extended.id.clone();
        self.send_status(Some(&id), status);
    }

    /// Sends a status before the first item of a stream whose client was sent a status that it waits (LM-922).
    pub(super) fn send_running(&mut self, part: Option<SampleKey>) {
        let extended = part.and_then(|part| self.extended.get(&part.first));
        let waited = extended.filter(|extended| extended.fresh && extended.waited);
        if let Some(id) = waited.map(|extended| extended.id.clone())
            && self.outbound.bytes <= self.config.limits.outbox_low_bytes
        {
            self.send_status(Some(&id), &StreamUpdate::Running);
        }
    }

    /// Sends a new status of the connection. Such a status is never dropped.
    pub(super) fn announce(&mut self, status: &StreamUpdate) {
        if self.features.has(Feature::Status) {
            self.send_status(None, status);
        }
    }

    /// Warns of an ignored member of a request, once the request was accepted.
    pub(super) fn warn_of_unknown(
        &mut self,
        word: &str,
        id: &StreamId,
        members: &PayloadMembers<'_>,
    ) {
        let name = members.first_unknown().filter(|_| word == "GENERATE");
        let low = self.outbound.bytes <= self.config.limits.outbox_low_bytes;
        if let Some(name) = name.filter(|_| low && self.features.has(Feature::Status)) {
            let message = format!("ignored: '{}'", write::cut(name, NAME_BYTES));
            self.send_status(Some(id), &StreamUpdate::Warning { message });
        }
    }

    pub(super) fn send_status(&mut self, id: Option<&StreamId>, status: &StreamUpdate) {
        self.outbound
            .alone(b"STATUS [", |out| write(out, id, status));
    }
}

/// Maximum bytes shown of an ignored member's name.
const NAME_BYTES: usize = 64;

fn write(out: &mut BytesMut, id: Option<&StreamId>, status: &StreamUpdate) {
    out.put_slice(b"{\"stream_id\":");
    out.put_slice(id.map_or("null", StreamId::as_json).as_bytes());
    member(out, "event", status.name());
    let ms = |out: &mut BytesMut, name, span: Option<std::time::Duration>| {
        if let Some(span) = span {
            let ms = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
            member(out, name, &ms);
        }
    };
    match status {
        StreamUpdate::Loading { progress, eta } => {
            if let Some(progress) = progress {
                member(out, "progress", progress);
            }
            ms(out, "eta_ms", *eta);
        }
        StreamUpdate::Queued { position, eta } => {
            member(out, "queue_pos", position);
            ms(out, "eta_ms", *eta);
        }
        StreamUpdate::Prefill { progress } => member(out, "progress", progress),
        StreamUpdate::Throttled { retry_after } => ms(out, "retry_after_ms", Some(*retry_after)),
        StreamUpdate::Warning { message } => member(out, "message", message),
        StreamUpdate::Draining { deadline } => ms(out, "deadline_ms", *deadline),
        StreamUpdate::Running | StreamUpdate::Shutdown => {}
    }
    out.put_u8(b'}');
}
