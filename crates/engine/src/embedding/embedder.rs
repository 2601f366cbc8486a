//! [`Embedder`]: a cheap, cloneable handle that submits requests to the thread of a model that embeds.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::channel::oneshot;

use super::model::{EmbeddingInfo, EmbeddingModel};
use super::owner::{Answer, EmbeddingCommand, EmbeddingInbox, EmbeddingOwner, run};
use super::request::{EmbeddingRequest, PreparedTexts, RerankRequest, of_pairs, of_texts};
use crate::api::{EngineError, SharedVocabulary};
use crate::config::Config;
use crate::model::Interrupt;
use crate::outbox::OwnerWaker;
use crate::owner_thread::OwnerThread;
use crate::queue::{AdmissionQueue, QueueLimits, at_most};
use crate::stats::EngineStats;

struct EmbedderShared {
    info: EmbeddingInfo,
    vocabulary: SharedVocabulary,
    limits: QueueLimits,
    commands: SyncSender<EmbeddingCommand>,
    waker: Arc<OwnerWaker>,
    queue: Arc<AdmissionQueue>,
    stats: Arc<EngineStats>,
}

/// The engine of a model that embeds texts, or scores pairs of them. Clones share one engine. When the last clone is dropped,
/// the thread ends running requests and is joined.
#[derive(Clone)]
pub struct Embedder {
    shared: Arc<EmbedderShared>,
    /// `None` if the caller steps the owner itself.
    thread: Option<Arc<OwnerThread>>,
}

impl Embedder {
    /// Runs `model` on its own thread. Of `config` the limits of the queue apply.
    ///
    /// # Errors
    /// If the operating system cannot create a thread.
    pub fn spawn(mut model: Box<dyn EmbeddingModel>, config: &Config) -> std::io::Result<Self> {
        let interrupt = Interrupt::default();
        // Before the owner takes the model: the trait demands it before any other call.
        model.interrupt(Arc::clone(&interrupt));
        let name = format!("embedder {}", model.info().name);
        let (owner, mut embedder) = Self::by_hand(model, config);
        let waker = Arc::clone(&embedder.shared.waker);
        let thread = OwnerThread::spawn(name, waker, interrupt, move |started| {
            run(owner, started);
        })?;
        embedder.thread = Some(Arc::new(thread));
        Ok(embedder)
    }

    /// An engine without a thread, and its owner, which the caller steps.
    #[must_use]
    pub fn by_hand(model: Box<dyn EmbeddingModel>, config: &Config) -> (EmbeddingOwner, Self) {
        let limits = QueueLimits {
            requests: config.queue_requests,
            tokens: config.queue_tokens,
        };
        // At least 1: a channel without capacity hands over only to a receiver that waits, which the owner never does.
        let (sender, commands) = sync_channel(at_most(limits.requests).max(1));
        let waker = Arc::new(OwnerWaker::default());
        let queue = Arc::new(AdmissionQueue::default());
        let stats = Arc::new(EngineStats::default());
        let shared = EmbedderShared {
            info: model.info(),
            vocabulary: model.vocabulary(),
            limits,
            commands: sender,
            waker: Arc::clone(&waker),
            queue: Arc::clone(&queue),
            stats: Arc::clone(&stats),
        };
        let inbox = EmbeddingInbox {
            commands,
            waker,
            queue,
            stats,
        };
        let owner = EmbeddingOwner::new(model, config, inbox);
        let embedder = Self {
            shared: Arc::new(shared),
            thread: None,
        };
        (owner, embedder)
    }

    /// Submits texts. Tokenises on the caller's thread, which takes time in proportion to the texts; then returns without
    /// waiting. Each row is [`EmbeddingRequest::dimensions`] wide.
    ///
    /// # Errors
    /// `BAD_CONFIG`, `BAD_TOKENS`, `EMPTY_PROMPT`, `PROMPT_TOO_LONG`, or `failed-precondition` for a model that scores pairs,
    /// before anything is queued; `BAD_CONFIG` too for texts of more tokens than may be queued, or of more numbers than
    /// [`NUMBERS_MAX`](super::NUMBERS_MAX); `ENGINE_BUSY` if the queue is full; `engine_dead` if the owner no longer exists.
    pub fn embed(&self, request: EmbeddingRequest) -> Result<EmbeddingHandle, EngineError> {
        let shared = &self.shared;
        let most = shared.limits.tokens;
        self.submit(of_texts(request, &shared.info, &*shared.vocabulary, most)?)
    }

    /// Submits a query and documents. The rows are one number each, the score of the document: higher is more relevant. What
    /// numbers a model gives is its own; most give logits.
    ///
    /// # Errors
    /// As [`Embedder::embed`], with `failed-precondition` for a model that embeds.
    pub fn rerank(&self, request: RerankRequest) -> Result<EmbeddingHandle, EngineError> {
        let shared = &self.shared;
        let most = shared.limits.tokens;
        self.submit(of_pairs(request, &shared.info, &*shared.vocabulary, most)?)
    }

    fn submit(&self, request: PreparedTexts) -> Result<EmbeddingHandle, EngineError> {
        let shared = &self.shared;
        let (caller, tokens) = (request.caller, request.tokens());
        // After the tokens are counted: an invalid request is refused as such even if the queue is full, and is never
        // charged.
        if let Err(full) = shared.queue.enter(caller, tokens, shared.limits) {
            return Err(shared.queue.refused(full, &shared.stats, "tokens"));
        }
        let (answer, receiver) = oneshot::channel();
        // The inbox has capacity for every request that may be queued, so sending fails only if the owner no longer
        // exists.
        let command = EmbeddingCommand { request, answer };
        if shared.commands.try_send(command).is_err() {
            shared.queue.leave(caller, tokens);
            return Err(shared.waker.closed_error());
        }
        // After the command is in the inbox, so that the owner finds it when it wakes.
        shared.waker.wake();
        Ok(EmbeddingHandle {
            receiver,
            waker: Arc::clone(&shared.waker),
            prompt_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        })
    }

    /// Stops the thread after the current step, even while clones exist: its requests end with `unavailable` and new ones are
    /// refused. An owner that is stepped by hand continues.
    pub fn end(&self) {
        if let Some(thread) = &self.thread {
            thread.end();
        }
    }

    /// Waits until the thread has ended, after [`Embedder::end`].
    pub fn wait_ended(&self) {
        if let Some(thread) = &self.thread {
            thread.wait_ended();
        }
    }

    /// Returns whether it can serve no request any more: the thread has ended.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        let thread = self.thread.as_ref();
        thread.is_some_and(|thread| thread.is_lost(self.stats()))
    }

    /// Returns what the model is and can do.
    #[must_use]
    pub fn info(&self) -> &EmbeddingInfo {
        &self.shared.info
    }

    /// Returns the model's vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> &SharedVocabulary {
        &self.shared.vocabulary
    }

    /// Returns the engine's counters. Those about sampling stay 0.
    #[must_use]
    pub fn stats(&self) -> &Arc<EngineStats> {
        &self.shared.stats
    }

    /// As [`crate::Engine::stalled_for`].
    #[must_use]
    pub fn stalled_for(&self) -> Duration {
        match &self.thread {
            Some(thread) => thread.stalled_for(&self.shared.stats),
            None => Duration::ZERO,
        }
    }
}

impl std::fmt::Debug for Embedder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedder")
            .field("model", &self.shared.info.name)
            .finish_non_exhaustive()
    }
}

/// A submitted request: a future of its rows. Dropping it cancels the request.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct EmbeddingHandle {
    receiver: oneshot::Receiver<Answer>,
    waker: Arc<OwnerWaker>,
    prompt_tokens: u32,
}

impl EmbeddingHandle {
    /// Tokens of all its texts, special ones included.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }
}

impl Future for EmbeddingHandle {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        let answer = ready!(Pin::new(&mut self.receiver).poll(cx));
        // The owner answers every request that it has; without an answer it is gone.
        Poll::Ready(answer.unwrap_or_else(|_| Err(self.waker.closed_error())))
    }
}

impl Drop for EmbeddingHandle {
    fn drop(&mut self) {
        // Closed first, so that the owner finds it when it wakes: what a request holds is freed although nothing else runs.
        self.receiver.close();
        self.waker.wake();
    }
}
