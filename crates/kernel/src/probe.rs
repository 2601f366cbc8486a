//! Test doubles: sources, wakers and functions that record what happens to them.
//!
//! Compiled for tests only.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::{Stream, StreamExt};

use crate::chunk::Chunk;
use crate::from_chunks::FromChunks;
use crate::function::Fun;
use crate::handler::raw;
use crate::run::Run;
use crate::spec::Spec;
use crate::{Chunks, Result};

/// Counts the polls, the items and the drop of a source.
#[derive(Debug, Default)]
pub(crate) struct Count {
    pub(crate) polls: AtomicUsize,
    pub(crate) given: AtomicUsize,
    pub(crate) dropped: AtomicUsize,
}

impl Count {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn polls(&self) -> usize {
        self.polls.load(Ordering::SeqCst)
    }

    pub(crate) fn given(&self) -> usize {
        self.given.load(Ordering::SeqCst)
    }

    pub(crate) fn dropped(&self) -> usize {
        self.dropped.load(Ordering::SeqCst)
    }
}

/// A source that plays a list and counts its polls. `None` in the list is a `Pending` that wakes at once.
pub(crate) struct Played {
    items: VecDeque<Option<Result<Chunk>>>,
    count: Arc<Count>,
    /// After the list: the end, or pending for ever.
    ends: bool,
    waker: Option<Waker>,
}

impl Stream for Played {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.count.polls.fetch_add(1, Ordering::SeqCst);
        match self.items.pop_front() {
            Some(Some(item)) => {
                self.count.given.fetch_add(1, Ordering::SeqCst);
                Poll::Ready(Some(item))
            }
            Some(None) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            None if self.ends => Poll::Ready(None),
            None => {
                self.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        self.count.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

/// A source of these items, then the end.
pub(crate) fn played(count: &Arc<Count>, items: impl IntoIterator<Item = Result<Chunk>>) -> Played {
    Played {
        items: items.into_iter().map(Some).collect(),
        count: count.clone(),
        ends: true,
        waker: None,
    }
}

/// The same with pauses: `None` is one `Pending`.
pub(crate) fn paused(count: &Arc<Count>, items: impl IntoIterator<Item = Option<Chunk>>) -> Played {
    Played {
        items: items.into_iter().map(|item| item.map(Ok)).collect(),
        count: count.clone(),
        ends: true,
        waker: None,
    }
}

/// A source of these items that then never ends.
pub(crate) fn endless(count: &Arc<Count>, items: impl IntoIterator<Item = Chunk>) -> Played {
    let mut source = played(count, items.into_iter().map(Ok));
    source.ends = false;
    source
}

/// Text chunks.
pub(crate) fn texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<Chunk> {
    texts.into_iter().map(Chunk::text).collect()
}

/// A function without inputs that makes this stream at each call.
pub(crate) fn source(spec: Spec, make: impl Fn() -> Played + Send + Sync + 'static) -> Fun {
    raw(spec, move |_| make().boxed())
}

/// The items of a stream, each as its text or its error's code.
pub(crate) fn drain(mut chunks: Chunks) -> Vec<String> {
    let mut out = Vec::new();
    while let Some(item) = futures::executor::block_on(chunks.next()) {
        out.push(match item {
            Ok(chunk) => chunk.to_string(),
            Err(error) => format!("!{}", error.code()),
        });
    }
    out
}

/// The whole of a run.
pub(crate) fn whole<T: FromChunks>(run: Run<T>) -> Result<T::Whole> {
    futures::executor::block_on(IntoFuture::into_future(run))
}

/// A waker that counts.
#[derive(Debug, Default)]
pub(crate) struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Woken {
    pub(crate) fn new() -> (Arc<Self>, Waker) {
        let woken = Arc::new(Self::default());
        (woken.clone(), Waker::from(woken))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// Polls once.
pub(crate) fn poll_once<S: Stream + Unpin>(stream: &mut S, waker: &Waker) -> Poll<Option<S::Item>> {
    Pin::new(stream).poll_next(&mut Context::from_waker(waker))
}

/// Where a [`fragile`] function panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Panics {
    /// When it is called.
    Call,
    /// At this poll of its stream, counted from 0.
    Poll(usize),
    /// When its stream is dropped.
    Drop,
    /// At this poll, and once more when its stream is dropped.
    PollAndDrop(usize),
}

impl Panics {
    fn polls(self, at: usize) -> bool {
        matches!(self, Self::Poll(poll) | Self::PollAndDrop(poll) if poll == at)
    }

    fn drops(self) -> bool {
        matches!(self, Self::Drop | Self::PollAndDrop(_))
    }
}

/// What a [`fragile`] function does at its polls before it ends.
pub(crate) const FRAGILE_POLLS: usize = 4;

/// A function that gives `a`, pauses, gives `b`, and then ends, or stays pending if it is `endless`; and that panics on
/// the way. `alive` is shared with all of its parts that are not dropped yet.
pub(crate) fn fragile(spec: Spec, panics: Panics, endless: bool, alive: Arc<()>) -> Fun {
    raw(spec, move |_| {
        assert!(panics != Panics::Call, "on purpose");
        let stream = Fragile {
            panics,
            endless,
            polls: 0,
            _alive: Arc::clone(&alive),
        };
        stream.boxed()
    })
}

struct Fragile {
    panics: Panics,
    endless: bool,
    polls: usize,
    _alive: Arc<()>,
}

impl Stream for Fragile {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let poll = self.polls;
        self.polls += 1;
        assert!(!self.panics.polls(poll), "on purpose");
        match poll {
            0 => Poll::Ready(Some(Ok(Chunk::text("a")))),
            2 => Poll::Ready(Some(Ok(Chunk::text("b")))),
            1 => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            _ if self.endless => Poll::Pending,
            _ => Poll::Ready(None),
        }
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        assert!(!self.panics.drops(), "on purpose");
    }
}
