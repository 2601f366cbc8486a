//! A run that progresses although nobody polls.
//!
//! Owns: [`Driven`], the task behind [`crate::Run::driven`] with its bounded buffer (KE-145). It is one of the named
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
        let (tx, items) = mpsc::channel(capacity.max(1));
        let (end, last_meta) = tokio::sync::oneshot::channel();
        let task = runtime.spawn(async move {
            let meta = drive(run, &tx).await;
            // Nobody may be left to be told.
            let _gone = end.send(meta);
        });
        Ok(Self {
            items,
            last_meta,
            task: task.abort_handle(),
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
            // The task ended, and what it knew last was sent before its queue closed.
            if let Ok(last) = self.last_meta.try_recv() {
                *meta = last;
            }
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
    let mut told = 0;
    while let Some(item) = run.next().await {
        let version = run.meta_version();
        let meta = (version != told).then(|| Box::new(run.meta().clone()));
        told = version;
        let permit = match run.deadline() {
            None => tx.reserve().await,
            Some(deadline) => {
                // Both arms may be dropped half-way: neither holds an item. On a full buffer the source is dropped on
                // time, and the error follows what is buffered (KE-503).
                match select(pin!(tx.reserve()), pin!(sleep_until(deadline))).await {
                    Either::Left((permit, _)) => permit,
                    Either::Right(((), reserve)) => {
                        run.stop(Error::Deadline);
                        reserve.await
                    }
                }
            }
        };
        let Ok(permit) = permit else { break };
        permit.send((item, meta));
    }
    run.meta().clone()
}
