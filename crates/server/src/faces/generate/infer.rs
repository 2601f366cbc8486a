//! `infer` over HTTP: JSON followed by raw bytes, in both directions (section 8).

use std::sync::Arc;

use axum::body::{Body, Bytes};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{AnswerHead, Infer, Mapped, ResponsePayload};

use super::body::{EncodingErrorStyle, Upload};
use super::call::{CheckedRequest, streams};
use super::catalog::{FoundModel, ModelCatalog};
use super::compression::compressed;
use super::endpoint::{begin, deadline, one, reading};
use super::input_charge::InputCharge;
use super::offload::offload;
use super::path::Target;
use super::request_error::{JSON, RequestError};
use super::stats::RequestTimer;
use crate::auth::caller::Caller;
use crate::http::request_trace::present_turn;

/// Where the JSON ends and raw bytes begin (TR-802).
const LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// Answers one request.
pub(super) async fn answer(
    target: Target,
    catalog: &ModelCatalog,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, RequestError> {
    let (call, infer, request_timer) = read(target, catalog, parts, upload).await?;
    // After the reading, because whether it streams is an input of the request.
    if gives_many(&call.found, &call.mapped, catalog.config.compat) {
        let message = "HTTP end point doesn't support models with decoupled transaction policy";
        return Err(RequestError::new(Code::Unimplemented, message));
    }
    let found = &call.found;
    let head = AnswerHead::new(infer.mapped.id.as_deref(), &found.name, found.version);
    let signature = Arc::clone(&found.signature);
    let responses = begin(catalog, call, &request_timer, parts, false)?;
    let response = one(responses, request_timer).await?;
    let size = written_size(&response);
    let writing = move || infer.answer(&head, &signature, &response);
    let written = offload(size, present_turn().caller, writing).await;
    let (json, raw) = written.map_err(|_| unwritten())?;
    Ok(to_response(&parts.headers, json, &raw).await)
}

/// Reads and checks a request, in the order of TR-203. Nothing runs yet.
async fn read(
    target: Target,
    catalog: &ModelCatalog,
    parts: &Parts,
    upload: Upload,
) -> Result<(CheckedRequest, Infer, RequestTimer), RequestError> {
    let config = &catalog.config;
    let caller = Caller::of(&parts.extensions)?;
    let found = catalog.find(caller, &target)?;
    let request_timer = catalog.stats.begin(&found);
    let length = parts.headers.get(LENGTH);
    let style = length.map_or(EncodingErrorStyle::Infer, |_| EncodingErrorStyle::Raw);
    let bytes = upload.whole(&parts.headers, style, config).await?;
    // Kept as text: the error for a value that is no number shows it (TR-802). The range is checked against the decoded
    // body.
    let length = length.map(|length| length.to_str().unwrap_or("?").to_owned());
    let read = reading(&found, catalog, bytes.len(), move |mapper| {
        mapper.infer(&bytes, length.as_deref())
    });
    let mut infer = read.await?;
    if let Some(forwarded) = &config.forwarded {
        forwarded.join(&parts.headers, &mut infer.mapped);
    }
    let unknown = &catalog.shared.metrics.unknown_parameters;
    unknown.inc_by(infer.mapped.unknown.into());
    let call = CheckedRequest {
        found,
        mapped: infer.mapped.clone(),
        deadline: deadline(&parts.extensions),
        held: Arc::default(),
        charge: InputCharge::default(),
    };
    Ok((call, infer, request_timer))
}

/// Whether a request may have several responses. A decoupled model that is asked for one is served; the reference
/// refuses it always, and so does `compat` (TR-806).
pub(super) fn gives_many(found: &FoundModel, mapped: &Mapped, compat: bool) -> bool {
    streams(found, mapped) || compat && found.signature.decoupled
}

/// About how many bytes an answer's elements have in JSON, of which long ones are not written on an async thread: a list of
/// embeddings may have two million numbers.
pub(super) fn written_size(response: &ResponsePayload) -> usize {
    const NUMBER_BYTES: usize = 16;
    let outputs = response.outputs.iter();
    let elements: usize = outputs.map(|(_, tensor)| tensor.data.len()).sum();
    elements.saturating_mul(NUMBER_BYTES)
}

/// The error of an answer whose writing has panicked.
pub(super) fn unwritten() -> RequestError {
    RequestError::new(Code::Internal, "the answer could not be written").late()
}

async fn to_response(asked: &HeaderMap, json: Bytes, raw: &Bytes) -> Response<Body> {
    // Without raw bytes there is no length header: its presence is how clients see that the body is binary (TR-804).
    if raw.is_empty() {
        return compressed(asked, JSON, json).await;
    }
    // Compressed whole: the length header counts bytes of the decoded body (TR-807).
    let length = HeaderValue::from(json.len());
    let mut answer = compressed(asked, OCTETS, [&json[..], raw].concat().into()).await;
    answer.headers_mut().insert(LENGTH, length);
    answer
}
