//! Server and model metadata, configuration and statistics over HTTP (TR-701 to TR-704, TR-707 to TR-709).

use std::sync::Arc;

use axum::body::Body;
use http::request::Parts;
use http::{Method, Response, header};
use sapwood_kernel::Name;
use sapwood_proto::code::Code;
use sapwood_proto::generate::Signature;
use serde_json::{Map, Value, json};

use super::body::{EncodingErrorStyle, Upload};
use super::catalog::{FoundModel, ModelCatalog, Readiness};
use super::options::ModelOptions;
use super::path::{GenerateRoute, MemoryAct, Target};
use super::request_error::{JSON, RequestError};
use crate::auth::caller::Caller;

/// What is announced (TR-701).
pub(super) const EXTENSIONS: [&str; 9] = [
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "generate",
];

/// Answers a route that is not about a model's work.
pub(super) async fn answer(
    route: GenerateRoute,
    catalog: &ModelCatalog,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, RequestError> {
    let caller = Caller::of(&parts.extensions)?;
    Ok(match route {
        GenerateRoute::Live => Response::new(Body::empty()),
        GenerateRoute::Ready => ready(catalog.shared.health.ready().is_ok()),
        GenerateRoute::Server => json_response(&json!({
            "name": catalog.config.metadata_name,
            "version": catalog.config.metadata_version,
            "extensions": EXTENSIONS,
        })),
        GenerateRoute::Model(target) => json_response(&model(&catalog.find(caller, &target)?)),
        GenerateRoute::ModelReady(target) => model_ready(catalog, caller, &target)?,
        GenerateRoute::Config(target) => json_response(&config(&catalog.find(caller, &target)?)),
        GenerateRoute::Stats(target) => json_response(&stats(catalog, caller, target.as_ref())?),
        GenerateRoute::Trace if parts.method == Method::POST => {
            settings(upload, parts, catalog, trace()).await?
        }
        GenerateRoute::Logging if parts.method == Method::POST => {
            settings(upload, parts, catalog, logging()).await?
        }
        GenerateRoute::Trace => json_response(&trace()),
        GenerateRoute::Logging => json_response(&logging()),
        GenerateRoute::Memory(act) => match act {
            MemoryAct::Status => json_response(&json!([])),
            MemoryAct::Unregister => Response::new(Body::empty()),
            MemoryAct::Register => {
                return Err(RequestError::new(
                    Code::Unimplemented,
                    "shared memory is not supported",
                ));
            }
        },
        _ => return Err(RequestError::new(Code::NotFound, "Not Found")),
    })
}

/// A JSON answer.
pub(super) fn json_response(value: &Value) -> Response<Body> {
    let mut answer = Response::new(Body::from(value.to_string()));
    answer.headers_mut().insert(header::CONTENT_TYPE, JSON);
    answer
}

/// Empty either way; probes look at the status alone.
fn ready(ready: bool) -> Response<Body> {
    let mut answer = Response::new(Body::empty());
    if !ready {
        *answer.status_mut() = http::StatusCode::BAD_REQUEST;
    }
    answer
}

fn model_ready(
    catalog: &ModelCatalog,
    caller: &Caller,
    target: &Target,
) -> Result<Response<Body>, RequestError> {
    let found = catalog.known(caller, &target.model)?;
    if catalog.state(&found.function) != Readiness::Ready {
        return Err(
            RequestError::new(Code::Unavailable, "Model version not ready")
                .with_status(http::StatusCode::BAD_REQUEST),
        );
    }
    catalog.find(caller, target).map(|_| ready(true))
}

/// TR-702.
fn model(found: &FoundModel) -> Value {
    let signature = &found.signature;
    let tensor = |name: &str, datatype: &str, shape: &[i64]| json!({"name": name, "datatype": datatype, "shape": signature.shown(shape)});
    let inputs = signature.inputs.iter();
    let outputs = signature.outputs.iter();
    json!({
        "name": &*found.name,
        "versions": found.model.versions.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "platform": found.model.platform,
        "inputs": inputs.map(|it| tensor(&it.name, it.datatype.name(), &it.shape)).collect::<Vec<_>>(),
        "outputs": outputs.map(|it| tensor(&it.name, it.datatype.name(), &it.shape)).collect::<Vec<_>>(),
    })
}

/// TR-703.
fn config(found: &FoundModel) -> Value {
    let Signature {
        inputs, outputs, ..
    } = &*found.signature;
    let inputs = inputs.iter().map(|input| {
        json!({
            "name": input.name,
            "data_type": input.datatype.config_name(),
            "format": "FORMAT_NONE",
            "dims": input.shape,
            "is_shape_tensor": false,
            "allow_ragged_batch": false,
            "optional": input.optional,
        })
    });
    let outputs = outputs.iter().map(|output| {
        json!({
            "name": output.name,
            "data_type": output.datatype.config_name(),
            "dims": output.shape,
            "label_filename": "",
            "is_shape_tensor": false,
        })
    });
    json!({
        "name": &*found.name,
        "platform": found.model.platform,
        "backend": found.model.platform,
        "version_policy": {"specific": {"versions": found.model.versions}},
        "max_batch_size": found.signature.max_batch_size,
        "input": inputs.collect::<Vec<_>>(),
        "output": outputs.collect::<Vec<_>>(),
        "instance_group": [{"name": &*found.name, "kind": "KIND_CPU", "count": 1, "gpus": [], "profile": []}],
        "model_transaction_policy": {"decoupled": found.signature.decoupled},
        "parameters": {},
    })
}

/// TR-704.
fn stats(
    catalog: &ModelCatalog,
    caller: &Caller,
    target: Option<&Target>,
) -> Result<Value, RequestError> {
    let all = counted(catalog, caller, target)?.into_iter();
    let list: Vec<Value> = all
        .map(|(function, name, version)| catalog.stats.json(&function, &name, version))
        .collect();
    Ok(json!({"model_stats": list}))
}

/// Whose statistics are asked for: the function, the name it is asked by, the version.
pub(super) fn counted(
    catalog: &ModelCatalog,
    caller: &Caller,
    target: Option<&Target>,
) -> Result<Vec<(Name, Arc<str>, u64)>, RequestError> {
    let Some(target) = target else {
        let all = catalog.all(caller).into_iter();
        let each = |(name, model, _): (Name, Arc<ModelOptions>, Readiness)| {
            let versions = model.versions.clone().into_iter();
            versions.map(move |version| (name.clone(), name.as_str().into(), version))
        };
        return Ok(all.flat_map(each).collect());
    };
    let found = catalog.find(caller, target)?;
    let one = target.version.as_ref().map(|_| vec![found.version]);
    let versions = one.unwrap_or_else(|| found.model.versions.clone());
    let each = |version| (found.function.clone(), Arc::clone(&found.name), version);
    Ok(versions.into_iter().map(each).collect())
}

/// TR-707.
pub(super) fn trace() -> Value {
    json!({
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    })
}

/// TR-707.
pub(super) fn logging() -> Value {
    json!({
        "log_file": "",
        "log_info": true,
        "log_warning": true,
        "log_error": true,
        "log_verbose_level": 0,
        "log_format": "default",
    })
}

async fn settings(
    upload: Upload,
    parts: &Parts,
    catalog: &ModelCatalog,
    now: Value,
) -> Result<Response<Body>, RequestError> {
    let asked = object(upload, parts, catalog).await?;
    unchanged(&now, &asked)?;
    Ok(json_response(&now))
}

/// Settings that are what they are: asking for that, or for the default, is granted.
pub(super) fn unchanged(now: &Value, asked: &Map<String, Value>) -> Result<(), RequestError> {
    for (key, value) in asked {
        let Some(current) = now.get(key) else {
            return Err(RequestError::new(
                Code::InvalidRequest,
                format!("unknown setting '{key}'"),
            ));
        };
        if value.is_null() || value == current {
            continue;
        }
        let what = if key.ends_with("_file") {
            "file location"
        } else {
            "setting"
        };
        let logs = now.get("log_file").is_some();
        let kind = if logs { "log" } else { "trace" };
        let message = format!("{kind} {what} can not be updated through network protocol");
        return Err(RequestError::new(Code::Unimplemented, message));
    }
    Ok(())
}

/// A body that is an object, or empty.
pub(super) async fn object(
    upload: Upload,
    parts: &Parts,
    catalog: &ModelCatalog,
) -> Result<Map<String, Value>, RequestError> {
    let bytes = upload
        .whole(
            &parts.headers,
            EncodingErrorStyle::Generate,
            &catalog.config,
        )
        .await?;
    if bytes.trim_ascii().is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_slice(&bytes).map_err(|error| {
        let message = format!("failed to parse the request JSON buffer: {error}");
        RequestError::new(Code::InvalidRequest, message)
    })
}
