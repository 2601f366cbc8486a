//! The gate: what every request passes before a handler sees it, and every answer on its way out (D-45).
//!
//! Owns: the order of the checks, request ids, limits of time, the net under panics, what a revoked key leaves behind, the
//! access log line. Refuses to know: what the routes do.
//!
//! ```text
//!   1 port       is the route served there at all?          2 host      one name, and one that may be asked for
//!   3 origin     may this web page ask?                     4 preflight answered here, 204 or 403
//!   5 caller     key or certificate, and the route's scope  6 form      gRPC takes POST of its own type, nobody CONNECT or TRACE
//!   7 drain      is new work still taken?                   8 deadline  how long may it take?
//!        └─► the handler, behind [`checked`], which refuses what has no caller
//! ```
//!
//! There is no request that skips a step, and no handler is reached another way: [`Gate::around`] makes each route of the
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
use sapwood_kernel::Turn;
use sapwood_proto::code::Code;
use tokio::time::timeout_at;

use crate::access::Entry;
use crate::activity::Activity;
use crate::auth::{Access, Scope};
use crate::body_budget::{self, BodyBudget};
use crate::caller::{Caller, Identity};
use crate::departures::Departures;
use crate::drain::Phase;
use crate::intake::{Framing, Intake};
use crate::leftover::Leftover;
use crate::listener::ConnectionId;
use crate::metrics::Face;
use crate::patience::{Arriving, Deadline};
use crate::purpose::Purpose;
use crate::refusal::{Refusal, is_grpc};
use crate::request_id::{self, RequestId};
use crate::revocation::Revocation;
use crate::route::{Kind, Route};
use crate::shared::Shared;
use crate::telemetry::Parent;
use crate::trail::{Trail, Trailed, grpc_status};
use crate::{ops, origin, patience};

/// What the checks need.
pub(crate) struct Gate {
    pub(crate) shared: Shared,
    pub(crate) origin: origin::Config,
    pub(crate) patience: patience::Config,
    pub(crate) bodies: Arc<BodyBudget>,
    /// Bytes of a body that are read although nobody needs them.
    pub(crate) drain_bytes: u64,
    /// Header lines of a request.
    pub(crate) headers: usize,
}

/// The gate as it stands before one route.
struct Before {
    gate: Arc<Gate>,
    face: Face,
    kind: Kind,
    access: Access,
}

/// A request that may go on, or the answer of whoever stopped it.
enum Judged {
    Passed(Caller, Deadline),
    Answered(Response<Body>),
}

impl Gate {
    /// A route of `face` behind the gate.
    pub(crate) fn around(self: &Arc<Self>, face: Face, route: Route) -> Router {
        let routes = Router::new().route(&route.path, route.methods);
        let routes = routes.method_not_allowed_fallback(ops::wrong_method);
        self.before(routes, face, route.kind, route.access)
    }

    /// What answers where there is no route: to whoever may call functions, and else as everywhere.
    pub(crate) fn fallback(self: &Arc<Self>) -> Router {
        let nowhere = Router::new().fallback(ops::unknown);
        let access = Access::Needs(Scope::Infer);
        self.before(nowhere, Face::Http, Kind::Http, access)
    }

    fn before(self: &Arc<Self>, routes: Router, face: Face, kind: Kind, access: Access) -> Router {
        let before = Arc::new(Before {
            gate: Arc::clone(self),
            face,
            kind,
            access,
        });
        // The last layer is the first that a request comes to.
        routes
            .layer(from_fn(checked))
            .layer(from_fn_with_state(before, pass))
    }

    /// What every answer says, whoever gives it: which pages may read it, and that a server that drains takes nothing more.
    fn sign(&self, asked: &HeaderMap, answer: &mut Response<Body>) {
        self.origin.share(asked, answer.headers_mut());
        let draining = self.shared.drain.phase() >= Phase::Refusing;
        if draining && answer.version() < Version::HTTP_2 {
            let close = HeaderValue::from_static("close");
            answer.headers_mut().insert(CONNECTION, close);
        }
    }
}

/// Refuses what was not looked at, whatever that is the fault of: the wall behind the gate.
async fn checked(request: Request, next: Next) -> Response<Body> {
    match Caller::of(request.extensions()) {
        Ok(_) => next.run(request).await,
        Err(refusal) => refusal.answer_at(request.uri().path(), request.headers()),
    }
}

async fn pass(State(before): State<Arc<Before>>, request: Request, next: Next) -> Response<Body> {
    let gate = &before.gate;
    let id = RequestId::of(request.headers());
    let (mut parts, body) = request.into_parts();
    let judged = before.judge(&parts);
    let caller = match &judged {
        Judged::Passed(caller, _) => Some(caller.clone()),
        Judged::Answered(_) => None,
    };
    let allowance = caller.as_ref().and_then(|caller| caller.allowance.clone());
    let turn = turn(caller.as_ref(), &parts);
    let entry = Entry::new(id.clone(), caller.map(|caller| caller.identity), &parts);
    let mut trail = Trail::new(entry, allowance.clone())
        .within_trace(Parent::of(&parts.headers))
        .in_turn(turn);
    let in_flight = parts.extensions.get::<Activity>().map(Activity::begin);
    let asked = parts.headers.clone();
    let path = parts.uri.path().to_owned();
    let version = parts.version;
    let departures = parts.extensions.get::<Departures>().cloned();
    let mut answer = match judged {
        Judged::Answered(answer) => {
            let most = gate.drain_bytes.min(STRANGER_BYTES);
            read_away(Some(Leftover::of(body)), &asked, most).await;
            answer
        }
        Judged::Passed(caller, deadline) => {
            let auth = Arc::clone(&gate.shared.auth);
            let revocation = Revocation::new(auth, caller.clone(), before.access);
            trail = trail.until(revocation.clone());
            let identity = caller.identity.clone();
            parts.extensions.insert(caller);
            parts.extensions.insert(id.clone());
            parts.extensions.insert(deadline);
            let request = Request::from_parts(parts, body);
            // What is open to everybody has no streams of requests.
            let streams = before.kind == Kind::Grpc && before.access != Access::Open;
            let handled = gate.handle(request, next, deadline, &id, identity, streams);
            let handled = trail.clone().follow(handled);
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
        allowance.tell(answer.headers_mut());
    }
    gate.sign(&asked, &mut answer);
    let face: Option<Face> = answer.extensions().get().copied();
    trail.note(|entry| {
        entry.face = face;
        entry.status = answer.status().as_u16();
        entry.grpc = grpc_status(answer.headers());
    });
    // A session over gRPC decides for itself how long its client may take nothing.
    let departures = departures.filter(|_| face != Some(Face::Evergreen) || !is_grpc(&asked));
    let let_go = trail.let_go();
    answer.map(|body| {
        let body = Body::new(Trailed::new(body, trail, in_flight));
        let Some(departures) = departures else {
            return body;
        };
        let metrics = Arc::clone(&gate.shared.metrics);
        departures.watching(body, version < Version::HTTP_2, metrics, let_go)
    })
}

/// In whose turn work on the request waits.
fn turn(caller: Option<&Caller>, request: &Parts) -> Turn {
    Turn {
        caller: caller.map_or(0, |caller| caller.identity.number()),
        connection: request.extensions.get().map_or(0, |ConnectionId(id)| *id),
    }
}

/// Reads what the client of an answer still sends. Calls of gRPC are streams that need not end before their answer.
async fn read_away(leftover: Option<Leftover>, asked: &HeaderMap, most: u64) {
    if let Some(leftover) = leftover.filter(|_| !is_grpc(asked)) {
        leftover.read_away(most, asked.contains_key(EXPECT)).await;
    }
}

/// What is read at most of a request that did not pass the gate (D-35).
const STRANGER_BYTES: u64 = 1 << 20;

impl Before {
    /// Every check, in its order.
    fn judge(&self, request: &Parts) -> Judged {
        let judged = self.enter(request).and_then(|preflight| match preflight {
            Some(answer) => Ok(Judged::Answered(answer)),
            None => {
                let (caller, deadline) = self.admit(request)?;
                Ok(Judged::Passed(caller, deadline))
            }
        });
        judged.unwrap_or_else(|refusal| {
            let path = request.uri.path();
            // Whatever it calls itself, a call of gRPC is a POST; of others the status is what proxies and browsers read.
            let is_call = request.method == Method::POST;
            let spelled = if is_call {
                &request.headers
            } else {
                &HeaderMap::new()
            };
            let mut answer = refusal.answer_at(path, spelled);
            if answer.status() == StatusCode::METHOD_NOT_ALLOWED && self.kind == Kind::Grpc {
                let post = HeaderValue::from_static("POST");
                answer.headers_mut().insert(ALLOW, post);
            }
            Judged::Answered(answer)
        })
    }

    /// Whether the request may be asked here, by whomever. `Some`: it was a preflight, and this is all that there is to it.
    fn enter(&self, request: &Parts) -> Result<Option<Response<Body>>, Refusal> {
        let most = self.gate.headers;
        if request.headers.len() > most {
            let message = format!("A request may have {most} header lines (limits.headers).");
            let refusal = Refusal::new(Code::LimitExceeded, "too_many_headers", message);
            return Err(refusal.with_status(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE));
        }
        let purpose = request.extensions.get::<Purpose>();
        let purpose = purpose.copied().unwrap_or_default();
        purpose.check(self.kind, request)?;
        let origin = &self.gate.origin;
        origin.check_host(request, self.gate.shared.auth.required())?;
        origin.check(request)?;
        origin.preflight(request)
    }

    /// Whether its sender may do that, and now.
    fn admit(&self, request: &Parts) -> Result<(Caller, Deadline), Refusal> {
        let shared = &self.gate.shared;
        let caller = shared.auth.check(self.access, request);
        let caller = caller.inspect_err(|_| shared.metrics.auth_failures.inc())?;
        self.check_form(request)?;
        if shared.drain.phase() >= Phase::Refusing && !is_for_operators(request.uri.path()) {
            shared.metrics.rejected.with_label_values(&["drain"]).inc();
            let message = "The server is shutting down and takes no new work: try another one.";
            return Err(Refusal::new(Code::Unavailable, "draining", message));
        }
        let deadline = self.gate.patience.deadline(&request.headers)?;
        Ok((caller, deadline))
    }

    /// Libraries of gRPC look at paths alone, and would run a method for a GET.
    fn check_form(&self, request: &Parts) -> Result<(), Refusal> {
        let method = &request.method;
        let taken = match self.kind {
            Kind::Grpc => method == Method::POST,
            Kind::Http => !matches!(*method, Method::CONNECT | Method::TRACE),
        };
        if !taken {
            let message = format!("{method} is not allowed here.");
            let refusal = Refusal::new(Code::InvalidRequest, "method_not_allowed", message);
            return Err(refusal.with_status(StatusCode::METHOD_NOT_ALLOWED));
        }
        if self.kind == Kind::Grpc && !is_grpc(&request.headers) {
            // Whoever speaks something else cannot read its trailers.
            let message = "This address speaks gRPC: send application/grpc over HTTP/2.";
            let refusal = Refusal::new(Code::InvalidRequest, "not_grpc", message);
            return Err(refusal.with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
        }
        Ok(())
    }
}

impl Gate {
    /// What the route answers, within its time and in spite of a panic.
    async fn handle(
        &self,
        request: Request,
        next: Next,
        Deadline(deadline): Deadline,
        id: &RequestId,
        caller: Identity,
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
            Arriving::watching(body, self.patience.body_idle)
        };
        let intake = Intake::new(
            Arc::clone(&self.bodies),
            caller,
            self.drain_bytes,
            self.patience.body_idle,
        );
        let body = intake.charging(body, framing);
        parts.extensions.insert(Arc::clone(&arrival));
        parts.extensions.insert(Arc::clone(&intake));
        let handled = AssertUnwindSafe(next.run(Request::from_parts(parts, body)));
        let handled = timeout_at(deadline, handled.catch_unwind()).await;
        let leftover = intake.answered();
        let answer = match handled {
            // Whatever the route made of half a body, this is what went wrong. The rest of it is not coming.
            Ok(_) if arrival.has_stalled() => return patience::stalled().answer_at(&path, &asked),
            Ok(_) if intake.is_slow() => return patience::slow().answer_at(&path, &asked),
            Ok(_) if intake.is_overloaded() => body_budget::overloaded().answer_at(&path, &asked),
            Ok(Ok(answer)) => answer,
            Ok(Err(_panic)) => self.panicked(id, &path, &asked),
            Err(_elapsed) => patience::too_late().answer_at(&path, &asked),
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
            Refusal::new(Code::Internal, "internal_error", message).answer_at(path, asked);
        // OA-202: asking again would fail again.
        answer
            .headers_mut()
            .insert("x-should-retry", HeaderValue::from_static("false"));
        answer
    }
}

/// What is said where nothing was, by the time that a key was revoked.
fn revoked() -> Refusal {
    let message = "The key of this request was revoked.";
    Refusal::new(Code::Unauthenticated, "revoked", message)
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

    /// What is reached past the gate, by whatever mistake, does nothing.
    #[tokio::test]
    async fn d_45_a_handler_without_a_caller_refuses() {
        let routes = Router::new().route("/", axum::routing::get(|| async { "reached" }));
        let routes: Router = routes.layer(from_fn(checked));
        let answer = routes.oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
    }
}
