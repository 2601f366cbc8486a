//! One connection of a session that outlives it (EV-940).
//!
//! Owns: [`apart()`]: the socket in the connection's task, while the session has one of its own. Refuses to know: who takes
//! over afterwards.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use sapwood_kernel::session::{self, Outgoing};
use sapwood_proto::evergreen::{Reason, Status};
use tokio::time::{Instant, Sleep, sleep_until};

use super::{Gone, LAST_WORDS, Wire};
use crate::evergreen::socket::inbox::Inbox;

/// Serves the connection until it is lost, or the session, or this connection of it, is over.
pub(in crate::evergreen::socket) async fn apart(inbox: Inbox, outgoing: Outgoing, wire: Box<Wire>) {
    let mut connection = Apart {
        wire,
        inbox,
        outgoing,
        limit: None,
    };
    match (&mut connection).await {
        Ended::Session(status) => Box::pin(connection.wire.end(status.as_ref())).await,
        Ended::Connection(Gone::Left) => {
            let status = Status::new(Reason::Cancelled, "the client has closed the connection");
            connection.inbox.put(Err(session::Lost::Ended(status)));
        }
        Ended::Connection(Gone::Cut) => {
            connection.inbox.put(Err(session::Lost::Cut));
            connection.outgoing.cut();
        }
    }
}

struct Apart {
    wire: Box<Wire>,
    inbox: Inbox,
    outgoing: Outgoing,
    /// How long what is said after the session's end may take.
    limit: Option<Pin<Box<Sleep>>>,
}

/// What has come to its end.
enum Ended {
    /// The session, or its life on this connection.
    Session(Option<Arc<Status>>),
    Connection(Gone),
}

impl Apart {
    /// Hands over what comes, as far as the session has taken what came before. `true`: nothing is listened to.
    fn hear(&mut self, cx: &mut Context<'_>) -> bool {
        while self.wire.gone.is_none() {
            if self.inbox.poll_room(cx).is_pending() {
                return true;
            }
            match self.wire.poll_item(cx) {
                Poll::Ready(Some(item)) => {
                    let item = item.map_err(session::Lost::Ended);
                    self.inbox.put(item);
                }
                // The dialects that say so in this way have no such sessions.
                Poll::Ready(None) => {}
                // While a long message is read elsewhere nobody listens either.
                Poll::Pending => return self.wire.reading.is_some(),
            }
        }
        false
    }
}

impl Future for Apart {
    type Output = Ended;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        let this = &mut *self;
        match this.wire.poll_send(&mut this.outgoing, cx) {
            Poll::Ready(Ok(status)) => return Poll::Ready(Ended::Session(status)),
            Poll::Ready(Err(_)) => return Poll::Ready(Ended::Connection(Gone::Cut)),
            Poll::Pending => {}
        }
        let deaf = this.hear(cx);
        if let Some(gone) = this.wire.gone {
            return Poll::Ready(Ended::Connection(gone));
        }
        if this.wire.socket.poll_alive(deaf, cx).is_ready() {
            return Poll::Ready(Ended::Connection(Gone::Cut));
        }
        if this.inbox.is_abandoned() {
            let late = || Box::pin(sleep_until(Instant::now() + LAST_WORDS));
            let limit = this.limit.get_or_insert_with(late);
            return limit
                .as_mut()
                .poll(cx)
                .map(|()| Ended::Connection(Gone::Cut));
        }
        Poll::Pending
    }
}
