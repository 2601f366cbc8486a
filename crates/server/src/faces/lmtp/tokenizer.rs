//! Serves tokenizer files to clients that tokenise themselves (LM-951).

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Request, StatusCode, header};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::lmtp::ModelLookup;

use super::context::LmtpContext;
use crate::auth::caller::Caller;
use crate::http::rejection::Rejection;

/// The path of this model's tokenizer file.
pub(super) fn url(name: &str) -> String {
    // One segment: names of models may hold slashes.
    let name = percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
    format!("/lmtp/tokenizer/{name}")
}

/// The handler of `GET /lmtp/tokenizer/NAME`.
pub(super) async fn answer(
    context: Arc<LmtpContext>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<Response, Rejection> {
    let allowance = Caller::of(request.extensions())?.allowance.clone();
    // One answer for models that are foreign, unknown, loading or without a file: the route must not show which exist.
    let permitted = context.catalog.for_caller(allowance).find(&name).is_ok();
    let found = context.catalog.tokenizer(&name).filter(|_| permitted);
    let (file, sha256) = found.ok_or_else(|| {
        let message = "There is no such model, or it has no tokenizer file.";
        Rejection::new(Code::NotFound, ErrorReason::TOKENIZER_NOT_FOUND, message)
    })?;
    // Strong, and the digest of `tokenizer` in MODEL_INFO: a client that cached the file by it need not ask at all.
    let tag = format!("\"{sha256}\"");
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::ETAG, tag.clone()),
    ];
    if is_known(request.headers(), &tag) {
        return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
    }
    Ok((headers, file).into_response())
}

/// Whether the client has this version already.
fn is_known(headers: &HeaderMap, tag: &str) -> bool {
    let known = headers.get_all(header::IF_NONE_MATCH).into_iter();
    let mut known = known.filter_map(|value| value.to_str().ok());
    known.any(|value| {
        value
            .split(',')
            .any(|known| known.trim() == tag || known.trim() == "*")
    })
}
