//! The nodes whose time to live (TTL) will expire (EV-912).
//!
//! A TTL applies to a node and all nodes below it at the time of expiry; a node covered by several TTLs lives until the
//! latest. Expiry times are rounded up to the next second, so that nodes expire together; a sweep is charged to the
//! session's budget of visits.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::session::graph::Graph;
use crate::session::graph::closure::Closure;
use crate::session::port::NodeKey;
use crate::time::Time;

/// Expiry times of the nodes with a TTL of their own. Both collections hold the same nodes.
#[derive(Debug, Default)]
pub(super) struct Ttls {
    order: BTreeSet<(Time, NodeKey)>,
    until: BTreeMap<NodeKey, Time>,
}

impl Ttls {
    /// When the next node expires.
    pub(super) fn next(&self) -> Option<Time> {
        self.order.first().map(|(at, _)| *at)
    }

    pub(super) fn has(&self, node: NodeKey) -> bool {
        self.until.contains_key(&node)
    }

    pub(super) fn len(&self) -> usize {
        self.until.len()
    }

    /// Sets the TTL of a node; a later one that it has already stays. A TTL of zero expires at once.
    pub(super) fn set(&mut self, node: NodeKey, ttl: Duration, since: Time) {
        // A TTL of 0 takes effect at the end of its message, so it is not rounded up.
        let at = if ttl.is_zero() {
            since
        } else {
            next_second(since + ttl)
        };
        self.expire_at(node, at);
    }

    /// Removes the TTL of a node, and returns when the node would have expired.
    pub(super) fn remove(&mut self, node: NodeKey) -> Option<Time> {
        let at = self.until.remove(&node)?;
        self.order.remove(&(at, node));
        Some(at)
    }

    /// Takes the nodes that have expired: those whose time has come, and what is below them and below no node with time
    /// left.
    pub(super) fn expired(
        &mut self,
        now: Time,
        graph: &Graph,
        visits: &mut u32,
    ) -> Vec<(NodeKey, bool)> {
        let due = self.due(now);
        let others = self.until.keys().copied().map(Some);
        let Some(covered) = Closure::new(graph, others, visits).into_all() else {
            for node in due {
                self.expire_at(node, next_second(now + AGAIN));
            }
            return Vec::new();
        };
        // Each edge of a removed node is followed only once, so this needs no budget.
        let mut unlimited = u32::MAX;
        let expired = Closure::new(graph, due.into_iter().map(Some), &mut unlimited);
        let expired = expired.beside(covered);
        expired.map(|node| (node, false)).collect()
    }

    fn expire_at(&mut self, node: NodeKey, at: Time) {
        // A node under several TTLs lives until the latest, whatever the order in which they were set (EV-912).
        let at = self.remove(node).map_or(at, |before| before.max(at));
        self.order.insert((at, node));
        self.until.insert(node, at);
    }

    fn due(&mut self, now: Time) -> Vec<NodeKey> {
        let mut due = Vec::new();
        while let Some(&(at, node)) = self.order.first()
            && at <= now
        {
            self.remove(node);
            due.push(node);
        }
        due
    }
}

fn next_second(at: Time) -> Time {
    let at = at.since_origin();
    let more = u64::from(at.subsec_nanos() > 0);
    Time::new(Duration::from_secs(at.as_secs().saturating_add(more)))
}

/// How long to wait before an undecided expiry is checked again.
const AGAIN: Duration = Duration::from_secs(60);
