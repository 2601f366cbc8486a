//! A node whose chunks are written by hand, through a sender.
//!
//! ```text
//!   writer ── send (waits while `bytes` are queued) ──► queue ── polled by the leading reader ──► log
//!     └── finish | fail | drop = Truncated
//! ```

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::Stream;

use super::{Node, local};
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;

#[derive(Default)]
struct ChannelQueue {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    /// Set once the writer is done: `None` within for a good end, else the error.
    end: Option<Option<Error>>,
    /// The node and all its readers have been dropped.
    abandoned: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

struct ChannelShared {
    bytes_max: usize,
    queue: Mutex<ChannelQueue>,
}

impl ChannelShared {
    fn lock(&self) -> MutexGuard<'_, ChannelQueue> {
        // Nothing panics under this lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, end: Option<Error>) {
        let waker = {
            let mut queue = self.lock();
            // The first end wins: the drop after `finish` or `fail` ends the channel once more.
            if queue.end.is_none() {
                queue.end = Some(end);
            }
            queue.reader.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The writing half of [`Node::channel`]. If it is dropped without `finish` or `fail`, readers get `Truncated`.
pub struct NodeWriter(Arc<ChannelShared>);

impl NodeWriter {
    /// Appends a chunk. Waits while more than the allowed number of bytes is unread.
    ///
    /// # Errors
    /// `Cancelled` if the node and all its readers have been dropped.
    pub async fn send(&mut self, chunk: Chunk) -> Result<()> {
        let mut chunk = Some(chunk);
        poll_fn(|cx| {
            let mut queue = self.0.lock();
            if queue.abandoned {
                return Poll::Ready(Err(Error::Cancelled));
            }
            // Compared before the chunk is added, so that a chunk larger than the limit passes when the queue is empty.
            if queue.bytes >= self.0.bytes_max {
                queue.writer = Some(cx.waker().clone());
                return Poll::Pending;
            }
            if let Some(chunk) = chunk.take() {
                queue.bytes += local::weight(&chunk);
                queue.chunks.push_back(chunk);
            }
            // The reader locks the queue as soon as it runs.
            let waker = queue.reader.take();
            drop(queue);
            if let Some(waker) = waker {
                waker.wake();
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Ends the node with an error.
    pub fn fail(self, error: Error) {
        self.0.end(Some(error));
    }

    /// Ends the node without an error.
    pub fn finish(self) {
        self.0.end(None);
    }
}

impl Drop for NodeWriter {
    fn drop(&mut self) {
        // After `finish` or `fail` this has no effect: the first end is final.
        self.0.end(Some(Error::Truncated {
            what: "the stream".into(),
        }));
    }
}

/// The source of the node: the receiving half of the channel.
struct ChannelSource(Arc<ChannelShared>);

impl Stream for ChannelSource {
    type Item = Result<Chunk>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut queue = self.0.lock();
        if let Some(chunk) = queue.chunks.pop_front() {
            queue.bytes -= local::weight(&chunk);
            let waker = queue.writer.take();
            drop(queue);
            if let Some(waker) = waker {
                waker.wake();
            }
            return Poll::Ready(Some(Ok(chunk)));
        }
        // After the queued chunks: what was sent before an end, or an error, is delivered first (KE-311).
        match queue.end.clone() {
            Some(end) => Poll::Ready(end.map(Err)),
            None => {
                queue.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for ChannelSource {
    fn drop(&mut self) {
        let waker = {
            let mut queue = self.0.lock();
            queue.abandoned = true;
            // Nobody can read them; the writer may keep its half for long.
            queue.chunks.clear();
            queue.writer.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

pub(super) fn channel(bytes: usize) -> (NodeWriter, Node) {
    let shared = Arc::new(ChannelShared {
        // A limit of zero would never admit a chunk.
        bytes_max: bytes.max(1),
        queue: Mutex::default(),
    });
    let node = Node::new(ChannelSource(shared.clone()));
    (NodeWriter(shared), node)
}
