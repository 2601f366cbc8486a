//! Routes of no face: probes, metrics, version and the page (OA-901, OA-903, D-32).

pub mod call_metrics;
pub mod drain;
pub(crate) mod grpc;
pub mod health;
pub mod metrics;
pub(crate) mod open_streams;
pub mod telemetry;

use std::sync::Arc;

use axum::extract::{RawQuery, Request, State};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use http::{HeaderMap, Method, StatusCode, header};
use sapwood_kernel::Name;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use serde_json::json;
use tower::ServiceExt;

use self::metrics::Format;
use crate::auth::caller::Caller;
use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::context::ServerContext;
use crate::http::rejection::{Rejection, is_grpc};
use crate::http::route::Route;
use crate::page::Page;
use crate::websocket::handshake::asks_for_websocket;

/// `root` serves the WebSockets of `/`, if a face has any.
pub(crate) fn routes(
    shared: ServerContext,
    root: Option<MethodRouter>,
    metrics_public: bool,
) -> Vec<Route> {
    let sockets = middleware::from_fn_with_state(root, socket);
    let state = Arc::new(shared);
    // The page, the version and the load describe the server, so they are for its callers (OA-905 opens the probes alone).
    let known = RouteAccess::Needs(KeyScope::Infer);
    let scraping = if metrics_public {
        RouteAccess::Open
    } else {
        RouteAccess::Needs(KeyScope::Metrics)
    };
    let route = |path, access, methods: MethodRouter<Arc<ServerContext>>| {
        Route::http(path, access, methods.with_state(Arc::clone(&state)))
    };
    vec![
        // A layer of the page and not a route of its own: a router cannot have two routes for one path and method.
        route("/", known, get(page).route_layer(sockets)),
        route("/livez", RouteAccess::Open, get(live)),
        route("/readyz", RouteAccess::Open, get(ready)),
        route("/health", RouteAccess::Open, get(ready)),
        route("/ping", RouteAccess::Open, get(ready)),
        route("/version", known, get(version)),
        route("/load", known, get(load)),
        route("/metrics", scraping, get(metrics)),
    ]
}

type Ops = State<Arc<ServerContext>>;

async fn live(State(ops): Ops) -> Response {
    answer(ops.health.live(), None)
}

/// Readiness; with `?verbose` and the scope `infer`, the state of each model as well.
async fn ready(State(ops): Ops, RawQuery(query): RawQuery, request: Request) -> Response {
    let verbose =
        query.is_some_and(|query| query.split('&').any(|part| part.starts_with("verbose")));
    // The route is open, but model names are for callers that may use them: an anonymous probe gets the overall state.
    let caller = Caller::of(request.extensions()).ok();
    let caller = caller.filter(|caller| verbose && caller.require(KeyScope::Infer).is_ok());
    let parts = caller.map(|caller| {
        let parts = parts(&ops, caller);
        parts.map(|(name, state)| (name, state.into())).collect()
    });
    answer(ops.health.ready(), parts)
}

/// The models that a caller may use, with their states.
fn parts(ops: &ServerContext, caller: &Caller) -> impl Iterator<Item = (String, &'static str)> {
    let parts = ops.health.parts_now().into_iter();
    parts
        .filter(|(name, _)| caller.may_use(&Name::shared(name)))
        .map(|(name, state)| (name, state.name()))
}

/// `{"status":"ok"}` or the error object; with `parts`, the states of the models instead of the error's message.
fn answer(
    health: Result<(), Rejection>,
    parts: Option<serde_json::Map<String, serde_json::Value>>,
) -> Response {
    let Some(parts) = parts else {
        return match health {
            Ok(()) => axum::Json(json!({"status": "ok"})).into_response(),
            Err(rejection) => rejection.into_response(),
        };
    };
    let (status, word) = match &health {
        Ok(()) => (StatusCode::OK, "ok"),
        Err(rejection) => (StatusCode::SERVICE_UNAVAILABLE, rejection.reason.name()),
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

/// Serves the WebSockets of `/`; a plain GET goes on to the page (D-32).
async fn socket(
    State(root): State<Option<MethodRouter>>,
    request: Request,
    next: Next,
) -> Response {
    match root {
        Some(root) if asks_for_websocket(request.headers()) => {
            // The error type of a router is `Infallible`.
            root.oneshot(request)
                .await
                .unwrap_or_else(|never| match never {})
        }
        _ => next.run(request).await,
    }
}

async fn page(State(ops): Ops, request: Request) -> Response {
    // HTTP/2 has the host in the URI, HTTP/1 in the header. The middleware has checked that they do not differ.
    let host = match request.uri().authority() {
        Some(authority) => Some(authority.as_str()),
        None => request
            .headers()
            .get(header::HOST)
            .and_then(|host| host.to_str().ok()),
    };
    let caller = match Caller::of(request.extensions()) {
        Ok(caller) => caller,
        Err(rejection) => return rejection.into_response(),
    };
    let here = parts(&ops, caller).map(|(name, state)| (name, state.to_owned()));
    let mut models: Vec<_> = here.collect();
    // Health has only the models of this process; those of upstreams are known to the kernels alone.
    let other = ops.metrics.models().into_iter();
    let other: Vec<_> = other
        .filter(|name| models.iter().all(|(here, _)| here != name))
        .filter(|name| caller.may_use(&Name::shared(name)))
        .map(|name| (name, "of an upstream".to_owned()))
        .collect();
    models.extend(other);
    let page = Page {
        scheme: request.uri().scheme_str().unwrap_or("http"),
        key: ops.auth.required(),
        host: host.unwrap_or("127.0.0.1:8000"),
        state: ops
            .health
            .ready()
            .map_or_else(|rejection| rejection.reason.name(), |()| "ready"),
        models: &models,
    };
    // The page loads nothing, so the policy allows nothing but its own style sheet; markup that slips in cannot run.
    let policy = [(
        "content-security-policy",
        "default-src 'none'; style-src 'unsafe-inline'",
    )];
    (policy, Html(page.render())).into_response()
}

/// The answer to a method that a route does not have.
pub(crate) async fn wrong_method(method: Method) -> Rejection {
    Rejection::wrong_method(&method)
}

/// The answer where there is no route: an error object (OA-101), or UNIMPLEMENTED for gRPC.
pub(crate) async fn unknown(request: Request) -> Response {
    if is_grpc(request.headers()) {
        return Rejection::unknown_service().answer(request.headers());
    }
    let message = format!(
        "There is no route for {} {}.",
        request.method(),
        request.uri().path()
    );
    Rejection::new(Code::NotFound, ErrorReason::UNKNOWN_URL, message).into_response()
}
