//! The repository of models as KServe sees it: a list, and loading that is not the client's to do (TR-705, TR-706).
//!
//! Owns: index, load and unload. Refuses to know: how models are loaded.

use std::sync::Arc;

use axum::body::Body;
use http::request::Parts;
use http::{Extensions, Response};
use sapwood_kernel::Name;
use sapwood_proto::code::Code;
use serde_json::{Value, json};

use super::body::Upload;
use super::catalogue::{Catalogue, State};
use super::failure::Failure;
use super::metadata::{object, say};
use super::options::Model;
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
        Route::Repository => named(),
        _ => control(&parts.extensions),
    };
    Err(upload.refuse(failure, &catalogue.config).await)
}

/// There is one repository, without a name.
pub(super) fn named() -> Failure {
    let message = "'repository_name' specification is not supported";
    Failure::new(Code::Unimplemented, message)
}

/// Why a model is neither loaded nor unloaded for this caller.
pub(super) fn control(extensions: &Extensions) -> Failure {
    allowed(extensions).err().unwrap_or_else(|| {
        let message = "explicit model load / unload is not allowed if polling is enabled";
        Failure::new(Code::Unavailable, message)
    })
}

fn allowed(extensions: &Extensions) -> Result<(), Failure> {
    let caller = extensions.get::<Caller>();
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
    let list = list(catalogue, only).into_iter().map(|(name, version, state)| {
        json!({"name": name.as_str(), "version": version.to_string(), "state": state.name(), "reason": ""})
    });
    Ok(say(&Value::Array(list.collect())))
}

/// Every version of every model, or those that are ready.
pub(super) fn list(catalogue: &Catalogue, only_ready: bool) -> Vec<(Name, u64, State)> {
    let all = catalogue.all().into_iter();
    let shown = all.filter(|(.., state)| !only_ready || *state == State::Ready);
    let each = |(name, model, state): (Name, Arc<Model>, State)| {
        let versions = model.versions.clone().into_iter();
        versions.map(move |version| (name.clone(), version, state))
    };
    shown.flat_map(each).collect()
}
