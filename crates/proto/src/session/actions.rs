//! The table of unfinished actions: those that we run for the peer (served) and those that we sent to it (asked).
//!
//! ```text
//!   served:  received ──► running ──finish / fail / deadline──► removed
//!   asked:   sent ──► running at the peer ──every output complete──► removed
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use bytestring::ByteString;

use super::port::{ActionKey, NodeKey};
use super::slab::Slab;
use crate::time::Time;

#[derive(Debug)]
pub(super) struct ActionEntry {
    pub(super) name: ByteString,
    pub(super) inputs: Vec<NodeKey>,
    /// Bound outputs, except those for statuses.
    pub(super) outputs: Vec<NodeKey>,
    /// The output `__status__` (EV-921).
    pub(super) status: Option<NodeKey>,
    /// The output `__dispatch_status__`: whether the action could be started (EV-736).
    pub(super) dispatch: Option<NodeKey>,
    /// Nodes created below its outputs.
    pub(super) made: Vec<NodeKey>,
    pub(super) deadline: Option<Time>,
    /// Whether we run it; otherwise the peer does.
    pub(super) served: bool,
    /// Whether it waits for nothing but its cursors, as the shell reports (D-3).
    pub(super) waiting: bool,
    /// Whether the peer has cancelled it.
    pub(super) cancelled: bool,
    /// Number of its outputs that are not complete; only for actions that we sent.
    pub(super) incomplete: usize,
    /// Inputs that it has not begun to read; only tracked where that decides what is retained (EV-955).
    pub(super) unopened: Vec<NodeKey>,
    /// Number of actions of ours sent up to and including this one, in a resumable session (EV-942).
    pub(super) ordinal: usize,
    /// How long its answer may take, counted while there is a connection; only for actions that we sent (EV-811).
    time_limit: Option<Duration>,
    /// Quota bytes of what the shell holds for it: its configs, and what the shell charges.
    pub(super) aside_bytes: u64,
}

impl ActionEntry {
    pub(super) fn new(name: ByteString, served: bool) -> Self {
        Self {
            name,
            inputs: Vec::new(),
            outputs: Vec::new(),
            status: None,
            dispatch: None,
            made: Vec::new(),
            deadline: None,
            served,
            waiting: false,
            cancelled: false,
            incomplete: 0,
            unopened: Vec::new(),
            ordinal: 0,
            time_limit: None,
            aside_bytes: 0,
        }
    }

    /// Whether this node is an input of the action that it starts to read now.
    pub(super) fn opens(&mut self, node: NodeKey) -> bool {
        let at = self.unopened.iter().position(|input| *input == node);
        at.is_some_and(|at| {
            self.unopened.swap_remove(at);
            true
        })
    }
}

#[derive(Debug)]
pub(super) struct Actions {
    entries: Slab<ActionEntry>,
    deadlines: BTreeSet<(Time, ActionKey)>,
    /// Number of actions that wait for nothing but cursors.
    waiting: usize,
    /// Number of actions of the peer.
    served: usize,
    /// Actions of ours whose time limit has not started.
    unstarted: Vec<ActionKey>,
}

impl Actions {
    pub(super) const fn new() -> Self {
        Self {
            entries: Slab::new(),
            deadlines: BTreeSet::new(),
            waiting: 0,
            served: 0,
            unstarted: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, entry: ActionEntry) -> ActionKey {
        self.served += usize::from(entry.served);
        ActionKey(self.entries.insert(entry))
    }

    pub(super) fn remove(&mut self, key: ActionKey) -> Option<ActionEntry> {
        let entry = self.entries.remove(key.0)?;
        self.waiting -= usize::from(entry.waiting);
        self.served -= usize::from(entry.served);
        self.unstarted.retain(|other| *other != key);
        if let Some(deadline) = entry.deadline {
            self.deadlines.remove(&(deadline, key));
        }
        Some(entry)
    }

    pub(super) fn get(&self, key: ActionKey) -> Option<&ActionEntry> {
        self.entries.get(key.0)
    }

    pub(super) fn get_mut(&mut self, key: ActionKey) -> Option<&mut ActionEntry> {
        self.entries.get_mut(key.0)
    }

    pub(super) const fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of unfinished actions of the peer.
    pub(super) const fn served(&self) -> usize {
        self.served
    }

    /// Actions that we sent.
    pub(super) fn asked(&self) -> impl Iterator<Item = ActionKey> {
        let asked = self.iter().filter(|(_, entry)| !entry.served);
        asked.map(|(key, _)| key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ActionKey, &ActionEntry)> {
        self.entries
            .iter()
            .map(|(key, entry)| (ActionKey(key), entry))
    }

    /// Whether some action does something other than wait for its cursors.
    pub(super) const fn any_runs(&self) -> bool {
        self.entries.len() > self.waiting
    }

    pub(super) fn set_deadline(&mut self, key: ActionKey, deadline: Time) {
        if let Some(entry) = self.entries.get_mut(key.0) {
            entry.deadline = Some(deadline);
            self.deadlines.insert((deadline, key));
        }
    }

    /// Sets the time limit of an action of ours; it starts with [`Actions::start_time_limits`].
    pub(super) fn set_time_limit(&mut self, key: ActionKey, limit: Duration) {
        if let Some(entry) = self.entries.get_mut(key.0) {
            entry.time_limit = Some(limit);
            self.unstarted.push(key);
        }
    }

    /// Starts pending time limits, because there is a connection.
    pub(super) fn start_time_limits(&mut self, now: Time) {
        for key in std::mem::take(&mut self.unstarted) {
            let entry = self.entries.get_mut(key.0);
            if let Some(limit) = entry.and_then(|entry| entry.time_limit.take()) {
                self.set_deadline(key, now + limit);
            }
        }
    }

    /// Pauses the time limits of our actions, because the connection is lost; the time left is retained.
    pub(super) fn pause_time_limits(&mut self, now: Time) {
        let asked: Vec<ActionKey> = self.asked().collect();
        for key in asked {
            let Some(entry) = self.entries.get_mut(key.0) else {
                continue;
            };
            if let Some(deadline) = entry.deadline.take() {
                self.deadlines.remove(&(deadline, key));
                self.set_time_limit(key, deadline - now);
            }
        }
    }

    /// The earliest deadline.
    pub(super) fn deadline(&self) -> Option<(Time, ActionKey)> {
        self.deadlines.first().copied()
    }

    pub(super) fn set_waiting(&mut self, key: ActionKey, waiting: bool) {
        if let Some(entry) = self.entries.get_mut(key.0) {
            self.waiting -= usize::from(entry.waiting);
            self.waiting += usize::from(waiting);
            entry.waiting = waiting;
        }
    }
}
