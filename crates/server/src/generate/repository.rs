//! The repository of models as KServe sees it: a list, and models that come and go (TR-705, TR-706).
//!
//! Owns: index, load and unload over HTTP. Refuses to know: who may do that, and how.

use std::sync::Arc;

use axum::body::Body;
use http::Response;
use http::request::Parts;
use sapwood_kernel::Name;
use sapwood_proto::code::Code;
use serde_json::{Value, json};

use super::body::Upload;
use super::catalogue::{Catalogue, State};
use super::control::{self, Act, Asked, allowed};
use super::failure::Failure;
use super::metadata::{object, say};
use super::options::Model;
use super::path::Route;
use crate::caller::Caller;

/// Answers a route of the repository.
pub(super) async fn answer(
    route: Route,
    catalogue: &Catalogue,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, Failure> {
    let (name, loads) = match route {
        Route::Index => {
            let asked = object(upload, parts, catalogue).await?;
            return index(
                catalogue,
                Caller::of(&parts.extensions)?,
                asked.get("ready"),
            );
        }
        Route::Load(name) => (name, true),
        Route::Unload(name) => (name, false),
        _ => return Err(named()),
    };
    let explicit = allowed(catalogue, &parts.extensions, &name)?;
    let asked = object(upload, parts, catalogue).await?;
    let act = if loads {
        Act::Load(said(asked.get("parameters"))?)
    } else {
        Act::Unload
    };
    control::act(catalogue, explicit, &name, act).await?;
    Ok(Response::new(Body::empty()))
}

/// The parameters of a request to load.
fn said(parameters: Option<&Value>) -> Result<Asked, Failure> {
    let mut asked = Asked::default();
    for (name, value) in parameters.and_then(Value::as_object).into_iter().flatten() {
        asked.take(name, value.as_str())?;
    }
    Ok(asked)
}

/// There is one repository, without a name.
pub(super) fn named() -> Failure {
    let message = "'repository_name' specification is not supported";
    Failure::new(Code::Unimplemented, message)
}

fn index(
    catalogue: &Catalogue,
    caller: &Caller,
    ready: Option<&Value>,
) -> Result<Response<Body>, Failure> {
    let only = match ready {
        None | Some(Value::Null) => false,
        Some(Value::Bool(only)) => *only,
        Some(_) => {
            let message = "Invalid value for 'ready': expected a boolean";
            return Err(Failure::new(Code::InvalidRequest, message));
        }
    };
    let list = list(catalogue, caller, only).into_iter().map(|(name, version, state)| {
        json!({"name": name.as_str(), "version": version.to_string(), "state": state.name(), "reason": ""})
    });
    Ok(say(&Value::Array(list.collect())))
}

/// Every version of every model, or those that are ready.
pub(super) fn list(
    catalogue: &Catalogue,
    caller: &Caller,
    only_ready: bool,
) -> Vec<(Name, u64, State)> {
    let all = catalogue.all(caller).into_iter();
    let shown = all.filter(|(.., state)| !only_ready || *state == State::Ready);
    let each = |(name, model, state): (Name, Arc<Model>, State)| {
        let versions = model.versions.clone().into_iter();
        versions.map(move |version| (name.clone(), version, state))
    };
    shown.flat_map(each).collect()
}
