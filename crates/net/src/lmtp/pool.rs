//! One model of several peers, as if it were one's (LM-801 to LM-806).
//!
//! Owns: the connections of a pool, the probes that show which of them serve, and [`Items`], one stream wherever it runs. Refuses to
//! know: which peer a stream goes to, and when one counts as lost; `proto::lmtp::pool` has that.
//!
//! ```text
//!   generate · score ─► route ─► a peer's client ─► Items
//!                         ▲  lost ◄──────┘            │ goes on elsewhere, unseen
//!                         └────────────────────────────┘
//! ```

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use std::task::{Context, Poll, ready};

use futures::future::{BoxFuture, join_all};
use futures::{FutureExt, Stream, StreamExt};
use sapwood_proto::lmtp::pool::{
    self as machine, Condition, Ended, Member, Passage, Passed, Probe,
};
use sapwood_proto::lmtp::{Fault, Generate, Reason, Received, Score, Work};
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::wire::{lost, until};
use super::{Address, Client, Options};

/// One peer of a pool.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Where it is.
    pub address: Address,
    /// What it calls the model.
    pub model: String,
    /// How much it takes beside the others.
    pub weight: u32,
}

/// Peers that serve one model. Clones share them; when the last is dropped, streams that run go on, and nothing else does.
#[derive(Clone)]
pub struct Pool(Arc<Kept>);

struct Kept {
    peers: Arc<Peers>,
    /// One for each peer.
    watches: Mutex<Vec<AbortOnDropHandle<()>>>,
}

/// What streams share.
struct Peers {
    /// In the order of the machine's members, whose lock is taken first. They only become more.
    links: RwLock<Vec<Arc<Link>>>,
    /// Never held while anything is awaited.
    machine: Mutex<machine::Pool>,
    /// How a peer is spoken to that is named later.
    options: Options,
    seeded: bool,
    /// Tokens that end a text, once somebody has said which.
    ends: OnceLock<Arc<[Token]>>,
    /// Of the machine's clock.
    origin: Instant,
    facts: OnceLock<String>,
    moved: AtomicU64,
    /// Whether any peer can be asked; told anew whenever the condition of one has changed.
    served: watch::Sender<bool>,
}

struct Link {
    client: Client,
    model: String,
    /// For people.
    place: String,
    connected: watch::Receiver<bool>,
    /// When it is to be probed has changed.
    news: Notify,
}

/// One peer as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Where it is, without its key.
    pub place: String,
    /// What may be asked of it.
    pub condition: Condition,
    /// Streams that run there.
    pub streams: u64,
}

impl Pool {
    /// Connects to every peer and asks what the model is. Peers that do not answer are asked again; one is enough.
    ///
    /// # Errors
    /// What the first peer says, if none answers; that of any that can never be used: its address is wrong, or it does
    /// not let us in. `invalid_value` if two have different vocabularies.
    pub async fn connect(
        endpoints: Vec<Endpoint>,
        options: &Options,
        settings: machine::Options,
    ) -> Result<Self, Fault> {
        let connecting = endpoints.into_iter().map(|endpoint| async move {
            let Endpoint {
                address,
                model,
                weight,
            } = endpoint;
            let place = format!("{address:?}");
            let connected = Client::connect(address.clone(), options.clone()).await;
            let (client, away) = match connected {
                Ok(client) => (client, None),
                Err(fault) if fault.reason.is_retryable() => {
                    (Client::connecting(address, options.clone()), Some(fault))
                }
                Err(fault) => return Err(fault),
            };
            Ok((Link::new(client, model, place), weight, away))
        });
        let linked: Result<Vec<_>, Fault> = join_all(connecting).await.into_iter().collect();
        Self::over(linked?, options.clone(), settings).await
    }

    /// A pool of one: whatever `client` speaks to.
    ///
    /// # Errors
    /// What the peer says; one that says nothing in time is asked all the same.
    pub async fn of(client: Client, model: &str) -> Result<Self, Fault> {
        let link = Link::new(client, model.to_owned(), String::new());
        Self::over(
            vec![(link, 1, None)],
            Options::default(),
            machine::Options::default(),
        )
        .await
    }

    /// Each peer with its weight, and why it is not there.
    async fn over(
        linked: Vec<(Link, u32, Option<Fault>)>,
        options: Options,
        settings: machine::Options,
    ) -> Result<Self, Fault> {
        let (mut links, mut weights, mut away) = (Vec::new(), Vec::new(), Vec::new());
        for (link, weight, why) in linked {
            links.push(Arc::new(link));
            weights.push(weight);
            away.push(why);
        }
        let seeded = settings.seeded;
        let peers = Arc::new(Peers {
            machine: Mutex::new(machine::Pool::new(weights, settings)),
            links: RwLock::new(links),
            options,
            seeded,
            ends: OnceLock::new(),
            origin: Instant::now(),
            facts: OnceLock::new(),
            moved: AtomicU64::new(0),
            served: watch::Sender::new(false),
        });
        let members: Vec<_> = peers.machine().members().collect();
        let greeted = &peers;
        let greeting = members.iter().zip(away).map(|(member, away)| async move {
            match away {
                Some(fault) => Err(fault),
                None => greeted.greet(*member).await,
            }
        });
        let answers = join_all(greeting).await;
        let (mut first, mut served) = (None, false);
        for answer in answers {
            match answer {
                Ok(()) => served = true,
                Err(fault) if fault.reason == Reason::InvalidValue => return Err(fault),
                Err(fault) => {
                    first.get_or_insert(fault);
                }
            }
        }
        if let Some(fault) = first.filter(|_| !served) {
            return Err(fault);
        }
        peers.tell_conditions(&peers.machine());
        let watches = members.into_iter().map(|member| watching(&peers, member));
        Ok(Self(Arc::new(Kept {
            watches: Mutex::new(watches.collect()),
            peers,
        })))
    }

    /// What the model is, as the first peer that answered says: the JSON of `model_info`.
    #[must_use]
    pub fn facts(&self) -> Option<&str> {
        self.0.peers.facts.get().map(String::as_str)
    }

    /// Asks for tokens, for a caller who does not wait longer than that. Nothing is asked before the stream is read; what
    /// fails is an item of it.
    pub fn generate(&self, wanted: Generate, deadline: Option<Instant>) -> Items {
        self.begin(Work::Generate(wanted), deadline)
    }

    /// Asks how likely tokens are, in the same way.
    pub fn score(&self, wanted: Score) -> Items {
        self.begin(Work::Score(wanted), None)
    }

    /// Whether a peer has sent log-probabilities that are none (LM-711).
    #[must_use]
    pub fn raw_logprobs(&self) -> bool {
        let links = self.0.peers.links();
        links.iter().any(|link| link.client.raw_logprobs())
    }

    /// These tokens end a text of the model. Peers of the base protocol, which know no `min_tokens`, are forbidden them for as long
    /// (LM-704); until somebody says which they are, such streams are refused. Said once.
    pub fn ends_with(&self, ends: impl Into<Arc<[Token]>>) {
        let _known_already = self.0.peers.ends.set(ends.into());
    }

    /// The peers as they are now.
    #[must_use]
    pub fn seats(&self) -> Vec<Seat> {
        let peers = &self.0.peers;
        let machine = peers.machine();
        let links = peers.links();
        let seat = |member: Member| Seat {
            place: links[member.index()].place.clone(),
            condition: machine.condition(member),
            streams: machine.open(member),
        };
        machine.members().map(seat).collect()
    }

    /// These are the peers that are configured now. Others are drained, and taken back when they are named again; new ones are
    /// probed at once, and asked as soon as they answer as those do that are here (LM-805). Gives the places of the new ones.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn keep(&self, endpoints: Vec<Endpoint>) -> Vec<String> {
        let options = self.0.peers.options.clone();
        let named = endpoints.into_iter().map(|endpoint| {
            let place = format!("{:?}", endpoint.address);
            let options = options.clone();
            let link = move |place: String| {
                let client = Client::connecting(endpoint.address, options);
                Link::new(client, endpoint.model, place)
            };
            (place, endpoint.weight, link)
        });
        self.keep_those(named)
    }

    fn keep_those(
        &self,
        named: impl Iterator<Item = (String, u32, impl FnOnce(String) -> Link)>,
    ) -> Vec<String> {
        let peers = &self.0.peers;
        let (mut machine, now) = (peers.machine(), peers.now());
        let (mut kept, mut added) = (Vec::new(), Vec::new());
        for (place, weight, link) in named {
            let at = peers.links().iter().position(|link| link.place == place);
            let known = machine.members().find(|member| Some(member.index()) == at);
            if let Some(member) = known {
                machine.restore(member, now);
                machine.weigh(member, weight);
                kept.push(member);
                continue;
            }
            peers.push(link(place.clone()));
            let member = machine.add(weight, now);
            let watches = self.0.watches.lock();
            watches
                .unwrap_or_else(PoisonError::into_inner)
                .push(watching(peers, member));
            kept.push(member);
            added.push(place);
        }
        for (member, link) in machine.members().zip(&*peers.links()) {
            if !kept.contains(&member) {
                machine.remove(member);
            }
            link.news.notify_one();
        }
        added
    }

    /// Whether any peer can be asked, and every change of it.
    #[must_use]
    pub fn served(&self) -> watch::Receiver<bool> {
        self.0.peers.served.subscribe()
    }

    /// Streams that went on at another peer since the pool began.
    #[must_use]
    pub fn moved(&self) -> u64 {
        self.0.peers.moved.load(Ordering::Relaxed)
    }

    fn begin(&self, work: Work, deadline: Option<Instant>) -> Items {
        let peers = Arc::clone(&self.0.peers);
        Items {
            conditions: Conditions::of(&peers),
            passage: Passage::new(work, peers.seeded)
                .with_ends(peers.ends.get().cloned().unwrap_or_default()),
            peers,
            deadline,
            leg: Leg::Next(None),
            place: None,
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("seats", &self.seats())
            .finish_non_exhaustive()
    }
}

impl Link {
    fn new(client: Client, model: String, place: String) -> Self {
        let connected = client.connected();
        Self {
            client,
            model,
            place,
            connected,
            news: Notify::new(),
        }
    }
}

impl Peers {
    fn machine(&self) -> MutexGuard<'_, machine::Pool> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn links(&self) -> RwLockReadGuard<'_, Vec<Arc<Link>>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, link: Link) {
        let links = self.links.write();
        links
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::new(link));
    }

    fn link(&self, member: Member) -> Arc<Link> {
        Arc::clone(&self.links()[member.index()])
    }

    fn now(&self) -> Time {
        Time::new(self.origin.elapsed())
    }

    /// The first probe: who is connected and says nothing is asked all the same.
    async fn greet(&self, member: Member) -> Result<(), Fault> {
        let asked = self.probe(member).await;
        let (mut machine, now) = (self.machine(), self.now());
        let probe = match &asked {
            Ok(()) => Probe::Answered(self.link(member).client.load()),
            Err(fault) if fault.reason == Reason::Timeout => {
                machine.met(member, now);
                Probe::Missed
            }
            Err(_) => Probe::Missed,
        };
        machine.probed(member, probe, now);
        match asked {
            Err(fault) if fault.reason != Reason::Timeout => Err(fault),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Whether a peer serves the model that the others serve.
    async fn probe(&self, member: Member) -> Result<(), Fault> {
        let link = self.link(member);
        let heard = link.client.heard();
        let facts = match link.client.model_info(&link.model).await {
            // It is busy, and not dead: something else came meanwhile.
            Err(fault) if fault.reason == Reason::Timeout && link.client.heard() != heard => {
                return Ok(());
            }
            told => told?,
        };
        let agreed = self.facts.get_or_init(|| facts.clone());
        if is_same(agreed, &facts) {
            return Ok(());
        }
        tracing::warn!(
            upstream = link.place,
            "an upstream serves another vocabulary than the others of its pool"
        );
        let why = "upstreams of one pool serve models of different vocabularies";
        Err(Fault::new(Reason::InvalidValue, why))
    }

    /// Whoever waits for a peer, or for one that hangs, looks again.
    fn tell_conditions(&self, machine: &machine::Pool) {
        self.served.send_replace(machine.is_served(None));
    }

    /// Whether a stream there had better go on elsewhere: its peer is connected and does not answer, and another one does.
    fn hangs(&self, member: Member) -> bool {
        let machine = self.machine();
        machine.condition(member) == Condition::Away
            && machine.is_served(Some(member))
            && *self.link(member).connected.borrow()
    }

    /// Where a stream goes.
    fn route(self: &Arc<Self>, passage: &Passage, but: Option<Member>) -> Result<Place, Fault> {
        let (mut machine, now) = (self.machine(), self.now());
        let mut changed = false;
        for (member, link) in machine.members().zip(&*self.links()) {
            let before = machine.condition(member);
            machine.counts(member, link.client.outstanding());
            if link.client.is_draining() {
                machine.drains(member);
            }
            // Its watch may not have had its turn yet.
            if !*link.connected.borrow() {
                machine.lost(member, now);
            }
            changed |= machine.condition(member) != before;
        }
        if changed {
            self.tell_conditions(&machine);
        }
        let member = machine.route(passage.tokens(), but, now)?;
        Ok(Place {
            peers: Arc::clone(self),
            member,
            how: Ended::Left,
        })
    }

    fn ask(&self, member: Member, passage: &mut Passage, deadline: Option<Instant>) -> Asking {
        let link = self.link(member);
        let (client, model) = (link.client.clone(), link.model.clone());
        let work = if client.is_base() {
            passage.base_work()
        } else {
            passage.work()
        };
        async move {
            match work {
                Work::Generate(wanted) => client.generate_until(&model, wanted, deadline).await,
                Work::Score(wanted) => client.score(&model, wanted).await,
            }
        }
        .boxed()
    }
}

/// Two that say nothing of it may be the same.
fn is_same(agreed: &str, facts: &str) -> bool {
    let read = |facts: &str| serde_json::from_str::<Value>(facts).unwrap_or_default();
    let (agreed, facts) = (read(agreed), read(facts));
    ["/vocab_size", "/tokenizer/sha256"].iter().all(|path| {
        let (mine, other) = (agreed.pointer(path), facts.pointer(path));
        mine.is_none() || other.is_none() || mine == other
    })
}

fn watching(peers: &Arc<Peers>, member: Member) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(watch(Arc::clone(peers), member)))
}

/// Probes a peer when that is due, and sees when its connection goes.
async fn watch(peers: Arc<Peers>, member: Member) {
    let link = peers.link(member);
    let mut connected = link.connected.clone();
    loop {
        let due = peers.machine().probe_at(member);
        let due = due.map(|at| peers.origin + at.since_origin());
        // All may be cancelled: they only wait, and what is due is looked at anew.
        tokio::select! {
            () = link.news.notified() => {}
            () = until(due) => {
                let probe = match peers.probe(member).await {
                    Ok(()) => Probe::Answered(link.client.load()),
                    Err(_) => Probe::Missed,
                };
                let before = peers.machine().condition(member);
                peers.machine().probed(member, probe, peers.now());
                peers.tell(member, before);
            }
            changed = connected.changed() => {
                if changed.is_err() {
                    // It cannot be made anew, and was lost before.
                    return;
                }
                if !*connected.borrow_and_update() {
                    let before = peers.machine().condition(member);
                    peers.machine().lost(member, peers.now());
                    peers.tell(member, before);
                }
            }
        }
    }
}

impl Peers {
    fn tell(&self, member: Member, before: Condition) {
        let after = self.machine().condition(member);
        if before != after {
            self.tell_conditions(&self.machine());
        }
        let link = self.link(member);
        let upstream = &*link.place;
        match after {
            Condition::Away if before != after => {
                tracing::warn!(upstream, "an upstream of a pool does not answer");
            }
            Condition::Serving if before != after => {
                tracing::info!(upstream, "an upstream of a pool serves");
            }
            _ => {}
        }
    }
}

/// A stream's place at a peer, until this is dropped.
struct Place {
    peers: Arc<Peers>,
    member: Member,
    how: Ended,
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = self.peers.now();
        let mut machine = self.peers.machine();
        let before = machine.condition(self.member);
        machine.ended(self.member, self.how, now);
        if before != machine.condition(self.member) {
            self.peers.tell_conditions(&machine);
        }
    }
}

/// Resolves when the condition of some peer has changed, again and again.
struct Conditions(BoxFuture<'static, watch::Receiver<bool>>);

impl Conditions {
    fn of(peers: &Peers) -> Self {
        Self::next(peers.served.subscribe())
    }

    fn next(mut served: watch::Receiver<bool>) -> Self {
        let next = async move {
            if served.changed().await.is_err() {
                // The sender lives as long as the stream, whose peers have it.
                std::future::pending::<()>().await;
            }
            served
        };
        Self(next.boxed())
    }

    /// Whether one has changed since the last look.
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(served) = self.0.poll_unpin(cx) else {
            return false;
        };
        *self = Self::next(served);
        // Looks for the next one, so that it wakes whoever reads.
        self.poll(cx);
        true
    }
}

type Asking = BoxFuture<'static, Result<super::Items, Fault>>;

/// Where a stream stands.
enum Leg {
    /// It is to be asked for, not of the peer that was lost.
    Next(Option<Member>),
    Asking(Asking),
    Reading(super::Items),
    Over,
}

/// The items of one stream of a pool; the last has a finish, or is an error. Dropping it abandons the stream.
#[must_use = "nothing is asked before it is read"]
pub struct Items {
    peers: Arc<Peers>,
    passage: Passage,
    deadline: Option<Instant>,
    leg: Leg,
    place: Option<Place>,
    conditions: Conditions,
}

impl Items {
    /// Whether the peer hangs, and the stream can go on elsewhere.
    fn is_stuck(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(place) = &self.place else {
            return false;
        };
        self.conditions.poll(cx) && self.peers.hangs(place.member) && self.passage.can_move()
    }

    /// The peer gave this error: what the reader is told, unless the stream goes on elsewhere.
    fn failed(&mut self, fault: Fault) -> Option<Fault> {
        let member = self.place.as_ref().map(|place| place.member);
        self.leave(Ended::Failed(fault.reason));
        self.leg = Leg::Over;
        // One that says nothing may only be slow: where there is no other, its reader is told what it waited for.
        if fault.reason == Reason::Timeout && !self.peers.machine().is_served(member) {
            return Some(fault);
        }
        let fault = self.passage.failed(fault).err();
        if fault.is_none() {
            self.leg = Leg::Next(member);
            self.peers.moved.fetch_add(1, Ordering::Relaxed);
        }
        fault
    }

    fn finished(&mut self) {
        if let Some(place) = &self.place {
            let mut machine = self.peers.machine();
            machine.remember(place.member, self.passage.tokens());
        }
        self.leave(Ended::Well);
        self.leg = Leg::Over;
    }

    fn leave(&mut self, how: Ended) {
        if let Some(mut place) = self.place.take() {
            place.how = how;
        }
    }
}

impl Stream for Items {
    type Item = Result<Received, Fault>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.is_stuck(cx)
            && let Some(fault) = this.failed(lost("the upstream does not answer"))
        {
            return Poll::Ready(Some(Err(fault)));
        }
        loop {
            let fault = match &mut this.leg {
                Leg::Over => return Poll::Ready(None),
                Leg::Next(but) => match this.peers.route(&this.passage, *but) {
                    Ok(place) => {
                        let asking = this
                            .peers
                            .ask(place.member, &mut this.passage, this.deadline);
                        this.leg = Leg::Asking(asking);
                        this.place = Some(place);
                        continue;
                    }
                    Err(fault) => {
                        this.leg = Leg::Over;
                        return Poll::Ready(Some(Err(fault)));
                    }
                },
                Leg::Asking(asking) => match ready!(asking.poll_unpin(cx)) {
                    Ok(items) => {
                        this.leg = Leg::Reading(items);
                        continue;
                    }
                    Err(fault) => fault,
                },
                Leg::Reading(items) => match ready!(items.poll_next_unpin(cx)) {
                    Some(Ok(mut item)) => {
                        let passed = this.passage.item(&mut item);
                        match passed {
                            Passed::Known => continue,
                            Passed::Differs(fault) => {
                                this.leave(Ended::Left);
                                this.leg = Leg::Over;
                                return Poll::Ready(Some(Err(fault)));
                            }
                            Passed::On if item.finish.is_none() => {}
                            Passed::On => this.finished(),
                            Passed::OnAndAgain => {
                                this.finished();
                                this.leg = Leg::Next(None);
                            }
                        }
                        return Poll::Ready(Some(Ok(item)));
                    }
                    Some(Err(fault)) => fault,
                    None => lost("the stream of the upstream has ended without an end"),
                },
            };
            if let Some(fault) = this.failed(fault) {
                return Poll::Ready(Some(Err(fault)));
            }
        }
    }
}

impl fmt::Debug for Items {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Items")
            .field("ended", &matches!(self.leg, Leg::Over))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
