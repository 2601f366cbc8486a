//! The routes that belong to no face: probes, metrics, version and the page (OA-901, OA-903, D-32).
//!
//! Owns: their paths and bodies. Refuses to know: how the state behind them comes about.

use std::sync::Arc;

use axum::Router;
use axum::extract::{RawQuery, Request, State};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use http::{HeaderMap, StatusCode, header};
use sapwood_proto::code::Code;
use serde_json::json;
use tower::ServiceExt;

use crate::health::State as PartState;
use crate::metrics::Format;
use crate::page::Page;
use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::websocket;

/// `root` serves the WebSockets of `/`, if anybody does.
pub(crate) fn routes(shared: Shared, root: Option<MethodRouter>) -> Router {
    let sockets = middleware::from_fn_with_state(root, socket);
    Router::new()
        .route("/", get(page).route_layer(sockets))
        .route("/livez", get(live))
        .route("/readyz", get(ready))
        .route("/health", get(ready))
        .route("/ping", get(ready))
        .route("/version", get(version))
        .route("/load", get(load))
        .route("/metrics", get(metrics))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown)
        .with_state(Arc::new(shared))
}

type Ops = State<Arc<Shared>>;

async fn live(State(ops): Ops) -> Response {
    answer(ops.health.live(), None)
}

async fn ready(State(ops): Ops, RawQuery(query): RawQuery) -> Response {
    let verbose =
        query.is_some_and(|query| query.split('&').any(|part| part.starts_with("verbose")));
    let parts = verbose.then(|| {
        let parts = ops.health.parts_now();
        parts
            .into_iter()
            .map(|(name, state)| (name, state.name().into()))
            .collect()
    });
    answer(ops.health.ready(), parts)
}

/// `{"status":"ok"}` or the error object; with the parts if they were asked for.
fn answer(
    health: Result<(), Refusal>,
    parts: Option<serde_json::Map<String, serde_json::Value>>,
) -> Response {
    let Some(parts) = parts else {
        return match health {
            Ok(()) => axum::Json(json!({"status": "ok"})).into_response(),
            Err(refusal) => refusal.into_response(),
        };
    };
    let (status, word) = match &health {
        Ok(()) => (StatusCode::OK, "ok"),
        Err(refusal) => (StatusCode::SERVICE_UNAVAILABLE, refusal.reason),
    };
    (status, axum::Json(json!({"status": word, "parts": parts}))).into_response()
}

async fn version() -> Response {
    axum::Json(json!({"version": crate::VERSION, "commit": crate::COMMIT})).into_response()
}

async fn load(State(ops): Ops) -> Response {
    axum::Json(json!({"server_load": ops.drain.open()})).into_response()
}

async fn metrics(State(ops): Ops, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT);
    let format = Format::of(accept.and_then(|accept| accept.to_str().ok()));
    let kind = [(header::CONTENT_TYPE, format.content_type())];
    (kind, ops.metrics.render(format)).into_response()
}

/// D-32: a plain GET is for the page.
async fn socket(
    State(root): State<Option<MethodRouter>>,
    request: Request,
    next: Next,
) -> Response {
    match root {
        Some(root) if websocket::is_asked(request.headers()) => {
            // A router of routes never fails.
            root.oneshot(request)
                .await
                .unwrap_or_else(|never| match never {})
        }
        _ => next.run(request).await,
    }
}

async fn page(State(ops): Ops, request: Request) -> Response {
    let uri = request.uri().authority().map(ToString::to_string);
    let host = uri.or_else(|| {
        Some(
            request
                .headers()
                .get(header::HOST)?
                .to_str()
                .ok()?
                .to_owned(),
        )
    });
    let describe = |(name, state): (String, PartState)| (name, state.name().to_owned());
    let models: Vec<_> = ops.health.parts_now().into_iter().map(describe).collect();
    let page = Page {
        host: host.as_deref().unwrap_or("127.0.0.1:8000"),
        state: ops
            .health
            .ready()
            .map_or_else(|refusal| refusal.reason, |()| "ready"),
        models: &models,
    };
    // Nothing is loaded from anywhere, so nothing needs to be allowed.
    let policy = [(
        "content-security-policy",
        "default-src 'none'; style-src 'unsafe-inline'",
    )];
    (policy, Html(page.render())).into_response()
}

async fn wrong_method(request: Request) -> Response {
    let message = format!("{} is not allowed here.", request.method());
    Refusal::new(Code::InvalidRequest, "method_not_allowed", message)
        .with_status(StatusCode::METHOD_NOT_ALLOWED)
        .into_response()
}

/// OA-101: no answer is without an error object; a gRPC client gets UNIMPLEMENTED.
async fn unknown(request: Request) -> Response {
    if crate::refusal::is_grpc(request.headers()) {
        let message = "This gRPC service is not served here.";
        return Refusal::new(Code::Unimplemented, "unknown_url", message).answer(request.headers());
    }
    let message = format!(
        "There is nothing at {} {}.",
        request.method(),
        request.uri().path()
    );
    Refusal::new(Code::NotFound, "unknown_url", message).into_response()
}
