//! Lists what is missing below a node, for the error of a reader whose content can no longer arrive (EV-110).

use super::Graph;
use super::closure::Closure;
use crate::session::port::NodeKey;

/// The first node below `root` for which two different fragments had the same seq.
pub(in crate::session) fn repeated(graph: &Graph, root: NodeKey) -> Option<(&str, u32)> {
    let mut visits = MISSING_VISITS;
    Closure::new(graph, [Some(root)], &mut visits).find_map(|key| {
        let node = graph.get(key);
        Some((&*node.id, node.repeated?))
    })
}

/// Up to 16 missing `id` or `id@seq` below a node, in reading order as far as that is known.
pub(in crate::session) fn missing(graph: &Graph, root: NodeKey) -> Vec<String> {
    let mut visits = MISSING_VISITS;
    let open = Closure::new(graph, [Some(root)], &mut visits)
        .map(|key| graph.get(key))
        // Nodes of ours are not the peer's to send; if they never end, the reader waits for an action and not for the
        // peer.
        .filter(|node| !node.is_complete() && !node.owner.is_local());
    let named = open.map(|node| match node.highest() {
        Some(_) => format!("{}@{}", node.id, node.next_seq()),
        None => node.id.to_string(),
    });
    named.take(MISSING_NAMED).collect()
}

/// Number of missing items that an error names (EV-110).
const MISSING_NAMED: usize = 16;
/// Number of edges that the search for them follows.
const MISSING_VISITS: u32 = 10_000;
