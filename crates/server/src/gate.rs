//! What every request passes before a route sees it, and every answer on its way out.
//!
//! Owns: the order of the checks (the port's purpose, origin, key, drain), request ids, limits of time, the net under panics, the access log line. Refuses
//! to know: what the routes do.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use futures::FutureExt;
use http::header::{CONNECTION, HeaderValue};
use http::{HeaderMap, Response};
use sapwood_proto::code::Code;
use tokio::time::timeout_at;

use crate::access::Entry;
use crate::activity::Activity;
use crate::auth::Caller;
use crate::departures::Departures;
use crate::drain::Phase;
use crate::metrics::Face;
use crate::patience::{Arriving, Deadline};
use crate::purpose::Purpose;
use crate::refusal::{Refusal, is_grpc};
use crate::request_id::{self, RequestId};
use crate::shared::Shared;
use crate::telemetry::Parent;
use crate::trail::{Trail, Trailed, grpc_status};
use crate::{origin, patience};

/// What the checks need.
pub(crate) struct Gate {
    pub(crate) shared: Shared,
    pub(crate) origin: origin::Config,
    pub(crate) patience: patience::Config,
}

/// The middleware around all routes.
pub(crate) async fn pass(
    State(gate): State<Arc<Gate>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let id = RequestId::of(request.headers());
    let (mut parts, body) = request.into_parts();
    let checked = gate.check(&parts);
    let (key, allowance) = match &checked {
        Ok((caller, _)) => (Arc::clone(&caller.name), caller.allowance.clone()),
        Err(_) => (Arc::from("-"), None),
    };
    let trail = Trail::new(Entry::new(id.clone(), key, &parts), allowance.clone())
        .within_trace(Parent::of(&parts.headers));
    let in_flight = parts.extensions.get::<Activity>().map(Activity::begin);
    let asked = parts.headers.clone();
    let version = parts.version;
    let departures = parts.extensions.get::<Departures>().cloned();
    let mut answer = match (checked, gate.origin.preflight(&parts)) {
        (Err(refusal), _) => refusal.answer_at(parts.uri.path(), &asked),
        (Ok(_), Some(answer)) => answer,
        (Ok((caller, deadline)), None) => {
            parts.extensions.insert(caller);
            parts.extensions.insert(id.clone());
            parts.extensions.insert(deadline);
            let request = Request::from_parts(parts, body);
            let handled = gate.handle(request, next, deadline, &id);
            trail.clone().follow(handled).await
        }
    };
    if let Some(value) = id.to_header() {
        answer.headers_mut().insert(request_id::HEADER, value);
    }
    if let Some(allowance) = &allowance {
        allowance.tell(answer.headers_mut());
    }
    gate.origin.share(&asked, answer.headers_mut());
    if gate.shared.drain.phase() >= Phase::Refusing && answer.version() < http::Version::HTTP_2 {
        answer
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
    let face: Option<Face> = answer.extensions().get().copied();
    trail.note(|entry| {
        entry.face = face;
        entry.status = answer.status().as_u16();
        entry.grpc = grpc_status(answer.headers());
    });
    let let_go = trail.let_go();
    answer.map(|body| {
        let body = Body::new(Trailed::new(body, trail, in_flight));
        match departures {
            // A session over gRPC decides for itself how long its client may take nothing.
            Some(departures) if !(is_grpc(&asked) && face == Some(Face::Evergreen)) => {
                let metrics = Arc::clone(&gate.shared.metrics);
                departures.watching(body, version < http::Version::HTTP_2, metrics, let_go)
            }
            _ => body,
        }
    })
}

impl Gate {
    /// What the route answers, within its time and in spite of a panic.
    async fn handle(
        &self,
        request: Request,
        next: Next,
        Deadline(deadline): Deadline,
        id: &RequestId,
    ) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let asked = parts.headers.clone();
        let path = parts.uri.path().to_owned();
        // Over gRPC a body is a stream that may be silent; its faces have limits of their own.
        let (body, stalled) = if is_grpc(&asked) {
            (body, Arc::default())
        } else {
            Arriving::watching(body, self.patience.body_idle)
        };
        let handled = AssertUnwindSafe(next.run(Request::from_parts(parts, body)));
        match timeout_at(deadline, handled.catch_unwind()).await {
            // Whatever the route made of half a body, this is what went wrong.
            Ok(_) if stalled.load(Ordering::Relaxed) => {
                patience::stalled().answer_at(&path, &asked)
            }
            Ok(Ok(answer)) => answer,
            Ok(Err(_panic)) => self.panicked(id, &path, &asked),
            Err(_elapsed) => patience::too_late().answer_at(&path, &asked),
        }
    }

    fn check(&self, request: &http::request::Parts) -> Result<(Caller, Deadline), Refusal> {
        let purpose = request.extensions.get::<Purpose>();
        purpose.copied().unwrap_or_default().check(request)?;
        self.origin.check(request)?;
        let path = request.uri.path();
        let caller = self.shared.auth.check(
            &request.method,
            path,
            &self.shared.auth.headers(request),
            request.extensions.get(),
        );
        let caller = caller.inspect_err(|_| self.shared.metrics.auth_failures.inc())?;
        if self.shared.drain.phase() >= Phase::Refusing && !is_for_operators(path) {
            self.shared
                .metrics
                .rejected
                .with_label_values(&["drain"])
                .inc();
            let message = "The server is shutting down and takes no new work: try another one.";
            return Err(Refusal::new(Code::Unavailable, "draining", message));
        }
        Ok((caller, self.patience.deadline(&request.headers)?))
    }

    fn panicked(&self, id: &RequestId, path: &str, asked: &HeaderMap) -> Response<Body> {
        self.shared.metrics.panics.inc();
        tracing::error!(request = id.as_str(), "a handler panicked");
        let message = format!(
            "The server had an error while processing your request. Request id: {}",
            id.as_str()
        );
        let mut answer =
            Refusal::new(Code::Internal, "internal_error", message).answer_at(path, asked);
        // OA-202: asking again would fail again.
        answer
            .headers_mut()
            .insert("x-should-retry", HeaderValue::from_static("false"));
        answer
    }
}

/// Routes that answer as long as the process lives.
fn is_for_operators(path: &str) -> bool {
    matches!(
        path,
        "/health" | "/livez" | "/readyz" | "/ping" | "/metrics" | "/version" | "/load"
    ) || path.starts_with("/grpc.health.v1.Health/")
}
