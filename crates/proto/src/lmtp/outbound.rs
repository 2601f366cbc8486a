//! The outgoing queue of a connection.

use std::collections::VecDeque;

use bytes::{BufMut as _, Bytes, BytesMut};

use super::port::MessageFraming;

/// Maximum size of any message: `aiohttp` refuses larger ones (LM-1202).
const FRAME_BYTES_MAX: usize = 4_194_303;
const OPENING: &[u8] = b"TOKEN [";
/// Maximum size of an item, alone in its message.
pub(super) const ITEM_BYTES_MAX: usize = FRAME_BYTES_MAX - OPENING.len() - ENDING_BYTES;

#[derive(Debug, Default)]
pub(super) struct LmtpOutbound {
    /// Each item is a message of its own, not in a list (LM-114).
    bare: bool,
    /// Complete messages.
    whole: VecDeque<BytesMut>,
    /// The TOKEN message that the next item joins, without its end; empty if there is none.
    open: BytesMut,
    /// Queued bytes.
    pub(super) bytes: usize,
}

impl LmtpOutbound {
    pub(super) fn new(bare: bool) -> Self {
        Self {
            bare,
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.open.is_empty()
    }

    /// Appends an item to the open message, or begins a new message.
    pub(super) fn item(&mut self, max: usize, write: impl FnOnce(&mut BytesMut)) {
        if self.bare {
            return self.alone(OPENING, write);
        }
        let max = max.min(FRAME_BYTES_MAX);
        let retained = self.open.len();
        self.open
            .put_slice(if retained == 0 { OPENING } else { b"," });
        // Written in place: its size is not known before, and nearly always it fits.
        write(&mut self.open);
        self.bytes += self.open.len() - retained;
        // A first item is never split off: larger than the limit, it goes alone, and it is at most `ITEM_BYTES_MAX`
        // (LM-1202).
        if retained > 0 && self.open.len() + ENDING_BYTES > max {
            let item = self.open.split_off(retained);
            self.end_items();
            self.open.put_slice(OPENING);
            self.open.put_slice(&item[1..]);
            // The comma was counted above; the opening takes its place.
            self.bytes += OPENING.len() - 1;
        }
    }

    /// Completes the open message: the next item begins a new one.
    pub(super) fn end_items(&mut self) {
        if !self.open.is_empty() {
            let mut message = std::mem::take(&mut self.open);
            message.put_u8(b']');
            self.bytes += 1;
            self.whole.push_back(message);
        }
    }

    /// Queues a MSG; each is a message of its own (LM-406).
    pub(super) fn notice(&mut self, write: impl FnOnce(&mut BytesMut)) {
        self.alone(b"MSG [", write);
    }

    /// Queues a message of one item; `opening` is its text up to the list.
    pub(super) fn alone(&mut self, opening: &[u8], write: impl FnOnce(&mut BytesMut)) {
        // Before it, so that messages keep the order of the calls: streams end before their CANCEL is answered
        // (LM-961).
        self.end_items();
        let mut message = BytesMut::from(opening);
        if self.bare {
            // Without the bracket of the list, with which `opening` ends.
            message.truncate(opening.len() - 1);
        }
        write(&mut message);
        if !self.bare {
            message.put_u8(b']');
        }
        self.bytes += message.len();
        self.whole.push_back(message);
    }

    /// Takes the next message, if there is one.
    pub(super) fn take(&mut self, carrier: MessageFraming) -> Option<Bytes> {
        // Only if nothing else waits: until it is taken, items of further steps join the open message (LM-607).
        if self.whole.is_empty() {
            self.end_items();
        }
        let mut message = self.whole.pop_front()?;
        self.bytes -= message.len();
        if carrier == MessageFraming::Lines {
            message.put_u8(b'\n');
        }
        Some(message.freeze())
    }
}

/// Bytes of the end of a list and of a line.
const ENDING_BYTES: usize = 2;
