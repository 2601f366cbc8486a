//! The LMTP client (LM-701 to LM-713). It also works with the reference server.
//!
//! ```text
//!   generate · score ─► asks, bounded ─► keeper: one task, the machine, one connection ─► Items
//! ```
//!
//! ```no_run
//! # async fn example() -> Result<(), sapwood_proto::lmtp::Fault> {
//! use futures::StreamExt;
//! use sapwood_net::lmtp::{Address, Client, Options};
//! use sapwood_proto::lmtp::Generate;
//!
//! let client = Client::connect(Address::parse("localhost:8080")?, Options::default()).await?;
//! let wanted = Generate { prompt: vec![1, 2, 3], max_tokens: 16, ..Generate::default() };
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

/// What a client asks its peer for, and its timeouts; `None` waits for ever (LM-709).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// What of version 2 is asked for, on each connection before the first call goes out. A peer that does not know it is
    /// spoken to in the base protocol.
    pub features: Features,
    /// For a connection, and for how long a call waits for one.
    pub connect_timeout: Option<Duration>,
    /// To the first item of a stream. The reference server takes its time.
    pub first_item_timeout: Option<Duration>,
    /// From one item of a stream to the next.
    pub item_timeout: Option<Duration>,
    /// To the answer to MODEL_INFO.
    pub request_timeout: Option<Duration>,
    /// How often a peer behind a WebSocket is pinged.
    pub ping: Option<Duration>,
    /// How long such a peer may be silent, pongs included, until it counts as lost.
    pub idle_timeout: Option<Duration>,
    /// How long the connection stands still for a reader that is slow and alone; then its stream is cut off.
    pub stall_timeout: Option<Duration>,
    /// Bytes of a message to the peer (LM-703).
    pub max_message_out: usize,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        let usual = machine::ClientTimeouts::default();
        Self {
            features: Features::NONE
                .with(Feature::Cancel)
                .with(Feature::Status)
                .with(Feature::Usage)
                .with(Feature::Resume),
            connect_timeout: Some(Duration::from_secs(5)),
            first_item_timeout: usual.first_item_timeout,
            item_timeout: usual.item_timeout,
            request_timeout: usual.request_timeout,
            ping: Some(Duration::from_secs(20)),
            idle_timeout: Some(Duration::from_secs(60)),
            // A server gives a connection up that stands still for a minute (LM-607).
            stall_timeout: Some(Duration::from_secs(45)),
            max_message_out: usual.max_message_out,
        }
    }
}

impl ConnectOptions {
    /// The base protocol and nothing else.
    #[must_use]
    pub fn base() -> Self {
        Self {
            features: Features::NONE,
            ..Self::default()
        }
    }

    /// What the machine has to know of it.
    const fn timeouts(&self) -> machine::ClientTimeouts {
        machine::ClientTimeouts {
            first_item_timeout: self.first_item_timeout,
            item_timeout: self.item_timeout,
            request_timeout: self.request_timeout,
            max_message_out: self.max_message_out,
            text: false,
        }
    }
}

/// A peer, connected. Clones share the connection; when the last of them and of its streams is dropped, it ends.
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

/// What the keeper has seen of the peer, and what it is to see of us.
struct KeeperView {
    outstanding: AtomicUsize,
    raw_logprobs: AtomicBool,
    draining: AtomicBool,
    /// It knows nothing of version 2, as far as it was asked.
    base: AtomicBool,
    load: AtomicU64,
    /// Messages that it has sent.
    received_messages: AtomicU64,
    abandoned: AbandonedStreams,
}

impl LmtpClient {
    /// Connects. A connection that is lost later is made anew; its calls are not repeated (LM-713). Streams that the peer keeps go on
    /// over the new one, if it can be made at the first try (LM-965).
    ///
    /// # Errors
    /// `connection_lost`, `invalid_value`, or what the peer refuses the connection with.
    pub async fn connect(address: PeerAddress, options: ConnectOptions) -> Result<Self, LmtpError> {
        let peer = PeerTarget(address, options.clone());
        let wire = peer.dial().await?;
        Ok(Self::keeping(peer, Some(wire), options))
    }

    /// A peer that may be away: it is connected to when it is there, as if it had been lost before. Calls wait for it as long as
    /// connecting may take.
    #[must_use]
    pub fn connecting(address: PeerAddress, options: ConnectOptions) -> Self {
        let peer = PeerTarget(address, options.clone());
        Self::keeping(peer, None, options)
    }

    /// Speaks lines over `io`, until that ends.
    pub fn over(io: impl AsyncRead + AsyncWrite + Send + 'static, options: ConnectOptions) -> Self {
        Self::keeping(Once, Some(LmtpConnection::over(io)), options)
    }

    fn keeping(dial: impl DialPeer, wire: Option<LmtpConnection>, options: ConnectOptions) -> Self {
        let (send, asks) = mpsc::channel(ASKS_MAX);
        let seen = Arc::new(KeeperView {
            outstanding: AtomicUsize::new(0),
            raw_logprobs: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            base: AtomicBool::new(true),
            load: AtomicU64::new(LOAD_UNKNOWN),
            received_messages: AtomicU64::new(0),
            abandoned: AbandonedStreams::default(),
        });
        let connect_timeout = options.connect_timeout;
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

    /// Asks a model for tokens. What the peer cannot do is the stream's first item, and nothing was sent then (LM-704).
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

    /// The same with a deadline; the peer gets it too, if it knows of deadlines (LM-962).
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

    /// Asks a model how likely tokens are.
    ///
    /// # Errors
    /// As [`Self::generate`].
    pub async fn score(&self, model: &str, wanted: Score) -> Result<StreamItems, LmtpError> {
        self.ask(KeeperRequest::Score(model.to_owned(), wanted), ITEMS_MAX)
            .await
    }

    /// What a model is: the JSON of `model_info`, which reference servers make what they like.
    ///
    /// # Errors
    /// What the peer says; `timeout` if it says nothing.
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

    /// Calls whose end has not been seen, abandoned ones included (LM-702).
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.0.seen.outstanding.load(Ordering::Relaxed)
    }

    /// Whether the peer has sent log-probabilities that are none (LM-711).
    #[must_use]
    pub fn raw_logprobs(&self) -> bool {
        self.0.seen.raw_logprobs.load(Ordering::Relaxed)
    }

    /// How many streams the peer has, everybody's, as it last said (LM-902).
    #[must_use]
    pub fn load(&self) -> Option<u64> {
        let load = self.0.seen.load.load(Ordering::Relaxed);
        (load != LOAD_UNKNOWN).then_some(load)
    }

    /// How many messages the peer has sent.
    pub(crate) fn received_messages(&self) -> u64 {
        self.0.seen.received_messages.load(Ordering::Relaxed)
    }

    /// Whether the peer has said that it goes, and takes nothing new (LM-921).
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.0.seen.draining.load(Ordering::Relaxed)
    }

    /// Whether the peer, when it was last asked, agreed to nothing of version 2 and so takes only what LMQL's own servers take.
    #[must_use]
    pub fn is_base(&self) -> bool {
        self.0.seen.base.load(Ordering::Relaxed)
    }

    /// Whether there is a connection now; changes with it.
    fn connected(&self) -> watch::Receiver<bool> {
        self.0.connected.clone()
    }

    /// Resolves when the connection is gone for good; one that is made anew never is.
    pub async fn closed(&self) {
        self.0.asks.closed().await;
    }

    async fn ask(&self, what: KeeperRequest, items_max: usize) -> Result<StreamItems, LmtpError> {
        let (notify, reported) = mpsc::channel(items_max);
        let by = self.0.connect_timeout.map(|limit| Instant::now() + limit);
        let serial = self.0.serials.fetch_add(1, Ordering::Relaxed);
        let ask = KeeperCall {
            what,
            results: notify,
            serial,
            by,
        };
        // Both arms may be cancelled: what is not handed over is not asked.
        tokio::select! {
            sent = self.0.asks.send(ask) => sent.map_err(|_| lost(CONNECTION_LOST))?,
            () = until(by) => return Err(lost("the upstream takes no more calls at the moment")),
        }
        Ok(StreamItems {
            results: reported,
            ended: false,
            serial,
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

/// The items of one stream; the last has a finish, or is an error. Dropping it abandons the stream: a peer of version 2 is asked to
/// stop; the base protocol has no words for it, and the work counts as outstanding until its end is seen.
///
/// Who leaves 16,384 items unread is waited for, and the peer with it, while no other stream of the connection is; else, and
/// after [`ConnectOptions::stall_timeout`], the stream is cut off (`stalled`).
#[must_use = "a stream that is dropped is abandoned"]
pub struct StreamItems {
    results: mpsc::Receiver<Result<CallResult, LmtpError>>,
    ended: bool,
    serial: u64,
    client: LmtpClient,
}

impl Drop for StreamItems {
    fn drop(&mut self) {
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

/// A peer at an address.
struct PeerTarget(PeerAddress, ConnectOptions);

impl DialPeer for PeerTarget {
    async fn dial(&self) -> Result<LmtpConnection, LmtpError> {
        LmtpConnection::to(&self.0, &self.1).await
    }
}

/// What cannot be dialled.
struct Once;

impl DialPeer for Once {
    async fn dial(&self) -> Result<LmtpConnection, LmtpError> {
        Err(lost(CONNECTION_LOST))
    }

    fn again(&self) -> bool {
        false
    }
}

/// Calls on their way to the keeper.
const ASKS_MAX: usize = 64;
/// Items of one stream that nobody has read yet.
const ITEMS_MAX: usize = 16_384;
/// Stands where a peer has not said how many streams it has.
const LOAD_UNKNOWN: u64 = u64::MAX;
const CONNECTION_LOST: &str = "the connection to the upstream is gone";

#[cfg(test)]
mod tests;
