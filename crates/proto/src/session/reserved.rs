//! Reserved actions: CANCEL, DROP, SET_TTL, RESUME, FINISH and OFFER_ACTIONS.

use std::sync::Arc;

use bytes::Bytes;

use super::port::{ActionKey, CancelledBy, NodeKey, SessionOutput, Side};
use super::store::NodeProducer;
use super::{SessionMachine, SessionPhase};
use crate::evergreen::{Action, Metadata, Param, Reason, Status};
use crate::time::Time;

/// Cancels an action.
pub(super) const CANCEL: &str = "CANCEL";
/// Its input: any output id of the action.
pub(super) const CANCEL_INPUT: &str = "action";
/// Drops nodes.
const DROP: &str = "DROP";
/// Sets the time to live of a node.
const SET_TTL: &str = "SET_TTL";
/// Its input: the duration.
pub(super) const TTL_INPUT: &str = "ttl";
/// Resumes a session on a new connection.
pub(super) const RESUME: &str = "RESUME";
/// Its input and its output: what each side has received.
pub(super) const HAVE: &str = "have";
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

pub(super) fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name)
}

/// The order in which the actions of a message are applied (D-26); RESUME comes first.
pub(super) fn rank(name: &str) -> u8 {
    match name {
        RESUME => 0,
        name if is_reserved(name) => 2,
        _ => 1,
    }
}

pub(super) fn is_known_by_node(name: &str) -> bool {
    BY_NODE.contains(&name)
}

pub(super) fn is_no_work(name: &str) -> bool {
    NO_WORK.contains(&name)
}

/// Whether an action ends as soon as it is handled, so that it never counts against the limit of unfinished actions
/// (EV-510). RESUME may have to wait for its input, but there is one at a time.
pub(super) fn ends_at_once(action: &Action) -> bool {
    let waits = || action.inputs.iter().any(|param| &*param.name == TTL_INPUT);
    is_no_work(&action.name) && !(&*action.name == SET_TTL && waits())
}

impl SessionMachine {
    /// Handles a reserved action; `false` if the machine does not handle it itself.
    pub(super) fn serve_reserved(&mut self, key: ActionKey, action: &Action, now: Time) -> bool {
        let answer = match &*action.name {
            CANCEL => self.cancel_served(action),
            DROP => self.drop_named(action),
            SET_TTL => {
                let ttl = check(action, |name| matches!(name, "node" | TTL_INPUT)).map_or_else(
                    |status| Some(Err(status)),
                    |()| self.set_ttl(key, action, now),
                );
                let Some(answer) = ttl else { return true };
                answer
            }
            RESUME => {
                let answer = check(action, |name| name == HAVE).map_or_else(
                    |status| Some(Err(status)),
                    |()| self.resume_asked(key, action, now),
                );
                let Some(answer) = answer else { return true };
                answer
            }
            FINISH => check(action, |_| false).map(|()| "{}".to_owned()),
            OFFER if self.side == Side::Client => Err(Status::new(
                Reason::Unimplemented,
                "a client takes no offers: it asks with LIST_ACTIONS",
            )),
            _ => return false,
        };
        self.answer(key, answer);
        if &*action.name == FINISH && self.phase == SessionPhase::Open {
            self.half_close();
        }
        true
    }

    /// Ends a reserved action.
    pub(super) fn answer(&mut self, key: ActionKey, answer: Result<String, Status>) {
        match answer {
            Ok(result) => {
                let node = self.write_result(key, result);
                self.send_again(node);
                let entry = self.actions.get(key);
                let resumes = entry.filter(|entry| &*entry.name == RESUME);
                let sent: Vec<NodeKey> = resumes.map_or_else(Vec::new, |entry| {
                    let statuses = entry.status.iter().chain(&entry.dispatch);
                    entry.outputs.iter().chain(statuses).copied().collect()
                });
                self.finish(key);
                self.remove_when_sent(&sent);
            }
            // A closed session sends nothing more.
            Err(_) if self.is_closed() => {}
            Err(status) => {
                let status = Arc::new(status);
                self.fail(key, Arc::clone(&status));
                self.refused(status);
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
        let owner = self
            .store
            .find(&param.id)
            .map(|node| self.store.get(node).owner);
        let target = match owner {
            Some(NodeProducer::Local(target)) => target,
            _ => None,
        };
        let entry = target.and_then(|target| Some((target, self.actions.get_mut(target)?)));
        let Some((target, entry)) =
            entry.filter(|(_, entry)| entry.served && &*entry.name != CANCEL)
        else {
            return Ok(cancelled(false));
        };
        if self.leaves.iter().any(|leaf| leaf.is_of(target)) {
            self.finish(target);
            return Ok(cancelled(true));
        }
        if !std::mem::replace(&mut entry.cancelled, true) {
            self.actions.set_waiting(target, false);
            self.emit(SessionOutput::Cancel {
                action: target,
                by: CancelledBy::Peer,
            });
        }
        Ok(cancelled(true))
    }

    /// Drops the nodes in `node` and `tree`, including `node.1`, `tree.1` and so on. Unknown nodes are not an error.
    fn drop_named(&mut self, action: &Action) -> Result<String, Status> {
        check(action, |name| drops_tree(name).is_some())?;
        if action.inputs.is_empty() {
            let message = "DROP needs an input node or tree: the id of what is to be dropped";
            return Err(Status::new(Reason::MissingInput, message).with("param", "node"));
        }
        let named: Vec<(NodeKey, bool)> = action
            .inputs
            .iter()
            .filter_map(|param| Some((self.store.find(&param.id)?, drops_tree(&param.name)?)))
            .collect();
        let (dropped, bytes) = self.drop_nodes(&named);
        Ok(format!("{{\"dropped\":{dropped},\"bytes\":{bytes}}}"))
    }

    fn write_result(&mut self, key: ActionKey, result: String) -> Option<NodeKey> {
        let node = *self.actions.get(key)?.outputs.first()?;
        let metadata = Arc::new(Metadata::of("application/json"));
        // Written even if other output waits: the result is small, and the client waits for it. If the node was dropped
        // meanwhile, the write is discarded.
        let _ = self.put(node, &metadata, Bytes::from(result));
        Some(node)
    }
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
