//! The way back into a session whose connection was lost (EV-940, EV-941).
//!
//! Owns: [`Back`], by which a new connection takes over, and [`Connections`], which reads them one after the other.
//! Refuses to know: tokens and who may come back.
//!
//! ```text
//!   connection ── cut ──► (nothing; actions go on) ◄── Back::connect ── another connection
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::{Message, Status};
use tokio::sync::mpsc;

use super::Outgoing;
use super::link::Link;

/// Why a connection gives no further message.
#[derive(Clone, Debug)]
pub enum Lost {
    /// It was cut: the client may come back.
    Cut,
    /// The client has ended it, or sent what cannot be read.
    Ended(Status),
}

/// What one connection gives.
pub type Incoming = BoxStream<'static, Result<Message, Lost>>;

/// Brings a session a new connection.
#[derive(Clone)]
pub struct Back {
    link: Link,
    returns: mpsc::Sender<Incoming>,
}

impl Back {
    /// `incoming` takes over: the old connection ends with `SUPERSEDED`, and what goes to the new one is given. `None`:
    /// the session is over.
    #[must_use]
    pub fn connect(&self, incoming: Incoming) -> Option<Outgoing> {
        let now = self.link.now();
        let connection = self.link.with(|live| live.take_over(now))?;
        self.returns.try_send(incoming).ok()?;
        Some(Outgoing {
            link: self.link.clone(),
            ready: VecDeque::new(),
            over: false,
            connection: Some(connection),
        })
    }
}

impl fmt::Debug for Back {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Back").finish_non_exhaustive()
    }
}

/// The connections of one session, one after the other, as one stream of messages.
pub struct Connections {
    link: Link,
    current: Option<Incoming>,
    /// A new one, which begins once everything of the old one has been dealt with.
    next: Option<Incoming>,
    dealt_with: bool,
    returns: mpsc::Receiver<Incoming>,
}

impl Connections {
    pub(super) fn new(link: Link, first: Incoming) -> (Self, Back) {
        let (send, returns) = mpsc::channel(RETURNS);
        let back = Back {
            link: link.clone(),
            returns: send,
        };
        let connections = Self {
            link,
            current: Some(first),
            next: None,
            dealt_with: false,
            returns,
        };
        (connections, back)
    }

    /// `false`: first what was taken from the old connection has to go where it goes.
    fn change(&mut self, cx: &mut Context<'_>) -> bool {
        while let Poll::Ready(Some(next)) = self.returns.poll_recv(cx) {
            self.current = None;
            self.next = Some(next);
        }
        if self.next.is_none() {
            return true;
        }
        self.dealt_with = !self.dealt_with;
        if self.dealt_with {
            cx.waker().wake_by_ref();
            return false;
        }
        self.current = self.next.take();
        let now = self.link.now();
        self.link.with(|live| live.returned(now));
        true
    }
}

impl Stream for Connections {
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if !self.change(cx) {
            return Poll::Pending;
        }
        let Some(current) = &mut self.current else {
            return Poll::Pending;
        };
        let polled = current.poll_next_unpin(cx);
        match polled {
            Poll::Ready(Some(Err(Lost::Cut))) => {
                self.current = None;
                let now = self.link.now();
                self.link.with(|live| live.lost(now));
                Poll::Pending
            }
            polled => polled.map(|item| {
                item.map(|item| {
                    item.map_err(|lost| match lost {
                        Lost::Ended(status) => status,
                        Lost::Cut => super::failure::lost(),
                    })
                })
            }),
        }
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connections").finish_non_exhaustive()
    }
}

/// Connections that may come before the session has looked.
const RETURNS: usize = 8;
