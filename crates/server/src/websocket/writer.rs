//! Encodes and queues outgoing frames.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::AsyncWrite;
use tokio_tungstenite::tungstenite::protocol::frame::FrameHeader;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Control, Data, OpCode};

/// Frames that are not yet written.
#[derive(Default)]
pub(super) struct FrameWriter {
    /// Sent before `open`.
    pieces: VecDeque<Bytes>,
    /// Collects the heads and small frames.
    open: BytesMut,
    /// Bytes in both.
    len: usize,
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    Text,
    Binary,
    Ping,
    Pong,
    Close,
}

impl FrameWriter {
    /// Bytes that are queued.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Appends a frame.
    pub(super) fn put(&mut self, kind: FrameKind, payload: Bytes) {
        let before = self.open.len();
        head(kind, payload.len(), &mut self.open);
        self.len += self.open.len() - before + payload.len();
        // Small payloads are copied, so that many of them are one slice; large ones are shared and not copied, and end the
        // collected run so that the order stays.
        if payload.len() < GATHERED {
            self.open.put(payload);
        } else {
            self.pieces.push_back(self.open.split().freeze());
            self.pieces.push_back(payload);
        }
    }

    /// Writes everything that is queued.
    pub(super) fn poll_write(
        &mut self,
        mut io: Pin<&mut impl AsyncWrite>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while self.len > 0 {
            let mut slices = [IoSlice::new(&[]); AT_ONCE];
            let waiting = self.pieces.iter().map(|piece| &piece[..]);
            let waiting = waiting.chain(std::iter::once(&self.open[..]));
            let mut count = 0;
            for (slice, piece) in slices.iter_mut().zip(waiting) {
                *slice = IoSlice::new(piece);
                count += 1;
            }
            let written = ready!(io.as_mut().poll_write_vectored(cx, &slices[..count]))?;
            // Nothing accepted although there is something to write: the loop would never end.
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Frees a buffer that has grown beyond [`RETAINED_BYTES`], if it is empty.
    pub(super) fn rest(&mut self) {
        // A usual buffer is kept: the next token needs it again.
        if self.len == 0 && self.open.capacity() > RETAINED_BYTES {
            *self = Self::default();
        }
    }

    fn written(&mut self, mut count: usize) {
        self.len -= count;
        while let Some(piece) = self.pieces.front_mut() {
            if count < piece.len() {
                piece.advance(count);
                return;
            }
            count -= piece.len();
            self.pieces.pop_front();
        }
        self.open.advance(count);
    }
}

/// The head of a frame; a server's has no mask, and a message of ours is never in pieces (EV-705).
fn head(kind: FrameKind, len: usize, out: &mut BytesMut) {
    let opcode = match kind {
        FrameKind::Text => OpCode::Data(Data::Text),
        FrameKind::Binary => OpCode::Data(Data::Binary),
        FrameKind::Ping => OpCode::Control(Control::Ping),
        FrameKind::Pong => OpCode::Control(Control::Pong),
        FrameKind::Close => OpCode::Control(Control::Close),
    };
    let head = FrameHeader {
        opcode,
        ..FrameHeader::default()
    };
    // Writing into a growing buffer cannot fail.
    let _ = head.format(len as u64, &mut out.writer());
}

/// Payloads below this are copied into the common buffer.
const GATHERED: usize = 4 * 1024;
/// Maximum of slices in one vectored write.
const AT_ONCE: usize = 16;
/// Size up to which an empty buffer is kept.
const RETAINED_BYTES: usize = 4 * 1024;

#[cfg(test)]
mod tests;
