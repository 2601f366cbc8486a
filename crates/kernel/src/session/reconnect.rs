//! Reconnects a client to a session whose connection was lost (EV-940, EV-941).
//!
//! ```text
//!   connection ── cut ──► (nothing; actions go on) ◄── Reconnector::connect ── another connection
//! ```

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::{Dialect, Status, WireMessage};

use super::OutgoingMessages;
use super::guard::Guard;
use super::link::SessionLink;
use crate::sync::AtomicWaker;

/// Why a connection gives no further message.
#[derive(Clone, Debug)]
pub enum ConnectionLoss {
    /// It was lost: the client may reconnect.
    Cut,
    /// The client has ended it, or sent something that cannot be decoded.
    Ended(Status),
}

/// The messages that one connection receives.
pub type IncomingMessages = BoxStream<'static, Result<WireMessage, ConnectionLoss>>;

/// Attaches a new connection to a session.
#[derive(Clone)]
pub struct Reconnector {
    link: SessionLink,
    guard: Guard,
    slot: Arc<ConnectionSlot>,
}

/// Holds the latest new connection until the session's task accepts it.
#[derive(Default)]
struct ConnectionSlot {
    next: Mutex<Option<NextConnection>>,
    session: AtomicWaker,
}

/// A connection and its number.
struct NextConnection {
    connection: u64,
    dialect: Dialect,
    incoming: IncomingMessages,
}

impl Reconnector {
    /// Makes `incoming` the session's connection, in this dialect: the old connection ends with `SUPERSEDED`, and the
    /// outgoing messages for the new one are returned. Of several at once the last one wins. `None`: the session is
    /// over.
    #[must_use]
    pub fn connect(
        &self,
        dialect: Dialect,
        incoming: IncomingMessages,
    ) -> Option<OutgoingMessages> {
        let now = self.link.now();
        // The number is assigned under the session's lock: of two connections at once, the higher one is the later.
        let connection = self.link.with(|live| live.take_over(now))?;
        self.slot.put(NextConnection {
            connection,
            dialect,
            incoming,
        });
        Some(OutgoingMessages::new(
            self.link.clone(),
            self.guard.clone(),
            Some(connection),
        ))
    }
}

impl fmt::Debug for Reconnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconnector").finish_non_exhaustive()
    }
}

impl ConnectionSlot {
    fn lock(&self) -> MutexGuard<'_, Option<NextConnection>> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a new connection for the session. An earlier one that was not accepted yet is superseded.
    fn put(&self, next: NextConnection) {
        let mut slot = self.lock();
        // This connection was overtaken between `take_over` and here. Its outgoing side ends with `SUPERSEDED`.
        if slot
            .as_ref()
            .is_some_and(|waiting| waiting.connection > next.connection)
        {
            return;
        }
        let before = slot.replace(next);
        // The lock is released first: dropping a connection runs foreign code, and the woken task takes the lock.
        drop(slot);
        drop(before);
        self.session.wake();
    }

    /// Takes the waiting connection. Registers the session's waker.
    fn take(&self, cx: &Context<'_>) -> Option<NextConnection> {
        // Before the look, or a connection in between would wake nobody; and even if one is found, because a further
        // one may replace it.
        self.session.register(cx.waker());
        self.lock().take()
    }
}

/// The connections of one session, one after the other, as one stream of messages.
pub struct Connections {
    link: SessionLink,
    current: Option<IncomingMessages>,
    /// What to do once everything that the current connection gave has been handled.
    after: Option<AfterConnection>,
    slot: Arc<ConnectionSlot>,
}

/// How the current connection is succeeded.
enum AfterConnection {
    /// It has ended normally.
    End,
    /// Another connection has taken over.
    Next(NextConnection),
}

impl Connections {
    pub(super) fn new(
        link: SessionLink,
        guard: Guard,
        first: IncomingMessages,
    ) -> (Self, Reconnector) {
        let connection_slot = Arc::<ConnectionSlot>::default();
        let back = Reconnector {
            link: link.clone(),
            guard,
            slot: Arc::clone(&connection_slot),
        };
        let connections = Self {
            link,
            current: Some(first),
            after: None,
            slot: connection_slot,
        };
        (connections, back)
    }

    /// Stops reading the current connection. `after` is handled with the next poll, when all messages before it are
    /// handled.
    fn leave(&mut self, after: AfterConnection, cx: &Context<'_>) {
        // Not handled now: the session's task still has messages of this connection, and they come before its end.
        (self.current, self.after) = (None, Some(after));
        cx.waker().wake_by_ref();
    }

    fn go_on(&mut self, after: AfterConnection) {
        match after {
            AfterConnection::End => {
                let now = self.link.now();
                self.link.with(|live| live.end_of_input(now));
            }
            AfterConnection::Next(next) => {
                // Otherwise a further connection has taken over, and the slot gives that one next.
                if self.link.returned(next.connection, next.dialect) {
                    self.current = Some(next.incoming);
                }
            }
        }
    }
}

impl Stream for Connections {
    type Item = Result<WireMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // Before the current connection: its unread messages are dropped, and the client sends again what RESUME shows
        // missing (EV-942).
        if let Some(next) = self.slot.take(cx) {
            self.leave(AfterConnection::Next(next), cx);
            return Poll::Pending;
        }
        if let Some(after) = self.after.take() {
            self.go_on(after);
        }
        // `take` has registered the waker, so a new connection wakes this stream.
        let Some(current) = &mut self.current else {
            return Poll::Pending;
        };
        let polled = current.poll_next_unpin(cx);
        match polled {
            Poll::Ready(Some(Err(ConnectionLoss::Cut))) => {
                // Not the end of the stream: actions go on during the grace period, and the slot may give another
                // connection (EV-940).
                self.current = None;
                let now = self.link.now();
                self.link.with(|live| live.lost(now));
                Poll::Pending
            }
            // Another connection may follow: the slot accepts one as long as the session lives.
            Poll::Ready(None) => {
                self.leave(AfterConnection::End, cx);
                Poll::Pending
            }
            polled => polled.map(|item| {
                item.map(|item| {
                    item.map_err(|lost| match lost {
                        ConnectionLoss::Ended(status) => status,
                        // Handled above.
                        ConnectionLoss::Cut => super::failure::lost(),
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

#[cfg(test)]
mod tests;
