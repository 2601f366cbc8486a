//! A byte stream that records whether anything was received.
//!
//! Bytes count, not messages: a message that takes minutes to arrive shows that the peer is alive.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::connection::Io;

/// The connection.
pub(super) struct ListeningIo {
    io: Box<dyn Io>,
    ear: LivenessFlag,
}

/// Set when bytes are received.
#[derive(Clone, Default)]
pub(super) struct LivenessFlag(Arc<AtomicBool>);

impl LivenessFlag {
    /// Returns whether bytes were received since the last call.
    pub(super) fn is_alive(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl ListeningIo {
    /// Wraps `io`; returns it with its flag.
    pub(super) fn to(io: Box<dyn Io>) -> (Self, LivenessFlag) {
        let ear = LivenessFlag::default();
        let listening = Self {
            io,
            ear: ear.clone(),
        };
        (listening, ear)
    }
}

impl AsyncRead for ListeningIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        // An end of input fills nothing, and is no sign of life.
        if buf.filled().len() > before {
            self.ear.0.store(true, Ordering::Relaxed);
        }
        read
    }
}

impl AsyncWrite for ListeningIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
