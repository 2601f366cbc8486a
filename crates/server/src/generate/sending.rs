//! The responses of a request as events (TR-601 to TR-604).
//!
//! Owns: [`Sending`]: which events there are, in which order, and which of them go out together. Refuses to know: what an
//! event looks like, and what becomes of it.
//!
//! Events that are there already are told as one piece (D-6): whoever reads slower than its model says pays for a piece,
//! and not for each event, on all the way to its socket.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use futures::{Stream, StreamExt};
use sapwood_proto::generate::{Response, error_event};

use super::call::Responses;
use super::failure::Failure;
use super::stats::Counting;
use super::told::Told;

/// A piece of several events is not much larger than this.
const PIECE_BYTES: usize = 8 << 10;
/// About what an event takes.
const EVENT_BYTES: usize = 256;

/// A stream on its way, as pieces of whole events. Dropped with the body, whose client has gone then (TR-608).
pub(super) struct Sending {
    responses: Responses,
    told: Told,
    counting: Counting,
    /// What has been looked at already.
    ahead: Option<Result<Response, Failure>>,
    /// Events that are to go out.
    piece: Vec<u8>,
    /// A piece is full with this many bytes.
    full: usize,
    rest: Rest,
}

/// What follows the piece.
enum Rest {
    Events,
    Nothing,
    /// The connection ends without the protocol's own end (D-11).
    Cut(Failure, CutsNow),
}

type CutsNow = bool;

impl Sending {
    pub(super) const fn new(
        responses: Responses,
        told: Told,
        counting: Counting,
        first: Option<Result<Response, Failure>>,
    ) -> Self {
        Self {
            responses,
            told,
            counting,
            ahead: first,
            piece: Vec::new(),
            full: PIECE_BYTES,
            rest: Rest::Events,
        }
    }

    /// The same with one event in each piece.
    pub(super) const fn singly(mut self) -> Self {
        self.full = 1;
        self
    }

    /// Takes what is there, up to a full piece.
    fn gather(&mut self, cx: &mut Context<'_>) {
        let mut events = 0;
        while matches!(self.rest, Rest::Events) && self.piece.len() < self.full {
            let Poll::Ready(response) = self.poll_response(cx) else {
                break;
            };
            match response {
                Some(Ok(response)) => {
                    events += 1;
                    self.tell(&response, cx);
                }
                Some(Err(failure)) if failure.cut => self.rest = Rest::Cut(failure, false),
                Some(Err(failure)) => {
                    self.piece.extend_from_slice(&error_event(&failure.message));
                    self.rest = Rest::Nothing;
                }
                None => {
                    self.succeed();
                    self.told.end(&mut self.piece);
                }
            }
        }
        self.counting.responded(events);
    }

    fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Response, Failure>>> {
        match self.ahead.take() {
            Some(ahead) => Poll::Ready(Some(ahead)),
            None => self.responses.poll_next_unpin(cx),
        }
    }

    fn tell(&mut self, response: &Response, cx: &mut Context<'_>) {
        let mut last = false;
        if self.told.marks_the_last() {
            // An end that is at hand is told with the response before it; no response waits for one.
            match self.responses.poll_next_unpin(cx) {
                Poll::Ready(None) => last = true,
                Poll::Ready(behind) => self.ahead = behind,
                Poll::Pending => {}
            }
        }
        if last {
            self.succeed();
        }
        self.told.event(response, last, &mut self.piece);
    }

    fn succeed(&mut self) {
        self.rest = Rest::Nothing;
        self.counting.succeeded();
    }
}

impl Stream for Sending {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let sending = &mut *self;
        sending.gather(cx);
        if !sending.piece.is_empty() {
            // The next piece is probably as large.
            let room = sending.piece.len().max(EVENT_BYTES);
            let piece = std::mem::replace(&mut sending.piece, Vec::with_capacity(room));
            return Poll::Ready(Some(Ok(piece.into())));
        }
        match &mut sending.rest {
            Rest::Events => Poll::Pending,
            Rest::Nothing => Poll::Ready(None),
            Rest::Cut(failure, now) if *now => {
                let cut = cut(failure);
                sending.rest = Rest::Nothing;
                Poll::Ready(Some(Err(cut)))
            }
            // What was told before goes out first: an error drops whatever the connection still holds.
            Rest::Cut(_, now) => {
                *now = true;
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }
}

/// D-11: the connection ends without the protocol's own end.
pub(super) fn cut(failure: &Failure) -> io::Error {
    io::Error::other(failure.message.clone())
}
