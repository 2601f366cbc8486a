//! The task that keeps a client connected.
//!
//! Owns: the machine of the present connection, which call is whose, the calls that wait for a connection, when it is
//! tried again (LM-713). Refuses to know: transports, and what is asked.
//!
//! ```text
//!   connected ── lost: every call fails, at once ──► 100 ms, doubling to 10 s ──► dial ──► connected
//!                                                    calls wait here, for connect_timeout at most
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use sapwood_proto::lmtp as machine;
use sapwood_proto::lmtp::{Call, Event, Fault, Generate, Reason, Received, Score};
use sapwood_proto::time::Time;
use tokio::sync::mpsc::Permit;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::wire::{Wire, lost, until};
use super::{Options, Seen};

/// How a peer is reached. A value, so that a test can be one that comes and goes.
pub(super) trait Dial: Send + Sync + 'static {
    /// Connects, once.
    fn dial(&self) -> impl Future<Output = Result<Wire, Fault>> + Send;
    /// Whether it can be tried again.
    fn again(&self) -> bool {
        true
    }
}

/// One call, as it is asked for.
pub(super) struct Ask {
    pub(super) what: What,
    pub(super) told: mpsc::Sender<Result<Told, Fault>>,
    /// Until when it may wait for a connection.
    pub(super) by: Option<Instant>,
}

/// What is asked for: the model, and of it what.
pub(super) enum What {
    Generate(String, Generate),
    Score(String, Score),
    ModelInfo(String),
}

/// What came of a call.
pub(super) enum Told {
    Item(Received),
    /// The JSON of `model_info`.
    ModelInfo(String),
}

/// See the module's page.
pub(super) struct Keeper<D> {
    dial: D,
    options: Options,
    asks: mpsc::Receiver<Ask>,
    waiting: VecDeque<Ask>,
    seen: Arc<Seen>,
    connected: watch::Sender<bool>,
    /// Of the machine's clock.
    origin: Instant,
}

/// Why a connection is not served any more.
enum Over {
    Lost,
    /// Nobody can ask any more.
    Unwanted,
}

impl<D: Dial> Keeper<D> {
    pub(super) fn new(
        dial: D,
        options: Options,
        asks: mpsc::Receiver<Ask>,
        seen: Arc<Seen>,
        connected: watch::Sender<bool>,
    ) -> Self {
        Self {
            dial,
            options,
            asks,
            waiting: VecDeque::new(),
            seen,
            connected,
            origin: Instant::now(),
        }
    }

    /// Serves calls over `wire`, and over the next connection when that is lost, or when there was none.
    pub(super) async fn keep(mut self, wire: Option<Wire>) {
        let mut delay = DELAY_MIN;
        let mut wire = wire;
        loop {
            let Some(served) = (match wire.take() {
                Some(wire) => Some(wire),
                None => self.redial(&mut delay).await,
            }) else {
                return;
            };
            let began = Instant::now();
            self.connected.send_replace(true);
            let over = self.serve(served).await;
            self.connected.send_replace(false);
            if matches!(over, Over::Unwanted) || !self.dial.again() {
                return;
            }
            // One that comes and goes at once is not to be hammered.
            if began.elapsed() >= DELAY_MAX {
                delay = DELAY_MIN;
            }
        }
    }

    /// Serves calls until the connection is lost; then they all fail.
    async fn serve(&mut self, mut wire: Wire) -> Over {
        let mut served = Served {
            machine: machine::Client::new(self.options.patience()),
            open: BTreeMap::new(),
            seen: Arc::clone(&self.seen),
        };
        let over = loop {
            let wake = served
                .machine
                .wake_at()
                .map(|at| self.origin + at.since_origin());
            let late = self.waiting.front().and_then(|ask| ask.by);
            // All may be cancelled: frames and asks stay where they are, a permit goes back.
            tokio::select! {
                text = wire.incoming.next() => match text {
                    Some(text) => served.machine.handle(&text, now(self.origin)),
                    None => break Over::Lost,
                },
                permit = wire.outgoing.reserve(), if !self.waiting.is_empty() => {
                    let Ok(permit) = permit else {
                        break Over::Lost;
                    };
                    if let Some(ask) = self.waiting.pop_front() {
                        served.begin(ask, permit, now(self.origin));
                    }
                }
                ask = self.asks.recv(), if self.waiting.len() < WAITING_MAX => match ask {
                    Some(ask) => self.waiting.push_back(ask),
                    None => break Over::Unwanted,
                },
                () = until(late) => late_ask(&mut self.waiting),
                () = until(wake) => served.machine.tick(now(self.origin)),
            }
            served.tell();
        };
        served.machine.lost();
        served.tell();
        over
    }

    /// The next connection; `None` when nobody can ask any more.
    async fn redial(&mut self, delay: &mut Duration) -> Option<Wire> {
        loop {
            let span = jittered(*delay);
            *delay = (*delay * 2).min(DELAY_MAX);
            let dialling = async {
                sleep(span).await;
                self.dial.dial().await
            };
            tokio::pin!(dialling);
            loop {
                let late = self.waiting.front().and_then(|ask| ask.by);
                // All may be cancelled, and the first is not.
                tokio::select! {
                    dialled = &mut dialling => match dialled {
                        Ok(wire) => return Some(wire),
                        Err(fault) => {
                            tracing::debug!(why = %fault.message, "not connected");
                            break;
                        }
                    },
                    ask = self.asks.recv(), if self.waiting.len() < WAITING_MAX => {
                        self.waiting.push_back(ask?);
                    }
                    () = until(late) => late_ask(&mut self.waiting),
                }
            }
        }
    }
}

/// The first call in the line has waited for too long.
fn late_ask(waiting: &mut VecDeque<Ask>) {
    if let Some(ask) = waiting.pop_front() {
        // Nobody listens if this fails.
        let _ = ask
            .told
            .try_send(Err(lost("there is no connection to the upstream")));
    }
}

/// The calls of one connection.
struct Served {
    machine: machine::Client,
    open: BTreeMap<Call, mpsc::Sender<Result<Told, Fault>>>,
    seen: Arc<Seen>,
}

impl Served {
    fn begin(&mut self, ask: Ask, permit: Permit<'_, Bytes>, now: Time) {
        let Ask { what, told, .. } = ask;
        if told.is_closed() {
            return;
        }
        let begun = match &what {
            What::Generate(model, wanted) => self.machine.generate(model, wanted, now),
            What::Score(model, wanted) => self.machine.score(model, wanted, now),
            What::ModelInfo(model) => self.machine.model_info(model, now),
        };
        match begun {
            Ok((call, message)) => {
                permit.send(message);
                self.open.insert(call, told);
            }
            Err(fault) => {
                // Nobody listens if this fails.
                let _ = told.try_send(Err(fault));
            }
        }
    }

    /// Tells everybody what came of the calls.
    fn tell(&mut self) {
        while let Some(event) = self.machine.poll() {
            let (call, told, last) = match event {
                Event::Item(call, item) => {
                    let last = item.finish.is_some();
                    (call, Ok(Told::Item(item)), last)
                }
                Event::ModelInfo(call, facts) => (call, Ok(Told::ModelInfo(facts)), true),
                Event::Failed(call, fault) => (call, Err(fault), true),
            };
            let Some(to) = self.open.get(&call) else {
                continue;
            };
            if !last && to.capacity() > 1 {
                if to.try_send(told).is_ok() {
                    continue;
                }
            } else if last {
                let _ = to.try_send(told);
            } else {
                // The last place is for its end: others must not wait for who does not read.
                let why = "the items of the stream were not read as they came";
                let _ = to.try_send(Err(Fault::new(Reason::Stalled, why)));
            }
            self.open.remove(&call);
            self.machine.abandon(call);
        }
        let seen = &self.seen;
        seen.outstanding
            .store(self.machine.outstanding(), Ordering::Relaxed);
        seen.raw_logprobs
            .fetch_or(self.machine.raw_logprobs(), Ordering::Relaxed);
    }
}

fn now(origin: Instant) -> Time {
    Time::new(origin.elapsed())
}

/// Between half of it and all of it.
fn jittered(delay: Duration) -> Duration {
    let share = RandomState::new().hash_one(()) % 1_000;
    delay / 2 + delay * u32::try_from(share).unwrap_or(0) / 2_000
}

/// Calls that wait for a connection.
const WAITING_MAX: usize = 64;
/// LM-713.
const DELAY_MIN: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(10);
