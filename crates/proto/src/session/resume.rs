//! Resuming a session on a new connection after the old one was lost (EV-940 to EV-943, D-29).
//!
//! The logs of our nodes are what is sent again; only sent actions are copied.
//!
//! ```text
//!   up ──lost──► down ──returned──► returning ──report of the peer──► up
//!                 └── resume_grace ──► aborted ◄── 5 s without RESUME ──┘
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use super::leaves::{InputLeaf, ReadPurpose};
use super::outbound::action_bytes;
use super::port::{ActionKey, NodeKey, Side};
use super::received_seqs::ReceivedSeqs;
use super::reserved::{HAVE, RESUME};
use super::store::{LogPiece, NodeKind, NodeProducer, Producer, Store};
use super::{SessionMachine, SessionPhase};
use crate::evergreen::{
    Action, Chunk, DialectCapabilities, Fragment, Metadata, Param, Payload, Reason, Status,
    WireMessage,
};
use crate::time::Time;

/// State of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkState {
    Up,
    /// Lost at this time.
    Down(Time),
    /// Reconnected at this time; each side has still to learn what the other has received.
    Returning(Time),
}

/// State that a resumable session retains.
#[derive(Debug)]
pub(super) struct Resume {
    pub(super) line: LinkState,
    /// Actions of ours that the peer may not have received, in order; the quota counts them. The peer has received
    /// every action that it has answered, and every action sent before that.
    asked: Vec<Action>,
    /// Number of actions before those, which the peer is known to have received.
    known: usize,
    /// Number of actions received from the peer, without RESUME.
    received: u64,
    /// The first message on a new connection.
    hello: Option<WireMessage>,
    /// The node of ours in `hello`.
    reply_node: Option<NodeKey>,
    /// What the peer reported to have received; not acted upon yet.
    theirs: Option<ReceivedSeqs>,
    /// Whether we have half-closed: the half-close must be sent again.
    pub(super) half_closed: bool,
}

impl Resume {
    pub(super) const fn new() -> Self {
        Self {
            line: LinkState::Up,
            asked: Vec::new(),
            known: 0,
            received: 0,
            hello: None,
            reply_node: None,
            theirs: None,
            half_closed: false,
        }
    }

    /// Number of actions that we have sent.
    pub(super) fn asked_so_far(&self) -> usize {
        self.known + self.asked.len()
    }

    /// The peer has received our first `known` actions. Returns the quota bytes of those that were retained until now.
    fn remove_asked(&mut self, known: usize) -> u64 {
        let update = known.saturating_sub(self.known).min(self.asked.len());
        self.known += update;
        let bytes = self.asked.drain(..update);
        bytes.map(|action| action_bytes(&action) as u64).sum()
    }
}

#[cfg(any(test, fuzzing))]
impl Resume {
    /// Quota bytes of the retained actions.
    pub(super) fn asked_bytes(&self) -> u64 {
        self.asked
            .iter()
            .map(|action| action_bytes(action) as u64)
            .sum()
    }
}

impl SessionMachine {
    /// The connection is lost: nothing is dropped, and nothing is sent until there is a new one (EV-940). Without
    /// resume the session ends (EV-109).
    pub fn lost(&mut self, now: Time) {
        let Some(resume) = &mut self.resume else {
            self.abort_for(Reason::Cancelled, "the connection was lost");
            return;
        };
        resume.line = LinkState::Down(now);
        resume.hello = None;
        self.clock.disconnected();
        self.actions.pause_time_limits(now);
        self.stop_resuming();
    }

    /// There is a new connection. Nothing but RESUME is sent on it until the peer has reported what it has received;
    /// the client asks first.
    pub fn returned(&mut self, now: Time) {
        let Some(resume) = &mut self.resume else {
            return;
        };
        resume.line = LinkState::Returning(now);
        if self.side == Side::Client
            && let Err(status) = self.send_hello(now)
        {
            self.abort(status);
        }
    }

    /// The peer does not know the session any more. If every action is answered and we have half-closed, the session
    /// ends normally; otherwise it ends with `status`.
    pub fn fail_resume(&mut self, status: Status) {
        let sent = self
            .resume
            .as_ref()
            .is_some_and(|resume| resume.half_closed);
        if sent && self.phase == SessionPhase::Open && self.actions.len() == 0 {
            self.half_close();
        } else {
            self.abort(status);
        }
    }

    /// Whether the connection is lost.
    #[must_use]
    pub fn is_down(&self) -> bool {
        matches!(self.line(), LinkState::Down(_))
    }

    pub(super) fn line(&self) -> LinkState {
        self.resume
            .as_ref()
            .map_or(LinkState::Up, |resume| resume.line)
    }

    /// Deadline for the new connection, or for RESUME on it.
    pub(super) fn resume_until(&self) -> Option<Time> {
        let grace = self.config.limits.resume_grace;
        match (self.line(), self.side) {
            (LinkState::Up, _) => None,
            (LinkState::Down(since), _) | (LinkState::Returning(since), Side::Client) => {
                Some(since + grace)
            }
            (LinkState::Returning(since), Side::Server) => Some(since + HELLO),
        }
    }

    /// Makes this session end with its connection: nothing is retained for another one. Call it before anything is
    /// written.
    pub fn without_resume(&mut self) {
        self.resume = None;
        self.config.resume = false;
        self.store.keep(self.config.retention());
    }

    /// The new connection has another dialect than the last one (EV-941). A msgpack session cannot change its dialect.
    pub const fn set_capabilities(&mut self, capabilities: DialectCapabilities) {
        self.config.capabilities.in_order = capabilities.in_order;
        self.config.capabilities.whole_json = capabilities.whole_json;
    }

    /// Sends an action, and retains it as long as it may have to be sent again.
    ///
    /// # Errors
    /// `RETAINED_LIMIT`: there is no room to retain it, and it is not sent.
    pub(super) fn ask(&mut self, action: Action) -> Result<(), Status> {
        if let Some(resume) = &mut self.resume {
            let bytes = action_bytes(&action) as u64;
            self.store.retain(bytes, &self.config.limits)?;
            resume.asked.push(action.clone());
        }
        self.outbound.push_action(action);
        Ok(())
    }

    /// The peer has written an output of `action`: it has received that action and all that were sent before it.
    pub(super) fn is_answered(&mut self, action: ActionKey) {
        let Some(resume) = self
            .resume
            .as_mut()
            .filter(|resume| !resume.asked.is_empty())
        else {
            return;
        };
        if let Some(entry) = self.actions.get(action) {
            self.store.give_back(resume.remove_asked(entry.ordinal));
        }
    }

    /// Counts a received action, unless it is RESUME, which must come first.
    pub(super) fn note_received(&mut self, action: &Action) -> Result<(), Status> {
        let Some(resume) = self.resume.as_mut().filter(|_| &*action.name != RESUME) else {
            return Ok(());
        };
        // Only a server rejects this: it sends actions as soon as it knows what its client has received, which may be
        // before the client has read the server's report.
        if resume.line != LinkState::Up && self.side == Side::Server {
            let message = "the first action on a new connection of an old session is RESUME";
            return Err(Status::new(Reason::BadMessage, message));
        }
        resume.received += 1;
        Ok(())
    }

    /// Takes the client's first message.
    pub(super) fn hello(&mut self) -> Option<WireMessage> {
        self.resume.as_mut()?.hello.take()
    }

    pub(super) fn has_hello(&self) -> bool {
        let resume = self.resume.as_ref();
        resume.is_some_and(|resume| resume.hello.is_some())
    }

    fn send_hello(&mut self, now: Time) -> Result<(), Status> {
        let limits = Arc::clone(&self.config.limits);
        self.hello_is_answered();
        let (ours, theirs) = (self.store.make(&limits)?, self.store.make(&limits)?);
        let known = self.store.get_mut(ours);
        (known.owner, known.transient) = (NodeProducer::Local(None), true);
        let (have, answer) = (
            self.store.get(ours).id.clone(),
            self.store.get(theirs).id.clone(),
        );
        let mut rest = Bytes::from(self.have());
        let mut message = WireMessage::default();
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
            (resume.hello, resume.reply_node) = (Some(message), Some(ours));
        }
        self.store.get_mut(theirs).owner = NodeProducer::Peer(None);
        let _ = self.read_leaf(None, &answer, ReadPurpose::Answer, now);
        Ok(())
    }

    /// Removes our report of received seqs: it was read, or the connection was lost.
    pub(super) fn hello_is_answered(&mut self) {
        let sent = self
            .resume
            .as_mut()
            .and_then(|resume| resume.reply_node.take());
        if let Some(node) = sent {
            self.store.mark_removed(node);
        }
    }

    /// Removes the nodes of the answer to RESUME once they are sent, or with the connection that they were meant for.
    pub(super) fn remove_when_sent(&mut self, nodes: &[NodeKey]) {
        if nodes.is_empty() || self.is_closed() {
            return;
        }
        for &node in nodes {
            self.store.get_mut(node).transient = true;
        }
        let named: Vec<(NodeKey, bool)> = nodes.iter().map(|&node| (node, false)).collect();
        self.drop_nodes(&named);
    }

    /// Handles RESUME (EV-942). `None`: the client's report is not read yet.
    pub(super) fn resume_asked(
        &mut self,
        key: ActionKey,
        action: &Action,
        now: Time,
    ) -> Option<Result<String, Status>> {
        if !matches!(self.line(), LinkState::Returning(_)) {
            let message = "RESUME is for a session opened with evergreen-resume: 1, \
                 as the first action on its new connection";
            return Some(Err(Status::new(Reason::Unimplemented, message)));
        }
        if self.leaves.iter().any(InputLeaf::is_of_resume) {
            let message = "a new connection takes one RESUME, and only the client's";
            return Some(Err(Status::new(Reason::BadMessage, message)));
        }
        let Some(param) = action.inputs.first() else {
            let message = "RESUME needs the input have: what the sender holds";
            let status = Status::new(Reason::MissingInput, message).with("param", HAVE);
            return Some(Err(status));
        };
        self.read_leaf(Some(key), &param.id, ReadPurpose::Have, now)
    }

    /// Handles the peer's report; returns ours.
    pub(super) fn have_was_read(&mut self, text: &[u8]) -> Result<String, Status> {
        if !matches!(self.line(), LinkState::Returning(_)) {
            let message = "what the other side has was said before on this connection";
            return Err(Status::new(Reason::BadMessage, message));
        }
        let max = self.config.limits.max_nodes;
        let theirs = ReceivedSeqs::parse(text, max).ok_or_else(|| {
            let message = format!(
                "have is not of the form {{\"nodes\":{{\"ID\":SEQ}},\"actions\":N}} with at most {max} nodes"
            );
            Status::new(Reason::BadConfig, message)
        })?;
        let ours = self.have();
        if let Some(resume) = &mut self.resume {
            resume.line = LinkState::Up;
            resume.theirs = Some(theirs);
        }
        Ok(ours)
    }

    /// Queues what the peer has not received. `first` is sent before the rest.
    pub(super) fn send_again(&mut self, first: Option<NodeKey>) {
        let Some(resume) = &mut self.resume else {
            return;
        };
        let Some(theirs) = resume.theirs.take() else {
            return;
        };
        self.store.give_back(resume.remove_asked(theirs.actions));
        let asked = resume.asked.clone();
        self.sending_finished |= resume.half_closed;
        self.outbound.clear();
        for action in asked {
            self.outbound.push_action(action);
        }
        self.store.rewind(&theirs);
        self.store.recount_unsent();
        let trees = if self.config.capabilities.in_order {
            self.store.line_up()
        } else {
            Vec::new()
        };
        let rest = self.store.keys().filter(|key| Some(*key) != first);
        for key in first.into_iter().chain(rest) {
            if self.store.get(key).is_unsent() {
                self.outbound.queue_rest(key, &mut self.store);
            }
        }
        for tree in trees {
            self.outbound.next_turn(tree, None, &mut self.store);
        }
        self.after_sending();
    }

    /// Our report: the contiguous prefix of each of the peer's nodes, and the number of received actions.
    fn have(&self) -> String {
        let nodes = self.store.keys().map(|key| self.store.get(key));
        let theirs = nodes.filter(|node| matches!(node.owner, NodeProducer::Peer(_)));
        let retained: serde_json::Map<String, Value> = theirs
            .filter(|node| !node.log.is_empty())
            .map(|node| (node.id.to_string(), Value::from(node.next_seq())))
            .collect();
        let received = self.resume.as_ref().map_or(0, |resume| resume.received);
        json!({ "nodes": retained, "actions": received }).to_string()
    }
}

impl Store {
    /// Rewinds each node of ours to what the peer has received, and makes trees wait for children that it has not
    /// received completely (EV-508).
    fn rewind(&mut self, theirs: &ReceivedSeqs) {
        for key in self.keys() {
            let node = self.get_mut(key);
            let next = node.next_seq();
            // Released pieces cannot be sent again.
            let retained = u32::try_from(node.log.released()).unwrap_or(u32::MAX);
            let has = theirs.nodes.get(&*node.id).copied().unwrap_or(0);
            // Nodes of an earlier RESUME are not sent again.
            let has = if node.transient {
                u32::MAX
            } else {
                u32::try_from(has).unwrap_or(u32::MAX)
            };
            if let Some(producer) = &mut node.producer {
                **producer = Producer {
                    sent: has.min(next).max(retained),
                    parent: producer.parent,
                    ..Producer::default()
                };
            }
        }
        for key in self.keys() {
            let node = self.get_mut(key);
            let whole = node.is_complete() && !node.is_unsent();
            let Some(producer) = node.producer.as_mut().filter(|_| !whole) else {
                continue;
            };
            producer.awaited = producer.parent.is_some();
            let parent = producer.parent.map(|parent| self.get_mut(parent));
            if let Some(parent) = parent.and_then(|parent| parent.producer.as_mut()) {
                parent.open_children += 1;
            }
        }
    }

    /// Puts children that were not sent at all in line in reading order, as when they were listed (EV-722). Returns the
    /// trees whose next child may be sent.
    fn line_up(&mut self) -> Vec<NodeKey> {
        let trees = self.keys().filter(|tree| {
            let node = self.get(*tree);
            node.kind == NodeKind::Tree && node.producer.is_some()
        });
        let trees: Vec<NodeKey> = trees.collect();
        for &tree in &trees {
            let reported = self.get(tree).producer.as_ref().map_or(0, |it| it.sent);
            let listed: Vec<(bool, NodeKey)> = (0..self.get(tree).next_seq())
                .filter_map(|seq| match self.get(tree).piece(seq) {
                    Some(LogPiece::Children(children)) => Some((seq < reported, children)),
                    _ => None,
                })
                .flat_map(|(reported, children)| {
                    children.iter().map(move |child| (reported, *child))
                })
                .collect();
            let (mut line, mut announced, mut turn) = (VecDeque::new(), 0, None);
            for (reported, child) in listed {
                let Some(producer) = &mut self.get_mut(child).producer else {
                    continue;
                };
                if producer.parent != Some(tree)
                    || !producer.awaited
                    || producer.pending_at.is_some()
                {
                    continue;
                }
                if producer.sent > 0 {
                    turn = Some(child);
                    continue;
                }
                producer.pending_at = Some(0);
                line.push_back(child);
                announced += usize::from(reported);
            }
            if let Some(producer) = &mut self.get_mut(tree).producer {
                (producer.line, producer.announced, producer.turn) = (line, announced, turn);
            }
        }
        trees
    }
}

/// How long a client may take to send RESUME on a new connection (D-29).
const HELLO: Duration = Duration::from_secs(5);
