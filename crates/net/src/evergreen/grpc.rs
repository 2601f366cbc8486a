//! Evergreen over gRPC, for either side: the codec, and statuses as trailers.
//!
//! Messages are converted directly between the session's form and the transport's buffer; the generated stubs would
//! need a second set of structs (EV-985), and allocate 16 KiB per call before any data arrives.

use bytes::{Buf, Bytes};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{Reason, Status, WireMessage, protobuf};
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// The path of the one method (section 1).
pub const PATH: &str = "/evergreen.v2.EvergreenService/StartSession";
/// The full name of the service.
pub const SERVICE: &str = "evergreen.v2.EvergreenService";
/// The maximum of bytes of one message of a server, and of a client unless the server sets another limit; a larger one
/// ends the session with `MESSAGE_TOO_LARGE` (EV-703).
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// The codec of a client.
#[derive(Clone, Copy, Debug, Default)]
pub struct GrpcCodec;

/// A message that a server received.
#[derive(Debug)]
pub enum ReceivedMessage {
    /// A decoded message.
    Message(WireMessage),
    /// A long one, to be decoded with [`read`] where that does not delay other work.
    Unread(Bytes),
}

/// The codec of a server, which leaves long messages to the receiver to decode.
#[derive(Clone, Copy, Debug)]
pub struct ServerWire {
    /// From this number of bytes on a message is long.
    pub long_bytes: usize,
}

/// Decodes a long message.
///
/// # Errors
/// The decoder's error.
pub fn read(bytes: Bytes) -> Result<WireMessage, Status> {
    protobuf::decode(bytes)
}

impl Codec for ServerWire {
    type Encode = WireMessage;
    type Decode = ReceivedMessage;
    type Encoder = GrpcCodec;
    type Decoder = Self;

    fn encoder(&mut self) -> GrpcCodec {
        GrpcCodec
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Decoder for ServerWire {
    type Item = ReceivedMessage;
    type Error = tonic::Status;

    fn decode(
        &mut self,
        buf: &mut DecodeBuf<'_>,
    ) -> Result<Option<ReceivedMessage>, tonic::Status> {
        let len = buf.remaining();
        // Decoding it here would delay every stream of the connection, whose task polls this decoder.
        if len >= self.long_bytes {
            return Ok(Some(ReceivedMessage::Unread(buf.copy_to_bytes(len))));
        }
        Ok(GrpcCodec.decode(buf)?.map(ReceivedMessage::Message))
    }

    fn buffer_settings(&self) -> BufferSettings {
        Decoder::buffer_settings(&GrpcCodec)
    }
}

impl Codec for GrpcCodec {
    type Encode = WireMessage;
    type Decode = WireMessage;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for GrpcCodec {
    type Item = WireMessage;
    type Error = tonic::Status;

    fn encode(
        &mut self,
        message: WireMessage,
        buf: &mut EncodeBuf<'_>,
    ) -> Result<(), tonic::Status> {
        protobuf::encode(&message, buf);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, YIELD_BYTES)
    }
}

impl Decoder for GrpcCodec {
    type Item = WireMessage;
    type Error = tonic::Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<WireMessage>, tonic::Status> {
        protobuf::decode(&mut *buf)
            .map(Some)
            .map_err(|status| to_grpc(&status))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, YIELD_BYTES)
    }
}

/// Converts a status to trailers: code, message and the encoded details.
#[must_use]
pub fn to_grpc(status: &Status) -> tonic::Status {
    let code = tonic::Code::from_i32(i32::from(status.code.grpc()));
    tonic::Status::with_details(code, status.message.as_str(), status.encode())
}

/// Converts the trailers of a peer.
#[must_use]
pub fn from_grpc(status: &tonic::Status) -> Status {
    // The details come first: they carry the reason, which codes and texts only hint at (EV-902).
    match Status::decode(status.details()) {
        Some(Some(full)) => full,
        // Then the errors of the library itself: by their codes they would count as the server's.
        _ => unframed(status)
            .or_else(|| cut(status))
            .unwrap_or_else(|| plain(status)),
    }
}

/// Converts the error that ended the stream of a client, which sends no trailers and may send `max` bytes per message:
/// the library's error, in the protocol's terms (EV-703).
#[must_use]
pub fn from_client(status: &tonic::Status, max: usize) -> Status {
    let from_transport = std::error::Error::source(status).is_some();
    // The codec's own errors carry details, which take precedence over the code: another limit may have the code of a
    // message that is too large.
    if let Some(Some(ours)) = Status::decode(status.details()) {
        return ours;
    }
    // For a compressed message the library uses the second code.
    let too_much = [tonic::Code::OutOfRange, tonic::Code::ResourceExhausted];
    if too_much.contains(&status.code()) && !from_transport {
        return too_large(max);
    }
    // An error with a cause below gRPC and without details is a connection that was cut or reset (EV-109).
    if from_transport && status.details().is_empty() {
        return Status::new(Reason::Cancelled, "the client's connection was lost");
    }
    from_grpc(status)
}

/// Returns whether a stream of messages ended because its connection was cut, and not because the peer reset it or sent
/// a final status (EV-940).
#[must_use]
pub fn was_cut(status: &tonic::Status) -> bool {
    // A cancel with a cause is a stream that the peer has reset on purpose.
    let from_transport = std::error::Error::source(status).is_some();
    from_transport && status.details().is_empty() && status.code() != tonic::Code::Cancelled
}

/// Detects a broken connection to a server, which the library reports as unknown or internal: an error with a cause
/// below gRPC was not sent by the server.
fn cut(status: &tonic::Status) -> Option<Status> {
    let broken = std::error::Error::source(status).is_some() && status.details().is_empty();
    let message = "the connection to the server was lost: try again";
    broken.then(|| Status::other(Code::Unavailable, "", message))
}

/// Detects a message that the library could not decode from its frame. A server may send the same codes; only the
/// library's texts distinguish the two.
fn unframed(status: &tonic::Status) -> Option<Status> {
    // Errors of the transport have a cause, the library's complaints about frames have none.
    if std::error::Error::source(status).is_some() {
        return None;
    }
    let is_the_librarys = LIBRARY_TEXTS
        .iter()
        .any(|text| status.message().starts_with(text));
    match status.code() {
        _ if !is_the_librarys => None,
        tonic::Code::OutOfRange => Some(too_large(MESSAGE_BYTES_MAX)),
        tonic::Code::Internal => {
            let message = "a message could not be decoded from its gRPC frame";
            Some(Status::new(Reason::BadMessage, message))
        }
        _ => None,
    }
}

fn too_large(max: usize) -> Status {
    let message = format!("a message is larger than {max} bytes: send smaller ones");
    Status::new(Reason::MessageTooLarge, message)
        .with("limit", "max_message_bytes")
        .with("max", max as u64)
}

fn plain(status: &tonic::Status) -> Status {
    Status::other(Code::from_grpc(status.code() as i32), "", status.message())
}

/// The initial size of each direction's buffer, and the step by which it grows.
const BUFFER_BYTES: usize = 1024;
/// Encoded bytes that are buffered before they are passed to the connection.
const YIELD_BYTES: usize = 32 * 1024;

/// How tonic's messages about unreadable frames begin.
const LIBRARY_TEXTS: [&str; 4] = [
    "protocol error: received",
    "Error decompressing",
    "Unexpected EOF decoding",
    "Error, decoded message length too large",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_server_is_not_reported_as_a_broken_frame() {
        for code in [tonic::Code::Internal, tonic::Code::OutOfRange] {
            let status = from_grpc(&tonic::Status::new(code, "the disk is full"));
            assert_eq!(status.message, "the disk is full");
        }
    }

    #[test]
    fn ev_109_a_lost_connection_is_reported_as_cancelled() {
        let cut = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let status = from_client(&tonic::Status::from_error(Box::new(cut)), 1);
        assert_eq!(status.known(), Some(Reason::Cancelled));
        let cut = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let status = from_grpc(&tonic::Status::from_error(Box::new(cut)));
        assert_eq!(status.code, Code::Unavailable);
        let ours = to_grpc(&Status::new(Reason::BadMessage, "bad"));
        assert_eq!(from_client(&ours, 1).known(), Some(Reason::BadMessage));
    }

    #[test]
    fn ev_703_limits_within_a_message_and_of_its_size_are_distinguished() {
        let entries = Status::limit(Reason::FragmentLimit, "entries_max", 11, 10);
        let reported = from_client(&to_grpc(&entries), 1 << 20);
        assert_eq!(reported.known(), Some(Reason::FragmentLimit));
        assert_eq!(reported.message, entries.message);
        for code in [tonic::Code::OutOfRange, tonic::Code::ResourceExhausted] {
            let large = from_client(&tonic::Status::new(code, "too long"), 1 << 20);
            assert_eq!(large.known(), Some(Reason::MessageTooLarge));
            assert!(large.message.contains("1048576"), "{}", large.message);
        }
    }
}
