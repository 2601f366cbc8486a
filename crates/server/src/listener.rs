//! The listener: accepts connections on every port and serves HTTP/1, HTTP/2 and gRPC on them (OA-107, OA-911,
//! EV-703).
//!
//! ```text
//!   accept ──► first byte (10 s) ──► TLS, if there is any (10 s) ──► HTTP ──► head 10 s, idle 75 s, or draining ──► asked to finish ──► closed
//!                                                                     ├─ an answer that nobody reads (60 s) ──► reset
//!                                                                     └─ 101 ──► what the face handed over, to its end
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
    /// A connection that says nothing for this long after it was opened is dropped, and so is one whose request's head
    /// takes longer.
    pub handshake: Duration,
    /// A connection without a request for this long is closed.
    pub idle: Duration,
    /// A client that reads nothing of its answer for this long has it cut.
    pub stall: Duration,
    /// Bytes of a request's head.
    pub header_bytes: u32,
    /// Header lines of a request, over each version of HTTP.
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

/// What every connection needs.
struct ConnectionContext {
    router: Router,
    drain: Drain,
    metrics: Arc<ServerMetrics>,
    shares: Arc<CallerQuotas>,
    slots: Arc<Semaphore>,
    wide: auto::Builder<TimedExecutor>,
    narrow: auto::Builder<TimedExecutor>,
    /// Who gets the wide windows.
    wide_permits: Arc<Semaphore>,
    tls: Option<Arc<Tls>>,
    config: Config,
}

/// Accepts on every socket until the drain is over, then waits a moment for the connections to say goodbye.
pub(crate) async fn run(
    sockets: Vec<(ListeningSocket, PortPurpose)>,
    router: Router,
    drain: Drain,
    metrics: Arc<ServerMetrics>,
    tls: Option<Arc<Tls>>,
    config: Config,
) {
    // A port that waits for a connection has a slot in its hand.
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
        // Both arms may be cancelled: a connection not yet accepted stays in the backlog, a permit goes back.
        let accepted = tokio::select! {
            () = context.drain.reached(DrainPhase::Over) => break,
            accepted = accept(&socket, &context.slots) => accepted,
        };
        // A finished task stays in the set until it is joined: without this it would grow with every connection that there
        // ever was.
        while tasks.try_join_next().is_some() {}
        let (accepted, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors or memory: existing connections must go first, so wait instead of spinning.
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                continue;
            }
        };
        // The share is taken after the accept, because only then the address is known. The slot is taken before it, so that
        // what is above the limit of all waits in the kernel's backlog and costs nothing here.
        let position = match &accepted {
            AcceptedStream::Tcp(socket, peer) => {
                let Ok(position) = context.shares.take(&CallerIdentity::at(peer.ip())) else {
                    turn_away(socket, &context);
                    continue;
                };
                Some(position)
            }
            // A client that may open the socket is trusted with all of it; proxies connect this way.
            AcceptedStream::Unix(_) => None,
        };
        let open = context.metrics.connections_open.clone();
        let context = Arc::clone(&context);
        tasks.spawn(timed(async move {
            // Within the task, beside the guard that undoes it: a task that is aborted before its first poll has counted
            // nothing.
            open.inc();
            let _counted = CountedConnection(open);
            connection(accepted, purpose, &context).await;
            // Not before the last byte: a connection that is being closed still has its descriptor.
            drop((position, slot));
        }));
    }
    let goodbye = async { while tasks.join_next().await.is_some() {} };
    // What has not gone by now goes with the set.
    let _ = tokio::time::timeout(GOODBYE, goodbye).await;
}

/// Reports that there are too many connections from this address, as far as that can be done without waiting: a client that opens
/// them is not to hold anything here.
fn turn_away(socket: &TcpStream, connection: &ConnectionContext) {
    connection
        .metrics
        .rejected
        .with_label_values(&["share"])
        .inc();
    tracing::debug!("a connection was closed: its address has as many as limits.connections_each");
    if connection.tls.is_some() {
        return;
    }
    let body = format!(
        r#"{{"error":"One address may have {} connections (limits.connections_each): close one, or use those that are open."}}"#,
        connection.config.connections_each
    );
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    // What was asked is read first, if it is here: closing over unread bytes would reset the connection before the answer
    // arrives. A client that reads neither sees it closed.
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

/// Of so many connections at a time, each gets [`Windows::WIDE`]; of more, [`Windows::NARROW`].
const WIDE_CONNECTIONS: usize = 32;

/// How many bytes the client of an HTTP/2 connection may send before they are read. What came and was not read is in no byte
/// budget: this is all that a connection can hold of it (D-47).
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
    /// What HTTP/2 begins with, which cannot be less: thousands of connections must not hold megabytes each.
    const NARROW: Self = Self {
        stream: 65_535,
        connection: 65_535,
    };
}

fn protocol(config: &Config, windows: Windows) -> auto::Builder<TimedExecutor> {
    let mut http = auto::Builder::new(TimedExecutor);
    http.http1()
        .timer(TokioTimer::new())
        // Its own would end idle connections as well; `Activity` tells the two apart.
        .header_read_timeout(None)
        .max_buf_size(config.header_bytes as usize)
        // Above its own limit hyper answers without a body and without us; so the gate comes first, which has words for it.
        .max_headers(config.headers.saturating_mul(2));
    http.http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_concurrent_streams(config.streams_per_connection)
        .max_header_list_size(config.header_bytes)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(30));
    http
}

/// Lets one connection in and serves it to its end. Nothing a client leaves out may hold it for longer than the
/// handshake's limit.
async fn connection(accepted: AcceptedStream, purpose: PortPurpose, slot: &ConnectionContext) {
    let limit = slot.config.handshake;
    let caller = match purpose {
        PortPurpose::Everything => Extensions::new(),
        purpose => with(Extensions::new(), purpose),
    };
    let caller = with(caller, ConnectionId::fresh());
    // Waiting for the first byte also keeps an idle connection from costing more than its slot.
    match accepted {
        AcceptedStream::Tcp(socket, peer) => {
            let mut first = [0];
            let Ok(Ok(1..)) = tokio::time::timeout(limit, socket.peek(&mut first)).await else {
                return;
            };
            let caller = with(caller, PeerInfo(peer));
            secure(socket, first[0] == tls::HANDSHAKE, caller, slot).await;
        }
        // It cannot be looked into before it is read; a first byte that is no handshake fails the handshake.
        AcceptedStream::Unix(socket) => {
            if let Ok(Ok(())) = tokio::time::timeout(limit, socket.readable()).await {
                secure(socket, true, caller, slot).await;
            }
        }
    }
}

/// TLS, if the listener speaks it. `hello`: the first byte looks like it.
async fn secure<S>(socket: S, hello: bool, caller: Extensions, connection: &ConnectionContext)
where
    S: AsyncRead + AsyncWrite + AbortConnection + Unpin + Send + 'static,
{
    let limit = connection.config.handshake;
    let Some(tls) = &connection.tls else {
        return serve(socket, caller, connection).await;
    };
    if !hello {
        let _ = tokio::time::timeout(limit, Box::pin(tls::answer_plain(socket))).await;
        return;
    }
    // Boxed, so that a connection does not hold the room of its handshake.
    let shaken = tokio::time::timeout(limit, Box::pin(tls.accept(socket))).await;
    let serving = match shaken {
        Ok(Ok(stream)) => {
            let caller = match tls::subject(&stream) {
                Some(subject) => with(caller, subject),
                None => caller,
            };
            serve(stream, caller, connection)
        }
        Ok(Err(error)) => return tracing::debug!(%error, "no TLS handshake"),
        Err(_) => return tracing::debug!("a TLS handshake took too long"),
    };
    serving.await;
}

fn with<T: Clone + Send + Sync + 'static>(mut extensions: Extensions, value: T) -> Extensions {
    extensions.insert(value);
    extensions
}

/// Serves one connection: HTTP, then what a face has handed over, if it took the connection out of HTTP's hands.
fn serve<S>(
    socket: S,
    caller: Extensions,
    connection: &ConnectionContext,
) -> impl Future<Output = ()> + Send
where
    S: AsyncRead + AsyncWrite + AbortConnection + Unpin + Send + 'static,
{
    let upgrade = UpgradeSlot::default();
    // Boxed, so that a long session does not hold the room that HTTP needed.
    let http = Box::pin(http(socket, with(caller, upgrade.clone()), connection));
    async move {
        // hyper's future ends when it has let go of the socket. What a face left for the upgrade waits for that socket, so
        // it must be polled behind HTTP, and in this task: here are the connection's slot, its count and its abort.
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
    // Every request of the connection carries clones of both; the arms below look at what these clones have seen.
    let write_stalls = WriteStallWatch::new();
    let caller = with(with(caller, activity.clone()), write_stalls.clone());
    let router = connection.router.clone();
    // Tried and not awaited: without a permit the connection is served at once, with narrow windows.
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
            // It has no windows: an HTTP/2 connection may have the permit.
            drop(wide.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
        let mut request = request.map(Body::new);
        request.extensions_mut().extend(caller.clone());
        router.clone().oneshot(request)
    });
    let received = ReadWatch::new(socket, activity.clone(), write_stalls.clone());
    let serving = protocol.serve_connection_with_upgrades(TokioIo::new(received), service);
    tokio::pin!(serving);
    // All arms may be cancelled: `serving` is polled on below, and the others only look. The order does not matter, because
    // each arm leads to the end of the connection.
    let reported = tokio::select! {
        result = serving.as_mut() => return ended(result, peer, &connection.metrics),
        () = until_drained(&connection.drain, &activity) => false,
        () = activity.idle_for(connection.config.idle) => true,
        // Half a request cannot be answered.
        () = activity.late_head(connection.config.handshake) => return,
        () = write_stalls.stalled(connection.config.stall) => {
            // Its next write is where the socket learns of it.
            write_stalls.reset();
            let _ = tokio::time::timeout(GOODBYE, serving).await;
            return;
        }
    };
    // HTTP/1 ends after the answer that is under way, HTTP/2 says GOAWAY and finishes its streams.
    serving.as_mut().graceful_shutdown();
    // An idle connection has nothing to finish, so it only gets the time for its goodbye. A drained one may have requests
    // under way: those end by themselves or when the drain cuts them, and there is no second limit here.
    if reported {
        let _ = tokio::time::timeout(GOODBYE, serving).await;
    } else {
        ended(serving.await, peer, &connection.metrics);
    }
}

/// Resolves when a drain closes the connection. One that has just been opened may still send a request, and gets the reason.
async fn until_drained(drain: &Drain, activity: &Activity) {
    drain.reached(DrainPhase::Refusing).await;
    let _ = tokio::time::timeout(GOODBYE, activity.begun()).await;
}

/// A broken connection is the client's business; it is logged for debugging alone.
fn ended(
    result: Result<(), Box<dyn std::error::Error + Send + Sync>>,
    peer: Option<PeerInfo>,
    metrics: &ServerMetrics,
) {
    let Err(error) = result else { return };
    let hyper = error.downcast_ref::<hyper::Error>();
    if hyper.is_some_and(hyper::Error::is_parse) {
        // hyper has answered 400, 414 or 431 by itself, before there was a request: that answer has no body and no id, and
        // nothing of ours sees it. This is what can be known of it.
        metrics.rejected.with_label_values(&["malformed"]).inc();
        let client = peer.map(|PeerInfo(address)| tracing::field::display(address));
        tracing::info!(client, %error, "refused what is no request of HTTP");
    } else {
        tracing::debug!(%error, "connection ended");
    }
}

const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);
const GOODBYE: Duration = Duration::from_secs(1);
