//! Parses SET_TTL (EV-912): the node, and its time to live.

use std::time::Duration;

use prost::Message as _;

use super::params::{OPTIONS, type_name};
use super::reserved::TTL_INPUT;
use crate::evergreen::{Action, NodeId, Param, Reason, Status};

/// How the duration is given.
pub(super) enum Requested<'a> {
    /// As an input with this node.
    Input(&'a NodeId),
    /// As a config.
    Given(Duration),
}

/// The node's id and the duration that an action SET_TTL names.
pub(super) fn request(action: &Action) -> Result<(&NodeId, Requested<'_>), Status> {
    let given = |name: &str| action.inputs.iter().find(|param| &*param.name == name);
    let Some(node) = given("node") else {
        let message = "SET_TTL needs the input node: the id of the node that is to expire";
        return Err(Status::new(Reason::MissingInput, message).with("param", "node"));
    };
    let own = action.configs.iter().map(|any| (type_name(any), any));
    // A time limit of the action itself may be among the configs.
    let mut own = own.filter(|(name, _)| *name != OPTIONS);
    if let Some((name, _)) = own.clone().find(|(name, _)| *name != DURATION) {
        let message = format!("SET_TTL takes no config {name:?}");
        return Err(Status::new(Reason::UnknownConfig, message));
    }
    // The input wins: it is what clients without configs send (EV-912).
    match (given(TTL_INPUT), own.next()) {
        (Some(Param { id, .. }), _) => Ok((&node.id, Requested::Input(id))),
        (None, Some((_, any))) => {
            let sent = prost_types::Duration::decode(&*any.value).ok();
            let ttl = sent.and_then(|sent| Duration::try_from(sent).ok());
            Ok((&node.id, Requested::Given(ttl.ok_or_else(bad_ttl)?)))
        }
        (None, None) => {
            let message = format!("SET_TTL needs the input ttl, or a config {DURATION}");
            Err(Status::new(Reason::MissingInput, message).with("param", TTL_INPUT))
        }
    }
}

/// Parses a duration in the JSON mapping of protobuf: `"30s"`, `"1.5s"`.
pub(super) fn parse(text: &[u8]) -> Result<Duration, Status> {
    duration(text).ok_or_else(bad_ttl)
}

fn duration(text: &[u8]) -> Option<Duration> {
    let text: String = serde_json::from_slice(text).ok()?;
    // By hand and not as a float, which would round, and would take "inf" and "1e9".
    let (whole, part) = match text.strip_suffix('s')?.split_once('.') {
        Some((whole, part)) => (whole, part),
        None => (text.strip_suffix('s')?, "0"),
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    // No sign, and no more digits than protobuf's range and its nanoseconds have.
    if !digits(whole) || !digits(part) || whole.len() > 12 || part.len() > 9 {
        return None;
    }
    let nanos = format!("{part:0<9}").parse().ok()?;
    Some(Duration::new(whole.parse().ok()?, nanos))
}

fn bad_ttl() -> Status {
    let message = "ttl is not a duration of 0 or more; send for example \"30s\"";
    Status::new(Reason::BadConfig, message).with_field("ttl", "a duration of 0 or more")
}

const DURATION: &str = "google.protobuf.Duration";
