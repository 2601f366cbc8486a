//! The unfinished actions of a msgpack session, with the progress of their outputs.
//!
//! ```text
//!   server:  received(action) ──► + __dispatch_status__, __status__ ──► sent(fragment)… ──► final: removed
//!   client:  asked(action) ──► id ──► note_received(message): status nodes removed, outputs left open ended
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::evergreen::{
    Action, Chunk, Fragment, Fragments, NodeId, Param, Payload, Reason, Status, WireMessage,
};

/// The open actions of one session, with their outputs.
#[derive(Debug, Default)]
pub(crate) struct OpenActions {
    actions: BTreeMap<NodeId, Vec<NodeId>>,
    nodes: BTreeMap<NodeId, OpenOutput>,
    /// Number of actions sent, or nodes received, so far.
    count: u64,
}

/// An output that has not ended.
#[derive(Debug)]
struct OpenOutput {
    next: i32,
    /// Order of opening: statuses end after the outputs that were opened before them.
    order: u64,
    /// The action that ends with this output.
    ends: Option<NodeId>,
}

impl OpenActions {
    /// A server receives an action: its ids become ours, and its two status nodes become outputs.
    pub(crate) fn received(&mut self, id: &NodeId, action: &mut Action) {
        if *action.name == *LIST_THERE {
            action.name = LIST_HERE.into();
        }
        if *action.name == *CANCEL {
            for param in &mut action.inputs {
                // An action's own id is accepted in place of an output id (EV-742).
                if self.actions.contains_key(&param.id) {
                    param.id = status_node(&param.id, STATUS);
                }
            }
        }
        // The ports are opened between the two statuses: `failures` ends nodes in this order, and `__status__`, on
        // which the client waits for the whole action, has to be the last (EV-735).
        let [dispatch, status] =
            [DISPATCH, STATUS].map(|name| Param::new(name, status_node(id, name)));
        self.open(&dispatch.id, None);
        for param in &action.outputs {
            self.open(&param.id, None);
        }
        self.open(&status.id, Some(id.clone()));
        action.outputs.extend([dispatch, status]);
        let outputs = action.outputs.iter().map(|param| param.id.clone());
        self.actions
            .entry(id.clone())
            // An id that is in use stays with the first action. The session refuses the second one, because its status
            // nodes are outputs already (EV-505).
            .or_insert_with(|| outputs.collect());
    }

    /// The last messages of a server that aborts: every open output of every action ends with `status`.
    pub(crate) fn failures(&mut self, status: &Arc<Status>) -> WireMessage {
        // Nothing follows an abort, so the actions are forgotten with their nodes.
        self.actions.clear();
        let mut open: Vec<(NodeId, OpenOutput)> =
            std::mem::take(&mut self.nodes).into_iter().collect();
        open.sort_by_key(|(_, open)| open.order);
        let failed = |(id, open): (NodeId, OpenOutput)| ending(id, open.next, status);
        WireMessage {
            fragments: open.into_iter().map(failed).collect(),
            ..WireMessage::default()
        }
    }

    /// A client sends an action: returns the id under which it is sent.
    pub(crate) fn asked(&mut self, action: &Action) -> NodeId {
        self.count += 1;
        // evergreen.v2 has no action ids (EV-501), so the dialect makes one; it has to be unique in this session only.
        let id = NodeId::from(format!("call-{}", self.count));
        let outputs = action.outputs.iter().map(|param| param.id.clone());
        let outputs: Vec<NodeId> = outputs.collect();
        outputs.iter().for_each(|node| self.open(node, None));
        self.actions.insert(id.clone(), outputs);
        id
    }

    /// A client receives a message: removes the status nodes of its actions, and ends outputs that they leave open with
    /// their status. Readers do not wait for an output whose action has ended.
    pub(crate) fn note_received(&mut self, message: &mut WireMessage) {
        let mut received = Fragments::with_capacity(message.fragments.len());
        for fragment in std::mem::take(&mut message.fragments) {
            // The session has only the outputs that the action listed: status nodes are removed before it sees them.
            let Some((action, dispatched)) = self.status_of(&fragment.id) else {
                self.grown(&fragment);
                received.push(fragment);
                continue;
            };
            let failure = match fragment.chunk.and_then(|chunk| chunk.payload) {
                Some(Payload::Status(Some(status))) => Some(status),
                // The action was dispatched successfully: its outputs are still to arrive.
                _ if dispatched => continue,
                _ => None,
            };
            let outputs = self.actions.remove(&action).unwrap_or_default();
            for node in outputs {
                if let Some(open) = self.nodes.remove(&node) {
                    // Success with an output left open is a server's mistake: to readers it is a truncated stream,
                    // never a normal end (EV-972).
                    let status = failure.clone().unwrap_or_else(truncated);
                    received.push(ending(node, open.next, &status));
                }
            }
        }
        message.fragments = received;
    }

    /// Whether a node is a status of one of our actions: returns the action, and whether it is the dispatch status.
    fn status_of(&self, node: &NodeId) -> Option<(NodeId, bool)> {
        let (action, name) = node.rsplit_once('#')?;
        let (action, _) = self.actions.get_key_value(action)?;
        match name {
            STATUS => Some((action.clone(), false)),
            DISPATCH => Some((action.clone(), true)),
            _ => None,
        }
    }

    fn open(&mut self, node: &NodeId, ends: Option<NodeId>) {
        self.count += 1;
        let order = self.count;
        let open = OpenOutput {
            next: 0,
            order,
            ends,
        };
        self.nodes.entry(node.clone()).or_insert(open);
    }

    /// A server has sent a fragment, or a client has received one.
    pub(crate) fn grown(&mut self, fragment: &Fragment) {
        if fragment.last {
            let ended = self.nodes.remove(&fragment.id);
            if let Some(action) = ended.and_then(|open| open.ends) {
                self.actions.remove(&action);
            }
        } else if let Some(open) = self.nodes.get_mut(&fragment.id) {
            // A negative seq appends (EV-731).
            let seq = if fragment.seq < 0 {
                open.next
            } else {
                fragment.seq
            };
            // Fragments may arrive in any order, so the highest seq counts; an end at a lower one would lie within the
            // content.
            open.next = open.next.max(seq.saturating_add(1));
        }
    }
}

fn ending(id: NodeId, seq: i32, status: &Arc<Status>) -> Fragment {
    Fragment {
        id,
        seq,
        last: true,
        children: Vec::new(),
        range: None,
        chunk: Some(Chunk {
            metadata: None,
            payload: Some(Payload::Status(Some(Arc::clone(status)))),
        }),
    }
}

fn truncated() -> Arc<Status> {
    let message = "the action ended and left this output without its final fragment";
    Arc::new(Status::new(Reason::Truncated, message))
}

fn status_node(action: &str, name: &str) -> NodeId {
    format!("{action}#{name}").into()
}

const STATUS: &str = "__status__";
const DISPATCH: &str = "__dispatch_status__";
const CANCEL: &str = "CANCEL";
const LIST_THERE: &str = "__list_actions__";
const LIST_HERE: &str = "LIST_ACTIONS";
