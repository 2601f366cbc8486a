//! The codec of gRPC responses: computes and bounds the decoded size of a message before decoding it (D-47). An empty
//! tensor is two bytes on the wire and hundreds as a struct.

use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

/// Encodes messages `Q` and decodes messages `A`.
pub(super) struct BoundedCodec<Q, A> {
    size: fn(&[u8]) -> usize,
    of: PhantomData<(Q, A)>,
}

impl<Q, A> BoundedCodec<Q, A> {
    /// Creates a codec; `size` returns how many bytes an encoded `A` takes once it is decoded.
    pub(super) const fn by(size: fn(&[u8]) -> usize) -> Self {
        Self {
            size,
            of: PhantomData,
        }
    }
}

impl<Q, A> Codec for BoundedCodec<Q, A>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    type Encode = Q;
    type Decode = A;
    type Encoder = <ProstCodec<Q, A> as Codec>::Encoder;
    type Decoder = Self;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<Q, A>::default().encoder()
    }

    fn decoder(&mut self) -> Self {
        Self::by(self.size)
    }
}

impl<Q, A: Message + Default> Decoder for BoundedCodec<Q, A> {
    type Item = A;
    type Error = Status;

    fn decode(&mut self, src: &mut DecodeBuf<'_>) -> Result<Option<A>, Status> {
        // Cheap: the message is contiguous in tonic's buffer, so this shares its memory.
        let bytes = src.copy_to_bytes(src.remaining());
        // Counted on the encoded form: after `decode` the memory would be taken already.
        if (self.size)(&bytes) > DECODED_BYTES_MAX {
            return Err(Status::out_of_range(TAKES_TOO_MUCH));
        }
        let message = A::decode(bytes);
        message.map(Some).map_err(|error| {
            // The same status as the library's own codec returns.
            Status::internal(error.to_string())
        })
    }
}

/// The error for a message that would take more than [`DECODED_BYTES_MAX`].
pub(super) const TAKES_TOO_MUCH: &str = "message takes too much memory once it is decoded";
/// The maximum of decoded bytes of an answer: twice the limit of its text.
pub(super) const DECODED_BYTES_MAX: usize = 32 << 20;
