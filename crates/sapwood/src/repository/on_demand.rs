//! A model that is loaded by the first call that needs it, and leaves the memory when no call has come for a while.
//!
//! ```text
//!            call ─► load ─► loaded ◄─ calls, each counted until its last chunk
//!   not loaded ◄── idle for `idle_unload`, or another model needs the memory
//!       │                         │
//!       └── unloaded by request ◄─┘     calls are refused until it is loaded by request
//! ```
//!
//! The function in the kernel stays the same kind of function throughout: it forwards its call to the loaded model's, and
//! waits for that if there is none. So a client needs to know nothing of this.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, Shared};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use sapwood_kernel::{Call, Chunk, Chunks, Error, Fun, ModelFacts, Result, Spec, raw};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::model_loading;
use crate::models::PlannedModel;

/// Whether a model is loaded, by whom it is used, and since when it is not.
pub(super) struct OnDemand {
    name: String,
    /// How long it stays loaded without a call. `None`: until another model needs the memory.
    idle_unload: Option<Duration>,
    /// Calls that may wait for it to be loaded.
    waiting_max: usize,
    /// Whether it is configured to embed.
    embeds: bool,
    state: Mutex<OnDemandState>,
    /// Notified when it is closed.
    closed: Notify,
}

struct OnDemandState {
    /// The function of the loaded model. It owns a handle of the engine, so no copy may outlive its call.
    function: Option<Fun>,
    /// Calls that use it.
    calls: usize,
    /// Calls that wait until it is loaded, and enter it then.
    waiting: usize,
    /// The load that they wait for.
    load: Option<SharedLoad>,
    /// When the last call ended, or when it was loaded.
    used: Instant,
    /// Unloaded by request: the next call does not load it.
    is_closed: bool,
    /// What its file says, for the time when it is not loaded.
    outline: Option<Arc<ModelFacts>>,
    /// The specification that it had when it was loaded, if that holds no weights: a model that embeds has other inputs and
    /// outputs than one that generates.
    last_spec: Option<Spec>,
}

impl OnDemand {
    /// A model that is not loaded.
    pub(super) fn new(planned: &PlannedModel, waiting_max: usize) -> Arc<Self> {
        Arc::new(Self {
            name: planned.name.clone(),
            idle_unload: planned.residence.idle_unload,
            waiting_max,
            embeds: planned.is_configured_to_embed(),
            state: Mutex::new(OnDemandState {
                function: None,
                calls: 0,
                waiting: 0,
                load: None,
                used: Instant::now(),
                is_closed: false,
                outline: None,
                last_spec: None,
            }),
            closed: Notify::new(),
        })
    }

    /// The model's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The function to register in the kernel. `load` loads the model, if it is not loaded, and enters it.
    pub(super) fn function<F>(self: &Arc<Self>, load: impl Fn() -> F + Send + Sync + 'static) -> Fun
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let mine = Arc::clone(self);
        let spec = self.spec();
        let embeds = spec.embeds;
        raw(spec, move |call| mine.call(call, embeds, &load))
    }

    /// The loaded model's, or what is known of it before.
    fn spec(&self) -> Spec {
        let state = self.state();
        match (&state.function, &state.last_spec) {
            (Some(function), _) => function.spec().clone(),
            (None, Some(spec)) => spec.clone(),
            (None, None) => {
                let what = "is loaded when it is called";
                let facts = state.outline.clone();
                model_loading::placeholder_spec(&self.name, what, self.embeds, facts)
            }
        }
    }

    /// Calls it. `embeds` is what the caller has been told of it.
    fn call<F>(self: &Arc<Self>, call: Call, embeds: bool, load: &impl Fn() -> F) -> Chunks
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let refused = |error| stream::iter([Err(error)]).boxed();
        match self.enter() {
            Ok(Some(in_use)) => self.forward(in_use, call, embeds),
            Err(error) => refused(error),
            Ok(None) => match self.wait() {
                Err(error) => refused(error),
                Ok(waiting) => {
                    let (mine, loading) = (Arc::clone(self), load());
                    let entered = async move {
                        loading.await?;
                        let entered = mine.enter()?;
                        // Before it has entered, the model could be unloaded.
                        drop(waiting);
                        let in_use = entered
                            .ok_or_else(|| mine.unavailable("was unloaded", Some(RETRY_AFTER)))?;
                        Ok::<_, Error>(mine.forward(in_use, call, embeds))
                    };
                    stream::once(entered).try_flatten().boxed()
                }
            },
        }
    }

    fn forward(&self, in_use: ModelInUse, call: Call, embeds: bool) -> Chunks {
        if in_use.function.spec().embeds == embeds {
            return in_use.call(call);
        }
        // The inputs were made for a model of the other kind; the next call sees which kind it is.
        let what = "turned out to be of another kind when it was loaded";
        stream::iter([Err(self.unavailable(what, Some(RETRY_AFTER)))]).boxed()
    }

    /// The load that runs, or the one that `begin` makes. However many calls wait, one load runs, and it does not end with
    /// them.
    pub(super) fn load(
        self: &Arc<Self>,
        begin: impl FnOnce(RunningLoad) -> SharedLoad,
    ) -> SharedLoad {
        let mut state = self.state();
        let begun = state.load.take();
        let load = begun.unwrap_or_else(|| begin(RunningLoad(Arc::clone(self))));
        state.load = Some(load.clone());
        load
    }

    /// Enters the model, if it is loaded.
    ///
    /// # Errors
    /// `unavailable`, if it was unloaded by request.
    pub(super) fn enter(self: &Arc<Self>) -> Result<Option<ModelInUse>> {
        let mut state = self.state();
        if state.is_closed {
            return Err(self.unavailable("is unloaded", None));
        }
        let Some(function) = state.function.clone() else {
            return Ok(None);
        };
        state.calls += 1;
        Ok(Some(ModelInUse {
            function,
            counted: CountedCall(Arc::clone(self)),
        }))
    }

    fn wait(self: &Arc<Self>) -> Result<WaitingCall> {
        let mut state = self.state();
        if state.waiting >= self.waiting_max {
            return Err(Error::Engine {
                code: Code::Overloaded,
                reason: ErrorReason::ENGINE_BUSY,
                message: "too many requests wait for this model to be loaded: try again later"
                    .into(),
                retry_after: Some(RETRY_AFTER),
            });
        }
        state.waiting += 1;
        Ok(WaitingCall(Arc::clone(self)))
    }

    /// The error of calls while it cannot be used.
    pub(super) fn unavailable(&self, what: &str, retry_after: Option<Duration>) -> Error {
        Error::Unavailable {
            why: format!("the model {} {what}", self.name),
            retry_after,
        }
    }

    /// Records that it was loaded: calls may enter.
    pub(super) fn loaded(&self, function: Fun) {
        let mut state = self.state();
        let spec = function.spec();
        state.last_spec = spec.facts.is_none().then(|| spec.clone());
        state.function = Some(function);
        state.is_closed = false;
        state.used = Instant::now();
    }

    /// Records what its file says.
    pub(super) fn describe(&self, outline: ModelFacts) {
        self.state().outline = Some(Arc::new(outline));
    }

    /// Drops what its file says with the last configuration: with another one it has another context, and other defaults.
    pub(super) fn clear_outline(&self) {
        self.state().outline = None;
    }

    /// Whether what its file says is recorded.
    pub(super) fn is_described(&self) -> bool {
        self.state().outline.is_some()
    }

    /// Refuses calls from now on, until it is [loaded](Self::loaded) by request.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        state.function = None;
        drop(state);
        self.closed.notify_waiters();
    }

    /// Waits until it is [closed](Self::close).
    pub(super) async fn until_closed(&self) {
        loop {
            // Before the check: it is notified of what happens from here on.
            let closed = self.closed.notified();
            if self.state().is_closed {
                return;
            }
            closed.await;
        }
    }

    /// Lets no call enter that does not load it again.
    pub(super) fn withdraw(&self) {
        self.state().function = None;
    }

    /// Withdraws it if nobody has used it for `idle_unload`. Returns whether it did.
    pub(super) fn withdraw_idle(&self, now: Instant) -> bool {
        let Some(idle_unload) = self.idle_unload else {
            return false;
        };
        self.withdraw_if(|state| now.saturating_duration_since(state.used) >= idle_unload)
    }

    /// Withdraws it if nobody uses it. Returns whether it did.
    pub(super) fn withdraw_unused(&self) -> bool {
        self.withdraw_if(|_| true)
    }

    fn withdraw_if(&self, is_idle: impl Fn(&OnDemandState) -> bool) -> bool {
        let mut state = self.state();
        // Checked and withdrawn under one lock: a call that enters in between would lose its engine.
        let withdraws = state.is_unused() && is_idle(&state);
        if withdraws {
            state.function = None;
        }
        withdraws
    }

    /// When it was last used, if it is loaded and nobody uses it.
    pub(super) fn unused_since(&self) -> Option<Instant> {
        let state = self.state();
        state.is_unused().then_some(state.used)
    }

    fn state(&self) -> MutexGuard<'_, OnDemandState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OnDemandState {
    /// Whether it is loaded, and nobody uses it or is about to.
    const fn is_unused(&self) -> bool {
        self.function.is_some() && self.calls == 0 && self.waiting == 0
    }
}

/// A load whose end many may await.
pub(super) type SharedLoad = Shared<BoxFuture<'static, Result<()>>>;

/// Held by a load until it ends, whichever way: the next call that finds the model not loaded begins another.
pub(super) struct RunningLoad(Arc<OnDemand>);

impl Drop for RunningLoad {
    fn drop(&mut self) {
        self.0.state().load = None;
    }
}

/// When to try again what may succeed soon.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A loaded model that stays loaded until this, and the chunks of its call, are dropped.
pub(super) struct ModelInUse {
    function: Fun,
    counted: CountedCall,
}

impl ModelInUse {
    fn call(self, call: Call) -> Chunks {
        Box::pin(CountedChunks {
            chunks: self.function.call(call),
            _counted: self.counted,
        })
    }
}

/// Counts one call of a loaded model.
struct CountedCall(Arc<OnDemand>);

impl Drop for CountedCall {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.calls -= 1;
        state.used = Instant::now();
    }
}

/// Counts one call that waits.
struct WaitingCall(Arc<OnDemand>);

impl Drop for WaitingCall {
    fn drop(&mut self) {
        self.0.state().waiting -= 1;
    }
}

/// The chunks of a call. Fields are dropped in their order: the engine's handle in the chunks before the count.
struct CountedChunks {
    chunks: Chunks,
    _counted: CountedCall,
}

impl Stream for CountedChunks {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.chunks.poll_next_unpin(cx)
    }
}
