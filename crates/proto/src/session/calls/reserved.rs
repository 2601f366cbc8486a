//! Reserved actions: CANCEL, DROP, SET_TTL, RESUME, FINISH and OFFER_ACTIONS.
//!
//! Most are answered at once. SET_TTL and RESUME may have to read an input first, which the session does itself.

use std::sync::Arc;

use bytes::Bytes;

use super::Calls;
use super::input_leaf::{InputLeaf, LeafRead, ReadPurpose};
use super::ttl;
use crate::evergreen::{Action, ErrorScope, Metadata, Param, Reason, Status};
use crate::session::graph::NodeProducer;
use crate::session::lifecycle::SessionPhase;
use crate::session::nodes::Nodes;
use crate::session::port::{ActionKey, CancelledBy, NodeKey, SessionOutput, Side};
use crate::session::sender::{ItemStart, rewind};
use crate::time::Time;

/// Cancels an action.
pub(in crate::session) const CANCEL: &str = "CANCEL";
/// Its input: any output id of the action.
pub(in crate::session) const CANCEL_INPUT: &str = "action";
/// Drops nodes.
const DROP: &str = "DROP";
/// Sets the time to live of a node.
const SET_TTL: &str = "SET_TTL";
/// Its input: the duration.
pub(in crate::session) const TTL_INPUT: &str = "ttl";
/// Resumes a session on a new connection.
pub(in crate::session) const RESUME: &str = "RESUME";
/// Its input and its output: what each side has received.
pub(in crate::session) const HAVE: &str = "have";
/// Half-closes the sender's side, where the transport cannot.
const FINISH: &str = "FINISH";
/// Offers actions of the client to the server (EV-810).
const OFFER: &str = "OFFER_ACTIONS";

/// Names that the protocol reserves. They are applied after all other actions of a message (D-26).
const RESERVED: &[&str] = &[
    CANCEL,
    "LIST_ACTIONS",
    "SESSION_INFO",
    DROP,
    SET_TTL,
    FINISH,
    RESUME,
    OFFER,
];
/// Reserved actions whose inputs name nodes instead of reading them.
const BY_NODE: &[&str] = &[CANCEL, DROP, SET_TTL, RESUME];
/// Reserved actions that start no work: they are accepted while the server drains (EV-960).
const NO_WORK: &[&str] = &[CANCEL, DROP, SET_TTL, FINISH, RESUME];

pub(in crate::session) fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name)
}

/// The order in which the actions of a message are applied (D-26); RESUME comes first.
pub(in crate::session) fn rank(name: &str) -> u8 {
    match name {
        // Before it a returning session accepts no other action, so it precedes those of its own message.
        RESUME => 0,
        name if is_reserved(name) => 2,
        _ => 1,
    }
}

pub(in crate::session) fn is_known_by_node(name: &str) -> bool {
    BY_NODE.contains(&name)
}

pub(in crate::session) fn is_no_work(name: &str) -> bool {
    NO_WORK.contains(&name)
}

/// Whether an action ends as soon as it is handled, so that it never counts against the limit of unfinished actions
/// (EV-510). RESUME may have to wait for its input, but there is one at a time.
pub(in crate::session) fn ends_at_once(action: &Action) -> bool {
    let waits = || action.inputs.iter().any(|param| &*param.name == TTL_INPUT);
    is_no_work(&action.name) && !(&*action.name == SET_TTL && waits())
}

impl Calls {
    /// Handles a reserved action; `false` if the machine does not handle it itself.
    pub(super) fn serve_reserved(&mut self, key: ActionKey, action: &Action, now: Time) -> bool {
        let answer = match &*action.name {
            CANCEL => self.cancel_served(action).map(Some),
            DROP => drop_named(&mut self.nodes, action).map(Some),
            SET_TTL => self.set_ttl(key, action, now),
            RESUME => self.resume_asked(key, action, now),
            FINISH => check(action, |_| false).map(|()| Some("{}".to_owned())),
            OFFER if self.nodes.side == Side::Client => Err(Status::new(
                Reason::Unimplemented,
                "a client does not accept OFFER_ACTIONS: it asks its server with LIST_ACTIONS",
            )),
            _ => return false,
        };
        let finishes = &*action.name == FINISH && answer.is_ok();
        if let Some(answer) = answer.transpose() {
            self.answer(key, answer);
        }
        // Not open any more: the quota had no room for the answer.
        if finishes && self.nodes.lifecycle.phase == SessionPhase::Open {
            self.half_close();
        }
        true
    }

    /// Continues the reads that can make progress.
    pub(in crate::session) fn read_leaves(&mut self) {
        // Taken: reads that still wait put themselves back.
        for leaf in std::mem::take(&mut self.leaves) {
            let action = leaf.action;
            match (action, self.read_on(leaf).transpose()) {
                (Some(action), Some(answer)) => self.answer(action, answer),
                // The answer to our RESUME is either read, or cannot be read.
                (None, Some(Err(status))) => {
                    self.abort(status);
                }
                (None, Some(Ok(_))) => {
                    self.link.hello_is_answered(&mut self.nodes.graph);
                    self.send_again(None);
                }
                (_, None) => {}
            }
        }
    }

    /// The connection is lost: nothing is dropped, and nothing is sent until there is a new one (EV-940). Without
    /// resume the session ends (EV-109).
    pub(in crate::session) fn lost(&mut self, now: Time) {
        if !self.link.lost(now) {
            self.abort(Status::new(Reason::Cancelled, "the connection was lost"));
            return;
        }
        self.table.pause_time_limits(now);
        // The report that was being read belongs to the lost connection.
        while let Some(at) = self.leaves.iter().position(InputLeaf::is_of_resume) {
            let leaf = self.leaves.swap_remove(at);
            leaf.close(&mut self.nodes);
            if let Some(action) = leaf.action {
                self.finish(action);
            }
        }
    }

    /// There is a new connection: a client asks on it to resume.
    pub(in crate::session) fn returned(&mut self, now: Time) {
        if !self.link.returned(now) || self.nodes.side == Side::Server {
            return;
        }
        let sent = self.link.prepare_hello(&mut self.nodes.graph);
        let read = sent.and_then(|answer| self.read_leaf(None, &answer, ReadPurpose::Report, now));
        if let Err(status) = read {
            self.abort(status);
        }
    }

    /// Ends a reserved action.
    fn answer(&mut self, key: ActionKey, answer: Result<String, Status>) {
        match answer {
            Ok(result) => {
                let entry = self.table.get(key);
                let output = entry.and_then(|entry| entry.outputs.first().copied());
                let mut report = Vec::new();
                // Collected now: after `finish` the action is not in the table.
                if let Some(entry) = entry.filter(|entry| &*entry.name == RESUME) {
                    let statuses = entry.status.iter().chain(&entry.dispatch);
                    report.extend(entry.outputs.iter().chain(statuses).copied());
                }
                if let Some(node) = output {
                    let metadata = Arc::new(Metadata::of("application/json"));
                    // Written even if other output waits: the result is small, and the client waits for it. If the
                    // node was dropped meanwhile, the write is discarded.
                    let _ = self
                        .nodes
                        .put(node, &metadata, Bytes::from(result), ItemStart::First);
                }
                self.send_again(output);
                self.finish(key);
                // After the end: the drop of a node that is still open would end it with an error.
                remove_when_sent(&mut self.nodes, &report);
            }
            // A closed session sends nothing more.
            Err(_) if self.nodes.lifecycle.is_closed() => {}
            Err(status) => {
                let status = Arc::new(status);
                // Our own error, unless it was read from the peer: then its reason may be outside of our table.
                let scope = status.known().map_or(ErrorScope::Action, Reason::scope);
                self.fail_within(key, Arc::clone(&status), scope);
                self.nodes.lifecycle.refused(status);
            }
        }
    }

    /// Cancels an action; the result tells whether there was one. A stale or unknown target is not an error.
    fn cancel_served(&mut self, action: &Action) -> Result<String, Status> {
        check(action, |name| name == CANCEL_INPUT)?;
        let Some(param) = action.inputs.first() else {
            let message = "CANCEL needs the input action: any output id of the action to stop";
            return Err(Status::new(Reason::MissingInput, message).with("param", CANCEL_INPUT));
        };
        let graph = &self.nodes.graph;
        let owner = graph.find(&param.id).map(|node| graph.get(node).owner);
        let target = match owner {
            Some(NodeProducer::Local(target)) => target,
            _ => None,
        };
        let entry = target.and_then(|target| Some((target, self.table.get_mut(target)?)));
        // Not a CANCEL: one that names its own output would end before it is answered.
        let Some((target, entry)) =
            entry.filter(|(_, entry)| entry.served && &*entry.name != CANCEL)
        else {
            return Ok(cancelled(false));
        };
        let mut leaves = self.leaves.iter();
        // The session itself runs this one: no shell would answer the output.
        if leaves.any(|leaf| leaf.action == Some(target)) {
            self.finish(target);
            return Ok(cancelled(true));
        }
        if !std::mem::replace(&mut entry.cancelled, true) {
            // Until it has finished, it does something other than wait: it is no part of a deadlock.
            self.nodes.readers.set_waiting(target, false);
            self.nodes.lifecycle.emit(SessionOutput::Cancel {
                action: target,
                by: CancelledBy::Peer,
            });
        }
        Ok(cancelled(true))
    }

    /// Handles SET_TTL: an input `node`, and the duration as a config or as an input `ttl`. `None`: the input is not
    /// read yet.
    fn set_ttl(
        &mut self,
        key: ActionKey,
        action: &Action,
        now: Time,
    ) -> Result<Option<String>, Status> {
        check(action, |name| matches!(name, "node" | TTL_INPUT))?;
        let (id, ttl) = ttl::request(action)?;
        // Looked up at the receipt of the action: an id that is unknown then is a no-op, whenever the input `ttl`
        // arrives.
        let node = self.nodes.graph.find(id);
        match ttl {
            ttl::Requested::Input(id) => self.read_leaf(Some(key), id, ReadPurpose::Ttl(node), now),
            ttl::Requested::Given(ttl) => set_ttl(&mut self.nodes, node, ttl, now).map(Some),
        }
    }

    /// Handles RESUME (EV-942). `None`: the client's report is not read yet.
    fn resume_asked(
        &mut self,
        key: ActionKey,
        action: &Action,
        now: Time,
    ) -> Result<Option<String>, Status> {
        check(action, |name| name == HAVE)?;
        if !self.link.is_returning() {
            let message = "RESUME is for a session opened with evergreen-resume: 1, \
                 as the first action on its new connection";
            return Err(Status::new(Reason::Unimplemented, message));
        }
        if self.leaves.iter().any(InputLeaf::is_of_resume) {
            let message = "a new connection takes one RESUME, and only the client's";
            return Err(Status::new(Reason::BadMessage, message));
        }
        let Some(param) = action.inputs.first() else {
            let message = "RESUME needs the input have: what the sender has received";
            return Err(Status::new(Reason::MissingInput, message).with("param", HAVE));
        };
        self.read_leaf(Some(key), &param.id, ReadPurpose::Report, now)
    }

    /// Starts to read the input `id` of a reserved action; returns the action's answer if that could be read at once.
    fn read_leaf(
        &mut self,
        action: Option<ActionKey>,
        id: &str,
        purpose: ReadPurpose,
        since: Time,
    ) -> Result<Option<String>, Status> {
        // The quota or the node limit was exceeded: both end the session.
        let node = self.nodes.graph.mention(id)?;
        let known = self.nodes.graph.get_mut(node);
        // As an input of any other action: a cycle through it must be found when its last edge arrives (EV-217).
        known.referenced = true;
        known.transient |= matches!(purpose, ReadPurpose::Report);
        if let Some(entry) = action.and_then(|action| self.table.get_mut(action)) {
            // Counted by back-pressure as what an unfinished action reads.
            entry.inputs.push(node);
        }
        self.nodes.flow.closures = true;
        let cursor = self.nodes.open(node, action);
        if let Some(cursor) = self.nodes.readers.get_mut(cursor) {
            cursor.ours = true;
        }
        self.read_on(InputLeaf {
            action,
            cursor,
            node,
            text: Vec::new(),
            purpose,
            since,
        })
    }

    /// Reads on; the answer of the action once all of the input is read.
    fn read_on(&mut self, mut leaf: InputLeaf) -> Result<Option<String>, Status> {
        let answer = match leaf.read(&mut self.nodes) {
            Ok(LeafRead::Paused) => {
                self.leaves.push(leaf);
                self.nodes.readers.pause_own(&mut self.nodes.lifecycle);
                return Ok(None);
            }
            Ok(LeafRead::Pending) => {
                let action = leaf.action;
                self.leaves.push(leaf);
                if let Some(action) = action {
                    // Waits for nothing else, so that it takes part in a deadlock and does not postpone the idle
                    // timeout (D-3).
                    self.waiting(action, true);
                }
                return Ok(None);
            }
            Err(status) => Err(status),
            Ok(LeafRead::Whole) => match leaf.purpose {
                ReadPurpose::Ttl(node) => ttl::parse(&leaf.text)
                    .and_then(|ttl| set_ttl(&mut self.nodes, node, ttl, leaf.since)),
                ReadPurpose::Report => self.link.report_received(&leaf.text, &self.nodes.graph),
            },
        };
        leaf.close(&mut self.nodes);
        if let (true, Err(status)) = (leaf.is_of_resume(), &answer) {
            // A client that cannot report what it has received does not resume, and does not retry for ever.
            self.abort(status.clone());
        }
        answer.map(Some)
    }

    /// Queues what the peer has not received, after its report. `first` is sent before the rest.
    fn send_again(&mut self, first: Option<NodeKey>) {
        let nodes = &mut self.nodes;
        let Some(again) = self.link.take_send_again(&mut nodes.graph) else {
            return;
        };
        // The half-close is repeated after what is sent again: the old connection may have lost it.
        self.sending_finished |= again.half_closed;
        let graph = &mut nodes.graph;
        rewind(graph, &again.received);
        nodes.lifetime.recount(graph);
        nodes.sender.refill(graph, again.actions, first);
        self.after_sending();
    }
}

/// Drops the nodes in `node` and `tree`, including `node.1`, `tree.1` and so on. Unknown nodes are not an error.
fn drop_named(nodes: &mut Nodes, action: &Action) -> Result<String, Status> {
    check(action, |name| drops_tree(name).is_some())?;
    if action.inputs.is_empty() {
        let message = "DROP needs an input node or tree: the id of the node to drop";
        return Err(Status::new(Reason::MissingInput, message).with("param", "node"));
    }
    let named: Vec<(NodeKey, bool)> = action
        .inputs
        .iter()
        .filter_map(|param| Some((nodes.graph.find(&param.id)?, drops_tree(&param.name)?)))
        .collect();
    let (dropped, bytes) = nodes.drop_nodes(&named);
    Ok(format!("{{\"dropped\":{dropped},\"bytes\":{bytes}}}"))
}

fn set_ttl(
    nodes: &mut Nodes,
    node: Option<NodeKey>,
    ttl: std::time::Duration,
    since: Time,
) -> Result<String, Status> {
    let set = nodes.lifetime.set_ttl(node, ttl, since, &mut nodes.graph)?;
    Ok(format!("{{\"set\":{set}}}"))
}

/// Removes the nodes of the answer to RESUME once they are sent, or with the connection that they were meant for.
fn remove_when_sent(nodes: &mut Nodes, answer: &[NodeKey]) {
    if answer.is_empty() || nodes.lifecycle.is_closed() {
        return;
    }
    for &node in answer {
        // Before the drop, which frees a node at once if nothing holds it.
        nodes.graph.get_mut(node).transient = true;
    }
    let named: Vec<(NodeKey, bool)> = answer.iter().map(|&node| (node, false)).collect();
    nodes.drop_nodes(&named);
}

/// Whether an input of DROP names a tree; `None` if it is not an input of DROP.
fn drops_tree(name: &str) -> Option<bool> {
    let (base, number) = name.split_once('.').unwrap_or((name, "0"));
    let numbered = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    match base {
        "node" if numbered => Some(false),
        "tree" if numbered => Some(true),
        _ => None,
    }
}

/// EV-504, for the machine's own actions.
fn check(action: &Action, is_input: impl Fn(&str) -> bool) -> Result<(), Status> {
    let unknown_input = action.inputs.iter().find(|param| !is_input(&param.name));
    let unknown_output = action
        .outputs
        .iter()
        .find(|param| !is_answer(action, param));
    let Some(param) = unknown_input.or(unknown_output) else {
        return Ok(());
    };
    let message = format!("{} has no parameter {:?}", action.name, param.name);
    Err(Status::new(Reason::UnknownParam, message).with("param", &param.name))
}

/// Whether `param` is the result output of the action; RESUME names its output differently.
fn is_answer(action: &Action, param: &Param) -> bool {
    match &*param.name {
        "__status__" | "__dispatch_status__" => true,
        "result" => &*action.name != RESUME,
        name => name == HAVE && &*action.name == RESUME,
    }
}

fn cancelled(any: bool) -> String {
    format!("{{\"cancelled\":{any}}}")
}
