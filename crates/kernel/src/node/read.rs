//! The streams that readers of a node poll.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use futures::{Stream, TryStreamExt};

use super::{Node, NodeBody, NodeView, Replay, ReplayCursor};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::name::Mime;
use crate::{Chunks, Result};

/// Reads all bytes, and the mimetype of the first of them; text if there are none.
///
/// # Errors
/// `Limit`, under this name, for more than `max` bytes; the stream's own error.
pub(crate) async fn gather(
    mut chunks: Chunks,
    limit: &'static str,
    max: usize,
) -> Result<(Mime, Bytes)> {
    let (mut mime, mut all) = (None, BytesMut::new());
    while let Some(chunk) = chunks.try_next().await? {
        // While it is read: memory is bounded, however long the stream is.
        if all.len() + chunk.data.len() > max {
            return Err(Error::Limit {
                name: limit,
                max: max as u64,
            });
        }
        all.extend_from_slice(&chunk.data);
        mime.get_or_insert(chunk.mime);
    }
    Ok((mime.unwrap_or(Mime::TEXT), all.freeze()))
}

/// A reader of one log.
pub(super) struct LogReader {
    log: Arc<dyn Replay>,
    cursor: ReplayCursor,
    done: bool,
}

impl LogReader {
    pub(super) fn new(log: Arc<dyn Replay>) -> Self {
        let cursor = log.open();
        Self {
            log,
            cursor,
            done: false,
        }
    }
}

impl Stream for LogReader {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.done {
            return Poll::Ready(None);
        }
        let this = &mut *self;
        if let Some(chunk) = this.cursor.ahead.pop_front() {
            return Poll::Ready(Some(Ok(chunk)));
        }
        let item = ready!(this.log.poll_next(&mut this.cursor, cx));
        this.done = !matches!(item, Some(Ok(_)));
        Poll::Ready(item)
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        // Also after the end: the slot, and what the log holds for a slow reader, are freed here.
        self.log.close(&mut self.cursor);
    }
}

/// A reader of a tree: reads leaf after leaf and opens each when it is reached. Iterative, so nesting costs no stack
/// (EV-305).
pub(super) struct TreeReader {
    /// The trees being read, outermost first, each with the index of the child to be read next.
    path: Vec<(Arc<[Node]>, usize)>,
    leaf: Option<Chunks>,
    /// The part number that part 0 of the current leaf gets.
    part: u32,
    /// The part number that the next leaf gets.
    next_part: u32,
}

impl TreeReader {
    pub(super) fn new(parts: Arc<[Node]>) -> Self {
        Self {
            path: vec![(parts, 0)],
            leaf: None,
            part: 0,
            next_part: 0,
        }
    }

    /// Opens the next leaf. `false` at the end.
    fn descend(&mut self) -> bool {
        while let Some((parts, index)) = self.path.last_mut() {
            let Some(node) = parts.get(*index).cloned() else {
                self.path.pop();
                continue;
            };
            *index += 1;
            if let NodeBody::Tree(inner) = &node.body {
                self.path.push((inner.clone(), 0));
            } else {
                self.part = self.next_part;
                // Opened only when it is reached: an open reader holds a cursor, and may hold back a window (KE-125).
                self.leaf = Some(node.main().open());
                return true;
            }
        }
        false
    }
}

impl Stream for TreeReader {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if self.leaf.is_none() && !self.descend() {
                return Poll::Ready(None);
            }
            let Some(leaf) = self.leaf.as_mut() else {
                return Poll::Ready(None);
            };
            match ready!(leaf.as_mut().poll_next(cx)) {
                Some(Ok(mut chunk)) => {
                    // Parts count through the whole tree; a leaf of a function may have several of its own (KE-128).
                    chunk.part = chunk.part.saturating_add(self.part);
                    self.next_part = self.next_part.max(chunk.part.saturating_add(1));
                    return Poll::Ready(Some(Ok(chunk)));
                }
                Some(Err(error)) => {
                    // An error is the last item (KE-311), also if later leaves could be read.
                    self.path.clear();
                    self.leaf = None;
                    return Poll::Ready(Some(Err(error)));
                }
                None => self.leaf = None,
            }
        }
    }
}

/// A reader of a view: filters and renames the chunks of another reader.
pub(super) struct ViewReader<S> {
    chunks: S,
    view: NodeView,
}

impl<S> ViewReader<S> {
    pub(super) const fn new(chunks: S, view: NodeView) -> Self {
        Self { chunks, view }
    }
}

impl<S: Stream<Item = Result<Chunk>> + Unpin> Stream for ViewReader<S> {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            let mut item = ready!(Pin::new(&mut this.chunks).poll_next(cx));
            // Errors and the end concern every view.
            if let Some(Ok(chunk)) = &mut item
                && !this.view.admit(chunk)
            {
                continue;
            }
            return Poll::Ready(item);
        }
    }
}
