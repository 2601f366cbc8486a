//! Response bodies that a script cuts off without trailers, as a crashed server would (D-11).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use hyper::body::{Body as Frames, Frame};

/// A body that ends with an error in place of its trailers once `cut` is set.
pub(super) struct CuttableBody {
    body: Body,
    cut: Arc<AtomicBool>,
    ended: bool,
}

impl CuttableBody {
    pub(super) const fn new(body: Body, cut: Arc<AtomicBool>) -> Self {
        let ended = false;
        Self { body, cut, ended }
    }
}

impl Frames for CuttableBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.ended {
            let error = io::Error::other("the script cuts the call");
            return Poll::Ready(Some(Err(axum::Error::new(error))));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        // The flag is read after the body was polled: that is where the failure is encoded, which sets it.
        let data = matches!(&frame, Some(Ok(frame)) if frame.is_data());
        if data || !self.cut.load(Ordering::Relaxed) {
            return Poll::Ready(frame);
        }
        self.ended = true;
        // One more poll, so that what was sent before goes out: an error makes hyper drop what it still holds.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}
