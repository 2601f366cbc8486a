//! Flow control per stream: window and ACK (LM-952).

use super::LmtpSession;
use super::extended::number;
use crate::lmtp::read::PayloadMembers;
use crate::lmtp::{LmtpError, LmtpReason, StreamId, write};
use crate::time::Time;

impl LmtpSession {
    /// Reads the window of a request.
    pub(super) fn window(&self, members: &PayloadMembers<'_>) -> Result<Option<u32>, LmtpError> {
        let max = self.config.limits.max_window;
        let range = "at least 1 and not above the limit";
        let size = members.integer("window", range, |size| {
            (1..=i128::from(max)).contains(&size)
        })?;
        Ok(size.and_then(|size| u32::try_from(size).ok()))
    }

    /// The client has received everything up to an item. Never answered.
    pub(super) fn acknowledge(&mut self, id: &StreamId, members: &PayloadMembers<'_>, now: Time) {
        let seq = members.integer("seq", "0 or more", |seq| seq >= 0);
        let below = seq.ok().flatten().and_then(|seq| u64::try_from(seq).ok());
        if let (Some(first), Some(below)) = (self.replays.named(id), below) {
            self.replays
                .acknowledge(first, below.saturating_add(1), now);
        }
    }

    /// Ends the streams whose clients have acknowledged nothing for too long.
    pub(super) fn expire_windows(&mut self, now: Time) {
        let timeout = self.config.limits.stall_timeout;
        while let Some((at, first)) = self.replays.stalled(timeout)
            && at <= now
        {
            let message = "no item was acknowledged for too long";
            let error = LmtpError::new(LmtpReason::Stalled, message);
            let Some(id) = self.replays.discard_unsent(first) else {
                return;
            };
            if self.extended.contains_key(&first) {
                self.fail_all_of(first, None, &error, now);
                continue;
            }
            // Its work has ended, but its client was not sent the end yet.
            let seq = self.replays.seq(first);
            let max = self.config.limits.max_error_bytes;
            self.replays
                .put(first, &mut self.outbound, &self.config, now, |out| {
                    write::failure(out, &id, &error, max, |out| {
                        number(out, seq);
                    });
                });
        }
    }
}
