//! Fails compressed input that unpacks to almost nothing (D-47).
//!
//! All formats have parts without content: empty blocks, members, frames. Sixty MiB of these are seconds of work within one
//! step, which cannot be interrupted. Data that was compressed to be smaller never needs more than twice the bytes of its
//! content.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Bytes;
use bytes::Buf;

/// The compressed bytes, as the decoder reads them.
pub(crate) struct CompressedLimit {
    bytes: Bytes,
    read: usize,
    unpacked: UnpackedCount,
}

/// The number of bytes that were unpacked so far; updated between two steps.
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

    /// The bytes that were not read.
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
        // The count is that of the last step, so it lags by what this step has unpacked; `AHEAD` covers that.
        let unpacked = self.unpacked.0.load(Ordering::Relaxed);
        let most = unpacked.saturating_mul(2).saturating_add(AHEAD);
        let left = most.saturating_sub(self.read);
        // An error and not the end: a decoder would take an end for a complete or cut-off input.
        if left == 0 && !self.bytes.is_empty() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let read = self.bytes.len().min(buf.len()).min(left);
        self.bytes.copy_to_slice(&mut buf[..read]);
        self.read += read;
        Ok(read)
    }
}

/// Bytes that one step unpacks: between two steps the request may end, and other requests get their turn.
pub(crate) const STEP: usize = 256 << 10;
/// Bytes that may be read before any are unpacked: the most that a step can need of incompressible content, and what decoders
/// read ahead.
const AHEAD: usize = 2 * STEP;
