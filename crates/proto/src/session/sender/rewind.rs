//! Sends again on a new connection what the peer has not received (EV-942).

use std::collections::{HashMap, VecDeque};

use super::Sender;
use crate::evergreen::Action;
use crate::session::graph::{Graph, LogPiece, NodeKind, SendState};
use crate::session::port::{LeafOrder, NodeKey};

impl Sender {
    /// Fills the queue anew after [`rewind`]: these actions, then what is left of `first`, then of all other nodes.
    pub(in crate::session) fn refill(
        &mut self,
        graph: &mut Graph,
        actions: Vec<Action>,
        first: Option<NodeKey>,
    ) {
        self.turns.clear();
        self.actions.clear();
        self.bytes = 0;
        for action in actions {
            self.push_action(action);
        }
        // First: a leaf that waits for its turn is counted with its node below, not in the queue.
        let trees = match self.order {
            LeafOrder::Reading => line_up(graph),
            LeafOrder::Free => Vec::new(),
        };
        // `first` is our report: the client can send nothing again before it has read that.
        let rest = graph.keys().filter(|key| Some(*key) != first);
        for key in first.into_iter().chain(rest) {
            if graph.get(key).is_unsent() {
                self.queue_rest(key, graph);
            }
        }
        for tree in trees {
            self.next_turn(tree, None, graph);
        }
    }
}

/// Rewinds each node of ours to what the peer has received, and makes trees wait for children that it has not
/// received completely (EV-508).
pub(in crate::session) fn rewind(graph: &mut Graph, theirs: &HashMap<String, u64>) {
    for key in graph.keys() {
        let node = graph.get_mut(key);
        let next = node.next_seq();
        // Released pieces cannot be sent again.
        let retained = u32::try_from(node.log.released()).unwrap_or(u32::MAX);
        // What the peer claims is clamped to what there is: it may be wrong about nodes that it never had.
        let has = theirs.get(&*node.id).copied().unwrap_or(0);
        // Nodes of an earlier RESUME are not sent again.
        let has = if node.transient {
            u32::MAX
        } else {
            u32::try_from(has).unwrap_or(u32::MAX)
        };
        // Only the parent survives: turns, lines and counts are rebuilt from the logs, whatever order the old client
        // had.
        if let Some(sending) = &mut node.sending {
            **sending = SendState {
                sent: has.min(next).max(retained),
                parent: sending.parent,
                ..SendState::default()
            };
        }
    }
    for key in graph.keys() {
        let node = graph.get_mut(key);
        // A second pass: the first one has reset the counts of all trees.
        let whole = node.is_complete() && !node.is_unsent();
        let Some(sending) = node.sending.as_mut().filter(|_| !whole) else {
            continue;
        };
        sending.awaited = sending.parent.is_some();
        let parent = sending.parent.map(|parent| graph.get_mut(parent));
        if let Some(parent) = parent.and_then(|parent| parent.sending.as_mut()) {
            parent.open_children += 1;
        }
    }
}

/// Puts children that were not sent at all in line in reading order, as when they were listed (EV-722). Returns the
/// trees whose next child may be sent.
fn line_up(graph: &mut Graph) -> Vec<NodeKey> {
    let trees = graph.keys().filter(|tree| {
        let node = graph.get(*tree);
        node.kind == NodeKind::Tree && node.sending.is_some()
    });
    let trees: Vec<NodeKey> = trees.collect();
    for &tree in &trees {
        let reported = graph.get(tree).sending.as_ref().map_or(0, |it| it.sent);
        let listed: Vec<(bool, NodeKey)> = (0..graph.get(tree).next_seq())
            .filter_map(|seq| match graph.get(tree).piece(seq) {
                Some(LogPiece::Children(children)) => Some((seq < reported, children)),
                _ => None,
            })
            .flat_map(|(reported, children)| children.iter().map(move |child| (reported, *child)))
            .collect();
        let (mut line, mut announced, mut turn) = (VecDeque::new(), 0, None);
        for (reported, child) in listed {
            let Some(sending) = &mut graph.get_mut(child).sending else {
                continue;
            };
            if sending.parent != Some(tree) || !sending.awaited || sending.pending_at.is_some() {
                continue;
            }
            // The client has its beginning, so it is in the client's order already and goes on.
            if sending.sent > 0 {
                turn = Some(child);
                continue;
            }
            (sending.pending_at, sending.known) = (Some(0), reported);
            line.push_back(child);
            // Only lists that the client has received count: the others announce their leaves when they are sent again.
            announced += usize::from(reported);
        }
        if let Some(sending) = &mut graph.get_mut(tree).sending {
            (sending.line, sending.announced, sending.turn) = (line, announced, turn);
        }
    }
    trees
}
