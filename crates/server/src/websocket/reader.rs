//! Decodes a client's messages from the bytes of its frames (RFC 6455, sections 5 and 7).
//!
//! Memory is held only while something is being received, so an idle connection holds none (EV-982):
//!
//! ```text
//!   nothing ─ room is requested ─► 4 KiB ─ it was filled ─► 16 KiB ─┐
//!      ▲   a frame's head was read ─► 64 KiB, then 8 times what came ┤
//!      └──────────────── nothing arrives, and nothing is left ◄─────┘
//! ```

use std::io::Cursor;

use bytes::{Buf, Bytes, BytesMut};
use tokio_tungstenite::tungstenite::protocol::frame::FrameHeader;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Control, Data, OpCode};

use super::SocketLoss;

/// Decodes frames and reassembles messages.
pub(super) struct FrameReader {
    /// Received and not yet decoded.
    buf: BytesMut,
    /// The size of the allocation that `buf` is part of.
    block: usize,
    /// The last read filled all the room.
    filled: bool,
    /// The head of the frame whose payload is awaited.
    frame: Option<FrameHead>,
    /// The message of which fragments have arrived.
    pieces: Option<PartialMessage>,
    message_bytes_max: usize,
}

/// A complete message or control frame of a client.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReadFrame {
    /// UTF-8.
    Text(Bytes),
    Binary(Bytes),
    Ping(Bytes),
    Pong,
    /// With the code, if there is one.
    Close(Option<CloseCode>),
}

struct FrameHead {
    kind: OpCode,
    is_final: bool,
    mask: [u8; 4],
    len: usize,
}

struct PartialMessage {
    kind: Data,
    bytes: BytesMut,
    /// Frames that may still arrive, beside one for each byte (EV-705).
    frames_left: usize,
}

impl FrameReader {
    /// A reader that begins with the bytes `ahead`; a message may have up to `message_bytes_max` bytes.
    pub(super) fn new(ahead: Vec<u8>, message_bytes_max: usize) -> Self {
        let ahead = Bytes::from(ahead);
        Self {
            block: ahead.len(),
            buf: ahead.into(),
            filled: false,
            frame: None,
            pieces: None,
            message_bytes_max,
        }
    }

    /// The next message or control frame that is complete; `None` if more bytes are needed.
    ///
    /// # Errors
    /// `TooLarge`, `NotText` or `Broken`; nothing after one of these can be parsed.
    pub(super) fn next(&mut self) -> Result<Option<ReadFrame>, SocketLoss> {
        loop {
            let frame = match self.frame.take() {
                Some(frame) => frame,
                None => match self.head()? {
                    Some(frame) => frame,
                    None => return Ok(None),
                },
            };
            if self.buf.len() < frame.len {
                self.frame = Some(frame);
                return Ok(None);
            }
            if let Some(sent) = self.take(&frame)? {
                return Ok(Some(sent));
            }
        }
    }

    /// The buffer to read into; call [`Self::came`] after each read.
    pub(super) fn room(&mut self) -> &mut BytesMut {
        let usual = if self.filled { WIDE } else { NARROW };
        let (least, best) = match &self.frame {
            // Room for many times what has arrived, so that a large message takes few reads and copies (EV-981), and not for
            // all of it: a head alone would pin a huge page of 2 MiB, and nothing is charged for it (D-47). Some is for what
            // follows, so that the next head needs no read of its own.
            Some(frame) => {
                let missing = frame.len.saturating_sub(self.buf.len());
                let part = missing.min(AHEAD.max(self.buf.len().saturating_mul(GROWTH)));
                (missing.min(AHEAD), usual.max(part.saturating_add(NARROW)))
            }
            None if self.filled => (WIDE / 4, usual),
            None => (HEAD_MAX, usual),
        };
        if self.buf.capacity() - self.buf.len() < least {
            // Always a new allocation and never `reserve` on the old one: messages that were handed out may share that.
            let mut fresh = BytesMut::new();
            self.block = self.buf.len() + best;
            fresh.reserve(self.block);
            fresh.extend_from_slice(&self.buf);
            self.buf = fresh;
        }
        &mut self.buf
    }

    /// A read into [`Self::room`] has ended.
    pub(super) fn came(&mut self) {
        self.filled = self.buf.len() == self.buf.capacity();
    }

    /// Received bytes that are in no message that was handed out.
    pub(super) fn held_bytes(&self) -> usize {
        let pieces = self.pieces.as_ref().map_or(0, |pieces| pieces.bytes.len());
        self.buf.len() + pieces
    }

    /// Nothing arrives for now: frees the buffer if it is empty.
    pub(super) fn rest(&mut self) {
        self.filled = false;
        // Not with bytes of an incomplete frame in it, which stay where they are until the rest arrives.
        if self.buf.is_empty() {
            self.buf = BytesMut::new();
            self.block = 0;
        }
    }

    /// Parses the head of the next frame and checks it against the state of the message.
    fn head(&mut self) -> Result<Option<FrameHead>, SocketLoss> {
        // All checks are made at the head, before memory is allocated for the payload.
        let mut cursor = Cursor::new(&self.buf[..self.buf.len().min(HEAD_MAX)]);
        let head = FrameHeader::parse(&mut cursor).map_err(|_| SocketLoss::Broken)?;
        let Some((head, len)) = head else {
            return Ok(None);
        };
        let read = usize::try_from(cursor.position()).unwrap_or(HEAD_MAX);
        let len = usize::try_from(len).map_err(|_| SocketLoss::TooLarge)?;
        // A client must mask (section 5.1), which keeps proxies from reading its bytes as another request.
        let Some(mask) = head.mask else {
            return Err(SocketLoss::Broken);
        };
        // Reserved bits belong to extensions, and none was accepted.
        let reserved = head.rsv1 || head.rsv2 || head.rsv3;
        let placed = match (head.opcode, &self.pieces) {
            // Control frames may come between the fragments of a message, whole and short.
            (OpCode::Control(_), _) => head.is_final && len <= CONTROL_BYTES_MAX,
            (OpCode::Data(Data::Continue), pieces) => pieces.is_some(),
            (OpCode::Data(_), pieces) => pieces.is_none(),
        };
        if reserved || !placed {
            return Err(SocketLoss::Broken);
        }
        let before = self.pieces.as_ref().map_or(0, |pieces| pieces.bytes.len());
        let left = self.message_bytes_max - before.min(self.message_bytes_max);
        if matches!(head.opcode, OpCode::Data(_)) && len > left {
            return Err(SocketLoss::TooLarge);
        }
        self.buf.advance(read);
        Ok(Some(FrameHead {
            kind: head.opcode,
            is_final: head.is_final,
            mask,
            len,
        }))
    }

    /// Consumes a complete frame; `None` if it was a fragment of an incomplete message.
    fn take(&mut self, frame: &FrameHead) -> Result<Option<ReadFrame>, SocketLoss> {
        let mut payload = self.buf.split_to(frame.len);
        unmask(&mut payload, frame.mask);
        let kind = match frame.kind {
            OpCode::Control(Control::Close) => return close(&payload).map(Some),
            OpCode::Control(Control::Ping) => {
                // Copied, because a pong may wait for a slow peer, and must not keep the read buffer meanwhile.
                return Ok(Some(ReadFrame::Ping(Bytes::copy_from_slice(&payload))));
            }
            OpCode::Control(_) => return Ok(Some(ReadFrame::Pong)),
            OpCode::Data(kind) => kind,
        };
        let mut pieces = match self.pieces.take() {
            // Most messages: one frame, which is handed out without a copy.
            None if frame.is_final => return message(kind, self.alone(payload)).map(Some),
            None => PartialMessage {
                kind,
                bytes: BytesMut::new(),
                frames_left: FRAMES_MAX,
            },
            Some(pieces) => pieces,
        };
        pieces.add(&payload)?;
        if frame.is_final {
            return message(pieces.kind, pieces.bytes.freeze()).map(Some);
        }
        self.pieces = Some(pieces);
        Ok(None)
    }

    /// The payload of a message in one frame. In a much larger allocation it is copied, or it would keep all of that alive; the
    /// smallest payloads are not, because whoever stores one copies it anyway (EV-805).
    fn alone(&self, payload: BytesMut) -> Bytes {
        let pins = payload.len() >= RETAINED_WHOLE && self.block / 4 > payload.len();
        if pins {
            Bytes::copy_from_slice(&payload)
        } else {
            payload.freeze()
        }
    }
}

impl PartialMessage {
    fn add(&mut self, payload: &[u8]) -> Result<(), SocketLoss> {
        self.bytes.extend_from_slice(payload);
        // Each byte pays for a frame, so that fragments of one byte are legal and only empty ones are counted out.
        self.frames_left = (self.frames_left + payload.len())
            .checked_sub(1)
            .ok_or(SocketLoss::TooLarge)?;
        Ok(())
    }
}

fn message(kind: Data, bytes: Bytes) -> Result<ReadFrame, SocketLoss> {
    if kind != Data::Text {
        return Ok(ReadFrame::Binary(bytes));
    }
    // The whole message and not each fragment: a character may be split between two.
    match std::str::from_utf8(&bytes) {
        Ok(_) => Ok(ReadFrame::Text(bytes)),
        Err(_) => Err(SocketLoss::NotText),
    }
}

fn close(payload: &[u8]) -> Result<ReadFrame, SocketLoss> {
    let Some((code, reason)) = payload.split_first_chunk() else {
        // A single byte is no code.
        let bare = payload.is_empty();
        return bare
            .then_some(ReadFrame::Close(None))
            .ok_or(SocketLoss::Broken);
    };
    let code = CloseCode::from(u16::from_be_bytes(*code));
    if !code.is_allowed() {
        return Err(SocketLoss::Broken);
    }
    match std::str::from_utf8(reason) {
        Ok(_) => Ok(ReadFrame::Close(Some(code))),
        Err(_) => Err(SocketLoss::NotText),
    }
}

fn unmask(payload: &mut [u8], mask: [u8; 4]) {
    // Eight bytes at a time, which the compiler turns into vector instructions.
    let wide = u64::from_ne_bytes([
        mask[0], mask[1], mask[2], mask[3], mask[0], mask[1], mask[2], mask[3],
    ]);
    let (words, rest) = payload.as_chunks_mut::<8>();
    for word in words {
        *word = (u64::from_ne_bytes(*word) ^ wide).to_ne_bytes();
    }
    for (byte, mask) in rest.iter_mut().zip(mask.into_iter().cycle()) {
        *byte ^= mask;
    }
}

/// The longest head of a frame: two bytes, a length of eight and a mask of four.
const HEAD_MAX: usize = 14;
/// RFC 6455, section 5.5.
const CONTROL_BYTES_MAX: usize = 125;
/// Buffer for a client whose reads do not fill it.
const NARROW: usize = 4 * 1024;
/// Buffer after a read that filled the one before.
const WIDE: usize = 16 * 1024;
/// Room for a payload of which little has arrived.
const AHEAD: usize = 64 * 1024;
/// Room for the rest of a payload, as a multiple of what has arrived.
const GROWTH: usize = 7;
/// Payloads below this are copied by whoever stores them.
const RETAINED_WHOLE: usize = 1024;
/// Frames of a message, beside one for each byte (EV-705).
const FRAMES_MAX: usize = 1_048_576;

#[cfg(test)]
mod tests;
