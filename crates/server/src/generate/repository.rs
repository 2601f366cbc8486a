//! The repository of models as KServe sees it: a list, and loading that is not the client's to do (TR-705, TR-706).
//!
//! Owns: index, load and unload. Refuses to know: how models are loaded.

use axum::body::Body;
use http::Response;
use http::request::Parts;
use sapwood_proto::code::Code;
use serde_json::{Value, json};

use super::body::Upload;
use super::catalogue::{Catalogue, State};
use super::failure::Failure;
use super::metadata::{object, say};
use super::path::Route;
use crate::auth::{Caller, Scope};

/// Answers a route of the repository.
pub(super) async fn answer(
    route: Route,
    catalogue: &Catalogue,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, Failure> {
    let failure = match route {
        Route::Index => {
            let asked = object(upload, parts, catalogue).await?;
            return index(catalogue, asked.get("ready"));
        }
        Route::Repository => Failure::new(
            Code::Unimplemented,
            "'repository_name' specification is not supported",
        ),
        _ => allowed(parts).err().unwrap_or_else(|| {
            let message = "explicit model load / unload is not allowed if polling is enabled";
            Failure::new(Code::Unavailable, message)
        }),
    };
    Err(upload.refuse(failure, &catalogue.config).await)
}

fn allowed(parts: &Parts) -> Result<(), Failure> {
    let caller = parts.extensions.get::<Caller>();
    let checked = caller.map_or(Ok(()), |caller| caller.require(Scope::Admin));
    checked.map_err(|refusal| Failure::new(refusal.code, refusal.message))
}

fn index(catalogue: &Catalogue, ready: Option<&Value>) -> Result<Response<Body>, Failure> {
    let only = match ready {
        None | Some(Value::Null) => false,
        Some(Value::Bool(only)) => *only,
        Some(_) => {
            let message = "Invalid value for 'ready': expected a boolean";
            return Err(Failure::new(Code::InvalidRequest, message));
        }
    };
    let all = catalogue.all().into_iter();
    let shown = all.filter(|(.., state)| !only || *state == State::Ready);
    let list: Vec<Value> = shown
        .flat_map(|(name, model, state)| {
            let versions = model.versions.clone().into_iter();
            versions.map(move |version| {
                json!({"name": name.as_str(), "version": version.to_string(), "state": state.name(), "reason": ""})
            })
        })
        .collect();
    Ok(say(&Value::Array(list)))
}
