//! The codec of calls of models: what a message takes once it is decoded is bounded and charged before it is (D-47).

use std::sync::Arc;

use bytes::Buf;
use prost::Message;
use sapwood_proto::generate::{Limits, decoded_bytes};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use super::status;
use crate::body_budget::{Reservation, overloaded};
use crate::generate::failure::Failure;
use crate::intake::Intake;

/// Messages of the schema, of which those that come are `ModelInferRequest`s if they are measured.
pub(super) struct Measured<A, Q> {
    inner: ProstCodec<A, Q>,
    limits: Limits,
    /// What they are charged to; `None` leaves them unmeasured.
    intake: Option<Arc<Intake>>,
}

impl<A, Q> Measured<A, Q> {
    pub(super) fn new(limits: Limits, intake: Option<Arc<Intake>>) -> Self {
        Self {
            inner: ProstCodec::default(),
            limits,
            intake,
        }
    }
}

impl<A, Q> Codec for Measured<A, Q>
where
    A: Message + Send + 'static,
    Q: Message + Default + Send + 'static,
{
    type Encode = A;
    type Decode = Q;
    type Encoder = <ProstCodec<A, Q> as Codec>::Encoder;
    type Decoder = Measuring<<ProstCodec<A, Q> as Codec>::Decoder>;

    fn encoder(&mut self) -> Self::Encoder {
        self.inner.encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        let intake = self.intake.clone();
        let charged = intake.map(|intake| (intake.reserve(), intake));
        Measuring {
            inner: self.inner.decoder(),
            limits: self.limits.clone(),
            charged,
        }
    }
}

/// The decoder with what its last message is charged.
pub(super) struct Measuring<D> {
    inner: D,
    limits: Limits,
    charged: Option<(Reservation, Arc<Intake>)>,
}

impl<D: Decoder<Error = Status>> Decoder for Measuring<D> {
    type Item = D::Item;
    type Error = Status;

    fn decode(&mut self, src: &mut DecodeBuf<'_>) -> Result<Option<D::Item>, Status> {
        if let Some((reservation, _)) = &mut self.charged {
            let decoded = decoded_bytes(src.chunk());
            let admitted = self.limits.admit_message(decoded);
            admitted.map_err(|refused| status(&Failure::from(refused)))?;
            // Nothing can wait here, where the message is there already.
            let held = reservation.try_hold(decoded);
            held.map_err(|_| overloaded().to_status())?;
        }
        self.inner.decode(src)
    }
}

/// The message of a call of one is worked on until its answer begins.
impl<D> Drop for Measuring<D> {
    fn drop(&mut self) {
        if let Some((reservation, intake)) = self.charged.take() {
            intake.keep(reservation);
        }
    }
}
