//! The kernel layer that makes a span of each call of a model (OA-803).

use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use futures::Stream;
use sapwood_engine::api;
use sapwood_kernel::{
    Call, CallObserver, Chunk, Chunks, Layer, Name, Next, Port, Result, RunUsage,
};
use sapwood_proto::code::Code;
use tokio::time::Instant;

use super::span::{CONTENT_BYTES_MAX, Generation, RequestAttributes};
use super::{Parent, SpanSender};
use crate::http::request_trace::RequestTrace;

/// A layer for kernels whose models are traced.
#[derive(Clone, Debug)]
pub struct Spans {
    outlet: SpanSender,
    content: bool,
}

impl Spans {
    pub(super) fn new(outlet: SpanSender, content: bool) -> Self {
        Self { outlet, content }
    }
}

impl Layer for Spans {
    fn call(&self, mut call: Call, next: Next) -> Chunks {
        let request_trace = RequestTrace::of(&mut call);
        let parent = request_trace.as_ref().and_then(RequestTrace::parent);
        // The caller's decision not to sample holds for its children; without a caller's trace every call is sampled.
        if !next.spec().model || parent.is_some_and(|parent| !parent.sampled) {
            return next.call(call);
        }
        let notes = Arc::new(SpanNotes {
            began: Instant::now(),
            content: self.content,
            seen: Mutex::default(),
        });
        // In `own` and not in `extensions`: calls within this one have spans of their own.
        call.own.insert(Arc::clone(&notes) as Arc<dyn CallObserver>);
        let watch = Watch {
            outlet: self.outlet.clone(),
            model: next.spec().name.clone(),
            parent,
            request: request_trace.map(|request_trace| request_trace.request()),
            started: SystemTime::now(),
            notes,
            first_chunk: None,
            finish: Vec::new(),
            usage: None,
            output: self.content.then(String::new),
            ended: None,
        };
        let chunks = next.call(call);
        Box::pin(TracedCall { chunks, watch })
    }
}

/// What the model's function reports during the call.
#[derive(Debug)]
struct SpanNotes {
    began: Instant,
    content: bool,
    seen: Mutex<FirstTokenWatch>,
}

#[derive(Debug, Default)]
struct FirstTokenWatch {
    asked: Option<RequestAttributes>,
    phases: Option<(Duration, Duration)>,
}

impl SpanNotes {
    fn with<R>(&self, act: impl FnOnce(&mut FirstTokenWatch) -> R) -> R {
        act(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl CallObserver for SpanNotes {
    fn asked(&self, request: &api::GenerationRequest) {
        let asked = RequestAttributes::of(request, self.began.elapsed(), self.content);
        self.with(|seen| seen.asked = Some(asked));
    }

    fn took(&self, usage: &api::TokenUsage) {
        self.with(|seen| seen.phases = Some((usage.queued, usage.prefill)));
    }
}

/// A running call.
struct TracedCall {
    chunks: Chunks,
    watch: Watch,
}

impl Stream for TracedCall {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = ready!(self.chunks.as_mut().poll_next(cx));
        match &item {
            Some(Ok(chunk)) => self.watch.see(chunk),
            Some(Err(error)) => self.watch.end(Err(error.code())),
            None => self.watch.end(Ok(())),
        }
        Poll::Ready(item)
    }
}

/// Becomes a span on drop, so that a call that is dropped early has one too.
struct Watch {
    outlet: SpanSender,
    model: Name,
    parent: Option<Parent>,
    request: Option<String>,
    started: SystemTime,
    notes: Arc<SpanNotes>,
    first_chunk: Option<Duration>,
    finish: Vec<String>,
    usage: Option<RunUsage>,
    output: Option<String>,
    /// How it ended; `None` while it runs.
    ended: Option<std::result::Result<(), Code>>,
}

impl Watch {
    /// Notes the end; only the first one counts.
    fn end(&mut self, how: std::result::Result<(), Code>) {
        self.ended.get_or_insert(how);
    }

    fn see(&mut self, chunk: &Chunk) {
        if let Some(meta) = &chunk.meta {
            if meta.usage != RunUsage::default() {
                self.usage = Some(meta.usage);
            }
            if !meta.finish.is_empty() {
                self.finish = meta.finish.values().map(ToString::to_string).collect();
            }
        }
        // Chunks with metadata alone are no output.
        if chunk.data.is_empty() {
            return;
        }
        if self.first_chunk.is_none() {
            self.first_chunk = Some(self.notes.began.elapsed());
        }
        if let Some(output) = &mut self.output
            && chunk.port == Port::MAIN
            && let Ok(text) = std::str::from_utf8(&chunk.data)
            // A chunk that does not fit is left out whole, so that no character is cut.
            && output.len() + text.len() <= CONTENT_BYTES_MAX
        {
            output.push_str(text);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let (asked, phases) = self
            .notes
            .with(|seen| (seen.asked.take(), seen.phases.take()));
        let generation = Generation {
            parent: self.parent,
            ids: ids(),
            model: self.model.to_string(),
            request: self.request.take(),
            began: self.started,
            took: self.notes.began.elapsed(),
            asked,
            first_chunk: self.first_chunk,
            finish: std::mem::take(&mut self.finish),
            usage: self.usage,
            phases,
            // No end was seen, so the call was dropped.
            error: self
                .ended
                .unwrap_or(Err(Code::Cancelled))
                .err()
                .map(Code::name),
            output: self.output.take(),
        };
        self.outlet.put(generation.into_span());
    }
}

/// A new trace id and a new span id.
fn ids() -> ([u8; 16], [u8; 8]) {
    // Seeded by the standard library from the system's randomness: ids have to be unique and not secret.
    let state = RandomState::new();
    let part = |index: u8| state.hash_one(index).to_be_bytes();
    let mut trace = [0; 16];
    trace[..8].copy_from_slice(&part(0));
    trace[8..].copy_from_slice(&part(1));
    (trace, part(2))
}
