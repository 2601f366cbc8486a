//! A channel of one message between the task of a connection and the task of its session.
//!
//! A message that the session does not want yet pauses the connection, and with it the network (EV-802).
//!
//! ```text
//!   InboxSender ── put ──► one message, then the end ──► IncomingMessages
//!   (connection) ◄── room, or closed ────────────────── (session)
//! ```

use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use futures::channel::mpsc;
use futures::{StreamExt, stream};
use sapwood_kernel::session::{ConnectionLoss, IncomingMessages};
use sapwood_proto::evergreen::WireMessage;

/// The connection's end. Dropping it reports a cut, unless another end was reported before.
pub(super) struct InboxSender {
    messages: mpsc::Sender<WireMessage>,
    /// How the connection ended; read after the message.
    end: Arc<OnceLock<ConnectionLoss>>,
}

/// Both ends.
pub(super) fn new() -> (InboxSender, IncomingMessages) {
    // A channel has room for one message of each sender beside its own room.
    let (messages, received) = mpsc::channel(0);
    let end = Arc::<OnceLock<ConnectionLoss>>::default();
    let last = Arc::clone(&end);
    let lost = move || Err(last.get().cloned().unwrap_or(ConnectionLoss::Cut));
    // The end is reported at every poll, as a stream that is over would be.
    let incoming = received.map(Ok).chain(stream::repeat_with(lost));
    (InboxSender { messages, end }, incoming.boxed())
}

impl InboxSender {
    /// Waits until the session has taken the message before. Pending for ever once the inbox is closed.
    pub(super) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match ready!(self.messages.poll_ready(cx)) {
            Ok(()) => Poll::Ready(()),
            Err(_closed) => Poll::Pending,
        }
    }

    /// Whether the session reads no more, or the end was put in. [`Self::poll_room`] wakes for the first.
    pub(super) fn is_closed(&self) -> bool {
        self.messages.is_closed()
    }

    /// Puts in a message, for which there must be room, or the end of the connection, of which the first counts.
    pub(super) fn put(&mut self, item: Result<WireMessage, ConnectionLoss>) {
        match item {
            // An error is a session that reads no more.
            Ok(message) => drop(self.messages.try_send(message)),
            Err(lost) => {
                // A clean end is put in before the drop of the sender, and must win: a session whose client has left
                // does not wait for it.
                let _ = self.end.set(lost);
                self.messages.close_channel();
            }
        }
    }
}
