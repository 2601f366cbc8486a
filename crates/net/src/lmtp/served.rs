//! The calls on one connection.
//!
//! ```text
//!   unasked ── MODEL_INFO ──► asked ── an answer, or none in time ──► settled: calls go out
//! ```
//!
//! Streams that the peer keeps for a while outlive their connection: then this goes on over the next one, settled anew.
//!
//! A reader that is slow holds its own stream up, and the peer with it, as long as nobody else waits for that peer; then it is cut off.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use sapwood_proto::lmtp as machine;
use sapwood_proto::lmtp::{ClientCallId, ClientEvent, LmtpError, LmtpReason, ReceivedItem};
use tokio::sync::mpsc;
use tokio::sync::mpsc::Permit;
use tokio::time::Instant;

use super::keeper::{CallResult, KeeperCall, KeeperRequest, now};
use super::wire::until;
use super::{ConnectOptions, KeeperView, LOAD_UNKNOWN};

/// See the module's page.
pub(super) struct ServedStreams {
    machine: machine::ClientMachine,
    options: ConnectOptions,
    seen: Arc<KeeperView>,
    origin: Instant,
    agreement: PeerFeatures,
    settled_at: Instant,
    open: BTreeMap<ClientCallId, StreamListener>,
    serials: BTreeMap<u64, ClientCallId>,
    /// CANCELs, at most one for each open call.
    last_words: VecDeque<Bytes>,
    pending: Option<PendingItem>,
}

/// What is known of what the peer can do.
#[derive(Clone, Copy, PartialEq)]
enum PeerFeatures {
    Unasked,
    Asked(ClientCallId),
    Settled,
}

struct StreamListener {
    results: mpsc::Sender<Result<CallResult, LmtpError>>,
    serial: u64,
    is_stream: bool,
}

/// An item for which its reader has no room.
struct PendingItem {
    call: ClientCallId,
    item: ReceivedItem,
    until: Option<Instant>,
}

impl ServedStreams {
    pub(super) fn new(options: &ConnectOptions, seen: Arc<KeeperView>, origin: Instant) -> Self {
        let agreement = if options.features.is_empty() {
            PeerFeatures::Settled
        } else {
            PeerFeatures::Unasked
        };
        Self {
            machine: machine::ClientMachine::new(options.timeouts()),
            options: options.clone(),
            seen,
            origin,
            agreement,
            settled_at: Instant::now(),
            open: BTreeMap::new(),
            serials: BTreeMap::new(),
            last_words: VecDeque::new(),
            pending: None,
        }
    }

    /// When the first call in the line has waited for too long: not before what can be sent has had its chance to be.
    pub(super) fn late_at(&self, waiting: &VecDeque<KeeperCall>) -> Option<Instant> {
        let by = waiting.front()?.by?;
        let is_settled = self.agreement == PeerFeatures::Settled;
        is_settled.then(|| by.max(self.settled_at + SENDING))
    }

    /// What the peer says can be taken in.
    pub(super) const fn is_reading(&self) -> bool {
        self.pending.is_none()
    }

    pub(super) fn has_words(&self, waiting: &VecDeque<KeeperCall>) -> bool {
        let is_asked = matches!(self.agreement, PeerFeatures::Asked(_));
        let asks = !waiting.is_empty() || self.machine.detached_session().is_some();
        !self.last_words.is_empty() || (asks && !is_asked)
    }

    pub(super) fn receive(&mut self, text: &str) {
        self.seen.received_messages.fetch_add(1, Ordering::Relaxed);
        self.machine.handle(text, now(self.origin));
    }

    /// Sends what comes first: a CANCEL, what has to be agreed on, what is to be come back to, the call that waits for longest.
    pub(super) fn send_waiting(
        &mut self,
        waiting: &mut VecDeque<KeeperCall>,
        permit: Permit<'_, Bytes>,
    ) {
        if let Some(words) = self.last_words.pop_front() {
            permit.send(words);
            return;
        }
        if self.agreement == PeerFeatures::Unasked
            && let Some(model) = self
                .machine
                .detached_session()
                .or_else(|| model_of(waiting.front()?))
        {
            let model = &model.to_owned();
            let features = self.options.features;
            let asked = self.machine.negotiate(model, features, now(self.origin));
            self.agreement = match asked {
                Ok((call, message)) => {
                    permit.send(message);
                    PeerFeatures::Asked(call)
                }
                // A name that is too long for a message; its own call will fail.
                Err(_) => PeerFeatures::Settled,
            };
            return;
        }
        if self.machine.detached_session().is_some() {
            if let Some(message) = self.machine.come_back(now(self.origin)) {
                permit.send(message);
            }
            return;
        }
        if let Some(ask) = waiting.pop_front() {
            self.begin(ask, permit);
        }
    }

    fn begin(&mut self, ask: KeeperCall, permit: Permit<'_, Bytes>) {
        let KeeperCall {
            what,
            results: reported,
            serial,
            ..
        } = ask;
        if reported.is_closed() {
            return;
        }
        let (at, machine) = (now(self.origin), &mut self.machine);
        let begun = match &what {
            KeeperRequest::Generate(model, wanted, by) => {
                let within = by.map(|by| by.saturating_duration_since(Instant::now()));
                machine.generate_within(model, wanted, within, at)
            }
            KeeperRequest::Score(model, wanted) => machine.score(model, wanted, at),
            KeeperRequest::ModelInfo(model) if self.options.features.is_empty() => {
                machine.model_info(model, at)
            }
            // Asked for again each time: how busy the peer is stands in the answer.
            KeeperRequest::ModelInfo(model) => machine.negotiate(model, self.options.features, at),
        };
        match begun {
            Ok((call, message)) => {
                permit.send(message);
                let is_stream = !matches!(what, KeeperRequest::ModelInfo(_));
                if !is_stream && self.agreement == PeerFeatures::Unasked {
                    self.agreement = PeerFeatures::Asked(call);
                }
                let listener = StreamListener {
                    results: reported,
                    serial,
                    is_stream,
                };
                self.open.insert(call, listener);
                self.serials.insert(serial, call);
            }
            Err(error) => {
                // Nobody listens if this fails.
                let _ = reported.try_send(Err(error));
            }
        }
    }

    /// When to call [`Self::tick`]. Nothing is late that is not read.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match &self.pending {
            Some(retained) => retained.until,
            None => {
                let at = self.machine.wake_at()?;
                Some(self.origin + at.since_origin())
            }
        }
    }

    pub(super) fn tick(&mut self) {
        match self.pending.take() {
            Some(retained) => self.cut(retained.call),
            None => self.machine.tick(now(self.origin)),
        }
    }

    /// Resolves when there may be room for what is held.
    pub(super) fn room(&self) -> impl Future<Output = ()> + use<> {
        let retained = self
            .pending
            .as_ref()
            .and_then(|retained| self.open.get(&retained.call));
        let reported = retained.map(|listener| listener.results.clone());
        async move {
            match reported {
                // Room for an item, and for an end behind it; or nobody is there.
                Some(reported) => drop(reported.reserve_many(2).await),
                None => until(None).await,
            }
        }
    }

    /// Nobody reads these streams any more.
    pub(super) fn abandon(&mut self, serials: &[u64]) {
        for serial in serials {
            if let Some(call) = self.serials.get(serial) {
                self.remove_call(*call);
            }
        }
    }

    /// Tells everybody what came of the calls, as far as there is room.
    pub(super) fn deliver(&mut self) {
        let was_held = self.pending.is_some();
        if let Some(PendingItem { call, item, until }) = self.pending.take() {
            self.item(call, item, until);
        }
        while self.pending.is_none()
            && let Some(event) = self.machine.poll()
        {
            match event {
                ClientEvent::Item(call, item) if item.finish.is_none() => {
                    self.item(call, item, None)
                }
                ClientEvent::Item(call, item) => self.end(call, Ok(CallResult::Item(item))),
                ClientEvent::ModelInfo(call, facts) => {
                    self.end(call, Ok(CallResult::ModelInfo(facts)))
                }
                ClientEvent::Failed(call, error) => self.end(call, Err(error)),
            }
        }
        if was_held && self.pending.is_none() {
            // What was not read meanwhile is not late.
            self.machine.resume(now(self.origin));
        }
        let (seen, machine) = (&self.seen, &self.machine);
        seen.outstanding
            .store(machine.outstanding(), Ordering::Relaxed);
        seen.raw_logprobs
            .fetch_or(machine.raw_logprobs(), Ordering::Relaxed);
        seen.draining
            .store(machine.is_draining(), Ordering::Relaxed);
        if self.agreement == PeerFeatures::Settled {
            let base = machine.features().is_empty();
            seen.base.store(base, Ordering::Relaxed);
        }
        let load = machine.load().unwrap_or(LOAD_UNKNOWN);
        seen.load.store(load, Ordering::Relaxed);
    }

    /// The connection is gone.
    pub(super) fn lost(&mut self) {
        // There is nothing to wait for: a reader without room for an item finds the end behind what it has.
        self.pending = None;
        self.machine.lost();
        self.deliver();
        self.seen.draining.store(false, Ordering::Relaxed);
    }

    /// The connection is gone, and there may be another one. Returns whether any stream waits for that; all other calls have
    /// failed (LM-965).
    pub(super) fn parted(&mut self) -> bool {
        if self.pending.is_some() || !self.machine.part() {
            self.lost();
            return false;
        }
        self.last_words.clear();
        self.agreement = PeerFeatures::Unasked;
        self.deliver();
        true
    }

    fn item(&mut self, call: ClientCallId, item: ReceivedItem, until: Option<Instant>) {
        let Some(listener) = self.open.get(&call) else {
            return;
        };
        // The last place is for its end.
        if listener.results.capacity() > 1 || listener.results.is_closed() {
            if listener
                .results
                .try_send(Ok(CallResult::Item(item)))
                .is_err()
            {
                self.remove_call(call);
            }
            return;
        }
        let waits = |(other, listener): (&ClientCallId, &StreamListener)| {
            *other != call && listener.is_stream && listener.results.capacity() > 1
        };
        if self.open.iter().any(waits) {
            return self.cut(call);
        }
        let timeout = self.options.stall_timeout;
        let until = until.or_else(|| timeout.map(|timeout| Instant::now() + timeout));
        self.pending = Some(PendingItem { call, item, until });
    }

    /// Its reader is too slow.
    fn cut(&mut self, call: ClientCallId) {
        if let Some(listener) = self.open.get(&call) {
            let why =
                "the items of the stream were not read as they came, and others wait for theirs";
            // Nobody listens if this fails.
            let _ = listener
                .results
                .try_send(Err(LmtpError::new(LmtpReason::Stalled, why)));
        }
        self.remove_call(call);
    }

    fn end(&mut self, call: ClientCallId, reported: Result<CallResult, LmtpError>) {
        if self.agreement == PeerFeatures::Asked(call) {
            self.agreement = PeerFeatures::Settled;
            self.settled_at = Instant::now();
        }
        if let Some(listener) = self.open.remove(&call) {
            self.serials.remove(&listener.serial);
            // Nobody listens if this fails.
            let _ = listener.results.try_send(reported);
        }
    }

    /// Nobody listens to a call any more; its peer is asked to stop, if that was agreed on.
    fn remove_call(&mut self, call: ClientCallId) {
        if let Some(listener) = self.open.remove(&call) {
            self.serials.remove(&listener.serial);
        }
        if self
            .pending
            .as_ref()
            .is_some_and(|retained| retained.call == call)
        {
            self.pending = None;
        }
        self.last_words.extend(self.machine.abandon(call));
    }
}

/// The model that a call asks for tokens, or for what they are worth.
fn model_of(ask: &KeeperCall) -> Option<&str> {
    match &ask.what {
        KeeperRequest::Generate(model, ..) | KeeperRequest::Score(model, _) => Some(model),
        KeeperRequest::ModelInfo(_) => None,
    }
}

/// What a call that waited for an agreement has for being sent.
const SENDING: Duration = Duration::from_secs(1);
