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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::{Dialect, Message, Status};

use super::Outgoing;
use super::guard::Guard;
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
    guard: Guard,
    door: Arc<Door>,
}

/// Where the last connection that has come waits for the session to look.
#[derive(Default)]
struct Door(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    next: Option<Next>,
    session: Option<Waker>,
}

/// A connection and its number.
struct Next {
    connection: u64,
    dialect: Dialect,
    incoming: Incoming,
}

impl Back {
    /// `incoming` takes over, in this dialect: the old connection ends with `SUPERSEDED`, and what goes to the new one is
    /// given. Of several at once the last one stays. `None`: the session is over.
    #[must_use]
    pub fn connect(&self, dialect: Dialect, incoming: Incoming) -> Option<Outgoing> {
        let now = self.link.now();
        let connection = self.link.with(|live| live.take_over(now))?;
        self.door.knock(Next {
            connection,
            dialect,
            incoming,
        });
        Some(Outgoing {
            guard: self.guard.clone(),
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

impl Door {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody has come; who came before it and was not let in yet has been taken over from.
    fn knock(&self, next: Next) {
        let mut waiting = self.waiting();
        let number = |waiting: &Waiting| waiting.next.as_ref().map_or(0, |next| next.connection);
        if number(&waiting) > next.connection {
            return;
        }
        let before = waiting.next.replace(next);
        let session = waiting.session.take();
        drop(waiting);
        drop(before);
        session.into_iter().for_each(Waker::wake);
    }

    /// Who waits, or the session's waker instead.
    fn open(&self, cx: &Context<'_>) -> Option<Next> {
        let mut waiting = self.waiting();
        let next = waiting.next.take();
        match &waiting.session {
            Some(waker) if waker.will_wake(cx.waker()) => {}
            _ => waiting.session = Some(cx.waker().clone()),
        }
        next
    }
}

/// The connections of one session, one after the other, as one stream of messages.
pub struct Connections {
    link: Link,
    current: Option<Incoming>,
    /// What follows once everything that the last one gave has been dealt with.
    after: Option<After>,
    door: Arc<Door>,
}

/// What comes behind a connection.
enum After {
    /// It has come to its end in good order.
    End,
    /// Another one has taken over.
    Next(Next),
}

impl Connections {
    pub(super) fn new(link: Link, guard: Guard, first: Incoming) -> (Self, Back) {
        let door = Arc::<Door>::default();
        let back = Back {
            link: link.clone(),
            guard,
            door: Arc::clone(&door),
        };
        let connections = Self {
            link,
            current: Some(first),
            after: None,
            door,
        };
        (connections, back)
    }

    /// Nothing more of the current one; `after` has its turn with the next poll, when what was given before is dealt with.
    fn leave(&mut self, after: After, cx: &Context<'_>) {
        (self.current, self.after) = (None, Some(after));
        cx.waker().wake_by_ref();
    }

    fn go_on(&mut self, after: After) {
        match after {
            After::End => {
                let now = self.link.now();
                self.link.with(|live| live.end_of_input(now));
            }
            After::Next(next) => {
                if self.link.returned(next.connection, next.dialect) {
                    self.current = Some(next.incoming);
                }
            }
        }
    }
}

impl Stream for Connections {
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(next) = self.door.open(cx) {
            self.leave(After::Next(next), cx);
            return Poll::Pending;
        }
        if let Some(after) = self.after.take() {
            self.go_on(after);
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
            // Another one may follow: the door stays open for as long as the session lives.
            Poll::Ready(None) => {
                self.leave(After::End, cx);
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

#[cfg(test)]
mod tests;
