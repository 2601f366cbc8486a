//! The task of a client's session: it drives the state machine, its timers and reconnection.

use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{FutureExt, Stream, StreamExt};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Reason, Status, WireMessage};
use sapwood_proto::session::{SessionMachine, SessionOutput};
use sapwood_proto::time::Time;
use sapwood_session::{Live, SessionClock, SessionPump, SharedSession};
use tokio::time::{Instant, sleep_until, timeout};

use super::transport::{ServerConnection, ServerMessages};

/// A session's state machine, shared by its handles, its transport and its task.
#[derive(Clone, Debug)]
pub(super) struct ClientLink {
    pub(super) shared: SharedSession,
    pub(super) clock: SessionClock,
}

impl ClientLink {
    pub(super) fn new(make: impl FnOnce(Time) -> SessionMachine) -> Self {
        let (shared, clock) = SessionClock::start(make);
        Self { shared, clock }
    }

    fn now(&self) -> Time {
        self.clock.now()
    }

    /// Runs `act` on the machine, then wakes the tasks whose state it changed, the transport included.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Live) -> R) -> R {
        self.shared.with_flushed(act)
    }

    /// Aborts the session with `status`, unless it is over.
    pub(super) fn abort(&self, status: Status) {
        self.with(|live| {
            live.machine().abort(status);
        });
    }
}

/// The messages that the transport sends, then the half-close.
pub(super) struct ClientMessages {
    pub(super) link: ClientLink,
    /// The number of its connection; each reconnection increments it, which ends the streams of earlier ones.
    pub(super) connection: u64,
}

impl Stream for ClientMessages {
    type Item = WireMessage;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<WireMessage>> {
        let now = self.link.now();
        let polled = self.link.with(|live| {
            // The new connection sends from here on. Two that do would split the messages between them.
            if live.connection() != self.connection {
                return Poll::Ready(Err(None));
            }
            live.poll_message(now, cx)
        });
        // The status of an abort is not for the transport: the readers get it from the machine, and the stream only
        // ends.
        polled.map(Result::ok)
    }
}

/// Handles what the server sends until the session is over. The session's handles abort it when all are dropped. If
/// this future ends for any reason, a panic or the end of its runtime included, the session ends too, so that no reader
/// waits forever.
pub(super) fn pump(
    link: ClientLink,
    incoming: ServerMessages,
    back: Option<ClientReconnect>,
) -> impl Future<Output = ()> + Send {
    // Created outside of the future, because a task that is dropped before its first poll runs no code of its own.
    let ends = LinkGuard(link.clone());
    async move {
        // Safe: a panic under the lock poisons it, which `SharedSession` answers by ending the session.
        let pumping = AssertUnwindSafe(take_in(link.clone(), incoming, back));
        if pumping.catch_unwind().await.is_err() {
            panicked("the task of a client's session");
            link.abort(failed());
        }
        // Moved into the future by this use, so that it is dropped with it.
        drop(ends);
    }
}

/// Ends the session when the task ends.
struct LinkGuard(ClientLink);

impl Drop for LinkGuard {
    fn drop(&mut self) {
        self.0.abort(closed());
    }
}

/// Counts the panic of a task; the panic hook has logged its message.
pub(super) fn panicked(what: &str) {
    PANICS.fetch_add(1, Ordering::Relaxed);
    tracing::error!("{what} panicked");
}

/// Returns how many tasks of client sessions have panicked in this process; each ended only its session.
#[must_use]
pub fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

static PANICS: AtomicU64 = AtomicU64::new(0);

/// The status for all waiting tasks after the session's task has panicked.
pub(super) fn failed() -> Status {
    Status::new(Reason::Function, "the session ended unexpectedly")
}

async fn take_in(link: ClientLink, mut incoming: ServerMessages, back: Option<ClientReconnect>) {
    let mut tries = None;
    loop {
        let mut received = false;
        let cut = follow(&link, &mut incoming, back.is_some(), &mut received).await;
        let (Some(cut), Some(back)) = (cut, &back) else {
            return;
        };
        // A connection that was accepted and cut before anything was received counts as one more attempt of the same
        // series.
        if received {
            tries = None;
        }
        match back
            .connect(&link, tries.get_or_insert_with(ReconnectAttempts::new))
            .await
        {
            Some(again) => incoming = again,
            // The readers get the status of the cut, and not that of the last attempt: it says what happened to their
            // data.
            None => return link.with(|live| live.machine().fail_resume(cut)),
        }
    }
}

/// Serves one connection. Returns the status with which it was cut, if the client reconnects after that; sets
/// `received` if anything arrived over it.
async fn follow(
    link: &ClientLink,
    incoming: &mut ServerMessages,
    returns: bool,
    received: &mut bool,
) -> Option<Status> {
    let mut pump = SessionPump::new(link.shared.clone(), link.clock);
    let mut open = true;
    poll_fn(|cx| {
        for _ in 0..ROUNDS {
            let mut item = Poll::Pending;
            // Paused: the peer is slowed down by the transport's flow control (EV-802).
            if open && !pump.is_paused() {
                item = incoming.poll_next_unpin(cx);
            }
            if let Poll::Ready(Some(Err(status))) = &item
                && returns
                // Not passed to the machine, which would take it for the end of the session.
                && was_cut(status)
            {
                return Poll::Ready(Some(status.clone()));
            }
            // A ready item is followed by another poll: only a pending one has registered the waker.
            let mut busy = item.is_ready();
            *received |= busy;
            let (_, continues) = pump.turn(cx, |live, now| {
                if let Poll::Ready(item) = item {
                    open = take(live.machine(), item, now);
                }
            });
            busy |= continues;
            while let Some(chore) = pump.next_chore() {
                match chore {
                    SessionOutput::Close(_) => return Poll::Ready(None),
                    // Functions of the client are run by the kernel (`ClientSession::shared`); here there are none.
                    SessionOutput::Start(start) => {
                        link.with(|live| live.machine().calls().fail(start.action, unserved()));
                    }
                    _ => {}
                }
            }
            let (_, due) = pump.rest(cx);
            if !busy && !due {
                return Poll::Pending;
            }
        }
        // A server that sends without pause must not keep other tasks from running.
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Passes one item to the machine; returns `false` after the last one.
fn take(
    machine: &mut SessionMachine,
    item: Option<Result<WireMessage, Status>>,
    now: Time,
) -> bool {
    match item {
        Some(Ok(message)) => {
            // An invalid message aborts the session, and every reader gets that status.
            let _ = machine.handle(message, now);
            return true;
        }
        // A draining server has sent all its data, so complete answers must not fail because of the final status.
        // Recognised by its code, because the msgpack dialect has no reasons.
        Some(Err(status)) if status.code == Code::Unavailable => {
            machine.close_with_status(status, now);
        }
        // A WebSocket is accepted before its session token is checked, so the refusal comes as a status.
        Some(Err(status)) if &*status.reason == Reason::NoSession.name() => {
            machine.fail_resume(status);
        }
        Some(Err(status)) => {
            machine.abort(status);
        }
        None => machine.end_of_input(now),
    }
    false
}

/// Reconnects to a session whose connection was cut (EV-975).
pub(super) struct ClientReconnect {
    pub(super) connection: ServerConnection,
    pub(super) token: String,
    /// How long reconnecting is tried.
    pub(super) grace: Duration,
}

/// Reconnection attempts since anything was last received.
struct ReconnectAttempts {
    began: Instant,
    wait: Duration,
}

impl ReconnectAttempts {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            wait: Duration::ZERO,
        }
    }

    /// Returns the delay before the next attempt: zero for the first one, then growing.
    fn wait(&mut self) -> Duration {
        // The first attempt is made at once: most cuts are a proxy's or a network's, and the server is still there.
        let longer = (self.wait * 2).clamp(WAIT_LEAST, WAIT_MOST);
        std::mem::replace(&mut self.wait, longer.mul_f64(jitter()))
    }
}

impl ClientReconnect {
    /// Returns a new connection of the session; `None` if the session is over or the grace period has passed.
    async fn connect(
        &self,
        link: &ClientLink,
        tries: &mut ReconnectAttempts,
    ) -> Option<ServerMessages> {
        while tries.began.elapsed() + tries.wait < self.grace {
            sleep_until(Instant::now() + tries.wait()).await;
            let now = link.now();
            // Before the call, so that the old connection's stream of messages ends and none of them is sent twice.
            let connection = link.with(|live| live.take_over(now))?;
            let outgoing = ClientMessages {
                link: link.clone(),
                connection,
            };
            let opened = self.connection.call(&[], Some(&self.token), outgoing);
            // A proxy may take the call, answer the pings of the connection, and never reach the server.
            let left = self.grace.saturating_sub(tries.began.elapsed());
            let Ok(opened) = timeout(left, opened).await else {
                return None;
            };
            match opened {
                Ok(opened) => {
                    let now = link.now();
                    link.with(|live| live.returned(now));
                    return Some(opened.incoming);
                }
                // The server has given the session up, so no later attempt can succeed (EV-941).
                Err(status) if &*status.reason == Reason::NoSession.name() => return None,
                // Everything else may pass: a server that restarts, a network that changes. The grace period bounds it.
                Err(_) => {}
            }
        }
        None
    }
}

/// Returns whether the connection was cut, without a final status from the server.
fn was_cut(status: &Status) -> bool {
    // A server that ends a session says why: its own `UNAVAILABLE` has a reason, `GOING_AWAY` for example.
    status.code == Code::Unavailable
        && (status.reason.is_empty() || status.reason == crate::NO_ANSWER)
}

/// Returns a factor from 0.5 to 1.5, so that many clients do not reconnect at the same time.
fn jitter() -> f64 {
    f64::from(u16::try_from(entropy() % 1_000).unwrap_or(0)) / 1_000.0 + 0.5
}

/// Returns random bits; the standard library seeds every hasher from the system's randomness.
pub(super) fn entropy() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0_u8)
}

/// Messages taken in one poll before other tasks get to run.
const ROUNDS: u32 = 32;
/// Limits of the delay between two attempts.
const WAIT_LEAST: Duration = Duration::from_millis(50);
const WAIT_MOST: Duration = Duration::from_secs(5);

/// The status of readers that outlive the last handle, or whose task has ended.
pub(super) fn closed() -> Status {
    Status::other(
        Code::Cancelled,
        Reason::Cancelled.name(),
        "the session was closed here",
    )
}

/// The status for a server that calls a function of a client which offers none (EV-810).
fn unserved() -> Status {
    let message = "this client serves no functions, or does not serve them any more";
    Status::new(Reason::UnknownAction, message)
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use sapwood_proto::evergreen::SessionLimits;
    use sapwood_proto::session::{Config, Side};
    use sapwood_session::peer::{NodeReader, PeerHandle};
    use tokio::net::TcpListener;

    use super::*;
    use crate::address::ServerAddress;

    /// Creates a session, and a reader of a node that is never written.
    fn waiting(limits: SessionLimits) -> (ClientLink, NodeReader) {
        let config = Config {
            limits: limits.into(),
            ..Config::default()
        };
        let link = ClientLink::new(|now| SessionMachine::new(Side::Client, config, now));
        let expected = link.with(|live| live.machine().calls().expect());
        assert!(expected.is_ok());
        let writer = PeerHandle::new(link.shared.clone(), None).write().unwrap();
        let reader = writer.node().read();
        // The writer must live as long as the session, so that the node stays open.
        std::mem::forget(writer);
        (link, reader)
    }

    #[tokio::test]
    async fn oa_913_a_panic_of_the_session_task_fails_its_readers_and_is_counted() {
        let (link, mut reader) = waiting(SessionLimits::default());
        let reading = tokio::spawn(async move { reader.next().await });
        let broken =
            stream::iter([()]).map(|()| -> Result<WireMessage, Status> { panic!("on purpose") });
        let before = panics();
        tokio::spawn(pump(link, broken.boxed(), None))
            .await
            .unwrap();
        assert!(panics() > before);
        let reported = reading.await.unwrap().unwrap().unwrap_err();
        assert_eq!(
            (reported.code, &*reported.reason),
            (Code::Internal, "FUNCTION")
        );
    }

    #[tokio::test]
    async fn ev_975_a_server_that_takes_the_call_and_says_nothing_is_given_up_after_the_grace() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let address = ServerAddress::new(format!("http://{at}"));
        let connection = ServerConnection::open(&address).await.unwrap();
        let _silent = listener.accept().await.unwrap();
        let config = Config {
            resume: true,
            ..Config::default()
        };
        let link = ClientLink::new(|now| SessionMachine::new(Side::Client, config, now));
        let grace = Duration::from_secs(10);
        let token = "token".to_owned();
        let back = ClientReconnect {
            connection,
            token,
            grace,
        };
        tokio::time::pause();
        let (began, mut tries) = (Instant::now(), ReconnectAttempts::new());
        assert!(back.connect(&link, &mut tries).await.is_none());
        assert!(began.elapsed() <= grace + Duration::from_millis(1));
    }

    #[tokio::test]
    async fn ev_974_readers_fail_when_the_session_task_is_dropped() {
        let (link, mut reader) = waiting(SessionLimits::default());
        let task = tokio::spawn(pump(link, stream::pending().boxed(), None));
        task.abort();
        let reported = reader.next().await.unwrap().unwrap_err();
        assert_eq!(&*reported.reason, "CANCELLED");
    }

    #[tokio::test]
    async fn ev_950_an_infinite_idle_timeout_does_not_end_the_task() {
        let (link, _reader) = waiting(SessionLimits {
            idle_timeout: Duration::MAX,
            ..SessionLimits::default()
        });
        let task = tokio::spawn(pump(link.clone(), stream::pending().boxed(), None));
        tokio::task::yield_now().await;
        assert!(!task.is_finished());
        link.abort(closed());
        task.await.unwrap();
    }
}
