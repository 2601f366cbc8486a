//! Writes STATUS messages: the state of the server and of streams between items (LM-921 to LM-923).

use bytes::{BufMut as _, BytesMut};

use crate::lmtp::StreamId;
use crate::lmtp::port::StreamUpdate;
use crate::lmtp::write::{self, member};

/// Writes one status, of a stream or of the connection.
pub(super) fn write(out: &mut BytesMut, id: Option<&StreamId>, status: &StreamUpdate) {
    write::open(out, id);
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
