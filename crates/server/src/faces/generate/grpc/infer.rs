//! Converts a `ModelInfer` message into a call, and responses into messages (TR-901, TR-903).

use std::sync::Arc;

use prost::Message;
use sapwood_proto::code::Code;
use sapwood_proto::generate::{ResponsePayload, Signature};
use sapwood_proto::generated::inference::{ModelInferRequest, ModelInferResponse};
use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use crate::auth::caller::Caller;
use crate::faces::generate::call::CheckedRequest;
use crate::faces::generate::catalog::{FoundModel, ModelCatalog};
use crate::faces::generate::endpoint::{deadline, one, reading};
use crate::faces::generate::infer::gives_many;
use crate::faces::generate::input_charge::InputCharge;
use crate::faces::generate::path::Target;
use crate::faces::generate::request_error::RequestError;
use crate::faces::generate::stats::RequestTimer;

/// What every response of a request repeats: model, version, id.
#[derive(Clone, Debug)]
pub(super) struct GrpcResponseContext {
    pub(super) signature: Arc<Signature>,
    model: Arc<str>,
    version: u64,
    id: String,
}

impl GrpcResponseContext {
    pub(super) fn of(call: &CheckedRequest) -> Self {
        let FoundModel {
            name,
            version,
            signature,
            ..
        } = &call.found;
        Self {
            signature: Arc::clone(signature),
            model: Arc::clone(name),
            version: *version,
            id: call.mapped.id.clone().unwrap_or_default(),
        }
    }

    pub(super) fn message(&self, response: &ResponsePayload) -> ModelInferResponse {
        ModelInferResponse {
            model_name: (*self.model).into(),
            model_version: self.version.to_string(),
            id: self.id.clone(),
            ..response.message(&self.signature)
        }
    }
}

/// Answers `ModelInfer`.
pub(super) async fn answer(
    catalog: &ModelCatalog,
    request: tonic::Request<ModelInferRequest>,
) -> Result<ModelInferResponse, RequestError> {
    let (metadata, extensions, message) = request.into_parts();
    let caller = Caller::of(&extensions)?;
    let found = catalog.find(caller, &target(&message.model_name, &message.model_version))?;
    // From here on the request counts for its model: one for an unknown model has nowhere to be counted.
    let request_timer = catalog.stats.begin(&found);
    let deadline = deadline(&extensions);
    let call = read(catalog, found, message, &metadata, deadline).await?;
    // After the reading, because whether it streams is an input of the request.
    if gives_many(&call.found, &call.mapped, catalog.config.compat) {
        let message = "ModelInfer RPC doesn't support models with decoupled transaction policy";
        return Err(RequestError::new(Code::Unimplemented, message));
    }
    whole(catalog, call, request_timer).await
}

/// Runs a call that has exactly one response.
pub(super) async fn whole(
    catalog: &ModelCatalog,
    call: CheckedRequest,
    request_timer: RequestTimer,
) -> Result<ModelInferResponse, RequestError> {
    let reported = GrpcResponseContext::of(&call);
    // Not on the list of running requests: a gRPC client cancels its call (TR-907).
    let responses = request_timer.watch(call.begin(catalog, false)?);
    let response = one(responses, request_timer).await?;
    Ok(reported.message(&response))
}

/// The model and the version that a request names; an empty version is the latest (TR-902). Both are cut to a length
/// that no real one reaches: copied whole, a text of megabytes would be in memory once more than it is charged for
/// (D-47).
pub(super) fn target(model: &str, version: &str) -> Target {
    let cut = |text: &str| text[..text.floor_char_boundary(LONGEST)].to_owned();
    Target {
        model: cut(model),
        version: Some(cut(version)).filter(|version| !version.is_empty()),
    }
}

const LONGEST: usize = 1024;

/// Checks a message. Nothing runs yet (TR-203).
pub(super) async fn read(
    catalog: &ModelCatalog,
    found: FoundModel,
    message: ModelInferRequest,
    metadata: &MetadataMap,
    deadline: Instant,
) -> Result<CheckedRequest, RequestError> {
    // Decides which thread reads it. The bytes on the wire are gone by now, and their number is the same.
    let size = message.encoded_len();
    let reading = reading(&found, catalog, size, move |mapper| {
        mapper.message(&message)
    });
    let mut mapped = reading.await?;
    if let Some(forwarded) = &catalog.config.forwarded {
        forwarded.join_metadata(metadata, &mut mapped);
    }
    let unknown = &catalog.shared.metrics.unknown_parameters;
    unknown.inc_by(mapped.unknown.into());
    Ok(CheckedRequest {
        found,
        mapped,
        deadline,
        held: Arc::default(),
        charge: InputCharge::default(),
    })
}
