//! Fuzz entry points: arbitrary bytes as a compressed body and as a gRPC message.
//!
//! Invariants: nothing decompresses to more than the limit, and the headers of a refusal have a bounded size.

use axum::body::Bytes;
use prost::Message;
use sapwood_proto::generate::{Mapper, RequestLimits, Signature};
use sapwood_proto::generated::inference::ModelInferRequest;

use super::compression::Coding;
use super::decompression::DecompressedBody;
use super::request_error::RequestError;
use crate::http::unpacking::Unpacking;

/// Bytes that a body may unpack to.
const UNPACKED_BYTES_MAX: usize = 1 << 20;
/// Bytes that are unpacked at a time.
const STEP_BYTES: usize = 100_000;
/// Bytes of the headers of a refusal.
const REJECTION_BYTES_MAX: usize = 8 << 10;

/// Unpacks `bytes` in every coding.
///
/// # Panics
/// If an invariant does not hold.
pub fn decompress(bytes: &[u8]) {
    for coding in [Coding::Gzip, Coding::Deflate, Coding::Zstd] {
        let packed = Bytes::copy_from_slice(bytes);
        let mut unpacking = DecompressedBody::new(coding, packed, UNPACKED_BYTES_MAX);
        while let Ok(false) = unpacking.step(STEP_BYTES) {}
        assert!(unpacking.into_bytes().len() <= UNPACKED_BYTES_MAX + 1);
    }
}

/// Reads `bytes` as a message, with the limits that servers have, and writes the refusal as it would be sent.
///
/// # Panics
/// If an invariant does not hold.
pub fn grpc(bytes: &[u8]) {
    let Ok(message) = ModelInferRequest::decode(bytes) else {
        return;
    };
    let limits = RequestLimits::default();
    let mapper = Mapper {
        model: "m",
        signature: &Signature::union(),
        known: &[],
        strict: false,
        limits: &limits,
    };
    let Err(refused) = mapper.message(&message) else {
        return;
    };
    let answer = super::grpc::status(&RequestError::from(refused)).into_http::<()>();
    let lengths = answer.headers().iter();
    let length: usize = lengths
        .map(|(name, value)| name.as_str().len() + value.len())
        .sum();
    assert!(length <= REJECTION_BYTES_MAX, "{length} bytes of headers");
}
