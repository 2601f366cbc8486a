//! [`CallCount`]: the calls of one loaded model. The engine counts a request from its next step on; while its prompt is read,
//! tokenised, or waits for a grammar to be compiled, only this count has it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use sapwood_kernel::{Call, Chunk, Chunks, Fun, Function, Result, Spec};

/// The number of calls. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct CallCount(Arc<AtomicUsize>);

impl CallCount {
    /// The same function, each call of which is counted until its last chunk.
    pub(super) fn counting(&self, function: Fun) -> Fun {
        Arc::new(CountedFunction {
            function,
            count: self.clone(),
        })
    }

    /// The calls now.
    pub(super) fn calls(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

struct CountedFunction {
    function: Fun,
    count: CallCount,
}

impl Function for CountedFunction {
    fn spec(&self) -> &Spec {
        self.function.spec()
    }

    fn call(&self, call: Call) -> Chunks {
        self.count.0.fetch_add(1, Ordering::Relaxed);
        // Before the call, which may panic.
        let counted = Some(RunningCall(self.count.clone()));
        let chunks = self.function.call(call);
        Box::pin(CountedChunks { chunks, counted })
    }
}

struct RunningCall(CallCount);

impl Drop for RunningCall {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct CountedChunks {
    chunks: Chunks,
    counted: Option<RunningCall>,
}

impl Stream for CountedChunks {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = self.chunks.poll_next_unpin(cx);
        if matches!(next, Poll::Ready(None)) {
            // Not with the stream: whoever has read to the end may keep it for as long as they like.
            self.counted = None;
        }
        next
    }
}
