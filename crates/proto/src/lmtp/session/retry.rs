//! `retry_of`: a request that repeats an earlier one (LM-963).

use super::LmtpSession;
use super::extended::number;
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::{LmtpError, LmtpReason, ModelLookup, StreamFinish, StreamId, write};
use crate::time::Time;

impl LmtpSession {
    /// Attaches a request to the work of the stream that it repeats, if that stream is known and can be replayed from
    /// its start; returns whether it did. Otherwise it is a normal request, and the earlier work is stopped, so that no
    /// work is done twice.
    pub(super) fn retry(
        &mut self,
        word: &str,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        now: Time,
    ) -> Result<bool, LmtpError> {
        let Some(earlier) = members.value("retry_of") else {
            return Ok(false);
        };
        let earlier = read::id(earlier, &self.config.limits)?;
        self.model(members, models)?;
        let Some(first) = self.replays.named(&earlier) else {
            return Ok(false);
        };
        if !self.replays.is_numbered(first) {
            return Ok(false);
        }
        if !self.replays.is_of(first, members.digest(word)) {
            let message = "'retry_of' names a stream that another request has begun";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        let dues = Self::deadlines(members, now)?;
        let whole = self.replays.reaches(first, 0);
        if self.is_in_use(&earlier) {
            self.supersede(&earlier, now, !whole);
        }
        if !whole {
            return Ok(false);
        }
        self.ids.remove(&earlier);
        let grace = self.config.limits.resume_grace;
        self.replays.rename(first, id, (now, grace));
        self.stats.resumed += 1;
        if let Some(extended) = self.extended.get_mut(&first) {
            extended.id = id.clone();
            for due in extended.deadline.into_iter().chain(extended.first_due) {
                self.due.remove(&(due, first));
            }
            (extended.deadline, extended.first_due) = dues;
            extended.first_due = extended.first_due.filter(|_| extended.fresh);
            let due = extended.deadline.into_iter().chain(extended.first_due);
            self.due.extend(due.map(|due| (due, first)));
            for key in extended.keys(first) {
                if let Some(stream) = self.streams.get_mut(&key) {
                    stream.id = id.clone();
                }
            }
            self.ids.insert(id.clone(), first);
        }
        Ok(true)
    }

    /// Ends the earlier stream for its reader. Its work ends too, if `stop` is set because the new one cannot take it
    /// over.
    fn supersede(&mut self, earlier: &StreamId, now: Time, stop: bool) {
        let Some(first) = self.replays.named(earlier) else {
            return;
        };
        let seq = self.replays.next_unsent(first);
        let extended = self.extended.get(&first);
        self.outbound.item(self.config.limits.max_frame_out, |out| {
            write::end(out, earlier, &StreamFinish::Superseded, |out| {
                number(out, seq);
                if let Some(extended) = extended {
                    extended.usage(out);
                }
            });
        });
        if !self.config.coalesce {
            self.outbound.end_items();
        }
        if stop {
            drop(self.dissolve(first, None, now));
            drop(self.replays.take(first));
        }
    }
}
