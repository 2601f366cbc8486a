//! The task behind a client: it owns the connection, sends the calls of all client handles over it, and reconnects.
//!
//! ```text
//!   connected ── lost ──► back-off: 100 ms, doubled to 10 s, of which a random half is taken off ──► dial ──► connected
//! ```
//!
//! When the connection is lost, calls that it carried fail at once, except resumable streams: these are detached, resume on
//! the next connection, and fail if the first attempt to make one does (LM-965). Calls that were not sent wait, up to
//! their `connect_timeout`.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use sapwood_proto::lmtp::{GenerateRequest, LmtpError, ReceivedItem, Score};
use sapwood_proto::time::Time;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::served::ServedStreams;
use super::wire::{LmtpConnection, lost, until};
use super::{ConnectOptions, KeeperView};

/// Dials a peer. A trait, so that a test can simulate a peer that comes and goes.
pub(super) trait DialPeer: Send + Sync + 'static {
    /// Connects, once.
    fn dial(&self) -> impl Future<Output = Result<LmtpConnection, LmtpError>> + Send;
    /// Whether it can be dialled again; a connection that was handed to the client cannot.
    fn again(&self) -> bool {
        true
    }
}

/// One call, as a client handle made it.
pub(super) struct KeeperCall {
    pub(super) what: KeeperRequest,
    pub(super) results: mpsc::Sender<Result<CallResult, LmtpError>>,
    /// Its number, with which it is abandoned.
    pub(super) serial: u64,
    /// Until when it may wait for a connection.
    pub(super) by: Option<Instant>,
}

/// The operation of a call, with the name of the model.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly every request generates, so a box would be an allocation for each of them"
)]
pub(super) enum KeeperRequest {
    /// With the deadline of its caller.
    Generate(String, GenerateRequest, Option<Instant>),
    Score(String, Score),
    ModelInfo(String),
}

/// A result of a call.
pub(super) enum CallResult {
    Item(ReceivedItem),
    /// The JSON of `model_info`.
    ModelInfo(String),
}

/// The task's state; see the module's documentation.
pub(super) struct LinkKeeper<D> {
    dial: D,
    options: ConnectOptions,
    asks: mpsc::Receiver<KeeperCall>,
    waiting: VecDeque<KeeperCall>,
    seen: Arc<KeeperView>,
    connected: watch::Sender<bool>,
    /// The origin of the machine's clock.
    origin: Instant,
}

/// Why a connection is no longer served.
enum ServiceEnd {
    Lost,
    /// All client handles are dropped.
    Abandoned,
}

impl<D: DialPeer> LinkKeeper<D> {
    pub(super) fn new(
        dial: D,
        options: ConnectOptions,
        asks: mpsc::Receiver<KeeperCall>,
        seen: Arc<KeeperView>,
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

    /// Serves calls over `wire`, and over a new connection whenever there is none.
    pub(super) async fn keep(mut self, wire: Option<LmtpConnection>) {
        let mut delay = DELAY_MIN;
        let mut wire = wire;
        // The calls of the previous connection, if any of them can be resumed on the next one.
        let mut detached = None;
        loop {
            let Some(wire) = (match wire.take() {
                Some(wire) => Some(wire),
                None => self.redial(&mut delay, &mut detached).await,
            }) else {
                return;
            };
            let began = Instant::now();
            // Not `send`, which changes nothing while there is no receiver.
            self.connected.send_replace(true);
            let served = detached.take();
            let mut served = served.unwrap_or_else(|| {
                ServedStreams::new(&self.options, Arc::clone(&self.seen), self.origin)
            });
            let over = self.serve(wire, &mut served).await;
            // Before the calls fail: a stream that a pool routes again at once must find this peer lost
            // (`PoolPeers::route`).
            self.connected.send_replace(false);
            if matches!(over, ServiceEnd::Abandoned) || !self.dial.again() {
                // Nothing can be resumed, because there is no next connection.
                return served.lost();
            }
            // Queued calls stay in `waiting`: they were not sent, so sending them on the next connection repeats
            // nothing (LM-713).
            detached = served.detach().then_some(served);
            // The back-off starts anew only after a connection that lasted: a peer that accepts and closes at once would
            // be dialled without a pause.
            if began.elapsed() >= DELAY_MAX {
                delay = DELAY_MIN;
            }
        }
    }

    /// Serves calls until the connection is lost.
    async fn serve(&mut self, mut wire: LmtpConnection, served: &mut ServedStreams) -> ServiceEnd {
        loop {
            // A call does not time out during the negotiation with a connected peer.
            let late = served.late_at(&self.waiting);
            // All branches are cancel-safe: frames and calls stay queued, a permit is returned, and abandoned streams
            // stay listed.
            tokio::select! {
                // While an item is pending nothing is read: the transport's flow control then slows the peer down.
                text = wire.incoming.next(), if served.is_reading() => match text {
                    Some(text) => served.receive(&text),
                    None => return ServiceEnd::Lost,
                },
                // A message is encoded only when there is room for it, because the call's timeout begins with that.
                permit = wire.outgoing.reserve(), if served.has_unsent(&self.waiting) => {
                    let Ok(permit) = permit else {
                        return ServiceEnd::Lost;
                    };
                    served.send_waiting(&mut self.waiting, permit);
                }
                // With a full queue the callers wait in the channel, and give up after their own `connect_timeout`.
                ask = self.asks.recv(), if self.waiting.len() < WAITING_MAX => match ask {
                    Some(ask) => self.waiting.push_back(ask),
                    None => return ServiceEnd::Abandoned,
                },
                () = until(late) => time_out_first(&mut self.waiting),
                () = until(served.wake_at()) => served.tick(),
                () = served.room() => {}
                () = self.seen.abandoned.changed() => served.abandon(&self.seen.abandoned.take()),
            }
            // After every branch: a message, a timeout or an abandoned stream may each have ended calls.
            served.deliver();
        }
    }

    /// Returns the next connection; `None` when all client handles are dropped. Detached calls fail if the first
    /// attempt does.
    async fn redial(
        &mut self,
        delay: &mut Duration,
        detached: &mut Option<ServedStreams>,
    ) -> Option<LmtpConnection> {
        loop {
            // The delay comes before the first attempt too: a server that has closed the connection is rarely back at
            // once.
            let span = jittered(*delay);
            *delay = (*delay * 2).min(DELAY_MAX);
            // The delay is part of the attempt, so that queued calls time out and dropped ones are removed during it
            // too.
            let dialling = async {
                sleep(span).await;
                self.dial.dial().await
            };
            tokio::pin!(dialling);
            loop {
                let late = self.waiting.front().and_then(|ask| ask.by);
                // All branches are cancel-safe, and `dialling` is pinned outside of the loop.
                tokio::select! {
                    dialled = &mut dialling => match dialled {
                        Ok(wire) => return Some(wire),
                        Err(error) => {
                            tracing::debug!(why = %error.message, "could not connect");
                            // Detached calls have no timeout, so their readers wait for one attempt and not for a peer
                            // that may never return.
                            if let Some(mut served) = detached.take() {
                                served.lost();
                            }
                            break;
                        }
                    },
                    ask = self.asks.recv(), if self.waiting.len() < WAITING_MAX => {
                        self.waiting.push_back(ask?);
                    }
                    () = until(late) => time_out_first(&mut self.waiting),
                    // Abandoned calls that are still queued are skipped when they are taken from the queue.
                    () = self.seen.abandoned.changed() => {
                        let removed = self.seen.abandoned.take();
                        if let Some(served) = detached.as_mut() {
                            served.abandon(&removed);
                            served.deliver();
                        }
                    }
                }
            }
        }
    }
}

/// Fails the first queued call, which has waited too long.
fn time_out_first(waiting: &mut VecDeque<KeeperCall>) {
    if let Some(ask) = waiting.pop_front() {
        // Sending fails only if the caller no longer waits.
        let _ = ask
            .results
            .try_send(Err(lost("there is no connection to the upstream")));
    }
}

/// Returns the time of the machine's clock.
pub(super) fn now(origin: Instant) -> Time {
    Time::new(origin.elapsed())
}

/// Returns a random delay between half of it and all of it.
fn jittered(delay: Duration) -> Duration {
    // The clients of a server that restarts must not all dial at the same moment (LM-713). The standard library seeds
    // each hasher at random, which is random enough here.
    let share = RandomState::new().hash_one(()) % 1_000;
    delay / 2 + delay * u32::try_from(share).unwrap_or(0) / 2_000
}

/// The maximum of calls that were taken from the client handles and are not sent yet: there is no connection, it is being
/// negotiated, or there is no room to write. As many more wait in the channel (`ASKS_MAX`), the others in their callers.
const WAITING_MAX: usize = 64;
/// The first and the longest delay before a reconnection (LM-713).
const DELAY_MIN: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(10);
