//! Evergreen over WebSockets as a transport, in every dialect (EV-970, EV-976).
//!
//! ```text
//!   ws://HOST:PORT/PATH?dialect=json ─► TCP, TLS ─► upgrade ─┬─ task: outgoing ─ codec ─► socket, half-close, pings
//!                                                            └─ stream: socket ─ codec ─► messages, end or status
//! ```

use std::error::Error;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use futures::future::FutureExt;
use futures::stream::{SplitSink, SplitStream};
use futures::{Sink, SinkExt, Stream, StreamExt};
use http::header::{HeaderMap, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use http::{Request, Uri};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::socket::{Codec, FrameContent, status_of_close};
use sapwood_proto::evergreen::{Dialect, Reason, Status, WebSocketFrame, WireMessage};
use sapwood_proto::secret::masked;
use sapwood_proto::session::Side;
use tokio::task::JoinError;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{self, Utf8Bytes};
use tokio_util::io::InspectReader;
use tokio_util::task::AbortOnDropHandle;

use super::link::{failed, panicked};
use super::transport::{OpenedCall, ServerMessages, bad_address, unreached};
use crate::address::ServerAddress;
use crate::connection::{self, ConnectError, Io};

/// The address of a server, and the dialect of the connection.
#[derive(Clone)]
pub(super) struct WebSocketTarget {
    uri: Uri,
    dialect: Dialect,
    address: Box<ServerAddress>,
}

/// Omits the query, which may contain a key.
impl fmt::Debug for WebSocketTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

type WebSocketConnection = WebSocketStream<Box<dyn Io>>;

impl WebSocketTarget {
    /// Creates the target for `uri`, the URL of `address`.
    pub(super) fn new(uri: Uri, address: ServerAddress) -> Result<Self, Status> {
        let mut pairs = uri.query().unwrap_or_default().split('&');
        let dialect = match pairs.find_map(|pair| pair.strip_prefix("dialect=")) {
            None | Some("protobuf") => Dialect::Protobuf,
            Some("json") => Dialect::Json,
            Some("msgpack") => Dialect::Msgpack,
            Some(_) => {
                let known = "the dialect of a WebSocket is protobuf, json or msgpack";
                return Err(bad_address(known));
            }
        };
        Ok(Self {
            uri,
            dialect,
            address: Box::new(address),
        })
    }

    /// Returns the dialect.
    pub(super) const fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Connects and upgrades.
    pub(super) async fn call(
        &self,
        headers: HeaderMap,
        outgoing: impl Stream<Item = WireMessage> + Send + Unpin + 'static,
    ) -> Result<OpenedCall, Status> {
        let address = &self.address;
        let opening = async {
            let io = connection::connect(&self.uri, address.authorities.as_deref()).await;
            let io = io.map_err(|why| match why {
                ConnectError::Bad(why) => bad_address(why),
                ConnectError::Unreachable(cause) => unreached(address, &cause),
            })?;
            // Below the WebSocket: its library hands out messages only, and counts no bytes.
            let (io, liveness) = LivenessFlag::of(io);
            let (wire, answer) = self.upgrade(io, headers).await?;
            Ok((wire, liveness, answer))
        };
        let late = |_| unavailable(address, "no answer in time");
        let (wire, liveness, answer) = timeout(address.connect_timeout, opening)
            .await
            .map_err(late)??;
        let incoming = converse(wire, liveness, self.dialect, outgoing);
        Ok(OpenedCall::new(&answer, incoming))
    }

    async fn upgrade(
        &self,
        io: Box<dyn Io>,
        headers: HeaderMap,
    ) -> Result<(WebSocketConnection, HeaderMap), Status> {
        let request = self.request(headers);
        let request = request.map_err(|_| bad_address("it is not the URL of a WebSocket"))?;
        let upgraded = connection::websocket(request, io).await;
        upgraded.map_err(|error| refused(&self.address, &error))
    }

    /// Returns the request with all of the address's query, which may contain the key (EV-704).
    fn request(&self, headers: HeaderMap) -> Result<Request<()>, Box<dyn Error>> {
        let mut uri = self.uri.clone().into_parts();
        if self.uri.path() == "/" {
            let query = self.uri.query().map(|query| format!("?{query}"));
            let path = ["/evergreen", query.as_deref().unwrap_or_default()].concat();
            uri.path_and_query = Some(path.parse()?);
        }
        let mut request = Uri::from_parts(uri)?.into_client_request()?;
        request.headers_mut().extend(headers);
        // 0.4.0 servers do not know subprotocols, and a client must not offer one that the server does not choose: the
        // first message shows the dialect.
        if let (Some(name), false) = (self.dialect.subprotocol(), self.dialect == Dialect::Msgpack)
        {
            let name = HeaderValue::from_static(name);
            request.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, name);
        }
        Ok(request)
    }
}

/// Set when bytes are received. Bytes count, not messages: a message that takes minutes to arrive shows that the peer is
/// alive.
#[derive(Clone, Default)]
struct LivenessFlag(Arc<AtomicBool>);

impl LivenessFlag {
    /// Returns `io` with its flag.
    fn of(io: Box<dyn Io>) -> (Box<dyn Io>, Self) {
        let flag = Self::default();
        let liveness = Arc::clone(&flag.0);
        let inspected = InspectReader::new(io, move |bytes: &[u8]| {
            // An end of input is no sign of life.
            if !bytes.is_empty() {
                liveness.store(true, Ordering::Relaxed);
            }
        });
        (Box::new(inspected), flag)
    }

    /// Returns whether bytes were received since the last call.
    fn is_alive(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Starts both directions of a connection; returns the server's messages.
fn converse(
    wire: WebSocketConnection,
    liveness: LivenessFlag,
    dialect: Dialect,
    outgoing: impl Stream<Item = WireMessage> + Send + Unpin + 'static,
) -> ServerMessages {
    let (sink, stream) = wire.split();
    // One codec for both directions: what was received decides how some dialects write, such as the open actions of
    // msgpack.
    let shared = SharedCodec(Arc::new(Mutex::new(Codec::new(dialect, Side::Client))));
    let sending = tokio::spawn(send(sink, shared.clone(), outgoing));
    receive(WebSocketReceiver {
        stream,
        liveness,
        shared,
        sending: Some(AbortOnDropHandle::new(sending)),
    })
}

/// The codec of one connection, shared by both directions; locked only while one message is encoded or decoded.
#[derive(Clone)]
struct SharedCodec(Arc<Mutex<Codec>>);

impl SharedCodec {
    fn codec(&self) -> MutexGuard<'_, Codec> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends messages, then the half-close. Pings are sent also between messages, because a server that only receives sends
/// nothing but pongs.
async fn send(
    mut sink: SplitSink<WebSocketConnection, tungstenite::Message>,
    shared: SharedCodec,
    mut outgoing: impl Stream<Item = WireMessage> + Unpin,
) {
    let mut buf = BytesMut::new();
    let mut ping_at = Instant::now() + PING;
    loop {
        // Cancel-safe: a message that was not received stays in the stream.
        let first = timeout_at(ping_at, outgoing.next()).await;
        if Instant::now() >= ping_at {
            ping_at = Instant::now() + PING;
            let ping = tungstenite::Message::Ping(Bytes::new());
            if sink.send(ping).await.is_err() {
                return;
            }
        }
        let Ok(first) = first else {
            continue;
        };
        // Sends everything that is ready with one flush.
        let mut next = Some(first);
        while let Some(item) = next {
            let Some(message) = item else {
                return finish(sink, shared, buf).await;
            };
            shared.codec().encode(&message, unix_micros(), &mut buf);
            if feed(&mut sink, &shared, &mut buf).await.is_err() {
                return;
            }
            // Bounds the batch: a client that sends without pause must send its pings too.
            let is_due = Instant::now() >= ping_at;
            next = (!is_due).then(|| outgoing.next().now_or_never()).flatten();
        }
        if sink.flush().await.is_err() {
            return;
        }
    }
}

async fn finish(
    mut sink: SplitSink<WebSocketConnection, tungstenite::Message>,
    shared: SharedCodec,
    mut buf: BytesMut,
) {
    let due = shared.codec().finish(unix_micros(), &mut buf);
    if due && feed(&mut sink, &shared, &mut buf).await.is_err() {
        return;
    }
    // The server closes once it has sent everything. Until then pings keep the connection alive.
    // Not closed from here: a WebSocket has no half-close, and a Close would cancel what still runs (EV-109).
    while sink.flush().await.is_ok() {
        tokio::time::sleep(PING).await;
        if sink
            .feed(tungstenite::Message::Ping(Bytes::new()))
            .await
            .is_err()
        {
            return;
        }
    }
}

async fn feed(
    sink: &mut (impl Sink<tungstenite::Message, Error = tungstenite::Error> + Unpin),
    shared: &SharedCodec,
    buf: &mut BytesMut,
) -> Result<(), tungstenite::Error> {
    let bytes = buf.split().freeze();
    let is_text = shared.codec().is_text();
    let message = if is_text {
        // JSON is valid UTF-8.
        tungstenite::Message::Text(Utf8Bytes::try_from(bytes).unwrap_or_default())
    } else {
        tungstenite::Message::Binary(bytes)
    };
    sink.feed(message).await
}

/// The receiving side of a connection. The sending task is aborted with it.
struct WebSocketReceiver {
    stream: SplitStream<WebSocketConnection>,
    liveness: LivenessFlag,
    shared: SharedCodec,
    /// `None` once it has ended, which does not end the connection.
    sending: Option<AbortOnDropHandle<()>>,
}

impl WebSocketReceiver {
    /// Returns the next frame. The connection is given up if no bytes arrive, not even pongs. Time between two calls
    /// counts as one interval at most, because bytes that arrived meanwhile are noticed only when this is polled.
    async fn next(&mut self) -> Option<Result<tungstenite::Message, Status>> {
        let mut silent = 0;
        while silent < WAITS_SILENT {
            // All branches are cancel-safe: a partial message stays in the stream. A received frame takes precedence
            // over a failure to send.
            tokio::select! {
                biased;
                item = self.stream.next() => {
                    return item.map(|item| item.map_err(|error| broken(&error)));
                }
                // Its other ends need no action: after an error of the socket, `stream` fails as well.
                sent = ended(&mut self.sending) => {
                    self.sending = None;
                    if sent.is_err_and(|error| error.is_panic()) {
                        panicked("the task that sends for a client's session");
                        return Some(Err(failed()));
                    }
                }
                () = tokio::time::sleep(PING) => {
                    silent = if self.liveness.is_alive() { 0 } else { silent + 1 };
                }
            }
        }
        let message =
            "nothing was received from the server for a minute: the connection was closed";
        Some(Err(Status::other(Code::Unavailable, "", message)))
    }
}

/// Waits for the end of a task; forever if there is none.
async fn ended(task: &mut Option<AbortOnDropHandle<()>>) -> Result<(), JoinError> {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

/// Returns the server's messages. The end of this stream is the end of the session.
fn receive(received: WebSocketReceiver) -> ServerMessages {
    futures::stream::unfold(Some(received), |received| async move {
        let mut received = received?;
        loop {
            let frame = match received.next().await? {
                Ok(tungstenite::Message::Text(text)) => WebSocketFrame::Text(text.into()),
                Ok(tungstenite::Message::Binary(bytes)) => WebSocketFrame::Binary(bytes),
                Ok(tungstenite::Message::Close(close)) => {
                    // A Close may be all that is left of an abort: its reason names the code (EV-903).
                    let close =
                        close.map(|frame| status_of_close(frame.code.into(), &frame.reason));
                    return close.flatten().map(|status| (Err(status), None));
                }
                // Pings are answered by the library, and pongs have counted as bytes already.
                Ok(_) => continue,
                Err(status) => return Some((Err(status), None)),
            };
            let incoming = received.shared.codec().decode(frame);
            match incoming {
                Ok(FrameContent::Message(message)) => return Some((Ok(message), Some(received))),
                Ok(FrameContent::Nothing) => {}
                Ok(FrameContent::Finish) => return None,
                Ok(FrameContent::Abort(status)) | Err(status) => return Some((Err(status), None)),
            }
        }
    })
    .boxed()
}

fn unavailable(address: &ServerAddress, hint: &str) -> Status {
    let message = format!("no answer from {}: {hint}", masked(&address.url));
    Status::other(Code::Unavailable, "", message)
}

/// Converts a refused upgrade. Servers describe it differently; only the HTTP status is common.
fn refused(address: &ServerAddress, error: &tungstenite::Error) -> Status {
    let tungstenite::Error::Http(answer) = error else {
        tracing::debug!(%error, "the WebSocket upgrade failed");
        return unavailable(address, "it does not accept WebSockets there");
    };
    let number = answer.status().as_u16();
    let code = match number {
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 | 405 | 426 => Code::NotFound,
        429 | 500.. => Code::Unavailable,
        _ => Code::InvalidRequest,
    };
    Status::other(
        code,
        "",
        format!("the server refused the session ({number})"),
    )
}

/// Converts the error that broke a connection.
fn broken(error: &tungstenite::Error) -> Status {
    match error {
        tungstenite::Error::Capacity(_) => Status::new(
            Reason::MessageTooLarge,
            "the server sent a message that is larger than allowed",
        ),
        _ => Status::other(
            Code::Unavailable,
            "",
            "the connection to the server was lost",
        ),
    }
}

fn unix_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
    })
}

const PING: Duration = Duration::from_secs(20);
/// After this many intervals of [`PING`] without a byte the connection is given up.
const WAITS_SILENT: u32 = 3;

#[cfg(test)]
mod tests;
