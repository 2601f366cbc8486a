//! The outgoing queue of a connection.

use std::collections::VecDeque;

use bytes::{BufMut as _, Bytes, BytesMut};

use super::port::MessageFraming;

/// What no message may pass, because `aiohttp` refuses it (LM-1202).
const FRAME_BYTES_MAX: usize = 4_194_303;
const OPENING: &[u8] = b"TOKEN [";

#[derive(Debug, Default)]
pub(super) struct LmtpOutbound {
    /// Each item is a message, and no list (LM-114).
    bare: bool,
    /// Messages that grow no more.
    whole: VecDeque<BytesMut>,
    /// The TOKEN message that the next item joins, without its end; empty if there is none.
    open: BytesMut,
    /// Bytes that wait.
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

    /// Adds the item that `write` writes to the open message, or begins the next.
    pub(super) fn item(&mut self, max: usize, write: impl FnOnce(&mut BytesMut)) {
        if self.bare {
            return self.alone(OPENING, write);
        }
        let max = max.min(FRAME_BYTES_MAX);
        let retained = self.open.len();
        self.open
            .put_slice(if retained == 0 { OPENING } else { b"," });
        write(&mut self.open);
        self.bytes += self.open.len() - retained;
        if retained > 0 && self.open.len() + ENDING_BYTES > max {
            let item = self.open.split_off(retained);
            self.end_items();
            self.open.put_slice(OPENING);
            self.open.put_slice(&item[1..]);
            self.bytes += OPENING.len() - 1;
        }
    }

    /// The next item begins a message of its own.
    pub(super) fn end_items(&mut self) {
        if !self.open.is_empty() {
            let mut message = std::mem::take(&mut self.open);
            message.put_u8(b']');
            self.bytes += 1;
            self.whole.push_back(message);
        }
    }

    /// A MSG; each goes out alone (LM-406).
    pub(super) fn notice(&mut self, write: impl FnOnce(&mut BytesMut)) {
        self.alone(b"MSG [", write);
    }

    /// A message of one item, which begins so, up to the list.
    pub(super) fn alone(&mut self, opening: &[u8], write: impl FnOnce(&mut BytesMut)) {
        self.end_items();
        let mut message = BytesMut::from(opening);
        if self.bare {
            message.truncate(opening.len() - 1);
        }
        write(&mut message);
        if !self.bare {
            message.put_u8(b']');
        }
        self.bytes += message.len();
        self.whole.push_back(message);
    }

    /// The next message, if any waits.
    pub(super) fn take(&mut self, carrier: MessageFraming) -> Option<Bytes> {
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

/// The end of a list and of a line.
const ENDING_BYTES: usize = 2;
