//! Server and model metadata, configuration and statistics (TR-701 to TR-704, TR-707 to TR-709): the answers, built
//! once for HTTP and for gRPC, and the routes of HTTP. The methods of gRPC are in `grpc::metadata`.

use axum::body::Body;
use axum::response::IntoResponse;
use http::request::Parts;
use http::{Method, Response, StatusCode};
use sapwood_engine::adapters::AdapterInfo;
use sapwood_proto::code::Code;
use sapwood_proto::generated::inference::model_metadata_response::TensorMetadata;
use sapwood_proto::generated::inference::model_version_policy::{PolicyChoice, Specific};
use sapwood_proto::generated::inference::{
    ModelConfig, ModelInput, ModelInstanceGroup, ModelMetadataResponse, ModelOutput,
    ModelParameter, ModelStatisticsResponse, ModelTransactionPolicy, ModelVersionPolicy,
    ServerMetadataResponse, model_instance_group,
};
use sapwood_proto::params::float_to_json;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::body::{EncodingErrorStyle, Upload};
use super::catalog::{FoundModel, ModelCatalog, Readiness};
use super::path::{GenerateRoute, MemoryAct, Target};
use super::request_error::RequestError;
use crate::auth::caller::Caller;

/// The extensions that are announced (TR-701).
const EXTENSIONS: [&str; 9] = [
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
    // For every route, also for those that do not need it: one without an authenticated caller refuses (D-45).
    let caller = Caller::of(&parts.extensions)?;
    Ok(match route {
        GenerateRoute::Live => Response::new(Body::empty()),
        GenerateRoute::Ready => ready(catalog.shared.health.ready().is_ok()),
        GenerateRoute::Server => json_response(&server(catalog)),
        GenerateRoute::Model(target) => json_response(&model(&catalog.find(caller, &target)?)),
        GenerateRoute::ModelReady(target) => model_ready(catalog, caller, &target)?,
        GenerateRoute::Config(target) => json_response(&config(&catalog.find(caller, &target)?)),
        GenerateRoute::Stats(target) => json_response(&stats(catalog, caller, target.as_ref())?),
        GenerateRoute::Trace => settings(upload, parts, catalog, trace()).await?,
        GenerateRoute::Logging => settings(upload, parts, catalog, logging()).await?,
        // TR-708: no region can exist, so the list is empty and an unregistration has nothing to do.
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
        // The routes that `endpoint` handles itself.
        _ => return Err(RequestError::new(Code::NotFound, "Not Found")),
    })
}

/// A JSON answer.
pub(super) fn json_response(value: &impl Serialize) -> Response<Body> {
    // These values have strings as keys and finite numbers, so the encoding cannot fail.
    axum::Json(value).into_response()
}

/// The answer of a readiness probe: empty, because probes read the status alone.
fn ready(ready: bool) -> Response<Body> {
    let status = if ready {
        StatusCode::OK
    } else {
        StatusCode::BAD_REQUEST
    };
    status.into_response()
}

fn model_ready(
    catalog: &ModelCatalog,
    caller: &Caller,
    target: &Target,
) -> Result<Response<Body>, RequestError> {
    if !is_ready(catalog, caller, target)? {
        return Err(
            RequestError::new(Code::Unavailable, "Model version not ready")
                .with_status(StatusCode::BAD_REQUEST),
        );
    }
    Ok(ready(true))
}

/// Whether a model is ready.
///
/// # Errors
/// There is no such model, or it is ready and lacks the version that is asked for.
pub(super) fn is_ready(
    catalog: &ModelCatalog,
    caller: &Caller,
    target: &Target,
) -> Result<bool, RequestError> {
    let found = catalog.known(caller, &target.model)?;
    let ready = catalog.state(&found.function) == Readiness::Ready;
    // Only for its errors. For a model that is not ready it would fail, where the answer is that it is not.
    if ready {
        catalog.find(caller, target)?;
    }
    Ok(ready)
}

/// TR-701.
pub(super) fn server(catalog: &ModelCatalog) -> ServerMetadataResponse {
    ServerMetadataResponse {
        name: catalog.config.metadata_name.clone(),
        version: catalog.config.metadata_version.clone(),
        extensions: EXTENSIONS.map(str::to_owned).into(),
    }
}

/// TR-702.
pub(super) fn model(found: &FoundModel) -> ModelMetadataResponse {
    let signature = &found.signature;
    let tensor = |name: &str, datatype: &str, shape: &[i64]| TensorMetadata {
        name: name.into(),
        datatype: datatype.into(),
        shape: signature.shown(shape),
    };
    let inputs = signature.inputs.iter();
    let outputs = signature.outputs.iter();
    ModelMetadataResponse {
        name: (*found.name).into(),
        versions: found.model.versions.iter().map(u64::to_string).collect(),
        platform: found.model.platform.clone(),
        inputs: inputs
            .map(|it| tensor(&it.name, it.datatype.name(), &it.shape))
            .collect(),
        outputs: outputs
            .map(|it| tensor(&it.name, it.datatype.name(), &it.shape))
            .collect(),
    }
}

/// TR-703.
pub(super) fn config(found: &FoundModel) -> ModelConfig {
    let signature = &found.signature;
    let versions = found.model.versions.iter();
    let versions = versions.map(|version| i64::try_from(*version).unwrap_or(i64::MAX));
    let inputs = signature.inputs.iter().map(|input| ModelInput {
        name: input.name.clone(),
        data_type: input.datatype.number(),
        dims: input.shape.clone(),
        optional: input.optional,
        ..ModelInput::default()
    });
    let outputs = signature.outputs.iter().map(|output| ModelOutput {
        name: output.name.clone(),
        data_type: output.datatype.number(),
        dims: output.shape.clone(),
        ..ModelOutput::default()
    });
    ModelConfig {
        name: (*found.name).into(),
        platform: found.model.platform.clone(),
        backend: found.model.platform.clone(),
        version_policy: Some(ModelVersionPolicy {
            policy_choice: Some(PolicyChoice::Specific(Specific {
                versions: versions.collect(),
            })),
        }),
        max_batch_size: i32::try_from(signature.max_batch_size).unwrap_or(i32::MAX),
        input: inputs.collect(),
        output: outputs.collect(),
        instance_group: vec![ModelInstanceGroup {
            name: (*found.name).into(),
            count: 1,
            kind: model_instance_group::Kind::Cpu.into(),
            ..ModelInstanceGroup::default()
        }],
        model_transaction_policy: Some(ModelTransactionPolicy {
            decoupled: signature.decoupled,
        }),
        parameters: parameters(found).collect(),
    }
}

/// The parameters that tell what the model is.
fn parameters(found: &FoundModel) -> impl Iterator<Item = (String, ModelParameter)> {
    let deterministic = found.deterministic.map(|it| {
        let string_value = it.to_string();
        ("deterministic".to_owned(), ModelParameter { string_value })
    });
    adapters(&found.model.adapters)
        .into_iter()
        .chain(deterministic)
}

/// The parameter that lists the adapters of a model: JSON with their places, as `GET /lora-adapters` of llama-server
/// has it, but with names in place of paths, which are nobody's business.
fn adapters(adapters: &[AdapterInfo]) -> Option<(String, ModelParameter)> {
    let adapter = |(id, it): (usize, &AdapterInfo)| {
        let scale = float_to_json(it.scale);
        json!({"id": id, "name": it.name, "scale": scale, "apply": it.applied})
    };
    let list: Value = adapters.iter().enumerate().map(adapter).collect();
    let parameter = ModelParameter {
        string_value: list.to_string(),
    };
    (!adapters.is_empty()).then(|| ("lora".to_owned(), parameter))
}

/// TR-704.
pub(super) fn stats(
    catalog: &ModelCatalog,
    caller: &Caller,
    target: Option<&Target>,
) -> Result<ModelStatisticsResponse, RequestError> {
    let model_stats = if let Some(target) = target {
        let found = catalog.find(caller, target)?;
        let one = target.version.as_ref().map(|_| vec![found.version]);
        let versions = one.unwrap_or_else(|| found.model.versions.clone());
        let each = versions.into_iter();
        each.map(|version| catalog.stats.message(&found.function, &found.name, version))
            .collect()
    } else {
        let all = catalog.all(caller);
        let each = all.iter().flat_map(|(name, model, _)| {
            let versions = model.versions.iter();
            versions.map(move |version| catalog.stats.message(name, name.as_str(), *version))
        });
        each.collect()
    };
    Ok(ModelStatisticsResponse { model_stats })
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

/// The present settings, also as the answer to a request that changes none of them.
async fn settings(
    upload: Upload,
    parts: &Parts,
    catalog: &ModelCatalog,
    now: Value,
) -> Result<Response<Body>, RequestError> {
    if parts.method == Method::POST {
        unchanged(&now, &object(upload, parts, catalog).await?)?;
    }
    Ok(json_response(&now))
}

/// Checks a request to change settings, none of which can be changed: the present value and null, for the default, are
/// accepted.
pub(super) fn unchanged(now: &Value, asked: &Map<String, Value>) -> Result<(), RequestError> {
    for (key, value) in asked {
        let Some(current) = now.get(key) else {
            // TR-707: an unknown key is 400, and a known one that cannot be changed 501.
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
    // Every member is optional, and so is the object (TR-705).
    if bytes.trim_ascii().is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_slice(&bytes).map_err(|error| {
        let message = format!("failed to parse the request JSON buffer: {error}");
        RequestError::new(Code::InvalidRequest, message)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sapwood_kernel::Name;
    use sapwood_proto::generate::{
        Datatype, InputRole, InputTensor, OutputRole, OutputTensor, Signature,
    };
    use sapwood_proto::generated::inference::{InferStatistics, ModelStatistics};

    use super::super::options::ModelOptions;
    use super::*;

    fn found() -> FoundModel {
        let signature = Signature {
            inputs: vec![InputTensor {
                name: "in".into(),
                datatype: Datatype::Bytes,
                shape: vec![1],
                optional: true,
                role: InputRole::Prompt,
                accepts_json: false,
            }],
            outputs: vec![OutputTensor {
                name: "out".into(),
                datatype: Datatype::Fp32,
                shape: vec![-1],
                role: OutputRole::Text,
            }],
            max_batch_size: 4,
            decoupled: true,
            lenient: false,
            tensorrt_llm: false,
        };
        FoundModel {
            name: "m".into(),
            version: 2,
            function: Name::new("m"),
            signature: Arc::new(signature),
            model: Arc::new(ModelOptions {
                versions: vec![1, 2],
                platform: "p".into(),
                ..ModelOptions::default()
            }),
            text: true,
            embeds: false,
            deterministic: None,
        }
    }

    /// The JSON comes from the messages of gRPC, and its text is part of the protocol.
    #[test]
    fn tr_703_json_names_the_fields_of_the_messages_in_their_order() {
        let found = found();
        for (json, expect) in [
            (
                serde_json::to_string(&model(&found)),
                r#"{"name":"m","versions":["1","2"],"platform":"p","inputs":[{"name":"in","datatype":"BYTES","shape":[-1,1]}],"outputs":[{"name":"out","datatype":"FP32","shape":[-1,-1]}]}"#,
            ),
            (
                serde_json::to_string(&config(&found)),
                r#"{"name":"m","platform":"p","backend":"p","version_policy":{"specific":{"versions":[1,2]}},"max_batch_size":4,"input":[{"name":"in","data_type":"TYPE_STRING","format":"FORMAT_NONE","dims":[1],"is_shape_tensor":false,"allow_ragged_batch":false,"optional":true}],"output":[{"name":"out","data_type":"TYPE_FP32","dims":[-1],"label_filename":"","is_shape_tensor":false}],"instance_group":[{"name":"m","kind":"KIND_CPU","count":1,"gpus":[],"profile":[]}],"model_transaction_policy":{"decoupled":true},"parameters":{}}"#,
            ),
            (
                serde_json::to_string(&ModelStatistics {
                    name: "m".into(),
                    version: "1".into(),
                    inference_stats: Some(InferStatistics::default()),
                    ..ModelStatistics::default()
                }),
                r#"{"name":"m","version":"1","last_inference":0,"inference_count":0,"execution_count":0,"inference_stats":{"success":null,"fail":null,"queue":null,"compute_input":null,"compute_infer":null,"compute_output":null,"cache_hit":null,"cache_miss":null},"response_stats":{},"batch_stats":[],"memory_usage":[]}"#,
            ),
        ] {
            assert_eq!(json.unwrap(), expect);
        }
    }

    #[test]
    fn d_21_the_configuration_says_whether_answers_are_equal() {
        for (deterministic, expect) in [
            (None, None),
            (Some(true), Some("true")),
            (Some(false), Some("false")),
        ] {
            let found = FoundModel {
                deterministic,
                ..found()
            };
            let parameters = config(&found).parameters;
            let value = parameters.get("deterministic");
            assert_eq!(value.map(|it| &*it.string_value), expect);
        }
    }
}
