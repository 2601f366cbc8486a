//! Cancellation of streams: CANCEL and deadlines (LM-961, LM-962).

use std::time::Duration;

use bytes::{BufMut as _, BytesMut};

use super::{LmtpPhase, LmtpSession};
use crate::lmtp::port::StreamKey;
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::{LmtpError, LmtpReason, ModelLookup, StreamFinish, StreamId, write};
use crate::time::Time;

/// The longest permitted deadline (LM-962).
const DEADLINE_MS_MAX: i128 = 86_400_000;
const DEADLINE_RANGE: &str = "1 to 86400000";

impl LmtpSession {
    /// Ends each named live stream at once, and then answers the request.
    pub(super) fn cancel(
        &mut self,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        now: Time,
    ) {
        let named = match self.model(members, models) {
            Ok(_) => self.named_streams(members),
            Err(error) => Err(error),
        };
        let named = match named {
            Ok(named) => named,
            Err(error) => return self.request_failed(id, &error),
        };
        let (mut cancelled, mut unknown) = (Vec::new(), Vec::new());
        for stream in named {
            match self.ids.get(&stream).copied() {
                Some(key) => {
                    self.end_early(key, &StreamFinish::Cancelled, now);
                    cancelled.push(stream);
                }
                None if self.cancel_waiting(&stream) => cancelled.push(stream),
                None => unknown.push(stream),
            }
        }
        self.outbound.notice(|out| {
            write::answer(out, id, |out| {
                ids(out, "cancelled", &cancelled);
                ids(out, "unknown", &unknown);
            });
        });
    }

    fn named_streams(&self, members: &PayloadMembers<'_>) -> Result<Vec<StreamId>, LmtpError> {
        let wrong = |reason, what: &str| {
            let message = format!("'streams' must be {what}");
            LmtpError::new(reason, message)
        };
        let value = members.value("streams").ok_or_else(|| {
            let message = "'streams' is required: a list of stream ids, or \"all\"";
            LmtpError::new(LmtpReason::MissingRequiredParameter, message)
        })?;
        if value.string().as_deref() == Some("all") {
            let mut all: Vec<_> = self
                .ids
                .iter()
                .map(|(id, key)| (*key, id.clone()))
                .collect();
            all.sort_by_key(|(key, _)| *key);
            let all = all.into_iter().map(|(_, id)| id);
            return Ok(all.chain(self.loading.ids().cloned()).collect());
        }
        let limits = &self.config.limits;
        let elements = value
            .elements()
            .ok_or_else(|| wrong(LmtpReason::InvalidType, "a list of stream ids, or \"all\""))?;
        let mut named = Vec::new();
        for element in elements {
            if named.len() == limits.max_streams {
                let most = format!("at most {} ids", limits.max_streams);
                return Err(wrong(LmtpReason::InvalidValue, &most));
            }
            named.push(read::id(element, limits)?);
        }
        Ok(named)
    }

    /// Ends a stream early, with the output sent so far.
    fn end_early(&mut self, first: StreamKey, finish: &StreamFinish, now: Time) {
        let Some((id, extended)) = self.dissolve(first, None, now) else {
            return;
        };
        self.replays.open_window(first);
        let seq = self.replays.seq(first);
        self.replays.put(
            first,
            &mut self.outbound,
            &self.config,
            now,
            |out| match &extended {
                Some(extended) => extended.end(out, finish, seq),
                None => write::end(out, &id, finish, |_| {}),
            },
        );
        if !self.config.coalesce {
            self.outbound.end_items();
        }
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

    /// Ends the streams whose deadline has passed.
    pub(super) fn expire(&mut self, now: Time) {
        while let Some((due, first)) = self.due.first().copied() {
            if due > now
                || !matches!(
                    self.phase,
                    LmtpPhase::Open | LmtpPhase::HalfClosed | LmtpPhase::Detached(_)
                )
            {
                return;
            }
            self.due.pop_first();
            let Some(extended) = self.extended.get_mut(&first) else {
                continue;
            };
            if extended.deadline == Some(due) {
                self.end_early(first, &StreamFinish::Deadline, now);
            } else if extended.first_due.take() == Some(due) {
                let message = "no token came within 'ttft_ms'";
                let error = LmtpError::new(LmtpReason::Timeout, message);
                self.fail_all_of(first, None, &error, now);
            }
        }
    }
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
