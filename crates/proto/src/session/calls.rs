//! The actions of a session: those that we run for the peer (served) and those that we ask it to run (asked).
//!
//! Orchestrates the [`ActionTable`], the [`Nodes`] that actions read and write, and the [`Link`] over which they come.
//! An action is removed from the table before anything that its end causes, so that nothing which follows finds it.

mod asked;
pub(super) mod input_leaf;
mod params;
pub(super) mod reserved;
mod table;
mod ttl;

use std::sync::Arc;

use bytestring::ByteString;

pub(super) use self::asked::unanswered;
use self::input_leaf::InputLeaf;
use self::params::{OPTIONS, type_name};
use self::table::{ActionEntry, ActionTable};
use super::graph::NodeProducer;
use super::lifecycle::SessionPhase;
use super::lifetime::NodeFate;
use super::link::Link;
use super::nodes::Nodes;
use super::port::{ActionKey, ActionStart, CancelledBy, NodeKey, SessionOutput, Side, WriteError};
use crate::evergreen::{
    Action, ErrorScope, Fragment, Metadata, Param, Reason, SessionLimits, Status, mimetype,
};
use crate::time::Time;

/// The actions of a session; see the module documentation.
#[derive(Debug)]
pub struct Calls {
    pub(super) nodes: Nodes,
    pub(super) link: Link,
    pub(super) table: ActionTable,
    /// Inputs of reserved actions that are not fully read yet.
    pub(super) leaves: Vec<InputLeaf>,
    /// Whether new actions of the peer are refused (EV-960).
    draining: bool,
    /// Whether the caller has finished sending; reset once [`SessionOutput::HalfClose`] is emitted.
    sending_finished: bool,
}

impl Calls {
    pub(super) fn new(nodes: Nodes, link: Link) -> Self {
        Self {
            nodes,
            link,
            table: ActionTable::default(),
            leaves: Vec::new(),
            draining: false,
            sending_finished: false,
        }
    }

    /// The shell reports whether an action waits for nothing but its cursors (D-3). A cursor that becomes ready resets
    /// this by itself.
    pub fn waiting(&mut self, action: ActionKey, waiting: bool) {
        // The report may come late: the action has ended meanwhile.
        if self.table.get(action).is_none() {
            return;
        }
        self.nodes.readers.set_waiting(action, waiting);
        if waiting {
            self.nodes.fail_deadlocked();
        }
    }

    /// Ends an action of the peer successfully: outputs that are still open end with the content they have (EV-508).
    pub fn finish(&mut self, action: ActionKey) {
        if self.nodes.lifecycle.is_closed() {
            return;
        }
        let Some((entry, made)) = self.remove_served(action) else {
            return;
        };
        self.end_served(&entry, &made, None);
    }

    /// Ends an action of the peer with an error: the session aborts (EV-107), or with partial failure every open output
    /// ends with the status (EV-930), whatever its reason: a function may report another session's, such as that an
    /// upstream goes away.
    pub fn fail(&mut self, action: ActionKey, status: impl Into<Arc<Status>>) {
        if !self.nodes.lifecycle.is_closed() {
            self.fail_within(action, status.into(), ErrorScope::Action);
        }
    }

    /// The same, with an explicit scope: an error of session scope aborts either way.
    fn fail_within(&mut self, action: ActionKey, mut status: Arc<Status>, scope: ErrorScope) {
        let Some((entry, made)) = self.remove_served(action) else {
            return;
        };
        self.nodes.stats.failures += 1;
        // The action that failed first is named, not one that failed because it read the other's output.
        if status.detail("action").is_none() {
            status = Arc::new(Status::clone(&status).with("action", &entry.name));
        }
        if !self.nodes.config.partial_failure || scope == ErrorScope::Session {
            self.abort(status);
            return;
        }
        self.end_served(&entry, &made, Some(status));
    }

    /// The shell reports that it has started an action of the peer (EV-736).
    pub fn dispatched(&mut self, action: ActionKey) {
        if let Some(node) = self.table.get(action).and_then(|entry| entry.dispatch) {
            self.nodes.end_with_status(node, None);
        }
    }

    /// Charges `bytes` that the shell holds for an action of the peer, beyond what the session knows of. The quota
    /// counts them until the action ends, or they are refunded (EV-801).
    ///
    /// # Errors
    /// The quota has no room for them: the session is aborted.
    pub fn hold_aside(&mut self, action: ActionKey, bytes: usize) -> Result<(), WriteError> {
        if self.nodes.lifecycle.is_closed() {
            return Err(WriteError::Closed);
        }
        let Some(entry) = self.table.get_mut(action) else {
            return Err(WriteError::Ended);
        };
        let bytes = bytes as u64;
        // Exceeding the quota is an error of the session wherever it happens (EV-801).
        if let Err(status) = self.nodes.graph.quota.retain(bytes) {
            self.abort(status);
            return Err(WriteError::Closed);
        }
        entry.aside_bytes += bytes;
        Ok(())
    }

    /// Refunds bytes that were charged with [`Self::hold_aside`].
    pub fn let_go_aside(&mut self, action: ActionKey, bytes: usize) {
        if let Some(entry) = self.table.get_mut(action) {
            // The shell cannot refund more than it has charged, which would make room for others' content.
            let bytes = (bytes as u64).min(entry.aside_bytes);
            entry.aside_bytes -= bytes;
            self.nodes.graph.quota.give_back(bytes);
        }
    }

    /// Refuses new actions of the peer from now on (EV-960, D-31).
    pub const fn drain(&mut self) {
        self.draining = true;
    }

    /// Marks our side as finished: no new nodes, no new actions. When the queue is empty, [`SessionOutput::HalfClose`]
    /// follows.
    pub fn finish_sending(&mut self) {
        self.sending_finished = true;
        self.after_sending();
    }

    /// Number of unfinished actions, the peer's and ours.
    #[must_use]
    pub const fn unfinished(&self) -> usize {
        self.table.len()
    }

    /// Takes a fragment of the peer.
    pub(super) fn take(&mut self, fragment: Fragment, copy_below: usize) -> Result<(), Status> {
        let Some(accepted) = self.nodes.accept(fragment, copy_below)? else {
            return Ok(());
        };
        for action in accepted.may_cycle {
            check_cycle(action, &self.table, &mut self.nodes)?;
        }
        let Some((key, entry)) = accepted
            .answers
            .and_then(|action| Some((action, self.table.get_mut(action)?)))
        else {
            return Ok(());
        };
        // The peer has written an output of this action, so it has received it.
        self.link.answered(entry.ordinal, &mut self.nodes.graph);
        if accepted.complete {
            entry.incomplete = entry.incomplete.saturating_sub(1);
            if entry.incomplete == 0 {
                self.table.remove(key);
                self.nodes.flow.closures = true;
                self.nodes.lifecycle.emit(SessionOutput::Done(key));
            }
        }
        Ok(())
    }

    /// Handles an action of the peer.
    pub(super) fn serve(&mut self, action: Action, now: Time) -> Result<(), Status> {
        // Before anything can fail: the peer counts what it has sent, failed actions included (EV-942).
        self.link.note_received(&action)?;
        self.nodes.stats.actions += 1;
        // The shell holds the configs and the target as long as the action runs, so the quota counts them.
        let configs = action.configs.iter();
        let config_bytes = configs.map(|any| any.type_url.len() + any.value.len());
        let held_bytes = (config_bytes.sum::<usize>() + action.target.len()) as u64;
        self.nodes.graph.quota.retain(held_bytes)?;
        // Checked before this action is counted as unfinished.
        let limits = &self.nodes.config.limits;
        let room = check_room(&action, self.draining, &self.table, limits);
        let entry = ActionEntry::new(copy(&action.name), true);
        let (key, entry) = self.table.insert(entry);
        entry.aside_bytes = held_bytes;
        self.nodes.action_begins(key);
        // Nodes first: what is wrong with them aborts the session, and what is wrong with the action alone can be
        // reported in the outputs that it has by then (EV-930).
        let outputs = claim_outputs(key, &action, entry, &mut self.nodes)?;
        // Their inputs name nodes, or are read by the session itself: none is retained for a later reader.
        let inputs = if reserved::is_known_by_node(&action.name) {
            Vec::new()
        } else {
            bind_inputs(key, &action, entry, &mut self.nodes)?
        };
        let checked = room
            .and_then(|()| params::check(&action, &self.nodes.config.limits))
            .and_then(|()| params::options(&action))
            .and_then(|options| params::deadline(options, now));
        let own = match checked {
            Ok(own) => own,
            Err(status) => {
                // A drain too fails this action alone (D-31).
                let status = Arc::new(status);
                self.fail_within(key, Arc::clone(&status), ErrorScope::Action);
                self.nodes.lifecycle.refused(status);
                return Ok(());
            }
        };
        if let Some(own) = own {
            self.table.set_deadline(key, own);
        }
        if reserved::is_reserved(&action.name) && self.serve_reserved(key, &action, now) {
            return Ok(());
        }
        check_cycle(key, &self.table, &mut self.nodes)?;
        self.nodes.flow.closures = true;
        let deadline = own.into_iter().chain(self.nodes.config.deadline).min();
        let entry = self.table.get(key);
        let start = Box::new(ActionStart {
            action: key,
            confirm: entry.is_some_and(|entry| entry.dispatch.is_some()),
            name: copy(&action.name),
            target: copy(&action.target),
            inputs,
            outputs,
            configs: action
                .configs
                .into_iter()
                // Read here already; a function would refuse it as unknown.
                .filter(|any| type_name(any) != OPTIONS)
                .collect(),
            deadline,
        });
        self.nodes.lifecycle.emit(SessionOutput::Start(start));
        Ok(())
    }

    /// The peer has half-closed (EV-109): it answers nothing more, and readers of what it has not sent fail.
    pub(super) fn half_close(&mut self) {
        self.nodes.lifecycle.phase = SessionPhase::HalfClosed;
        // Nobody answers them any more, and the session must be able to finish without them.
        self.table.remove_asked();
        self.nodes.fail_stuck_readers();
        self.nodes.fail_deadlocked();
        self.close_if_finished();
    }

    /// Handles the actions whose deadlines have passed (EV-950, EV-811).
    pub(super) fn handle_deadlines(&mut self, now: Time) {
        // Each round removes the action it is about; a failure may abort the session and with it the others.
        while let Some((deadline, action)) = self.table.deadline()
            && deadline <= now
            && !self.nodes.lifecycle.is_closed()
        {
            if self.table.get(action).is_none_or(|entry| !entry.served) {
                self.client_is_late(action);
                continue;
            }
            // Before the failure, after which the key is stale.
            self.nodes.lifecycle.emit(SessionOutput::Cancel {
                action,
                by: CancelledBy::Deadline,
            });
            let message = "the action was not finished in the time allowed";
            self.fail(action, Status::new(Reason::Deadline, message));
        }
    }

    /// Runs after a message was taken or our side was finished.
    pub(super) fn after_sending(&mut self) {
        let sent = self.nodes.sender.is_empty() && self.link.is_up();
        if self.sending_finished && sent && !self.nodes.lifecycle.is_closed() {
            // Emitted once per connection: `send_again` sets it again where the half-close was lost.
            self.sending_finished = false;
            self.link.half_closed();
            self.nodes.lifecycle.emit(SessionOutput::HalfClose);
        }
        self.close_if_finished();
    }

    /// Ends the session with `status`; the first abort wins and its status is returned. All state is dropped.
    pub(super) fn abort(&mut self, status: impl Into<Arc<Status>>) -> Arc<Status> {
        let status = self.nodes.abort(status);
        self.forget_if_aborted();
        status
    }

    /// Drops the actions of an aborted session: the abort may have come from its nodes, which know no actions.
    pub(super) fn forget_if_aborted(&mut self) {
        if self.nodes.lifecycle.aborted().is_some() {
            self.table = ActionTable::default();
            self.leaves = Vec::new();
        }
    }

    /// EV-109: closes the session once every action is finished and every output is sent.
    fn close_if_finished(&mut self) {
        if self.nodes.lifecycle.phase != SessionPhase::HalfClosed {
            return;
        }
        let done = match self.nodes.side {
            Side::Server => {
                self.table.len() == 0 && self.nodes.sender.is_empty() && self.link.is_up()
            }
            // The server has ended, so a client has no peer to send to.
            Side::Client => true,
        };
        if done {
            // No node can grow any more, ours included, so every reader that still waits fails now.
            self.nodes.lifecycle.ending = true;
            self.nodes.fail_stuck_readers();
            self.nodes.lifecycle.finish();
        }
    }

    /// Removes an action of the peer with the nodes created below its outputs; its reads stop and its quota is
    /// refunded.
    fn remove_served(&mut self, action: ActionKey) -> Option<(ActionEntry, Vec<NodeKey>)> {
        let entry = self.table.remove(action)?;
        let mut leaves = self.leaves.iter();
        if let Some(at) = leaves.position(|leaf| leaf.action == Some(action)) {
            self.leaves.swap_remove(at).close(&mut self.nodes);
        }
        self.nodes.graph.quota.give_back(entry.aside_bytes);
        for &node in &entry.inputs {
            self.nodes.graph.unbind_input(node, action);
        }
        let made = self.nodes.action_ends(action);
        Some((entry, made))
    }

    /// Ends the outputs of an action of the peer that was removed, and the nodes created below them: with the content
    /// that they have, or with the status that it failed with.
    fn end_served(&mut self, entry: &ActionEntry, made: &[NodeKey], failed: Option<Arc<Status>>) {
        // First: a client that waits for the dispatch status must not wait for the outputs (EV-737).
        if let Some(node) = entry.dispatch {
            self.nodes.end_with_status(node, failed.clone());
        }
        let metadata = Arc::new(Metadata::of(mimetype::OCTET_STREAM));
        // Children before their trees.
        for &node in made.iter().chain(&entry.outputs) {
            if failed.is_some() {
                self.nodes.end_with_status(node, failed.clone());
            } else {
                // Nodes that have ended already refuse to end again, which is expected.
                let _ = self.nodes.end(node, &metadata);
            }
        }
        if let Some(node) = entry.status
            && !self.nodes.lifecycle.is_closed()
            && !self.nodes.is_complete(node)
        {
            // A client takes it for the end of all outputs, so it is sent after them (EV-735).
            let graph = &mut self.nodes.graph;
            self.nodes.sender.adopt(graph, node, &entry.outputs);
            self.nodes.end_with_status(node, failed);
        }
        // In a dialect with sessions that last for years, the nodes of an action are dropped at its end (EV-741).
        if self.nodes.config.forgets_actions && !self.nodes.lifecycle.is_closed() {
            let unused = unused_nodes(entry, &self.table, &self.nodes);
            self.nodes.drop_nodes(&unused);
        }
        self.nodes.flow.closures = true;
        self.nodes.flow.reads = true;
        self.nodes.fail_deadlocked();
        self.close_if_finished();
    }
}

/// EV-308: an action must not read its own outputs.
fn check_cycle(action: ActionKey, table: &ActionTable, nodes: &mut Nodes) -> Result<(), Status> {
    let Some(entry) = table.get(action) else {
        return Ok(());
    };
    let (search, graph) = (&mut nodes.search, &nodes.graph);
    let Some(output) = search.reached(&entry.inputs, &entry.outputs, graph) else {
        return Ok(());
    };
    let id = &nodes.graph.get(output).id;
    let message = format!("action {:?} reads its own output {id:?}", entry.name);
    Err(Status::new(Reason::ActionCycle, message).with("node", id))
}

/// EV-510 and EV-960; actions about existing actions and nodes are not new work.
fn check_room(
    action: &Action,
    draining: bool,
    table: &ActionTable,
    limits: &SessionLimits,
) -> Result<(), Status> {
    if reserved::ends_at_once(action) {
        return Ok(());
    }
    if draining && !reserved::is_no_work(&action.name) {
        let message = "the server is shutting down; connect elsewhere";
        return Err(Status::new(Reason::GoingAway, message));
    }
    let (value, max) = (table.served() + 1, limits.max_actions);
    Status::within(Reason::ActionLimit, "max_actions", value, max)
}

/// EV-505, EV-216: output ids must be new, and we produce them from now on. Returns those that the function writes; the
/// session writes the statuses.
fn claim_outputs(
    key: ActionKey,
    action: &Action,
    entry: &mut ActionEntry,
    nodes: &mut Nodes,
) -> Result<Vec<(ByteString, NodeKey)>, Status> {
    let max = nodes.config.limits.max_params;
    // The number of outputs is checked later: until then the peer decides it.
    let mut outputs = Vec::with_capacity(action.outputs.len().min(max));
    for output in &action.outputs {
        let node = claim_output(nodes, key, output)?;
        if &*output.name == STATUS_OUTPUT && entry.status.is_none() {
            entry.status = Some(node);
        } else if &*output.name == DISPATCH_OUTPUT && entry.dispatch.is_none() {
            entry.dispatch = Some(node);
        } else {
            entry.outputs.push(node);
            outputs.push((copy(&output.name), node));
        }
    }
    Ok(outputs)
}

fn bind_inputs(
    key: ActionKey,
    action: &Action,
    entry: &mut ActionEntry,
    nodes: &mut Nodes,
) -> Result<Vec<(ByteString, NodeKey)>, Status> {
    let max = nodes.config.limits.max_params;
    let graph = &mut nodes.graph;
    let mut inputs = Vec::with_capacity(action.inputs.len().min(max));
    for Param { name, id } in &action.inputs {
        let node = graph.mention(id)?;
        graph.get_mut(node).referenced = true;
        inputs.push((copy(name), node));
    }
    for (_, node) in &inputs {
        graph.bind_input(*node, key);
        entry.inputs.push(*node);
    }
    Ok(inputs)
}

/// The nodes of an action that has ended which no other action reads or still writes; a node that one does is dropped
/// with that action instead.
fn unused_nodes(entry: &ActionEntry, table: &ActionTable, nodes: &Nodes) -> Vec<(NodeKey, bool)> {
    let is_used = |node: NodeKey| {
        let known = nodes.graph.get(node);
        let written = match known.owner.action() {
            Some(other) => table.get(other).is_some(),
            None => known.owner.is_local() && !known.is_complete(),
        };
        written || table.iter().any(|(_, other)| other.inputs.contains(&node))
    };
    let all = entry.inputs.iter().chain(&entry.outputs);
    let all = all.chain(&entry.dispatch).chain(&entry.status);
    all.filter(|node| !is_used(**node))
        .map(|&node| (node, false))
        .collect()
}

/// Claims one output of an action of the peer.
fn claim_output(nodes: &mut Nodes, key: ActionKey, output: &Param) -> Result<NodeKey, Status> {
    let Param { name, id } = output;
    let node = nodes.graph.mention(id)?;
    let known = nodes.graph.get_mut(node);
    let dropped = known.fate != NodeFate::Retained;
    if known.owner == NodeProducer::Unclaimed && !dropped {
        // A mention as child or input has no producer: pipelining by id (EV-307).
        known.owner = NodeProducer::Local(Some(key));
        return Ok(node);
    }
    let (reason, what) = match known.owner {
        // The same result whether the drop or the action came first (D-26).
        NodeProducer::Unclaimed => (Reason::OutputNotNew, "it was dropped"),
        NodeProducer::Peer(None) => (Reason::NodeOwner, "the sender has written it"),
        _ => (Reason::OutputNotNew, "it is an output already"),
    };
    let message = format!("output {name:?} is bound to node {id:?}, but {what}");
    let status = Status::new(reason, message);
    Err(status.with("node", id).with("output", name))
}

/// Copies a name: it outlives the receive buffer that it may be a view of (EV-805).
fn copy(text: &ByteString) -> ByteString {
    text.to_string().into()
}

/// The output that every action accepts (EV-921).
const STATUS_OUTPUT: &str = "__status__";
/// The second status output, in a dialect with two statuses (EV-736).
const DISPATCH_OUTPUT: &str = "__dispatch_status__";
