//! The model repository API of KServe: the index, load and unload (TR-705, TR-706).

use std::sync::Arc;

use axum::body::Body;
use http::Response;
use http::request::Parts;
use sapwood_kernel::Name;
use sapwood_proto::code::Code;
use sapwood_proto::generated::inference::repository_index_response::ModelIndex;
use serde_json::Value;

use super::body::Upload;
use super::catalog::{ModelCatalog, Readiness};
use super::metadata::{json_response, object};
use super::model_control::{self, ControlAction, LoadParameters, allowed};
use super::options::ModelOptions;
use super::path::GenerateRoute;
use super::request_error::RequestError;
use crate::auth::caller::Caller;

/// Answers a route of the repository.
pub(super) async fn answer(
    route: GenerateRoute,
    catalog: &ModelCatalog,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, RequestError> {
    // The index is for every caller, and shows each only its own models. The rest changes what is loaded.
    let (name, loads) = match route {
        GenerateRoute::Index => {
            let asked = object(upload, parts, catalog).await?;
            return index(catalog, Caller::of(&parts.extensions)?, asked.get("ready"));
        }
        GenerateRoute::Load(name) => (name, true),
        GenerateRoute::Unload(name) => (name, false),
        _ => return Err(named()),
    };
    // Before the body is read: a caller without the scope must not make the server read it.
    let explicit = allowed(catalog, &parts.extensions, &name)?;
    let asked = object(upload, parts, catalog).await?;
    let act = if loads {
        ControlAction::Load(parse_parameters(asked.get("parameters"))?)
    } else {
        ControlAction::Unload
    };
    model_control::act(catalog, explicit, &name, act).await?;
    Ok(Response::new(Body::empty()))
}

/// The parameters of a request to load.
fn parse_parameters(parameters: Option<&Value>) -> Result<LoadParameters, RequestError> {
    let mut asked = LoadParameters::default();
    // Parameters that are not an object are ignored, as unknown ones are.
    for (name, value) in parameters.and_then(Value::as_object).into_iter().flatten() {
        asked.take(name, value.as_str())?;
    }
    Ok(asked)
}

/// The error for a request that names a repository: there is one, without a name.
pub(super) fn named() -> RequestError {
    let message = "'repository_name' specification is not supported";
    RequestError::new(Code::Unimplemented, message)
}

fn index(
    catalog: &ModelCatalog,
    caller: &Caller,
    ready: Option<&Value>,
) -> Result<Response<Body>, RequestError> {
    let only = match ready {
        None | Some(Value::Null) => false,
        Some(Value::Bool(only)) => *only,
        Some(_) => {
            let message = "Invalid value for 'ready': expected a boolean";
            return Err(RequestError::new(Code::InvalidRequest, message));
        }
    };
    Ok(json_response(&list(catalog, caller, only)))
}

/// Every version of every model, or those that are ready.
pub(super) fn list(catalog: &ModelCatalog, caller: &Caller, only_ready: bool) -> Vec<ModelIndex> {
    let all = catalog.all(caller).into_iter();
    let shown = all.filter(|(.., state)| !only_ready || *state == Readiness::Ready);
    let each = |(name, model, state): (Name, Arc<ModelOptions>, Readiness)| {
        let versions = model.versions.clone().into_iter();
        versions.map(move |version| ModelIndex {
            name: name.as_str().into(),
            version: version.to_string(),
            // The state is the model's, and the same for all of its versions.
            state: state.name().into(),
            reason: String::new(),
        })
    };
    shown.flat_map(each).collect()
}
