//! Back-pressure: when to stop reading the connection and when to continue (EV-802, D-28).
//!
//! Received content is retained whether reading is paused or not; a pause only leaves further bytes at the sender while
//! nothing reads them. It must never hold back content that a reader waits for, so there is no pause while a reader is
//! parked, and bytes that no running action can read count against the quota only.

use super::calls::Calls;
use super::graph::closure::Closure;

/// Whether reading is paused, and what that was decided on.
#[derive(Debug, Default)]
pub(super) struct InboundFlow {
    paused: bool,
    /// Unread total at the last count; a recount is only worth it once the total has moved away from this.
    recount_at: u64,
}

impl InboundFlow {
    /// Whether reading the connection is to be paused.
    pub(super) fn pauses(&mut self, calls: &mut Calls) -> bool {
        self.note_changes(calls);
        let high = calls.nodes.config.limits.inbound_high_bytes;
        if !self.paused && self.unread_exceeds(high, calls) {
            self.paused = true;
        }
        self.paused
    }

    /// Whether reading may continue after a pause; `true` once.
    pub(super) fn continues(&mut self, calls: &mut Calls) -> bool {
        self.note_changes(calls);
        // Only what a reader does can end a pause: while reading is paused, nothing arrives.
        let reads = std::mem::take(&mut calls.nodes.flow.reads);
        // A mark of its own, so that reading does not stop and start with each message.
        let low = calls.nodes.config.limits.inbound_low_bytes;
        if !reads || !self.paused || self.unread_exceeds(low, calls) {
            return false;
        }
        self.paused = false;
        true
    }

    #[cfg(any(test, fuzzing))]
    pub(super) const fn is_paused(&self) -> bool {
        self.paused
    }

    /// Forces a recount if the set of nodes that running actions can read has changed.
    fn note_changes(&mut self, calls: &mut Calls) {
        if std::mem::take(&mut calls.nodes.flow.closures) {
            self.recount_at = 0;
        }
    }

    /// Whether more than `limit` unread bytes wait for running actions alone.
    fn unread_exceeds(&mut self, limit: u64, calls: &mut Calls) -> bool {
        let total = calls.nodes.graph.unread;
        if calls.nodes.readers.parked() > 0 || total <= limit {
            return false;
        }
        // A count walks the whole closure, so it is repeated only after the total has moved enough to matter.
        let step = calls.nodes.config.limits.inbound_high_bytes / RECOUNT_STEPS;
        // Zero stands for "count again": the closures have changed, so that the old total says nothing.
        if total.abs_diff(self.recount_at) < step && self.recount_at != 0 {
            return self.paused;
        }
        self.recount_at = total;
        unread_by_actions(calls) > limit
    }
}

/// Unread bytes below what unfinished actions read: the inputs of the peer's actions, the outputs of ours. Fewer, if
/// there are too many nodes to visit: the quota bounds what is retained without a pause.
fn unread_by_actions(calls: &mut Calls) -> u64 {
    // Content that no unfinished action reads might never be passed: it must not stop the connection (D-28).
    let roots = calls.table.iter().flat_map(|(_, entry)| {
        if entry.served {
            &entry.inputs
        } else {
            &entry.outputs
        }
    });
    let graph = &calls.nodes.graph;
    calls.nodes.readers.budget.spend(|visits| {
        let read = Closure::new(graph, roots.copied().map(Some), visits);
        read.map(|key| graph.get(key).unread).sum()
    })
}

/// Number of steps that the high-water mark is divided into: the total must move by one step before it is counted
/// again.
const RECOUNT_STEPS: u64 = 64;
