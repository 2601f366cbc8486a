//! A client for several servers of one model (LM-801 to LM-806).
//!
//! ```text
//!   generate · score ─► route ─► a peer's client ─► PooledItems
//!                         ▲  lost ◄──────┘            │ continues at another peer, unnoticed by the reader
//!                         └───────────────────────────┘
//! ```

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use std::task::{Context, Poll, ready};

use futures::future::{BoxFuture, join_all};
use futures::{FutureExt, Stream, StreamExt};
use sapwood_proto::lmtp::pool::{
    self as machine, Condition, PoolMember, ProbeOutcome, RelayedItem, RelayedStream, StreamOutcome,
};
use sapwood_proto::lmtp::{
    GenerateRequest, LmtpError, LmtpReason, ReceivedItem, Score, StreamDemand,
};
use sapwood_proto::time::Time;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_stream::wrappers::WatchStream;
use tokio_util::task::AbortOnDropHandle;

use super::wire::{lost, until};
use super::{ConnectOptions, LmtpClient, PeerAddress};

/// One peer of a pool.
#[derive(Clone, Debug)]
pub struct PoolEndpoint {
    /// The address.
    pub address: PeerAddress,
    /// The name of the model at this peer.
    pub model: String,
    /// Its share of the streams, relative to the other peers.
    pub weight: u32,
}

/// Peers that serve one model. Clones share them; when the last clone is dropped, running streams continue, and probing
/// ends.
#[derive(Clone)]
pub struct LmtpPool(Arc<PoolHandle>);

struct PoolHandle {
    peers: Arc<PoolPeers>,
    /// One watch task for each peer.
    watches: Mutex<Vec<AbortOnDropHandle<()>>>,
}

/// State shared by the pool and its streams.
struct PoolPeers {
    /// In the order of the machine's members. The machine's lock is acquired first. Links are never removed.
    links: RwLock<Vec<Arc<PeerLink>>>,
    /// Never locked across an await.
    machine: Mutex<machine::PoolMachine>,
    /// Options for peers that are added later.
    options: ConnectOptions,
    seeded: bool,
    /// The origin of the machine's clock.
    origin: Instant,
    facts: OnceLock<String>,
    moved: AtomicU64,
    /// Whether any peer can be used; sent whenever the condition of a peer, and so the time of its next probe, may have
    /// changed.
    served: watch::Sender<bool>,
}

struct PeerLink {
    client: LmtpClient,
    model: String,
    /// The address for log messages.
    target: String,
    connected: watch::Receiver<bool>,
}

/// The current state of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    /// Its address, without its key.
    pub target: String,
    /// Whether it can be used.
    pub condition: Condition,
    /// Number of its running streams.
    pub streams: u64,
}

impl LmtpPool {
    /// Connects to every peer and asks for the facts of the model. Peers that do not answer are probed again; one that
    /// answers is enough.
    ///
    /// # Errors
    /// The error of the first peer, if none answers; that of any peer that can never be used, because its address is
    /// wrong or it refuses access. `invalid_value` if two peers have different vocabularies.
    pub async fn connect(
        endpoints: Vec<PoolEndpoint>,
        options: &ConnectOptions,
        settings: machine::PoolOptions,
    ) -> Result<Self, LmtpError> {
        // All peers at once: the start must not take the connect timeouts of all that are away, one after the other.
        let connecting = endpoints.into_iter().map(|endpoint| async move {
            let PoolEndpoint {
                address,
                model,
                weight,
            } = endpoint;
            let target = format!("{address:?}");
            let connected = LmtpClient::connect(address.clone(), options.clone()).await;
            let (client, away) = match connected {
                Ok(client) => (client, None),
                Err(error) if error.reason.is_retryable() => (
                    LmtpClient::connecting(address, options.clone()),
                    Some(error),
                ),
                // A wrong address or a refused key is an error of the configuration, which no later probe would mend.
                Err(error) => return Err(error),
            };
            Ok((PeerLink::new(client, model, target), weight, away))
        });
        let linked: Result<Vec<_>, LmtpError> = join_all(connecting).await.into_iter().collect();
        Self::over(linked?, options.clone(), settings).await
    }

    /// Creates a pool with the single peer of `client`.
    ///
    /// # Errors
    /// The error of the peer; one that does not answer in time is used nevertheless.
    pub async fn of(client: LmtpClient, model: &str) -> Result<Self, LmtpError> {
        let link = PeerLink::new(client, model.to_owned(), String::new());
        Self::over(
            vec![(link, 1, None)],
            ConnectOptions::default(),
            machine::PoolOptions::default(),
        )
        .await
    }

    /// Creates a pool of peers, each with its weight, and the error if it is not connected.
    async fn over(
        linked: Vec<(PeerLink, u32, Option<LmtpError>)>,
        options: ConnectOptions,
        settings: machine::PoolOptions,
    ) -> Result<Self, LmtpError> {
        let (mut links, mut weights, mut away) = (Vec::new(), Vec::new(), Vec::new());
        for (link, weight, why) in linked {
            links.push(Arc::new(link));
            weights.push(weight);
            away.push(why);
        }
        let seeded = settings.seeded;
        let peers = Arc::new(PoolPeers {
            machine: Mutex::new(machine::PoolMachine::new(weights, settings)),
            links: RwLock::new(links),
            options,
            seeded,
            origin: Instant::now(),
            facts: OnceLock::new(),
            moved: AtomicU64::new(0),
            served: watch::Sender::new(false),
        });
        let members: Vec<_> = peers.machine().members().collect();
        let greeted = &peers;
        let greeting = members.iter().zip(away).map(|(member, away)| async move {
            match away {
                Some(error) => Err(error),
                None => greeted.greet(*member).await,
            }
        });
        // Before any stream is routed: the first facts decide what model this is a pool of.
        let answers = join_all(greeting).await;
        let (mut first, mut served) = (None, false);
        for answer in answers {
            match answer {
                Ok(()) => served = true,
                // Different vocabularies at the start are a mistake of the operator. Later only that peer is not used.
                Err(error) if error.reason == LmtpReason::InvalidValue => return Err(error),
                Err(error) => {
                    first.get_or_insert(error);
                }
            }
        }
        if let Some(error) = first.filter(|_| !served) {
            return Err(error);
        }
        // Before the watch tasks exist, which report changes only.
        peers.report_conditions(&peers.machine());
        let watches = members.into_iter().map(|member| watching(&peers, member));
        Ok(Self(Arc::new(PoolHandle {
            watches: Mutex::new(watches.collect()),
            peers,
        })))
    }

    /// Returns the facts of the model, as the first peer that answered reported them: the JSON of `model_info`.
    #[must_use]
    pub fn facts(&self) -> Option<&str> {
        self.0.peers.facts.get().map(String::as_str)
    }

    /// Generates tokens, until an optional deadline. Nothing is sent before the stream is polled; errors are items of
    /// it.
    pub fn generate(&self, wanted: GenerateRequest, deadline: Option<Instant>) -> PooledItems {
        self.begin(StreamDemand::Generate(wanted), deadline)
    }

    /// Scores tokens, in the same way.
    pub fn score(&self, wanted: Score) -> PooledItems {
        self.begin(StreamDemand::Score(wanted), None)
    }

    /// Returns whether a peer has sent values as log-probabilities that are not (LM-711).
    #[must_use]
    pub fn raw_logprobs(&self) -> bool {
        let links = self.0.peers.links();
        links.iter().any(|link| link.client.raw_logprobs())
    }

    /// Returns the current state of the peers.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerStatus> {
        let peers = &self.0.peers;
        let machine = peers.machine();
        let links = peers.links();
        let slot = |member: PoolMember| PeerStatus {
            target: links[member.index()].target.clone(),
            condition: machine.condition(member),
            streams: machine.open(member),
        };
        machine.members().map(slot).collect()
    }

    /// Replaces the configured peers. Peers that are not named are drained, and restored when they are named again; new
    /// ones are probed at once, and used as soon as their facts match those of the others (LM-805). Returns the
    /// addresses of the new ones.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn keep(&self, endpoints: Vec<PoolEndpoint>) -> Vec<String> {
        let options = self.0.peers.options.clone();
        let named = endpoints.into_iter().map(|endpoint| {
            let target = format!("{:?}", endpoint.address);
            let options = options.clone();
            let link = move |target: String| {
                let client = LmtpClient::connecting(endpoint.address, options);
                PeerLink::new(client, endpoint.model, target)
            };
            (target, endpoint.weight, link)
        });
        self.keep_those(named)
    }

    fn keep_those(
        &self,
        named: impl Iterator<Item = (String, u32, impl FnOnce(String) -> PeerLink)>,
    ) -> Vec<String> {
        let peers = &self.0.peers;
        let (mut machine, now) = (peers.machine(), peers.now());
        let (mut retained, mut added) = (Vec::new(), Vec::new());
        for (slot, weight, link) in named {
            let at = peers.links().iter().position(|link| link.target == slot);
            let known = machine.members().find(|member| Some(member.index()) == at);
            if let Some(member) = known {
                machine.restore(member, now);
                machine.set_weight(member, weight);
                retained.push(member);
                continue;
            }
            // The link first: every member of the machine must have one, and the watch task asks for it at once.
            peers.push(link(slot.clone()));
            let member = machine.add(weight, now);
            let watches = self.0.watches.lock();
            watches
                .unwrap_or_else(PoisonError::into_inner)
                .push(watching(peers, member));
            retained.push(member);
            added.push(slot);
        }
        for member in machine.members() {
            if !retained.contains(&member) {
                machine.remove(member);
            }
        }
        peers.report_conditions(&machine);
        added
    }

    /// Returns a channel that tells whether any peer can be used.
    #[must_use]
    pub fn served(&self) -> watch::Receiver<bool> {
        self.0.peers.served.subscribe()
    }

    /// Returns the number of streams that continued at another peer since the pool was created.
    #[must_use]
    pub fn moved(&self) -> u64 {
        self.0.peers.moved.load(Ordering::Relaxed)
    }

    fn begin(&self, work: StreamDemand, deadline: Option<Instant>) -> PooledItems {
        let peers = Arc::clone(&self.0.peers);
        PooledItems {
            conditions: WatchStream::from_changes(peers.served.subscribe()),
            relayed: RelayedStream::new(work, peers.seeded),
            peers,
            deadline,
            location: StreamLocation::Next(None),
            target: None,
        }
    }
}

impl fmt::Debug for LmtpPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("peers", &self.peers())
            .finish_non_exhaustive()
    }
}

impl PeerLink {
    fn new(client: LmtpClient, model: String, slot: String) -> Self {
        let connected = client.connected();
        Self {
            client,
            model,
            target: slot,
            connected,
        }
    }
}

impl PoolPeers {
    fn machine(&self) -> MutexGuard<'_, machine::PoolMachine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn links(&self) -> RwLockReadGuard<'_, Vec<Arc<PeerLink>>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, link: PeerLink) {
        let links = self.links.write();
        links
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::new(link));
    }

    fn link(&self, member: PoolMember) -> Arc<PeerLink> {
        Arc::clone(&self.links()[member.index()])
    }

    fn now(&self) -> Time {
        Time::new(self.origin.elapsed())
    }

    /// The first probe. A peer that is connected but does not answer in time is used nevertheless.
    async fn greet(&self, member: PoolMember) -> Result<(), LmtpError> {
        // The lock is acquired after the answer: it is never held across an await.
        let asked = self.probe(member).await;
        let (mut machine, now) = (self.machine(), self.now());
        let probe = match &asked {
            Ok(()) => ProbeOutcome::Answered(self.link(member).client.load()),
            Err(error) if error.reason == LmtpReason::Timeout => {
                machine.met(member, now);
                ProbeOutcome::Missed
            }
            Err(_) => ProbeOutcome::Missed,
        };
        machine.probed(member, probe, now);
        match asked {
            Err(error) if error.reason != LmtpReason::Timeout => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Checks that a peer serves the same model as the others.
    async fn probe(&self, member: PoolMember) -> Result<(), LmtpError> {
        let link = self.link(member);
        let received = link.client.received_messages();
        let facts = match link.client.model_info(&link.model).await {
            // Another message was received meanwhile, so the peer is busy, not dead.
            Err(error)
                if error.reason == LmtpReason::Timeout
                    && link.client.received_messages() != received =>
            {
                return Ok(());
            }
            reported => reported?,
        };
        // Whoever answers first decides. The others are compared with that and never with each other, so all of them
        // agree.
        let agreed = self.facts.get_or_init(|| facts.clone());
        if is_same(agreed, &facts) {
            return Ok(());
        }
        tracing::warn!(
            upstream = link.target,
            "an upstream serves another vocabulary than the others of its pool"
        );
        let why = "upstreams of one pool serve models of different vocabularies";
        Err(LmtpError::new(LmtpReason::InvalidValue, why))
    }

    /// Wakes streams that wait for a peer, or whose peer may hang, and the tasks that probe the peers.
    fn report_conditions(&self, machine: &machine::PoolMachine) {
        self.served.send_replace(machine.is_served(None));
    }

    /// Returns whether a stream of this peer should move: the peer is connected but does not answer, and another one
    /// can be used.
    fn hangs(&self, member: PoolMember) -> bool {
        let machine = self.machine();
        machine.condition(member) == Condition::Away
            && machine.is_served(Some(member))
            // A lost connection has failed its streams already. One that is open but silent fails nobody.
            && *self.link(member).connected.borrow()
    }

    /// Selects the peer of a stream.
    fn route(
        self: &Arc<Self>,
        relayed: &RelayedStream,
        but: Option<PoolMember>,
    ) -> Result<PeerSlot, LmtpError> {
        let (mut machine, now) = (self.machine(), self.now());
        let mut changed = false;
        for (member, link) in machine.members().zip(&*self.links()) {
            let before = machine.condition(member);
            // Read here and not at each change: only routing needs the figure, and abandoned calls count in it
            // (LM-702).
            machine.counts(member, link.client.outstanding());
            if link.client.is_draining() {
                machine.drains(member);
            }
            // The watch task may not have seen the loss yet.
            if !*link.connected.borrow() {
                machine.lost(member, now);
            }
            changed |= machine.condition(member) != before;
        }
        if changed {
            self.report_conditions(&machine);
        }
        let member = machine.route(relayed.tokens(), but, now)?;
        Ok(PeerSlot {
            peers: Arc::clone(self),
            member,
            // A stream that is dropped without a verdict blames nobody.
            how: StreamOutcome::Left,
        })
    }

    fn ask(
        &self,
        member: PoolMember,
        relayed: &mut RelayedStream,
        deadline: Option<Instant>,
    ) -> PendingAsk {
        let link = self.link(member);
        let (client, model) = (link.client.clone(), link.model.clone());
        // Asked anew for each peer: a stream may move from one that knows token stops to one that does not (LM-704).
        let work = if client.is_base() {
            relayed.base_work()
        } else {
            relayed.work()
        };
        async move {
            match work {
                StreamDemand::Generate(wanted) => {
                    client.generate_until(&model, wanted, deadline).await
                }
                StreamDemand::Score(wanted) => client.score(&model, wanted).await,
            }
        }
        .boxed()
    }
}

/// Compares the vocabularies of two facts. Facts that do not describe it count as equal.
fn is_same(agreed: &str, facts: &str) -> bool {
    let read = |facts: &str| serde_json::from_str::<Value>(facts).unwrap_or_default();
    let (agreed, facts) = (read(agreed), read(facts));
    ["/vocab_size", "/tokenizer/sha256"].iter().all(|path| {
        let (mine, other) = (agreed.pointer(path), facts.pointer(path));
        mine.is_none() || other.is_none() || mine == other
    })
}

fn watching(peers: &Arc<PoolPeers>, member: PoolMember) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(watch(Arc::clone(peers), member)))
}

/// Probes a peer when that is due, and records the loss of its connection.
async fn watch(peers: Arc<PoolPeers>, member: PoolMember) {
    let link = peers.link(member);
    let mut connected = link.connected.clone();
    let mut conditions = peers.served.subscribe();
    loop {
        // Computed in each round, because routing, ended streams and the configuration change it too, in either
        // direction.
        let due = peers.machine().probe_at(member);
        let due = due.map(|at| peers.origin + at.since_origin());
        // All branches are cancel-safe: they only wait, and the due time is computed again.
        tokio::select! {
            // It cannot fail: the sender is in `peers`.
            _ = conditions.changed() => {}
            () = until(due) => {
                // The probe has its own timeout (`request_timeout`). What happens meanwhile is not missed: both
                // channels keep it.
                let probe = match peers.probe(member).await {
                    Ok(()) => ProbeOutcome::Answered(link.client.load()),
                    Err(_) => ProbeOutcome::Missed,
                };
                let before = peers.machine().condition(member);
                peers.machine().probed(member, probe, peers.now());
                peers.report(member, before);
            }
            changed = connected.changed() => {
                if changed.is_err() {
                    // The client does not reconnect, and its loss was recorded before.
                    return;
                }
                if !*connected.borrow_and_update() {
                    // The guard of each line ends with it: `report` locks the machine again.
                    let before = peers.machine().condition(member);
                    peers.machine().lost(member, peers.now());
                    peers.report(member, before);
                }
            }
        }
    }
}

impl PoolPeers {
    fn report(&self, member: PoolMember, before: Condition) {
        let after = self.machine().condition(member);
        if before != after {
            self.report_conditions(&self.machine());
        }
        let link = self.link(member);
        let upstream = &*link.target;
        match after {
            Condition::Away if before != after => {
                tracing::warn!(upstream, "an upstream of a pool does not answer");
            }
            Condition::Serving if before != after => {
                tracing::info!(upstream, "an upstream of a pool is available");
            }
            _ => {}
        }
    }
}

/// A stream's place at a peer; its outcome is recorded when this is dropped.
struct PeerSlot {
    peers: Arc<PoolPeers>,
    member: PoolMember,
    how: StreamOutcome,
}

impl Drop for PeerSlot {
    fn drop(&mut self) {
        let now = self.peers.now();
        let mut machine = self.peers.machine();
        let before = machine.condition(self.member);
        // On drop, so that a stream counts at its peer until it ends, in whatever way its reader leaves it.
        machine.ended(self.member, self.how, now);
        if before != machine.condition(self.member) {
            self.peers.report_conditions(&machine);
        }
    }
}

type PendingAsk = BoxFuture<'static, Result<super::StreamItems, LmtpError>>;

/// The state of a stream.
enum StreamLocation {
    /// It needs a peer, other than the one that was lost.
    Next(Option<PoolMember>),
    Asking(PendingAsk),
    Reading(super::StreamItems),
    Over,
}

/// The items of one stream of a pool; the last has a finish, or is an error. Dropping it abandons the stream.
#[must_use = "nothing is sent before the stream is polled"]
pub struct PooledItems {
    peers: Arc<PoolPeers>,
    relayed: RelayedStream,
    deadline: Option<Instant>,
    location: StreamLocation,
    target: Option<PeerSlot>,
    /// Yields an item whenever the condition of a peer has changed.
    conditions: WatchStream<bool>,
}

impl PooledItems {
    /// Returns whether the peer hangs, and the stream can continue at another one.
    fn is_stuck(&mut self, cx: &mut Context<'_>) -> bool {
        // Polled until it is pending, which registers the reader's waker, and from the first poll on, before there is a
        // peer: a stream without an item is not polled again, and its peer may hang already.
        let mut changed = false;
        while let Poll::Ready(Some(_)) = self.conditions.poll_next_unpin(cx) {
            changed = true;
        }
        let Some(slot) = &self.target else {
            return false;
        };
        changed && self.peers.hangs(slot.member) && self.relayed.can_move()
    }

    /// Handles an error of the peer: returns it for the reader, unless the stream continues at another peer.
    fn failed(&mut self, error: LmtpError) -> Option<LmtpError> {
        let member = self.target.as_ref().map(|slot| slot.member);
        // Before the question below: three engine errors in a row take the peer out of service (LM-804).
        self.leave(StreamOutcome::Failed(error.reason));
        self.location = StreamLocation::Over;
        // A silent peer may only be slow: without another peer, the reader gets the timeout.
        if error.reason == LmtpReason::Timeout && !self.peers.machine().is_served(member) {
            return Some(error);
        }
        let error = self.relayed.failed(error).err();
        if error.is_none() {
            self.location = StreamLocation::Next(member);
            self.peers.moved.fetch_add(1, Ordering::Relaxed);
        }
        error
    }

    fn finished(&mut self) {
        if let Some(slot) = &self.target {
            let mut machine = self.peers.machine();
            // The block ends the guard: `leave` drops the slot, which locks the machine again.
            machine.remember(slot.member, self.relayed.tokens());
        }
        self.leave(StreamOutcome::Well);
        self.location = StreamLocation::Over;
    }

    fn leave(&mut self, how: StreamOutcome) {
        if let Some(mut slot) = self.target.take() {
            slot.how = how;
        }
    }
}

impl Stream for PooledItems {
    type Item = Result<ReceivedItem, LmtpError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.is_stuck(cx)
            && let Some(error) = this.failed(lost("the upstream does not answer"))
        {
            return Poll::Ready(Some(Err(error)));
        }
        loop {
            let error = match &mut this.location {
                StreamLocation::Over => return Poll::Ready(None),
                // Routed when it is polled and not when it is created, so that the choice rests on the loads of this
                // moment.
                StreamLocation::Next(but) => match this.peers.route(&this.relayed, *but) {
                    Ok(slot) => {
                        let asking = this
                            .peers
                            .ask(slot.member, &mut this.relayed, this.deadline);
                        this.location = StreamLocation::Asking(asking);
                        this.target = Some(slot);
                        continue;
                    }
                    Err(error) => {
                        this.location = StreamLocation::Over;
                        return Poll::Ready(Some(Err(error)));
                    }
                },
                StreamLocation::Asking(asking) => match ready!(asking.poll_unpin(cx)) {
                    Ok(items) => {
                        this.location = StreamLocation::Reading(items);
                        continue;
                    }
                    Err(error) => error,
                },
                StreamLocation::Reading(items) => match ready!(items.poll_next_unpin(cx)) {
                    Some(Ok(mut item)) => {
                        let passed = this.relayed.item(&mut item);
                        match passed {
                            RelayedItem::Known => continue,
                            RelayedItem::Differs(error) => {
                                // Not the fault of this peer: with the same seed, the two simply compute differently
                                // (LM-806).
                                this.leave(StreamOutcome::Left);
                                this.location = StreamLocation::Over;
                                return Poll::Ready(Some(Err(error)));
                            }
                            RelayedItem::On if item.finish.is_none() => {}
                            RelayedItem::On => this.finished(),
                        }
                        return Poll::Ready(Some(Ok(item)));
                    }
                    Some(Err(error)) => error,
                    None => lost("the upstream's stream ended without a finish reason"),
                },
            };
            if let Some(error) = this.failed(error) {
                return Poll::Ready(Some(Err(error)));
            }
        }
    }
}

impl fmt::Debug for PooledItems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Items")
            .field("ended", &matches!(self.location, StreamLocation::Over))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
