//! Detached sessions, and RESUME (LM-964, LM-965).
//!
//! ```text
//!   open ── lose ──► detached ── resume_grace ──► closed
//!     └────────┴──── resumed, by another session ──► streams moved there
//! ```

use super::cancel::ids;
use super::negotiation::{WantedStream, stream_gone_error};
use super::{LmtpPhase, LmtpSession};
use crate::lmtp::port::StreamKey;
use crate::lmtp::write;
use crate::time::Time;

impl LmtpSession {
    /// The connection is lost without a close. If the client can resume, the session is detached and waits for it;
    /// otherwise it hangs up. Returns whether the session waits.
    pub fn lose(&mut self, now: Time) -> bool {
        let ends = !matches!(self.phase, LmtpPhase::Open | LmtpPhase::HalfClosed);
        if ends || self.negotiation.name.is_none() {
            self.hang_up();
            return false;
        }
        self.phase = LmtpPhase::Detached(now + self.config.limits.resume_grace);
        // Messages that were not taken are sent again from the replay buffers. A request that waits for its model has
        // no items yet, so it is dropped and RESUME reports it as `gone`.
        self.outbox.clear();
        self.negotiation.withdraw();
        self.loading.take();
        self.streams.detach(&mut self.outbox, now);
        // The buffers move with the session, so they must be there before another connection resumes it.
        self.buffers
            .store_all(&mut self.streams.kept, &self.config.limits, now);
        true
    }

    /// Whether the session waits for its client to resume.
    #[must_use]
    pub const fn is_detached(&self) -> bool {
        matches!(self.phase, LmtpPhase::Detached(_))
    }

    /// Answers [`super::LmtpOutput::Resume`] with that session, whose connection must be lost; `None` if this client
    /// has no session of that name. Both sessions must use the same time origin. Returns the work that continues here,
    /// with its old and new key; all other work of that session must be stopped.
    pub fn resumed(&mut self, from: Option<Self>, now: Time) -> Vec<(StreamKey, StreamKey)> {
        let mut moved = Vec::new();
        let Some((id, wanted)) = self.negotiation.take_resume() else {
            return moved;
        };
        let Some(mut from) = from.filter(|from| from.negotiation.name.is_some()) else {
            self.outbox.request_failed(&id, &stream_gone_error());
            return moved;
        };
        let grace = self.config.limits.resume_grace;
        let (mut resumed, mut removed, mut conflict) = (Vec::new(), Vec::new(), Vec::new());
        for WantedStream { stream, from: seq } in wanted {
            // A stream that is not moved is dropped with `from`; the shell stops all work whose key is not in `moved`
            // (LM-965).
            if self.is_in_use(&stream) {
                conflict.push(stream);
                continue;
            }
            // For each stream anew: the one before it has taken its share.
            let room = self
                .config
                .limits
                .max_streams
                .saturating_sub(self.streams.len());
            match from.streams.leave(&stream, seq, room) {
                Some(departing) => {
                    self.streams
                        .take_over(departing, seq, (now, grace), &mut moved);
                    self.stats.resumed += 1;
                    resumed.push(stream);
                }
                None => removed.push(stream),
            }
        }
        self.buffers
            .take_over(from.buffers, now, &self.config.limits);
        self.masks.take_over(from.masks, &self.config.limits);
        // The answer comes before the items: `take_over` has only queued them, and `park` below sends them (LM-965).
        self.outbox.messages.notice(|out| {
            write::answer(out, &id, |out| {
                ids(out, "resumed", &resumed);
                ids(out, "gone", &removed);
                ids(out, "conflict", &conflict);
            });
        });
        self.park(now);
        moved
    }
}
