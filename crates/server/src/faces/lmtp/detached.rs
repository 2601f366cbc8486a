//! Registry of LMTP connections whose clients may reconnect (LM-964, LM-965).
//!
//! ```text
//!   new connection ─ name ─► registry ─ TakeoverRequest ─► the old one, lost or not ─ DetachedState ─► new connection
//! ```
//!
//! The session moves to the new connection by value: no lock is shared, and one task at a time has it.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use sapwood_proto::lmtp::LmtpSession;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

use super::driver::{ClientClosed, LmtpInput, LmtpTransport};
use super::works::StreamWorks;
use crate::auth::identity::CallerIdentity;
use crate::resume::{self, SecretToken, TokenFormat};

/// What a connection hands over: its session and the work of its streams.
pub(super) struct DetachedState {
    pub(super) session: LmtpSession,
    pub(super) works: StreamWorks,
}

/// The request of a connection that resumes the session; the answer is the session.
pub(super) type TakeoverRequest = oneshot::Sender<DetachedState>;

/// A handle to a session that can be resumed, and its task if it has no connection; that is aborted with the server.
pub(super) struct DetachedConnection {
    ask: mpsc::Sender<TakeoverRequest>,
    _task: Option<AbortOnDropHandle<()>>,
}

pub(super) type ConnectionRegistry = resume::ResumeRegistry<DetachedConnection>;

/// Names of 128 random bits (LM-965); room for `most` sessions, of which one caller may have `most_each`.
pub(super) fn new_registry(most: usize, most_each: usize) -> ConnectionRegistry {
    let kind = TokenFormat {
        prefix: "s_",
        bytes: 16,
    };
    ConnectionRegistry::new(kind, most, most_each)
}

/// Requests the session of this name; `None` if this caller has none, or another connection was first.
pub(super) fn ask(
    registry: &ConnectionRegistry,
    name: &str,
    identity: &CallerIdentity,
) -> Option<oneshot::Receiver<DetachedState>> {
    let (asking, detached_state) = oneshot::channel();
    let asked = registry.back(name, identity, |retained| {
        // The channel has room for one: of two connections that want the session the second is refused at once, instead
        // of taking it from the first.
        retained.ask.try_send(asking).is_ok()
    });
    asked.unwrap_or(false).then_some(detached_state)
}

/// A session's place among those that can be resumed.
pub(super) struct SessionRegistration {
    token: SecretToken,
    _registration: resume::RegistryGuard<DetachedConnection>,
    ask: mpsc::Sender<TakeoverRequest>,
    asked: mpsc::Receiver<TakeoverRequest>,
}

impl SessionRegistration {
    /// Registers a session; `None` if there is no room for another.
    pub(super) fn take(
        registry: &Arc<ConnectionRegistry>,
        identity: &CallerIdentity,
    ) -> Option<Self> {
        let (token, guard) = registry.issue(identity)?;
        let (ask, asked) = mpsc::channel(1);
        // Registered while the connection is still there: the client often reconnects before the server sees the loss,
        // and the half-dead connection is then taken over (LM-965).
        let retained = DetachedConnection {
            ask: ask.clone(),
            _task: None,
        };
        registry.keep(&token, retained);
        Some(Self {
            token,
            _registration: guard,
            ask,
            asked,
        })
    }

    pub(super) fn name(&self) -> &str {
        self.token.text()
    }

    /// Stores the session's task once the session is detached.
    pub(super) fn keeper(&self) -> impl FnOnce(&ConnectionRegistry, AbortOnDropHandle<()>) + use<> {
        let (token, ask) = (self.token.clone(), self.ask.clone());
        move |registry, task| {
            // Replaces the entry without a task. If the session has ended meanwhile there is no entry, and the task is
            // dropped.
            let _task = Some(task);
            registry.keep(&token, DetachedConnection { ask, _task });
        }
    }

    /// Resolves when another connection resumes the session.
    pub(super) fn poll_asked(&mut self, cx: &mut Context<'_>) -> Poll<TakeoverRequest> {
        match self.asked.poll_recv(cx) {
            Poll::Ready(Some(asking)) => Poll::Ready(asking),
            // The channel cannot close: `ask` is a sender in this struct.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

/// The transport of a detached session: nothing is received, and sending succeeds without effect.
pub(super) struct NoTransport;

impl LmtpTransport for NoTransport {
    fn poll_receive(&mut self, _: &mut Context<'_>) -> Poll<LmtpInput> {
        Poll::Pending
    }

    fn poll_closed(&mut self, _: bool, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }

    fn poll_room(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        Poll::Ready(Ok(()))
    }

    fn send(&mut self, _: Bytes) -> Result<(), ClientClosed> {
        Ok(())
    }

    fn poll_sent(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        Poll::Ready(Ok(()))
    }
}
