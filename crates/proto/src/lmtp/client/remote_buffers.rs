//! Resuming streams whose connection was lost and that the server still runs (LM-964, LM-965).
//!
//! ```text
//!   open ── part ──► detached ── negotiated on the next connection, RESUME ──► open, after the last item received
//!                      └──────── not negotiated, no answer, refused, lost again ──► failed: connection_lost
//! ```

use bytes::{BufMut as _, Bytes, BytesMut};
use serde::Serialize;

use super::received::ItemMembers;
use super::{CallKind, ClientCallId, ClientMachine, OpenCall};
use crate::lmtp::write::{self, member};
use crate::lmtp::{Feature, Features, LmtpError, LmtpReason};
use crate::time::Time;

/// The session that the peer retains for us.
#[derive(Debug)]
pub(super) struct RemoteBuffers {
    session: String,
    /// One of the models of its streams, for negotiation.
    model: String,
    /// Whether RESUME was sent.
    asked: bool,
}

#[derive(Serialize)]
struct WantedBuffer {
    stream_id: u64,
    after_seq: i64,
}

impl ClientMachine {
    /// The connection is lost, and another one to the same peer may be opened. Streams with numbered items wait for
    /// that; all other calls fail. Returns whether any stream waits: then negotiate with the peer again, and call
    /// [`Self::come_back`]. Streams that are detached twice in a row fail.
    pub fn part(&mut self) -> bool {
        // Still set if the connection was lost before it had answered RESUME; then the session is given up.
        let session = self.session.take().filter(|_| self.detached.is_none());
        // Negotiated for each connection: the next one may reach an older server.
        self.features = Features::NONE;
        (self.load, self.draining, self.detached) = (None, false, None);
        // An abandoned stream is not retained: RESUME does not name it, and so the peer cancels it (LM-965).
        let is_retained =
            |open: &OpenCall| session.is_some() && open.next.is_some() && !open.abandoned;
        self.fail_all(LmtpReason::ConnectionLost, LOST, |open| !is_retained(open));
        for open in self.open.values_mut() {
            // Timeouts of items do not run without a connection; the caller bounds the wait by its first attempt to
            // connect.
            (open.detached, open.due) = (true, None);
        }
        let model = self.open.values().next().map(|open| open.model.clone());
        self.detached = session.zip(model).map(|(session, model)| RemoteBuffers {
            session,
            model,
            asked: false,
        });
        self.detached.is_some()
    }

    /// The model to negotiate with, if streams wait and RESUME was not sent yet.
    #[must_use]
    pub fn detached_session(&self) -> Option<&str> {
        let separate = self.detached.as_ref().filter(|separate| !separate.asked);
        separate.map(|separate| &*separate.model)
    }

    /// Returns the RESUME message for the waiting streams, once the peer has answered the negotiation. `None` if no
    /// streams wait, or if resume was not negotiated; the streams have failed then.
    pub fn come_back(&mut self, now: Time) -> Option<Bytes> {
        let is_agreed = self.features.has(Feature::Resume);
        let separate = self.detached.as_mut().filter(|separate| !separate.asked)?;
        separate.asked = true;
        if !is_agreed {
            self.stay_detached();
            return None;
        }
        let waiting = self.open.iter().filter(|(_, open)| open.detached);
        let wanted: Vec<_> = waiting
            .map(|(id, open)| WantedBuffer {
                stream_id: *id,
                // -1 if nothing was received: all items are wanted.
                after_seq: i64::try_from(open.next.unwrap_or(0)).unwrap_or(i64::MAX) - 1,
            })
            .collect();
        let model = separate.model.clone();
        let mut out = BytesMut::from(&b"RESUME {\"model\":"[..]);
        write::json(&mut out, &model);
        member(&mut out, "stream_id", &(self.last_id + 1));
        member(&mut out, "session", &separate.session);
        member(&mut out, "streams", &wanted);
        out.put_u8(b'}');
        let begun = self.begin(out, &model, CallKind::Resume, 0, now);
        match begun {
            Ok((_, message)) => Some(message),
            Err(_too_large) => {
                self.stay_detached();
                None
            }
        }
    }

    /// Handles the answer to RESUME: streams continue or fail.
    pub(super) fn came_back(&mut self, members: &ItemMembers<'_>, now: Time) {
        for id in members.left_behind() {
            // Only streams that wait: the peer must not fail others by naming them.
            if self.open.get(&id).is_some_and(|open| open.detached) {
                self.fail(id, LmtpError::new(LmtpReason::ConnectionLost, LOST));
            }
        }
        self.detached = None;
        let timeout = self.options.item_timeout;
        for open in self.open.values_mut().filter(|open| open.detached) {
            open.detached = false;
            open.due = timeout.map(|timeout| now + timeout);
        }
    }

    /// The waiting streams cannot be resumed: they fail.
    pub(super) fn stay_detached(&mut self) {
        self.detached = None;
        self.fail_all(LmtpReason::ConnectionLost, LOST, |open| open.detached);
    }

    /// Removes a waiting stream before RESUME is sent; returns whether it did. No CANCEL is needed then: the server
    /// ends a stream that is not resumed.
    pub(super) fn abandon_buffer(&mut self, call: ClientCallId) -> bool {
        let is_separate = self.open.get(&call.0).is_some_and(|open| open.detached);
        let abandoned = is_separate && self.detached_session().is_some();
        if abandoned {
            self.open.remove(&call.0);
        }
        abandoned
    }
}

pub(super) const LOST: &str = "the connection to the upstream was lost";
