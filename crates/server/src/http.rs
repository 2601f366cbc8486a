//! The middleware of every request and response: identity, access, deadlines, traces, headers (D-45).
//!
//! ```text
//!   1 port       is the route served on it?                 2 host      exactly one name, and an allowed one
//!   3 origin     may this web page call?                    4 preflight answered here, 204 or 403
//!   5 caller     key or certificate, and the route's scope  6 form      gRPC takes POST of its own type, no CONNECT or TRACE
//!   7 drain      is new work still taken?                   8 deadline  how long may it take?
//!        └─► the handler, behind [`checked`], which refuses a request without a caller
//! ```
//!
//! No request skips a step, and there is no other way to a handler: `MiddlewareContext::around` makes each route of the table
//! into a router, and the fallback is one of them.

pub(crate) mod access_log;
pub mod body_budget;
pub(crate) mod compressed_limit;
pub(crate) mod drain_body;
pub(crate) mod gunzip;
pub(crate) mod held_head;
pub(crate) mod intake;
pub mod origin;
pub mod rejection;
pub mod request_id;
pub(crate) mod request_trace;
pub mod route;
pub mod timeouts;
pub(crate) mod unpacking;
pub mod upload_pace;

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
use sapwood_proto::error_reason::ErrorReason;
use tokio::time::timeout_at;

use self::access_log::AccessRecord;
use self::body_budget::BodyBudget;
use self::drain_body::UnreadRemainder;
use self::intake::{BodyFailure, BodyIntake, Framing};
use self::rejection::{Rejection, is_grpc};
use self::request_id::RequestId;
use self::request_trace::{RequestTrace, TracedBody, grpc_status};
use self::route::{Route, RouteKind};
use self::timeouts::Deadline;
use crate::auth::caller::Caller;
use crate::auth::revocation::Revocation;
use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::context::ServerContext;
use crate::listener::activity::{Activity, InFlight};
use crate::listener::peer::ConnectionId;
use crate::listener::port_purpose::PortPurpose;
use crate::listener::write_stall::WriteStallWatch;
use crate::ops;
use crate::ops::drain::{DrainGuard, DrainPhase};
use crate::ops::metrics::{FaceLabel, ServerMetrics};
use crate::ops::telemetry::Parent;

/// What the checks need.
pub(crate) struct MiddlewareContext {
    pub(crate) shared: ServerContext,
    pub(crate) origin: origin::Config,
    pub(crate) timeouts: timeouts::Config,
    pub(crate) bodies: Arc<BodyBudget>,
    /// Bytes of an unneeded body that are read before its answer is sent.
    pub(crate) drain_bytes: u64,
    /// Maximum of header lines in a request.
    pub(crate) headers: usize,
}

/// The middleware of one route.
struct RouteMiddleware {
    context: Arc<MiddlewareContext>,
    face: FaceLabel,
    kind: RouteKind,
    access: RouteAccess,
}

/// An admitted request, or the response that ends it: a refusal or a preflight's answer.
enum AccessDecision {
    Passed(Admission),
    Answered(Response<Body>),
}

/// What is known of a request that may reach its handler.
struct Admission {
    caller: Caller,
    deadline: Deadline,
    /// Held until the response begins, after which a face's own guards count; `None` for routes that answer during a drain too.
    work: Option<DrainGuard>,
}

/// What an answer depends on. Cloned, because the handler consumes the request, and an answer that replaces its own must suit
/// the client.
struct AskedRequest {
    path: String,
    headers: HeaderMap,
}

impl AskedRequest {
    fn refuse(&self, rejection: &Rejection) -> Response<Body> {
        rejection.answer_at(&self.path, &self.headers)
    }
}

impl MiddlewareContext {
    /// A route of `face` with this middleware.
    pub(crate) fn around(self: &Arc<Self>, face: FaceLabel, route: Route) -> Router {
        let routes = Router::new().route(&route.path, route.methods);
        let routes = routes.method_not_allowed_fallback(ops::wrong_method);
        self.before(routes, face, route.kind, route.access)
    }

    /// The answer where there is no route, behind the same checks as everywhere, with the scope for calling functions.
    pub(crate) fn fallback(self: &Arc<Self>) -> Router {
        // With a scope and not open: without a key nobody learns which routes exist and which do not.
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
        // The layer that is added last runs first.
        routes
            .layer(from_fn(checked))
            .layer(from_fn_with_state(before, pass))
    }

    /// Counts and logs a panic of a handler, and returns the answer.
    fn panicked(&self, id: &RequestId, asked: &AskedRequest) -> Response<Body> {
        self.shared.metrics.panics.inc();
        tracing::error!(request = id.as_str(), "a handler panicked");
        let message = format!(
            "The server had an error while processing your request. Request id: {}",
            id.as_str()
        );
        let rejection = Rejection::new(Code::Internal, ErrorReason::INTERNAL_ERROR, message);
        let mut answer = asked.refuse(&rejection);
        // OA-202: asking again would fail again.
        let retry = HeaderValue::from_static("false");
        answer.headers_mut().insert("x-should-retry", retry);
        answer
    }

    /// Adds the headers of every response: which pages may read it, and that a draining server closes the connection.
    fn sign(&self, asked: &HeaderMap, answer: &mut Response<Body>) {
        self.origin.share(asked, answer.headers_mut());
        let draining = self.shared.drain.phase() >= DrainPhase::Refusing;
        // HTTP/2 forbids the header; there the listener sends GOAWAY.
        if draining && answer.version() < Version::HTTP_2 {
            let close = HeaderValue::from_static("close");
            answer.headers_mut().insert(CONNECTION, close);
        }
    }
}

/// Refuses a request that [`pass`] has not checked: a second line of defence against mistakes in the router.
async fn checked(request: Request, next: Next) -> Response<Body> {
    match Caller::of(request.extensions()) {
        Ok(_) => next.run(request).await,
        Err(rejection) => rejection.answer_at(request.uri().path(), request.headers()),
    }
}

/// The order of every request and every response. A refused request has a trace and a line in the log as well, but no caller:
/// it is charged to nobody, and no handler sees it.
async fn pass(
    State(before): State<Arc<RouteMiddleware>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let context = &before.context;
    let id = RequestId::of(request.headers());
    let (parts, body) = request.into_parts();
    // Before the body is touched: a refused request is charged to nobody, and of its body only `STRANGER_BYTES` are read.
    let judged = before.judge(&parts);
    let caller = match &judged {
        AccessDecision::Passed(admission) => Some(&admission.caller),
        AccessDecision::Answered(_) => None,
    };
    let allowance = caller.and_then(|caller| caller.allowance.clone());
    let identity = caller.map(|caller| caller.identity.clone());
    // `None` for a refused request: no face sees it, and none counts it.
    let face = caller.map(|_| before.face);
    // Refused requests have a record as well, without a caller: attempts to guess a key must show in the log.
    let entry = AccessRecord::new(id.clone(), identity, &parts);
    let mut request_trace = RequestTrace::new(entry, allowance.clone())
        .within_trace(Parent::of(&parts.headers))
        .in_turn(turn(caller, &parts))
        .with_rights(caller.map(|caller| caller.identity.steer_rights(caller.scopes)));
    let asked = AskedRequest {
        path: parts.uri.path().to_owned(),
        headers: parts.headers.clone(),
    };
    // Counted as in flight from here until the answer's body is out. If this came after the handler, the idle timer would
    // close connections under handlers that take long.
    let watches = ConnectionWatches::of(&parts);
    let mut answer = match judged {
        AccessDecision::Answered(answer) => {
            let most = context.drain_bytes.min(STRANGER_BYTES);
            read_away(Some(UnreadRemainder::of(body)), &asked, most).await;
            answer
        }
        AccessDecision::Passed(admission) => {
            let auth = Arc::clone(&context.shared.auth);
            let revocation = Revocation::new(auth, admission.caller.clone(), before.access);
            // Before the trace is cloned: tasks that the handler starts carry a clone, and one without the revocation would
            // outlive the key.
            request_trace = request_trace.until(revocation.clone());
            let request = Request::from_parts(parts, body);
            let handled = before.handle(request, next, admission, &id, &asked);
            let handled = request_trace.clone().follow(handled);
            // Around the deadline and the trace: a revoked key ends the handler wherever it waits.
            let handled = revocation.within(handled).await;
            handled.unwrap_or_else(|| asked.refuse(&revoked()))
        }
    };
    // Here and not in the handler, so that refusals, timeouts and revocations have the header too (OA-105).
    if let Some(value) = id.to_header() {
        answer.headers_mut().insert(request_id::HEADER, value);
    }
    // After the handler, so that the headers show what is left after this request.
    if let Some(allowance) = &allowance {
        allowance.add_headers(answer.headers_mut());
    }
    // Also on refusals: a page that may not read an answer shows a network error instead of its reason.
    context.sign(&asked.headers, &mut answer);
    request_trace.note(|entry| {
        entry.face = face;
        entry.status = answer.status().as_u16();
        entry.grpc = grpc_status(answer.headers());
    });
    // An Evergreen session over gRPC has a write-stall timeout of its own.
    let own_timeout = face == Some(FaceLabel::Evergreen) && is_grpc(&asked.headers);
    watches.watch(answer, request_trace, own_timeout, &context.shared.metrics)
}

/// What the connection of a request watches until the response has been sent.
struct ConnectionWatches {
    in_flight: Option<InFlight>,
    write_stalls: Option<WriteStallWatch>,
    version: Version,
}

impl ConnectionWatches {
    /// Begins to count the request as in flight.
    fn of(request: &Parts) -> Self {
        let extensions = &request.extensions;
        Self {
            in_flight: extensions.get::<Activity>().map(Activity::begin),
            write_stalls: extensions.get::<WriteStallWatch>().cloned(),
            version: request.version,
        }
    }

    /// The response with a body that holds the trace and the connection until it is sent, and is cut if its client stops
    /// reading.
    fn watch(
        self,
        answer: Response<Body>,
        request_trace: RequestTrace,
        own_timeout: bool,
        metrics: &Arc<ServerMetrics>,
    ) -> Response<Body> {
        let write_stalls = self.write_stalls.filter(|_| !own_timeout);
        // Taken before the trace moves into the body. The watch sets the flag before it drops the body, so that the work behind
        // it counts as ended by a stall and not by a disconnect.
        let let_go = request_trace.let_go();
        answer.map(|body| {
            // The trace is inside the watch: when the watch drops the body, the log line is written and the connection is
            // idle, although hyper still holds what is outside.
            let body = Body::new(TracedBody::new(body, request_trace, self.in_flight));
            match write_stalls {
                None => body,
                Some(write_stalls) => {
                    // HTTP/1 sends one response at a time, so a stalled one blocks all that could follow.
                    let closes = self.version < Version::HTTP_2;
                    write_stalls.watching(body, closes, Arc::clone(metrics), let_go)
                }
            }
        })
    }
}

/// The fair share under which work on the request waits.
fn turn(caller: Option<&Caller>, request: &Parts) -> FairShare {
    FairShare {
        caller: caller.map_or(0, |caller| caller.identity.number()),
        connection: request.extensions.get().map_or(0, |ConnectionId(id)| *id),
    }
}

/// Reads and discards what the client still sends, before its response is sent (TR-208).
async fn read_away(leftover: Option<UnreadRemainder>, asked: &AskedRequest, most: u64) {
    // Not over gRPC: a client stream need not end before the response begins.
    if let Some(leftover) = leftover.filter(|_| !is_grpc(&asked.headers)) {
        let waits = asked.headers.contains_key(EXPECT);
        leftover.read_away(most, waits).await;
    }
}

/// Maximum of bytes that are read of a refused request's body (D-35).
const STRANGER_BYTES: u64 = 1 << 20;

impl RouteMiddleware {
    /// Runs the handler of an admitted request, within its deadline and with panics caught.
    async fn handle(
        &self,
        request: Request,
        next: Next,
        admission: Admission,
        id: &RequestId,
        asked: &AskedRequest,
    ) -> Response<Body> {
        let context = &*self.context;
        let Admission {
            caller,
            deadline,
            work: _work,
        } = admission;
        let (mut parts, body) = request.into_parts();
        let intake = BodyIntake::new(
            Arc::clone(&context.bodies),
            caller.identity.clone(),
            context.drain_bytes,
            context.timeouts.body_idle,
        );
        let framing = if is_grpc(&asked.headers) {
            Framing::Grpc
        } else {
            Framing::Lines
        };
        // Over gRPC a body is a stream that may pause; its faces have limits of their own. Open routes have no client streams, so
        // their bodies keep the idle timeout: a caller without a key must not hold one.
        if framing == Framing::Grpc
            && self.kind == RouteKind::Grpc
            && self.access != RouteAccess::Open
        {
            intake.exempt(true);
        }
        let body = intake.watching(body, framing);
        parts.extensions.insert(caller);
        parts.extensions.insert(id.clone());
        parts.extensions.insert(deadline);
        parts.extensions.insert(Arc::clone(&intake));
        let handled = AssertUnwindSafe(next.run(Request::from_parts(parts, body)));
        // A panic is caught so that its client gets an answer with the id that the log has; it would otherwise see a closed
        // connection.
        // `AssertUnwindSafe`: the handler is not used after a panic, and locks that it shares recover from poisoning.
        let handled = timeout_at(deadline.0, handled.catch_unwind()).await;
        // Refunds what the body was charged, before `read_away` may wait for a slow client: others wait for that room.
        let leftover = intake.answered();
        let answer = match (intake.failure(), handled) {
            // The cause wins over the route's answer, which may be anything: to the handler half a body looks malformed.
            (Some(failure), Ok(_)) => {
                let answer = asked.refuse(&failure.rejection());
                if failure != BodyFailure::Overloaded {
                    // The rest of such a body is not read, because it does not come.
                    return answer;
                }
                answer
            }
            (None, Ok(Ok(answer))) => answer,
            (None, Ok(Err(_panic))) => context.panicked(id, asked),
            (_, Err(_elapsed)) => asked.refuse(&timeouts::too_late()),
        };
        read_away(leftover, asked, context.drain_bytes).await;
        answer
    }

    /// Every check, in its order.
    fn judge(&self, request: &Parts) -> AccessDecision {
        let judged = self.enter(request).and_then(|preflight| match preflight {
            Some(answer) => Ok(AccessDecision::Answered(answer)),
            None => {
                let admission = self.admit(request)?;
                Ok(AccessDecision::Passed(admission))
            }
        });
        judged.unwrap_or_else(|rejection| {
            let path = request.uri.path();
            // Every gRPC call is a POST. Another method with gRPC's content type comes from something else, which reads the
            // HTTP status and not a 200 with trailers.
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

    /// The checks that do not depend on the caller. `Some`: a preflight, with its answer.
    fn enter(&self, request: &Parts) -> Result<Option<Response<Body>>, Rejection> {
        // First, because every check below reads headers. Counted here and not only by hyper, whose own refusal has no body
        // and no request id.
        let most = self.context.headers;
        if request.headers.len() > most {
            let message =
                format!("A request may have at most {most} header lines (limits.headers).");
            let rejection =
                Rejection::new(Code::LimitExceeded, ErrorReason::TOO_MANY_HEADERS, message);
            return Err(rejection.with_status(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE));
        }
        let purpose = request.extensions.get::<PortPurpose>();
        let purpose = purpose.copied().unwrap_or_default();
        // Before the origin: a route that a port does not serve does not exist there, whoever asks.
        purpose.check(self.kind, request)?;
        let origin = &self.context.origin;
        // The host before the origin: the origin is compared with the host, which therefore has to be a single name that a
        // proxy cannot read differently.
        origin.check_host(request, self.context.shared.auth.required())?;
        origin.check(request)?;
        // After the origin, so that a foreign page's preflight is refused, and before the caller: browsers send no
        // credentials with a preflight.
        origin.preflight(request)
    }

    /// The checks of the caller, the form and the state of the server.
    fn admit(&self, request: &Parts) -> Result<Admission, Rejection> {
        let shared = &self.context.shared;
        // Before form and drain: without a key nobody learns which methods a route takes, or that the server is draining.
        let caller = shared.auth.check(self.access, request);
        let caller = caller.inspect_err(|_| shared.metrics.auth_failures.inc())?;
        self.check_form(request)?;
        // Probes and metrics go on: an orchestrator must see a live server that is not ready, and not a refusal.
        let work = if is_for_operators(request.uri.path()) {
            None
        } else {
            let refused = shared.metrics.rejected.with_label_values(&["drain"]);
            Some(shared.drain.admit().inspect_err(|_| refused.inc())?)
        };
        let deadline = self.context.timeouts.deadline(&request.headers)?;
        Ok(Admission {
            caller,
            deadline,
            work,
        })
    }

    /// Checks method and content type, because gRPC libraries route by path alone and would run a method for a GET.
    fn check_form(&self, request: &Parts) -> Result<(), Rejection> {
        let method = &request.method;
        let taken = match self.kind {
            RouteKind::Grpc => method == Method::POST,
            // Other methods are the router's. These two have a meaning of their own: a tunnel, and an echo of the headers,
            // keys included; no route must get to see them.
            RouteKind::Http => !matches!(*method, Method::CONNECT | Method::TRACE),
        };
        if !taken {
            return Err(Rejection::wrong_method(method));
        }
        if self.kind == RouteKind::Grpc && !is_grpc(&request.headers) {
            let message = "This path serves gRPC: send application/grpc over HTTP/2.";
            return Err(Rejection::not_grpc(message));
        }
        Ok(())
    }
}

/// The answer to a request that had none when its key was revoked.
fn revoked() -> Rejection {
    let message = "The key of this request was revoked.";
    Rejection::new(Code::Unauthenticated, ErrorReason::REVOKED, message)
}

/// Routes that answer during a drain too.
fn is_for_operators(path: &str) -> bool {
    matches!(
        path,
        "/health"
            | "/livez"
            | "/readyz"
            | "/ping"
            | "/metrics"
            | "/version"
            | "/load"
            | "/v2/health/live"
            | "/v2/health/ready"
            | "/inference.GRPCInferenceService/ServerLive"
            | "/inference.GRPCInferenceService/ServerReady"
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
