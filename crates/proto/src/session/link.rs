//! The connection of a session, and what a resumable session retains for the next one (EV-940 to EV-943, D-29).
//!
//! The logs of our nodes are what is sent again; only sent actions are copied here. Each side reports what it has
//! received before anything else is sent on a new connection, so that nothing is sent twice that the peer could not
//! recognise: a fragment has a seq, an action has none.
//!
//! ```text
//!   up ──lost──► down ──returned──► returning ──report of the peer──► up
//!                 └── resume_grace ──► aborted ◄── 5 s without RESUME ──┘
//! ```

mod received_seqs;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use smallvec::SmallVec;

use self::received_seqs::ReceivedSeqs;
use super::calls::reserved::{HAVE, RESUME};
use super::graph::{Graph, NodeProducer};
use super::port::{NodeKey, Side};
use super::sender::action_bytes;
use crate::evergreen::{
    Action, Chunk, Fragment, Metadata, NodeId, Param, Payload, Reason, Status, WireMessage,
};
use crate::time::Time;

/// State of the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LinkState {
    #[default]
    Up,
    /// Lost at this time.
    Down(Time),
    /// Reconnected at this time; each side has still to learn what the other has received.
    Returning(Time),
}

/// The connection; see the module documentation.
#[derive(Debug)]
pub(super) struct Link {
    side: Side,
    /// `None` if the session ends with its connection.
    resume: Option<Box<Resume>>,
}

/// What a resumable session retains.
#[derive(Debug, Default)]
struct Resume {
    state: LinkState,
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
    hello_node: Option<NodeKey>,
    /// What the peer reported to have received; not acted upon yet.
    theirs: Option<ReceivedSeqs>,
    /// Whether we have half-closed: the half-close must be sent again.
    half_closed: bool,
}

/// What is sent again on a new connection.
#[derive(Debug)]
pub(super) struct SendAgain {
    /// The next seq of each node that the peer has received something of.
    pub(super) received: HashMap<String, u64>,
    /// Actions of ours that the peer has not received.
    pub(super) actions: Vec<Action>,
    /// Whether we had half-closed.
    pub(super) half_closed: bool,
}

impl Link {
    pub(super) fn new(side: Side, resumable: bool) -> Self {
        let resume = resumable.then(Box::default);
        Self { side, resume }
    }

    pub(super) fn state(&self) -> LinkState {
        let resume = self.resume.as_ref();
        resume.map_or(LinkState::Up, |resume| resume.state)
    }

    pub(super) fn is_up(&self) -> bool {
        self.state() == LinkState::Up
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(self.state(), LinkState::Down(_))
    }

    pub(super) fn is_returning(&self) -> bool {
        matches!(self.state(), LinkState::Returning(_))
    }

    /// Deadline for the new connection, or for RESUME on it.
    pub(super) fn deadline(&self, grace: Duration) -> Option<Time> {
        match (self.state(), self.side) {
            (LinkState::Up, _) => None,
            // A client waits as long for the answer as for the connection. A server waits for RESUME alone, which its
            // client sends at once (D-29).
            (LinkState::Down(since), _) | (LinkState::Returning(since), Side::Client) => {
                Some(since + grace)
            }
            (LinkState::Returning(since), Side::Server) => Some(since + HELLO),
        }
    }

    /// Retains nothing for another connection from now on.
    pub(super) fn without_resume(&mut self) {
        self.resume = None;
    }

    /// The connection is lost; `false` if the session ends with it.
    pub(super) fn lost(&mut self, now: Time) -> bool {
        let Some(resume) = &mut self.resume else {
            return false;
        };
        resume.state = LinkState::Down(now);
        // A report that was not sent is out of date on the next connection.
        resume.hello = None;
        true
    }

    /// There is a new connection; `false` if the session ended with the last one.
    pub(super) fn returned(&mut self, now: Time) -> bool {
        let resume = self.resume.as_mut();
        let resume = resume.map(|resume| resume.state = LinkState::Returning(now));
        resume.is_some()
    }

    /// Retains an action of ours as long as it may have to be sent again. Returns the number of actions sent up to and
    /// including it, 0 if the session is not resumable.
    pub(super) fn retain(&mut self, action: &Action, graph: &mut Graph) -> Result<usize, Status> {
        let Some(resume) = &mut self.resume else {
            return Ok(0);
        };
        // Charged before it is sent: no action may be sent that could not be sent again.
        graph.quota.retain(action_bytes(action) as u64)?;
        resume.asked.push(action.clone());
        Ok(resume.known + resume.asked.len())
    }

    /// The peer has answered our action number `ordinal`: it has received that action and all that were sent before it.
    pub(super) fn answered(&mut self, ordinal: usize, graph: &mut Graph) {
        if let Some(resume) = &mut self.resume {
            resume.received_asked(ordinal, graph);
        }
    }

    /// Counts a received action, unless it is RESUME, which must come first.
    pub(super) fn note_received(&mut self, action: &Action) -> Result<(), Status> {
        let Some(resume) = self.resume.as_mut().filter(|_| &*action.name != RESUME) else {
            return Ok(());
        };
        // Only a server rejects this: it sends actions as soon as it knows what its client has received, which may be
        // before the client has read the server's report.
        if resume.state != LinkState::Up && self.side == Side::Server {
            let message = "the first action on a connection that resumes a session must be RESUME";
            return Err(Status::new(Reason::BadMessage, message));
        }
        resume.received += 1;
        Ok(())
    }

    /// We have half-closed.
    pub(super) fn half_closed(&mut self) {
        if let Some(resume) = &mut self.resume {
            resume.half_closed = true;
        }
    }

    /// Whether we have half-closed, in a resumable session.
    pub(super) fn has_half_closed(&self) -> bool {
        let resume = self.resume.as_ref();
        resume.is_some_and(|resume| resume.half_closed)
    }

    /// Prepares the client's first message: RESUME with our report. Returns the id of the node with the answer.
    pub(super) fn prepare_hello(&mut self, graph: &mut Graph) -> Result<NodeId, Status> {
        // The node of an earlier report is left if that connection was lost before the answer.
        self.hello_is_answered(graph);
        let (ours, theirs) = (graph.make()?, graph.make()?);
        let known = graph.get_mut(ours);
        (known.owner, known.transient) = (NodeProducer::Local(None), true);
        graph.get_mut(theirs).owner = NodeProducer::Peer(None);
        let (have, answer) = (graph.get(ours).id.clone(), graph.get(theirs).id.clone());
        let mut message = WireMessage {
            fragments: in_fragments(&have, self.report(graph), graph.limits().max_fragment_bytes),
            ..WireMessage::default()
        };
        message.actions.push(Action {
            name: RESUME.into(),
            inputs: vec![Param::new(HAVE, have)],
            outputs: vec![Param::new(HAVE, answer.clone())],
            ..Action::default()
        });
        if let Some(resume) = &mut self.resume {
            (resume.hello, resume.hello_node) = (Some(message), Some(ours));
        }
        Ok(answer)
    }

    /// Takes the client's first message.
    pub(super) fn take_hello(&mut self) -> Option<WireMessage> {
        self.resume.as_mut()?.hello.take()
    }

    pub(super) fn has_hello(&self) -> bool {
        let resume = self.resume.as_ref();
        resume.is_some_and(|resume| resume.hello.is_some())
    }

    /// Removes the node of our report: the report was read, or its connection was lost.
    pub(super) fn hello_is_answered(&mut self, graph: &mut Graph) {
        let resume = self.resume.as_mut();
        if let Some(node) = resume.and_then(|resume| resume.hello_node.take()) {
            graph.mark_removed(node);
        }
    }

    /// Handles the peer's report; returns ours, taken before anything is sent again.
    pub(super) fn report_received(&mut self, text: &[u8], graph: &Graph) -> Result<String, Status> {
        if !self.is_returning() {
            let message = "RESUME is accepted once, on a connection that resumes a session";
            return Err(Status::new(Reason::BadMessage, message));
        }
        let max = graph.limits().max_nodes;
        let theirs = ReceivedSeqs::parse(text, max).ok_or_else(|| {
            let message = format!(
                "the input have is not of the form {{\"nodes\":{{\"ID\":SEQ}},\"actions\":N}} with at most {max} nodes"
            );
            Status::new(Reason::BadConfig, message)
        })?;
        // Parsed first: a malformed report must not count as the one that resumes.
        let ours = self.report(graph);
        if let Some(resume) = &mut self.resume {
            resume.state = LinkState::Up;
            resume.theirs = Some(theirs);
        }
        Ok(ours)
    }

    /// Takes what the peer's report asks for; `None` if there was no report since the last call.
    pub(super) fn take_send_again(&mut self, graph: &mut Graph) -> Option<SendAgain> {
        let resume = self.resume.as_mut()?;
        let theirs = resume.theirs.take()?;
        resume.received_asked(theirs.actions, graph);
        Some(SendAgain {
            received: theirs.nodes,
            actions: resume.asked.clone(),
            half_closed: resume.half_closed,
        })
    }

    /// Quota bytes of the retained actions.
    #[cfg(any(test, fuzzing))]
    pub(super) fn asked_bytes(&self) -> u64 {
        let resume = self.resume.as_ref();
        let asked = resume.into_iter().flat_map(|resume| &resume.asked);
        asked.map(|action| action_bytes(action) as u64).sum()
    }

    /// Our report: the contiguous prefix of each of the peer's nodes, and the number of received actions.
    fn report(&self, graph: &Graph) -> String {
        let nodes = graph.keys().map(|key| graph.get(key));
        // Released and dropped pieces count as received (`next_seq` includes them): they must not be sent again.
        let theirs = nodes.filter(|node| matches!(node.owner, NodeProducer::Peer(_)));
        let retained: serde_json::Map<String, Value> = theirs
            .filter(|node| !node.log.is_empty())
            .map(|node| (node.id.to_string(), Value::from(node.next_seq())))
            .collect();
        let received = self.resume.as_ref().map_or(0, |resume| resume.received);
        json!({ "nodes": retained, "actions": received }).to_string()
    }
}

impl Resume {
    /// The peer has received our first `known` actions: they are retained no longer.
    fn received_asked(&mut self, known: usize, graph: &mut Graph) {
        // The number may be the peer's claim: less than is known, or more than was ever sent.
        let more = known.saturating_sub(self.known).min(self.asked.len());
        self.known += more;
        let bytes = self.asked.drain(..more);
        graph
            .quota
            .give_back(bytes.map(|action| action_bytes(&action) as u64).sum());
    }
}

/// A complete JSON leaf with this text.
fn in_fragments(id: &NodeId, text: String, max_fragment_bytes: usize) -> SmallVec<[Fragment; 1]> {
    let mut rest = Bytes::from(text);
    let mut fragments = SmallVec::new();
    // A report of many nodes may be larger than one fragment may be.
    while fragments.is_empty() || !rest.is_empty() {
        let part = rest.split_to(rest.len().min(max_fragment_bytes.max(1)));
        let seq = i32::try_from(fragments.len()).unwrap_or(i32::MAX);
        let metadata = (seq == 0).then(|| Arc::new(Metadata::of("application/json")));
        fragments.push(Fragment {
            id: id.clone(),
            seq,
            last: rest.is_empty(),
            chunk: Some(Chunk {
                metadata,
                payload: Some(Payload::Data(part)),
            }),
            ..Fragment::default()
        });
    }
    fragments
}

/// How long a client may take to send RESUME on a new connection (D-29).
const HELLO: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::port::Config;
    use crate::session::tests::harness::{T0, action};

    #[test]
    fn ev_942_an_action_is_retained_until_the_peer_is_known_to_have_it() {
        let mut graph = Graph::new(&Config::default());
        let mut link = Link::new(Side::Client, true);
        for (ordinal, name) in [(1, "a"), (2, "b"), (3, "c")] {
            let retained = link.retain(&action(name, "", ""), &mut graph);
            assert_eq!(retained.unwrap(), ordinal);
        }
        link.answered(1, &mut graph);
        assert_eq!(graph.quota.retained(), link.asked_bytes());
        assert!(link.lost(T0) && link.returned(T0));
        link.report_received(br#"{"nodes":{},"actions":2}"#, &graph)
            .unwrap();
        let again = link.take_send_again(&mut graph).unwrap();
        let names = again.actions.iter().map(|action| &*action.name);
        assert_eq!(names.collect::<Vec<_>>(), ["c"]);
        assert!(link.take_send_again(&mut graph).is_none());
        assert_eq!(graph.quota.retained(), link.asked_bytes());
    }

    #[test]
    fn ev_940_a_session_without_resume_ends_with_its_connection() {
        let mut link = Link::new(Side::Server, false);
        assert!(!link.lost(T0) && !link.returned(T0) && link.is_up());
        let mut graph = Graph::new(&Config::default());
        link.retain(&action("a", "", ""), &mut graph).unwrap();
        assert_eq!(graph.quota.retained(), 0, "nothing can be sent again");
    }

    #[test]
    fn ev_941_each_side_has_its_own_deadline_to_resume() {
        let grace = Duration::from_secs(60);
        let at = |seconds| T0 + Duration::from_secs(seconds);
        for (side, returning) in [(Side::Client, at(63)), (Side::Server, at(8))] {
            let mut link = Link::new(side, true);
            assert_eq!(link.deadline(grace), None);
            link.lost(at(1));
            assert_eq!(link.deadline(grace), Some(at(61)));
            link.returned(at(3));
            assert_eq!(link.deadline(grace), Some(returning));
        }
    }
}
