//! The codec of gRPC calls: bounds and charges the decoded size of a message before decoding it, and decodes large
//! messages off the async workers (D-47).
//!
//! ```text
//!   tonic ─► Encoded, as received ─► measured ─► charged, as soon as there is room ─► decoded
//!                                    └──────── large ones on the pool's threads ────────┘
//! ```

use std::any::TypeId;
use std::marker::PhantomData;
use std::sync::Arc;

use axum::body::Bytes;
use bytes::Buf;
use prost::Message;
use sapwood_kernel::Error;
use sapwood_kernel::limits::PROMPT_BYTES;
use sapwood_proto::generate::{RequestLimits, decoded_bytes};
use sapwood_proto::generated::inference::ModelInferRequest;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use super::status;
use crate::faces::generate::offload::offload;
use crate::faces::generate::request_error::RequestError;
use crate::http::body_budget::{Reservation, overloaded};
use crate::http::intake::BodyIntake;

/// Encodes messages of type `A`, and leaves received messages encoded.
pub(super) struct DeferredCodec<A>(PhantomData<A>);

impl<A> Default for DeferredCodec<A> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<A: Message + Default + 'static> Codec for DeferredCodec<A> {
    type Encode = A;
    type Decode = Encoded;
    type Encoder = <ProstCodec<A, A> as Codec>::Encoder;
    type Decoder = MessageSplitter;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<A, A>::default().encoder()
    }

    fn decoder(&mut self) -> MessageSplitter {
        MessageSplitter
    }
}

/// Takes the bytes of one message out of the receive buffer.
pub(super) struct MessageSplitter;

impl Decoder for MessageSplitter {
    type Item = Encoded;
    type Error = Status;

    fn decode(&mut self, src: &mut DecodeBuf<'_>) -> Result<Option<Encoded>, Status> {
        // The library gives exactly one message. Its buffer is split here, and not copied.
        Ok(Some(Encoded(src.copy_to_bytes(src.remaining()))))
    }
}

/// A message as it was received.
pub(super) struct Encoded(Bytes);

impl Encoded {
    /// Decodes the message, and returns what it is charged while it is in use. `intake` is that of its request.
    ///
    /// # Errors
    /// It is malformed, too much for `limits` once it is decoded, or finds no room in the byte budget.
    pub(super) async fn decode<Q>(
        self,
        limits: &RequestLimits,
        intake: Option<&Arc<BodyIntake>>,
    ) -> Result<(Q, Option<Reservation>), Status>
    where
        Q: Message + Default + 'static,
    {
        let Self(bytes) = self;
        // Only requests for inference decode to many times their size: an empty tensor takes two bytes on the wire, and
        // far more in memory. Other messages are small, or hold little but texts.
        let is_measured = TypeId::of::<Q>() == TypeId::of::<ModelInferRequest>();
        let Some(intake) = intake.filter(|_| is_measured) else {
            return Ok((decoded(bytes)?, None));
        };
        let (length, turn) = (bytes.len(), intake.turn());
        let panicked = |error: Error| Status::internal(error.to_string());
        // Measured without decoding, so that a message which would be too much never is in memory.
        let measured = bytes.clone();
        let size = offload(length, turn, move || decoded_bytes(&measured)).await;
        let size = size.map_err(panicked)?;
        let admitted = limits.admit_message(size);
        admitted.map_err(|refused| status(&RequestError::from(refused)))?;
        // The limit before the budget: what can never be admitted must not wait for room.
        let mut reservation = intake.reserve();
        if reservation.hold(size).await.is_err() {
            intake.overrun();
            return Err(overloaded().to_status());
        }
        let message = offload(length, turn, move || decoded(bytes)).await;
        Ok((message.map_err(panicked)??, Some(reservation)))
    }

    /// The same for a message of a stream, whose bytes are refunded when the next one is read: raw contents, which are views of
    /// them, are charged with the message.
    pub(super) async fn decode_of_stream(
        self,
        limits: &RequestLimits,
        intake: Option<&Arc<BodyIntake>>,
    ) -> Result<(ModelInferRequest, Option<Reservation>), Status> {
        let (message, mut reservation): (ModelInferRequest, _) =
            self.decode(limits, intake).await?;
        if let (Some(reservation), Some(intake)) = (&mut reservation, intake) {
            let raw: usize = message.raw_input_contents.iter().map(Bytes::len).sum();
            // At most a prompt: its bytes are still charged where they arrived, and the largest message would not fit twice.
            let bytes = reservation.bytes() + raw.min(PROMPT_BYTES);
            if reservation.hold(bytes).await.is_err() {
                intake.overrun();
                return Err(overloaded().to_status());
            }
        }
        Ok((message, reservation))
    }
}

fn decoded<Q: Message + Default>(bytes: Bytes) -> Result<Q, Status> {
    // The code and text of the library's own codec, which clients know.
    Q::decode(bytes).map_err(|error| Status::internal(error.to_string()))
}
