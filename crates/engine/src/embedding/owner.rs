//! [`EmbeddingOwner`]: takes requests from the inbox, computes batches of their texts, and sends each request its rows.
//!
//! ```text
//!   step:  receive ─► dropped handles, deadlines ─► next batch (TextQueue) ─► encode ─► rows to their requests ─► answer those
//!          that are complete
//!
//!   request:  waiting ── its first text ──► running ── its last text, an error, its handle dropped ──► ended
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;
use slab::Slab;

use super::model::{EmbeddingInfo, EmbeddingModel, EncodeStop};
use super::queue::{BatchLimits, PlannedText, TextQueue, WaitingRequest};
use super::request::PreparedTexts;
use super::vectors::Vectors;
use crate::api::{EngineError, FinishReason};
use crate::config::Config;
use crate::outbox::OwnerWaker;
use crate::queue::{AdmissionQueue, QueuePace};
use crate::stats::EngineStats;

/// What a request ends with.
pub(super) type Answer = Result<Vectors, EngineError>;

/// One request on its way to the owner. Its handle is dropped to cancel it.
pub(super) struct EmbeddingCommand {
    pub(super) request: PreparedTexts,
    pub(super) answer: oneshot::Sender<Answer>,
}

/// What a handle and its owner share.
pub(super) struct EmbeddingInbox {
    pub(super) commands: Receiver<EmbeddingCommand>,
    pub(super) waker: Arc<OwnerWaker>,
    pub(super) queue: Arc<AdmissionQueue>,
    pub(super) stats: Arc<EngineStats>,
}

/// A request that the owner has.
struct EmbeddingJob {
    request: PreparedTexts,
    /// Tokens of all its texts.
    tokens: usize,
    /// Tokens of its texts without a row, which it is charged for.
    charged: usize,
    vectors: Vectors,
    /// Texts without a row.
    left: usize,
    answer: oneshot::Sender<Answer>,
    arrived: Time,
    started: Option<Time>,
    deadline: Option<Time>,
}

/// Owns a model that embeds.
pub struct EmbeddingOwner {
    model: Box<dyn EmbeddingModel>,
    info: EmbeddingInfo,
    inbox: EmbeddingInbox,
    jobs: Slab<EmbeddingJob>,
    queue: TextQueue,
    pace: QueuePace,
    /// `None`: a request may be queued as long as it takes.
    queue_timeout: Option<Duration>,
    rows: Vec<f32>,
}

impl EmbeddingOwner {
    pub(super) fn new(
        model: Box<dyn EmbeddingModel>,
        config: &Config,
        inbox: EmbeddingInbox,
    ) -> Self {
        let info = model.info();
        let limits = BatchLimits {
            tokens: info.batch_tokens as usize,
            texts: info.parallel as usize,
        };
        // An owner whose first step has not begun counts as idle, so that the watchdog does not report it as stalled
        // (OA-901).
        inbox.stats.idle.set(1);
        Self {
            queue: TextQueue::new(limits),
            model,
            info,
            inbox,
            jobs: Slab::new(),
            pace: QueuePace::default(),
            queue_timeout: config.queue_timeout(),
            rows: Vec::new(),
        }
    }

    /// Receives what is there and computes one batch, if there is a text, and returns without waiting. Returns whether texts
    /// are left.
    pub fn step(&mut self, now: Time) -> bool {
        self.receive(now);
        self.end_those_in_vain(now);
        let batch = self.queue.next_batch();
        if !batch.is_empty() {
            self.compute(&batch, now);
        }
        let running = self.jobs.iter().filter(|(_, job)| job.started.is_some());
        let running = running.count();
        let stats = &self.inbox.stats;
        stats.requests_running.set(running as u64);
        let waiting = self.jobs.len() - running;
        stats.requests_waiting.set(waiting as u64);
        !self.queue.is_empty()
    }

    fn receive(&mut self, now: Time) {
        // Without a count: the inbox is bounded, and what was taken from it stays charged to the queue.
        while let Ok(EmbeddingCommand { request, answer }) = self.inbox.commands.try_recv() {
            let (texts, width) = (request.texts.len(), request.shape.width);
            let tokens = request.tokens();
            self.inbox
                .stats
                .request_prompt_tokens
                .observe(tokens as f64);
            let caller = request.caller;
            let lengths = request.texts.iter().map(Vec::len).collect();
            let job = self.jobs.insert(EmbeddingJob {
                vectors: Vectors {
                    width,
                    // Empty until its first text is computed: a queue of large requests holds no rows.
                    numbers: Vec::new(),
                    prompt_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
                },
                tokens,
                charged: tokens,
                left: texts,
                answer,
                arrived: now,
                started: None,
                deadline: request.timeout.map(|timeout| now + timeout),
                request,
            });
            self.queue.add(
                caller,
                WaitingRequest {
                    request: job,
                    numbers: texts.saturating_mul(width),
                    lengths,
                    taken: 0,
                },
            );
        }
    }

    /// Ends requests whose handle was dropped, or whose time is over. At most as many as may be queued, and each step takes
    /// milliseconds, so all are looked at.
    fn end_those_in_vain(&mut self, now: Time) {
        self.inbox.waker.is_observed();
        let mut ended = Vec::new();
        for (index, job) in &self.jobs {
            let limit = self.queue_timeout.filter(|_| job.started.is_none());
            let waited = limit.is_some_and(|limit| job.arrived + limit <= now);
            if job.answer.is_canceled() {
                self.inbox.stats.cancelled_client.add(1);
                ended.push((index, None));
            } else if job.deadline.is_some_and(|deadline| deadline <= now) {
                let message = "the request took longer than its time limit";
                let error = EngineError::new(Code::DeadlineExceeded, ErrorReason::TIMEOUT, message);
                self.inbox.stats.cancelled_timeout.add(1);
                ended.push((index, Some(error)));
            } else if waited {
                let message = "the request waited too long for its turn: try again later";
                let error =
                    EngineError::new(Code::Unavailable, ErrorReason::QUEUE_TIMEOUT, message);
                let error = error.after(self.inbox.queue.retry_after());
                self.inbox.stats.cancelled_timeout.add(1);
                ended.push((index, Some(error)));
            }
        }
        for (index, error) in ended {
            self.queue.remove(index);
            let job = self.take(index);
            if let Some(error) = error {
                // Fails if the handle is gone, which then needs no answer.
                let _ = job.answer.send(Err(error));
            }
        }
    }

    /// Computes a batch and gives its rows to their requests.
    fn compute(&mut self, batch: &[PlannedText], now: Time) {
        let began = Instant::now();
        for planned in batch {
            self.start(planned.request, now);
        }
        let texts = batch.iter();
        let texts = texts.map(|it| self.jobs[it.request].request.texts[it.text].as_slice());
        let texts: Vec<&[Token]> = texts.collect();
        let tokens: usize = texts.iter().map(|text| text.len()).sum();
        self.rows.clear();
        let (model, rows) = (&mut self.model, &mut self.rows);
        // A panic in a model ends the requests of the batch; what it has left in the rows is not read.
        let encoded = catch_unwind(AssertUnwindSafe(|| model.encode(&texts, rows)));
        let stats = &self.inbox.stats;
        stats.steps.add(1);
        stats.step_tokens.observe(tokens as f64);
        stats.batch_size.observe(texts.len() as f64);
        stats.step_seconds.observe_span(began.elapsed());
        let width = self.info.dimensions as usize;
        let failure = match encoded {
            Ok(Ok(())) if self.rows.len() == width * batch.len() => None,
            Ok(Ok(())) => Some(broken("the model returned no row for a text")),
            Ok(Err(EncodeStop::Failed(error))) => Some(error),
            // Only raised to end the thread.
            Ok(Err(EncodeStop::Aborted)) => Some(self.inbox.waker.closed_error()),
            Err(_panic) => {
                stats.panics.add(1);
                tracing::error!(
                    model = self.info.name,
                    "a model panicked: the requests of this batch fail"
                );
                let message = "the model failed on a request of this batch: try again";
                Some(EngineError::internal(ErrorReason::MODEL_PANIC, message))
            }
        };
        let rows = std::mem::take(&mut self.rows);
        for (index, planned) in batch.iter().enumerate() {
            let row = rows.get(width * index..width * (index + 1));
            let row = failure.clone().map_or_else(|| row.ok_or_else(missing), Err);
            self.give(planned, row, now);
        }
        self.rows = rows;
    }

    fn start(&mut self, request: usize, now: Time) {
        let job = &mut self.jobs[request];
        if job.started.is_some() {
            return;
        }
        job.started = Some(now);
        let numbers = job.request.texts.len() * job.vectors.width;
        job.vectors.numbers = vec![0.0; numbers];
        let stats = &self.inbox.stats;
        stats.prompt_tokens.add(job.tokens as u64);
        stats.queue_seconds.observe_span(now.since(job.arrived));
        self.pace.departed(job.arrived, now);
        self.inbox.queue.publish(&self.pace);
    }

    /// Gives a text's row to its request, and answers the request if that was the last, or an error.
    fn give(&mut self, planned: &PlannedText, row: Result<&[f32], EngineError>, now: Time) {
        // Another text of the batch may have failed, and the request with it.
        let Some(job) = self.jobs.get_mut(planned.request) else {
            return;
        };
        let written = row.and_then(|row| {
            let begin = planned.text * job.vectors.width;
            let into = &mut job.vectors.numbers[begin..begin + job.vectors.width];
            let numbers = job.request.shape.write(row, into);
            numbers
                .then_some(())
                .ok_or_else(|| broken("the model computed something that is not a number"))
        });
        // It is not needed again, and no longer queued: a long request does not keep others out until its end.
        let text = std::mem::take(&mut job.request.texts[planned.text]);
        let left = job.charged.saturating_sub(text.len());
        let caller = job.request.caller;
        self.inbox.queue.recharge(caller, job.charged, left);
        job.charged = left;
        job.left -= 1;
        let last = job.left == 0;
        match written {
            Ok(()) if !last => {}
            Ok(()) => {
                let job = self.take(planned.request);
                let stats = &self.inbox.stats;
                stats.count_finish(FinishReason::Stop);
                let whole = now.since(job.arrived);
                stats.request_seconds.observe_span(whole);
                let _ = job.answer.send(Ok(job.vectors));
            }
            Err(error) => {
                self.queue.remove(planned.request);
                self.inbox.stats.failed.add(1);
                let _ = self.take(planned.request).answer.send(Err(error));
            }
        }
    }

    /// Removes a request and refunds the rest of its charge.
    fn take(&mut self, request: usize) -> EmbeddingJob {
        let job = self.jobs.remove(request);
        self.inbox.queue.leave(job.request.caller, job.charged);
        job
    }
}

fn missing() -> EngineError {
    broken("the model returned no row for a text")
}

fn broken(message: &str) -> EngineError {
    EngineError::internal(ErrorReason::ENGINE_ERROR, message)
}

/// Steps `owner` until its handles are dropped. Requests that are left then lose their owner, which their handles report.
pub(super) fn run(mut owner: EmbeddingOwner, started: Instant) {
    let stats = Arc::clone(&owner.inbox.stats);
    while !owner.inbox.waker.is_closing() {
        let now = Time::new(started.elapsed());
        let milliseconds = now.since_origin().as_millis();
        let milliseconds = u64::try_from(milliseconds).unwrap_or(u64::MAX);
        stats.last_step_ms.set(milliseconds);
        // After `last_step_ms`: in the other order the watchdog could take the idle time before this step for a long
        // step.
        stats.idle.set(0);
        if !owner.step(now) {
            stats.idle.set(1);
            // A wake-up since the step began has set the thread's unpark token, so none is lost.
            std::thread::park();
        }
    }
}
