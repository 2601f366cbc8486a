//! Messages that have arrived from the transport and are about to be handled.
//!
//! ```text
//!   transport ── poll ──► taken (few, and of few bytes) ── hand_over ──► machine
//!                └ its end follows the messages taken before it
//! ```

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::vec;

use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::{Action, Fragments, Status, WireMessage};
use sapwood_proto::session::SessionMachine;
use sapwood_proto::time::Time;

/// The transport's messages, and those of them that wait for the machine.
pub(super) struct MessageIntake<I> {
    /// `None` once it has ended.
    incoming: Option<Pin<Box<I>>>,
    taken: VecDeque<WireMessage>,
    /// The rest of a split message; it precedes those.
    rest: Option<UnreadRest>,
    end: Option<Result<(), Status>>,
}

impl<I: Stream<Item = Result<WireMessage, Status>>> MessageIntake<I> {
    pub(super) fn new(incoming: I) -> Self {
        Self {
            incoming: Some(Box::pin(incoming)),
            taken: VecDeque::new(),
            rest: None,
            end: None,
        }
    }

    /// Takes the available messages, up to a batch, once the previous batch has been handled. `true`: there may be
    /// more.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        // At most one batch is kept here; the rest stays with the transport, which pushes back on the client.
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

    /// Passes the taken messages to the machine, as far as it accepts them, and a long message in parts. The end is
    /// passed in a call of its own, because the bytes that a session holds are not counted once it is over (EV-801).
    pub(super) fn hand_over(&mut self, machine: &mut SessionMachine, now: Time) {
        let mut handed = 0;
        while !machine.inbound_paused() && handed < PARTS {
            let Some(message) = self.next() else {
                if handed > 0 {
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
            // An empty message is legal (EV-102) but not free, so it counts as one.
            handed += parts(&message).max(1);
            // An error of `handle` aborts the session; the machine reports that itself, as a chore.
            let _ = machine.handle(message, now);
        }
    }

    /// The next message, or a part of one: splitting a message does not change its meaning (EV-102). Its actions come
    /// last, in the order in which the machine would apply them.
    fn next(&mut self) -> Option<WireMessage> {
        if self.rest.is_none() {
            let mut message = self.taken.pop_front()?;
            if parts(&message) <= PARTS {
                return Some(message);
            }
            // One message can hold many thousands of small fragments or actions, which would delay the other sessions
            // of this thread, and each refused action leaves a status until its part is handled.
            SessionMachine::sort_actions(&mut message.actions);
            self.rest = Some(UnreadRest {
                fragments: message.fragments.into_iter(),
                actions: message.actions.into_iter(),
                wire_bytes: message.wire_bytes,
            });
        }
        let rest = self.rest.as_mut()?;
        let mut part = WireMessage {
            fragments: rest.fragments.by_ref().take(PARTS).collect(),
            actions: Vec::new(),
            // Each part has the size of the whole: the size limit and the choice of what is copied (EV-805) are about
            // the message as it was received.
            wire_bytes: rest.wire_bytes,
        };
        if rest.fragments.len() == 0 {
            let room = PARTS - part.fragments.len();
            part.actions = rest.actions.by_ref().take(room).collect();
            if rest.actions.len() == 0 {
                self.rest = None;
            }
        }
        Some(part)
    }

    /// Whether anything waits for the machine.
    pub(super) fn is_waiting(&self) -> bool {
        !self.taken.is_empty() || self.rest.is_some() || self.end.is_some()
    }
}

/// The part of a message that the machine does not have yet.
struct UnreadRest {
    fragments: <Fragments as IntoIterator>::IntoIter,
    actions: vec::IntoIter<Action>,
    wire_bytes: usize,
}

/// The fragments and actions of a message.
fn parts(message: &WireMessage) -> usize {
    message.fragments.len() + message.actions.len()
}

/// Fragments and actions passed to the machine before the runs are polled: at a microsecond each, the rounds of one poll
/// with so many take milliseconds.
const PARTS: usize = 256;
/// Messages taken before the runs are polled.
const MESSAGES: usize = 32;
/// Bytes after which no further message is taken before the runs are polled.
const BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use futures::stream;
    use sapwood_proto::evergreen::{Fragment, Param};
    use sapwood_proto::session::{Config, SessionOutput, Side};

    use super::*;

    #[test]
    fn ev_102_a_message_of_many_fragments_is_handed_over_in_parts_and_its_actions_last() {
        let named = |number: usize| Fragment {
            id: format!("n{number}").into(),
            ..Fragment::default()
        };
        let message = WireMessage {
            fragments: (0..2 * PARTS + 1).map(named).collect(),
            actions: vec![Action::default()],
            wire_bytes: 8 * PARTS,
        };
        let mut machine = SessionMachine::new(Side::Server, Config::default(), Time::ZERO);
        let mut intake = MessageIntake::new(stream::iter([Ok(message)]));
        assert!(!intake.poll(&mut Context::from_waker(Waker::noop())));
        for (fragments, actions) in [(PARTS, 0), (2 * PARTS, 0), (2 * PARTS + 1, 1)] {
            assert!(intake.is_waiting());
            intake.hand_over(&mut machine, Time::ZERO);
            let stats = machine.stats();
            let seen = (stats.fragments_in, stats.actions);
            assert_eq!(seen, (fragments as u64, actions));
        }
        assert_eq!(intake.rest.is_none(), intake.taken.is_empty());
        assert!(intake.end.is_some());
    }

    #[test]
    fn d_26_a_message_of_many_actions_is_handed_over_in_parts_and_reserved_ones_last() {
        let cancel = Action {
            name: "CANCEL".into(),
            inputs: vec![Param::new("action", "last")],
            ..Action::default()
        };
        let asked = |outputs| Action {
            name: "f".into(),
            outputs,
            ..Action::default()
        };
        let mut actions = vec![cancel];
        actions.extend(std::iter::repeat_n(asked(vec![]), PARTS - 1));
        actions.push(asked(vec![Param::new("o", "last")]));
        let message = WireMessage {
            actions,
            wire_bytes: 8 * PARTS,
            ..WireMessage::default()
        };
        let mut machine = SessionMachine::new(Side::Server, Config::default(), Time::ZERO);
        let mut intake = MessageIntake::new(stream::iter([Ok(message)]));
        assert!(!intake.poll(&mut Context::from_waker(Waker::noop())));
        let mut cancelled = Vec::new();
        for seen in [PARTS, PARTS + 1] {
            intake.hand_over(&mut machine, Time::ZERO);
            assert_eq!(machine.stats().actions, seen as u64);
            let outputs = std::iter::from_fn(|| machine.poll());
            let cancels = |output: &_| matches!(output, SessionOutput::Cancel { .. });
            cancelled.push(outputs.filter(cancels).count());
        }
        assert_eq!(cancelled, [0, 1]);
        assert!(intake.rest.is_none());
    }
}
