//! The task that keeps a client connected and reconnects it.
//!
//! ```text
//!   connected ── lost: every call fails, at once ──► 100 ms, doubling to 10 s ──► dial ──► connected
//!                      │                             calls wait here, for connect_timeout at most
//!                      └─ but for streams that the peer keeps: they fail if the first dial does, and go on after it (LM-965)
//! ```

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

/// How a peer is reached. A value, so that a test can be one that comes and goes.
pub(super) trait DialPeer: Send + Sync + 'static {
    /// Connects, once.
    fn dial(&self) -> impl Future<Output = Result<LmtpConnection, LmtpError>> + Send;
    /// Whether it can be tried again.
    fn again(&self) -> bool {
        true
    }
}

/// One call, as it is asked for.
pub(super) struct KeeperCall {
    pub(super) what: KeeperRequest,
    pub(super) results: mpsc::Sender<Result<CallResult, LmtpError>>,
    /// What it is called where it is given up.
    pub(super) serial: u64,
    /// Until when it may wait for a connection.
    pub(super) by: Option<Instant>,
}

/// What is asked for: the model, and of it what.
pub(super) enum KeeperRequest {
    /// And when nobody waits for it any more.
    Generate(String, GenerateRequest, Option<Instant>),
    Score(String, Score),
    ModelInfo(String),
}

/// What came of a call.
pub(super) enum CallResult {
    Item(ReceivedItem),
    /// The JSON of `model_info`.
    ModelInfo(String),
}

/// See the module's page.
pub(super) struct LinkKeeper<D> {
    dial: D,
    options: ConnectOptions,
    asks: mpsc::Receiver<KeeperCall>,
    waiting: VecDeque<KeeperCall>,
    seen: Arc<KeeperView>,
    connected: watch::Sender<bool>,
    /// Of the machine's clock.
    origin: Instant,
}

/// Why a connection is not served any more.
enum ServiceEnd {
    Lost,
    /// Nobody can ask any more.
    Unwanted,
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

    /// Serves calls over `wire`, and over the next connection when that is lost, or when there was none.
    pub(super) async fn keep(mut self, wire: Option<LmtpConnection>) {
        let mut delay = DELAY_MIN;
        let mut wire = wire;
        // The calls of the connection before, if any of them waits for the next one.
        let mut detached = None;
        loop {
            let Some(wire) = (match wire.take() {
                Some(wire) => Some(wire),
                None => self.redial(&mut delay, &mut detached).await,
            }) else {
                return;
            };
            let began = Instant::now();
            self.connected.send_replace(true);
            let served = detached.take();
            let mut served = served.unwrap_or_else(|| {
                ServedStreams::new(&self.options, Arc::clone(&self.seen), self.origin)
            });
            let over = self.serve(wire, &mut served).await;
            self.connected.send_replace(false);
            if matches!(over, ServiceEnd::Unwanted) || !self.dial.again() {
                return served.lost();
            }
            detached = served.parted().then_some(served);
            // One that comes and goes at once is not to be hammered.
            if began.elapsed() >= DELAY_MAX {
                delay = DELAY_MIN;
            }
        }
    }

    /// Serves calls until the connection is lost.
    async fn serve(&mut self, mut wire: LmtpConnection, served: &mut ServedStreams) -> ServiceEnd {
        loop {
            // A peer that is there is given the time it needs to say what it can do.
            let late = served.late_at(&self.waiting);
            // All may be cancelled: frames and asks stay where they are, a permit goes back, and what was given up stays listed.
            tokio::select! {
                text = wire.incoming.next(), if served.is_reading() => match text {
                    Some(text) => served.receive(&text),
                    None => return ServiceEnd::Lost,
                },
                permit = wire.outgoing.reserve(), if served.has_words(&self.waiting) => {
                    let Ok(permit) = permit else {
                        return ServiceEnd::Lost;
                    };
                    served.send_waiting(&mut self.waiting, permit);
                }
                ask = self.asks.recv(), if self.waiting.len() < WAITING_MAX => match ask {
                    Some(ask) => self.waiting.push_back(ask),
                    None => return ServiceEnd::Unwanted,
                },
                () = until(late) => late_ask(&mut self.waiting),
                () = until(served.wake_at()) => served.tick(),
                () = served.room() => {}
                () = self.seen.abandoned.changed() => served.abandon(&self.seen.abandoned.take()),
            }
            served.deliver();
        }
    }

    /// The next connection; `None` when nobody can ask any more. What waits for it has failed if the first try does.
    async fn redial(
        &mut self,
        delay: &mut Duration,
        detached: &mut Option<ServedStreams>,
    ) -> Option<LmtpConnection> {
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
                        Err(error) => {
                            tracing::debug!(why = %error.message, "not connected");
                            if let Some(mut served) = detached.take() {
                                served.lost();
                            }
                            break;
                        }
                    },
                    ask = self.asks.recv(), if self.waiting.len() < WAITING_MAX => {
                        self.waiting.push_back(ask?);
                    }
                    () = until(late) => late_ask(&mut self.waiting),
                    // What is not asked yet is not asked: who is gone is not there when its turn comes.
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

/// The first call in the line has waited for too long.
fn late_ask(waiting: &mut VecDeque<KeeperCall>) {
    if let Some(ask) = waiting.pop_front() {
        // Nobody listens if this fails.
        let _ = ask
            .results
            .try_send(Err(lost("there is no connection to the upstream")));
    }
}

/// What the machine's clock shows.
pub(super) fn now(origin: Instant) -> Time {
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
