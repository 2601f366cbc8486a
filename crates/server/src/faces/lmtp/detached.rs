//! Registry of LMTP connections whose clients may reconnect (LM-964, LM-965).
//!
//! ```text
//!   new connection ─ name ─► held ─ asking ─► the old one, lost or not ─ estate ─► new connection
//! ```

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

/// What a connection leaves behind.
pub(super) struct DetachedState {
    pub(super) session: LmtpSession,
    pub(super) works: StreamWorks,
}

/// A connection that wants the session.
pub(super) type TakeoverRequest = oneshot::Sender<DetachedState>;

/// The way to a session that can be resumed, and its task if it has no connection; it is aborted with the server.
pub(super) struct DetachedConnection {
    ask: mpsc::Sender<TakeoverRequest>,
    _task: Option<AbortOnDropHandle<()>>,
}

pub(super) type ConnectionRegistry = resume::ResumeRegistry<DetachedConnection>;

/// Names of 128 random bits; so many sessions of all, and of one caller.
pub(super) fn new_registry(most: usize, most_each: usize) -> ConnectionRegistry {
    let kind = TokenFormat {
        prefix: "s_",
        bytes: 16,
    };
    ConnectionRegistry::new(kind, most, most_each)
}

/// Asks for the session of this name; `None` if this caller has none, or another connection was first.
pub(super) fn ask(
    registry: &ConnectionRegistry,
    name: &str,
    identity: &CallerIdentity,
) -> Option<oneshot::Receiver<DetachedState>> {
    let (asking, detached_state) = oneshot::channel();
    let asked = registry.back(name, identity, |retained| {
        // The channel has room for one: of two connections that want the session the second is refused at once, instead of
        // taking it from the first.
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
    /// `None` if there is no room for another.
    pub(super) fn take(
        registry: &Arc<ConnectionRegistry>,
        identity: &CallerIdentity,
    ) -> Option<Self> {
        let (token, guard) = registry.issue(identity)?;
        let (ask, asked) = mpsc::channel(1);
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

    /// Where the task belongs in which it goes on without its client.
    pub(super) fn way(&self) -> RegistryHandle {
        RegistryHandle {
            token: self.token.clone(),
            ask: self.ask.clone(),
        }
    }

    /// Another connection wants the session.
    pub(super) fn poll_asked(&mut self, cx: &mut Context<'_>) -> Poll<TakeoverRequest> {
        match self.asked.poll_recv(cx) {
            Poll::Ready(Some(asking)) => Poll::Ready(asking),
            // It never ends: there is a sender beside it.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

/// See [`SessionRegistration::way`].
pub(super) struct RegistryHandle {
    token: SecretToken,
    ask: mpsc::Sender<TakeoverRequest>,
}

impl RegistryHandle {
    pub(super) fn keep(self, registry: &ConnectionRegistry, task: AbortOnDropHandle<()>) {
        let Self { token, ask } = self;
        let _task = Some(task);
        registry.keep(&token, DetachedConnection { ask, _task });
    }
}

/// The wire of a session whose client is away.
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
