//! A connection that was lost and comes back (EV-940 to EV-943, D-29).
//!
//! Owns: whether there is a connection, what each side says that it holds, and what is sent again because of that.
//! Refuses to know: tokens, who may come back, how many sessions wait. The logs of our nodes are what is sent again, so
//! nothing is copied for it but the actions.
//!
//! ```text
//!   up ──lost──► down ──returned──► returning ──what the other side has──► up
//!                 └── resume_grace ──► aborted ◄── 5 s without RESUME ──┘
//! ```

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use super::have::Have;
use super::leaves::{Leaf, Wanted};
use super::port::{ActionKey, NodeKey, Side};
use super::reserved::{HAVE, RESUME};
use super::store::Owner;
use super::{Phase, Session};
use crate::evergreen::{
    Action, Chunk, Fragment, Message, Metadata, Param, Payload, Reason, Status,
};
use crate::time::Time;

/// Whether there is a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    Up,
    /// Lost, since then.
    Down(Time),
    /// There is one, and each side has still to learn what the other has.
    Returning(Time),
}

/// What a session remembers that may lose its connection.
#[derive(Debug)]
pub(super) struct Resume {
    pub(super) line: Line,
    /// Every action of ours, in order.
    asked: Vec<Action>,
    /// How many actions of the peer's were taken in, RESUME aside.
    received: u64,
    /// What goes out first on a new connection.
    hello: Option<Message>,
    /// What the other side has, learnt and still to be acted upon.
    theirs: Option<Have>,
    /// Whether we have said that we send nothing more: it has to be said again.
    pub(super) half_closed: bool,
}

impl Resume {
    pub(super) const fn new() -> Self {
        Self {
            line: Line::Up,
            asked: Vec::new(),
            received: 0,
            hello: None,
            theirs: None,
            half_closed: false,
        }
    }
}

impl Session {
    /// The connection is lost: nothing is dropped, and nothing is sent until it is back (EV-940). Without resume that
    /// is the end (EV-109).
    pub fn lost(&mut self, now: Time) {
        let Some(resume) = &mut self.resume else {
            self.abort_for(Reason::Cancelled, "the connection was lost");
            return;
        };
        resume.line = Line::Down(now);
        resume.hello = None;
        self.clock.disconnected();
        self.stop_resuming();
    }

    /// There is a new connection. Nothing is sent on it until the other side has said what it has; a client asks.
    pub fn returned(&mut self, now: Time) {
        let Some(resume) = &mut self.resume else {
            return;
        };
        resume.line = Line::Returning(now);
        if self.phase == Phase::Finished && self.side == Side::Server {
            // The end, or what stood before it, may not have arrived.
            self.phase = Phase::HalfClosed;
            self.ending = false;
        }
        if self.side == Side::Client
            && let Err(status) = self.say_hello(now)
        {
            self.abort(status);
        }
    }

    /// Whether the connection is lost.
    #[must_use]
    pub fn is_down(&self) -> bool {
        matches!(self.line(), Line::Down(_))
    }

    pub(super) fn line(&self) -> Line {
        self.resume.as_ref().map_or(Line::Up, |resume| resume.line)
    }

    /// Until when the connection, or RESUME, has to come.
    pub(super) fn resume_until(&self) -> Option<Time> {
        let grace = self.config.limits.resume_grace;
        match (self.line(), self.side) {
            (Line::Up, _) => None,
            (Line::Down(since), _) | (Line::Returning(since), Side::Client) => Some(since + grace),
            (Line::Returning(since), Side::Server) => Some(since + HELLO),
        }
    }

    /// Notes an action that we send.
    pub(super) fn ask(&mut self, action: Action) {
        if let Some(resume) = &mut self.resume {
            resume.asked.push(action.clone());
        }
        self.outbound.push_action(action);
    }

    /// Notes an action that has come, unless it is RESUME, which must come first.
    pub(super) fn note_received(&mut self, action: &Action) -> Result<(), Status> {
        let Some(resume) = self.resume.as_mut().filter(|_| &*action.name != RESUME) else {
            return Ok(());
        };
        if resume.line != Line::Up {
            let message = "the first action on a new connection of an old session is RESUME";
            return Err(Status::new(Reason::BadMessage, message));
        }
        resume.received += 1;
        Ok(())
    }

    /// The client's first words.
    pub(super) fn hello(&mut self) -> Option<Message> {
        self.resume.as_mut()?.hello.take()
    }

    pub(super) fn has_hello(&self) -> bool {
        let resume = self.resume.as_ref();
        resume.is_some_and(|resume| resume.hello.is_some())
    }

    fn say_hello(&mut self, now: Time) -> Result<(), Status> {
        let limits = Arc::clone(&self.config.limits);
        let (ours, theirs) = (self.store.make(&limits)?, self.store.make(&limits)?);
        self.store.get_mut(ours).owner = Owner::Local(None);
        let (have, answer) = (
            self.store.get(ours).id.clone(),
            self.store.get(theirs).id.clone(),
        );
        let mut rest = Bytes::from(self.have());
        let mut message = Message::default();
        while message.fragments.is_empty() || !rest.is_empty() {
            let part = rest.split_to(rest.len().min(limits.max_fragment_bytes.max(1)));
            let seq = i32::try_from(message.fragments.len()).unwrap_or(i32::MAX);
            let metadata = (seq == 0).then(|| Arc::new(Metadata::of("application/json")));
            message.fragments.push(Fragment {
                id: have.clone(),
                seq,
                last: rest.is_empty(),
                chunk: Some(Chunk {
                    metadata,
                    payload: Some(Payload::Data(part)),
                }),
                ..Fragment::default()
            });
        }
        message.actions.push(Action {
            name: RESUME.into(),
            inputs: vec![Param::new(HAVE, have)],
            outputs: vec![Param::new(HAVE, answer.clone())],
            ..Action::default()
        });
        if let Some(resume) = &mut self.resume {
            resume.hello = Some(message);
        }
        self.store.get_mut(theirs).owner = Owner::Peer(None);
        let _ = self.read_leaf(None, &answer, Wanted::Answer, now);
        Ok(())
    }

    /// Takes in RESUME (EV-942). `None`: what the client has is still to be read.
    pub(super) fn resume_asked(
        &mut self,
        key: ActionKey,
        action: &Action,
        now: Time,
    ) -> Option<Result<String, Status>> {
        if !matches!(self.line(), Line::Returning(_)) {
            let message = "RESUME is for a session opened with evergreen-resume: 1, \
                 as the first action on its new connection";
            return Some(Err(Status::new(Reason::Unimplemented, message)));
        }
        if self.leaves.iter().any(Leaf::is_of_resume) {
            let message = "a new connection takes one RESUME, and only the client's";
            return Some(Err(Status::new(Reason::BadMessage, message)));
        }
        let Some(param) = action.inputs.first() else {
            let message = "RESUME needs the input have: what the sender holds";
            let status = Status::new(Reason::MissingInput, message).with("param", HAVE);
            return Some(Err(status));
        };
        self.read_leaf(Some(key), &param.id, Wanted::Have, now)
    }

    /// What the other side has is known; gives what we have.
    pub(super) fn have_was_read(&mut self, text: &[u8]) -> Result<String, Status> {
        if !matches!(self.line(), Line::Returning(_)) {
            let message = "what the other side has was said before on this connection";
            return Err(Status::new(Reason::BadMessage, message));
        }
        let max = self.config.limits.max_nodes;
        let theirs = Have::parse(text, max).ok_or_else(|| {
            let message = format!(
                "have is not of the form {{\"nodes\":{{\"ID\":SEQ}},\"actions\":N}} with at most {max} nodes"
            );
            Status::new(Reason::BadConfig, message)
        })?;
        let ours = self.have();
        if let Some(resume) = &mut self.resume {
            resume.line = Line::Up;
            resume.theirs = Some(theirs);
        }
        Ok(ours)
    }

    /// Sends again what the other side does not have. `first` goes before the rest.
    pub(super) fn send_again(&mut self, first: Option<NodeKey>) {
        let Some(resume) = &mut self.resume else {
            return;
        };
        let Some(theirs) = resume.theirs.take() else {
            return;
        };
        let known = theirs.actions.min(resume.asked.len());
        let asked = resume.asked[known..].to_vec();
        self.sending_finished |= resume.half_closed;
        self.outbound.clear();
        for action in asked {
            self.outbound.push_action(action);
        }
        let all = (0..self.store.len()).map(|at| NodeKey(u32::try_from(at).unwrap_or(u32::MAX)));
        let rest = all.filter(|key| Some(*key) != first);
        for key in first.into_iter().chain(rest) {
            let node = self.store.get_mut(key);
            let next = node.next_seq();
            // What was dropped since cannot be sent again.
            let held = u32::try_from(node.log.released()).unwrap_or(u32::MAX);
            let has = theirs.nodes.get(&*node.id).copied().unwrap_or(0);
            let from = u32::try_from(has).unwrap_or(u32::MAX).min(next).max(held);
            let Some(producer) = node.producer.as_mut().filter(|_| from < next) else {
                if let Some(producer) = &mut node.producer {
                    producer.sent = next;
                    producer.queued = false;
                }
                continue;
            };
            producer.sent = from;
            producer.queued = false;
            self.outbound.queue_from(key, from, &mut self.store);
        }
        self.after_sending();
    }

    /// The contiguous prefix of each of the peer's nodes, and how many actions have come.
    fn have(&self) -> String {
        let nodes = (0..self.store.len()).map(|at| {
            self.store
                .get(NodeKey(u32::try_from(at).unwrap_or(u32::MAX)))
        });
        let theirs = nodes.filter(|node| matches!(node.owner, Owner::Peer(_)));
        let held: serde_json::Map<String, Value> = theirs
            .filter(|node| !node.log.is_empty())
            .map(|node| (node.id.to_string(), Value::from(node.next_seq())))
            .collect();
        let received = self.resume.as_ref().map_or(0, |resume| resume.received);
        json!({ "nodes": held, "actions": received }).to_string()
    }
}

/// How long a new connection may be silent (D-29).
const HELLO: Duration = Duration::from_secs(5);
