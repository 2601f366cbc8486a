//! One message as a call, and its responses as messages (TR-901, TR-903).
//!
//! Owns: [`read`], [`Told`], `ModelInfer`. Refuses to know: streams of requests.

use std::sync::Arc;

use prost::Message;
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Response, Signature};
use sapwood_proto::generated::inference::{ModelInferRequest, ModelInferResponse};
use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use crate::caller::Caller;
use crate::generate::call::Call;
use crate::generate::catalogue::{Catalogue, Found};
use crate::generate::endpoint::{deadline, one, reading};
use crate::generate::failure::Failure;
use crate::generate::infer::gives_many;
use crate::generate::path::Target;
use crate::generate::stats::Counting;

/// What responses are written with.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) signature: Arc<Signature>,
    model: Arc<str>,
    version: u64,
    id: String,
}

impl Told {
    pub(super) fn of(call: &Call) -> Self {
        let Found {
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

    pub(super) fn message(&self, response: &Response) -> ModelInferResponse {
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
    catalogue: &Catalogue,
    request: tonic::Request<ModelInferRequest>,
) -> Result<ModelInferResponse, Failure> {
    let (metadata, extensions, message) = request.into_parts();
    let caller = Caller::of(&extensions)?;
    let found = catalogue.find(caller, &target(&message.model_name, &message.model_version))?;
    let counting = catalogue.stats.begin(&found);
    let deadline = deadline(&extensions);
    let call = read(catalogue, found, message, &metadata, deadline).await?;
    if gives_many(&call.found, &call.mapped, catalogue.config.compat) {
        let message = "ModelInfer RPC doesn't support models with decoupled transaction policy";
        return Err(Failure::new(Code::Unimplemented, message));
    }
    whole(catalogue, call, counting).await
}

/// Exactly one response.
pub(super) async fn whole(
    catalogue: &Catalogue,
    call: Call,
    counting: Counting,
) -> Result<ModelInferResponse, Failure> {
    let told = Told::of(&call);
    let responses = counting.watch(call.begin(catalogue, false)?);
    let response = one(responses, counting).await?;
    Ok(told.message(&response))
}

/// A model and the version asked for, which may be left out. No name and no version is as long as what is cut off: copied
/// whole, a text of megabytes would stand in memory once more than it is charged for (D-47).
pub(super) fn target(model: &str, version: &str) -> Target {
    let cut = |text: &str| text[..text.floor_char_boundary(LONGEST)].to_owned();
    Target {
        model: cut(model),
        version: Some(cut(version)).filter(|version| !version.is_empty()),
    }
}

const LONGEST: usize = 1024;

/// What is checked of a message before there is work.
pub(super) async fn read(
    catalogue: &Catalogue,
    found: Found,
    message: ModelInferRequest,
    metadata: &MetadataMap,
    deadline: Instant,
) -> Result<Call, Failure> {
    let size = message.encoded_len();
    let reading = reading(&found, catalogue, size, move |mapper| {
        mapper.message(&message)
    });
    let mut mapped = reading.await?;
    if let Some(forwarded) = &catalogue.config.forwarded {
        forwarded.join_metadata(metadata, &mut mapped);
    }
    let unknown = &catalogue.shared.metrics.unknown_parameters;
    unknown.inc_by(mapped.unknown.into());
    Ok(Call {
        found,
        mapped,
        deadline,
    })
}
