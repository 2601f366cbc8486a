//! What has come from the transport and is about to go to the machine.
//!
//! Owns: [`Intake`]: taking messages as they come, many under one lock, and holding the rest back while the session is
//! paused. Refuses to know: what the machine makes of them.
//!
//! ```text
//!   transport ── poll ──► taken (few, and of few bytes) ── hand_over ──► machine
//!                └ its end stands behind what was taken before it
//! ```

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::{Message, Status};
use sapwood_proto::session::Session;
use sapwood_proto::time::Time;

/// The transport's messages, and those among them that wait for the machine.
pub(super) struct Intake<I> {
    /// `None` once it has ended.
    incoming: Option<Pin<Box<I>>>,
    taken: VecDeque<Message>,
    end: Option<Result<(), Status>>,
}

impl<I: Stream<Item = Result<Message, Status>>> Intake<I> {
    pub(super) fn new(incoming: I) -> Self {
        Self {
            incoming: Some(Box::pin(incoming)),
            taken: VecDeque::new(),
            end: None,
        }
    }

    /// Takes what is there, up to a batch, once the last batch is gone. `true`: there may be more.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        if self.is_waiting() {
            return true;
        }
        let mut bytes = 0;
        while self.taken.len() < MESSAGES && bytes < BYTES {
            let Some(incoming) = &mut self.incoming else {
                return false;
            };
            let Poll::Ready(item) = incoming.poll_next_unpin(cx) else {
                return false;
            };
            match item {
                Some(Ok(message)) => {
                    bytes += message.wire_bytes;
                    self.taken.push_back(message);
                }
                Some(Err(status)) => self.finish(Err(status)),
                None => self.finish(Ok(())),
            }
        }
        true
    }

    fn finish(&mut self, end: Result<(), Status>) {
        self.incoming = None;
        self.end = Some(end);
    }

    /// Gives the machine what was taken, as far as it wants to have it; the end by itself, because nobody counts what a
    /// session holds once it is over (EV-801).
    pub(super) fn hand_over(&mut self, machine: &mut Session, now: Time) {
        let mut handed = false;
        while !machine.inbound_paused() {
            let Some(message) = self.taken.pop_front() else {
                if handed {
                    return;
                }
                match self.end.take() {
                    None => {}
                    Some(Ok(())) => machine.end_of_input(now),
                    Some(Err(status)) => {
                        machine.abort(status);
                    }
                }
                return;
            };
            // An error of handling is an abort: the machine says so itself, as a chore.
            let _ = machine.handle(message, now);
            handed = true;
        }
    }

    /// Whether something waits for the machine.
    pub(super) fn is_waiting(&self) -> bool {
        !self.taken.is_empty() || self.end.is_some()
    }
}

/// Messages taken in before the runs get their turn.
const MESSAGES: usize = 32;
/// Bytes after which no further message is taken before the runs get their turn.
const BYTES: usize = 64 * 1024;
