//! Reads the members of cancellation: CANCEL and deadlines (LM-961, LM-962).

use std::time::Duration;

use bytes::{BufMut as _, BytesMut};

use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::{ConnectionLimits, LmtpError, LmtpReason, StreamId, write};
use crate::time::Time;

/// The longest permitted deadline (LM-962).
const DEADLINE_MS_MAX: i128 = 86_400_000;
const DEADLINE_RANGE: &str = "1 to 86400000";

/// The streams that a CANCEL names; `None` names all.
pub(super) fn named_streams(
    members: &PayloadMembers<'_>,
    limits: &ConnectionLimits,
) -> Result<Option<Vec<StreamId>>, LmtpError> {
    let wrong = |reason, what: &str| {
        let message = format!("'streams' must be {what}");
        LmtpError::new(reason, message)
    };
    let value = members.value("streams").ok_or_else(|| {
        let message = "'streams' is required: a list of stream ids, or \"all\"";
        LmtpError::new(LmtpReason::MissingRequiredParameter, message)
    })?;
    if value.string().as_deref() == Some("all") {
        return Ok(None);
    }
    let elements = value
        .elements()
        .ok_or_else(|| wrong(LmtpReason::InvalidType, "a list of stream ids, or \"all\""))?;
    let mut named = Vec::new();
    for element in elements {
        // Checked before the next one is read: a message has room for many more ids than a connection has streams.
        if named.len() == limits.max_streams {
            let most = format!("at most {} ids", limits.max_streams);
            return Err(wrong(LmtpReason::InvalidValue, &most));
        }
        named.push(read::id(element, limits)?);
    }
    Ok(Some(named))
}

/// The deadlines for the end and for the first token of a stream.
pub(super) fn deadlines(
    members: &PayloadMembers<'_>,
    now: Time,
) -> Result<(Option<Time>, Option<Time>), LmtpError> {
    let read = |name: &str| {
        let in_range = |ms| (1..=DEADLINE_MS_MAX).contains(&ms);
        let ms = members.integer(name, DEADLINE_RANGE, in_range)?;
        let ms = ms.and_then(|ms| u64::try_from(ms).ok());
        Ok(ms.map(|ms| now + Duration::from_millis(ms)))
    };
    Ok((read("deadline_ms")?, read("ttft_ms")?))
}

pub(super) fn ids(out: &mut BytesMut, name: &str, ids: &[StreamId]) {
    out.put_u8(b',');
    write::json(out, name);
    out.put_slice(b":[");
    for (at, id) in ids.iter().enumerate() {
        if at > 0 {
            out.put_u8(b',');
        }
        out.put_slice(id.as_json().as_bytes());
    }
    out.put_u8(b']');
}
