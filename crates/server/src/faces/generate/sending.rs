//! Writes the responses of a request as events (TR-601 to TR-604).
//!
//! Events that are ready are sent as one piece (D-6): a client that reads slower than the model generates costs one
//! write per piece, and not one per event, all the way to its socket.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use futures::{Stream, StreamExt};
use sapwood_proto::generate::{ResponsePayload, error_event};

use super::call::CallResponses;
use super::request_error::RequestError;
use super::response_json::JsonResponseContext;
use super::stats::RequestTimer;

/// Size of a piece, in bytes, from which on no more events join it.
const PIECE_BYTES: usize = 8 << 10;
/// The usual size of an event, in bytes.
const EVENT_BYTES: usize = 256;

/// A stream of pieces of whole events. Dropped with the body when the client disconnects, which cancels the call
/// (TR-608).
pub(super) struct Sending {
    responses: CallResponses,
    response_context: JsonResponseContext,
    request_timer: RequestTimer,
    /// The first response, which was read for the status.
    ahead: Option<Result<ResponsePayload, RequestError>>,
    /// Events that were not sent yet.
    piece: Vec<u8>,
    /// Bytes with which a piece is full.
    full: usize,
    rest: AfterPiece,
}

/// What follows the present piece.
enum AfterPiece {
    Events,
    Nothing,
    /// The connection ends without the protocol's own end (D-11).
    Cut(RequestError),
}

impl Sending {
    pub(super) const fn new(
        responses: CallResponses,
        reported: JsonResponseContext,
        timer: RequestTimer,
        first: Option<Result<ResponsePayload, RequestError>>,
    ) -> Self {
        Self {
            responses,
            response_context: reported,
            request_timer: timer,
            ahead: first,
            piece: Vec::new(),
            full: PIECE_BYTES,
            rest: AfterPiece::Events,
        }
    }

    /// The same with one event in each piece.
    pub(super) const fn singly(mut self) -> Self {
        self.full = 1;
        self
    }

    /// Takes the responses that are ready, up to a full piece.
    fn gather(&mut self, cx: &mut Context<'_>) {
        let mut events = 0;
        while matches!(self.rest, AfterPiece::Events) && self.piece.len() < self.full {
            let Poll::Ready(response) = self.poll_response(cx) else {
                break;
            };
            match response {
                Some(Ok(response)) => {
                    events += 1;
                    self.response_context.event(&response, &mut self.piece);
                }
                // Kept until the piece is sent: the events before a cut are part of the script (D-11).
                Some(Err(failure)) if failure.cut => self.rest = AfterPiece::Cut(failure),
                Some(Err(failure)) => {
                    self.piece.extend_from_slice(&error_event(&failure.message));
                    self.rest = AfterPiece::Nothing;
                }
                None => {
                    self.rest = AfterPiece::Nothing;
                    self.request_timer.succeeded();
                }
            }
        }
        // Once for the piece, because it takes a lock that all requests of the model share.
        self.request_timer.responded(events);
    }

    fn poll_response(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ResponsePayload, RequestError>>> {
        match self.ahead.take() {
            Some(ahead) => Poll::Ready(Some(ahead)),
            None => self.responses.poll_next_unpin(cx),
        }
    }
}

impl Stream for Sending {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let sending = &mut *self;
        sending.gather(cx);
        if !sending.piece.is_empty() {
            // The next piece is probably as large, and growing would copy it.
            let room = sending.piece.len().max(EVENT_BYTES);
            let piece = std::mem::replace(&mut sending.piece, Vec::with_capacity(room));
            return Poll::Ready(Some(Ok(piece.into())));
        }
        match &sending.rest {
            AfterPiece::Events => Poll::Pending,
            AfterPiece::Nothing => Poll::Ready(None),
            AfterPiece::Cut(failure) => {
                let cut = cut(failure);
                sending.rest = AfterPiece::Nothing;
                Poll::Ready(Some(Err(cut)))
            }
        }
    }
}

/// The body error that ends the connection without the protocol's own end (D-11).
pub(super) fn cut(failure: &RequestError) -> io::Error {
    io::Error::other(failure.message.clone())
}
