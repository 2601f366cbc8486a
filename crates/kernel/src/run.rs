//! [`Run`]: a call in progress, as a stream.
//!
//! ```text
//!   flow: chunk ── T::push ──► items ── poll_next ──► the caller
//!                └─ T::push_fold ──► whole             (await, finish, settle)
//! ```

pub(crate) mod begin;
mod driven;
pub(crate) mod flow;
mod output_tracker;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::stream::FusedStream;
use futures::{Stream, StreamExt};
use serde_json::Value;

use self::driven::Driven;
use self::flow::{Flow, FlowPhase, Setup};
use crate::Result;
use crate::call::{CallId, Instant};
use crate::cancel::Cancel;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::from_chunks::{FromChunks, Out};
use crate::meta::Meta;
use crate::name::{Name, Port};
use crate::node::Node;
use crate::want::Want;

/// Chunks folded in one poll before other tasks get to run (KE-144).
const FOLD_BUDGET: u32 = 256;

/// A run: a stream of `T` that also has an id, current metadata and a whole. Dropping it stops the call (KE-501).
///
/// Nothing happens before the first poll, and nothing progresses without polls, unless the run is
/// [`driven`](Run::driven).
#[must_use = "a run does nothing unless it is polled"]
pub struct Run<T: FromChunks = Chunk> {
    source: RunSource<T>,
    state: T::State,
    out: Out<T>,
    /// What follows the items in `out`.
    ending: Option<RunEnd>,
}

enum RunSource<T: FromChunks> {
    Flow(Box<Flow>),
    Driven {
        driven: Driven<T>,
        id: CallId,
        cancel: Cancel,
        meta: Box<Meta>,
    },
}

enum RunEnd {
    Error(Error),
    Over,
}

/// The result of a run, whether it ended well or not.
#[derive(Clone, Debug)]
pub struct Settled<W> {
    /// Everything that arrived, folded; `None` if it forms no whole.
    pub whole: Option<W>,
    /// The metadata so far.
    pub meta: Meta,
    /// The error that ended it early, if there was one.
    pub error: Option<Error>,
}

impl<T: FromChunks> Run<T> {
    fn over(phase: FlowPhase) -> Self {
        Self {
            source: RunSource::Flow(Box::new(Flow::new(phase))),
            state: T::State::default(),
            out: Out::default(),
            ending: None,
        }
    }

    pub(crate) fn calling(setup: Result<Setup>) -> Self {
        Self::over(match setup {
            Ok(setup) => FlowPhase::Call(Box::new(setup)),
            Err(error) => FlowPhase::Failed(error),
        })
    }

    pub(crate) fn reading(node: &Node) -> Self {
        Self::over(FlowPhase::Node(node.clone()))
    }

    /// Ends with `Deadline` this long after the first poll, or at the caller's deadline if that is earlier. Needs a
    /// tokio runtime.
    pub fn timeout(self, after: Duration) -> Self {
        self.set("timeout", |flow| flow.timeout = Some(after))
    }

    /// Reads this port instead of the main one.
    pub fn port(self, port: impl Into<Port>) -> Self {
        self.set("port", |flow| flow.port = Some(port.into()))
    }

    /// Requests `want` instead of what `T` requests; for callers that forward a call, or read some ports as chunks.
    pub fn wanting(self, want: Want) -> Self {
        self.set("wanting", |flow| flow.want = Some(want))
    }

    /// Passes a value down to the call and those within it.
    pub fn context(self, key: &str, value: impl Into<Value>) -> Self {
        let entry = (Name::shared(key), value.into());
        self.set("context", |flow| flow.context.push(entry))
    }

    fn set(mut self, what: &str, set: impl FnOnce(&mut Flow)) -> Self {
        match &mut self.source {
            RunSource::Flow(flow) if !flow.has_begun() => set(flow),
            _ => tracing::warn!(call = %self.id(), "{what} has no effect once a run has begun"),
        }
        self
    }

    /// Checks that the run can start: the function, its arguments, its ports and `T` fit (KE-141, KE-142).
    ///
    /// # Errors
    /// The error that would be the run's only item.
    pub fn check(&self) -> Result<()> {
        match &self.source {
            RunSource::Flow(flow) => flow.check(&T::want()),
            RunSource::Driven { .. } => Ok(()),
        }
    }

    /// The id of the call.
    #[must_use]
    pub const fn id(&self) -> CallId {
        match &self.source {
            RunSource::Flow(flow) => flow.id,
            RunSource::Driven { id, .. } => *id,
        }
    }

    /// The metadata, up to date with the last returned item (KE-304).
    #[must_use]
    pub const fn meta(&self) -> &Meta {
        match &self.source {
            RunSource::Flow(flow) => &flow.meta,
            RunSource::Driven { meta, .. } => meta,
        }
    }

    fn meta_version(&self) -> u64 {
        match &self.source {
            RunSource::Flow(flow) => flow.version,
            RunSource::Driven { .. } => 0,
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match &self.source {
            RunSource::Flow(flow) => flow.deadline,
            RunSource::Driven { .. } => None,
        }
    }

    /// A handle that cancels the run from elsewhere, with `Cancelled` as its last item (KE-502).
    #[must_use]
    pub fn cancel(&self) -> Cancel {
        match &self.source {
            RunSource::Flow(flow) => flow.cancel.clone(),
            RunSource::Driven { cancel, .. } => cancel.clone(),
        }
    }

    /// Moves the run into a task that polls it, at most `capacity` items ahead. Dropping the run aborts the task.
    /// Needs a tokio runtime.
    pub fn driven(self, capacity: usize) -> Self {
        // Copied before the run moves into its task, where this handle cannot reach it any more.
        let (id, cancel, meta) = (self.id(), self.cancel(), Box::new(self.meta().clone()));
        match Driven::spawn(self, capacity) {
            Ok(driven) => Self {
                source: RunSource::Driven {
                    driven,
                    id,
                    cancel,
                    meta,
                },
                state: T::State::default(),
                out: Out::default(),
                ending: None,
            },
            Err(error) => Self::over(FlowPhase::Failed(error)),
        }
    }

    /// Drops the source now; `error` follows the items that are already decoded.
    fn stop(&mut self, error: Error) {
        if let RunSource::Flow(flow) = &mut self.source
            && !flow.is_done()
        {
            let _ = flow.stop();
            self.ending = Some(RunEnd::Error(error));
        }
    }

    /// The only item.
    ///
    /// # Errors
    /// `Decode` if there is none or more than one; the run's own error.
    pub async fn one(mut self) -> Result<T> {
        let wrong = |why: &str| Error::Decode {
            wanted: "exactly one item".into(),
            why: why.into(),
        };
        let item = self.next().await.ok_or_else(|| wrong("there was none"))??;
        // Read on to the end: only then is it known that there was one item, and that the run did not fail after it.
        match self.next().await {
            None => Ok(item),
            Some(Err(error)) => Err(error),
            Some(Ok(_)) => Err(wrong("there were more")),
        }
    }

    /// All items folded together, and the final metadata.
    ///
    /// # Errors
    /// The run's own error; `Decode` if the items form no whole.
    pub async fn finish(self) -> Result<(T::Whole, Meta)> {
        let settled = self.settle().await;
        match (settled.whole, settled.error) {
            // An error wins over a whole: `settle` is for callers that want the part that arrived.
            (_, Some(error)) => Err(error),
            (Some(whole), None) => Ok((whole, settled.meta)),
            (None, None) => Err(Error::Truncated {
                what: "the run".into(),
            }),
        }
    }

    /// Everything that arrived, the metadata so far, and the error if there was one. Never discards data.
    pub async fn settle(self) -> Settled<T::Whole> {
        let mut folding = IntoFuture::into_future(self);
        let mut error = std::future::poll_fn(|cx| folding.poll_fold(cx)).await.err();
        let Folding { run, acc, .. } = folding;
        let whole = match T::whole(acc) {
            Ok(whole) => Some(whole),
            Err(unformed) => {
                // The run's own error is the cause where there is one; a whole that cannot be formed then only follows
                // from it.
                error.get_or_insert(unformed);
                None
            }
        };
        Settled {
            whole,
            meta: run.meta().clone(),
            error,
        }
    }

    /// Decodes the next chunk into `out`. `Ready(false)` once there are no more.
    fn poll_decode(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let flow = match &mut self.source {
            RunSource::Flow(flow) => flow,
            RunSource::Driven { driven, meta, .. } => {
                match ready!(driven.poll_next(meta, cx)) {
                    Some(Ok(item)) => self.out.push(item),
                    Some(Err(error)) => self.ending = Some(RunEnd::Error(error)),
                    None => self.ending = Some(RunEnd::Over),
                }
                return Poll::Ready(self.ending.is_none());
            }
        };
        let result = match ready!(flow.poll_chunk(T::want, cx)) {
            Some(Ok(chunk)) => T::push(&mut self.state, chunk, &mut self.out),
            Some(Err(error)) => Err(error),
            None => {
                self.ending = Some(RunEnd::Over);
                T::end(&mut self.state, &mut self.out)
            }
        };
        if let Err(error) = result {
            // The source is dropped; what was decoded before is still delivered first (KE-209).
            let _ = flow.stop();
            self.ending = Some(RunEnd::Error(error));
        }
        Poll::Ready(self.ending.is_none())
    }
}

impl<T: FromChunks> Stream for Run<T> {
    type Item = Result<T>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let run = &mut *self;
        let mut budget = FOLD_BUDGET;
        loop {
            if let Some(item) = run.out.pop() {
                return Poll::Ready(Some(Ok(item)));
            }
            match run.ending.take() {
                Some(RunEnd::Error(error)) => {
                    // An error is reported once, and the stream stays ended for callers that poll on (KE-311).
                    run.ending = Some(RunEnd::Over);
                    return Poll::Ready(Some(Err(error)));
                }
                Some(RunEnd::Over) => {
                    run.ending = Some(RunEnd::Over);
                    return Poll::Ready(None);
                }
                None => {}
            }
            if budget == 0 {
                // Chunks that decode to no items arrive without a pause: yield.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            budget -= 1;
            ready!(run.poll_decode(cx));
        }
    }
}

impl<T: FromChunks> FusedStream for Run<T> {
    fn is_terminated(&self) -> bool {
        matches!(self.ending, Some(RunEnd::Over)) && self.out.is_empty()
    }
}

impl<T: FromChunks> IntoFuture for Run<T> {
    type Output = Result<T::Whole>;
    type IntoFuture = Folding<T>;

    fn into_future(self) -> Folding<T> {
        Folding {
            run: self,
            acc: T::Acc::default(),
        }
    }
}

/// A run being folded into its whole. Allocates nothing per chunk; yields after 256 chunks without a pause.
#[must_use = "futures do nothing unless they are polled"]
pub struct Folding<T: FromChunks> {
    run: Run<T>,
    acc: T::Acc,
}

impl<T: FromChunks> Folding<T> {
    /// Folds chunks until the end.
    fn poll_fold(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        for _ in 0..FOLD_BUDGET {
            // Items that were decoded before, at the end, or by a driving task.
            while let Some(item) = self.run.out.pop() {
                if let Err(error) = T::fold(&mut self.acc, item) {
                    // The source is dropped now and not with the future, which its owner may keep.
                    self.run.stop(Error::Cancelled);
                    return Poll::Ready(Err(error));
                }
            }
            match self.run.ending.take() {
                Some(RunEnd::Error(error)) => return Poll::Ready(Err(error)),
                Some(RunEnd::Over) => return Poll::Ready(Ok(())),
                None => {}
            }
            // A driven run delivers decoded items, which were folded above; there are no chunks to fold directly.
            let RunSource::Flow(flow) = &mut self.run.source else {
                ready!(self.run.poll_decode(cx));
                continue;
            };
            match ready!(flow.poll_chunk(T::want, cx)) {
                Some(Ok(chunk)) => {
                    if let Err(error) = T::push_fold(&mut self.run.state, &mut self.acc, chunk) {
                        let _ = flow.stop();
                        return Poll::Ready(Err(error));
                    }
                }
                // Not returned at once: items that were decoded before the error belong to the whole of `settle`.
                Some(Err(error)) => self.run.ending = Some(RunEnd::Error(error)),
                None => {
                    let ended = T::end(&mut self.run.state, &mut self.run.out);
                    self.run.ending = Some(match ended {
                        Ok(()) => RunEnd::Over,
                        Err(error) => RunEnd::Error(error),
                    });
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<T: FromChunks> Future for Folding<T>
where
    T::Acc: Unpin,
{
    type Output = Result<T::Whole>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        ready!(self.poll_fold(cx))?;
        let acc = std::mem::take(&mut self.acc);
        Poll::Ready(T::whole(acc))
    }
}

impl<T: FromChunks> fmt::Debug for Run<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run")
            .field("id", &self.id())
            .field("meta", self.meta())
            .finish_non_exhaustive()
    }
}
