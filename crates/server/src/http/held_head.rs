//! Holds back the head of a large gRPC message until a part of the message has arrived (D-47).
//!
//! The gRPC library reserves memory for a whole message when it reads its head. The first byte that is written there costs a
//! huge page of 2 MiB, so that heads alone, of which nothing is charged, would fill the memory.
//!
//! ```text
//!   [flag, length] ─ short, or refused by the library ─────────────────► handed on as it arrives
//!                  └ else: held ─ an eighth of it is there, or its end ─► handed on
//! ```

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use http::Request;
use hyper::body::{Body as _, Frame};

/// The same request with the heads of its large messages held back. One that declares more than `most` bytes is handed on at
/// once: the library refuses it.
pub(crate) fn held(request: Request<Body>, most: usize) -> Request<Body> {
    request.map(|body| {
        // A body that was received whole can declare nothing that is missing.
        if body.is_end_stream() {
            return body;
        }
        Body::new(HeldHeads {
            body,
            most,
            head: [0; HEAD],
            known: 0,
            left: 0,
            queue: VecDeque::new(),
            queued: 0,
            wanted: 0,
            ended: false,
            trailers: None,
        })
    })
}

struct HeldHeads {
    body: Body,
    most: usize,
    /// The first `known` bytes of the head of the message that has begun.
    head: [u8; HEAD],
    known: usize,
    /// Bytes of its payload that were not handed on.
    left: usize,
    /// Received and not handed on.
    queue: VecDeque<Bytes>,
    /// Their sum.
    queued: usize,
    /// Nothing is handed on before so many are queued.
    wanted: usize,
    ended: bool,
    trailers: Option<Frame<Bytes>>,
}

impl HeldHeads {
    /// The next piece that may be handed on.
    fn next(&mut self) -> Option<Bytes> {
        if self.queued < self.wanted && !self.ended {
            return None;
        }
        self.wanted = 0;
        let mut piece = self.queue.pop_front()?;
        self.queued -= piece.len();
        if let Some((at, wanted)) = self.pass(&piece) {
            // The last byte of the head is enough to hold it back.
            let rest = piece.split_off(at);
            self.queued += rest.len();
            self.queue.push_front(rest);
            self.wanted = wanted;
        }
        Some(piece)
    }

    /// Follows the messages through a piece that is to be handed on. `Some`: from this byte on it is held, until so many are
    /// queued.
    fn pass(&mut self, piece: &[u8]) -> Option<(usize, usize)> {
        let mut at = 0;
        while at < piece.len() {
            if self.left > 0 {
                let part = self.left.min(piece.len() - at);
                self.left -= part;
                at += part;
                continue;
            }
            self.head[self.known] = piece[at];
            if self.known + 1 < HEAD {
                self.known += 1;
                at += 1;
                continue;
            }
            let [_, length @ ..] = self.head;
            let length = u32::from_be_bytes(length) as usize;
            let wanted = length / PART;
            let queued = self.queued + piece.len() - at;
            // Asked again with the same byte once enough is queued: nothing has changed until then but the queue.
            if length > SHORT && length <= self.most && queued < wanted && !self.ended {
                return Some((at, wanted));
            }
            self.known = 0;
            self.left = length;
            at += 1;
        }
        None
    }
}

impl hyper::body::Body for HeldHeads {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        loop {
            match this.next() {
                // Empty where a piece begins with what is held.
                Some(piece) if piece.is_empty() => continue,
                Some(piece) => return Poll::Ready(Some(Ok(Frame::data(piece)))),
                None if this.ended => return Poll::Ready(this.trailers.take().map(Ok)),
                None => {}
            }
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        this.queued += data.len();
                        this.queue.push_back(data);
                    }
                    Err(trailers) => {
                        this.trailers = Some(trailers);
                        this.ended = true;
                    }
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                // The end within a message: the library answers what is wrong with that.
                None => this.ended = true,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.queue.is_empty() && self.trailers.is_none() && self.body.is_end_stream()
    }
}

const HEAD: usize = 5;
/// Bytes of a message for which room is given at once.
const SHORT: usize = 64 << 10;
/// The part of a message that has to be there before its head is handed on.
const PART: usize = 8;

#[cfg(test)]
mod tests {
    use futures::{FutureExt, StreamExt, stream};
    use http_body_util::BodyExt;

    use super::*;

    fn message(length: usize) -> Vec<u8> {
        let head = u32::try_from(length).unwrap().to_be_bytes();
        [&[0][..], &head, &vec![7; length]].concat()
    }

    /// A body of these bytes, in pieces of `size`, which ends or waits for more.
    fn request(bytes: &[u8], size: usize, ends: bool) -> Request<Body> {
        let pieces: Vec<_> = bytes.chunks(size).map(Bytes::copy_from_slice).collect();
        let pieces = stream::iter(pieces.into_iter().map(Ok::<_, std::io::Error>));
        Request::new(if ends {
            Body::from_stream(pieces)
        } else {
            Body::from_stream(pieces.chain(stream::pending()))
        })
    }

    /// What is handed on of a body that waits for more.
    fn handed(bytes: &[u8], size: usize) -> usize {
        let mut body = held(request(bytes, size, false), MOST).into_body();
        let mut all = 0;
        while let Some(frame) = body.frame().now_or_never() {
            all += frame.unwrap().unwrap().into_data().unwrap().len();
        }
        all
    }

    const MOST: usize = 1 << 20;

    #[test]
    fn d_47_a_large_message_is_handed_on_from_an_eighth_of_it() {
        let large = message(MOST);
        let part = MOST / PART;
        for size in [1, 3, 5, 1000, MOST] {
            for (sent, expect) in [(5, 4), (part + 3, 4), (part + 4, part + 4), (MOST, MOST)] {
                assert_eq!(handed(&large[..sent], size), expect, "{sent} by {size}");
                // After another message in the same piece.
                let sent = [&message(10)[..], &large[..sent]].concat();
                assert_eq!(handed(&sent, size), 15 + expect, "{} by {size}", sent.len());
            }
        }
    }

    #[test]
    fn d_47_heads_of_short_messages_and_of_refused_ones_are_handed_on() {
        for length in [0, 1, SHORT, MOST + 1] {
            assert_eq!(handed(&message(length)[..5], 5), 5, "{length}");
        }
        assert_eq!(handed(&message(SHORT + 1)[..5], 5), 4);
    }

    #[tokio::test]
    async fn d_47_no_byte_is_lost_of_a_body_that_ends() {
        let all = [message(3), message(MOST), message(0), message(SHORT + 1)].concat();
        for size in [1, 7, 70_000, all.len()] {
            // Whole, and ended within a message.
            for sent in [all.len(), all.len() - SHORT, 13] {
                let body = held(request(&all[..sent], size, true), MOST).into_body();
                let read = body.collect().await.unwrap().to_bytes();
                assert!(read == all[..sent], "{sent} by {size}");
            }
        }
    }
}
