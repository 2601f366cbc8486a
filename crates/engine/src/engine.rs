//! [`Engine`]: a cheap, cloneable handle that submits requests to an engine thread, and its constructors.
//!
//! This side validates, charges the queue quota and sends a request to the inbox. All scheduling is the owner's
//! ([`crate::owner`]).
//!
//! ```text
//!   Engine::submit ── prepare (caller's thread) ── inbox (bounded) ──► owner thread ── outbox ──► RequestHandle
//! ```

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sapwood_proto::params::CHOICES_MAX;
use sapwood_proto::steer::StepWaker;

use crate::api::{EngineError, GenerationRequest, ModelInfo, SharedVocabulary};
use crate::bad_words::TokenIndex;
use crate::config::Config;
use crate::draft_model::DraftModel;
use crate::inbox::{EngineCommand, OwnerInbox};
use crate::model::{Interrupt, Model};
use crate::outbox::{OwnerWaker, RequestHandle, outbox};
use crate::owner::EngineOwner;
use crate::owner_thread::OwnerThread;
use crate::queue::{AdmissionQueue, QueueLimits, at_most};
use crate::ranking::mix;
use crate::stats::EngineStats;
use crate::submission::prepare;

struct EngineShared {
    info: ModelInfo,
    vocabulary: SharedVocabulary,
    /// Bytes of the longest token of the vocabulary.
    token_bytes_max: usize,
    /// Built for the first request with bad words.
    token_index: OnceLock<Arc<TokenIndex>>,
    config: Config,
    commands: SyncSender<Box<EngineCommand>>,
    waker: Arc<OwnerWaker>,
    queue: Arc<AdmissionQueue>,
    stats: Arc<EngineStats>,
    seeds: AtomicU64,
}

impl EngineShared {
    fn token_index(&self) -> Arc<TokenIndex> {
        let make = || {
            let vocabulary = Arc::clone(&self.vocabulary);
            Arc::new(TokenIndex::new(vocabulary, self.info.vocabulary_tokens))
        };
        // Requests that come meanwhile wait for the first one: building it twice would cost more.
        Arc::clone(self.token_index.get_or_init(make))
    }
}

/// An engine. Clones share one engine. When the last clone is dropped, the thread ends running requests and is joined.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<EngineShared>,
    /// `None` if the caller steps the owner itself.
    thread: Option<Arc<OwnerThread>>,
}

impl Engine {
    /// Runs `model` on its own thread.
    ///
    /// # Errors
    /// If the operating system cannot create a thread.
    pub fn spawn(model: Box<dyn Model>, config: Config) -> std::io::Result<Self> {
        Self::spawn_drafting(model, None, config)
    }

    /// Runs `model` on its own thread, with a model that drafts for it if `config` says
    /// [`Draft`](crate::SpeculationMode::Draft).
    ///
    /// # Errors
    /// As [`Engine::spawn`].
    pub fn spawn_drafting(
        mut model: Box<dyn Model>,
        mut draft: Option<DraftModel>,
        config: Config,
    ) -> std::io::Result<Self> {
        let interrupt = Interrupt::default();
        // Before the owner takes the models: `Model` demands it before any other call.
        model.interrupt(Arc::clone(&interrupt));
        if let Some(draft) = &mut draft {
            draft.model.interrupt(Arc::clone(&interrupt));
        }
        let name = format!("engine {}", model.info().name);
        let (owner, mut engine) = Self::by_hand_drafting(model, draft, config);
        let waker = Arc::clone(&engine.shared.waker);
        let thread = OwnerThread::spawn(name, waker, interrupt, move |started| {
            crate::owner::run(owner, started);
        })?;
        engine.thread = Some(Arc::new(thread));
        Ok(engine)
    }

    /// An engine without a thread, and its owner, which the caller steps: nothing happens between two calls of
    /// [`EngineOwner::step`]. Sequences are numbered from 0 in the order of submission (for a steered request, that in which
    /// steerers have begun), those of one request in the order of their choices.
    #[must_use]
    pub fn by_hand(model: Box<dyn Model>, config: Config) -> (EngineOwner, Self) {
        Self::by_hand_drafting(model, None, config)
    }

    /// The same with a model that drafts, as [`Engine::spawn_drafting`] has it.
    #[must_use]
    pub fn by_hand_drafting(
        model: Box<dyn Model>,
        draft: Option<DraftModel>,
        config: Config,
    ) -> (EngineOwner, Self) {
        // At least 1: a channel without capacity hands over only to a receiver that waits, which the owner never does.
        let (sender, commands) = sync_channel(at_most(config.queue_requests).max(1));
        let waker = Arc::new(OwnerWaker::default());
        let queue = Arc::new(AdmissionQueue::default());
        let stats = Arc::new(EngineStats::default());
        let seeds = config
            .seed
            // The standard library's hasher is seeded by the operating system, which is random enough for sampling.
            .unwrap_or_else(|| RandomState::new().hash_one(0));
        let shared = EngineShared {
            info: model.info(),
            token_bytes_max: model.vocabulary().token_bytes_max(),
            vocabulary: model.vocabulary(),
            token_index: OnceLock::new(),
            config,
            commands: sender,
            waker: Arc::clone(&waker),
            queue: Arc::clone(&queue),
            stats: Arc::clone(&stats),
            seeds: AtomicU64::new(seeds),
        };
        let inbox = OwnerInbox {
            commands,
            waker,
            queue,
            stats,
        };
        let owner = EngineOwner::new(model, draft, &shared.config, inbox);
        let engine = Self {
            shared: Arc::new(shared),
            thread: None,
        };
        (owner, engine)
    }

    /// Submits a request to the owner. Renders the chat template and tokenises on the caller's thread, which takes time
    /// in proportion to the prompt; then returns without waiting.
    ///
    /// # Errors
    /// `BAD_CONFIG`, `BAD_TOKENS`, `EMPTY_PROMPT`, `PROMPT_TOO_LONG` and the errors of the chat template, before
    /// anything is queued; `ENGINE_BUSY` if the queue is full; `engine_dead` if the owner no longer exists.
    pub fn submit(&self, request: GenerationRequest) -> Result<RequestHandle, EngineError> {
        let shared = &self.shared;
        let steered = request.steer.is_some();
        // Mixed, because consecutive numbers must not give related draws (LM-605).
        let seed = || mix(shared.seeds.fetch_add(1, Ordering::Relaxed));
        let token_index = || shared.token_index();
        let (info, vocabulary) = (&shared.info, &*shared.vocabulary);
        let mut submission = prepare(
            request,
            info,
            vocabulary,
            shared.token_bytes_max,
            token_index,
            seed,
        )?;
        submission.choose_adapters(info)?;
        let prompt_tokens = submission.prompt.len();
        let caller = submission.turn.caller;
        let limits = QueueLimits {
            requests: shared.config.queue_requests,
            tokens: shared.config.queue_tokens,
        };
        // After `prepare`, which counts the tokens: an invalid request is refused as such even if the queue is full,
        // and is never charged.
        if let Err(full) = shared.queue.enter(caller, prompt_tokens, limits) {
            return Err(shared.queue.refused(full, &shared.stats, "prompt tokens"));
        }
        // After the charge: a request that is refused has not begun, and costs its controller nothing.
        let waker: Arc<dyn StepWaker> = Arc::clone(&shared.waker) as _;
        if let Err(error) = submission.begin(&waker) {
            shared.stats.panics.add(1);
            shared.queue.leave(caller, prompt_tokens);
            return Err(error);
        }
        // Only steerers fork, so only a steered request can have more choices than it asked for.
        let choices = if steered {
            CHOICES_MAX
        } else {
            submission.choices
        };
        let (outbox, mut handle) = outbox(
            choices,
            shared.config.outbox_events,
            Arc::clone(&shared.waker),
        );
        handle.seed = submission.terms.seed;
        handle.prompt_tail = std::mem::take(&mut submission.prompt_tail);
        let given = submission.given_prompt().len();
        handle.prompt_tokens = u32::try_from(given).unwrap_or(u32::MAX);
        // The inbox has capacity for every request that may be queued, so sending fails only if the owner no longer
        // exists.
        if let Err(_refused) = shared
            .commands
            .try_send(Box::new(EngineCommand { submission, outbox }))
        {
            // The owner refunds the charges of the requests that it has received; this one never reached it.
            shared.queue.leave(caller, prompt_tokens);
            return Err(shared.waker.closed_error());
        }
        // After the command is in the inbox, so that the owner finds it when it wakes.
        shared.waker.wake();
        Ok(handle)
    }

    /// Stops the thread after the current step, even while clones of the engine exist: its requests end with
    /// `unavailable` and new ones are refused. An owner that is stepped by hand continues.
    pub fn end(&self) {
        if let Some(thread) = &self.thread {
            thread.end();
        }
    }

    /// Waits until the thread has ended after [`Engine::end`], and with it everything that it does at its end. Returns at once
    /// for an owner that is stepped by hand.
    pub fn wait_ended(&self) {
        if let Some(thread) = &self.thread {
            thread.wait_ended();
        }
    }

    /// Asks the engine to drop the prefixes that it has saved in memory, for another model that needs the memory. Without
    /// [`Config::prefix_disk`] that is done in the next step, with one as they are written, in
    /// [`crate::PrefixDiskConfig::MOVE_MAX`] at most; [`EngineStats::prefix_saved_bytes`] tells when.
    pub fn drop_saved_prefixes(&self) {
        self.shared.waker.trim();
    }

    /// Returns what the model is and can do.
    #[must_use]
    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// Returns the model's vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> &SharedVocabulary {
        &self.shared.vocabulary
    }

    /// Returns the engine's counters.
    #[must_use]
    pub fn stats(&self) -> &Arc<EngineStats> {
        &self.shared.stats
    }

    /// Returns whether the engine can serve no request any more: the model is lost, or the thread has ended, also because
    /// of [`Engine::end`]. False for an engine that is stepped by hand.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| thread.is_lost(&self.shared.stats))
    }

    /// Returns how long the thread has been in its current step without progress; zero while it is idle or stepped by
    /// hand (for OA-901's watchdog). A model signals progress within a long decode call with
    /// [`crate::model::DecodeSignals`]. Returns [`Duration::MAX`] if the model is lost, or if the thread has ended
    /// without being stopped (OA-913).
    #[must_use]
    pub fn stalled_for(&self) -> Duration {
        match &self.thread {
            Some(thread) => thread.stalled_for(&self.shared.stats),
            None => Duration::ZERO,
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.shared.info.name)
            .finish_non_exhaustive()
    }
}
