//! A run before decoding: starts the call and handles deadlines, cancellation, panics and metadata.
//!
//! ```text
//!   Call(Setup) ─┐ first poll                  ┌─ end ─────────────────► Done
//!   Node         ├────────────► Live(stream) ──┤
//!   Failed ──────┘ error: Done                 └─ error, panic, cancel, deadline: the source is dropped ► Done
//! ```

use sapwood_proto::error_reason::ErrorReason;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::Value;
use tokio::time::{Sleep, sleep_until};

use super::output_tracker::OutputTracker;
use crate::call::{Call, CallId, Caller, Inputs, Instant};
use crate::cancel::Cancel;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::extensions::Extensions;
use crate::layer::Next;
use crate::meta::Meta;
use crate::name::{Name, Port};
use crate::node::{Demand, Node, panic_text};
use crate::spec::Spec;
use crate::want::{RequestedPorts, Want};
use crate::{Chunks, Result};

/// Chunks after which an always-ready stream is interrupted to check the clock, or to yield to other tasks.
const BUDGET: u32 = 64;

/// A call that has not started.
pub(crate) struct Setup {
    pub(crate) caller: Caller,
    /// Counts the functions of the kernel that panicked.
    pub(crate) panics: Arc<AtomicU64>,
    pub(crate) depth: u32,
    pub(crate) inputs: Inputs,
    pub(crate) next: Next,
    pub(crate) spec: Arc<Spec>,
    pub(crate) demand: Option<Arc<Demand>>,
}

pub(super) enum FlowPhase {
    Call(Box<Setup>),
    Node(Node),
    Failed(Error),
    Live(Chunks),
    Done,
}

/// The chunks of a run that the caller requested.
pub(super) struct Flow {
    pub(super) id: CallId,
    pub(super) cancel: Cancel,
    pub(super) meta: Meta,
    /// Incremented whenever `meta` changes.
    pub(super) version: u64,
    /// Set at the start.
    pub(super) deadline: Option<Instant>,
    /// From the start to the deadline.
    pub(super) timeout: Option<Duration>,
    /// The port that is read as the main one.
    pub(super) port: Option<Port>,
    /// Overrides what the type requests.
    pub(super) want: Option<Want>,
    /// Named values for the call and those within it.
    pub(super) context: Vec<(Name, Value)>,
    phase: FlowPhase,
    name: Name,
    tracker: OutputTracker,
    sleep: Option<Pin<Box<Sleep>>>,
    listening: Option<BoxFuture<'static, ()>>,
    ready: u32,
    /// Counter of panics; `None` for a node, which belongs to no kernel.
    panics: Option<Arc<AtomicU64>>,
    /// Whether a panic was counted: a run that panics and whose source panics again as it is dropped has panicked once.
    panicked: bool,
}

impl Flow {
    pub(super) fn new(phase: FlowPhase) -> Self {
        let (name, cancel) = match &phase {
            FlowPhase::Call(setup) => (
                setup.spec.name.clone(),
                setup
                    .caller
                    .inherited
                    .as_ref()
                    // A child: the caller's cancel reaches this call, and this call's own does not reach the caller.
                    .map_or_else(Cancel::new, |inherited| inherited.cancel.child()),
            ),
            _ => (Name::new("node"), Cancel::new()),
        };
        Self {
            id: CallId::next(),
            cancel,
            meta: Meta::default(),
            version: 0,
            deadline: None,
            timeout: None,
            port: None,
            want: None,
            context: Vec::new(),
            phase,
            tracker: OutputTracker::new(name.clone(), None, Want::default()),
            name,
            sleep: None,
            listening: None,
            ready: 0,
            panics: None,
            panicked: false,
        }
    }

    /// Checks that the stream can be started and produces what is requested (KE-142).
    pub(super) fn check(&self, want: &Want) -> Result<()> {
        match &self.phase {
            FlowPhase::Failed(error) => Err(error.clone()),
            FlowPhase::Call(setup) => check(
                &setup.spec,
                self.port.as_ref(),
                self.want.as_ref().unwrap_or(want),
            ),
            FlowPhase::Node(_) | FlowPhase::Live(_) | FlowPhase::Done => Ok(()),
        }
    }

    /// Whether the first poll has been made.
    pub(super) const fn has_begun(&self) -> bool {
        matches!(self.phase, FlowPhase::Live(_) | FlowPhase::Done)
    }

    pub(super) const fn is_done(&self) -> bool {
        matches!(self.phase, FlowPhase::Done)
    }

    /// Drops the source, and with it everything that it started. A panic of that drop ends this run only, like one of a
    /// poll (KE-139); it is returned as an error.
    pub(super) fn stop(&mut self) -> Option<Error> {
        let source = std::mem::replace(&mut self.phase, FlowPhase::Done);
        // Both hold the waker of a task that may live on.
        self.sleep = None;
        self.listening = None;
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(source)));
        dropped.err().map(|payload| self.panic_error(payload))
    }

    /// The next chunk. `want` is called once, when the stream starts.
    pub(super) fn poll_chunk(
        &mut self,
        want: fn() -> Want,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Chunk>>> {
        loop {
            // Checked before the source is polled, so that a run that is always ready ends too (KE-502).
            if self.cancel.is_cancelled() && !self.is_done() {
                return self.fail(Error::Cancelled);
            }
            let FlowPhase::Live(chunks) = &mut self.phase else {
                if self.is_done() {
                    return Poll::Ready(None);
                }
                // Nothing of the call exists before this first poll (KE-141).
                if let Err(error) = self.start(want()) {
                    return self.fail(error);
                }
                continue;
            };
            // The panic of a function ends its run only (KE-139).
            let polled = catch_unwind(AssertUnwindSafe(|| chunks.as_mut().poll_next(cx)));
            let mut chunk = match polled {
                Ok(Poll::Ready(Some(Ok(chunk)))) => chunk,
                Ok(Poll::Ready(Some(Err(error)))) => return self.fail(error),
                Ok(Poll::Ready(None)) => return self.end(),
                Ok(Poll::Pending) => return self.wait(cx),
                Err(payload) => {
                    let error = self.panic_error(payload);
                    return self.fail(error);
                }
            };
            self.ready += 1;
            // Reading the clock costs more than a chunk, so a stream that is always ready pays it once in 64 (KE-503).
            if self.ready >= BUDGET {
                self.ready = 0;
                if self
                    .deadline
                    .is_some_and(|deadline| Instant::now() >= deadline)
                {
                    return self.fail(Error::Deadline);
                }
            }
            let wanted = match self.tracker.admit(&chunk) {
                Ok(wanted) => wanted,
                Err(error) => return self.fail(error),
            };
            // Before the port is looked at: metadata belongs to the request, and may come on a port that nobody reads.
            if let Some(meta) = &chunk.meta {
                self.meta.merge(meta);
                self.version += 1;
            }
            if wanted {
                // `T` decodes the main port, whichever port the caller chose for it.
                if self.port.is_some() {
                    chunk.port = Port::MAIN;
                }
                return Poll::Ready(Some(Ok(chunk)));
            }
            if self.ready == 0 {
                // Only unrequested chunks so far: yield, so that other tasks run.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }

    fn start(&mut self, want: Want) -> Result<()> {
        // Again, although `check` may have been asked: the caller can have set a port since, or never asked.
        self.check(&want)?;
        let mut want = self.want.take().unwrap_or(want);
        // `Done` until the stream exists: a start that fails or panics leaves nothing to be started again.
        let phase = std::mem::replace(&mut self.phase, FlowPhase::Done);
        if let Some(port) = &self.port {
            want.ports = RequestedPorts::Only(vec![port.clone()]);
        // Read now and not when the node was made: views may be added until the first poll (KE-149).
        } else if let FlowPhase::Call(setup) = &phase
            && let Some(ports) = setup.demand.as_ref().and_then(|demand| demand.ports())
        {
            want.ports = RequestedPorts::Only(ports);
        }
        let chunks = match phase {
            FlowPhase::Call(setup) => self.call(*setup, want)?,
            FlowPhase::Node(node) => {
                self.deadline = within(None, self.timeout);
                let chunks = node.open_for(&want.ports);
                self.tracker = OutputTracker::new(self.name.clone(), None, want);
                chunks
            }
            // `check` has failed, or nothing is left to be started.
            FlowPhase::Failed(_) | FlowPhase::Live(_) | FlowPhase::Done => return Ok(()),
        };
        self.phase = FlowPhase::Live(chunks);
        Ok(())
    }

    fn call(&mut self, setup: Setup, want: Want) -> Result<Chunks> {
        self.tracker =
            OutputTracker::new(self.name.clone(), Some(setup.spec.clone()), want.clone());
        let inherited = setup.caller.inherited.clone();
        let inherited = inherited.as_deref();
        self.deadline = within(inherited.and_then(|from| from.deadline), self.timeout);
        let mut extensions =
            inherited.map_or_else(Default::default, |from| from.extensions.clone());
        extensions.add_context(std::mem::take(&mut self.context));
        self.panics = Some(setup.panics);
        let call = Call {
            id: self.id,
            parent: inherited.map(|from| from.id),
            caller: setup.caller,
            inputs: setup.inputs,
            want,
            deadline: self.deadline,
            cancel: self.cancel.clone(),
            extensions,
            own: Extensions::default(),
            spec: setup.spec,
            depth: setup.depth,
        };
        // `call` is user code as well, although it should do nothing yet (KE-131, KE-139).
        catch_unwind(AssertUnwindSafe(|| setup.next.call(call)))
            .map_err(|payload| self.panic_error(payload))
    }

    /// The source is pending: registers the deadline and the cancel as well (KE-502, KE-503).
    fn wait(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Chunk>>> {
        // A pending source has yielded, which starts a new budget.
        self.ready = 0;
        if let Some(deadline) = self.deadline {
            if self.sleep.is_none() {
                // A timer needs tokio. Without it a deadline cannot be enforced, and that is an error (D-16).
                if tokio::runtime::Handle::try_current().is_err() {
                    return self.fail(Error::Unavailable {
                        why: "a deadline needs a tokio runtime".into(),
                        retry_after: None,
                    });
                }
                self.sleep = Some(Box::pin(sleep_until(deadline)));
            }
            // Polled each time, because the task, and with it the waker, may have changed.
            let expired = |sleep: &mut Pin<Box<Sleep>>| sleep.as_mut().poll(cx).is_ready();
            if self.sleep.as_mut().is_some_and(expired) {
                return self.fail(Error::Deadline);
            }
        }
        // Registered last and after the source was polled: a cancel in between is seen by this poll of it.
        let cancelled = self
            .listening
            .get_or_insert_with(|| self.cancel.cancelled());
        if cancelled.poll_unpin(cx).is_ready() {
            return self.fail(Error::Cancelled);
        }
        Poll::Pending
    }

    fn end(&mut self) -> Poll<Option<Result<Chunk>>> {
        let panicked = self.stop();
        // The source goes before its end is reported, so that its guards have run by then (KE-501).
        let error = panicked.or_else(|| self.tracker.end(&self.meta).err());
        Poll::Ready(error.map(Err))
    }

    fn fail(&mut self, error: Error) -> Poll<Option<Result<Chunk>>> {
        // The first error is reported, whatever the drop does.
        let _ = self.stop();
        Poll::Ready(Some(Err(error)))
    }

    fn panic_error(&mut self, payload: Box<dyn std::any::Any + Send>) -> Error {
        let panic = panic_text(payload);
        let again = std::mem::replace(&mut self.panicked, true);
        if let Some(count) = self.panics.as_ref().filter(|_| !again) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        tracing::error!(function = %self.name, call = %self.id, panic, "a function panicked");
        Error::Panicked {
            function: self.name.clone(),
        }
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        // No reader is left for the error; the panic is counted and logged.
        let _ = self.stop();
        self.cancel.cancel();
    }
}

/// Checks that a function of this spec produces what is wanted of `port`, or of the wanted ports.
fn check(spec: &Spec, port: Option<&Port>, want: &Want) -> Result<()> {
    // It promises nothing, so nothing can be checked before it runs (KE-142).
    if spec.outputs.is_empty() {
        return Ok(());
    }
    if let Some(port) = port.filter(|port| spec.output(port).is_none()) {
        let why = format!("{} has no such port", spec.name);
        return Err(Error::argument(Name::shared(port), why).because(ErrorReason::UNKNOWN_PARAM));
    }
    let read = |output: &Port| match port {
        Some(port) => output == port,
        None => want.ports.has(output),
    };
    let produced = || {
        let outputs = spec.outputs.iter().filter(|output| read(&output.port));
        outputs.flat_map(|output| &output.mimes)
    };
    let taken = produced().any(|mime| want.mimes.iter().any(|wanted| wanted.overlaps(mime)));
    if taken || want.mimes.iter().any(|mime| mime.as_str() == "*/*") {
        return Ok(());
    }
    Err(Error::Unsupported {
        function: spec.name.clone(),
        produced: produced().cloned().collect(),
        wanted: want.mimes.clone().into(),
    })
}

/// The earlier of an inherited deadline and a timeout that starts now.
fn within(deadline: Option<Instant>, timeout: Option<Duration>) -> Option<Instant> {
    let own = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    deadline.into_iter().chain(own).min()
}
