//! Reads a request body up to its limit and decodes it (TR-209, TR-315, TR-316). The middleware discards what a
//! refused client still sends.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use bytes::BytesMut;
use http::request::Parts;
use http::{HeaderMap, Version, header};
use http_body_util::BodyExt;
use sapwood_proto::code::Code;
use sapwood_proto::generate::InvalidRequest;

use super::compression::Coding;
use super::decompression::DecompressedBody;
use super::options::Config;
use super::request_error::RequestError;
use crate::http::body_budget::overloaded;
use crate::http::drain_body::read_away;
use crate::http::intake::BodyIntake;
use crate::http::unpacking::{UnpackError, unpack};

/// A request body that was not read yet.
pub(super) struct Upload {
    body: Body,
    length: Option<u64>,
    chunked: bool,
    read: u64,
    /// The charges of the request to the byte budget.
    intake: Option<Arc<BodyIntake>>,
}

/// The endpoint's texts for unknown encodings and bodies that are too large.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EncodingErrorStyle {
    Generate,
    Infer,
    /// [`EncodingErrorStyle::Infer`] with raw bytes after its JSON, or in its place.
    Raw,
}

impl EncodingErrorStyle {
    /// The error for a body of this many bytes.
    pub(super) fn too_large(self, bytes: u64, max: usize) -> RequestError {
        match self {
            Self::Generate | Self::Infer => InvalidRequest::JsonBytes { bytes, max }.into(),
            Self::Raw => InvalidRequest::BodyBytes { bytes, max }.into(),
        }
    }
}

impl Upload {
    pub(super) fn new(parts: &Parts, body: Body) -> Self {
        let headers = &parts.headers;
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        Self {
            body,
            length: text(header::CONTENT_LENGTH).and_then(|length| length.parse().ok()),
            // HTTP/2 has no chunks, and the header means nothing there.
            chunked: parts.version < Version::HTTP_2
                && headers.contains_key(header::TRANSFER_ENCODING),
            read: 0,
            intake: parts.extensions.get().cloned(),
        }
    }

    /// Reads the whole body, and decodes it as the headers say.
    pub(super) async fn whole(
        mut self,
        headers: &HeaderMap,
        style: EncodingErrorStyle,
        config: &Config,
    ) -> Result<Bytes, RequestError> {
        // TR-203: the encoding is checked before the size, and both before a byte is read. The middleware discards the
        // rest.
        let coding = Coding::of(headers, style, config)?;
        let max = config.limits.input_bytes;
        if let Some(length) = self.length
            && length > max as u64
        {
            return Err(style.too_large(length, max));
        }
        // The limit of the content holds for the compressed bytes as well: compression that makes a body larger is
        // refused.
        let bytes = self.collect(style, max, config).await?;
        match coding {
            Coding::Identity => Ok(bytes),
            coding => {
                let packed = bytes.len();
                let body = DecompressedBody::new(coding, bytes, max);
                let unpacked = self.unpack(packed, body).await?;
                // Nothing was unpacked beyond the first byte that is too many.
                if unpacked.len() > max {
                    return Err(style.too_large(unpacked.len() as u64, max));
                }
                Ok(unpacked)
            }
        }
    }

    /// Decompresses a body of `packed` bytes, which stay charged until the response begins.
    async fn unpack(self, packed: usize, body: DecompressedBody) -> Result<Bytes, RequestError> {
        let defect = |message| RequestError::new(Code::Internal, message);
        let intake = self.intake.as_ref();
        let intake = intake.ok_or_else(|| defect("the request has no byte budget"))?;
        match unpack(body, packed, intake).await {
            Ok((unpacked, reservation)) => {
                intake.keep(reservation);
                Ok(unpacked.into_bytes())
            }
            Err(UnpackError::Refused(error)) => Err(error),
            Err(UnpackError::Full) => Err(overloaded().into()),
            Err(UnpackError::Panicked) => Err(defect("the body could not be decoded")),
        }
    }

    async fn collect(
        &mut self,
        style: EncodingErrorStyle,
        max: usize,
        config: &Config,
    ) -> Result<Bytes, RequestError> {
        let chunks_max = config.http_chunks;
        let mut all = BytesMut::new();
        let mut first = Bytes::new();
        let mut chunks = 0_usize;
        while let Some(data) = self.frame().await? {
            // A piece costs work beyond its bytes, so their number has a limit of its own (TR-316).
            chunks += usize::from(!data.is_empty());
            if self.chunked && chunks > chunks_max {
                let message = format!(
                    "Chunked request body exceeds maximum of {chunks_max} non-empty chunks. Send fewer or larger HTTP \
                     chunks."
                );
                return Err(RequestError::new(Code::InvalidRequest, message));
            }
            if all.is_empty() && first.is_empty() {
                first = data;
            } else {
                if all.is_empty() {
                    all.extend_from_slice(&first);
                }
                self.make_room(&mut all, data.len(), max);
                all.extend_from_slice(&data);
            }
            if all.len().max(first.len()) > max {
                // The text names the size of the body (TR-315), which is known at its end. The rest is discarded and not
                // charged, up to the bytes that any refused body is read for.
                if let Some(intake) = &self.intake {
                    intake.discard();
                    let most = intake.drain_bytes().saturating_sub(self.read);
                    self.read += read_away(&mut self.body, most).await;
                }
                return Err(style.too_large(self.read, max));
            }
        }
        // Nearly every body is one piece, which is not copied.
        Ok(if all.is_empty() { first } else { all.freeze() })
    }

    /// Makes room in `all` for the next `bytes`, and for some of those that follow.
    fn make_room(&self, all: &mut BytesMut, bytes: usize, max: usize) {
        if all.capacity() - all.len() >= bytes {
            return;
        }
        let length = self.length.and_then(|length| usize::try_from(length).ok());
        let rest = length.unwrap_or(0).min(max).saturating_sub(all.len());
        // In large steps, because each copies the body; but not all at once: a huge page costs 2 MiB as soon as its first byte
        // is written, and of a few bytes nothing is charged (D-47).
        all.reserve(bytes.max(rest.min(all.len().saturating_mul(GROWTH))));
    }

    async fn frame(&mut self) -> Result<Option<Bytes>, RequestError> {
        while let Some(frame) = self.body.frame().await {
            let broken =
                |_| RequestError::new(Code::InvalidRequest, "the request body ended early");
            // Other frames are trailers, which mean nothing here.
            if let Ok(data) = frame.map_err(broken)?.into_data() {
                self.read += data.len() as u64;
                return Ok(Some(data));
            }
        }
        Ok(None)
    }
}

/// Room for the rest of a body, as a multiple of what has arrived.
const GROWTH: usize = 7;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use http::Request;
    use prometheus::{IntCounter, IntGauge};

    use super::*;
    use crate::auth::identity::CallerIdentity;
    use crate::http::body_budget::{self, BodyBudget};

    /// Room is made for what has arrived, and not for what a header declares.
    #[tokio::test]
    async fn d_47_a_length_alone_gets_no_room_for_its_body() {
        let request = Request::builder().header(header::CONTENT_LENGTH, 64 << 20);
        let (parts, body) = request.body(Body::empty()).unwrap().into_parts();
        let upload = Upload::new(&parts, body);
        let mut all = BytesMut::new();
        for (bytes, most) in [(1, 64), (1, 64), (1 << 20, 2 << 20), (1 << 20, 9 << 20)] {
            upload.make_room(&mut all, bytes, 64 << 20);
            all.extend_from_slice(&vec![0; bytes]);
            let room = all.capacity();
            assert!(room <= most, "{room} bytes after {}", all.len());
        }
    }

    /// The first column: bytes of the content. Up to 4 KiB are not charged.
    #[tokio::test]
    async fn d_47_decompressed_bytes_are_charged_until_the_response() {
        for (bytes, charged) in [
            (4 << 10, 0),
            (250 << 10, 250 << 10),
            (256 << 10, 256 << 10),
            (3 << 20, 3 << 20),
        ] {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(&vec![b'a'; bytes]).unwrap();
            let in_use = IntGauge::new("used", "-").unwrap();
            let refused = IntCounter::new("refused", "-").unwrap();
            let budget = BodyBudget::new(body_budget::Config::default(), in_use.clone(), refused);
            let caller = CallerIdentity::Anonymous(None);
            let intake = BodyIntake::new(Arc::new(budget), caller, 0, Duration::from_secs(30));
            let request = Request::builder()
                .header(header::CONTENT_ENCODING, "gzip")
                .extension(Arc::clone(&intake));
            let request = request.body(Body::from(gzip.finish().unwrap())).unwrap();
            let (parts, body) = request.into_parts();
            let upload = Upload::new(&parts, body);
            let read = upload
                .whole(
                    &parts.headers,
                    EncodingErrorStyle::Generate,
                    &Config::default(),
                )
                .await;
            assert_eq!(read.map(|read| read.len()).ok(), Some(bytes));
            assert_eq!(in_use.get(), charged, "{bytes}");
            intake.answered();
            assert_eq!(in_use.get(), 0);
        }
    }
}
