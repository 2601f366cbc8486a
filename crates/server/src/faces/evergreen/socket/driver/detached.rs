//! Drives a session that may outlive this connection (EV-940).

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use sapwood_kernel::session::{self, OutgoingMessages};
use sapwood_proto::evergreen::{Reason, Status};
use tokio::time::{Instant, Sleep, sleep_until};

use super::{LAST_WORDS, PeerLoss, SocketTransport};
use crate::faces::evergreen::socket::inbox::InboxSender;

/// Serves the connection until it is lost, or until the session or this attachment to it ends.
pub(in crate::faces::evergreen::socket) async fn run_detached(
    inbox: InboxSender,
    outgoing: OutgoingMessages,
    wire: Box<SocketTransport>,
) {
    let mut connection = DetachedDriver {
        wire,
        inbox,
        outgoing,
        limit: None,
    };
    match (&mut connection).await {
        DetachedEnd::Session(status) => Box::pin(connection.wire.end(status.as_ref())).await,
        DetachedEnd::Connection(PeerLoss::Left) => {
            // A clean Close ends the session although it can be resumed: only a lost connection is waited for (EV-940).
            let status = Status::new(Reason::Cancelled, "the client has closed the connection");
            connection
                .inbox
                .put(Err(session::ConnectionLoss::Ended(status)));
        }
        DetachedEnd::Connection(PeerLoss::Cut) => {
            connection.inbox.put(Err(session::ConnectionLoss::Cut));
            // Reported explicitly, because a drop alone does not show whether the client has left. It has not: the
            // session is detached and waits for it.
            connection.outgoing.cut();
        }
    }
}

struct DetachedDriver {
    wire: Box<SocketTransport>,
    inbox: InboxSender,
    outgoing: OutgoingMessages,
    /// The deadline of what is sent after the session's end.
    limit: Option<Pin<Box<Sleep>>>,
}

/// The cause for which a connection ends.
enum DetachedEnd {
    /// The session, or its attachment to this connection.
    Session(Option<Arc<Status>>),
    Connection(PeerLoss),
}

impl DetachedDriver {
    /// Passes received messages to the session, as far as it has taken those before. `true`: the socket is not read now.
    fn receive(&mut self, cx: &mut Context<'_>) -> bool {
        while self.wire.lost.is_none() {
            // Before the socket is read: a message without room could not be put back.
            if self.inbox.poll_room(cx).is_pending() {
                return true;
            }
            match self.wire.poll_item(cx) {
                Poll::Ready(Some(item)) => {
                    let item = item.map_err(session::ConnectionLoss::Ended);
                    self.inbox.put(item);
                }
                // Only msgpack half-closes by a message of its own, and its sessions do not resume.
                Poll::Ready(None) => {}
                // While a long message is decoded on another thread the socket is not read either.
                Poll::Pending => return self.wire.reading.is_some(),
            }
        }
        false
    }
}

impl Future for DetachedDriver {
    type Output = DetachedEnd;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<DetachedEnd> {
        let this = &mut *self;
        match this.wire.poll_send(&mut this.outgoing, cx) {
            Poll::Ready(Ok(status)) => return Poll::Ready(DetachedEnd::Session(status)),
            Poll::Ready(Err(_)) => return Poll::Ready(DetachedEnd::Connection(PeerLoss::Cut)),
            Poll::Pending => {}
        }
        // Sending comes first, so that a client that reads but sends nothing is served; the deadline comes last, after
        // all that could still end the session in order.
        let deaf = this.receive(cx);
        if let Some(removed) = this.wire.lost {
            return Poll::Ready(DetachedEnd::Connection(removed));
        }
        if this.wire.socket.poll_alive(deaf, cx).is_ready() {
            return Poll::Ready(DetachedEnd::Connection(PeerLoss::Cut));
        }
        // The session reads no more: it has ended, or another connection has taken over. What it still has for this one
        // gets a limited time.
        if this.inbox.is_closed() {
            let late = || Box::pin(sleep_until(Instant::now() + LAST_WORDS));
            let limit = this.limit.get_or_insert_with(late);
            return limit
                .as_mut()
                .poll(cx)
                .map(|()| DetachedEnd::Connection(PeerLoss::Cut));
        }
        Poll::Pending
    }
}
