//! Streams whose connection is gone, and that the peer keeps (LM-964, LM-965).
//!
//! Owns: what an earlier connection has left behind, and how the next one gets it. Refuses to know: when that is, and how often
//! it is tried.
//!
//! ```text
//!   open ── part ──► apart ── an agreement on the next connection, RESUME ──► open, behind the last item that came
//!                      └───── no agreement, no answer, gone, lost again ────► failed: connection_lost
//! ```

use bytes::{BufMut as _, Bytes, BytesMut};
use serde::Serialize;

use super::received::Members;
use super::{Call, Client, Kind, Open};
use crate::lmtp::write::{self, member};
use crate::lmtp::{Fault, Feature, Features, Reason};
use crate::time::Time;

/// What the peer keeps for us.
#[derive(Debug)]
pub(super) struct Apart {
    session: String,
    /// One of the models that are asked there.
    model: String,
    /// The peer was asked for it.
    asked: bool,
}

#[derive(Serialize)]
struct Wanted {
    stream_id: u64,
    after_seq: i64,
}

impl Client {
    /// The connection is gone, and another one to the same peer may be made. Streams that the peer numbers wait for that;
    /// everything else fails. Returns whether any waits: then the peer is to be negotiated with anew, and asked by
    /// [`Self::come_back`]. What is lost twice in a row has failed.
    pub fn part(&mut self) -> bool {
        let session = self.session.take().filter(|_| self.apart.is_none());
        self.features = Features::NONE;
        (self.load, self.draining, self.apart) = (None, false, None);
        let is_kept = |open: &Open| session.is_some() && open.next.is_some() && !open.abandoned;
        self.fail_all(Reason::ConnectionLost, LOST, |open| !is_kept(open));
        for open in self.open.values_mut() {
            (open.apart, open.due) = (true, None);
        }
        let model = self.open.values().next().map(|open| open.model.clone());
        self.apart = session.zip(model).map(|(session, model)| Apart {
            session,
            model,
            asked: false,
        });
        self.apart.is_some()
    }

    /// The model to negotiate with, where streams wait that the peer was not asked for yet.
    #[must_use]
    pub fn apart(&self) -> Option<&str> {
        let apart = self.apart.as_ref().filter(|apart| !apart.asked);
        apart.map(|apart| &*apart.model)
    }

    /// Asks the peer for the streams that wait, once it has answered what it agrees to. `None` if there are none, or if it does
    /// not agree; then they have failed.
    pub fn come_back(&mut self, now: Time) -> Option<Bytes> {
        let is_agreed = self.features.has(Feature::Resume);
        let apart = self.apart.as_mut().filter(|apart| !apart.asked)?;
        apart.asked = true;
        if !is_agreed {
            self.stay_apart();
            return None;
        }
        let waiting = self.open.iter().filter(|(_, open)| open.apart);
        let wanted: Vec<_> = waiting
            .map(|(id, open)| Wanted {
                stream_id: *id,
                after_seq: i64::try_from(open.next.unwrap_or(0)).unwrap_or(i64::MAX) - 1,
            })
            .collect();
        let model = apart.model.clone();
        let mut out = BytesMut::from(&b"RESUME {\"model\":"[..]);
        write::json(&mut out, &model);
        member(&mut out, "stream_id", &(self.last_id + 1));
        member(&mut out, "session", &apart.session);
        member(&mut out, "streams", &wanted);
        out.put_u8(b'}');
        let begun = self.begin(out, &model, Kind::Resume, 0, now);
        match begun {
            Ok((_, message)) => Some(message),
            Err(_too_large) => {
                self.stay_apart();
                None
            }
        }
    }

    /// The peer has answered: streams go on, or are gone.
    pub(super) fn came_back(&mut self, members: &Members<'_>, now: Time) {
        for id in members.left_behind() {
            if self.open.get(&id).is_some_and(|open| open.apart) {
                self.fail(id, Fault::new(Reason::ConnectionLost, LOST));
            }
        }
        self.apart = None;
        let patience = self.options.item_timeout;
        for open in self.open.values_mut().filter(|open| open.apart) {
            open.apart = false;
            open.due = patience.map(|patience| now + patience);
        }
    }

    /// There is no way back to what waits.
    pub(super) fn stay_apart(&mut self) {
        self.apart = None;
        self.fail_all(Reason::ConnectionLost, LOST, |open| open.apart);
    }

    /// Whether nobody is to be told that a stream is not wanted any more: what is not asked for again ends there.
    pub(super) fn forsake(&mut self, call: Call) -> bool {
        let is_apart = self.open.get(&call.0).is_some_and(|open| open.apart);
        let forsaken = is_apart && self.apart().is_some();
        if forsaken {
            self.open.remove(&call.0);
        }
        forsaken
    }
}

pub(super) const LOST: &str = "the connection to the upstream was lost";
