//! Reads a request body up to its limit and decodes it (TR-209, TR-315, TR-316). The middleware discards what a
//! refused client still sends.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use bytes::BytesMut;
use http::request::Parts;
use http::{HeaderMap, Version, header};
use http_body_util::BodyExt;
use sapwood_kernel::pool::{BlockingPool, TaskSize};
use sapwood_proto::code::Code;
use sapwood_proto::generate::InvalidRequest;

use super::compression::Coding;
use super::decompression::DecompressedBody;
use super::options::Config;
use super::request_error::RequestError;
use crate::http::body_budget::{BudgetFull, overloaded};
use crate::http::compressed_limit::{STEP, UNPACKED_HERE};
use crate::http::drain_body::read_away;
use crate::http::intake::BodyIntake;

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
                self.unpack(DecompressedBody::new(coding, bytes, max), max)
                    .await
            }
        }
    }

    /// Decompresses a body. Each piece is charged before it is allocated, and all but small bodies are decompressed on
    /// threads of the pool.
    #[expect(
        clippy::needless_pass_by_ref_mut,
        reason = "shared over an await, an upload would have to be Sync"
    )]
    async fn unpack(
        &mut self,
        mut unpacking: DecompressedBody,
        max: usize,
    ) -> Result<Bytes, RequestError> {
        let mut reservation = self.intake.as_ref().map(|intake| intake.reserve());
        // A small body is unpacked in place and without a charge, up to one step, which costs less than moving it to
        // another thread. If it holds more, the loop charges all of it.
        let mut ended = self.read <= UNPACKED_HERE as u64 && unpacking.step(STEP)?;
        while !ended {
            let part = STEP.min(max);
            if let Some(reservation) = &mut reservation
                && let Err(BudgetFull) = reservation.hold(unpacking.held_bytes() + part).await
            {
                if let Some(intake) = &self.intake {
                    intake.overrun();
                }
                return Err(overloaded().into());
            }
            // One step at a time, and not the whole: between two of them the request may be dropped, and the pool serves
            // others.
            let turn = self.intake.as_ref().map_or(0, |intake| intake.turn());
            let step = BlockingPool::global().run_only(turn, TaskSize::Large, move || {
                let ended = unpacking.step(part);
                (unpacking, ended)
            });
            let defect = |_| RequestError::new(Code::Internal, "the body could not be decoded");
            let (given_back, step) = step.await.map_err(defect)?;
            unpacking = given_back;
            ended = step?;
        }
        if let (Some(intake), Some(mut reservation)) = (&self.intake, reservation) {
            // The last step was charged in full. What is left stays charged until the response begins.
            reservation.shrink(unpacking.held_bytes());
            intake.keep(reservation);
        }
        Ok(unpacking.into_bytes())
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
                    // Reserved at once: memory that was not written to costs nothing, and growing would copy the body.
                    let length = self.length.and_then(|length| usize::try_from(length).ok());
                    all.reserve(length.unwrap_or(0).min(max));
                    all.extend_from_slice(&first);
                }
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
