//! Actions with a meaning of their own.
//!
//! Owns: which names they are, and CANCEL (EV-913). Refuses to know: what LIST_ACTIONS and SESSION_INFO answer; the
//! shell knows functions, so those are started like any other action.

use std::sync::Arc;

use bytes::Bytes;

use super::Session;
use super::port::{ActionKey, CancelledBy, Output};
use super::store::Owner;
use crate::evergreen::{Action, Metadata, Reason, Status};

/// Cancels an action.
pub(super) const CANCEL: &str = "CANCEL";
/// Its input: any output id of the action.
pub(super) const CANCEL_INPUT: &str = "action";

/// Names that the protocol keeps for itself. They are applied after all other actions of a message (D-26).
const RESERVED: &[&str] = &[
    CANCEL,
    "LIST_ACTIONS",
    "SESSION_INFO",
    "DROP",
    "SET_TTL",
    "FINISH",
    "RESUME",
    "OFFER_ACTIONS",
];
/// Those of them that take names of nodes and never read them.
const BY_NODE: &[&str] = &[CANCEL, "DROP", "SET_TTL"];
/// Those that are not built yet.
const UNBUILT: &[&str] = &["DROP", "SET_TTL", "FINISH", "RESUME", "OFFER_ACTIONS"];

pub(super) fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name)
}

pub(super) fn is_known_by_node(name: &str) -> bool {
    BY_NODE.contains(&name)
}

impl Session {
    /// Whether the machine has dealt with a reserved action itself.
    pub(super) fn serve_reserved(&mut self, key: ActionKey, action: &Action) -> bool {
        if UNBUILT.contains(&&*action.name) {
            let message = format!("{} is not available here", action.name);
            self.fail(key, Status::new(Reason::Unimplemented, message));
            return true;
        }
        if &*action.name != CANCEL {
            return false;
        }
        match self.cancel_served(action) {
            Ok(cancelled) => {
                self.write_result(key, action, cancelled);
                self.finish(key);
            }
            Err(status) => self.fail(key, status),
        }
        true
    }

    /// Whether there was something to cancel. A stale or unknown target is no failure.
    fn cancel_served(&mut self, action: &Action) -> Result<bool, Status> {
        let unknown_input = action
            .inputs
            .iter()
            .find(|param| &*param.name != CANCEL_INPUT);
        let unknown_output = action
            .outputs
            .iter()
            .find(|param| !matches!(&*param.name, RESULT | "__status__"));
        if let Some(param) = unknown_input.or(unknown_output) {
            let message = format!("CANCEL has no parameter {:?}", param.name);
            return Err(Status::new(Reason::UnknownParam, message).with("param", &param.name));
        }
        let Some(param) = action.inputs.first() else {
            let message = "CANCEL needs the input action: any output id of the action to stop";
            return Err(Status::new(Reason::MissingInput, message).with("param", CANCEL_INPUT));
        };
        let owner = self
            .store
            .find(&param.id)
            .map(|node| self.store.get(node).owner);
        let Some(Owner::Local(Some(target))) = owner else {
            return Ok(false);
        };
        let Some(entry) = self
            .actions
            .get_mut(target)
            .filter(|entry| entry.served && &*entry.name != CANCEL)
        else {
            return Ok(false);
        };
        if !std::mem::replace(&mut entry.cancelled, true) {
            self.actions.set_waiting(target, false);
            self.emit(Output::Cancel {
                action: target,
                by: CancelledBy::Peer,
            });
        }
        Ok(true)
    }

    fn write_result(&mut self, key: ActionKey, action: &Action, cancelled: bool) {
        let Some(at) = action
            .outputs
            .iter()
            .filter(|param| &*param.name != "__status__")
            .position(|_| true)
        else {
            return;
        };
        let Some(&node) = self
            .actions
            .get(key)
            .and_then(|entry| entry.outputs.get(at))
        else {
            return;
        };
        let json: &'static [u8] = if cancelled {
            b"{\"cancelled\":true}"
        } else {
            b"{\"cancelled\":false}"
        };
        // A result that does not fit the queue is left out: the output still ends.
        let _ = self.write(
            node,
            &Arc::new(Metadata::of("application/json")),
            Bytes::from_static(json),
        );
    }
}

const RESULT: &str = "result";
