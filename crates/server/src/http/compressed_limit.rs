//! Ends compressed input that no longer unpacks to anything (D-47).
//!
//! All formats have parts that hold nothing: empty blocks, members, frames. Sixty MiB of these are seconds of work in one
//! piece, between the parts of which nobody looks at whether anybody still waits. Nothing that was packed to be smaller
//! needs more than twice the bytes of what it holds.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Bytes;
use bytes::Buf;

/// Bytes that are being unpacked.
pub(crate) struct CompressedLimit {
    bytes: Bytes,
    read: usize,
    unpacked: UnpackedCount,
}

/// How much they have unpacked to so far; updated by the decoder between two steps.
#[derive(Clone, Default)]
pub(crate) struct UnpackedCount(Arc<AtomicUsize>);

impl CompressedLimit {
    pub(crate) const fn new(bytes: Bytes, unpacked: UnpackedCount) -> Self {
        Self {
            bytes,
            read: 0,
            unpacked,
        }
    }

    /// What was not read.
    pub(crate) fn rest(&self) -> &[u8] {
        &self.bytes
    }
}

impl UnpackedCount {
    pub(crate) fn set(&self, bytes: usize) {
        self.0.store(bytes, Ordering::Relaxed);
    }
}

impl Read for CompressedLimit {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let unpacked = self.unpacked.0.load(Ordering::Relaxed);
        let most = unpacked.saturating_mul(2).saturating_add(AHEAD);
        let left = most.saturating_sub(self.read);
        if left == 0 && !self.bytes.is_empty() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let read = self.bytes.len().min(buf.len()).min(left);
        self.bytes.copy_to_slice(&mut buf[..read]);
        self.read += read;
        Ok(read)
    }
}

/// Unpacked bytes of a step: between two of them the request may end, and others have their turn.
pub(crate) const STEP: usize = 256 << 10;
/// What may be read before anything has come of it: all that a step can need of what does not get smaller, and what decoders
/// read ahead.
const AHEAD: usize = 2 * STEP;
/// What is packed into so much may be unpacked at once where it is read.
pub(crate) const UNPACKED_HERE: usize = 8 << 10;
