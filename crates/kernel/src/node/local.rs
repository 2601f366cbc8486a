//! The log of a node whose source is in this process.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures::Stream;
use futures::stream::FusedStream;

use super::relay::{ReaderPosition, Relay, RelayPoll, RelayRetention};
use super::{Replay, ReplayCursor, Retention};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::{Chunks, Result};

/// The implementation of [`Replay`] for sources in this process.
pub(super) struct Local(Relay<Guarded>);

impl Local {
    pub(super) fn new(source: Chunks, keep: Retention) -> Self {
        let (room, window) = match keep {
            Retention::All { bytes } => (Some(bytes), None),
            // A window has no total limit: its source may be endless, and the relay bounds what is retained.
            Retention::Window { bytes } => (None, Some(bytes)),
        };
        let source = Guarded {
            source: Some(source),
            room,
            bytes_max: room.unwrap_or(0),
            panicked: false,
        };
        Self(Relay::new(
            source,
            RelayRetention {
                window,
                // An error has no weight: it must always be logged, also at the limit.
                weight_of: |item| item.as_ref().map_or(0, weight),
            },
        ))
    }
}

impl Replay for Local {
    fn open(&self) -> ReplayCursor {
        let position = self.0.open();
        cursor(&position)
    }

    fn poll_next(
        &self,
        cursor: &mut ReplayCursor,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Chunk>>> {
        let mut reader_position = position(cursor);
        let step = self.0.poll(&mut reader_position, cx.waker());
        cursor.position = reader_position.position as u64;
        step.map(|step| match step {
            RelayPoll::Item(item) => Some(item),
            RelayPoll::End => None,
            RelayPoll::Released => Some(Err(Error::Released)),
            RelayPoll::Reentered => Some(Err(Error::Cycle {
                path: "a node is read inside its own source".into(),
            })),
        })
    }

    fn close(&self, cursor: &mut ReplayCursor) {
        self.0.close(&position(cursor));
    }

    fn is_complete(&self) -> bool {
        self.0.is_ended()
    }
}

fn cursor(reader_position: &ReaderPosition) -> ReplayCursor {
    ReplayCursor {
        slot: reader_position.slot as u64,
        position: reader_position.position as u64,
        ..ReplayCursor::default()
    }
}

const fn position(cursor: &ReplayCursor) -> ReaderPosition {
    // Both numbers were made from a `usize`.
    ReaderPosition {
        slot: cursor.slot as usize,
        position: cursor.position as usize,
    }
}

/// Memory that a logged chunk costs. Small chunks count as their own size, so that a limit bounds memory and not only
/// data.
pub(super) fn weight(chunk: &Chunk) -> usize {
    chunk.data.len().max(size_of::<Chunk>())
}

/// A source that ends after its first error, at its byte limit, and when it panics. It gives at most one error.
struct Guarded {
    source: Option<Chunks>,
    /// Bytes that may still be logged.
    room: Option<usize>,
    bytes_max: usize,
    panicked: bool,
}

impl Stream for Guarded {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(source) = self.source.as_mut() else {
            return Poll::Ready(None);
        };
        let polled = catch_unwind(AssertUnwindSafe(|| source.as_mut().poll_next(cx)));
        let item = match polled {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(item)) => item,
            // Caught here and not only in the run: a node has readers in several runs, and its log must still end
            // (KE-126).
            Err(payload) => Some(Err(self.panicked(payload))),
        };
        // The limit replaces the chunk that exceeds it; what was logged before stays readable (KE-124).
        let item = match (item, self.room) {
            (Some(Ok(chunk)), Some(room)) => Some(match room.checked_sub(weight(&chunk)) {
                Some(rest) => {
                    self.room = Some(rest);
                    Ok(chunk)
                }
                None => Err(Error::Limit {
                    name: "node_bytes_max",
                    max: self.bytes_max as u64,
                }),
            }),
            (item, _) => item,
        };
        if matches!(item, Some(Ok(_))) {
            return Poll::Ready(item);
        }
        // Released before the end is logged, so that a source's guards have run when readers see the end.
        let panicked = self.release();
        // At most one error: a panic of the drop is reported only where the source ended well.
        Poll::Ready(item.or_else(|| panicked.map(Err)))
    }
}

impl Guarded {
    /// Drops the source. The readers and the turn to poll must survive a panic of that drop as well.
    fn release(&mut self) -> Option<Error> {
        let source = self.source.take();
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(source)));
        dropped.err().map(|payload| self.panicked(payload))
    }

    fn panicked(&mut self, payload: Box<dyn Any + Send>) -> Error {
        let panic = panic_text(payload);
        // A source that panics again while it is dropped is counted once.
        if !std::mem::replace(&mut self.panicked, true) {
            PANICS.fetch_add(1, Ordering::Relaxed);
        }
        tracing::error!(panic, "the source of a node panicked");
        Error::Panicked {
            function: "the source of a node".into(),
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.release();
    }
}

impl FusedStream for Guarded {
    fn is_terminated(&self) -> bool {
        self.source.is_none()
    }
}

/// Number of sources of nodes that have panicked in this process so far (OA-913). A node belongs to no kernel, so they
/// are counted for the whole process. Each panic ended its own node only.
#[must_use]
pub fn source_panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

static PANICS: AtomicU64 = AtomicU64::new(0);

/// The message of a panic, for the log.
pub(crate) fn panic_text(payload: Box<dyn Any + Send>) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("(no message)").to_owned();
    // The payload is a value of whoever panicked, and its drop can panic as well. What that throws is leaked, because it can
    // do so again.
    let dropped = catch_unwind(AssertUnwindSafe(|| drop(payload)));
    dropped.unwrap_or_else(std::mem::forget);
    text
}
