//! Back-pressure: when to stop reading the connection and when to continue (EV-802, D-28).
//!
//! What is retained is retained either way; a pause only keeps the bytes that nobody reads yet at the sender. It may
//! never hold back what a reader waits for, so there is none while any reader is parked, and bytes that no running
//! action could read count against the quota alone.

use super::closure::Closure;
use super::port::SessionOutput;
use super::resume::LinkState;
use super::{SessionMachine, SessionPhase};

#[derive(Debug, Default)]
pub(super) struct InboundFlow {
    pub(super) paused: bool,
    /// While the unread bytes of all nodes are above this, counting anew may change the answer.
    recount_at: u64,
}

impl InboundFlow {
    /// What running actions can read has changed.
    pub(super) const fn closures_changed(&mut self) {
        self.recount_at = 0;
    }
}

impl SessionMachine {
    /// Whether the shell should read nothing more from the connection until [`SessionOutput::Resume`]. It still watches it
    /// for a close.
    pub fn inbound_paused(&mut self) -> bool {
        // Nothing is held back of who comes back: what it has not said yet is what the session waits for.
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

    /// Bytes were passed, or an action went away: perhaps enough to resume.
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

    /// Whether more than `limit` bytes wait for running actions alone.
    fn unread_exceeds(&mut self, limit: u64) -> bool {
        let total = self.store.unread;
        if self.parked > 0 || total <= limit {
            return false;
        }
        // Counting follows the whole closure: not again until the total has moved enough to matter.
        let step = self.config.limits.inbound_high_bytes / RECOUNT_STEPS;
        if total.abs_diff(self.inbound.recount_at) < step && self.inbound.recount_at != 0 {
            return self.inbound.paused;
        }
        self.inbound.recount_at = total;
        self.unread_by_actions() > limit
    }

    /// Unread bytes below what unfinished actions read: inputs of the peer's actions, outputs of ours.
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

/// Into how many steps the high-water mark is cut: the total moves by one before it is worth counting again.
const RECOUNT_STEPS: u64 = 64;
