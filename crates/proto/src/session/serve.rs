//! Runs actions of the peer.

use std::sync::Arc;

use prost::Message as _;
use prost_types::Any;

use super::actions::ActionEntry;
use super::dropping::NodeFate;
use super::port::{ActionKey, ActionStart, CancelledBy, NodeKey, SessionOutput, WriteError};
use super::store::NodeProducer;
use super::{SessionMachine, reserved};
use crate::evergreen::{Action, ErrorScope, Metadata, Param, Reason, Status, mimetype};
use crate::generated::sapwood::v1::ActionOptions;
use crate::time::Time;

impl SessionMachine {
    /// The shell reports whether an action waits for nothing but its cursors (D-3). A cursor that becomes ready resets
    /// this by itself.
    pub fn waiting(&mut self, action: ActionKey, waiting: bool) {
        self.actions.set_waiting(action, waiting);
        if waiting {
            self.look_for_deadlock();
        }
    }

    /// Ends an action of the peer successfully: outputs that are still open end with the content they have (EV-508).
    pub fn finish(&mut self, action: ActionKey) {
        if self.is_closed() {
            return;
        }
        let Some(entry) = self.remove_action(action) else {
            return;
        };
        let metadata = Arc::new(Metadata::of(mimetype::OCTET_STREAM));
        for &node in entry.made.iter().chain(&entry.outputs) {
            // Nodes that have ended already refuse to end again, which is expected.
            let _ = self.end(node, &metadata);
        }
        for &node in entry.dispatch.iter().chain(&entry.status) {
            self.conclude(node, &entry, None);
        }
        self.let_go_of(&entry);
        self.action_removed();
    }

    /// Ends an action of the peer with an error: the session aborts (EV-107), or with partial failure every open output
    /// ends with the status (EV-930). Reasons of session scope abort either way.
    pub fn fail(&mut self, action: ActionKey, status: impl Into<Arc<Status>>) {
        if self.is_closed() {
            return;
        }
        let status = status.into();
        let scope = status.known().map_or(ErrorScope::Action, Reason::scope);
        self.fail_within(action, status, scope);
    }

    /// The same, with an explicit scope.
    fn fail_within(&mut self, action: ActionKey, mut status: Arc<Status>, scope: ErrorScope) {
        let Some(entry) = self.remove_action(action) else {
            return;
        };
        self.stats.failures += 1;
        if status.detail("action").is_none() {
            status = Arc::new(Status::clone(&status).with("action", &entry.name));
        }
        if !self.config.partial_failure || scope == ErrorScope::Session {
            self.abort(status);
            return;
        }
        if let Some(node) = entry.dispatch {
            self.conclude(node, &entry, Some(Arc::clone(&status)));
        }
        // Outputs come last, so that a tree ends after the nodes below it.
        for &node in entry.made.iter().chain(&entry.outputs) {
            if !self.is_closed() && !self.store.get(node).is_complete() {
                let _ = self.end_with(node, Some(Arc::clone(&status)));
            }
        }
        if let Some(node) = entry.status {
            self.conclude(node, &entry, Some(status));
        }
        self.let_go_of(&entry);
        self.action_removed();
    }

    /// The shell reports that it has started an action of the peer (EV-736).
    pub fn dispatched(&mut self, action: ActionKey) {
        let node = self.actions.get(action).and_then(|entry| entry.dispatch);
        if let Some(node) = node.filter(|_| !self.is_closed()) {
            let _ = self.end_with(node, None);
        }
    }

    /// Writes a status of an action, unless it is written already. The final status is sent after all outputs (EV-735).
    fn conclude(&mut self, node: NodeKey, entry: &ActionEntry, status: Option<Arc<Status>>) {
        if self.is_closed() || self.store.get(node).is_complete() {
            return;
        }
        if entry.status == Some(node) {
            self.adopt(node, &entry.outputs);
        }
        let _ = self.end_with(node, status);
    }

    /// In a dialect with sessions that last for years, the nodes of an action are dropped at its end (EV-741). A node
    /// that another action reads or still writes is dropped with that action instead.
    fn let_go_of(&mut self, entry: &ActionEntry) {
        if !self.config.capabilities.flat || self.is_closed() {
            return;
        }
        let all = entry.inputs.iter().chain(&entry.outputs);
        let all = all.chain(&entry.dispatch).chain(&entry.status);
        let is_used = |node: &NodeKey| {
            let known = self.store.get(*node);
            let written = match known.owner {
                NodeProducer::Local(Some(other)) | NodeProducer::Peer(Some(other)) => {
                    self.actions.get(other).is_some()
                }
                NodeProducer::Local(None) => !known.is_complete(),
                NodeProducer::Unclaimed | NodeProducer::Peer(None) => false,
            };
            let mut others = self.actions.iter();
            written || others.any(|(_, other)| other.inputs.contains(node))
        };
        let named: Vec<(NodeKey, bool)> = all
            .filter(|node| !is_used(node))
            .map(|&node| (node, false))
            .collect();
        self.drop_nodes(&named);
    }

    /// Charges `bytes` that the shell holds for an action of the peer, beyond what the session knows of. The quota
    /// counts them until the action ends, or they are refunded (EV-801).
    ///
    /// # Errors
    /// The quota has no room for them: the session is aborted.
    pub fn hold_aside(&mut self, action: ActionKey, bytes: usize) -> Result<(), WriteError> {
        if self.is_closed() {
            return Err(WriteError::Closed);
        }
        let Some(entry) = self.actions.get_mut(action) else {
            return Err(WriteError::Ended);
        };
        let bytes = bytes as u64;
        if let Err(status) = self.store.retain(bytes, &self.config.limits) {
            self.abort(status);
            return Err(WriteError::Closed);
        }
        entry.aside_bytes += bytes;
        Ok(())
    }

    /// Refunds bytes that were charged with [`Self::hold_aside`].
    pub fn let_go_aside(&mut self, action: ActionKey, bytes: usize) {
        if let Some(entry) = self.actions.get_mut(action) {
            let bytes = (bytes as u64).min(entry.aside_bytes);
            entry.aside_bytes -= bytes;
            self.store.give_back(bytes);
        }
    }

    /// Removes an action of the peer; its reads stop and its quota is refunded.
    fn remove_action(&mut self, action: ActionKey) -> Option<ActionEntry> {
        let entry = self.actions.remove(action)?;
        self.stop_reading(action);
        self.store.give_back(entry.aside_bytes);
        for node in &entry.unopened {
            self.store.unbind_reader(*node);
        }
        Some(entry)
    }

    /// Refuses new actions of the peer from now on (EV-960, D-31).
    pub const fn drain(&mut self) {
        self.draining = true;
    }

    /// Handles an action of the peer.
    pub(super) fn serve(&mut self, action: Action, now: Time) -> Result<(), Status> {
        self.note_received(&action)?;
        self.stats.actions += 1;
        // The shell holds the configs as long as the action runs, so the quota counts them.
        let config_bytes = action
            .configs
            .iter()
            .map(|any| any.type_url.len() + any.value.len());
        let config_bytes = config_bytes.sum::<usize>() as u64;
        self.store.retain(config_bytes, &self.config.limits)?;
        // Checked before this action is counted as unfinished.
        let room = self.has_room_for(&action);
        let mut entry = ActionEntry::new(copy(&action.name), true);
        entry.aside_bytes = config_bytes;
        let key = self.actions.insert(entry);
        let outputs = self.claim_outputs(key, &action)?;
        let reserved = reserved::is_known_by_node(&action.name);
        let inputs = if reserved {
            Vec::new()
        } else {
            self.bind_inputs(key, &action)?
        };
        let checked = room
            .and_then(|()| check_params(&action, self))
            .and_then(|()| options(&action))
            .and_then(|options| deadline(options, now));
        let own = match checked {
            Ok(own) => own,
            Err(status) => {
                // A drain too fails this action alone (D-31).
                let status = Arc::new(status);
                self.fail_within(key, Arc::clone(&status), ErrorScope::Action);
                self.refused(status);
                return Ok(());
            }
        };
        if let Some(own) = own {
            self.actions.set_deadline(key, own);
        }
        if reserved::is_reserved(&action.name) && self.serve_reserved(key, &action, now) {
            return Ok(());
        }
        self.search
            .action(key, &self.store, &self.actions, &self.config.limits)?;
        self.inbound.closures_changed();
        let deadline = own.into_iter().chain(self.config.deadline).min();
        self.emit(SessionOutput::Start(Box::new(ActionStart {
            action: key,
            name: copy(&action.name),
            target: copy(&action.target),
            inputs,
            outputs,
            configs: action
                .configs
                .into_iter()
                .filter(|any| type_name(any) != OPTIONS)
                .collect(),
            deadline,
        })));
        Ok(())
    }

    /// Reports an action that was never started. Pushed to the front, so that it comes before a close of the session
    /// that it caused.
    pub(super) fn refused(&mut self, status: Arc<Status>) {
        self.events.push_front(SessionOutput::Refused(status));
    }

    /// EV-510 and EV-960; actions about existing actions and nodes are not new work.
    fn has_room_for(&self, action: &Action) -> Result<(), Status> {
        if reserved::ends_at_once(action) {
            return Ok(());
        }
        if self.draining && !reserved::is_no_work(&action.name) {
            let status = Status::new(
                Reason::GoingAway,
                "the server is shutting down; connect elsewhere",
            );
            return Err(status);
        }
        let (value, max) = (
            self.actions.served() as u64 + 1,
            self.config.limits.max_actions as u64,
        );
        if value > max {
            return Err(Status::limit(
                Reason::ActionLimit,
                "max_actions",
                value,
                max,
            ));
        }
        Ok(())
    }

    /// EV-505, EV-216: output ids must be new, and we produce them from now on.
    fn claim_outputs(
        &mut self,
        key: ActionKey,
        action: &Action,
    ) -> Result<Vec<(bytestring::ByteString, NodeKey)>, Status> {
        let limits = Arc::clone(&self.config.limits);
        let mut outputs = Vec::with_capacity(action.outputs.len().min(limits.max_params));
        for Param { name, id } in &action.outputs {
            let node = self.store.mention(id, &limits)?;
            let dropped = self.store.get(node).fate != NodeFate::Retained;
            let owner = &mut self.store.get_mut(node).owner;
            if *owner != NodeProducer::Unclaimed || dropped {
                let (reason, what) = match owner {
                    // The same result whether the drop or the action came first (D-26).
                    NodeProducer::Unclaimed => (Reason::OutputNotNew, "it was dropped"),
                    NodeProducer::Peer(None) => (Reason::NodeOwner, "the sender has written it"),
                    _ => (Reason::OutputNotNew, "it is an output already"),
                };
                let message = format!("output {name:?} is bound to node {id:?}, but {what}");
                return Err(Status::new(reason, message)
                    .with("node", id)
                    .with("output", name));
            }
            *owner = NodeProducer::Local(Some(key));
            let Some(entry) = self.actions.get_mut(key) else {
                continue;
            };
            if &**name == STATUS_OUTPUT && entry.status.is_none() {
                entry.status = Some(node);
            } else if &**name == DISPATCH_OUTPUT && entry.dispatch.is_none() {
                entry.dispatch = Some(node);
            } else {
                entry.outputs.push(node);
                outputs.push((copy(name), node));
            }
        }
        Ok(outputs)
    }

    fn bind_inputs(
        &mut self,
        key: ActionKey,
        action: &Action,
    ) -> Result<Vec<(bytestring::ByteString, NodeKey)>, Status> {
        let limits = Arc::clone(&self.config.limits);
        let mut inputs = Vec::with_capacity(action.inputs.len().min(limits.max_params));
        for Param { name, id } in &action.inputs {
            let node = self.store.mention(id, &limits)?;
            self.store.get_mut(node).referenced = true;
            inputs.push((copy(name), node));
        }
        if let Some(entry) = self.actions.get_mut(key) {
            entry.inputs = inputs.iter().map(|(_, node)| *node).collect();
            if self.store.releases() {
                entry.unopened.clone_from(&entry.inputs);
            }
        }
        for (_, node) in &inputs {
            self.store.bind_reader(*node);
        }
        Ok(inputs)
    }

    /// Handles an action whose deadline has passed (EV-950).
    pub(super) fn action_is_late(&mut self, action: ActionKey) {
        self.emit(SessionOutput::Cancel {
            action,
            by: CancelledBy::Deadline,
        });
        self.fail(
            action,
            Status::new(
                Reason::Deadline,
                "the action was not finished in the time allowed",
            ),
        );
    }

    fn action_removed(&mut self) {
        self.inbound.closures_changed();
        self.bytes_were_read();
        self.look_for_deadlock();
        self.close_if_finished();
    }
}

/// EV-504, EV-509, and the limits on the lists within an action.
fn check_params(action: &Action, session: &SessionMachine) -> Result<(), Status> {
    let limits = &session.config.limits;
    let name_is_legal = |name: &str| !name.is_empty() && name.len() <= limits.max_name_bytes;
    let names = action
        .inputs
        .iter()
        .chain(&action.outputs)
        .map(|param| &param.name);
    if let Some(bad) = [&action.name]
        .into_iter()
        .chain(names)
        .find(|name| !name_is_legal(name))
    {
        let (value, max) = (bad.len(), limits.max_name_bytes);
        let status = Status::limit(Reason::BadName, "max_name_bytes", value as u64, max as u64);
        return Err(Status {
            message: format!("a name has {value} bytes; 1 to {max} are allowed"),
            ..status
        });
    }
    for (limit, value, max) in [
        ("max_params", action.inputs.len(), limits.max_params),
        ("max_params", action.outputs.len(), limits.max_params),
        ("max_configs", action.configs.len(), limits.max_configs),
    ] {
        if value > max {
            return Err(Status::limit(
                Reason::ParamLimit,
                limit,
                value as u64,
                max as u64,
            ));
        }
    }
    for list in [&action.inputs, &action.outputs] {
        let mut names: Vec<&str> = list.iter().map(|param| &*param.name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let message = format!("parameter {:?} is bound twice", twice[0]);
            return Err(Status::new(Reason::DuplicateParam, message).with("param", twice[0]));
        }
    }
    let mut types: Vec<&str> = action.configs.iter().map(type_name).collect();
    types.sort_unstable();
    if let Some(twice) = types.windows(2).find(|pair| pair[0] == pair[1]) {
        let message = format!("there are two configs of type {:?}", twice[0]);
        return Err(Status::new(Reason::DuplicateConfig, message).with("param", twice[0]));
    }
    Ok(())
}

fn options(action: &Action) -> Result<ActionOptions, Status> {
    let Some(any) = action.configs.iter().find(|any| type_name(any) == OPTIONS) else {
        return Ok(ActionOptions::default());
    };
    ActionOptions::decode(&*any.value).map_err(|_| {
        Status::new(
            Reason::BadConfig,
            format!("the config {OPTIONS} cannot be decoded"),
        )
    })
}

fn deadline(options: ActionOptions, now: Time) -> Result<Option<Time>, Status> {
    let Some(timeout) = options.timeout else {
        return Ok(None);
    };
    let timeout = std::time::Duration::try_from(timeout).map_err(|_| {
        let status = Status::new(
            Reason::BadConfig,
            format!("timeout of {OPTIONS} is negative or no duration"),
        );
        status.with_field("timeout", "a duration of 0 or more")
    })?;
    Ok(Some(now + timeout))
}

/// The type of a config: what follows the last slash of its URL (EV-509).
pub(super) fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

/// Copies a name: it outlives the receive buffer that it may be a view of (EV-805).
fn copy(text: &bytestring::ByteString) -> bytestring::ByteString {
    text.to_string().into()
}

/// The output that every action accepts (EV-921).
const STATUS_OUTPUT: &str = "__status__";
/// The second status output, in a dialect with two statuses (EV-736).
const DISPATCH_OUTPUT: &str = "__dispatch_status__";
pub(super) const OPTIONS: &str = "sapwood.v1.ActionOptions";
