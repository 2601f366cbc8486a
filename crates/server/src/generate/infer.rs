//! `infer` over HTTP: JSON with raw bytes behind it, both ways (section 8).
//!
//! Owns: its headers, what of it is refused for models with many responses, and its form with an event for each response
//! (TR-1310). Refuses to know:
//! the forms of tensors (`proto::generate`).

use std::sync::Arc;

use axum::body::{Body, Bytes};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Head, Infer, Mapped};

use super::body::{Style, Upload};
use super::call::{Call, streams};
use super::catalogue::{Catalogue, Found};
use super::compression::Packing;
use super::endpoint::{begin, deadline, one, reading};
use super::events;
use super::failure::{Failure, JSON};
use super::path::Target;
use super::resume;
use super::stats::Counting;
use super::told::Told;
use super::wishes::Wishes;
use crate::caller::Caller;

/// Where the JSON ends and raw bytes begin (TR-802).
const LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// Answers one request.
pub(super) async fn answer(
    target: Target,
    catalogue: &Catalogue,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, Failure> {
    let (call, infer, counting) = read(target, catalogue, parts, upload).await?;
    if gives_many(&call.found, &call.mapped, catalogue.config.compat) {
        let message = "HTTP end point doesn't support models with decoupled transaction policy";
        return Err(Failure::new(Code::Unimplemented, message));
    }
    let found = &call.found;
    let head = Head::new(infer.mapped.id.as_deref(), &found.name, found.version);
    let signature = Arc::clone(&found.signature);
    let responses = begin(catalogue, call, &counting, parts, false)?;
    let response = one(responses, counting).await?;
    let (json, raw) = infer.answer(&head, &signature, &response);
    Ok(told(&parts.headers, json, &raw))
}

/// Answers one request with an event for each response (TR-1310).
pub(super) async fn stream(
    target: Target,
    catalogue: &Catalogue,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, Failure> {
    let wishes = Wishes::of(&parts.headers)?;
    let (call, _, counting) = read(target, catalogue, parts, upload).await?;
    let told = Told::infer(&call);
    let responses = begin(catalogue, call, &counting, parts, true)?;
    let place = resume::place(catalogue, parts, wishes);
    events::answer(responses, told, counting, wishes, place).await
}

/// Everything that is checked before there is work.
async fn read(
    target: Target,
    catalogue: &Catalogue,
    parts: &Parts,
    upload: Upload,
) -> Result<(Call, Infer, Counting), Failure> {
    let config = &catalogue.config;
    let caller = Caller::of(&parts.extensions)?;
    let found = catalogue.find(caller, &target)?;
    let counting = catalogue.stats.begin(&found);
    let length = parts.headers.get(LENGTH);
    let style = length.map_or(Style::Infer, |_| Style::Raw);
    let bytes = upload.whole(&parts.headers, style, config).await?;
    let length = length.map(|length| length.to_str().unwrap_or("?").to_owned());
    let read = reading(&found, catalogue, bytes.len(), move |mapper| {
        mapper.infer(&bytes, length.as_deref())
    });
    let mut infer = read.await?;
    if let Some(forwarded) = &config.forwarded {
        forwarded.join(&parts.headers, &mut infer.mapped);
    }
    let unknown = &catalogue.shared.metrics.unknown_parameters;
    unknown.inc_by(infer.mapped.unknown.into());
    let call = Call {
        found,
        mapped: infer.mapped.clone(),
        deadline: deadline(&parts.extensions),
    };
    Ok((call, infer, counting))
}

/// TR-806: what may give many responses is served where it is asked for one.
pub(super) fn gives_many(found: &Found, mapped: &Mapped, compat: bool) -> bool {
    streams(found, mapped) || compat && found.signature.decoupled
}

fn told(asked: &HeaderMap, json: Bytes, raw: &Bytes) -> Response<Body> {
    let (kind, length) = match raw.is_empty() {
        true => (JSON, None),
        false => (OCTETS, Some(json.len())),
    };
    let whole = match raw.is_empty() {
        true => json,
        false => [json, raw.clone()].concat().into(),
    };
    let (body, packing) = Packing::whole(asked, whole);
    let mut answer = Response::new(Body::from(body));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, kind);
    if let Some(length) = length {
        headers.insert(LENGTH, HeaderValue::from(length));
    }
    if let Some(packing) = packing {
        headers.insert(header::CONTENT_ENCODING, packing.name());
    }
    answer
}
