//! The calls on one connection.
//!
//! ```text
//!   unasked ── MODEL_INFO ──► asked ── an answer, or a timeout ──► settled: calls are sent
//! ```
//!
//! Detached streams, which the peer retains for a grace period, outlive their connection: this value is then used with
//! the next connection and negotiates again.
//!
//! A slow reader blocks its own stream, and the connection with it, as long as no other stream waits for items; then
//! its stream fails.

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

/// The calls of one connection, with the client's state machine; see the module's documentation.
pub(super) struct ServedStreams {
    machine: machine::ClientMachine,
    options: ConnectOptions,
    seen: Arc<KeeperView>,
    origin: Instant,
    agreement: PeerFeatures,
    settled_at: Instant,
    open: BTreeMap<ClientCallId, StreamListener>,
    serials: BTreeMap<u64, ClientCallId>,
    /// Encoded CANCEL messages, at most one for each open call.
    unsent_cancels: VecDeque<Bytes>,
    pending: Option<PendingItem>,
}

/// The state of the negotiation of features.
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

/// An item that its reader has no room for.
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
            unsent_cancels: VecDeque::new(),
            pending: None,
        }
    }

    /// Returns when the first queued call fails for having waited too long. After the negotiation it first gets a
    /// chance to be sent.
    pub(super) fn late_at(&self, waiting: &VecDeque<KeeperCall>) -> Option<Instant> {
        let by = waiting.front()?.by?;
        // The negotiation has a timeout of its own, the one of its MODEL_INFO.
        let is_settled = self.agreement == PeerFeatures::Settled;
        is_settled.then(|| by.max(self.settled_at + SENDING))
    }

    /// Returns whether messages of the peer can be handled now.
    pub(super) const fn is_reading(&self) -> bool {
        self.pending.is_none()
    }

    pub(super) fn has_unsent(&self, waiting: &VecDeque<KeeperCall>) -> bool {
        // Calls wait for the negotiated features, which decide how they are encoded. CANCELs do not: their features
        // were agreed on before.
        let is_asked = matches!(self.agreement, PeerFeatures::Asked(_));
        let asks = !waiting.is_empty() || self.machine.detached_session().is_some();
        !self.unsent_cancels.is_empty() || (asks && !is_asked)
    }

    pub(super) fn receive(&mut self, text: &str) {
        // Every message counts, also one of an unknown stream: a pool takes it as a sign that the peer is alive.
        self.seen.received_messages.fetch_add(1, Ordering::Relaxed);
        self.machine.handle(text, now(self.origin));
    }

    /// Sends the most urgent message: a CANCEL, then the negotiation, then the resumption of detached streams, then the
    /// oldest queued call.
    pub(super) fn send_waiting(
        &mut self,
        waiting: &mut VecDeque<KeeperCall>,
        permit: Permit<'_, Bytes>,
    ) {
        // CANCELs come first, because they make room at the peer for the calls behind them.
        if let Some(cancel) = self.unsent_cancels.pop_front() {
            permit.send(cancel);
            return;
        }
        if self.agreement == PeerFeatures::Unasked
            // The first call provides the name: a reference server closes the connection on a message without `model`
            // (section 9). A MODEL_INFO call negotiates by itself, in `begin`.
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
                // The name is too long for a message; the call with it will fail.
                Err(_) => PeerFeatures::Settled,
            };
            return;
        }
        if self.machine.detached_session().is_some() {
            // Without a message the peer has not agreed to `resume` again, and the machine has failed the streams.
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
        // The reader was dropped while the call was queued. The peer never hears of it.
        if reported.is_closed() {
            return;
        }
        let (at, machine) = (now(self.origin), &mut self.machine);
        let begun = match &what {
            KeeperRequest::Generate(model, wanted, by) => {
                // The time in the queue counts towards the caller's deadline; the peer's clock is not used.
                let within = by.map(|by| by.saturating_duration_since(Instant::now()));
                machine.generate_within(model, wanted, within, at)
            }
            KeeperRequest::Score(model, wanted) => machine.score(model, wanted, at),
            KeeperRequest::ModelInfo(model) if self.options.features.is_empty() => {
                machine.model_info(model, at)
            }
            // Negotiates again each time, because the answer contains the peer's current load.
            KeeperRequest::ModelInfo(model) => machine.negotiate(model, self.options.features, at),
        };
        match begun {
            Ok((call, message)) => {
                permit.send(message);
                let is_stream = !matches!(what, KeeperRequest::ModelInfo(_));
                // This call has asked for the features too, so later calls wait for its answer.
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
                // Sending fails only if the caller no longer waits.
                let _ = reported.try_send(Err(error));
            }
        }
    }

    /// Returns when to call [`Self::tick`]. While an item is pending nothing is read, so only its stall timeout runs.
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
            // The stall timeout. The machine's timeouts do not run while nothing is read.
            Some(retained) => self.cut(retained.call),
            None => self.machine.tick(now(self.origin)),
        }
    }

    /// Resolves when there may be room for the pending item.
    pub(super) fn room(&self) -> impl Future<Output = ()> + use<> {
        let retained = self
            .pending
            .as_ref()
            .and_then(|retained| self.open.get(&retained.call));
        let reported = retained.map(|listener| listener.results.clone());
        // The future owns a clone of the sender: the other branches of the keeper's `select!` need `self`.
        async move {
            match reported {
                // Waits for room for an item and for an end after it; also resolves if the reader was dropped.
                Some(reported) => drop(reported.reserve_many(2).await),
                None => until(None).await,
            }
        }
    }

    /// Abandons streams whose readers were dropped.
    pub(super) fn abandon(&mut self, serials: &[u64]) {
        for serial in serials {
            if let Some(call) = self.serials.get(serial) {
                self.remove_call(*call);
            }
        }
    }

    /// Sends the results of the calls to their readers, as far as there is room, and updates the shared state.
    pub(super) fn deliver(&mut self) {
        let was_held = self.pending.is_some();
        // The pending item first, and then the events behind it: the items of a stream stay in order (LM-606).
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
            // While an item was pending nothing was read, so that time does not count towards the item timeouts.
            self.machine.resume(now(self.origin));
        }
        let (seen, machine) = (&self.seen, &self.machine);
        seen.outstanding
            .store(machine.outstanding(), Ordering::Relaxed);
        seen.raw_logprobs
            // Stays set over a reconnection, after which the machine is a new one.
            .fetch_or(machine.raw_logprobs(), Ordering::Relaxed);
        seen.draining
            .store(machine.is_draining(), Ordering::Relaxed);
        // Before that the machine has no features yet, and what the previous connection agreed on is the better guess.
        if self.agreement == PeerFeatures::Settled {
            let base = machine.features().is_empty();
            seen.base.store(base, Ordering::Relaxed);
        }
        let load = machine.load().unwrap_or(LOAD_UNKNOWN);
        seen.load.store(load, Ordering::Relaxed);
    }

    /// Fails all calls: the connection is lost.
    pub(super) fn lost(&mut self) {
        // A reader without room for the pending item receives the error after its unread items.
        self.pending = None;
        self.machine.lost();
        self.deliver();
        // After `deliver`, which reports the drain of the lost connection once more. The next one is to a server that
        // may have been restarted.
        self.seen.draining.store(false, Ordering::Relaxed);
    }

    /// Called when the connection is lost and may be replaced. Returns whether any stream can be resumed on the next
    /// one; all other calls fail (LM-965).
    pub(super) fn detach(&mut self) -> bool {
        if self.pending.is_some() || !self.machine.part() {
            self.lost();
            return false;
        }
        // Abandoned streams need no CANCEL: the peer cancels those that RESUME does not name (LM-965).
        self.unsent_cancels.clear();
        // Features belong to a connection, and RESUME may be sent only after `resume` was agreed on again (LM-965).
        self.agreement = PeerFeatures::Unasked;
        self.deliver();
        true
    }

    fn item(&mut self, call: ClientCallId, item: ReceivedItem, until: Option<Instant>) {
        let Some(listener) = self.open.get(&call) else {
            return;
        };
        // The last place is reserved for the end of the stream.
        // A closed queue is not a slow reader: sending to it fails at once, which cancels the stream.
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
        // A reader with room may wait for items that are behind this one on the connection. It must not wait for a slow
        // one.
        let waits = |(other, listener): (&ClientCallId, &StreamListener)| {
            *other != call && listener.is_stream && listener.results.capacity() > 1
        };
        if self.open.iter().any(waits) {
            return self.cut(call);
        }
        let timeout = self.options.stall_timeout;
        // The timeout runs from the first attempt, however often there is not enough room for the next.
        let until = until.or_else(|| timeout.map(|timeout| Instant::now() + timeout));
        self.pending = Some(PendingItem { call, item, until });
    }

    /// Fails a stream whose reader is too slow.
    fn cut(&mut self, call: ClientCallId) {
        if let Some(listener) = self.open.get(&call) {
            let why = "the items of the stream were not read fast enough";
            // Sending fails only if the reader was dropped.
            let _ = listener
                .results
                .try_send(Err(LmtpError::new(LmtpReason::Stalled, why)));
        }
        self.remove_call(call);
    }

    fn end(&mut self, call: ClientCallId, reported: Result<CallResult, LmtpError>) {
        // An error or a timeout settles it as well: the peer is then used with the base protocol.
        if self.agreement == PeerFeatures::Asked(call) {
            self.agreement = PeerFeatures::Settled;
            self.settled_at = Instant::now();
        }
        if let Some(listener) = self.open.remove(&call) {
            self.serials.remove(&listener.serial);
            // Sending fails only if the reader was dropped.
            // The place that `item` reserves for this.
            let _ = listener.results.try_send(reported);
        }
    }

    /// Removes a call without a reader; the peer is asked to cancel it, if that was agreed on.
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
        // The call stays outstanding in the machine until the peer ends it: it is load there until then (LM-702).
        self.unsent_cancels.extend(self.machine.abandon(call));
    }
}

/// Returns the model of a generate or score call.
fn model_of(ask: &KeeperCall) -> Option<&str> {
    match &ask.what {
        KeeperRequest::Generate(model, ..) | KeeperRequest::Score(model, _) => Some(model),
        KeeperRequest::ModelInfo(_) => None,
    }
}

/// How long a call may still wait for being sent after the negotiation.
const SENDING: Duration = Duration::from_secs(1);
