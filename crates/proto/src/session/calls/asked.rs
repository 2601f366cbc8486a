//! Actions that we ask the peer to run.
//!
//! ```text
//!   asked ──every output complete──► done
//!     ├── abandoned, or later than reverse_timeout while the connection is up ──► removed: readers fail, late
//!     └── the peer has half-closed ─────────────────────────────────────────────►    answers are ignored
//! ```

use std::sync::Arc;

use super::table::{ActionEntry, ActionTable};
use super::{Calls, reserved};
use crate::evergreen::{Action, Param, Reason, Status};
use crate::session::graph::NodeProducer;
use crate::session::lifecycle::SessionPhase;
use crate::session::nodes::Nodes;
use crate::session::port::{self, ActionKey, ActionRequest, NodeKey, SessionOutput, Side};

impl Calls {
    /// Creates a node that the peer is to produce, as an output of [`Self::call`].
    ///
    /// # Errors
    /// `NODE_LIMIT` or `RETAINED_LIMIT`; nothing is aborted. Or the status of an aborted session.
    pub fn expect(&mut self) -> Result<NodeKey, Status> {
        self.nodes.lifecycle.check_alive()?;
        match self.nodes.side {
            Side::Server => self.nodes.graph.make(),
            // Clients use short ids: a server's ids cannot collide with them (EV-216).
            Side::Client => self.nodes.graph.make_plain(),
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
        self.nodes.lifecycle.check_alive()?;
        let is_server = self.nodes.side == Side::Server;
        if is_server {
            check_client_answers(&self.nodes, &self.table)?;
        }
        let graph = &self.nodes.graph;
        // All are checked before anything is sent: a refused call leaves nothing behind.
        for (name, output) in &call.outputs {
            let node = graph.get(*output);
            if node.owner != NodeProducer::Unclaimed {
                let id = &node.id;
                let message = format!("output {name:?} is bound to {id:?}, which is not new");
                return Err(Status::new(Reason::OutputNotNew, message).with("output", name));
            }
        }
        let id = |node: NodeKey| graph.get(node).id.clone();
        let ordinal = self.ask(Action {
            name: call.name.clone(),
            target: call.target,
            inputs: port::params(&call.inputs, id),
            outputs: port::params(&call.outputs, id),
            configs: call.configs,
        })?;
        let mut entry = ActionEntry::new(call.name, false);
        entry.ordinal = ordinal;
        entry.inputs = call.inputs.iter().map(|(_, node)| *node).collect();
        entry.outputs = call.outputs.iter().map(|(_, node)| *node).collect();
        entry.incomplete = entry.outputs.len();
        let (key, _) = self.table.insert(entry);
        for (_, output) in &call.outputs {
            self.nodes.graph.get_mut(*output).owner = NodeProducer::Peer(Some(key));
        }
        if call.outputs.is_empty() {
            self.table.remove(key);
        } else if is_server {
            let time_limit = self.nodes.config.limits.reverse_timeout;
            // Started by the next timer call, because time without a connection does not count (EV-811).
            self.table.set_time_limit(key, time_limit);
            self.nodes.lifecycle.emit(SessionOutput::Timed);
        }
        self.nodes.flow.closures = true;
        Ok(key)
    }

    /// Asks the peer to stop an action of ours (EV-913). Does nothing for a stale key, or an action without outputs.
    pub fn cancel(&mut self, action: ActionKey) {
        let entry = self.table.get(action).filter(|entry| !entry.served);
        // An action has no id of its own: any of its outputs names it (EV-501).
        let Some(&output) = entry.and_then(|entry| entry.outputs.first()) else {
            return;
        };
        let id = self.nodes.graph.get(output).id.clone();
        // It has no outputs, so nothing is entered in the table: the end of the other action is the answer.
        let asked = self.ask(Action {
            name: reserved::CANCEL.into(),
            inputs: vec![Param::new(reserved::CANCEL_INPUT, id)],
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
        if self.nodes.side == Side::Server && !self.nodes.lifecycle.is_closed() {
            let status = Status::new(Reason::Cancelled, "the server has abandoned this action");
            self.remove_asked(action, &Arc::new(status));
        }
    }

    /// Handles a client that has not answered in time (EV-811).
    pub(super) fn client_is_late(&mut self, action: ActionKey) {
        let entry = self.table.get(action);
        let name = entry.map(|entry| entry.name.clone());
        let message = "the client has not answered the action in the time allowed";
        let status = Status::new(Reason::Deadline, message);
        let status = status.with("action", name.unwrap_or_default());
        self.remove_asked(action, &Arc::new(status));
    }

    /// Queues an action, and retains it as long as it may have to be sent again; the number of actions sent up to it.
    fn ask(&mut self, action: Action) -> Result<usize, Status> {
        let ordinal = self.link.retain(&action, &mut self.nodes.graph)?;
        self.nodes.sender.push_action(action);
        Ok(ordinal)
    }

    fn remove_asked(&mut self, action: ActionKey, status: &Arc<Status>) {
        if self.table.get(action).is_none_or(|entry| entry.served) {
            return;
        }
        let Some(entry) = self.table.remove(action) else {
            return;
        };
        for &input in &entry.inputs {
            // The client must not wait for a node that is not written any more.
            if self.nodes.graph.get(input).owner == NodeProducer::Local(None) {
                self.nodes.end_with_status(input, Some(Arc::clone(status)));
            }
        }
        if self.nodes.lifecycle.is_closed() {
            return;
        }
        let open = entry.outputs.into_iter();
        let open: Vec<NodeKey> = open.filter(|node| !self.nodes.is_complete(*node)).collect();
        // Before the drop, so that the readers get this status and not NODE_RELEASED.
        self.nodes.fail_readers(&open, status);
        // Nodes that the client has bound as children or inputs stay: they are the client's.
        let unwanted = open
            .iter()
            .filter(|node| !self.nodes.graph.get(**node).referenced);
        let unwanted: Vec<(NodeKey, bool)> = unwanted.map(|&node| (node, true)).collect();
        self.nodes.drop_nodes(&unwanted);
        self.nodes.flow.closures = true;
        self.nodes.flow.reads = true;
    }
}

/// A server asks only a client that can still answer, and not for more at once than it would do itself.
fn check_client_answers(nodes: &Nodes, table: &ActionTable) -> Result<(), Status> {
    if nodes.lifecycle.phase != SessionPhase::Open {
        return Err(unanswered());
    }
    let (value, max) = (table.asked().count() + 1, nodes.config.limits.max_actions);
    Status::within(Reason::ActionLimit, "max_actions", value, max)
}

/// The error of a function whose client can no longer answer (EV-812).
pub(in crate::session) fn unanswered() -> Status {
    let message = "the client has finished sending, but has not answered the action";
    Status::new(Reason::Cancelled, message)
}
