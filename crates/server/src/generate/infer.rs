//! `infer` over HTTP: JSON with raw bytes behind it, both ways (section 8).
//!
//! Owns: its headers, what of it is refused for models with many responses, compressed answers (TR-807). Refuses to know:
//! the forms of tensors (`proto::generate`).

use std::io::Write;

use axum::body::{Body, Bytes};
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Data, Head, InputRole, Mapped};

use super::body::{Style, Upload};
use super::call::{Call, given};
use super::catalogue::{Catalogue, Found};
use super::endpoint::{deadline, one, reading};
use super::failure::{Failure, JSON};
use super::path::Target;

/// Where the JSON ends and raw bytes begin (TR-802).
const LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");
/// Answers of fewer bytes are not worth compressing.
const COMPRESSED_FROM: usize = 1_024;

/// Answers one request.
pub(super) async fn answer(
    target: Target,
    catalogue: &Catalogue,
    parts: &Parts,
    upload: Upload,
) -> Result<Response<Body>, Failure> {
    let config = &catalogue.config;
    let found = match catalogue.find(&target) {
        Ok(found) => found,
        Err(failure) => return Err(upload.refuse(failure, config).await),
    };
    let counting = catalogue.stats.begin(&found);
    let bytes = upload.whole(&parts.headers, Style::Infer, config).await?;
    let length = parts.headers.get(LENGTH);
    let length = length.map(|length| length.to_str().unwrap_or("?").to_owned());
    let read = reading(&found, catalogue, bytes.len(), move |mapper| {
        mapper.infer(&bytes, length.as_deref())
    });
    let infer = read.await?;
    catalogue
        .shared
        .metrics
        .unknown_parameters
        .inc_by(infer.mapped.unknown.into());
    if gives_many(&found, &infer.mapped, config.compat) {
        let message = "HTTP end point doesn't support models with decoupled transaction policy";
        return Err(Failure::new(Code::Unimplemented, message));
    }
    let head = Head::new(infer.mapped.id.as_deref(), &found.name, found.version);
    let signature = std::sync::Arc::clone(&found.signature);
    let call = Call {
        found,
        mapped: infer.mapped.clone(),
        deadline: deadline(&parts.extensions),
    };
    let responses = call.begin(catalogue, false)?;
    let response = one(responses, counting).await?;
    let (json, raw) = infer.answer(&head, &signature, &response);
    Ok(told(&parts.headers, json, &raw))
}

/// TR-806: what may give many responses is served where it is asked for one.
pub(super) fn gives_many(found: &Found, mapped: &Mapped, compat: bool) -> bool {
    let streams = given(&found.signature, mapped, |role| *role == InputRole::Stream);
    let streams = streams.is_some_and(|(_, tensor)| match &tensor.data {
        Data::Bool(list) => list.contains(&true),
        _ => false,
    });
    streams || compat && found.signature.decoupled
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
    let coding = coding(asked).filter(|_| whole.len() > COMPRESSED_FROM);
    let packed = coding.and_then(|coding| Some((coding, pack(coding, &whole)?)));
    let (coding, body) = match packed {
        Some((coding, packed)) => (Some(coding), packed),
        None => (None, whole),
    };
    let mut answer = Response::new(Body::from(body));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, kind);
    if let Some(length) = length {
        headers.insert(LENGTH, HeaderValue::from(length));
    }
    if let Some(coding) = coding {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(coding));
    }
    answer
}

/// The first of what we can do that the client lists.
fn coding(asked: &HeaderMap) -> Option<&'static str> {
    let lists = asked.get_all(header::ACCEPT_ENCODING).iter();
    let texts = lists.filter_map(|list| list.to_str().ok());
    texts
        .flat_map(|list| list.split(','))
        .filter(|item| !item.replace(' ', "").ends_with(";q=0"))
        .find_map(|item| match item.split(';').next()?.trim() {
            "gzip" => Some("gzip"),
            "deflate" => Some("deflate"),
            _ => None,
        })
}

fn pack(coding: &str, bytes: &[u8]) -> Option<Bytes> {
    let level = Compression::fast();
    let packed = if coding == "gzip" {
        let mut encoder = GzEncoder::new(Vec::new(), level);
        encoder.write_all(bytes).and_then(|()| encoder.finish())
    } else {
        let mut encoder = ZlibEncoder::new(Vec::new(), level);
        encoder.write_all(bytes).and_then(|()| encoder.finish())
    };
    packed.ok().map(Bytes::from)
}
