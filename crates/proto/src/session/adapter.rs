//! Brings the fragments of peers that deviate from the protocol into the canonical form, before the session sees them.
//!
//! The machines of a session know one protocol: every fragment has a seq, nothing follows a final fragment, and a node
//! with children has no content of its own, unless the children are excerpts. Action Engine 0.4.0 deviates from each of
//! these, which is handled here alone. Differences of encoding are handled by the codecs ([`crate::evergreen`]).

use super::graph::Graph;
use crate::evergreen::{Dialect, Fragment};

/// How the peer's fragments become canonical.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerAdapter {
    /// They are already.
    #[default]
    Canonical,
    /// The peer sends fragments as Action Engine 0.4.0 does (EV-731, EV-740).
    ActionEngine,
}

impl PeerAdapter {
    /// The adapter for peers of this dialect.
    #[must_use]
    pub const fn of(dialect: Dialect) -> Self {
        match dialect {
            Dialect::Grpc | Dialect::Protobuf | Dialect::Json => Self::Canonical,
            Dialect::Msgpack => Self::ActionEngine,
        }
    }

    /// The fragment in canonical form; `None` if it is to be ignored.
    pub(super) fn receive(self, fragment: Fragment, graph: &mut Graph) -> Option<Fragment> {
        match self {
            Self::Canonical => Some(fragment),
            Self::ActionEngine => numbered(as_excerpts(fragment), graph),
        }
    }
}

/// A reference to a node stands for its content, and may stand between chunks (EV-740): that is an excerpt, if need be of
/// the whole, and not a child, which would make the node a tree.
fn as_excerpts(mut fragment: Fragment) -> Fragment {
    // A fragment of 0.4.0 refers to one node.
    if fragment.children.len() == 1 {
        fragment.range.get_or_insert_with(|| Box::new(0..u64::MAX));
    }
    fragment
}

/// Gives a fragment without a seq the one after the highest that was accepted (EV-731), and ignores one past the final
/// (EV-740). The reference implementation numbers what it forwards as it arrives, so that a final fragment may come
/// after fragments with higher seqs; those are removed then, where the canonical protocol aborts the session (EV-206).
fn numbered(mut fragment: Fragment, graph: &mut Graph) -> Option<Fragment> {
    let Some(key) = graph.find(&fragment.id) else {
        // The node is not created here: the session does that, after its own checks.
        fragment.seq = fragment.seq.max(0);
        return Some(fragment);
    };
    let node = graph.get(key);
    let next = || {
        let highest = node.highest();
        highest.map_or(0, |highest| highest.saturating_add(1))
    };
    let seq = u32::try_from(fragment.seq).unwrap_or_else(|_| next());
    // Before the removal below: an ignored fragment must change nothing.
    if node.last.is_some_and(|last| seq > last) {
        return None;
    }
    if fragment.last && !node.has(seq) {
        graph.remove_early_from(key, seq);
    }
    fragment.seq = i32::try_from(seq).ok()?;
    Some(fragment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::port::Config;
    use crate::session::tests::harness::{branch, empty, more};

    fn receive(graph: &mut Graph, fragment: Fragment) -> Option<Fragment> {
        PeerAdapter::ActionEngine.receive(fragment, graph)
    }

    #[test]
    fn ev_731_a_fragment_without_a_seq_of_an_unknown_node_is_the_first() {
        let mut graph = Graph::new(&Config::default());
        let unnumbered = Fragment {
            seq: -1,
            ..more("n", 0, "a")
        };
        let received = receive(&mut graph, unnumbered.clone()).unwrap();
        assert_eq!(received.seq, 0);
        assert!(graph.find("n").is_none(), "only the session creates nodes");
        let canonical = PeerAdapter::Canonical.receive(unnumbered, &mut graph);
        assert_eq!(canonical.unwrap().seq, -1, "left for the session to refuse");
    }

    #[test]
    fn ev_740_a_reference_without_a_range_is_an_excerpt_of_the_whole() {
        let mut graph = Graph::new(&Config::default());
        let received = receive(&mut graph, branch("n", 0, &["child"])).unwrap();
        assert_eq!(received.range.as_deref(), Some(&(0..u64::MAX)));
        let end = receive(&mut graph, empty("n", 1, true)).unwrap();
        assert_eq!(end.range, None, "nothing is referred to");
    }
}
