//! Connections whose clients can come back (LM-964, LM-965).
//!
//! Owns: how one connection gets what another has begun. Refuses to know: places and names (`crate::held`), and what goes on
//! without a client (`proto::lmtp` has the rules).
//!
//! ```text
//!   new connection ─ name ─► held ─ asking ─► the old one, lost or not ─ estate ─► new connection
//! ```

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use sapwood_proto::lmtp::Session;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

use super::conversation::{Gone, Heard, Wire};
use super::works::Works;
use crate::caller::Identity;
use crate::held::{self, Kind, Token};

/// What a connection leaves behind.
pub(super) struct Estate {
    pub(super) session: Session,
    pub(super) works: Works,
}

/// Somebody who wants it.
pub(super) type Asking = oneshot::Sender<Estate>;

/// The way to a session that can be come back to, and its task if it has no connection; it is aborted with the server.
pub(super) struct Kept {
    ask: mpsc::Sender<Asking>,
    _task: Option<AbortOnDropHandle<()>>,
}

pub(super) type Held = held::Held<Kept>;

/// Names of 128 random bits; so many sessions of all, and of one visitor.
pub(super) fn held(most: usize, most_each: usize) -> Held {
    let kind = Kind {
        prefix: "s_",
        bytes: 16,
    };
    Held::new(kind, most, most_each)
}

/// Asks for the session of this name; `None` if there is none for this visitor, or somebody else was first.
pub(super) fn ask(
    held: &Held,
    name: &str,
    visitor: &Identity,
) -> Option<oneshot::Receiver<Estate>> {
    let (asking, estate) = oneshot::channel();
    let asked = held.back(name, visitor, |kept| kept.ask.try_send(asking).is_ok());
    asked.unwrap_or(false).then_some(estate)
}

/// A session's place among those that can be come back to.
pub(super) struct Place {
    token: Token,
    _stay: held::Stay<Kept>,
    ask: mpsc::Sender<Asking>,
    asked: mpsc::Receiver<Asking>,
}

impl Place {
    /// `None` if there is no room for another.
    pub(super) fn take(held: &Arc<Held>, visitor: &Identity) -> Option<Self> {
        let (token, stay) = held.issue(visitor)?;
        let (ask, asked) = mpsc::channel(1);
        let kept = Kept {
            ask: ask.clone(),
            _task: None,
        };
        held.keep(&token, kept);
        Some(Self {
            token,
            _stay: stay,
            ask,
            asked,
        })
    }

    pub(super) fn name(&self) -> &str {
        self.token.text()
    }

    /// Where the task belongs in which it goes on without its client.
    pub(super) fn way(&self) -> Way {
        Way {
            token: self.token.clone(),
            ask: self.ask.clone(),
        }
    }

    /// Somebody wants the session.
    pub(super) fn poll_asked(&mut self, cx: &mut Context<'_>) -> Poll<Asking> {
        match self.asked.poll_recv(cx) {
            Poll::Ready(Some(asking)) => Poll::Ready(asking),
            // It never ends: there is a sender beside it.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

/// See [`Place::way`].
pub(super) struct Way {
    token: Token,
    ask: mpsc::Sender<Asking>,
}

impl Way {
    pub(super) fn keep(self, held: &Held, task: AbortOnDropHandle<()>) {
        let Self { token, ask } = self;
        let _task = Some(task);
        held.keep(&token, Kept { ask, _task });
    }
}

/// The wire of a session whose client is away.
pub(super) struct Nowhere;

impl Wire for Nowhere {
    fn poll_heard(&mut self, _: &mut Context<'_>) -> Poll<Heard> {
        Poll::Pending
    }

    fn poll_gone(&mut self, _: bool, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }

    fn poll_room(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        Poll::Ready(Ok(()))
    }

    fn send(&mut self, _: Bytes) -> Result<(), Gone> {
        Ok(())
    }

    fn poll_sent(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        Poll::Ready(Ok(()))
    }
}
