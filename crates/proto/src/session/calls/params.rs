//! The checks of an action's parameters and configs (EV-504, EV-509).

use prost::Message as _;
use prost_types::Any;

use crate::evergreen::{Action, Reason, SessionLimits, Status};
use crate::generated::sapwood::v1::ActionOptions;
use crate::session::graph::check_length;
use crate::time::Time;

/// EV-504, EV-509, and the limits on the lists within an action.
pub(super) fn check(action: &Action, limits: &SessionLimits) -> Result<(), Status> {
    let params = action.inputs.iter().chain(&action.outputs);
    let max = limits.max_name_bytes;
    // Names first: the messages below quote them and must not echo long text (D-47).
    for name in [&action.name]
        .into_iter()
        .chain(params.map(|param| &param.name))
    {
        check_length(name, "a name", Reason::BadName, "max_name_bytes", max)?;
    }
    // Numbers before duplicates: the sorting below is bounded by them.
    for (limit, value, max) in [
        ("max_params", action.inputs.len(), limits.max_params),
        ("max_params", action.outputs.len(), limits.max_params),
        ("max_configs", action.configs.len(), limits.max_configs),
    ] {
        Status::within(Reason::ParamLimit, limit, value, max)?;
    }
    // Only equal names. Aliases belong to the function, which is not known here.
    for list in [&action.inputs, &action.outputs] {
        if let Some(name) = duplicate(list.iter().map(|param| &*param.name)) {
            let message = format!("parameter {name:?} is bound twice");
            return Err(Status::new(Reason::DuplicateParam, message).with("param", name));
        }
    }
    if let Some(name) = duplicate(action.configs.iter().map(type_name)) {
        let message = format!("there are two configs of type {name:?}");
        return Err(Status::new(Reason::DuplicateConfig, message).with("param", name));
    }
    Ok(())
}

fn duplicate<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    let twice = names.windows(2).find(|pair| pair[0] == pair[1]);
    twice.map(|pair| pair[0])
}

pub(super) fn options(action: &Action) -> Result<ActionOptions, Status> {
    let Some(any) = action.configs.iter().find(|any| type_name(any) == OPTIONS) else {
        return Ok(ActionOptions::default());
    };
    let message = "the config sapwood.v1.ActionOptions cannot be decoded";
    ActionOptions::decode(&*any.value).map_err(|_| Status::new(Reason::BadConfig, message))
}

pub(super) fn deadline(options: ActionOptions, now: Time) -> Result<Option<Time>, Status> {
    let Some(timeout) = options.timeout else {
        return Ok(None);
    };
    // A protobuf duration can be negative, one of ours cannot.
    let timeout = std::time::Duration::try_from(timeout).map_err(|_| {
        let message = "timeout of sapwood.v1.ActionOptions is not a duration of 0 or more";
        let status = Status::new(Reason::BadConfig, message);
        status.with_field("timeout", "a duration of 0 or more")
    })?;
    Ok(Some(now + timeout))
}

/// The type of a config: what follows the last slash of its URL (EV-509).
pub(super) fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

pub(super) const OPTIONS: &str = "sapwood.v1.ActionOptions";
