//! A channel of one message between the task of a connection and the task of its session.
//!
//! A message that the session does not want yet pauses the connection, and with it the network (EV-802).
//!
//! ```text
//!   InboxSender ── put ──► one message ──► InboxReceiver
//!   (connection) ◄── room, or abandoned ─── (session)
//! ```
//!
//! Invariants: `item` is taken before `last` is seen; `last` never changes once it is set; `abandoned` never resets.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::Stream;
use sapwood_kernel::session::ConnectionLoss;
use sapwood_proto::evergreen::WireMessage;

type InboxItem = Result<WireMessage, ConnectionLoss>;

/// The connection's end. Dropping it reports a cut, unless another end was reported before.
pub(super) struct InboxSender(Arc<InboxShared>);

/// The session's end.
pub(super) struct InboxReceiver(Arc<InboxShared>);

#[derive(Default)]
struct InboxShared(Mutex<InboxState>);

#[derive(Default)]
struct InboxState {
    item: Option<InboxItem>,
    /// How the connection ended; read after the item.
    last: Option<ConnectionLoss>,
    /// The receiver was dropped.
    abandoned: bool,
    session: Option<Waker>,
    connection: Option<Waker>,
}

/// Both ends.
pub(super) fn new() -> (InboxSender, InboxReceiver) {
    let shared = Arc::<InboxShared>::default();
    (InboxSender(Arc::clone(&shared)), InboxReceiver(shared))
}

impl InboxShared {
    fn mail(&self) -> MutexGuard<'_, InboxState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InboxSender {
    /// Waits until the session has taken the message before. Pending for ever once the receiver is dropped, which wakes
    /// it.
    pub(super) fn poll_room(&self, cx: &Context<'_>) -> Poll<()> {
        let mut mail = self.0.mail();
        if mail.item.is_none() && mail.last.is_none() && !mail.abandoned {
            return Poll::Ready(());
        }
        keep(&mut mail.connection, cx);
        Poll::Pending
    }

    /// Whether the receiver was dropped.
    pub(super) fn is_abandoned(&self) -> bool {
        self.0.mail().abandoned
    }

    /// Puts in a message, for which there must be room, or the end of the connection, of which the first counts.
    pub(super) fn put(&self, item: InboxItem) {
        let mut mail = self.0.mail();
        match item {
            Ok(message) => mail.item = Some(Ok(message)),
            Err(lost) => {
                // A clean end and the drop of the sender both come here. The clean end is first, and must win: a session
                // whose client has left does not wait for it.
                mail.last.get_or_insert(lost);
            }
        }
        // Woken after the lock is free: a waker may poll at once, on this thread.
        let session = mail.session.take();
        drop(mail);
        session.into_iter().for_each(Waker::wake);
    }
}

impl Drop for InboxSender {
    fn drop(&mut self) {
        self.put(Err(ConnectionLoss::Cut));
    }
}

impl Stream for InboxReceiver {
    type Item = InboxItem;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<InboxItem>> {
        let mut mail = self.0.mail();
        if let Some(item) = mail.item.take() {
            let connection = mail.connection.take();
            drop(mail);
            connection.into_iter().for_each(Waker::wake);
            return Poll::Ready(Some(item));
        }
        // Cloned and not taken: the end is reported at every poll, as a stream that is over would be.
        if let Some(lost) = mail.last.clone() {
            return Poll::Ready(Some(Err(lost)));
        }
        keep(&mut mail.session, cx);
        Poll::Pending
    }
}

impl Drop for InboxReceiver {
    fn drop(&mut self) {
        let mut mail = self.0.mail();
        // The connection waits for room that nothing will make any more: it is woken to see that.
        mail.abandoned = true;
        let connection = mail.connection.take();
        drop(mail);
        connection.into_iter().for_each(Waker::wake);
    }
}

fn keep(position: &mut Option<Waker>, cx: &Context<'_>) {
    match position {
        // Saves the clone at each poll of the same task.
        Some(waker) if waker.will_wake(cx.waker()) => {}
        position => *position = Some(cx.waker().clone()),
    }
}
