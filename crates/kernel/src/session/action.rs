//! One running action: polls its run, writes its chunks into the session and ends it.
//!
//! ```text
//!   gather what the run has ──► room? ── no ──► wait (EV-803)
//!        ▲                       └─ yes ──► write all of it at once ──┐
//!        ├────────────────────── more ◄───────────────────────────────┤
//!        │                       end, error or cancelled ◄────────────┘
//!        │                        └──► finish, fail (EV-107, EV-930), `meta` and finish (EV-913)
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use sapwood_proto::evergreen::{Reason, Status};
use sapwood_proto::session::{ActionKey, WriteError};

use super::bind::BoundAction;
use super::failure;
use super::link::SessionLink;
use super::output::Outputs;
use super::signals::InputSignals;
use super::wire::{self, META};
use crate::cancel::Cancel;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::meta::{ChoiceFinish, Meta};
use crate::run::Run;

/// An action in progress. Resolves to its key and its failure, if any; dropping it stops the work.
pub(super) struct Serving {
    link: SessionLink,
    key: ActionKey,
    name: String,
    run: Run,
    cancel: Cancel,
    outputs: Outputs,
    signals: Arc<InputSignals>,
    /// Whether the session was informed that the action waits for cursors only (D-3).
    waiting: bool,
    /// Chunks that wait to be written.
    retained: VecDeque<Chunk>,
    /// The result of the run, once it has ended.
    end: Option<Result<(), Error>>,
}

/// The result of an action.
pub(crate) struct ActionOutcome {
    pub(crate) key: ActionKey,
    pub(crate) failure: Option<Arc<Status>>,
}

impl Serving {
    pub(super) fn new(link: SessionLink, key: ActionKey, name: String, bound: BoundAction) -> Self {
        let BoundAction {
            run,
            outputs,
            signals,
        } = bound;
        Self {
            link,
            key,
            name,
            cancel: run.cancel(),
            run,
            outputs,
            signals,
            waiting: false,
            retained: VecDeque::new(),
            end: None,
        }
    }

    fn poll_serve(&mut self, cx: &mut Context<'_>) -> Poll<Option<Arc<Status>>> {
        for _ in 0..BATCHES {
            // What was gathered before goes out first. The run is not polled while the peer has no room, which stops
            // its work (EV-803).
            let gathered = if self.retained.is_empty() {
                self.poll_gather(cx)
            } else {
                Poll::Ready(())
            };
            if let Err(error) = ready!(self.poll_write(cx)) {
                return Poll::Ready(self.refused(error));
            }
            match &self.end {
                // Looked at only after the write, so that chunks before a wait or an end are never held back.
                None => ready!(gathered),
                Some(Ok(())) => return Poll::Ready(self.finished()),
                // A function can fail with `Cancelled` of its own, for example from a call it made; that is a failure.
                Some(Err(Error::Cancelled)) if self.cancel.is_cancelled() => {
                    return Poll::Ready(self.cancelled());
                }
                Some(Err(error)) => return Poll::Ready(self.run_failed(error)),
            }
        }
        // A run that is always ready must not starve other runs.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Gathers chunks of the run, up to a batch; pending if it has no more.
    fn poll_gather(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut bytes = 0;
        while self.retained.len() < BATCH && bytes < BATCH_BYTES {
            match ready!(Pin::new(&mut self.run).poll_next(cx)) {
                Some(Ok(chunk)) => {
                    bytes += chunk.data.len();
                    self.retained.push_back(chunk);
                }
                Some(Err(error)) => {
                    self.end = Some(Err(error));
                    break;
                }
                None => {
                    self.end = Some(Ok(()));
                    break;
                }
            }
        }
        Poll::Ready(())
    }

    /// Writes the gathered chunks, as far as there is room.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), WriteError>> {
        if self.retained.is_empty() {
            return Poll::Ready(Ok(()));
        }
        self.link.with(|live| {
            while let Some(chunk) = self.retained.front() {
                match self.outputs.write(live, chunk) {
                    Ok(()) => {
                        self.retained.pop_front();
                    }
                    // The waker is registered under the lock of the attempt, so room that appears now is not missed.
                    Err(WriteError::Full) => ready!(live.poll_room(cx)),
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
            Poll::Ready(Ok(()))
        })
    }

    fn finished(&mut self) -> Option<Arc<Status>> {
        let trailing = self.trailing();
        let written = self.link.with(|live| {
            let written = trailing
                .map_or(Ok(()), |chunk| self.outputs.write_last(live, &chunk))
                .and_then(|()| {
                    let ends = &self.run.meta().finish;
                    // Before `finish`, which ends the leaves and drops the shapes that say which answer is where.
                    self.outputs.note_cuts(live, ends);
                    self.outputs.finish(live)
                });
            if written.is_ok() {
                live.machine().calls().finish(self.key);
            }
            written
        });
        written.err().and_then(|error| self.refused(error))
    }

    /// KE-305: the run's metadata as a chunk for output `meta`, if the function has not written that itself.
    fn trailing(&self) -> Option<Chunk> {
        let meta = self.run.meta();
        let wanted = self.outputs.is_unwritten(META) && *meta != Meta::default();
        let document = wanted.then(|| Chunk::json(&wire::trailing(meta)))?;
        document.ok().map(|chunk| chunk.on(META))
    }

    fn run_failed(&self, error: &Error) -> Option<Arc<Status>> {
        let status = match self.signals.behind(error) {
            // The input failed first, and its status has more detail than the error (EV-930).
            Some(status) => Status::clone(&status),
            None => failure::status(error, &self.name),
        };
        self.failed(status)
    }

    fn failed(&self, status: Status) -> Option<Arc<Status>> {
        let status = Arc::new(status);
        self.link
            .with(|live| live.machine().calls().fail(self.key, Arc::clone(&status)));
        Some(status)
    }

    /// EV-913: the caller cancelled, so this is a good end. If the action has ended otherwise (a deadline, the end of
    /// the session), the key is stale by now, and nothing here has an effect.
    fn cancelled(&mut self) -> Option<Arc<Status>> {
        // What is known so far, with the end of this answer alone.
        let known = Meta {
            finish: [(0, ChoiceFinish::Cancelled)].into(),
            extra: BTreeMap::new(),
            ..self.run.meta().clone()
        };
        if let Ok(chunk) = Chunk::json(&wire::trailing(&known)) {
            // If it cannot be written, the session is over.
            let _ = self
                .link
                .with(|live| self.outputs.write_last(live, &chunk.on(META)));
        }
        self.finished()
    }

    /// Handles a write that the session refused.
    fn refused(&self, error: WriteError) -> Option<Arc<Status>> {
        match error {
            // The action was ended by another path, which has informed the peer.
            WriteError::Closed | WriteError::Ended => None,
            error => {
                let message = format!("{} produced output that cannot be sent: {error}", self.name);
                self.failed(Status::new(Reason::Function, message).with("action", &self.name))
            }
        }
    }
}

impl Future for Serving {
    type Output = ActionOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ActionOutcome> {
        let this = &mut *self;
        // What readers found before this poll is out of date.
        this.signals.take_parked();
        let polled = this.poll_serve(cx);
        // An action that waits for room waits for the peer's transport, not for content, and is not deadlocked
        // (EV-110).
        let waiting = polled.is_pending() && this.retained.is_empty() && this.signals.take_parked();
        // A cursor that became ready has already ended the wait in the session, so each wait is reported anew.
        if waiting || this.waiting {
            this.waiting = waiting;
            this.link
                .with(|live| live.machine().calls().waiting(this.key, waiting));
        }
        polled.map(|failure| ActionOutcome {
            key: this.key,
            failure,
        })
    }
}

/// Chunks written at once, and their bytes; the last chunk may exceed that.
const BATCH: usize = 32;
const BATCH_BYTES: usize = 16 * 1024;
/// Batches of one poll before other tasks get to run.
const BATCHES: u32 = 2;
