//! The running actions of one session: started, polled together, cancelled, and reported when they end.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use sapwood_proto::clip::shown;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::evergreen::{Reason, Status};
use sapwood_proto::session::{ActionKey, ActionStart, CancelledBy};

use super::action::{ActionOutcome, Serving};
use super::link::SessionLink;
use super::offers::Offers;
use super::reference::SessionFetcher;
use super::task_waker::TaskWaker;
use super::{OFFER, SessionOptions, bind, failure, reserved};
use crate::Result;
use crate::cancel::Cancel;
use crate::error::Error;
use crate::function::Fun;
use crate::kernel::Kernel;

/// Every action in progress.
pub(crate) struct Runs {
    link: SessionLink,
    /// The functions of this side, and those that the peer offers, where offers are allowed.
    kernel: Kernel,
    options: Arc<SessionOptions>,
    offers: Option<Offers>,
    running: FuturesUnordered<Serving>,
    /// The waker of the runs. Nearly always they are woken by the task that polls them, when it handles what they wait
    /// for.
    waker: Arc<TaskWaker>,
    cancels: HashMap<ActionKey, Cancel>,
    /// Fetches their external content.
    references: Option<SessionFetcher>,
}

impl Runs {
    pub(crate) fn new(link: SessionLink, kernel: Kernel, options: Arc<SessionOptions>) -> Self {
        let offers = options.takes_offers().then(|| {
            let limits = Arc::clone(&options.limits);
            Offers::new(link.clone(), kernel.clone(), limits)
        });
        let references = options.references.as_ref();
        let references = references.map(|resolve| SessionFetcher::new(resolve, &options.limits));
        Self {
            references,
            link,
            kernel,
            options,
            offers,
            running: FuturesUnordered::new(),
            waker: Arc::default(),
            cancels: HashMap::new(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Bytes held outside the machine: fetched content and offers.
    pub(super) fn aside_bytes(&self) -> u64 {
        let fetched = self.references.as_ref().map_or(0, SessionFetcher::retained);
        fetched + self.offers.as_ref().map_or(0, Offers::retained_bytes)
    }

    /// Starts an action. Returns its result if it ends at once.
    pub(crate) fn start(&mut self, start: &ActionStart) -> Option<ActionOutcome> {
        // Before the look-up: a function of the kernel cannot take the name of a reserved action (KE-132).
        let failed = match reserved::answer(&self.kernel, &self.options, &self.link, start) {
            Some(answer) => answer.and_then(|value| reserved::write(&self.link, start, &value)),
            None => match self.bind(start) {
                Ok(bound) => {
                    self.serve(start, bound);
                    return None;
                }
                Err(error) => Err(failure::status(&error, &start.name)),
            },
        };
        let failure = failed.err().map(Arc::new);
        if let Some(status) = &failure {
            self.link.with(|live| {
                live.machine()
                    .calls()
                    .fail(start.action, Arc::clone(status))
            });
        }
        Some(ActionOutcome {
            key: start.action,
            failure,
        })
    }

    /// The functions that the client may know of. One that it may not use and one that does not exist give the same
    /// error, without other names.
    fn known(&self, found: Result<Fun>, name: &str) -> Result<Fun> {
        let Some(models) = self.options.models.now() else {
            return found;
        };
        let permitted = |function: &Fun| {
            let spec = function.spec();
            !spec.model || models.contains(&spec.name)
        };
        // A distinct NOT_FOUND, or its list of available names, would let a key probe for models that it may not use.
        found.ok().filter(permitted).ok_or_else(|| Error::Engine {
            code: Code::PermissionDenied,
            reason: ErrorReason::INSUFFICIENT_SCOPE,
            message: format!("this key may not call a function named {:?}", shown(name)),
            retry_after: None,
        })
    }

    fn bind(&self, start: &ActionStart) -> Result<bind::BoundAction> {
        let kernel = self.offers.as_ref().map_or(&self.kernel, Offers::kernel);
        let function = match &self.offers {
            Some(offers) if *start.name == *OFFER => offers.function(),
            None if *start.name == *OFFER => {
                let what = format!("{OFFER} in the dialect {}", self.options.dialect.name());
                return Err(Error::Unimplemented { what });
            }
            // Offered functions are not models, so the filter passes them.
            _ => self.known(kernel.get(&start.name), &start.name)?,
        };
        let references = self.references.as_ref();
        bind::bind(
            kernel,
            function,
            &self.options,
            &self.link,
            references,
            start,
        )
    }

    fn serve(&mut self, start: &ActionStart, bound: bind::BoundAction) {
        self.cancels.insert(start.action, bound.run.cancel());
        let name = start.name.to_string();
        let serving = Serving::new(self.link.clone(), start.action, name, bound);
        self.running.push(serving);
        // A lock round that only msgpack's clients ask for.
        if start.confirm {
            self.link
                .with(|live| live.machine().calls().dispatched(start.action));
        }
    }

    /// Cancels a run, which ends with `Cancelled` at its next poll. After CANCEL its `Serving` finishes the action then; at a
    /// deadline the machine has removed the action already.
    pub(crate) fn cancel(&self, action: ActionKey, by: CancelledBy) {
        tracing::debug!(?by, "action cancelled");
        if let Some(cancel) = self.cancels.get(&action) {
            cancel.cancel();
        }
    }

    /// Stops all work, because the runs are not polled any more, and withdraws the offers. Unfinished actions are
    /// cancelled, unless the session is over anyway.
    pub(crate) fn give_up(&mut self) {
        self.running.clear();
        self.offers = None;
        let message = "this side has stopped serving actions";
        let status = Arc::new(Status::new(Reason::Cancelled, message));
        for action in std::mem::take(&mut self.cancels).into_keys() {
            self.link
                .with(|live| live.machine().calls().fail(action, Arc::clone(&status)));
        }
    }

    /// From here on `owner` polls everything; it is woken for wake-ups after [`Runs::rest`].
    pub(crate) fn attend(&self, owner: &Waker) {
        self.waker.attend(owner);
    }

    /// The owner is about to sleep; `false` if it must not, because the waker was called.
    pub(crate) fn rest(&self) -> bool {
        self.waker.leave()
    }

    /// Polls the runs that can make progress, and reports each that has ended. `true`: one has, or there is more to do.
    pub(crate) fn poll(&mut self, cx: &Context<'_>, mut ended: impl FnMut(&ActionOutcome)) -> bool {
        let waker = Waker::from(Arc::clone(&self.waker));
        let mut any = false;
        // `FuturesUnordered` calls the waker and yields when it has polled each of its futures once.
        for _ in 0..TURNS {
            // Clears earlier wake-ups: everything is polled now, and only wake-ups during this round need another.
            self.waker.attend(cx.waker());
            let mut cx = Context::from_waker(&waker);
            while let Poll::Ready(Some(end)) = self.running.poll_next_unpin(&mut cx) {
                any = true;
                self.cancels.remove(&end.key);
                ended(&end);
            }
            if !self.waker.has_rung() {
                return any;
            }
        }
        true
    }
}

/// Rounds of the runs before messages are handled again.
const TURNS: u32 = 4;
