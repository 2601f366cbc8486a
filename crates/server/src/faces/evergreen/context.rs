//! What every Evergreen connection starts with, over gRPC and WebSockets alike: kernel, limits, quotas, registries.

use std::sync::Arc;

use futures::{FutureExt, Stream, StreamExt, stream};
use sapwood_kernel::Kernel;
use sapwood_kernel::session::{self, IncomingMessages, OutgoingMessages, Session, SessionCommand};
use sapwood_proto::evergreen::{Dialect, Reason, Status};
use tokio_util::task::AbortOnDropHandle;

use super::detached::{self, DetachedSession, SessionRegistrationGuard, SessionRegistry};
use super::options::RequestedOptions;
use super::recorder::SessionRecorder;
use super::{Config, known_models};
use crate::auth::identity::CallerIdentity;
use crate::auth::quotas::{CallerQuotas, NoSlot, Permit};
use crate::context::ServerContext;
use crate::http::request_trace::{self, RequestTrace};
use crate::ops::drain::{Drain, DrainPhase};
use crate::resume::SecretToken;

/// Shared by everything that opens sessions.
pub(super) struct EvergreenContext {
    pub(super) shared: ServerContext,
    kernel: Kernel,
    pub(super) config: Config,
    /// Open sessions.
    quotas: Arc<CallerQuotas>,
    /// Bytes that they retain.
    retained: Arc<CallerQuotas>,
    pub(super) detached: Arc<SessionRegistry>,
}

impl EvergreenContext {
    pub(super) fn new(shared: ServerContext, kernel: Kernel, config: Config) -> Self {
        let quotas = CallerQuotas::new(config.sessions as u64, config.sessions_each as u64);
        let retained = CallerQuotas::new(config.retained_bytes, config.retained_bytes_each);
        Self {
            shared,
            kernel,
            detached: Arc::new(detached::new_registry(
                config.resumable_sessions,
                config.resumable_sessions_each,
            )),
            config,
            quotas,
            retained,
        }
    }

    /// Acquires a place among the open sessions.
    ///
    /// # Errors
    /// Why there is none (section 8.2, EV-960).
    pub(super) fn admit(&self, caller: &CallerIdentity) -> Result<Permit, Status> {
        let rejected = &self.shared.metrics.rejected;
        // Before the quota: during a drain a client has to go to another server, and not to wait for a place here.
        if self.shared.drain.phase() >= DrainPhase::Refusing {
            rejected.with_label_values(&["drain"]).inc();
            let message = "the server is shutting down and opens no new sessions: try another one";
            return Err(Status::new(Reason::GoingAway, message));
        }
        self.quotas.take(caller).map_err(|full| {
            rejected.with_label_values(&[full.reason()]).inc();
            let message = match full {
                NoSlot::All => {
                    "the server has all the sessions it can hold (limits.sessions): try again later"
                        .to_owned()
                }
                NoSlot::Each => format!(
                    "you have {} sessions, and one caller may have no more (limits.sessions_each): close one, or begin \
                     more actions in those that you have",
                    self.quotas.most_each()
                ),
            };
            Status::new(Reason::EngineBusy, message)
        })
    }

    /// Opens a session, which counts in the metrics from here on. Call it within the trace of its request.
    pub(super) fn open(
        &self,
        dialect: Dialect,
        options: RequestedOptions,
        token: Option<&SecretToken>,
        caller: &CallerIdentity,
    ) -> (Session<SessionRecorder>, OutgoingMessages) {
        let recorder = SessionRecorder::begin(
            Arc::clone(&self.shared.metrics),
            self.shared.drain.clone(),
            Permit::empty(&self.retained, caller),
        );
        let mut options = self.config.session(dialect, options);
        let allowance = RequestTrace::present().and_then(|request_trace| request_trace.allowance());
        options.models = known_models(allowance);
        options.token = token.map(|token| session::ResumeToken(token.text().into()));
        session::open(self.kernel.clone(), options, recorder)
    }

    /// Opens a session that outlives its connections, in a task of its own; `incoming` is the input of the first.
    pub(super) fn hold(
        &self,
        dialect: Dialect,
        options: RequestedOptions,
        (token, stay): (SecretToken, SessionRegistrationGuard),
        permit: Permit,
        incoming: IncomingMessages,
    ) -> OutgoingMessages {
        let (session, outgoing) = self.open(dialect, options, Some(&token), permit.caller());
        let (connections, back) = session.connections(incoming);
        // Made here and not in the task: the revocation of the key is looked up in the trace of the present request.
        let orders = self.orders();
        let run = session.run(connections, orders);
        // The place and the token are given up with the session, and not with a connection of it. `map`, and not an
        // `async` block, which would hold the run twice: before its first poll, and while it is awaited.
        let run = run.map(move |_| drop((permit, stay)));
        let task = tokio::spawn(request_trace::carry_session(run));
        let _task = AbortOnDropHandle::new(task);
        // The task may have ended by now. Then its guard has removed the entry, and `keep` drops what it is given.
        self.detached.keep(&token, DetachedSession { back, _task });
        outgoing
    }

    /// The commands of the drain to an open session (EV-960, D-31), and of a key that is revoked (D-45). Call it within
    /// the trace of the session's request.
    pub(super) fn orders(&self) -> impl Stream<Item = SessionCommand> + Send + use<> {
        let revoked = stream::once(request_trace::revoked()).map(|()| SessionCommand::Revoke);
        stream::select(revoked, orders(self.shared.drain.clone()))
    }
}

fn orders(drain: Drain) -> impl Stream<Item = SessionCommand> + Send {
    let refusing = drain.clone();
    let finish = async move {
        refusing.reached(DrainPhase::Refusing).await;
        SessionCommand::Finish
    };
    let leave = async move {
        // Not `reached(Cutting)`, which a drain without cuts passes as well: sessions that finish in time are not cut
        // off.
        drain.cutting().await;
        SessionCommand::Leave
    };
    stream::once(finish).chain(stream::once(leave))
}
