//! Runs the actions of a session as calls of functions: the shell around `proto::session` (D-2).
//!
//! ```text
//!   incoming ──► Session::run ──► machine ──► Outgoing        (a transport polls both ends)
//!                  │ start, cancel ▲ fragments
//!                  └──► runs of the kernel's functions, read through session nodes
//! ```
//!
//! Dialects plug in on both sides of the two streams: each is a codec between its frames and [`WireMessage`], with
//! [`SessionOptions`] that describe how it differs.

mod action;
mod bind;
mod config;
mod driver;
pub(crate) mod failure;
mod guard;
mod input;
mod intake;
pub(crate) mod link;
pub(crate) mod listed;
pub(crate) mod listing;
mod offers;
mod output;
mod reconnect;
pub mod reference;
pub(crate) mod remote;
mod reserved;
pub(crate) mod runs;
mod signals;
mod task_waker;
mod test_functions;
#[cfg(test)]
mod tests;
pub(crate) mod wire;

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use sapwood_proto::evergreen::{Dialect, MetadataMode, Reason, SessionLimits, Status, WireMessage};
use sapwood_proto::session::{self as machine, RetentionPolicy, SessionStats, Side};
use sapwood_proto::time::Time;
use sapwood_session::Live;

use self::driver::Driver;
use self::guard::Guard;
use self::intake::MessageIntake;
use self::link::SessionLink;
use self::reference::ReferenceFetch;
use self::runs::Runs;
use crate::kernel::Kernel;
use crate::name::Name;

pub use self::reconnect::{ConnectionLoss, Connections, IncomingMessages, Reconnector};
pub use self::test_functions::test_functions;

/// Behaviour and limits of one session, and the facts that it reports about itself.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The dialect of the first connection: outputs take the form that its clients read, and SESSION_INFO reports its
    /// name.
    pub dialect: Dialect,
    /// The limits of the session.
    pub limits: Arc<SessionLimits>,
    /// How metadata after the first fragment is handled (EV-405).
    pub metadata: MetadataMode,
    /// Whether a failed action leaves the session alive (EV-930).
    pub partial_failure: bool,
    /// Whether ready fragments are joined into messages (EV-706); off only in the benchmark that gates this (D-33).
    pub coalesce: bool,
    /// Which content is retained (EV-955).
    pub retain: RetentionPolicy,
    /// The resume token, if the session outlives its connection for a grace period (EV-940).
    pub token: Option<ResumeToken>,
    /// The session ends this long after its start (EV-950).
    pub timeout: Option<Duration>,
    /// The target of GENERATE where an action names none (EV-503).
    pub default_target: Option<String>,
    /// The models that the client may know of, now and later.
    pub models: VisibleModels,
    /// Resolves references to external content; without it only `data:` works (EV-410).
    pub references: Option<Arc<dyn ReferenceFetch>>,
    /// The enabled extensions, by their names in section 2.
    pub extensions: &'static [&'static str],
    /// Random bits, which make the ids of this side unguessable.
    pub entropy: u64,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            dialect: Dialect::Grpc,
            limits: Arc::default(),
            metadata: MetadataMode::Lenient,
            partial_failure: false,
            coalesce: true,
            retain: RetentionPolicy::Session,
            token: None,
            timeout: None,
            default_target: None,
            models: VisibleModels::default(),
            references: None,
            extensions: extensions(false, true),
            entropy: 0,
        }
    }
}

impl SessionOptions {
    /// Whether the client may offer functions (EV-810).
    fn takes_offers(&self) -> bool {
        self.extensions.contains(&REVERSE)
    }
}

/// The models that a client may know of. Evaluated at each use, because the models of a key can change while its
/// sessions are open. The default: all.
#[derive(Clone, Default)]
pub struct VisibleModels(Option<Arc<ModelFilter>>);

type ModelFilter = dyn Fn() -> Option<Arc<HashSet<Name>>> + Send + Sync;

impl VisibleModels {
    /// The models that `ask` returns at the moment; `None`: all. It is called at the start of each action and for each
    /// listing, so it must return at once.
    #[must_use]
    pub fn by(ask: impl Fn() -> Option<Arc<HashSet<Name>>> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(ask)))
    }

    /// The models at this moment; `None`: all.
    fn now(&self) -> Option<Arc<HashSet<Name>>> {
        self.0.as_ref().and_then(|ask| ask())
    }
}

impl fmt::Debug for VisibleModels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VisibleModels").field(&self.now()).finish()
    }
}

/// The secret with which a client resumes its session. It is as good as a key, so it is never printed.
#[derive(Clone)]
pub struct ResumeToken(pub Arc<str>);

impl fmt::Debug for ResumeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResumeToken")
    }
}

/// The action whose default target the server knows (EV-503).
const GENERATE: &str = "GENERATE";
/// The action with which a client offers functions, and the name of that extension.
pub(crate) const OFFER: &str = "OFFER_ACTIONS";
pub(crate) const REVERSE: &str = "reverse-actions";

/// The extensions that this shell and its machine implement; `resume` where a connection can be followed by another
/// (EV-940), `reverse` where the dialect can carry actions to the client (EV-810). The first implies the second.
#[must_use]
pub const fn extensions(resume: bool, reverse: bool) -> &'static [&'static str] {
    match EXTENSIONS {
        [_, _, everywhere @ ..] if !resume && !reverse => everywhere,
        [_, connected @ ..] if !resume => connected,
        all => all,
    }
}

// The order matters: `extensions` drops `resume`, or `resume` and reverse actions, from the front.
const EXTENSIONS: &[&str] = &[
    "resume",
    REVERSE,
    "drop",
    "set-ttl",
    "cancel",
    "list-actions",
    "status-output",
    "finish",
    "partial-failure",
    "deadline",
    "retain",
];

/// Commands of a transport's owner to a live session (EV-960).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionCommand {
    /// Take no new actions, and leave with `GOING_AWAY` once none is running.
    Finish,
    /// Leave with `GOING_AWAY` now.
    Leave,
    /// End with `REVOKED` now: the key that opened the session is no longer valid.
    Revoke,
}

/// Observes a session, for metrics (EV-904). Every method may be called often and must not block.
pub trait Observe: Send + 'static {
    /// An action was received.
    fn action_began(&mut self) {}
    /// An action has ended, with this status if it failed.
    fn action_ended(&mut self, failure: Option<&Status>) {
        let _ = failure;
    }
    /// An action was refused before it started, with this status.
    fn action_refused(&mut self, rejection: &Status) {
        let _ = rejection;
    }
    /// The counters since the session started.
    fn counted(&mut self, stats: &SessionStats) {
        let _ = stats;
    }
    /// The session holds this many bytes now (EV-801).
    ///
    /// # Errors
    /// All sessions together hold too many bytes: this one, which asked for more, is aborted with the status.
    fn retains(&mut self, bytes: u64) -> Result<(), Status> {
        let _ = bytes;
        Ok(())
    }
    /// The session is over, with this status if it was aborted. Not called if its task is dropped.
    fn over(&mut self, status: Option<&Status>) {
        let _ = status;
    }
}

/// Observes nothing.
impl Observe for () {}

/// A session that has not started.
#[must_use = "a session does nothing unless it is run"]
pub struct Session<W> {
    link: SessionLink,
    kernel: Kernel,
    options: Arc<SessionOptions>,
    observer: W,
}

/// The reply to LIST_ACTIONS, for use outside a session (EV-914).
#[must_use]
pub fn listing(kernel: &Kernel, options: &SessionOptions) -> serde_json::Value {
    listing::actions(kernel, options)
}

/// Opens a session over the functions of `kernel`. Returns the session to run, and its messages for the transport.
pub fn open<W: Observe>(
    kernel: Kernel,
    options: SessionOptions,
    observer: W,
) -> (Session<W>, OutgoingMessages) {
    let link = SessionLink::new(options.dialect, |now| {
        let config = machine::Config {
            limits: Arc::clone(&options.limits),
            metadata: options.metadata,
            partial_failure: options.partial_failure,
            coalesce: options.coalesce,
            retain: options.retain,
            references: options.references.is_some(),
            resume: options.token.is_some(),
            deadline: options.timeout.map(|timeout| now + timeout),
            entropy: options.entropy,
            ..machine::Config::for_client_of(options.dialect)
        };
        machine::SessionMachine::new(Side::Server, config, now)
    });
    let guard = Guard::new(link.clone(), kernel.panic_count());
    let connection = options.token.is_some().then_some(0);
    let outgoing = OutgoingMessages::new(link.clone(), guard, connection);
    (
        Session {
            link,
            kernel,
            options: Arc::new(options),
            observer,
        },
        outgoing,
    )
}

impl<W: Observe> Session<W> {
    /// The incoming messages of a resumable session as one stream, and the handle that attaches further connections.
    #[must_use]
    pub fn connections(&self, first: IncomingMessages) -> (Connections, Reconnector) {
        let guard = Guard::new(self.link.clone(), self.kernel.panic_count());
        Connections::new(self.link.clone(), guard, first)
    }

    /// Runs to the end: takes messages from `incoming` (an error aborts the session with that status, the end is the
    /// half-close of EV-109) and obeys `orders`. Dropping the future drops every run, and with it the engine's work
    /// (EV-611). Returns the status with which the session was aborted, if it was.
    // Not `async`: such a future would hold its arguments beside what is made of them, several hundred bytes for each
    // idle session.
    pub fn run<I, O>(self, incoming: I, orders: O) -> impl Future<Output = Option<Arc<Status>>>
    where
        I: Stream<Item = Result<WireMessage, Status>> + Send,
        O: Stream<Item = SessionCommand> + Send,
    {
        let guard = Guard::new(self.link.clone(), self.kernel.panic_count());
        let mut driver = Driver {
            runs: Runs::new(self.link.clone(), self.kernel, self.options),
            pump: self.link.pump(),
            link: self.link,
            observer: self.observer,
            intake: MessageIntake::new(incoming),
            orders: Some(Box::pin(orders)),
            finishing: false,
            retained: 0,
            _ends: SessionGuard(guard.clone()),
        };
        async move {
            let closed = poll_fn(|cx| {
                let polled = guard.run(|| driver.poll_session(cx));
                polled.unwrap_or_else(|| {
                    // The session is over: its work is dropped, and its counters are reported all the same. That runs
                    // foreign code too (functions, the observer), so it is guarded again.
                    let aborted = guard.aborted();
                    guard.run(|| driver.over(aborted.clone()));
                    Poll::Ready(aborted)
                })
            });
            let closed = closed.await;
            // The remaining functions and the transport are dropped here, which may panic as well.
            guard.run(|| drop(driver));
            closed
        }
    }
}

impl<W> fmt::Debug for Session<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// Ends the session if its task is dropped, so that the transport never waits for ever.
struct SessionGuard(Guard);

impl Drop for SessionGuard {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The messages of a session for its transport; the last item is the status with which it was aborted, if it was.
#[derive(Debug)]
pub struct OutgoingMessages {
    link: SessionLink,
    guard: Guard,
    /// Messages taken from the machine, many under one lock.
    ready: VecDeque<WireMessage>,
    over: bool,
    /// The number of the connection, if the session may have several.
    connection: Option<u64>,
}

impl OutgoingMessages {
    const fn new(link: SessionLink, guard: Guard, connection: Option<u64>) -> Self {
        Self {
            link,
            guard,
            ready: VecDeque::new(),
            over: false,
            connection,
        }
    }

    /// Reports that the connection was lost: the client has not left, even if it has ended its input (EV-940). Dropping
    /// this value instead leaves that undecided.
    pub fn cut(&mut self) {
        self.leave(Live::lost);
    }

    fn leave(&mut self, how: impl FnOnce(&mut Live, Time)) {
        let over = std::mem::replace(&mut self.over, true);
        let Some(connection) = self.connection.filter(|_| !over) else {
            return;
        };
        let now = self.link.now();
        self.link.with(|live| {
            // A connection that has been replaced says nothing about the one that has taken over.
            if live.connection() == connection {
                how(live, now);
            }
        });
    }
}

impl Drop for OutgoingMessages {
    fn drop(&mut self) {
        self.leave(Live::let_go);
    }
}

impl Stream for OutgoingMessages {
    type Item = Result<WireMessage, Arc<Status>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // Before `over`: these have left the machine, and the machine counts them as sent.
        if let Some(message) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(message)));
        }
        if self.over {
            return Poll::Ready(None);
        }
        let Self {
            link,
            guard,
            ready,
            connection,
            ..
        } = &mut *self;
        let now = link.now();
        let polled = guard.run(|| {
            link.with(|live| {
                // Compared under the lock that `take_over` counts under, so an old connection takes no message of the
                // new one.
                if connection.is_some_and(|mine| mine != live.connection()) {
                    return Poll::Ready(Err(Some(superseded())));
                }
                let first = live.poll_message(now, cx);
                if first.is_ready() {
                    live.take_messages(now, READY_MESSAGES, READY_BYTES, ready);
                }
                first
            })
        });
        // The task that polls this may serve other sessions on the same connection, so a panic must not propagate.
        let polled = polled.unwrap_or_else(|| Poll::Ready(Err(Some(Arc::new(failure::lost())))));
        polled.map(|item| match item {
            Ok(message) => Some(Ok(message)),
            Err(end) => {
                self.over = true;
                end.map(Err)
            }
        })
    }
}

/// EV-941: the status for the replaced connection.
fn superseded() -> Arc<Status> {
    let message = "another connection has taken over this session";
    Arc::new(Status::new(Reason::Superseded, message))
}

/// Messages returned at once, besides the first.
const READY_MESSAGES: usize = 31;
/// Payload bytes after which no further message is returned at once.
const READY_BYTES: usize = 16 * 1024;
