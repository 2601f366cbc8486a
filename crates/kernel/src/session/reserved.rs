//! The reserved actions that describe the server: LIST_ACTIONS and SESSION_INFO.

use std::sync::Arc;

use sapwood_proto::evergreen::{Dialect, Metadata, Reason, Status};
use sapwood_proto::session::ActionStart;
use serde_json::Value;

use super::link::SessionLink;
use super::{SessionOptions, listing};
use crate::kernel::Kernel;

/// The reply to a reserved action; `None` if it is another action.
pub(super) fn answer(
    kernel: &Kernel,
    options: &SessionOptions,
    link: &SessionLink,
    start: &ActionStart,
) -> Option<Result<Value, Status>> {
    let (output, value) = match &*start.name {
        "LIST_ACTIONS" => ("actions", listing::actions(kernel, options)),
        "SESSION_INFO" => ("info", listing::session(options, link.dialect())),
        // A liveness check, in Action Engine's words (EV-742).
        "__ping__" if link.dialect() == Dialect::Msgpack => ("result", Value::Null),
        _ => return None,
    };
    let unknown = start
        .outputs
        .iter()
        .find(|(name, _)| *name != *output && *name != *"result");
    // These actions have no inputs, so any input is unknown (EV-504).
    let unknown = unknown.or_else(|| start.inputs.first());
    Some(match unknown {
        Some((name, _)) => {
            let message = format!(
                "{} has no parameter {name:?}; it has the output {output}",
                start.name
            );
            Err(Status::new(Reason::UnknownParam, message).with("param", name))
        }
        None => Ok(value),
    })
}

/// Writes `value` to every output and finishes the action.
pub(super) fn write(link: &SessionLink, start: &ActionStart, value: &Value) -> Result<(), Status> {
    let metadata = Arc::new(Metadata::of("application/json"));
    let text = bytes::Bytes::from(value.to_string());
    link.with(|live| {
        let session = live.machine();
        for (_, node) in &start.outputs {
            // Without a check for room: a queue that is full because the client reads slowly is no failure of this action,
            // and there is no run that could wait. The quota bounds how many such replies can be queued.
            let written = session
                .nodes()
                .end_with_data(*node, &metadata, text.clone());
            written.map_err(|error| Status::new(Reason::Function, error.to_string()))?;
        }
        session.calls().finish(start.action);
        Ok(())
    })
}
