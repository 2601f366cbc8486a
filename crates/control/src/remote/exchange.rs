//! The exchange thread: sends what sequences ask for, and reads what the runtime answers (AI-851, AI-853).

use std::time::{Duration, Instant};

use sapwood_proto::time::Time;

use super::epoch::Epoch;
use super::reply::{Broken, Reply, ReplyError, read_step};
use super::request::MainRequest;
use super::table::Wakers;
use crate::wire::{MessageSlot, Received, SendError, SharedRegion};

/// The main channel of a runtime.
pub(super) struct MainWire {
    pub(super) requests: MessageSlot,
    pub(super) responses: MessageSlot,
    pub(super) masks: SharedRegion,
}

/// What came of sending a message and waiting for its answer.
#[derive(Debug)]
pub(super) enum Exchanged {
    /// The answer is in the buffer.
    Answer,
    /// There is no room for the message; nothing was sent.
    NotSent(String),
}

impl MainWire {
    /// Sends a message and waits for the answer, looking again and again whether the process is `gone`.
    pub(super) fn exchange(
        &mut self,
        message: &[u8],
        answer: &mut Vec<u8>,
        limit: Duration,
        gone: impl Fn() -> bool,
    ) -> Result<Exchanged, Broken> {
        let end = Instant::now() + limit;
        loop {
            match self.requests.send(message) {
                Ok(()) => break,
                Err(error @ (SendError::TooLarge { .. } | SendError::NoMemory)) => {
                    return Ok(Exchanged::NotSent(error.to_string()));
                }
                Err(SendError::Lost) if gone() || Instant::now() >= end => {
                    return Err(Broken("it does not read its messages".into()));
                }
                Err(SendError::Lost) => {}
            }
        }
        loop {
            let slice = (Instant::now() + SLICE).min(end);
            match self.responses.receive(answer, Some(slice)) {
                Ok(Received::Message) => return Ok(Exchanged::Answer),
                Ok(Received::TooLong(bytes)) => {
                    return Err(Broken(format!("its answer has {bytes} bytes")));
                }
                Ok(Received::Nothing) if gone() => return Err(Broken("it has ended".into())),
                Ok(Received::Nothing) if Instant::now() >= end => {
                    let limit = limit.as_millis();
                    return Err(Broken(format!("it did not answer within {limit} ms")));
                }
                Ok(Received::Nothing) => {}
                Err(lost) => return Err(Broken(lost.to_string())),
            }
        }
    }
}

/// Serves the sequences of `epoch` until its process ends, or has to be ended.
pub(super) fn run(epoch: &Epoch, mut wire: MainWire) {
    let mut answer = Vec::new();
    while let Some((request, live)) = next(epoch) {
        if let Err(Broken(why)) = step(epoch, &mut wire, &request, &live, &mut answer) {
            return epoch.kill(&why);
        }
        answer.clear();
        answer.shrink_to(ANSWER_BYTES_KEPT);
    }
}

/// Waits for the next request. `None`: the process has ended.
fn next(epoch: &Epoch) -> Option<(MainRequest, Vec<u64>)> {
    let mut table = epoch.table();
    loop {
        if epoch.is_dead() {
            return None;
        }
        let now = epoch.now();
        if let Some(request) = table.next_request(now) {
            let live = table.sent_live().to_vec();
            return Some((request, live));
        }
        let due = table.due().map(|due| due.since(now));
        // Without sequences nothing can be asked, and the last one's end is notified.
        let most = if table.is_empty() { LONGEST } else { IDLE };
        let wait = due.unwrap_or(most).clamp(SHORTEST, most);
        table = epoch.wait(table, wait);
    }
}

fn step(
    epoch: &Epoch,
    wire: &mut MainWire,
    request: &MainRequest,
    live: &[u64],
    answer: &mut Vec<u8>,
) -> Result<(), Broken> {
    let message = request.encode();
    let gone = || epoch.is_dead();
    match wire.exchange(&message, answer, epoch.limits.step, gone)? {
        Exchanged::Answer => {}
        Exchanged::NotSent(text) => {
            let error = ReplyError {
                text,
                is_user: true,
            };
            return refused(epoch, &error, epoch.now());
        }
    }
    match Reply::parse(answer)?.data {
        Err(error) => refused(epoch, &error, epoch.now()),
        Ok(data) => {
            // Without the lock: rows are long.
            let results = read_step(request, live, data, &wire.masks, epoch.results)?;
            for time in &results.ran {
                (epoch.step_observer)(*time);
            }
            let woken = epoch.table().take_results(results, epoch.now());
            wake(woken);
            Ok(())
        }
    }
}

fn refused(epoch: &Epoch, error: &ReplyError, now: Time) -> Result<(), Broken> {
    let (somebodys, woken) = epoch.table().refused(error, now);
    wake(woken);
    tracing::warn!(error = %error.text, "the runtime of the controllers refused a step");
    if somebodys {
        return Ok(());
    }
    Err(Broken(format!(
        "it refused a request that asks for nothing: {}",
        error.text
    )))
}

fn wake(woken: Wakers) {
    for waker in woken {
        waker.wake();
    }
}

/// Of the longest answer; steps have answers of some kilobytes.
pub(super) const ANSWER_BYTES_KEPT: usize = 1 << 20;
/// How long the end of the process may go unnoticed while an answer is awaited.
const SLICE: Duration = Duration::from_millis(20);
/// How long asks may go unnoticed whose engine does not say that they are complete.
const IDLE: Duration = Duration::from_millis(100);
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_secs(3600);
