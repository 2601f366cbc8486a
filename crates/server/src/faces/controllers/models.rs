//! The models of this face: which one a request is for, and what clients are told of them (AI-911).

use std::time::{SystemTime, UNIX_EPOCH};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use sapwood_kernel::{Fun, Name};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use serde_json::{Value, json};

use super::endpoint::{AskedAction, ControllersContext};
use super::refusals;
use crate::auth::caller::Caller;
use crate::http::rejection::Rejection;
use crate::ops::health::HealthState;

/// The prefixes under which the routes are: the client `aici` needs exactly one of them in its base URL.
pub(super) fn info(context: &ControllersContext, asked: &AskedAction) -> Value {
    let names = names(context, &asked.caller);
    let prefixes: Vec<_> = match &*names {
        [] | [_] => vec!["/".to_owned()],
        several => several.iter().map(prefix).collect(),
    };
    json!({"prefixes": prefixes})
}

fn prefix(model: &Name) -> String {
    format!("/aici/{}/", utf8_percent_encode(model, SEGMENT))
}

/// Everything but what RFC 3986 leaves unreserved.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The models as OpenAI's API lists them.
pub(super) fn list(context: &ControllersContext, asked: &AskedAction) -> Result<Value, Rejection> {
    let names = match &asked.model {
        None => names(context, &asked.caller),
        Some(model) => vec![
            find(context, &asked.caller, Some(model))?
                .spec()
                .name
                .clone(),
        ],
    };
    let listed: Vec<_> = names
        .iter()
        .map(|name| {
            json!({
                "id": name.as_str(), "object": "model", "created": context.began, "owned_by": "sapwood",
            })
        })
        .collect();
    Ok(json!({"object": "list", "data": listed}))
}

/// The model of this name, or the only one.
pub(super) fn find(
    context: &ControllersContext,
    caller: &Caller,
    name: Option<&str>,
) -> Result<Fun, Rejection> {
    let name = match name {
        Some(name) => Name::shared(name),
        None => only(context, caller)?,
    };
    let function = context.kernel.get(&name).ok();
    let function = function.filter(|function| function.spec().model && caller.may_use(&name));
    let function = function.ok_or_else(|| refusals::model_not_found(&name))?;
    if context.shared.health.state(&name) == Some(HealthState::Loading) {
        let message = "The model is still loading: try again soon.";
        let reason = ErrorReason::MODEL_LOADING;
        return Err(Rejection::new(Code::Unavailable, reason, message));
    }
    Ok(function)
}

fn only(context: &ControllersContext, caller: &Caller) -> Result<Name, Rejection> {
    let mut names = names(context, caller);
    match (names.pop(), names.is_empty()) {
        (Some(name), true) => Ok(name),
        (Some(_), false) => Err(refusals::invalid(
            "There are several models: name one in `model`, or use one of the prefixes of /proxy/info.",
        )),
        (None, _) => Err(refusals::model_not_found("")),
    }
}

fn names(context: &ControllersContext, caller: &Caller) -> Vec<Name> {
    let specs = context.kernel.specs();
    let models = specs.iter().filter(|spec| spec.model);
    let names = models.map(|spec| spec.name.clone());
    names.filter(|name| caller.may_use(name)).collect()
}

/// The time now, in Unix seconds.
pub(super) fn unix_seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
