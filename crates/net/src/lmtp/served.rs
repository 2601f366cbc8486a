//! The calls of one connection.
//!
//! Owns: the machine, which call is whose, what is agreed on before the first of them, and what becomes of items that nobody reads.
//! Refuses to know: connections.
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
use sapwood_proto::lmtp::{Call, Event, Fault, Reason, Received};
use tokio::sync::mpsc;
use tokio::sync::mpsc::Permit;
use tokio::time::Instant;

use super::keeper::{Ask, Told, What, now};
use super::wire::until;
use super::{LOAD_UNKNOWN, Options, Seen};

/// See the module's page.
pub(super) struct Served {
    machine: machine::Client,
    options: Options,
    seen: Arc<Seen>,
    origin: Instant,
    agreement: Agreement,
    settled_at: Instant,
    open: BTreeMap<Call, Listener>,
    serials: BTreeMap<u64, Call>,
    /// CANCELs, at most one for each open call.
    last_words: VecDeque<Bytes>,
    held: Option<Held>,
}

/// What is known of what the peer can do.
#[derive(Clone, Copy, PartialEq)]
enum Agreement {
    Unasked,
    Asked(Call),
    Settled,
}

struct Listener {
    told: mpsc::Sender<Result<Told, Fault>>,
    serial: u64,
    is_stream: bool,
}

/// An item for which its reader has no room.
struct Held {
    call: Call,
    item: Received,
    until: Option<Instant>,
}

impl Served {
    pub(super) fn new(options: &Options, seen: Arc<Seen>, origin: Instant) -> Self {
        let agreement = if options.features.is_empty() {
            Agreement::Settled
        } else {
            Agreement::Unasked
        };
        Self {
            machine: machine::Client::new(options.patience()),
            options: options.clone(),
            seen,
            origin,
            agreement,
            settled_at: Instant::now(),
            open: BTreeMap::new(),
            serials: BTreeMap::new(),
            last_words: VecDeque::new(),
            held: None,
        }
    }

    /// When the first call in the line has waited for too long: not before what can be sent has had its chance to be.
    pub(super) fn late_at(&self, waiting: &VecDeque<Ask>) -> Option<Instant> {
        let by = waiting.front()?.by?;
        let is_settled = self.agreement == Agreement::Settled;
        is_settled.then(|| by.max(self.settled_at + SENDING))
    }

    /// What the peer says can be taken in.
    pub(super) const fn is_reading(&self) -> bool {
        self.held.is_none()
    }

    pub(super) fn has_words(&self, waiting: &VecDeque<Ask>) -> bool {
        let is_asked = matches!(self.agreement, Agreement::Asked(_));
        let asks = !waiting.is_empty() || self.machine.apart().is_some();
        !self.last_words.is_empty() || (asks && !is_asked)
    }

    pub(super) fn heard(&mut self, text: &str) {
        self.seen.heard.fetch_add(1, Ordering::Relaxed);
        self.machine.handle(text, now(self.origin));
    }

    /// Sends what comes first: a CANCEL, what has to be agreed on, what is to be come back to, the call that waits for longest.
    pub(super) fn speak(&mut self, waiting: &mut VecDeque<Ask>, permit: Permit<'_, Bytes>) {
        if let Some(words) = self.last_words.pop_front() {
            permit.send(words);
            return;
        }
        if self.agreement == Agreement::Unasked
            && let Some(model) = self.machine.apart().or_else(|| model_of(waiting.front()?))
        {
            let model = &model.to_owned();
            let features = self.options.features;
            let asked = self.machine.negotiate(model, features, now(self.origin));
            self.agreement = match asked {
                Ok((call, message)) => {
                    permit.send(message);
                    Agreement::Asked(call)
                }
                // A name that is too long for a message; its own call will be told.
                Err(_) => Agreement::Settled,
            };
            return;
        }
        if self.machine.apart().is_some() {
            if let Some(message) = self.machine.come_back(now(self.origin)) {
                permit.send(message);
            }
            return;
        }
        if let Some(ask) = waiting.pop_front() {
            self.begin(ask, permit);
        }
    }

    fn begin(&mut self, ask: Ask, permit: Permit<'_, Bytes>) {
        let Ask {
            what, told, serial, ..
        } = ask;
        if told.is_closed() {
            return;
        }
        let (at, machine) = (now(self.origin), &mut self.machine);
        let begun = match &what {
            What::Generate(model, wanted, by) => {
                let within = by.map(|by| by.saturating_duration_since(Instant::now()));
                machine.generate_within(model, wanted, within, at)
            }
            What::Score(model, wanted) => machine.score(model, wanted, at),
            What::ModelInfo(model) if self.options.features.is_empty() => {
                machine.model_info(model, at)
            }
            // Asked for again each time: how busy the peer is stands in the answer.
            What::ModelInfo(model) => machine.negotiate(model, self.options.features, at),
        };
        match begun {
            Ok((call, message)) => {
                permit.send(message);
                let is_stream = !matches!(what, What::ModelInfo(_));
                if !is_stream && self.agreement == Agreement::Unasked {
                    self.agreement = Agreement::Asked(call);
                }
                let listener = Listener {
                    told,
                    serial,
                    is_stream,
                };
                self.open.insert(call, listener);
                self.serials.insert(serial, call);
            }
            Err(fault) => {
                // Nobody listens if this fails.
                let _ = told.try_send(Err(fault));
            }
        }
    }

    /// When to call [`Self::tick`]. Nothing is late that is not read.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        match &self.held {
            Some(held) => held.until,
            None => {
                let at = self.machine.wake_at()?;
                Some(self.origin + at.since_origin())
            }
        }
    }

    pub(super) fn tick(&mut self) {
        match self.held.take() {
            Some(held) => self.cut(held.call),
            None => self.machine.tick(now(self.origin)),
        }
    }

    /// Resolves when there may be room for what is held.
    pub(super) fn room(&self) -> impl Future<Output = ()> + use<> {
        let held = self
            .held
            .as_ref()
            .and_then(|held| self.open.get(&held.call));
        let told = held.map(|listener| listener.told.clone());
        async move {
            match told {
                // Room for an item, and for an end behind it; or nobody is there.
                Some(told) => drop(told.reserve_many(2).await),
                None => until(None).await,
            }
        }
    }

    /// Nobody reads these streams any more.
    pub(super) fn abandon(&mut self, serials: &[u64]) {
        for serial in serials {
            if let Some(call) = self.serials.get(serial) {
                self.forget(*call);
            }
        }
    }

    /// Tells everybody what came of the calls, as far as there is room.
    pub(super) fn tell(&mut self) {
        let was_held = self.held.is_some();
        if let Some(Held { call, item, until }) = self.held.take() {
            self.item(call, item, until);
        }
        while self.held.is_none()
            && let Some(event) = self.machine.poll()
        {
            match event {
                Event::Item(call, item) if item.finish.is_none() => self.item(call, item, None),
                Event::Item(call, item) => self.end(call, Ok(Told::Item(item))),
                Event::ModelInfo(call, facts) => self.end(call, Ok(Told::ModelInfo(facts))),
                Event::Failed(call, fault) => self.end(call, Err(fault)),
            }
        }
        if was_held && self.held.is_none() {
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
        if self.agreement == Agreement::Settled {
            let base = machine.features().is_empty();
            seen.base.store(base, Ordering::Relaxed);
        }
        let load = machine.load().unwrap_or(LOAD_UNKNOWN);
        seen.load.store(load, Ordering::Relaxed);
    }

    /// The connection is gone.
    pub(super) fn lost(&mut self) {
        // There is nothing to wait for: whoever has no room for an item finds the end behind what it has.
        self.held = None;
        self.machine.lost();
        self.tell();
        self.seen.draining.store(false, Ordering::Relaxed);
    }

    /// The connection is gone, and there may be another one. Returns whether any stream waits for that; all other calls have
    /// failed (LM-965).
    pub(super) fn parted(&mut self) -> bool {
        if self.held.is_some() || !self.machine.part() {
            self.lost();
            return false;
        }
        self.last_words.clear();
        self.agreement = Agreement::Unasked;
        self.tell();
        true
    }

    fn item(&mut self, call: Call, item: Received, until: Option<Instant>) {
        let Some(listener) = self.open.get(&call) else {
            return;
        };
        // The last place is for its end.
        if listener.told.capacity() > 1 || listener.told.is_closed() {
            if listener.told.try_send(Ok(Told::Item(item))).is_err() {
                self.forget(call);
            }
            return;
        }
        let waits = |(other, listener): (&Call, &Listener)| {
            *other != call && listener.is_stream && listener.told.capacity() > 1
        };
        if self.open.iter().any(waits) {
            return self.cut(call);
        }
        let patience = self.options.stall_timeout;
        let until = until.or_else(|| patience.map(|patience| Instant::now() + patience));
        self.held = Some(Held { call, item, until });
    }

    /// Its reader is too slow.
    fn cut(&mut self, call: Call) {
        if let Some(listener) = self.open.get(&call) {
            let why =
                "the items of the stream were not read as they came, and others wait for theirs";
            // Nobody listens if this fails.
            let _ = listener
                .told
                .try_send(Err(Fault::new(Reason::Stalled, why)));
        }
        self.forget(call);
    }

    fn end(&mut self, call: Call, told: Result<Told, Fault>) {
        if self.agreement == Agreement::Asked(call) {
            self.agreement = Agreement::Settled;
            self.settled_at = Instant::now();
        }
        if let Some(listener) = self.open.remove(&call) {
            self.serials.remove(&listener.serial);
            // Nobody listens if this fails.
            let _ = listener.told.try_send(told);
        }
    }

    /// Nobody listens to a call any more; its peer is asked to stop, if that was agreed on.
    fn forget(&mut self, call: Call) {
        if let Some(listener) = self.open.remove(&call) {
            self.serials.remove(&listener.serial);
        }
        if self.held.as_ref().is_some_and(|held| held.call == call) {
            self.held = None;
        }
        self.last_words.extend(self.machine.abandon(call));
    }
}

/// The model that a call asks for tokens, or for what they are worth.
fn model_of(ask: &Ask) -> Option<&str> {
    match &ask.what {
        What::Generate(model, ..) | What::Score(model, _) => Some(model),
        What::ModelInfo(_) => None,
    }
}

/// What a call that waited for an agreement has for being sent.
const SENDING: Duration = Duration::from_secs(1);
