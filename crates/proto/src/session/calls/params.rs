//! The checks of an action's parameters and configs (EV-504, EV-509).

use prost::Message as _;
use prost_types::Any;

use crate::evergreen::{Action, Reason, SessionLimits, Status};
use crate::generated::sapwood::v1::ActionOptions;
use crate::time::Time;

/// EV-504, EV-509, and the limits on the lists within an action.
pub(super) fn check(action: &Action, limits: &SessionLimits) -> Result<(), Status> {
    let name_is_legal = |name: &str| !name.is_empty() && name.len() <= limits.max_name_bytes;
    let names = action
        .inputs
        .iter()
        .chain(&action.outputs)
        .map(|param| &param.name);
    // Names first: the messages below quote them and must not echo long text (D-47).
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
    // Numbers before duplicates: the sorting below is bounded by them.
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
    // Only equal names. Aliases belong to the function, which is not known here.
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

pub(super) fn options(action: &Action) -> Result<ActionOptions, Status> {
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

pub(super) fn deadline(options: ActionOptions, now: Time) -> Result<Option<Time>, Status> {
    let Some(timeout) = options.timeout else {
        return Ok(None);
    };
    // A protobuf duration can be negative, one of ours cannot.
    let timeout = std::time::Duration::try_from(timeout).map_err(|_| {
        let status = Status::new(
            Reason::BadConfig,
            format!("timeout of {OPTIONS} is not a duration of 0 or more"),
        );
        status.with_field("timeout", "a duration of 0 or more")
    })?;
    Ok(Some(now + timeout))
}

/// The type of a config: what follows the last slash of its URL (EV-509).
pub(super) fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

pub(super) const OPTIONS: &str = "sapwood.v1.ActionOptions";
