//! Actions that we ask the peer to run.
//!
//! ```text
//!   asked ──every output complete──► done
//!     ├── abandoned, or later than reverse_timeout while the connection is up ──► removed: readers fail, late
//!     └── the peer has half-closed ─────────────────────────────────────────────►    answers are ignored
//! ```

use std::sync::Arc;

use super::actions::ActionEntry;
use super::dropping::NodeFate;
use super::port::{self, ActionKey, ActionRequest, CursorId, NodeKey, SessionOutput, Side};
use super::resume::LinkState;
use super::store::NodeProducer;
use super::{SessionMachine, SessionPhase, reserved};
use crate::evergreen::{Action, Param, Reason, Status};
use crate::time::Time;

impl SessionMachine {
    /// Creates a node that the peer is to produce, as an output of [`SessionMachine::call`].
    ///
    /// # Errors
    /// `NODE_LIMIT` or `RETAINED_LIMIT`; nothing is aborted. Or the status of an aborted session.
    pub fn expect(&mut self) -> Result<NodeKey, Status> {
        if let Some(status) = self.aborted() {
            return Err(Status::clone(status));
        }
        let limits = Arc::clone(&self.config.limits);
        match self.side {
            Side::Server => self.store.make(&limits),
            // Clients use short ids: a server's ids cannot collide with them (EV-216).
            Side::Client => self.store.make_plain(&limits),
        }
    }

    /// Sends an action to the peer and waits for its outputs. [`SessionOutput::Done`] follows when all are complete; an
    /// action without outputs has no visible end (EV-507), so its key is stale at once. A server waits for
    /// `reverse_timeout` (EV-811).
    ///
    /// # Errors
    /// `OUTPUT_NOT_NEW` if an output has a producer already; `RETAINED_LIMIT` if a resumable session has no room to
    /// retain the action; on a server also `ACTION_LIMIT`, and `CANCELLED` once its client has half-closed; the status
    /// of the abort if the session is aborted.
    pub fn call(&mut self, call: ActionRequest) -> Result<ActionKey, Status> {
        if let Some(status) = self.aborted() {
            return Err(Status::clone(status));
        }
        if self.side == Side::Server {
            self.check_client_answers()?;
        }
        for (name, output) in &call.outputs {
            let node = self.store.get(*output);
            if node.owner != NodeProducer::Unclaimed {
                let message = format!(
                    "output {name:?} is bound to {:?}, which is not new",
                    node.id
                );
                return Err(Status::new(Reason::OutputNotNew, message).with("output", name));
            }
        }
        let id = |node: NodeKey| self.store.get(node).id.clone();
        let action = Action {
            name: call.name.clone(),
            target: call.target,
            inputs: port::params(&call.inputs, id),
            outputs: port::params(&call.outputs, id),
            configs: call.configs,
        };
        self.ask(action)?;
        let mut entry = ActionEntry::new(call.name, false);
        entry.ordinal = self
            .resume
            .as_ref()
            .map_or(0, |resume| resume.asked_so_far());
        entry.inputs = call.inputs.iter().map(|(_, node)| *node).collect();
        entry.outputs = call.outputs.iter().map(|(_, node)| *node).collect();
        entry.incomplete = entry.outputs.len();
        let outputs = entry.outputs.clone();
        let key = self.actions.insert(entry);
        for output in &outputs {
            self.store.get_mut(*output).owner = NodeProducer::Peer(Some(key));
        }
        if outputs.is_empty() {
            self.actions.remove(key);
        } else if self.side == Side::Server {
            let time_limit = self.config.limits.reverse_timeout;
            self.actions.set_time_limit(key, time_limit);
            self.emit(SessionOutput::Timed);
        }
        self.inbound.closures_changed();
        Ok(key)
    }

    /// Asks the peer to stop an action of ours (EV-913). Does nothing for a stale key, or an action without outputs.
    pub fn cancel(&mut self, action: ActionKey) {
        let Some(entry) = self.actions.get(action).filter(|entry| !entry.served) else {
            return;
        };
        let Some(&output) = entry.outputs.first() else {
            return;
        };
        let id = self.store.get(output).id.clone();
        let inputs = vec![Param::new(reserved::CANCEL_INPUT, id)];
        let asked = self.ask(Action {
            name: reserved::CANCEL.into(),
            inputs,
            ..Action::default()
        });
        if let Err(status) = asked {
            self.abort(status);
        }
    }

    /// Abandons an action of ours; with `notify`, sends CANCEL to the peer. A client's nodes stay as they are: its
    /// server ends them. A server removes the action: what its client still sends for it is ignored.
    pub fn abandon(&mut self, action: ActionKey, notify: bool) {
        if notify {
            self.cancel(action);
        }
        if self.side == Side::Server && !self.is_closed() {
            let status = Status::new(Reason::Cancelled, "the server does not want this any more");
            self.remove_asked(action, &Arc::new(status));
        }
    }

    /// Handles a client that has not answered in time (EV-811).
    pub(super) fn client_is_late(&mut self, action: ActionKey) {
        let name = self.actions.get(action).map(|entry| entry.name.clone());
        let message = "the client has not answered the action in the time allowed";
        let status =
            Status::new(Reason::Deadline, message).with("action", name.unwrap_or_default());
        self.remove_asked(action, &Arc::new(status));
    }

    /// Fails all actions of ours: the peer has half-closed and answers nothing more.
    pub(super) fn stop_asking(&mut self) {
        let asked: Vec<ActionKey> = self.actions.asked().collect();
        for key in asked {
            self.actions.remove(key);
        }
    }

    /// Starts the time limits of actions that were sent since the last call, while there is a connection to answer
    /// over.
    pub(super) fn start_time_limits(&mut self, now: Time) {
        if self.line() == LinkState::Up {
            self.actions.start_time_limits(now);
        }
    }

    /// Whether the client was to produce this node (EV-110).
    pub(super) fn is_expected(&self, node: NodeKey) -> bool {
        self.side == Side::Server
            && matches!(self.store.get(node).owner, NodeProducer::Peer(Some(_)))
    }

    fn check_client_answers(&self) -> Result<(), Status> {
        if self.phase != SessionPhase::Open {
            return Err(unanswered());
        }
        let (value, max) = (
            self.actions.asked().count() as u64 + 1,
            self.config.limits.max_actions as u64,
        );
        if value > max {
            let reason = Reason::ActionLimit;
            return Err(Status::limit(reason, "max_actions", value, max));
        }
        Ok(())
    }

    fn remove_asked(&mut self, action: ActionKey, status: &Arc<Status>) {
        if self.actions.get(action).is_none_or(|entry| entry.served) {
            return;
        }
        let Some(entry) = self.actions.remove(action) else {
            return;
        };
        for &input in &entry.inputs {
            let node = self.store.get(input);
            let is_open = node.owner == NodeProducer::Local(None) && !node.is_complete();
            // The client must not wait for a node that is not written any more.
            if is_open && node.fate == NodeFate::Retained && !self.is_closed() {
                let _ = self.end_with(input, Some(Arc::clone(status)));
            }
        }
        if self.is_closed() {
            return;
        }
        let open = entry.outputs.iter().copied();
        let open: Vec<NodeKey> = open
            .filter(|node| !self.store.get(*node).is_complete())
            .collect();
        self.fail_readers(&open, status);
        // Nodes that the client has bound elsewhere stay: they are the client's.
        let unwanted = open
            .iter()
            .filter(|node| !self.store.get(**node).referenced);
        let unwanted: Vec<(NodeKey, bool)> = unwanted.map(|&node| (node, true)).collect();
        self.drop_nodes(&unwanted);
        self.inbound.closures_changed();
        self.bytes_were_read();
    }

    /// Fails the readers of these nodes with `status`.
    fn fail_readers(&mut self, roots: &[NodeKey], status: &Arc<Status>) {
        let readers: Vec<(CursorId, Option<NodeKey>)> = self
            .cursors
            .iter()
            .filter(|(_, cursor)| roots.contains(&cursor.root) && cursor.failed.is_none())
            .map(|(key, cursor)| (CursorId(key), cursor.parked))
            .collect();
        for (id, parked) in readers {
            match parked {
                Some(node) => self.fail_parked(id, node, Arc::clone(status)),
                None => {
                    self.fail_read(id, Arc::clone(status));
                }
            }
        }
    }
}

/// The error of a function whose client can no longer answer (EV-812).
pub(super) fn unanswered() -> Status {
    let message = "the client has ended without having answered";
    Status::new(Reason::Cancelled, message)
}
