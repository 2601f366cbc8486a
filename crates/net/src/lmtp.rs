//! The LMTP client (LM-701 to LM-713). It also works with the reference server.
//!
//! ```text
//!   generate · score ─► calls, bounded ─► keeper: one task, the state machine, one connection ─► StreamItems
//! ```
//!
//! ```no_run
//! # async fn example() -> Result<(), sapwood_proto::lmtp::LmtpError> {
//! use futures::StreamExt;
//! use sapwood_net::lmtp::{ConnectOptions, LmtpClient, PeerAddress};
//! use sapwood_proto::lmtp::GenerateRequest;
//! use sapwood_proto::params::GenerationParams;
//!
//! let client = LmtpClient::connect(PeerAddress::parse("localhost:8080")?, ConnectOptions::default()).await?;
//! let params = GenerationParams { max_tokens: Some(16), ..GenerationParams::default() };
//! let wanted = GenerateRequest { prompt: vec![1, 2, 3], params, ..GenerateRequest::default() };
//! let mut items = client.generate("tiny", wanted).await?;
//! while let Some(item) = items.next().await {
//!     println!("{:?}", item?.token);
//! }
//! # Ok(())
//! # }
//! ```

mod abandoned;
mod address;
mod bridge;
mod keeper;
pub mod pool;
mod post;
mod served;
mod tokenizer;
mod wire;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use sapwood_proto::lmtp::{
    self as machine, Feature, Features, GenerateRequest, LmtpError, ReceivedItem, Score,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use self::abandoned::AbandonedStreams;
pub use self::address::PeerAddress;
pub use self::bridge::{BridgeEnd, bridge};
use self::keeper::{CallResult, DialPeer, KeeperCall, KeeperRequest, LinkKeeper};
use self::wire::{LmtpConnection, lost, until};

/// Features that a client requests from its peer, and its timeouts; `None` waits forever (LM-709).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// The features of version 2 that are requested on each connection before the first call is sent. A peer that does
    /// not know version 2 is used with the base protocol.
    pub features: Features,
    /// Limits establishing a connection, and how long a call waits for one.
    pub connect_timeout: Option<Duration>,
    /// Limits the time to the first item of a stream. The reference server is slow here.
    pub first_item_timeout: Option<Duration>,
    /// Limits the time from one item of a stream to the next.
    pub item_timeout: Option<Duration>,
    /// Limits the time to the answer to MODEL_INFO.
    pub request_timeout: Option<Duration>,
    /// The interval of pings to a WebSocket peer.
    pub ping: Option<Duration>,
    /// How long such a peer may send nothing, not even pongs, until the connection counts as lost.
    pub idle_timeout: Option<Duration>,
    /// How long the connection stops reading for a slow reader, if no other stream waits; then that stream fails.
    pub stall_timeout: Option<Duration>,
    /// The maximum of bytes of a message to the peer (LM-703).
    pub max_message_out: usize,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        let usual = machine::ClientTimeouts::default();
        Self {
            // Only the features that this client acts on: the others would change what a peer sends for nothing.
            features: Features::NONE
                .with(Feature::Cancel)
                .with(Feature::Status)
                .with(Feature::Usage)
                .with(Feature::Resume)
                .with(Feature::Lora),
            connect_timeout: Some(Duration::from_secs(5)),
            first_item_timeout: usual.first_item_timeout,
            item_timeout: usual.item_timeout,
            request_timeout: usual.request_timeout,
            ping: Some(Duration::from_secs(20)),
            idle_timeout: Some(Duration::from_secs(60)),
            // A server closes a connection that is stalled for a minute (LM-607).
            stall_timeout: Some(Duration::from_secs(45)),
            max_message_out: usual.max_message_out,
        }
    }
}

impl ConnectOptions {
    /// The base protocol only.
    #[must_use]
    pub fn base() -> Self {
        Self {
            features: Features::NONE,
            ..Self::default()
        }
    }

    /// The timeouts of the state machine.
    const fn timeouts(&self) -> machine::ClientTimeouts {
        machine::ClientTimeouts {
            first_item_timeout: self.first_item_timeout,
            item_timeout: self.item_timeout,
            request_timeout: self.request_timeout,
            max_message_out: self.max_message_out,
            // Upstreams are asked with token ids, and their text is made here, so nobody would read it.
            text: false,
        }
    }
}

/// A client of one peer. Clones share the connection; it is closed when the last clone and the last stream are dropped.
#[derive(Clone)]
pub struct LmtpClient(Arc<ClientShared>);

struct ClientShared {
    asks: mpsc::Sender<KeeperCall>,
    connect_timeout: Option<Duration>,
    seen: Arc<KeeperView>,
    serials: AtomicU64,
    connected: watch::Receiver<bool>,
    _keeper: AbortOnDropHandle<()>,
}

/// State shared by the keeper and the client's handles: what is known of the peer, and the abandoned streams.
struct KeeperView {
    outstanding: AtomicUsize,
    raw_logprobs: AtomicBool,
    draining: AtomicBool,
    /// The peer agreed to nothing of version 2 when it was last asked.
    base: AtomicBool,
    load: AtomicU64,
    /// Number of messages received from it.
    received_messages: AtomicU64,
    abandoned: AbandonedStreams,
}

impl LmtpClient {
    /// Connects. A connection that is lost later is established again; its calls are not repeated (LM-713). Detached
    /// streams continue over the new connection, if the first reconnection attempt succeeds (LM-965).
    ///
    /// # Errors
    /// `connection_lost`, `invalid_value`, or the error with which the peer refuses the connection.
    pub async fn connect(address: PeerAddress, options: ConnectOptions) -> Result<Self, LmtpError> {
        let peer = PeerTarget(address, options.clone());
        let wire = peer.dial().await?;
        Ok(Self::keeping(peer, Some(wire), options))
    }

    /// Creates a client without waiting for a connection: it connects in the background, as after a loss. Calls wait
    /// for the connection up to `connect_timeout`.
    #[must_use]
    pub fn connecting(address: PeerAddress, options: ConnectOptions) -> Self {
        let peer = PeerTarget(address, options.clone());
        Self::keeping(peer, None, options)
    }

    /// Exchanges lines over `io`, until that ends.
    pub fn over(io: impl AsyncRead + AsyncWrite + Send + 'static, options: ConnectOptions) -> Self {
        Self::keeping(Once, Some(LmtpConnection::over(io)), options)
    }

    fn keeping(dial: impl DialPeer, wire: Option<LmtpConnection>, options: ConnectOptions) -> Self {
        let (send, asks) = mpsc::channel(ASKS_MAX);
        let seen = Arc::new(KeeperView {
            outstanding: AtomicUsize::new(0),
            raw_logprobs: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            // A peer counts as a base peer until it has answered: what a base peer cannot do is then done here, which
            // is right for every peer.
            base: AtomicBool::new(true),
            load: AtomicU64::new(LOAD_UNKNOWN),
            received_messages: AtomicU64::new(0),
            abandoned: AbandonedStreams::default(),
        });
        let connect_timeout = options.connect_timeout;
        // Known from the start, so that a pool does not take a client that is connected for one that is away.
        let (connects, connected) = watch::channel(wire.is_some());
        let keeper = LinkKeeper::new(dial, options, asks, Arc::clone(&seen), connects);
        Self(Arc::new(ClientShared {
            asks: send,
            connect_timeout,
            seen,
            serials: AtomicU64::new(0),
            connected,
            _keeper: AbortOnDropHandle::new(tokio::spawn(keeper.keep(wire))),
        }))
    }

    /// Generates tokens with a model. If the peer lacks a required feature, the stream's first item is that error, and
    /// nothing is sent (LM-704).
    ///
    /// # Errors
    /// `connection_lost` if there is no connection in time.
    pub async fn generate(
        &self,
        model: &str,
        wanted: GenerateRequest,
    ) -> Result<StreamItems, LmtpError> {
        self.generate_until(model, wanted, None).await
    }

    /// Generates with a deadline; it is sent to the peer, if that supports deadlines (LM-962).
    ///
    /// # Errors
    /// As [`Self::generate`].
    pub async fn generate_until(
        &self,
        model: &str,
        wanted: GenerateRequest,
        deadline: Option<Instant>,
    ) -> Result<StreamItems, LmtpError> {
        let what = KeeperRequest::Generate(model.to_owned(), wanted, deadline);
        self.ask(what, ITEMS_MAX).await
    }

    /// Scores tokens with a model.
    ///
    /// # Errors
    /// As [`Self::generate`].
    pub async fn score(&self, model: &str, wanted: Score) -> Result<StreamItems, LmtpError> {
        self.ask(KeeperRequest::Score(model.to_owned(), wanted), ITEMS_MAX)
            .await
    }

    /// Returns the facts of a model: the JSON of `model_info`, whose contents reference servers choose freely.
    ///
    /// # Errors
    /// The peer's error; `timeout` if it does not answer.
    pub async fn model_info(&self, model: &str) -> Result<String, LmtpError> {
        let mut items = self
            .ask(KeeperRequest::ModelInfo(model.to_owned()), 1)
            .await?;
        match items.results.recv().await {
            Some(Ok(CallResult::ModelInfo(facts))) => Ok(facts),
            Some(Err(error)) => Err(error),
            Some(Ok(CallResult::Item(_))) | None => Err(lost(CONNECTION_LOST)),
        }
    }

    /// Returns the number of calls whose end has not been received, abandoned ones included (LM-702).
    #[must_use]
    pub fn outstanding(&self) -> usize {
        // Relaxed, here and below: these are figures for decisions, and no other memory is published with them.
        self.0.seen.outstanding.load(Ordering::Relaxed)
    }

    /// Returns whether the peer has sent values as log-probabilities that are not (LM-711).
    #[must_use]
    pub fn raw_logprobs(&self) -> bool {
        self.0.seen.raw_logprobs.load(Ordering::Relaxed)
    }

    /// Returns how many streams the peer runs for all clients, as it last reported (LM-902).
    #[must_use]
    pub fn load(&self) -> Option<u64> {
        let load = self.0.seen.load.load(Ordering::Relaxed);
        (load != LOAD_UNKNOWN).then_some(load)
    }

    /// Returns the number of messages received from the peer.
    pub(crate) fn received_messages(&self) -> u64 {
        self.0.seen.received_messages.load(Ordering::Relaxed)
    }

    /// Returns whether the peer has announced that it drains, and accepts no new calls (LM-921).
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.0.seen.draining.load(Ordering::Relaxed)
    }

    /// Returns whether the peer agreed to nothing of version 2 when it was last asked, so that only the base protocol
    /// of LMQL's own servers can be used.
    #[must_use]
    pub fn is_base(&self) -> bool {
        self.0.seen.base.load(Ordering::Relaxed)
    }

    /// Returns a channel that tells whether there is a connection now.
    fn connected(&self) -> watch::Receiver<bool> {
        self.0.connected.clone()
    }

    /// Resolves when the connection is closed permanently; never for a client that reconnects.
    pub async fn closed(&self) {
        // The keeper owns the receiver, and ends only when it neither has a connection nor may dial again.
        self.0.asks.closed().await;
    }

    async fn ask(&self, what: KeeperRequest, items_max: usize) -> Result<StreamItems, LmtpError> {
        // Each call has a queue of its own, so that a reader which is slow delays no other call's results.
        let (notify, reported) = mpsc::channel(items_max);
        let by = self.0.connect_timeout.map(|limit| Instant::now() + limit);
        // The machine numbers a call when it is sent. Until then, and to abandon it, the handle needs a number of its
        // own.
        let serial = self.0.serials.fetch_add(1, Ordering::Relaxed);
        let ask = KeeperCall {
            what,
            results: notify,
            serial,
            by,
        };
        // Both branches are cancel-safe: a call that was not sent to the keeper was not made.
        tokio::select! {
            sent = self.0.asks.send(ask) => sent.map_err(|_| lost(CONNECTION_LOST))?,
            () = until(by) => return Err(lost("too many calls wait for the upstream: try again later")),
        }
        Ok(StreamItems {
            results: reported,
            ended: false,
            serial,
            // Keeps the connection open for as long as the stream is read, after the last other handle is dropped.
            client: self.clone(),
        })
    }
}

impl fmt::Debug for LmtpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("outstanding", &self.outstanding())
            .finish_non_exhaustive()
    }
}

/// The items of one stream; the last has a finish, or is an error. Dropping it abandons the stream: a peer of version 2
/// is asked to cancel it; the base protocol has no message for that, and the call counts as outstanding until its end
/// is received.
///
/// If a reader leaves 16,384 items unread, the connection stops reading while no other stream of it waits for items.
/// Otherwise, and after [`ConnectOptions::stall_timeout`], the stream fails (`stalled`).
#[must_use = "a stream that is dropped is abandoned"]
pub struct StreamItems {
    results: mpsc::Receiver<Result<CallResult, LmtpError>>,
    ended: bool,
    serial: u64,
    client: LmtpClient,
}

impl Drop for StreamItems {
    fn drop(&mut self) {
        // A stream that has ended is no longer known to the peer, and its id must not be cancelled.
        if !self.ended {
            self.client.0.seen.abandoned.push(self.serial);
        }
    }
}

impl Stream for StreamItems {
    type Item = Result<ReceivedItem, LmtpError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let item = match ready!(self.results.poll_recv(cx)) {
            Some(Ok(CallResult::Item(item))) => Ok(item),
            Some(Err(error)) => Err(error),
            // The keeper has ended without an end of this call, as with its runtime. A stream must not end in silence
            // (LM-501).
            Some(Ok(CallResult::ModelInfo(_))) | None => Err(lost(CONNECTION_LOST)),
        };
        self.ended = item.as_ref().map_or(true, |item| item.finish.is_some());
        Poll::Ready(Some(item))
    }
}

impl fmt::Debug for StreamItems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Items")
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

/// Dials a peer at an address.
struct PeerTarget(PeerAddress, ConnectOptions);

impl DialPeer for PeerTarget {
    async fn dial(&self) -> Result<LmtpConnection, LmtpError> {
        LmtpConnection::to(&self.0, &self.1).await
    }
}

/// A connection that cannot be dialled again.
struct Once;

impl DialPeer for Once {
    async fn dial(&self) -> Result<LmtpConnection, LmtpError> {
        // Not reached: the keeper ends with the only connection of this peer.
        Err(lost(CONNECTION_LOST))
    }

    fn again(&self) -> bool {
        false
    }
}

/// Capacity of the channel of calls to the keeper; with a full one, callers wait up to their `connect_timeout`.
const ASKS_MAX: usize = 64;
/// The maximum of unread items of one stream.
const ITEMS_MAX: usize = 16_384;
/// The load of a peer that has not reported it.
const LOAD_UNKNOWN: u64 = u64::MAX;
const CONNECTION_LOST: &str = "the connection to the upstream was lost";

#[cfg(test)]
mod tests;
