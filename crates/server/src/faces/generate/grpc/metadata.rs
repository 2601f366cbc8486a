//! Server and model metadata, configuration and statistics over gRPC (TR-701 to TR-709).

use std::sync::Arc;

use axum::body::Body;
use http::Extensions;
use sapwood_proto::code::Code;
use sapwood_proto::generated::inference::log_settings_request::setting_value::ParameterChoice as Asked;
use sapwood_proto::generated::inference::log_settings_response::setting_value::ParameterChoice as Shown;
use sapwood_proto::generated::inference::model_repository_parameter::ParameterChoice as ModelChoice;
use sapwood_proto::generated::inference::{
    LogSettingsRequest, LogSettingsResponse, ModelConfigRequest, ModelConfigResponse,
    ModelMetadataRequest, ModelReadyRequest, ModelReadyResponse, ModelStatisticsRequest,
    RepositoryIndexRequest, RepositoryIndexResponse, RepositoryModelLoadRequest,
    RepositoryModelUnloadRequest, ServerLiveResponse, ServerReadyResponse, TraceSettingRequest,
    TraceSettingResponse, log_settings_response, trace_setting_response,
};
use serde_json::{Map, Value};
use tonic::Request;

use super::infer::target;
use super::{UnaryCall, asked, logged};
use crate::auth::caller::Caller;
use crate::faces::generate::catalog::ModelCatalog;
use crate::faces::generate::metadata::{
    config, is_ready, logging, model, server, stats, trace, unchanged,
};
use crate::faces::generate::model_control::{self, ControlAction, act, allowed};
use crate::faces::generate::repository::{list, named};
use crate::faces::generate::request_error::RequestError;

/// Answers a method by its name.
pub(super) async fn answer(
    method: &str,
    catalog: Arc<ModelCatalog>,
    request: UnaryCall,
) -> http::Response<Body> {
    let it = &*catalog;
    // Whatever is about a model takes the caller from the request's extensions, and fails closed without one (D-45). Those
    // that do not are about the server alone.
    match method {
        "ServerLive" => logged(request, |(), _| Ok(ServerLiveResponse { live: true })).await,
        "ServerReady" => {
            // A state and not a failure: clients ask for this in a loop while a server starts.
            let ready = it.shared.health.ready().is_ok();
            logged(request, |(), _| Ok(ServerReadyResponse { ready })).await
        }
        "ModelReady" => {
            let answer = |asked: ModelReadyRequest, whose: &Extensions| {
                let target = target(&asked.name, &asked.version);
                let ready = is_ready(it, Caller::of(whose)?, &target)?;
                Ok(ModelReadyResponse { ready })
            };
            logged(request, answer).await
        }
        "ServerMetadata" => logged(request, |(), _| Ok(server(it))).await,
        "ModelMetadata" => {
            let answer = |asked: ModelMetadataRequest, whose: &Extensions| {
                let found = it.find(Caller::of(whose)?, &target(&asked.name, &asked.version))?;
                Ok(model(&found))
            };
            logged(request, answer).await
        }
        "ModelConfig" => {
            let answer = |asked: ModelConfigRequest, whose: &Extensions| {
                let found = it.find(Caller::of(whose)?, &target(&asked.name, &asked.version))?;
                let config = Some(config(&found));
                Ok(ModelConfigResponse { config })
            };
            logged(request, answer).await
        }
        "ModelStatistics" => {
            let answer = |asked: ModelStatisticsRequest, whose: &Extensions| {
                // Without a name: all models, as `/v2/models/stats`.
                let target = (!asked.name.is_empty()).then(|| target(&asked.name, &asked.version));
                stats(it, Caller::of(whose)?, target.as_ref())
            };
            logged(request, answer).await
        }
        "TraceSetting" => logged(request, |asked, _| tracing(asked)).await,
        "LogSettings" => logged(request, |asked, _| logs(asked)).await,
        method => repository(method, it, request).await,
    }
}

async fn repository(
    method: &str,
    catalog: &ModelCatalog,
    request: UnaryCall,
) -> http::Response<Body> {
    match method {
        "RepositoryIndex" => {
            let answer = |asked, whose: &Extensions| index(catalog, Caller::of(whose)?, &asked);
            logged(request, answer).await
        }
        "RepositoryModelLoad" => asked(request, |request| load(catalog, request)).await,
        "RepositoryModelUnload" => asked(request, |request| unload(catalog, request)).await,
        // TR-708: nothing is registered, and nothing can be.
        "SystemSharedMemoryStatus"
        | "SystemSharedMemoryUnregister"
        | "CudaSharedMemoryStatus"
        | "CudaSharedMemoryUnregister" => logged(request, |(), _| Ok(())).await,
        "SystemSharedMemoryRegister" | "CudaSharedMemoryRegister" => {
            refuse(request, "shared memory is not supported").await
        }
        _ => refuse(request, "the service has no such method").await,
    }
}

/// Refuses a request that names a repository: there is one, without a name.
fn is_the_one(repository: &str) -> Result<(), RequestError> {
    if repository.is_empty() {
        Ok(())
    } else {
        Err(named())
    }
}

/// TR-706.
async fn load(
    catalog: &ModelCatalog,
    request: Request<RepositoryModelLoadRequest>,
) -> Result<(), RequestError> {
    let (_, extensions, message) = request.into_parts();
    is_the_one(&message.repository_name)?;
    // Before the parameters: a caller without the scope learns nothing of what they may be.
    let explicit = allowed(catalog, &extensions, &message.model_name)?;
    let mut sent = model_control::LoadParameters::default();
    for (name, value) in &message.parameters {
        let text = match &value.parameter_choice {
            Some(ModelChoice::StringParam(text)) => Some(text.as_str()),
            _ => None,
        };
        sent.take(name, text)?;
    }
    let action = ControlAction::Load(sent);
    act(catalog, explicit, &message.model_name, action).await
}

/// TR-706.
async fn unload(
    catalog: &ModelCatalog,
    request: Request<RepositoryModelUnloadRequest>,
) -> Result<(), RequestError> {
    let (_, extensions, message) = request.into_parts();
    is_the_one(&message.repository_name)?;
    let explicit = allowed(catalog, &extensions, &message.model_name)?;
    let action = ControlAction::Unload;
    act(catalog, explicit, &message.model_name, action).await
}

async fn refuse(request: UnaryCall, why: &str) -> http::Response<Body> {
    logged(request, |(), _| {
        Err::<(), _>(RequestError::new(Code::Unimplemented, why))
    })
    .await
}

fn index(
    catalog: &ModelCatalog,
    caller: &Caller,
    asked: &RepositoryIndexRequest,
) -> Result<RepositoryIndexResponse, RequestError> {
    is_the_one(&asked.repository_name)?;
    let models = list(catalog, caller, asked.ready);
    Ok(RepositoryIndexResponse { models })
}

/// `TraceSetting`: the values are lists of strings here, and JSON over HTTP (TR-707).
fn tracing(asked: TraceSettingRequest) -> Result<TraceSettingResponse, RequestError> {
    let now = trace();
    let asked = asked.settings.into_iter().map(|(name, setting)| {
        let mut list = setting.value;
        // An empty list asks for the default, as null does over HTTP. A list of one is a scalar, except where the
        // setting itself is a list.
        let value = match list.len() {
            0 => Value::Null,
            1 if !now.get(&name).is_some_and(Value::is_array) => list.swap_remove(0).into(),
            _ => list.into(),
        };
        (name, value)
    });
    let asked: Map<String, Value> = asked.collect();
    unchanged(&now, &asked)?;
    let shown = |value: &Value| match value {
        Value::Array(list) => list
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect(),
        value => value.as_str().map(str::to_owned).into_iter().collect(),
    };
    let now = now.as_object().into_iter().flatten();
    let settings = now.map(|(name, value)| {
        let value = shown(value);
        (name.clone(), trace_setting_response::SettingValue { value })
    });
    Ok(TraceSettingResponse {
        settings: settings.collect(),
    })
}

/// `LogSettings` (TR-707).
fn logs(asked: LogSettingsRequest) -> Result<LogSettingsResponse, RequestError> {
    let now = logging();
    let asked = asked.settings.into_iter().map(|(name, setting)| {
        let value = match setting.parameter_choice {
            None => Value::Null,
            Some(Asked::BoolParam(flag)) => flag.into(),
            Some(Asked::Uint32Param(number)) => number.into(),
            Some(Asked::StringParam(text)) => text.into(),
        };
        (name, value)
    });
    let asked: Map<String, Value> = asked.collect();
    unchanged(&now, &asked)?;
    let shown = |value: &Value| match value {
        Value::Bool(flag) => Some(Shown::BoolParam(*flag)),
        Value::String(text) => Some(Shown::StringParam(text.clone())),
        value => {
            let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
            number.map(Shown::Uint32Param)
        }
    };
    let now = now.as_object().into_iter().flatten();
    let settings = now.map(|(name, value)| {
        let parameter_choice = shown(value);
        let value = log_settings_response::SettingValue { parameter_choice };
        (name.clone(), value)
    });
    Ok(LogSettingsResponse {
        settings: settings.collect(),
    })
}
