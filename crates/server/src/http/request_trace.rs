//! The trace of a request: its span, and its line in the access log (OA-804).
//!
//! ```text
//!   middleware ─► route ─► response ([`TracedBody`])   each holds the trace; models that are called add to it;
//!             └────► tasks begun for it ([`carry`])    the line is written when the last holder is dropped
//! ```
//!
//! So the line of a session is written at the session's end, also where the response ended long before, as for a WebSocket.

use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use futures::FutureExt;
use futures::future::{BoxFuture, Either, pending};
use hyper::body::{Body as _, Frame, SizeHint};
use sapwood_kernel::{Call, FairShare, SteerRights};
use tracing::{Instrument, Span};

use crate::auth::identity::CallerIdentity;
use crate::auth::rate_limit::TokenMeter;
use crate::auth::revocation::Revocation;
use crate::auth::scopes::Scopes;
use crate::http::access_log::AccessRecord;
use crate::listener::activity::InFlight;
use crate::listener::peer::ConnectionId;
use crate::listener::poll_timing::timed;
use crate::ops::telemetry::Parent;

// Task-locals and not arguments: the kernel between a face and the layers knows nothing of requests.
tokio::task_local! {
    static PRESENT: RequestTrace;
    /// The caller of a connection without requests, and so without a trace.
    static CONNECTION: ConnectionCaller;
}

/// What calls need to know of the caller of a connection without requests.
#[derive(Clone, Debug)]
struct ConnectionCaller {
    turn: FairShare,
    rights: SteerRights,
}

/// The trace of one request; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct RequestTrace {
    span: Span,
    entry: Arc<Mutex<AccessRecord>>,
    allowance: Option<Arc<TokenMeter>>,
    parent: Option<Parent>,
    revocation: Option<Revocation>,
    turn: FairShare,
    /// `None` for a refused request, which makes no calls.
    rights: Option<SteerRights>,
    let_go: Arc<AtomicBool>,
}

impl RequestTrace {
    pub(crate) fn new(entry: AccessRecord, allowance: Option<Arc<TokenMeter>>) -> Self {
        Self {
            span: tracing::info_span!("request", request = entry.id.as_str(), key = entry.key()),
            entry: Arc::new(Mutex::new(entry)),
            allowance,
            parent: None,
            revocation: None,
            turn: FairShare::default(),
            rights: None,
            let_go: Arc::default(),
        }
    }

    /// The same, as the child of a caller's span.
    pub(crate) fn within_trace(mut self, parent: Option<Parent>) -> Self {
        self.parent = parent;
        self
    }

    /// The same, for a caller whose key may be revoked.
    pub(crate) fn until(mut self, revocation: Revocation) -> Self {
        self.revocation = Some(revocation);
        self
    }

    /// The same, for calls with this fair share.
    pub(crate) fn in_turn(mut self, turn: FairShare) -> Self {
        self.turn = turn;
        self
    }

    /// The same, for a caller who may steer so much.
    pub(crate) fn with_rights(mut self, rights: Option<SteerRights>) -> Self {
        self.rights = rights;
        self
    }

    /// What the caller may steer (AI-902).
    pub(crate) fn rights(&self) -> SteerRights {
        // Of the keys as they are now: a session outlives changes of what its key may do.
        if let Some(revocation) = &self.revocation {
            return revocation.rights();
        }
        // Fails closed: a trace without a caller belongs to nobody.
        self.rights.clone().unwrap_or_else(SteerRights::nobody)
    }

    /// The fair share of its calls (D-54).
    pub(crate) const fn turn(&self) -> FairShare {
        self.turn
    }

    /// The revocation of the caller's key; `None` if the request was refused.
    pub(crate) fn revocation(&self) -> Option<Revocation> {
        self.revocation.clone()
    }

    /// The parent of the request's spans.
    pub(crate) const fn parent(&self) -> Option<Parent> {
        self.parent
    }

    /// Set when the connection drops the response because its client has stopped reading.
    pub(crate) fn let_go(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.let_go)
    }

    /// The request's id.
    pub(crate) fn request(&self) -> String {
        self.note(|entry| entry.id.as_str().to_owned())
    }

    /// The trace of the request of the present task, if there is one.
    pub(crate) fn present() -> Option<Self> {
        PRESENT.try_with(Self::clone).ok()
    }

    /// The trace of the request that a call belongs to: that of the call around it, or else that of the present task. The
    /// calls within it belong to the same, whichever task they are made by.
    pub(crate) fn of(call: &mut Call) -> Option<Self> {
        // The call's own trace first: a function may call models from a task or thread that has no task-local, or that works
        // for another request.
        if let Some(trace) = call.extensions.get::<Self>() {
            return Some(trace.clone());
        }
        let trace = Self::present()?;
        call.extensions.insert(trace.clone());
        Some(trace)
    }

    /// Runs `work` within this trace. Neither this nor [`carry`] is an `async fn`, whose future would hold `work` twice.
    pub(crate) fn follow<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        let span = self.span.clone();
        PRESENT.scope(self, work.instrument(span))
    }

    /// The token meter that calls of models are charged to.
    pub(crate) fn allowance(&self) -> Option<Arc<TokenMeter>> {
        self.allowance.clone()
    }

    /// Reads or changes the record of the log line. `write` must not call this again: the record is locked.
    pub(crate) fn note<R>(&self, write: impl FnOnce(&mut AccessRecord) -> R) -> R {
        write(&mut self.entry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs a closure within this trace.
    fn within<R>(&self, act: impl FnOnce() -> R) -> R {
        let _entered = self.span.enter();
        PRESENT.sync_scope(self.clone(), act)
    }
}

/// Wraps `work` for a task of its own, within the trace of the request that starts it, or for the caller of its connection
/// without requests.
pub(crate) fn carry<F: Future>(work: F) -> impl Future<Output = F::Output> {
    match RequestTrace::present() {
        Some(request_trace) => timed(Either::Left(request_trace.follow(work))),
        None => timed(Either::Right(carry_connection(work))),
    }
}

/// Without this the work would belong to nobody: it would wait in no turn, and steer without rights.
fn carry_connection<F: Future>(work: F) -> impl Future<Output = F::Output> {
    match CONNECTION.try_with(ConnectionCaller::clone) {
        Ok(connection) => Either::Left(CONNECTION.scope(connection, work)),
        Err(_) => Either::Right(work),
    }
}

/// The same, for a session that takes turns of its own beside other sessions on its connection (D-54).
pub(crate) fn carry_session<F: Future>(work: F) -> impl Future<Output = F::Output> {
    match RequestTrace::present() {
        Some(mut request_trace) => {
            // Sessions over gRPC share one connection, sessions over WebSockets do not; both get the same share this way.
            request_trace.turn.connection = ConnectionId::fresh().0;
            timed(Either::Left(request_trace.follow(work)))
        }
        None => timed(Either::Right(carry_connection(work))),
    }
}

/// Resolves when the key of the current task's request is revoked; never in a task without a request.
pub(crate) fn revoked() -> BoxFuture<'static, ()> {
    let revocation = RequestTrace::present().and_then(|request_trace| request_trace.revocation());
    revocation.map_or_else(|| pending().boxed(), |revocation| revocation.reached())
}

/// The fair share of the current task.
pub(crate) fn present_turn() -> FairShare {
    if let Some(request_trace) = RequestTrace::present() {
        return request_trace.turn;
    }
    let turn = CONNECTION.try_with(|connection| connection.turn);
    turn.unwrap_or_default()
}

/// What the caller of a connection without requests may steer; `None` in a task that serves none.
pub(crate) fn connection_rights() -> Option<SteerRights> {
    let rights = CONNECTION.try_with(|connection| connection.rights.clone());
    rights.ok()
}

/// Wraps `work` for a connection without requests, and so without a trace: with a fair share of `caller`, who may do so
/// much.
pub(crate) fn in_turns_of<F: Future>(
    caller: &CallerIdentity,
    scopes: Scopes,
    work: F,
) -> impl Future<Output = F::Output> + use<F> {
    let connection = ConnectionCaller {
        turn: FairShare {
            caller: caller.number(),
            connection: ConnectionId::fresh().0,
        },
        rights: caller.steer_rights(scopes),
    };
    timed(CONNECTION.scope(connection, work))
}

/// Reads a gRPC status out of headers or trailers.
pub(crate) fn grpc_status(headers: &http::HeaderMap) -> Option<i32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// A response body, within the trace of its request.
pub(crate) struct TracedBody {
    body: Body,
    request_trace: RequestTrace,
    /// Resolves when the body is cut because the caller's key was revoked; made at the first pending poll.
    revoked: Option<BoxFuture<'static, ()>>,
    /// Keeps the connection from counting as idle until the response has been sent.
    _in_flight: Option<InFlight>,
}

impl TracedBody {
    pub(crate) fn new(body: Body, trace: RequestTrace, in_flight: Option<InFlight>) -> Self {
        // A body that is empty is never polled by hyper, so its end has to be noted here.
        trace.note(|entry| entry.ended = body.is_end_stream());
        Self {
            body,
            request_trace: trace,
            revoked: None,
            _in_flight: in_flight,
        }
    }
}

impl hyper::body::Body for TracedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self {
            body,
            request_trace: trace,
            revoked,
            ..
        } = &mut *self;
        // Within the trace, because a face that generates its response while it is read calls models here.
        let mut polled = trace.within(|| Pin::new(&mut *body).poll_frame(cx));
        // Only while the face has nothing to send: one that notices the revocation itself sends its error in the frames
        // before.
        if polled.is_pending()
            && let Some(revocation) = &trace.revocation
            && revoked
                .get_or_insert_with(|| revocation.over())
                .poll_unpin(cx)
                .is_ready()
        {
            // Dropped here, so that the face's work ends now and not when hyper drops this body.
            *body = Body::empty();
            polled = Poll::Ready(Some(Err(axum::Error::new("the key was revoked"))));
        }
        match &polled {
            Poll::Ready(Some(Ok(frame))) => trace.note(|entry| {
                let trailers = frame.trailers_ref();
                // A gRPC status is in the trailers, or in the headers of a response without messages, which was noted before.
                entry.grpc = trailers.and_then(grpc_status).or(entry.grpc);
                // hyper does not poll a body again that says it has ended, so the last frame is the last chance to note it.
                entry.ended = trailers.is_some() || body.is_end_stream();
            }),
            Poll::Ready(None) => trace.note(|entry| entry.ended = true),
            Poll::Ready(Some(Err(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sapwood_kernel::{Name, RunUsage};

    use super::*;
    use crate::http::access_log::UsageTotals;
    use crate::http::request_id::RequestId;

    #[tokio::test]
    async fn a_task_of_a_request_adds_to_its_log_line_and_delays_it() {
        let (request, ()) = http::Request::new(()).into_parts();
        let trace = RequestTrace::new(AccessRecord::new(RequestId::fresh(), None, &request), None);
        let line = Arc::downgrade(&trace.entry);
        let called = |prompt| {
            RequestTrace::present().unwrap().note(|entry| {
                entry.sums.called(&Name::new("parrot"));
                entry.sums.cost(RunUsage::of(prompt, 4));
                let first = &mut entry.sums.first_output;
                first.get_or_insert(Duration::from_millis(prompt));
            });
        };
        let (go, removed) = tokio::sync::oneshot::channel::<()>();
        let work = async move {
            called(3);
            let _ = removed.await;
            called(1);
        };
        let task = trace.within(|| tokio::spawn(carry(work)));
        tokio::task::yield_now().await;
        let answer = TracedBody::new(Body::empty(), trace, None);
        answer.request_trace.within(|| called(5));
        let expect = UsageTotals {
            models: vec![Name::new("parrot")],
            first_output: Some(Duration::from_millis(3)),
            usage: Some(RunUsage::of(8, 8)),
        };
        answer
            .request_trace
            .note(|entry| assert_eq!(entry.sums, expect));
        drop(answer);
        assert!(line.upgrade().is_some(), "the task goes on");
        go.send(()).unwrap();
        task.await.unwrap();
        assert!(line.upgrade().is_none() && RequestTrace::present().is_none());
        assert_eq!(carry(async { 1 }).await, 1);
    }

    #[tokio::test]
    async fn ai_902_a_task_of_a_connection_without_requests_has_its_rights_and_its_share() {
        let caller = CallerIdentity::Anonymous(None);
        let connection = async {
            let task = tokio::spawn(carry(async { (connection_rights(), present_turn()) }));
            ((connection_rights(), present_turn()), task.await.unwrap())
        };
        let (own, carried) = in_turns_of(&caller, Scopes::ALL, connection).await;
        assert_eq!(own, carried);
        assert!(own.0.is_some_and(|rights| rights.is_admin) && own.1 != FairShare::default());
        assert_eq!(carry(async { connection_rights() }).await, None);
    }
}
