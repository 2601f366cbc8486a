//! Recognises the handshake of a WebSocket by its headers.

use http::request::Parts;
use http::{HeaderMap, Method, header};

/// Whether a request asks for a WebSocket, however badly: such a request gets an error about its handshake, and no page.
pub(crate) fn asks_for_websocket(headers: &HeaderMap) -> bool {
    has_token(headers, header::UPGRADE, "websocket")
}

/// Whether a request is a complete WebSocket handshake, which no browser sends for a form or a link.
pub(crate) fn is_handshake(request: &Parts) -> bool {
    request.method == Method::GET
        && asks_for_websocket(&request.headers)
        && has_token(&request.headers, header::CONNECTION, "upgrade")
        && request.headers.contains_key(header::SEC_WEBSOCKET_KEY)
}

/// The elements of a comma-separated header, which may be sent in several lines.
pub(super) fn tokens(headers: &HeaderMap, name: header::HeaderName) -> impl Iterator<Item = &str> {
    headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

pub(super) fn has_token(headers: &HeaderMap, name: header::HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|found| found.eq_ignore_ascii_case(token))
}
