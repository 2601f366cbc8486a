//! Unpacks compressed gRPC messages before the gRPC library sees them (D-47).
//!
//! The library would unpack a whole message at once, which blocks a worker thread, and keep its buffer for as long as the call
//! lasts. Here each piece is charged before it is unpacked, and is freed when the library has copied it. Malformed messages
//! are replaced by ones that the library refuses in the same way.
//!
//! ```text
//!   [1, length, packed] ─► charged piece by piece ─► [0, length, message]         [0, length, message] ─► as it is
//! ```

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::Arc;

use axum::body::{Body, Bytes};
use bytes::{Buf, BytesMut};
use flate2::read::GzDecoder;
use futures::{StreamExt, stream};
use http::Request;
use http_body_util::BodyExt;

use crate::http::body_budget::{Reservation, overloaded};
use crate::http::compressed_limit::{CompressedLimit, UnpackedCount};
use crate::http::intake::BodyIntake;
use crate::http::unpacking::{UnpackError, Unpacking, unpack};

/// The same request with its messages unpacked; each may have up to `most` bytes.
pub(crate) fn unpacked(request: Request<Body>, most: usize) -> Request<Body> {
    let encoding = request.headers().get("grpc-encoding");
    let intake = request.extensions().get::<Arc<BodyIntake>>().cloned();
    // Only gzip: the library refuses other encodings by itself, with the list of those that it takes.
    let Some(intake) = intake.filter(|_| encoding.is_some_and(|name| name == "gzip")) else {
        return request;
    };
    request.map(|body| {
        let messages = Messages {
            body,
            most,
            buf: BytesMut::new(),
            passing: 0,
            ready: VecDeque::new(),
            reservation: intake.reserve(),
            intake,
        };
        Body::from_stream(stream::unfold(messages, Messages::next).fuse())
    })
}

/// The messages of a body.
struct Messages {
    body: Body,
    most: usize,
    /// Received and not yet handed on.
    buf: BytesMut,
    /// Bytes of a message that are still to be handed on unchanged.
    passing: usize,
    /// The pieces of an unpacked message, whose head was handed on.
    ready: VecDeque<Bytes>,
    /// The charge for the message that was unpacked last.
    reservation: Reservation,
    intake: Arc<BodyIntake>,
}

type GzipPart = Result<Bytes, axum::Error>;

impl Messages {
    /// The next bytes, until the body ends.
    async fn next(mut self) -> Option<(GzipPart, Self)> {
        let part = self.part().await?;
        Some((part, self))
    }

    async fn part(&mut self) -> Option<GzipPart> {
        if let Some(piece) = self.ready.pop_front() {
            return Some(Ok(piece));
        }
        // A poll for more of a stream means that the last message was read. A unary call uses it until its response begins.
        if self.intake.has_answered() {
            self.hold(self.intake.reserve());
        }
        loop {
            if self.passing > 0 && !self.buf.is_empty() {
                let part = self.passing.min(self.buf.len());
                self.passing -= part;
                return Some(Ok(self.buf.split_to(part).freeze()));
            }
            if self.passing == 0
                && let Some((head, _)) = self.buf.split_first_chunk::<HEAD>()
            {
                let [flag, length @ ..] = *head;
                let length = u32::from_be_bytes(length) as usize;
                if flag != 1 || length > self.most {
                    // Too long or not compressed: it is handed on unchanged, and the library answers what is wrong with it.
                    // Nothing of it is collected here.
                    self.passing = HEAD + length;
                    continue;
                }
                if self.buf.len() >= HEAD + length {
                    self.buf.advance(HEAD);
                    let packed = self.buf.split_to(length).freeze();
                    return Some(self.unpack(packed).await);
                }
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buf.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Some(Err(error)),
                // The end within a message: the library answers what is wrong with that.
                None if !self.buf.is_empty() => self.passing = self.buf.len(),
                None => return None,
            }
        }
    }

    /// Holds this charge instead of the one before.
    fn hold(&mut self, reservation: Reservation) {
        self.intake.holds_unpacked(!reservation.is_empty());
        self.reservation = reservation;
    }

    /// Unpacks a message, and returns its new head.
    async fn unpack(&mut self, packed: Bytes) -> GzipPart {
        // The library asks for a message only when it has read the one before.
        self.hold(self.intake.reserve());
        let packed_bytes = packed.len();
        let counted = UnpackedCount::default();
        let message = GunzipState {
            source: GzDecoder::new(CompressedLimit::new(packed, counted.clone())),
            counted,
            pieces: VecDeque::new(),
            bytes: 0,
            most: self.most,
        };
        match unpack(message, packed_bytes, &self.intake).await {
            // A head with one byte too many is enough for the library to refuse it; the rest is never unpacked.
            Ok((message, _)) if message.bytes > self.most => Ok(head(0, self.most + 1)),
            Ok((message, reservation)) => {
                self.hold(reservation);
                self.ready = message.pieces;
                Ok(head(0, message.bytes))
            }
            // A compressed message of one byte, which is no gzip: the library fails on it as on the original.
            Err(UnpackError::Refused(_)) => {
                self.ready = VecDeque::from([Bytes::from_static(&[0])]);
                Ok(head(1, 1))
            }
            Err(UnpackError::Full) => Err(axum::Error::new(overloaded().to_status())),
            Err(UnpackError::Panicked) => Err(axum::Error::new("unpacking the message panicked")),
        }
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        // A unary call drops its body after the only message and then works on it, so the charge stays until its response.
        let none = self.intake.reserve();
        let reservation = std::mem::replace(&mut self.reservation, none);
        self.intake.keep(reservation);
    }
}

struct GunzipState {
    source: GzDecoder<CompressedLimit>,
    counted: UnpackedCount,
    pieces: VecDeque<Bytes>,
    /// The sum of all pieces.
    bytes: usize,
    /// Once there are more, the rest is not unpacked.
    most: usize,
}

impl Unpacking for GunzipState {
    type Error = io::Error;

    fn step(&mut self, bytes: usize) -> io::Result<bool> {
        let mut piece = Vec::new();
        let read = (&mut self.source)
            .take(bytes as u64)
            .read_to_end(&mut piece)?;
        if read > 0 {
            self.pieces.push_back(piece.into());
        }
        self.bytes += read;
        self.counted.set(self.bytes);
        Ok(read < bytes || self.bytes > self.most)
    }

    fn held_bytes(&self) -> usize {
        self.bytes
    }
}

fn head(flag: u8, length: usize) -> Bytes {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let [a, b, c, d] = length.to_be_bytes();
    Bytes::copy_from_slice(&[flag, a, b, c, d])
}

const HEAD: usize = 5;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use prometheus::{IntCounter, IntGauge};

    use super::*;
    use crate::auth::identity::CallerIdentity;
    use crate::http::body_budget::{BodyBudget, Config};
    use crate::http::intake::{BodyFailure, Framing};

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn message(flag: u8, bytes: &[u8]) -> Vec<u8> {
        [&head(flag, bytes.len())[..], bytes].concat()
    }

    fn request(bytes: &[u8], size: usize, in_use: &IntGauge) -> Request<Body> {
        let refused = IntCounter::new("refused", "-").unwrap();
        let budget = BodyBudget::new(Config::default(), in_use.clone(), refused);
        let intake = BodyIntake::new(
            Arc::new(budget),
            CallerIdentity::Anonymous(None),
            0,
            std::time::Duration::from_secs(30),
        );
        let parts: Vec<_> = bytes.chunks(size).map(Bytes::copy_from_slice).collect();
        let body = Body::from_stream(stream::iter(parts.into_iter().map(Ok::<_, io::Error>)));
        let request = Request::builder().header("grpc-encoding", "gzip");
        request.extension(intake).body(body).unwrap()
    }

    async fn read(bytes: &[u8], size: usize, most: usize) -> Vec<u8> {
        let in_use = IntGauge::new("used", "-").unwrap();
        let request = unpacked(request(bytes, size, &in_use), most);
        request
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes()
            .into()
    }

    #[tokio::test]
    async fn d_47_compressed_messages_are_unpacked_and_others_pass_unchanged() {
        let large = vec![b'a'; 3 << 20];
        let sent = [
            message(1, &gzip(b"one")),
            message(0, b"two"),
            message(0, b""),
            message(1, &gzip(&large)),
            message(1, &gzip(b"")),
        ]
        .concat();
        let plain = [&b"one"[..], b"two", b"", &large, b""];
        let expect = plain.map(|bytes| message(0, bytes)).concat();
        for size in [1, 7, sent.len()] {
            assert!(read(&sent, size, large.len()).await == expect, "{size}");
        }
    }

    #[tokio::test]
    async fn d_47_malformed_messages_are_left_to_the_library_to_refuse() {
        // Longer than allowed: only a head is handed on.
        let bomb = message(1, &gzip(&vec![0; 8 << 20]));
        assert_eq!(read(&bomb, 100, 1 << 20).await[..5], head(0, (1 << 20) + 1));
        for (sent, expect) in [
            (message(1, b"no gzip"), message(1, &[0])),
            (message(7, b"unknown flag"), message(7, b"unknown flag")),
            (
                message(0, b"cut off")[..8].to_vec(),
                message(0, b"cut off")[..8].to_vec(),
            ),
            (
                message(1, &gzip(b"cut off"))[..20].to_vec(),
                message(1, &gzip(b"cut off"))[..20].to_vec(),
            ),
        ] {
            assert_eq!(read(&sent, 3, 1 << 20).await, expect);
        }
    }

    /// The body of a stream may be silent for as long as it likes, and holds nothing for that.
    #[tokio::test]
    async fn d_47_a_message_that_was_read_is_refunded() {
        let in_use = IntGauge::new("used", "-").unwrap();
        let sent = message(1, &gzip(&vec![b'a'; 3 << 20]));
        let request = unpacked(request(&sent, 4096, &in_use), 4 << 20);
        let intake = request
            .extensions()
            .get::<Arc<BodyIntake>>()
            .unwrap()
            .clone();
        intake.answered();
        let mut body = request.into_body();
        let mut taken = 0;
        while taken < HEAD + (3 << 20) {
            assert!(taken == 0 || in_use.get() == 3 << 20);
            taken += body
                .frame()
                .await
                .unwrap()
                .unwrap()
                .into_data()
                .unwrap()
                .len();
        }
        assert!(body.frame().await.is_none());
        assert_eq!(in_use.get(), 0);
    }

    /// Calls of one message, whose body never ends: little of it came, and much of it is charged.
    #[tokio::test(start_paused = true)]
    async fn d_47_unpacked_bytes_are_refunded_when_the_client_is_too_slow() {
        for bytes in [250 << 10, 3 << 20] {
            let in_use = IntGauge::new("used", "-").unwrap();
            let sent = message(1, &gzip(&vec![b'a'; bytes]));
            // So many that a body whose pace nobody watches ends at last.
            let drips = stream::iter(0..100).then(|_| async {
                tokio::time::sleep(std::time::Duration::from_secs(29)).await;
                Ok::<_, io::Error>(Bytes::from_static(b"x"))
            });
            let body = Body::from_stream(stream::iter([Ok(Bytes::from(sent))]).chain(drips));
            let request = request(b"", 1, &in_use);
            let intake = request
                .extensions()
                .get::<Arc<BodyIntake>>()
                .unwrap()
                .clone();
            let request = request.map(|_| intake.watching(body, Framing::Grpc));
            let read = unpacked(request, 4 << 20).into_body().collect().await;
            assert!(read.is_err(), "{bytes}");
            assert_eq!(intake.failure(), Some(BodyFailure::Slow), "{bytes}");
            intake.answered();
            assert_eq!(in_use.get(), 0);
        }
    }

    /// The first column: bytes of the message. Up to 4 KiB are not charged.
    #[tokio::test]
    async fn d_47_unpacked_bytes_are_charged_until_the_response() {
        for (bytes, charged) in [
            (4 << 10, 0),
            (250 << 10, 250 << 10),
            (256 << 10, 256 << 10),
            (3 << 20, 3 << 20),
        ] {
            let in_use = IntGauge::new("used", "-").unwrap();
            let sent = message(1, &gzip(&vec![b'a'; bytes]));
            let request = unpacked(request(&sent, 4096, &in_use), 4 << 20);
            let intake = request
                .extensions()
                .get::<Arc<BodyIntake>>()
                .unwrap()
                .clone();
            request.into_body().collect().await.unwrap();
            assert_eq!(in_use.get(), charged, "{bytes}");
            intake.answered();
            assert_eq!(in_use.get(), 0);
        }
    }
}
