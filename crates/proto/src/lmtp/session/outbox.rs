//! Outgoing messages for the client and outputs for the shell, with the bound on unsent bytes (LM-607).

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::extended::number;
use super::status;
use crate::lmtp::outbound::LmtpOutbound;
use crate::lmtp::port::{Config, LmtpOutput, MessageFraming, StreamUpdate};
use crate::lmtp::{ConnectionLimits, LmtpError, StreamFinish, StreamId, write};
use crate::time::Time;

/// Outgoing messages and outputs of a session.
///
/// Invariant: `parked` is set from the moment at which more than `outbox_bytes` are unsent until less than
/// `outbox_low_bytes` are, and the shell was notified of each change. The gap between both keeps work from being parked
/// and unparked with each message.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) messages: LmtpOutbound,
    pub(super) events: VecDeque<LmtpOutput>,
    pub(super) limits: Arc<ConnectionLimits>,
    /// Whether items share a message; see [`Config::coalesce`].
    pub(super) coalesce: bool,
    carrier: MessageFraming,
    /// Since when too many bytes have been unsent without a message being taken.
    parked: Option<Time>,
    /// Messages taken by the transport.
    pub(super) taken: u64,
}

impl Outbox {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            messages: LmtpOutbound::new(config.bare),
            events: VecDeque::new(),
            limits: Arc::clone(&config.limits),
            coalesce: config.coalesce,
            carrier: config.carrier,
            parked: None,
            taken: 0,
        }
    }

    /// Takes the next message, for the transport.
    pub(super) fn take(&mut self, now: Time) -> Option<Bytes> {
        let message = self.messages.take(self.carrier)?;
        self.taken += 1;
        if self.parked.is_some() {
            // A client that reads slowly still reads: the stall timeout counts from the last message that it took.
            self.parked = Some(now);
            if self.messages.bytes < self.limits.outbox_low_bytes {
                self.unpark();
            }
        }
        Some(message)
    }

    /// Parks all streams if too many bytes are unsent.
    pub(super) fn park(&mut self, now: Time) {
        // Checked after each input and not for each item: a step may exceed the bound once, by its own size (LM-607).
        if self.parked.is_none() && self.messages.bytes > self.limits.outbox_bytes {
            self.parked = Some(now);
            self.events.push_back(LmtpOutput::Park);
        }
    }

    /// Lets all streams continue, if they are parked.
    pub(super) fn unpark(&mut self) {
        if self.parked.take().is_some() {
            self.events.push_back(LmtpOutput::Unpark);
        }
    }

    pub(super) const fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// When the client counts as stalled, if it takes no message before.
    pub(super) fn stalls_at(&self) -> Option<Time> {
        let timeout = self.limits.stall_timeout;
        self.parked.map(|since| since + timeout)
    }

    /// Whether few enough bytes are unsent for a status that may be dropped: items come first.
    pub(super) fn has_room(&self) -> bool {
        self.messages.bytes <= self.limits.outbox_low_bytes
    }

    /// Discards all messages.
    pub(super) fn clear(&mut self) {
        // Outputs stay: the shell must still act on each `Cancel`. The new queue has lost `bare`, but nothing is sent
        // after a clear.
        self.messages = LmtpOutbound::default();
    }

    /// Ends the message of the items so far, unless they share it with the next ones.
    pub(super) fn end_item(&mut self) {
        if !self.coalesce {
            self.messages.end_items();
        }
    }

    /// Answers a request with these members, or with its error.
    pub(super) fn reply(&mut self, id: &StreamId, reply: Result<BytesMut, LmtpError>) {
        match reply {
            Ok(members) => self
                .messages
                .notice(|out| write::answer(out, id, |out| out.extend_from_slice(&members))),
            Err(error) => self.request_failed(id, &error),
        }
    }

    /// Answers a request with an error, with the members of an error item (LM-504).
    pub(super) fn request_failed(&mut self, id: &StreamId, error: &LmtpError) {
        let max = self.limits.max_error_bytes;
        self.messages
            .notice(|out| write::failure(out, id, error, max, |_| {}));
    }

    /// Sends an error that belongs to no stream.
    pub(super) fn notice(&mut self, id: Option<&StreamId>, error: &LmtpError) {
        let max = self.limits.max_error_bytes;
        self.messages
            .notice(|out| write::notice(out, id, error, max));
    }

    /// Refuses a stream: its only item is the error, as the first one (LM-963).
    pub(super) fn refuse(&mut self, id: &StreamId, cause: &LmtpError, numbered: bool) {
        let (frame, max) = (self.limits.max_frame_out, self.limits.max_error_bytes);
        let seq = numbered.then_some(0);
        self.messages.item(frame, |out| {
            write::failure(out, id, cause, max, |out| number(out, seq));
        });
        self.end_item();
    }

    /// Ends a stream that never began, without an error.
    pub(super) fn finish(&mut self, id: &StreamId, finish: &StreamFinish, numbered: bool) {
        let seq = numbered.then_some(0);
        self.messages.item(self.limits.max_frame_out, |out| {
            write::end(out, id, finish, |out| number(out, seq));
        });
        self.end_item();
    }

    /// Sends a status of a stream, or of the connection.
    pub(super) fn status(&mut self, id: Option<&StreamId>, status: &StreamUpdate) {
        self.sample_status(id, status, None);
    }

    /// Sends a status of one sample of a stream, or of all of it.
    pub(super) fn sample_status(
        &mut self,
        id: Option<&StreamId>,
        status: &StreamUpdate,
        sample: Option<u32>,
    ) {
        self.messages
            .alone(b"STATUS [", |out| status::write(out, id, status, sample));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lmtp::LmtpReason;

    /// LM-607: parked above the upper bound, unparked below the lower one, one output each.
    #[test]
    fn lm_607_the_outbox_parks_above_one_bound_and_unparks_below_the_other() {
        let limits = ConnectionLimits {
            outbox_bytes: 250,
            outbox_low_bytes: 150,
            ..ConnectionLimits::default()
        };
        let stall = limits.stall_timeout;
        let mut outbox = Outbox::new(&Config {
            limits: Arc::new(limits),
            ..Config::default()
        });
        let error = LmtpError::new(LmtpReason::Malformed, "x");
        while outbox.messages.bytes <= 250 {
            assert!(!outbox.is_parked());
            outbox.notice(None, &error);
            outbox.park(Time::ZERO);
        }
        outbox.park(Time::from_millis(1));
        assert_eq!(outbox.stalls_at(), Some(Time::ZERO + stall));
        assert_eq!(outbox.events.len(), 1);
        while outbox.messages.bytes >= 150 {
            assert!(outbox.is_parked() && !outbox.has_room());
            outbox.take(Time::from_millis(2)).unwrap();
        }
        assert!(!outbox.is_parked() && outbox.has_room());
        assert!(matches!(outbox.events.pop_back(), Some(LmtpOutput::Unpark)));
        assert_eq!((outbox.events.len(), outbox.stalls_at()), (1, None));
    }
}
