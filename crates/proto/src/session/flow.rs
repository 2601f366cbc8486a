//! Back-pressure: when to stop reading the connection and when to continue (EV-802, D-28).
//!
//! Received content is retained whether reading is paused or not; a pause only leaves further bytes at the sender while
//! nothing reads them. It must never hold back content that a reader waits for, so there is no pause while a reader is
//! parked, and bytes that no running action can read count against the quota only.

use super::closure::Closure;
use super::port::SessionOutput;
use super::resume::LinkState;
use super::{SessionMachine, SessionPhase};

#[derive(Debug, Default)]
pub(super) struct InboundFlow {
    pub(super) paused: bool,
    /// Unread total at the last count; a recount is only worth it once the total has moved away from this.
    recount_at: u64,
}

impl InboundFlow {
    /// Forces a recount, because the set of nodes that running actions can read has changed.
    pub(super) const fn closures_changed(&mut self) {
        self.recount_at = 0;
    }
}

impl SessionMachine {
    /// Whether the shell should stop reading from the connection until [`SessionOutput::Resume`]. It still watches the
    /// connection for a close.
    pub fn inbound_paused(&mut self) -> bool {
        // A resuming peer is never paused: the session waits for what it has not sent yet.
        if self.phase != SessionPhase::Open || self.line() != LinkState::Up {
            return false;
        }
        let limits = &self.config.limits;
        let high = limits.inbound_high_bytes;
        if !self.inbound.paused && self.unread_exceeds(high) {
            self.inbound.paused = true;
        }
        self.inbound.paused
    }

    pub(super) fn reader_parked(&mut self) {
        self.resume();
    }

    /// Bytes were read, or an action was removed: perhaps enough to resume.
    pub(super) fn bytes_were_read(&mut self) {
        if self.inbound.paused && !self.unread_exceeds(self.config.limits.inbound_low_bytes) {
            self.resume();
        }
    }

    fn resume(&mut self) {
        if std::mem::take(&mut self.inbound.paused) {
            self.emit(SessionOutput::Resume);
        }
    }

    /// Whether more than `limit` unread bytes wait for running actions alone.
    fn unread_exceeds(&mut self, limit: u64) -> bool {
        let total = self.store.unread;
        if self.parked > 0 || total <= limit {
            return false;
        }
        // A count walks the whole closure, so it is repeated only after the total has moved enough to matter.
        let step = self.config.limits.inbound_high_bytes / RECOUNT_STEPS;
        if total.abs_diff(self.inbound.recount_at) < step && self.inbound.recount_at != 0 {
            return self.inbound.paused;
        }
        self.inbound.recount_at = total;
        self.unread_by_actions() > limit
    }

    /// Unread bytes below what unfinished actions read: the inputs of the peer's actions, the outputs of ours.
    fn unread_by_actions(&self) -> u64 {
        let roots = self.actions.iter().flat_map(|(_, entry)| {
            if entry.served {
                &entry.inputs
            } else {
                &entry.outputs
            }
        });
        Closure::new(&self.store, roots.copied())
            .map(|key| self.store.get(key).unread)
            .sum()
    }
}

/// Number of steps that the high-water mark is divided into: the total must move by one step before it is counted
/// again.
const RECOUNT_STEPS: u64 = 64;
