//! A channel of one message between the task of a connection and the task of its session.
//!
//! A message that the session does not want yet holds up the connection, and with it the network (EV-802).
//!
//! ```text
//!   connection ── put ──► one message ──► Incoming ── session
//!        └◄── room, or nobody takes anything any more ◄──┘
//! ```

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::Stream;
use sapwood_kernel::session::ConnectionLoss;
use sapwood_proto::evergreen::WireMessage;

type InboxItem = Result<WireMessage, ConnectionLoss>;

/// The connection's end. Dropping it is a cut, unless something else was said last.
pub(super) struct InboxSender(Arc<InboxShared>);

/// The session's end.
pub(super) struct InboxReceiver(Arc<InboxShared>);

#[derive(Default)]
struct InboxShared(Mutex<InboxState>);

#[derive(Default)]
struct InboxState {
    item: Option<InboxItem>,
    /// Stands behind the item.
    last: Option<ConnectionLoss>,
    /// Nobody takes anything any more.
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
    /// Waits until the session has taken what came before. Once it is gone this waits for ever, and is woken when it goes.
    pub(super) fn poll_room(&self, cx: &Context<'_>) -> Poll<()> {
        let mut mail = self.0.mail();
        if mail.item.is_none() && mail.last.is_none() && !mail.abandoned {
            return Poll::Ready(());
        }
        keep(&mut mail.connection, cx);
        Poll::Pending
    }

    /// Whether nobody takes anything any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.0.mail().abandoned
    }

    /// Something has come. A message needs room; how the connection ended stands behind it, and the first end counts.
    pub(super) fn put(&self, item: InboxItem) {
        let mut mail = self.0.mail();
        match item {
            Ok(message) => mail.item = Some(Ok(message)),
            Err(lost) => {
                // A goodbye and the drop of the sender both come here; the goodbye is first, and a session that was left is
                // not one that was cut.
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
        // The connection waits for room that nobody will make any more: it is woken to find that.
        mail.abandoned = true;
        let connection = mail.connection.take();
        drop(mail);
        connection.into_iter().for_each(Waker::wake);
    }
}

fn keep(position: &mut Option<Waker>, cx: &Context<'_>) {
    match position {
        Some(waker) if waker.will_wake(cx.waker()) => {}
        position => *position = Some(cx.waker().clone()),
    }
}
