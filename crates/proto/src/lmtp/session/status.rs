//! Writes STATUS messages: the state of the server and of streams between items (LM-921 to LM-923).

use bytes::{BufMut as _, BytesMut};

use crate::lmtp::StreamId;
use crate::lmtp::port::StreamUpdate;
use crate::lmtp::write::{self, member};
use crate::steer::VariableWrite;

/// Writes one status, of a stream or of the connection; `sample` is the sample that it is about, if samples are numbered.
pub(super) fn write(
    out: &mut BytesMut,
    id: Option<&StreamId>,
    status: &StreamUpdate,
    sample: Option<u32>,
) {
    write::open(out, id);
    member(out, "event", status.name());
    if let Some(sample) = sample {
        member(out, "sample", &sample);
    }
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
        StreamUpdate::Warning { message } | StreamUpdate::Log { message, .. } => {
            member(out, "message", message);
        }
        StreamUpdate::Storage { write, .. } => storage(out, write),
        StreamUpdate::Draining { deadline } => ms(out, "deadline_ms", *deadline),
        StreamUpdate::Running | StreamUpdate::Shutdown => {}
    }
    out.put_u8(b'}');
}

/// Writes a write of a variable, with the names of the controllers' interface (AI-951).
fn storage(out: &mut BytesMut, write: &VariableWrite) {
    let op = if write.append { "Append" } else { "Set" };
    member(out, "name", &write.name);
    member(out, "value", &hex(&write.value));
    member(out, "op", op);
    member(out, "when_version_is", &write.when_version_is);
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| {
        [
            DIGITS[usize::from(byte >> 4)],
            DIGITS[usize::from(byte & 15)],
        ]
    });
    digits.map(char::from).collect()
}
