//! The listener: accepts connections on every port and serves HTTP/1, HTTP/2 and gRPC on them (OA-107, OA-911,
//! EV-703).
//!
//! ```text
//!   accept ──► first byte (10 s) ──► TLS, if configured (10 s) ──► HTTP ──► idle 75 s or draining ──► GOAWAY ──► closed
//!                                                                   ├─ head of HTTP/1 incomplete for 10 s ──► closed
//!                                                                   ├─ response unread for 60 s ──► reset
//!                                                                   └─ 101 ──► the future that the face has left, to its end
//! ```

pub(crate) mod activity;
pub mod descriptors;
pub mod peer;
pub(crate) mod poll_timing;
pub mod port_purpose;
pub(crate) mod read_watch;
pub mod socket;
pub mod tls;
pub(crate) mod upgrade;
pub(crate) mod write_stall;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use futures::future::join_all;
use http::{Extensions, Version};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tower::ServiceExt;

use self::activity::Activity;
use self::peer::{ConnectionId, PeerInfo};
use self::poll_timing::{TimedExecutor, timed};
use self::port_purpose::PortPurpose;
use self::read_watch::{AbortConnection, ReadWatch};
use self::socket::{AcceptedStream, ListeningSocket};
use self::tls::Tls;
use self::upgrade::UpgradeSlot;
use self::write_stall::WriteStallWatch;
use crate::auth::identity::CallerIdentity;
use crate::auth::quotas::CallerQuotas;
use crate::ops::drain::{Drain, DrainPhase};
use crate::ops::metrics::ServerMetrics;

/// Limits of the listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Connections at a time; above it accepting pauses.
    pub connections: usize,
    /// Connections at a time from one network address: of IPv4 the address, of IPv6 the first 64 bits. One more is closed,
    /// after `503` where it is not TLS's.
    pub connections_each: usize,
    /// HTTP/2 streams at a time on one connection; above it a stream is refused.
    pub streams_per_connection: u32,
    /// A connection that sends nothing for this long after it was opened is dropped, and so is one of HTTP/1 whose request
    /// head takes longer.
    pub handshake: Duration,
    /// A connection without a request for this long is closed.
    pub idle: Duration,
    /// A response whose client reads nothing for this long is reset.
    pub stall: Duration,
    /// Bytes of a request's head.
    pub header_bytes: u32,
    /// Header lines of a request, in every version of HTTP.
    pub headers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            connections: 20_000,
            connections_each: 10_000,
            streams_per_connection: 256,
            handshake: Duration::from_secs(10),
            idle: Duration::from_secs(75),
            stall: Duration::from_secs(60),
            header_bytes: 64 * 1024,
            headers: 100,
        }
    }
}

/// Shared by all connections.
struct ConnectionContext {
    router: Router,
    drain: Drain,
    metrics: Arc<ServerMetrics>,
    shares: Arc<CallerQuotas>,
    slots: Arc<Semaphore>,
    wide: auto::Builder<TimedExecutor>,
    narrow: auto::Builder<TimedExecutor>,
    /// One permit for each connection with wide windows.
    wide_permits: Arc<Semaphore>,
    tls: Option<Arc<Tls>>,
    config: Config,
}

/// Accepts on every socket until the drain is over, then gives the connections [`GOODBYE`] to end.
pub(crate) async fn run(
    sockets: Vec<(ListeningSocket, PortPurpose)>,
    router: Router,
    drain: Drain,
    metrics: Arc<ServerMetrics>,
    tls: Option<Arc<Tls>>,
    config: Config,
) {
    // Each port holds a slot while it waits for a connection, so fewer slots than ports would leave a port without any.
    let slots = config.connections.max(sockets.len());
    let connection = Arc::new(ConnectionContext {
        router,
        drain,
        metrics,
        slots: Arc::new(Semaphore::new(slots)),
        shares: CallerQuotas::new(u64::MAX, config.connections_each as u64),
        wide: protocol(&config, Windows::WIDE),
        narrow: protocol(&config, Windows::NARROW),
        wide_permits: Arc::new(Semaphore::new(WIDE_CONNECTIONS)),
        tls,
        config,
    });
    let each = sockets
        .into_iter()
        .map(|(socket, purpose)| accept_all(socket, purpose, Arc::clone(&connection)));
    join_all(each).await;
}

async fn accept_all(
    socket: ListeningSocket,
    purpose: PortPurpose,
    context: Arc<ConnectionContext>,
) {
    let mut tasks = JoinSet::new();
    loop {
        // Both arms may be cancelled: a connection that is not accepted stays in the backlog, and the slot is released.
        let accepted = tokio::select! {
            () = context.drain.reached(DrainPhase::Over) => break,
            accepted = accept(&socket, &context.slots) => accepted,
        };
        // A finished task stays in the set until it is joined: without this the set would grow with each connection.
        while tasks.try_join_next().is_some() {}
        let (accepted, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_of_client(&error) => continue,
            Err(error) => {
                // Out of descriptors or memory: existing connections must go first, so wait instead of spinning.
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                continue;
            }
        };
        // The quota of the address is charged after the accept, because only then the address is known. The slot is acquired
        // before it, so that connections above the common limit wait in the kernel's backlog and cost nothing here.
        let position = match &accepted {
            AcceptedStream::Tcp(socket, peer) => {
                let Ok(position) = context.shares.take(&CallerIdentity::at(peer.ip())) else {
                    turn_away(socket, &context);
                    continue;
                };
                Some(position)
            }
            // No quota on a Unix socket: all its clients look alike, and behind it is often a proxy for many.
            AcceptedStream::Unix(_) => None,
        };
        let open = context.metrics.connections_open.clone();
        let context = Arc::clone(&context);
        tasks.spawn(timed(async move {
            // Within the task, beside the guard that undoes it: a task that is aborted before its first poll counts nothing.
            open.inc();
            let _counted = CountedConnection(open);
            connection(accepted, purpose, &context).await;
            // Held to the end of the task: a connection that is being closed still has its descriptor.
            drop((position, slot));
        }));
    }
    let goodbye = async { while tasks.join_next().await.is_some() {} };
    // Connections that are left are aborted when the set is dropped.
    let _ = tokio::time::timeout(GOODBYE, goodbye).await;
}

/// Answers that this address has too many connections, as far as that is possible without waiting: the accept loop must not
/// depend on the client, and the connection must not hold anything here.
fn turn_away(socket: &TcpStream, connection: &ConnectionContext) {
    connection
        .metrics
        .rejected
        .with_label_values(&["share"])
        .inc();
    tracing::debug!("closed a connection: its address is at limits.connections_each");
    // A plain answer would only look like a broken handshake.
    if connection.tls.is_some() {
        return;
    }
    let body = format!(
        r#"{{"error":"One address may have at most {} connections (limits.connections_each): close or reuse one."}}"#,
        connection.config.connections_each
    );
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    // The request is read first, if it has arrived: closing over unread bytes resets the connection, and the client loses the
    // answer. Errors are ignored: the connection is closed in any case.
    let _ = socket.try_read(&mut [0; 4096]);
    let _ = socket.try_write(answer.as_bytes());
}

struct CountedConnection(prometheus::IntGauge);

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}

async fn accept(
    socket: &ListeningSocket,
    slots: &Arc<Semaphore>,
) -> io::Result<(AcceptedStream, tokio::sync::OwnedSemaphorePermit)> {
    // Before the accept: a connection that was accepted without a slot could only be closed again.
    let slot = Arc::clone(slots)
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    Ok((socket.accept().await?, slot))
}

/// Whether an accept has failed because the client reset the connection in the backlog. The port must not pause for that, or
/// one client could slow it for all.
fn is_of_client(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
    )
}

/// Connections that get [`Windows::WIDE`] at the same time; all others get [`Windows::NARROW`].
const WIDE_CONNECTIONS: usize = 32;

/// Bytes that the client of an HTTP/2 connection may send before they are read. Received and unread bytes are in no byte
/// budget, so these windows are all that limits them (D-47).
#[derive(Clone, Copy)]
struct Windows {
    stream: u32,
    connection: u32,
}

impl Windows {
    /// For uploads at full speed over distances.
    const WIDE: Self = Self {
        stream: 1 << 20,
        connection: 2 << 20,
    };
    /// The initial windows of HTTP/2, of which that of the connection cannot be lowered: thousands of connections must not
    /// hold megabytes each.
    const NARROW: Self = Self {
        stream: 65_535,
        connection: 65_535,
    };
}

fn protocol(config: &Config, windows: Windows) -> auto::Builder<TimedExecutor> {
    let mut http = auto::Builder::new(TimedExecutor);
    http.http1()
        .timer(TokioTimer::new())
        // hyper's own timeout would close idle connections too; `Activity` distinguishes an incomplete head from an idle wait.
        .header_read_timeout(None)
        .max_buf_size(config.header_bytes as usize)
        // Twice the limit, so that the middleware refuses first: hyper's own answer has no body.
        .max_headers(config.headers.saturating_mul(2));
    http.http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_concurrent_streams(config.streams_per_connection)
        .max_header_list_size(config.header_bytes)
        // Streams may be silent for long, so that only a ping finds a peer that is gone without a FIN.
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(30));
    http
}

/// Serves one connection to its end. Nothing that a client leaves out before its first request may hold it for longer than
/// the handshake's limit.
async fn connection(accepted: AcceptedStream, purpose: PortPurpose, slot: &ConnectionContext) {
    let limit = slot.config.handshake;
    let caller = with(with(Extensions::new(), purpose), ConnectionId::fresh());
    // Nothing is allocated before the first byte: a silent connection costs its slot and its task only.
    match accepted {
        AcceptedStream::Tcp(socket, peer) => {
            let mut first = [0];
            let Ok(Ok(1..)) = tokio::time::timeout(limit, socket.peek(&mut first)).await else {
                return;
            };
            let caller = with(caller, PeerInfo(peer));
            secure(socket, first[0] == tls::HANDSHAKE, caller, slot).await;
        }
        // A Unix socket has no `peek` in tokio. With TLS, plain HTTP then fails the handshake instead of being answered.
        AcceptedStream::Unix(socket) => {
            if let Ok(Ok(())) = tokio::time::timeout(limit, socket.readable()).await {
                secure(socket, true, caller, slot).await;
            }
        }
    }
}

/// Does the TLS handshake if TLS is configured. `hello`: the first byte is that of a handshake.
async fn secure<S>(socket: S, hello: bool, caller: Extensions, connection: &ConnectionContext)
where
    S: AsyncRead + AsyncWrite + AbortConnection + Unpin + Send + 'static,
{
    let limit = connection.config.handshake;
    let Some(tls) = &connection.tls else {
        return serve(socket, caller, connection).await;
    };
    if !hello {
        // Whether the answer arrives does not matter: the connection is closed anyway.
        let _ = tokio::time::timeout(limit, Box::pin(tls::answer_plain(socket))).await;
        return;
    }
    // Boxed, so that the connection's future does not keep space for the handshake.
    let shaken = tokio::time::timeout(limit, Box::pin(tls.accept(socket))).await;
    let serving = match shaken {
        Ok(Ok(stream)) => {
            let caller = match tls::subject(&stream) {
                Some(subject) => with(caller, subject),
                None => caller,
            };
            serve(stream, caller, connection)
        }
        // At debug level, because port scanners and clients that distrust the certificate fail here all the time.
        Ok(Err(error)) => return tracing::debug!(%error, "the TLS handshake failed"),
        Err(_) => return tracing::debug!("the TLS handshake timed out"),
    };
    serving.await;
}

fn with<T: Clone + Send + Sync + 'static>(mut extensions: Extensions, value: T) -> Extensions {
    extensions.insert(value);
    extensions
}

/// Serves one connection: HTTP, then the future that a face has left if it upgraded the connection.
fn serve<S>(
    socket: S,
    caller: Extensions,
    connection: &ConnectionContext,
) -> impl Future<Output = ()> + Send
where
    S: AsyncRead + AsyncWrite + AbortConnection + Unpin + Send + 'static,
{
    let upgrade = UpgradeSlot::default();
    // Boxed and awaited first, so that a long session does not keep the space that HTTP needed.
    let http = Box::pin(http(socket, with(caller, upgrade.clone()), connection));
    async move {
        // hyper's future ends when it has released the socket, which the face's future waits for; so that is polled after HTTP.
        // In this task, because it holds the connection's slot and count, and is aborted by the drain.
        http.await;
        if let Some(rest) = upgrade.take() {
            rest.await;
        }
    }
}

/// Serves HTTP on one connection; each request carries the `caller` extensions.
async fn http<S>(socket: S, caller: Extensions, connection: &ConnectionContext)
where
    S: AsyncRead + AsyncWrite + AbortConnection + Unpin + Send + 'static,
{
    let peer = caller.get::<PeerInfo>().copied();
    let activity = Activity::new();
    // Every request of the connection carries clones of both, which share their state with those that the arms below watch.
    let write_stalls = WriteStallWatch::new();
    let caller = with(with(caller, activity.clone()), write_stalls.clone());
    let router = connection.router.clone();
    // Without waiting: a connection without a permit is served at once, with narrow windows.
    let wide = Arc::clone(&connection.wide_permits)
        .try_acquire_owned()
        .ok();
    let protocol = if wide.is_some() {
        &connection.wide
    } else {
        &connection.narrow
    };
    let wide = Mutex::new(wide);
    let service = hyper::service::service_fn(move |request: http::Request<Incoming>| {
        if request.version() < Version::HTTP_2 {
            // HTTP/1 has no windows, so another connection may have the permit. The version is known only now.
            drop(wide.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
        let mut request = request.map(Body::new);
        request.extensions_mut().extend(caller.clone());
        router.clone().oneshot(request)
    });
    let received = ReadWatch::new(socket, activity.clone(), write_stalls.clone());
    let serving = protocol.serve_connection_with_upgrades(TokioIo::new(received), service);
    tokio::pin!(serving);
    // All arms may be cancelled: `serving` is polled on below, and the others only watch. The order does not matter, because
    // each arm leads to the end of the connection.
    let was_idle = tokio::select! {
        result = serving.as_mut() => return ended(result, peer, &connection.metrics),
        () = until_drained(&connection.drain, &activity) => false,
        () = activity.idle_for(connection.config.idle) => true,
        // Closed without an answer: hyper has no request yet, and cannot send a response without one.
        () = activity.late_head(connection.config.handshake) => return,
        () = write_stalls.stalled(connection.config.stall) => {
            // The flag takes effect in the socket's next write, so `serving` is polled once more until that fails.
            write_stalls.reset();
            let _ = tokio::time::timeout(GOODBYE, serving).await;
            return;
        }
    };
    // HTTP/1 ends after the response in progress; HTTP/2 sends GOAWAY and finishes its streams.
    serving.as_mut().graceful_shutdown();
    // An idle connection has nothing to finish, and only gets time for its GOAWAY. A drained one may have requests in flight:
    // those end by themselves or when the drain cuts them, so there is no second limit here.
    if was_idle {
        let _ = tokio::time::timeout(GOODBYE, serving).await;
    } else {
        ended(serving.await, peer, &connection.metrics);
    }
}

/// Resolves when a drain closes the connection. One that was just opened may still send its first request, which is answered
/// with 503 and the reason instead of a closed connection.
async fn until_drained(drain: &Drain, activity: &Activity) {
    drain.reached(DrainPhase::Refusing).await;
    let _ = tokio::time::timeout(GOODBYE, activity.begun()).await;
}

/// Logs how a connection ended. Broken connections are frequent and the client's doing, so only malformed requests are counted
/// and logged at info level.
fn ended(
    result: Result<(), Box<dyn std::error::Error + Send + Sync>>,
    peer: Option<PeerInfo>,
    metrics: &ServerMetrics,
) {
    let Err(error) = result else { return };
    let hyper = error.downcast_ref::<hyper::Error>();
    if hyper.is_some_and(hyper::Error::is_parse) {
        // hyper has answered 400, 414 or 431 by itself, before there was a request: the middleware never sees that answer, and
        // no line of the access log has it. This error is all that can be known of it.
        metrics.rejected.with_label_values(&["malformed"]).inc();
        let client = peer.map(|PeerInfo(address)| tracing::field::display(address));
        tracing::info!(client, %error, "refused a malformed HTTP request");
    } else {
        tracing::debug!(%error, "a connection broke");
    }
}

/// How long a port waits after a failed accept.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);
/// How long a connection may take to close once it has nothing more to answer.
const GOODBYE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn oa_911_a_port_pauses_when_the_system_is_exhausted_and_not_for_a_reset_client() {
        for (error, pauses) in [
            (Errno::CONNABORTED, false),
            (Errno::CONNRESET, false),
            (Errno::MFILE, true),
            (Errno::NFILE, true),
            (Errno::NOMEM, true),
        ] {
            assert_eq!(!is_of_client(&error.into()), pauses, "{error}");
        }
    }
}
