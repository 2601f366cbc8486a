//! One span per call.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use tracing::{Span, field};

use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::layer::{Layer, Next};
use crate::meta::RunUsage;
use crate::{Chunks, Result};

/// A span per call, from its first poll to its end or drop: name, id, parent, chunks, bytes, time to the first chunk,
/// tokens and outcome (`ok`, the error's code, `dropped`). Model calls carry OpenTelemetry's `gen_ai` names too.
#[must_use]
pub const fn trace() -> TraceLayer {
    TraceLayer(())
}

/// The layer of [`trace`].
#[derive(Clone, Copy, Debug)]
pub struct TraceLayer(());

impl Layer for TraceLayer {
    fn call(&self, call: Call, next: Next) -> Chunks {
        let spec = next.spec();
        let name = spec.name.clone();
        let span = tracing::info_span!(
            "call",
            function = %name,
            id = call.id.get(),
            parent = call.parent.map(crate::call::CallId::get),
            chunks = field::Empty,
            bytes = field::Empty,
            first_chunk_us = field::Empty,
            outcome = field::Empty,
            gen_ai.operation.name = field::Empty,
            gen_ai.request.model = field::Empty,
            gen_ai.usage.input_tokens = field::Empty,
            gen_ai.usage.output_tokens = field::Empty,
        );
        if spec.model {
            span.record("gen_ai.operation.name", "chat");
            span.record("gen_ai.request.model", &*name);
        }
        let chunks = span.in_scope(|| next.call(call));
        Traced {
            chunks: Some(chunks),
            span,
            began: Instant::now(),
            seen: 0,
            bytes: 0,
            usage: RunUsage::default(),
            outcome: "dropped",
        }
        .boxed()
    }
}

struct Traced {
    chunks: Option<Chunks>,
    span: Span,
    began: Instant,
    seen: u64,
    bytes: u64,
    usage: RunUsage,
    outcome: &'static str,
}

impl Traced {
    fn count(&mut self, chunk: &Chunk) {
        if self.seen == 0 {
            let waited = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.span.record("first_chunk_us", waited);
        }
        self.seen += 1;
        self.bytes += chunk.data.len() as u64;
        if let Some(meta) = &chunk.meta
            && meta.usage != RunUsage::default()
        {
            // Usage is a running total within a turn, so the last one counts (KE-303).
            self.usage = meta.usage;
        }
    }
}

impl Stream for Traced {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(chunks) = &mut this.chunks else {
            return Poll::Ready(None);
        };
        let polled = {
            let _in_span = this.span.enter();
            chunks.as_mut().poll_next(cx)
        };
        match &polled {
            Poll::Ready(Some(Ok(chunk))) => this.count(chunk),
            Poll::Ready(Some(Err(error))) => this.outcome = error.code().name(),
            // `None` also follows an error, whose code stays the outcome.
            Poll::Ready(None) if this.outcome == "dropped" => this.outcome = "ok",
            Poll::Ready(None) | Poll::Pending => {}
        }
        polled
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // Drops the inner stream inside the span, so that its end is recorded there.
        let span = self.span.clone();
        span.in_scope(|| self.chunks = None);
        self.span.record("chunks", self.seen);
        self.span.record("bytes", self.bytes);
        self.span.record("outcome", self.outcome);
        if self.usage != RunUsage::default() {
            self.span
                .record("gen_ai.usage.input_tokens", self.usage.prompt_tokens);
            self.span
                .record("gen_ai.usage.output_tokens", self.usage.completion_tokens);
        }
    }
}
