//! `/v1/run/ID/vars`: the variables of a run, read and written while it runs (AI-1006).

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use http::request::Parts;
use http::{HeaderValue, Response, StatusCode, header};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{NamedVariable, OutsideWrite, RequestVariables, VariableWrite};
use serde_json::{Map, Value, json};

use super::endpoint::{AskedAction, ControllersContext};
use super::{body, refusals};
use crate::http::rejection::Rejection;

/// Lists the variables, with the values of the first ones.
pub(super) fn list(context: &ControllersContext, asked: &AskedAction) -> Result<Value, Rejection> {
    let variables = variables(context, asked)?;
    let mut left = VALUES_SHOWN_BYTES;
    let mut listed = Map::new();
    for NamedVariable {
        name,
        version,
        value,
    } in variables.list()
    {
        let mut entry = json!({"version": version, "bytes": value.len()});
        // Further values are read one by one: an answer with all of them could have a hundred MiB.
        if let Some(rest) = left.checked_sub(value.len()) {
            left = rest;
            let (member, text) = shown(&value);
            entry[member] = text.into();
        }
        listed.insert(name, entry);
    }
    Ok(json!({"vars": listed}))
}

/// Answers the bytes of one variable.
pub(super) fn read(
    context: &ControllersContext,
    mut asked: AskedAction,
) -> Result<Response<Body>, Rejection> {
    let variables = variables(context, &asked)?;
    let name = asked.take_variable();
    let found = variables.read(&name);
    let NamedVariable { version, value, .. } = found.ok_or_else(variable_not_found)?;
    let headers = [
        (header::ETAG, tag(version)),
        (
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/octet-stream"),
        ),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    Ok((headers, Bytes::from_owner(SharedValue(value))).into_response())
}

/// Writes one variable: the body is its new value.
pub(super) async fn write(
    context: &ControllersContext,
    mut asked: AskedAction,
) -> Result<Response<Body>, Rejection> {
    // Before the body is read, which a stranger to the run need not send.
    variables(context, &asked)?;
    let when_version_is = required_version(&asked.parts)?;
    let name = asked.take_variable();
    let sent = std::mem::replace(&mut asked.body, Body::empty());
    let value = body::whole(&asked.parts, sent, VALUE_BYTES, "the value").await?;
    let write = VariableWrite {
        name,
        value: value.to_vec(),
        append: false,
        when_version_is,
    };
    // Asked for again: the run may have ended while the body came.
    match variables(context, &asked)?.write(&write) {
        OutsideWrite::Written(version) => {
            let headers = [(header::ETAG, tag(version))];
            Ok((headers, axum::Json(json!({"version": version}))).into_response())
        }
        OutsideWrite::OtherVersion(current) => Err(version_conflict(current)),
        OutsideWrite::OverLimit(message) => Err(refusals::invalid(message)),
    }
}

/// The variables of the path's run, if it is the caller's.
fn variables(
    context: &ControllersContext,
    asked: &AskedAction,
) -> Result<Arc<dyn RequestVariables>, Rejection> {
    let run = context.runs.find(asked.name(), &asked.caller.identity);
    let run = run.ok_or_else(|| {
        let message = "There is no such run, it is not yours, or it has ended.";
        Rejection::new(
            Code::NotFound,
            ErrorReason::custom("run_not_found"),
            message,
        )
    })?;
    run.variables().map(Arc::clone).ok_or_else(|| {
        let message = "The controller of this run has not started, or it has no variables.";
        let reason = ErrorReason::custom("no_variables");
        Rejection::new(Code::FailedPrecondition, reason, message).with_status(StatusCode::CONFLICT)
    })
}

/// The version that `If-Match` names.
fn required_version(parts: &Parts) -> Result<Option<u64>, Rejection> {
    let Some(value) = parts.headers.get(header::IF_MATCH) else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or_default();
    let bare = text.strip_prefix('"').and_then(|it| it.strip_suffix('"'));
    let version = bare.unwrap_or(text).parse();
    version.map(Some).map_err(|_| {
        refusals::invalid("If-Match must be the version of the variable, a whole number")
    })
}

fn version_conflict(current: Option<u64>) -> Rejection {
    let message = match current {
        Some(version) => format!("The variable has version {version}."),
        None => "The variable does not exist.".to_owned(),
    };
    let reason = ErrorReason::custom("version_conflict");
    let rejection = Rejection::new(Code::FailedPrecondition, reason, message);
    rejection.with_status(StatusCode::PRECONDITION_FAILED)
}

fn variable_not_found() -> Rejection {
    let reason = ErrorReason::custom("variable_not_found");
    Rejection::new(Code::NotFound, reason, "The run has no such variable.")
}

fn tag(version: u64) -> HeaderValue {
    let quoted = HeaderValue::try_from(format!("\"{version}\""));
    quoted.unwrap_or_else(|_| HeaderValue::from(version))
}

/// A value as JSON: text, or hexadecimal digits of what is none.
fn shown(value: &[u8]) -> (&'static str, String) {
    match std::str::from_utf8(value) {
        Ok(text) => ("value", text.to_owned()),
        Err(_) => ("hex", hex(value)),
    }
}

/// Bytes as hexadecimal digits, as controllers write them.
pub(super) fn hex(bytes: &[u8]) -> String {
    let digit = |digit: u8| char::from(b"0123456789abcdef"[usize::from(digit)]);
    let digits = bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]);
    digits.collect()
}

/// A value that a response sends without a copy.
struct SharedValue(Arc<Vec<u8>>);

impl AsRef<[u8]> for SharedValue {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes of a value; the limit of controllers (AI-953).
const VALUE_BYTES: usize = 1 << 20;
/// Bytes of all values in a list.
const VALUES_SHOWN_BYTES: usize = 1 << 20;
