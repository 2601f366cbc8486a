//! A run that makes progress while its reader does not poll it.
//!
//! [`Driven`], the task behind [`crate::Run::driven`] with its bounded buffer (KE-145). It is one of the named
//! exceptions to "no task is spawned" (KE-102); the task ends with its [`Driven`].

use std::pin::pin;
use std::task::{Context, Poll};

use futures::StreamExt;
use futures::future::{Either, select};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::sleep_until;

use super::Run;
use crate::Result;
use crate::call::Instant;
use crate::cancel::Cancel;
use crate::error::Error;
use crate::from_chunks::FromChunks;
use crate::meta::Meta;

/// An item, and the run's metadata if it changed with it.
pub(super) type Delivery<T> = (Result<T>, Option<Box<Meta>>);

/// The reading end of a driven run.
pub(super) struct Driven<T> {
    items: mpsc::Receiver<Delivery<T>>,
    last_meta: tokio::sync::oneshot::Receiver<Meta>,
    task: AbortHandle,
    /// Whether its end was reported.
    ended: bool,
}

impl<T: FromChunks> Driven<T> {
    /// Moves `run` into a task of the current runtime.
    pub(super) fn spawn(run: Run<T>, capacity: usize) -> Result<Self, Error> {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return Err(Error::Unavailable {
                why: "a driven run needs a tokio runtime".into(),
                retry_after: None,
            });
        };
        // A channel of capacity zero panics.
        let (tx, items) = mpsc::channel(capacity.max(1));
        let (end, last_meta) = tokio::sync::oneshot::channel();
        let task = runtime.spawn(async move {
            let meta = drive(run, &tx).await;
            // The receiver may have been dropped.
            let _gone = end.send(meta);
        });
        Ok(Self {
            items,
            last_meta,
            task: task.abort_handle(),
            ended: false,
        })
    }

    pub(super) fn poll_next(
        &mut self,
        meta: &mut Meta,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<T>>> {
        self.items.poll_recv(cx).map(|delivery| {
            if let Some((item, newer)) = delivery {
                if let Some(newer) = newer {
                    *meta = *newer;
                }
                return Some(item);
            }
            // The task has ended; its last message was sent before its queue closed.
            match self.last_meta.try_recv() {
                Ok(last) => *meta = last,
                // Reported before, or the task was aborted: the output is incomplete.
                Err(_) if self.ended => {}
                Err(_) => {
                    self.ended = true;
                    return Some(Err(Error::Panicked {
                        function: "a driven run".into(),
                    }));
                }
            }
            self.ended = true;
            None
        })
    }
}

impl<T> Drop for Driven<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn drive<T: FromChunks>(mut run: Run<T>, tx: &mpsc::Sender<Delivery<T>>) -> Meta {
    let mut reported = 0;
    while let Some(item) = run.next().await {
        let version = run.meta_version();
        let meta = (version != reported).then(|| Box::new(run.meta().clone()));
        reported = version;
        // Both arms may be dropped half-way: neither holds an item. If the buffer is full, a cancel or a deadline drops
        // the source at once, and the error follows the buffered items (KE-502, KE-503).
        let ended = ended(run.cancel(), run.deadline());
        // A place is reserved before the item is sent, so that waiting for it can be interrupted without losing the
        // item.
        let permit = match select(pin!(tx.reserve()), pin!(ended)).await {
            Either::Left((permit, _)) => permit,
            Either::Right((error, reserve)) => {
                run.stop(error);
                reserve.await
            }
        };
        // The reader is gone; its drop aborts this task anyway.
        let Ok(permit) = permit else { break };
        permit.send((item, meta));
    }
    run.meta().clone()
}

/// Resolves when the call is cancelled or its deadline has passed.
async fn ended(cancel: Cancel, deadline: Option<Instant>) -> Error {
    let Some(deadline) = deadline else {
        cancel.cancelled().await;
        return Error::Cancelled;
    };
    match select(cancel.cancelled(), pin!(sleep_until(deadline))).await {
        Either::Left(_) => Error::Cancelled,
        Either::Right(_) => Error::Deadline,
    }
}
