//! The table of unfinished actions: those that we run for the peer (served) and those that we sent to it (asked).
//!
//! ```text
//!   served:  received ──► running ──finish / fail / deadline──► removed
//!   asked:   sent ──► running at the peer ──every output complete──► removed
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use bytestring::ByteString;

use crate::session::port::{ActionKey, NodeKey};
use crate::session::slab::Slab;
use crate::time::Time;

/// One unfinished action.
#[derive(Debug, Default)]
pub(in crate::session) struct ActionEntry {
    pub(in crate::session) name: ByteString,
    pub(in crate::session) inputs: Vec<NodeKey>,
    /// Bound outputs, except those for statuses.
    pub(in crate::session) outputs: Vec<NodeKey>,
    /// The output `__status__` (EV-921).
    pub(in crate::session) status: Option<NodeKey>,
    /// The output `__dispatch_status__`: whether the action could be started (EV-736).
    pub(in crate::session) dispatch: Option<NodeKey>,
    pub(in crate::session) deadline: Option<Time>,
    /// Whether we run it; otherwise the peer does.
    pub(in crate::session) served: bool,
    /// Whether the peer has cancelled it.
    pub(in crate::session) cancelled: bool,
    /// Number of its outputs that are not complete; only for actions that we sent.
    pub(in crate::session) incomplete: usize,
    /// Number of actions of ours sent up to and including this one, in a resumable session (EV-942).
    pub(in crate::session) ordinal: usize,
    /// How long its answer may take, counted while there is a connection; only for actions that we sent (EV-811).
    time_limit: Option<Duration>,
    /// Quota bytes of what the shell holds for it: its configs, its target, and what the shell charges.
    pub(in crate::session) aside_bytes: u64,
}

impl ActionEntry {
    pub(in crate::session) fn new(name: ByteString, served: bool) -> Self {
        Self {
            name,
            served,
            ..Self::default()
        }
    }
}

/// All unfinished actions; see the module documentation.
#[derive(Debug, Default)]
pub(in crate::session) struct ActionTable {
    entries: Slab<ActionEntry>,
    deadlines: BTreeSet<(Time, ActionKey)>,
    /// Number of actions of the peer.
    served: usize,
    /// Actions of ours whose time limit has not started.
    unstarted: Vec<ActionKey>,
}

impl ActionTable {
    pub(in crate::session) fn insert(
        &mut self,
        entry: ActionEntry,
    ) -> (ActionKey, &mut ActionEntry) {
        self.served += usize::from(entry.served);
        let (key, entry) = self.entries.insert_mut(entry);
        (ActionKey(key), entry)
    }

    /// Removes the actions that we sent: nobody is left to answer them.
    pub(in crate::session) fn remove_asked(&mut self) {
        let asked: Vec<ActionKey> = self.asked().collect();
        for key in asked {
            self.remove(key);
        }
    }

    pub(in crate::session) fn remove(&mut self, key: ActionKey) -> Option<ActionEntry> {
        let entry = self.entries.remove(key.0)?;
        self.served -= usize::from(entry.served);
        // The lists of limits and deadlines name only actions of the table.
        self.unstarted.retain(|other| *other != key);
        if let Some(deadline) = entry.deadline {
            self.deadlines.remove(&(deadline, key));
        }
        Some(entry)
    }

    pub(in crate::session) fn get(&self, key: ActionKey) -> Option<&ActionEntry> {
        self.entries.get(key.0)
    }

    pub(in crate::session) fn get_mut(&mut self, key: ActionKey) -> Option<&mut ActionEntry> {
        self.entries.get_mut(key.0)
    }

    pub(in crate::session) const fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of unfinished actions of the peer.
    pub(in crate::session) const fn served(&self) -> usize {
        self.served
    }

    /// Actions that we sent.
    pub(in crate::session) fn asked(&self) -> impl Iterator<Item = ActionKey> {
        let asked = self.iter().filter(|(_, entry)| !entry.served);
        asked.map(|(key, _)| key)
    }

    pub(in crate::session) fn iter(&self) -> impl Iterator<Item = (ActionKey, &ActionEntry)> {
        self.entries
            .iter()
            .map(|(key, entry)| (ActionKey(key), entry))
    }

    pub(in crate::session) fn set_deadline(&mut self, key: ActionKey, deadline: Time) {
        if let Some(entry) = self.entries.get_mut(key.0) {
            entry.deadline = Some(deadline);
            self.deadlines.insert((deadline, key));
        }
    }

    /// Sets the time limit of an action of ours; it starts with [`ActionTable::start_time_limits`].
    pub(in crate::session) fn set_time_limit(&mut self, key: ActionKey, limit: Duration) {
        if let Some(entry) = self.entries.get_mut(key.0) {
            entry.time_limit = Some(limit);
            self.unstarted.push(key);
        }
    }

    /// Starts pending time limits, because there is a connection.
    pub(in crate::session) fn start_time_limits(&mut self, now: Time) {
        for key in std::mem::take(&mut self.unstarted) {
            let entry = self.entries.get_mut(key.0);
            // Taken, so that each limit starts once per connection.
            if let Some(limit) = entry.and_then(|entry| entry.time_limit.take()) {
                self.set_deadline(key, now + limit);
            }
        }
    }

    /// Pauses the time limits of our actions, because the connection is lost; the time left is retained.
    pub(in crate::session) fn pause_time_limits(&mut self, now: Time) {
        let asked: Vec<ActionKey> = self.asked().collect();
        for key in asked {
            let Some(entry) = self.entries.get_mut(key.0) else {
                continue;
            };
            // Only actions of ours: those of the peer keep their deadlines, which bound the work that goes on meanwhile
            // (EV-950).
            if let Some(deadline) = entry.deadline.take() {
                self.deadlines.remove(&(deadline, key));
                self.set_time_limit(key, deadline - now);
            }
        }
    }

    /// The earliest deadline.
    pub(in crate::session) fn deadline(&self) -> Option<(Time, ActionKey)> {
        self.deadlines.first().copied()
    }
}
