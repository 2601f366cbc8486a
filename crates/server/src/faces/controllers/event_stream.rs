//! The body of a run: events by the exact rules of its client (AI-912, AI-913). Dropped with the response when the client
//! is gone, which ends all sequences before the next step.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, Stream, StreamExt};
use sapwood_engine::api::EngineEvent;
use sapwood_kernel::{Chunk, Error, Run};
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep};

use super::live_runs::LiveRunGuard;
use super::run_steps::RunSteps;
use crate::http::body_budget::Reservation;
use crate::ops::open_streams::OpenStreamGuard;

/// The events of a run.
pub(super) struct RunStream {
    run: Run<Chunk>,
    /// What the request is charged until the model has its prompt.
    charge: Vec<Reservation>,
    steps: RunSteps,
    /// What was read before the response began.
    ahead: Option<Result<Chunk, Error>>,
    /// The first event of the next step.
    later: Option<EngineEvent>,
    /// What was not sent yet.
    out: Vec<u8>,
    is_over: bool,
    prompt_seen: bool,
    keep_alive: Pin<Box<Sleep>>,
    idle: Duration,
    /// Resolves when a drain cuts what still runs.
    cutting: BoxFuture<'static, ()>,
    /// Lets the variables of the run be found until it ends.
    live: Option<LiveRunGuard>,
    _open: OpenStreamGuard,
}

/// What a stream of events is made of.
pub(super) struct BegunRun {
    pub(super) run: Run<Chunk>,
    /// What its body is charged, if the model has not begun.
    pub(super) charge: Vec<Reservation>,
    pub(super) first: Option<Result<Chunk, Error>>,
    /// The event that names the run.
    pub(super) initial: Value,
    pub(super) keep_alive: Duration,
    pub(super) live: LiveRunGuard,
    pub(super) cutting: BoxFuture<'static, ()>,
    pub(super) open: OpenStreamGuard,
}

impl RunStream {
    pub(super) fn new(begun: BegunRun) -> Self {
        let BegunRun {
            run,
            charge,
            first,
            initial,
            keep_alive,
            live,
            cutting,
            open,
        } = begun;
        let mut out = Vec::new();
        write(&mut out, &initial);
        Self {
            run,
            charge,
            steps: RunSteps::default(),
            ahead: first,
            later: None,
            out,
            is_over: false,
            prompt_seen: false,
            keep_alive: Box::pin(sleep(keep_alive)),
            idle: keep_alive,
            cutting,
            live: Some(live),
            _open: open,
        }
    }

    /// Writes the events of what is ready, up to a full piece.
    fn gather(&mut self, cx: &mut Context<'_>) {
        while !self.is_over && self.out.len() < PIECE_BYTES {
            if let Some(event) = self.later.take() {
                self.steps.add(event);
            }
            let next = match self.ahead.take() {
                Some(ahead) => Poll::Ready(Some(ahead)),
                None => self.run.poll_next_unpin(cx),
            };
            if next.is_ready() {
                self.charge.clear();
            }
            match next {
                Poll::Ready(Some(Ok(chunk))) => self.take(chunk),
                Poll::Ready(Some(Err(error))) => {
                    self.steps.fail(&error);
                    self.end();
                }
                Poll::Ready(None) => self.end(),
                // Engines publish whole steps (D-6): what belongs to this one would be ready as well.
                Poll::Pending => {
                    self.write_step();
                    return;
                }
            }
        }
    }

    fn take(&mut self, chunk: Chunk) {
        if let Some(meta) = chunk.meta.as_ref().filter(|_| !self.prompt_seen) {
            self.prompt_seen = true;
            self.steps.prompt(meta.usage.prompt_tokens);
        }
        let event = chunk.inner.and_then(|inner| inner.downcast().ok());
        let Some(event) = event.map(Arc::<EngineEvent>::unwrap_or_clone) else {
            return;
        };
        if self.steps.begins_later(&event) {
            self.write_step();
            self.later = Some(event);
        } else {
            self.steps.add(event);
        }
    }

    fn write_step(&mut self) {
        if let Some(event) = self.steps.take() {
            write(&mut self.out, &event);
        }
    }

    fn end(&mut self) {
        self.write_step();
        if let Some(event) = self.steps.last() {
            write(&mut self.out, &event);
        }
        self.out.extend_from_slice(b"data: [DONE]\n\n");
        self.is_over = true;
        self.live = None;
    }
}

impl Stream for RunStream {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        this.gather(cx);
        if !this.is_over && this.cutting.poll_unpin(cx).is_ready() {
            let why = "the server is shutting down".to_owned();
            this.steps.fail(&Error::Unavailable {
                why,
                retry_after: None,
            });
            this.end();
        }
        if this.out.is_empty() {
            if this.is_over {
                return Poll::Ready(None);
            }
            if this.keep_alive.poll_unpin(cx).is_pending() {
                return Poll::Pending;
            }
            // Nothing but an empty line: the client takes any other line for an event (AI-913).
            this.out.push(b'\n');
        }
        let next = Instant::now() + this.idle;
        this.keep_alive.as_mut().reset(next);
        Poll::Ready(Some(Ok(std::mem::take(&mut this.out).into())))
    }
}

/// Writes an event.
fn write(out: &mut Vec<u8>, event: &Value) {
    out.extend_from_slice(b"data: ");
    // This cannot fail: the writer is memory, and a value has only keys of text.
    let written = serde_json::to_writer(&mut *out, event);
    debug_assert!(written.is_ok());
    out.extend_from_slice(b"\n\n");
}

/// Size of a piece, in bytes, from which on no more events join it.
const PIECE_BYTES: usize = 8 << 10;
