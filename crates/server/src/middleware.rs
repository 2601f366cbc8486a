//! The middleware of every request and every answer: identity, access, deadlines, traces, headers (D-45).
//!
//! ```text
//!   1 port       is the route served there at all?          2 host      one name, and one that may be asked for
//!   3 origin     may this web page ask?                     4 preflight answered here, 204 or 403
//!   5 caller     key or certificate, and the route's scope  6 form      gRPC takes POST of its own type, nobody CONNECT or TRACE
//!   7 drain      is new work still taken?                   8 deadline  how long may it take?
//!        └─► the handler, behind [`checked`], which refuses what has no caller
//! ```
//!
//! There is no request that skips a step, and no handler is reached another way: [`MiddlewareContext::around`] makes each route of the
//! table into a router, and the fallback is one of them.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use futures::FutureExt;
use http::header::{ALLOW, CONNECTION, EXPECT, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Method, Response, StatusCode, Version};
use sapwood_kernel::FairShare;
use sapwood_proto::code::Code;
use tokio::time::timeout_at;

use crate::access_log::AccessRecord;
use crate::activity::Activity;
use crate::auth::{KeyScope, RouteAccess};
use crate::body_budget::{self, BodyBudget};
use crate::caller::{Caller, CallerIdentity};
use crate::context::ServerContext;
use crate::drain::DrainPhase;
use crate::drain_body::UnreadRemainder;
use crate::intake::{BodyIntake, Framing};
use crate::listener::ConnectionId;
use crate::metrics::FaceLabel;
use crate::port_purpose::PortPurpose;
use crate::rejection::{Rejection, is_grpc};
use crate::request_id::{self, RequestId};
use crate::request_trace::{RequestTrace, TracedBody, grpc_status};
use crate::revocation::Revocation;
use crate::route::{Route, RouteKind};
use crate::telemetry::Parent;
use crate::timeouts::{Deadline, TimedBody};
use crate::write_stall::WriteStallWatch;
use crate::{ops, origin, timeouts};

/// What the checks need.
pub(crate) struct MiddlewareContext {
    pub(crate) shared: ServerContext,
    pub(crate) origin: origin::Config,
    pub(crate) timeouts: timeouts::Config,
    pub(crate) bodies: Arc<BodyBudget>,
    /// Bytes of a body that are read although nobody needs them.
    pub(crate) drain_bytes: u64,
    /// Header lines of a request.
    pub(crate) headers: usize,
}

/// The middleware of one route.
struct RouteMiddleware {
    context: Arc<MiddlewareContext>,
    face: FaceLabel,
    kind: RouteKind,
    access: RouteAccess,
}

/// A request that may go on, or the response that refuses it.
enum AccessDecision {
    Passed(Caller, Deadline),
    Answered(Response<Body>),
}

impl MiddlewareContext {
    /// A route of `face` with this middleware.
    pub(crate) fn around(self: &Arc<Self>, face: FaceLabel, route: Route) -> Router {
        let routes = Router::new().route(&route.path, route.methods);
        let routes = routes.method_not_allowed_fallback(ops::wrong_method);
        self.before(routes, face, route.kind, route.access)
    }

    /// What answers where there is no route: the same checks as everywhere, with the scope for calling functions.
    pub(crate) fn fallback(self: &Arc<Self>) -> Router {
        let nowhere = Router::new().fallback(ops::unknown);
        let access = RouteAccess::Needs(KeyScope::Infer);
        self.before(nowhere, FaceLabel::Http, RouteKind::Http, access)
    }

    fn before(
        self: &Arc<Self>,
        routes: Router,
        face: FaceLabel,
        kind: RouteKind,
        access: RouteAccess,
    ) -> Router {
        let before = Arc::new(RouteMiddleware {
            context: Arc::clone(self),
            face,
            kind,
            access,
        });
        // The last layer is the first that a request comes to.
        routes
            .layer(from_fn(checked))
            .layer(from_fn_with_state(before, pass))
    }

    /// Headers of every response: which pages may read it, and that a draining server takes nothing more.
    fn sign(&self, asked: &HeaderMap, answer: &mut Response<Body>) {
        self.origin.share(asked, answer.headers_mut());
        let draining = self.shared.drain.phase() >= DrainPhase::Refusing;
        if draining && answer.version() < Version::HTTP_2 {
            let close = HeaderValue::from_static("close");
            answer.headers_mut().insert(CONNECTION, close);
        }
    }
}

/// Refuses a request that no middleware has checked, whatever the reason: a second line of defence behind [`pass`].
async fn checked(request: Request, next: Next) -> Response<Body> {
    match Caller::of(request.extensions()) {
        Ok(_) => next.run(request).await,
        Err(rejection) => rejection.answer_at(request.uri().path(), request.headers()),
    }
}

async fn pass(
    State(before): State<Arc<RouteMiddleware>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let context = &before.context;
    let id = RequestId::of(request.headers());
    let (mut parts, body) = request.into_parts();
    let judged = before.judge(&parts);
    let caller = match &judged {
        AccessDecision::Passed(caller, _) => Some(caller.clone()),
        AccessDecision::Answered(_) => None,
    };
    let allowance = caller.as_ref().and_then(|caller| caller.allowance.clone());
    let turn = turn(caller.as_ref(), &parts);
    let entry = AccessRecord::new(id.clone(), caller.map(|caller| caller.identity), &parts);
    let mut request_trace = RequestTrace::new(entry, allowance.clone())
        .within_trace(Parent::of(&parts.headers))
        .in_turn(turn);
    let in_flight = parts.extensions.get::<Activity>().map(Activity::begin);
    let asked = parts.headers.clone();
    let (path, version) = (parts.uri.path().to_owned(), parts.version);
    let write_stalls = parts.extensions.get::<WriteStallWatch>().cloned();
    let mut answer = match judged {
        AccessDecision::Answered(answer) => {
            let most = context.drain_bytes.min(STRANGER_BYTES);
            read_away(Some(UnreadRemainder::of(body)), &asked, most).await;
            answer
        }
        AccessDecision::Passed(caller, deadline) => {
            let auth = Arc::clone(&context.shared.auth);
            let revocation = Revocation::new(auth, caller.clone(), before.access);
            request_trace = request_trace.until(revocation.clone());
            let identity = caller.identity.clone();
            parts.extensions.insert(caller);
            parts.extensions.insert(id.clone());
            parts.extensions.insert(deadline);
            let request = Request::from_parts(parts, body);
            // What is open to everybody has no streams of requests.
            let streams = before.kind == RouteKind::Grpc && before.access != RouteAccess::Open;
            let handled = context.handle(request, next, deadline, &id, identity, streams);
            let handled = request_trace.clone().follow(handled);
            let mut answer = match revocation.within(handled).await {
                Some(answer) => answer,
                None => revoked().answer_at(&path, &asked),
            };
            answer.extensions_mut().insert(before.face);
            answer
        }
    };
    if let Some(value) = id.to_header() {
        answer.headers_mut().insert(request_id::HEADER, value);
    }
    if let Some(allowance) = &allowance {
        allowance.add_headers(answer.headers_mut());
    }
    context.sign(&asked, &mut answer);
    let face: Option<FaceLabel> = answer.extensions().get().copied();
    request_trace.note(|entry| {
        entry.face = face;
        entry.status = answer.status().as_u16();
        entry.grpc = grpc_status(answer.headers());
    });
    // A session over gRPC decides for itself how long its client may take nothing.
    let own_timeout = face == Some(FaceLabel::Evergreen) && is_grpc(&asked);
    let write_stalls = write_stalls.filter(|_| !own_timeout);
    let let_go = request_trace.let_go();
    answer.map(|body| {
        let body = Body::new(TracedBody::new(body, request_trace, in_flight));
        let Some(write_stalls) = write_stalls else {
            return body;
        };
        let metrics = Arc::clone(&context.shared.metrics);
        write_stalls.watching(body, version < Version::HTTP_2, metrics, let_go)
    })
}

/// In whose turn work on the request waits.
fn turn(caller: Option<&Caller>, request: &Parts) -> FairShare {
    FairShare {
        caller: caller.map_or(0, |caller| caller.identity.number()),
        connection: request.extensions.get().map_or(0, |ConnectionId(id)| *id),
    }
}

/// Reads what the client of an answer still sends. Calls of gRPC are streams that need not end before their answer.
async fn read_away(leftover: Option<UnreadRemainder>, asked: &HeaderMap, most: u64) {
    if let Some(leftover) = leftover.filter(|_| !is_grpc(asked)) {
        leftover.read_away(most, asked.contains_key(EXPECT)).await;
    }
}

/// What is read at most of a request that is refused (D-35).
const STRANGER_BYTES: u64 = 1 << 20;

impl RouteMiddleware {
    /// Every check, in its order.
    fn judge(&self, request: &Parts) -> AccessDecision {
        let judged = self.enter(request).and_then(|preflight| match preflight {
            Some(answer) => Ok(AccessDecision::Answered(answer)),
            None => {
                let (caller, deadline) = self.admit(request)?;
                Ok(AccessDecision::Passed(caller, deadline))
            }
        });
        judged.unwrap_or_else(|rejection| {
            let path = request.uri.path();
            // Whatever it calls itself, a call of gRPC is a POST; of others the status is what proxies and browsers read.
            let is_call = request.method == Method::POST;
            let spelled = if is_call {
                &request.headers
            } else {
                &HeaderMap::new()
            };
            let mut answer = rejection.answer_at(path, spelled);
            if answer.status() == StatusCode::METHOD_NOT_ALLOWED && self.kind == RouteKind::Grpc {
                let post = HeaderValue::from_static("POST");
                answer.headers_mut().insert(ALLOW, post);
            }
            AccessDecision::Answered(answer)
        })
    }

    /// Whether the request may be asked here, by whomever. `Some`: it was a preflight, and this is all that there is to it.
    fn enter(&self, request: &Parts) -> Result<Option<Response<Body>>, Rejection> {
        let most = self.context.headers;
        if request.headers.len() > most {
            let message = format!("A request may have {most} header lines (limits.headers).");
            let rejection = Rejection::new(Code::LimitExceeded, "too_many_headers", message);
            return Err(rejection.with_status(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE));
        }
        let purpose = request.extensions.get::<PortPurpose>();
        let purpose = purpose.copied().unwrap_or_default();
        purpose.check(self.kind, request)?;
        let origin = &self.context.origin;
        origin.check_host(request, self.context.shared.auth.required())?;
        origin.check(request)?;
        origin.preflight(request)
    }

    /// Whether its sender may do that, and now.
    fn admit(&self, request: &Parts) -> Result<(Caller, Deadline), Rejection> {
        let shared = &self.context.shared;
        let caller = shared.auth.check(self.access, request);
        let caller = caller.inspect_err(|_| shared.metrics.auth_failures.inc())?;
        self.check_form(request)?;
        if shared.drain.phase() >= DrainPhase::Refusing && !is_for_operators(request.uri.path()) {
            shared.metrics.rejected.with_label_values(&["drain"]).inc();
            let message = "The server is shutting down and takes no new work: try another one.";
            return Err(Rejection::new(Code::Unavailable, "draining", message));
        }
        let deadline = self.context.timeouts.deadline(&request.headers)?;
        Ok((caller, deadline))
    }

    /// Libraries of gRPC look at paths alone, and would run a method for a GET.
    fn check_form(&self, request: &Parts) -> Result<(), Rejection> {
        let method = &request.method;
        let taken = match self.kind {
            RouteKind::Grpc => method == Method::POST,
            RouteKind::Http => !matches!(*method, Method::CONNECT | Method::TRACE),
        };
        if !taken {
            let message = format!("{method} is not allowed here.");
            let rejection = Rejection::new(Code::InvalidRequest, "method_not_allowed", message);
            return Err(rejection.with_status(StatusCode::METHOD_NOT_ALLOWED));
        }
        if self.kind == RouteKind::Grpc && !is_grpc(&request.headers) {
            // A client of another protocol cannot read its trailers.
            let message = "This address speaks gRPC: send application/grpc over HTTP/2.";
            let rejection = Rejection::new(Code::InvalidRequest, "not_grpc", message);
            return Err(rejection.with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
        }
        Ok(())
    }
}

impl MiddlewareContext {
    /// What the route answers, within its time and in spite of a panic.
    async fn handle(
        &self,
        request: Request,
        next: Next,
        Deadline(deadline): Deadline,
        id: &RequestId,
        caller: CallerIdentity,
        streams: bool,
    ) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let asked = parts.headers.clone();
        let path = parts.uri.path().to_owned();
        // Over gRPC a body is a stream that may be silent; its faces have limits of their own.
        let framing = if is_grpc(&asked) {
            Framing::Grpc
        } else {
            Framing::Lines
        };
        let (body, arrival) = if streams && framing == Framing::Grpc {
            (body, Arc::default())
        } else {
            TimedBody::watching(body, self.timeouts.body_idle)
        };
        let intake = BodyIntake::new(
            Arc::clone(&self.bodies),
            caller,
            self.drain_bytes,
            self.timeouts.body_idle,
        );
        let body = intake.charging(body, framing);
        parts.extensions.insert(Arc::clone(&arrival));
        parts.extensions.insert(Arc::clone(&intake));
        let handled = AssertUnwindSafe(next.run(Request::from_parts(parts, body)));
        let handled = timeout_at(deadline, handled.catch_unwind()).await;
        let leftover = intake.answered();
        let answer = match handled {
            // Whatever the route made of half a body, this is what went wrong. The rest of it is not coming.
            Ok(_) if arrival.has_stalled() => return timeouts::stalled().answer_at(&path, &asked),
            Ok(_) if intake.is_slow() => return timeouts::slow().answer_at(&path, &asked),
            Ok(_) if intake.is_overloaded() => body_budget::overloaded().answer_at(&path, &asked),
            Ok(Ok(answer)) => answer,
            Ok(Err(_panic)) => self.panicked(id, &path, &asked),
            Err(_elapsed) => timeouts::too_late().answer_at(&path, &asked),
        };
        read_away(leftover, &asked, self.drain_bytes).await;
        answer
    }

    fn panicked(&self, id: &RequestId, path: &str, asked: &HeaderMap) -> Response<Body> {
        self.shared.metrics.panics.inc();
        tracing::error!(request = id.as_str(), "a handler panicked");
        let message = format!(
            "The server had an error while processing your request. Request id: {}",
            id.as_str()
        );
        let mut answer =
            Rejection::new(Code::Internal, "internal_error", message).answer_at(path, asked);
        // OA-202: asking again would fail again.
        answer
            .headers_mut()
            .insert("x-should-retry", HeaderValue::from_static("false"));
        answer
    }
}

/// What is said where nothing was, by the time that a key was revoked.
fn revoked() -> Rejection {
    let message = "The key of this request was revoked.";
    Rejection::new(Code::Unauthenticated, "revoked", message)
}

/// Routes that answer as long as the process lives.
fn is_for_operators(path: &str) -> bool {
    matches!(
        path,
        "/health" | "/livez" | "/readyz" | "/ping" | "/metrics" | "/version" | "/load"
    ) || path.starts_with("/grpc.health.v1.Health/")
}

#[cfg(test)]
mod tests {
    use tower::ServiceExt;

    use super::*;

    /// A request that reaches a handler without this middleware, by whatever mistake, is refused.
    #[tokio::test]
    async fn d_45_a_handler_without_a_caller_refuses() {
        let routes = Router::new().route("/", axum::routing::get(|| async { "reached" }));
        let routes: Router = routes.layer(from_fn(checked));
        let answer = routes.oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
    }
}
