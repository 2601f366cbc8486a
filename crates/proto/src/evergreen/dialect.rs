//! The four dialects (encodings) of a session, and how a WebSocket's first frame shows which one it is (EV-701).

use bytes::Bytes;

use super::MetadataMode;

/// An encoding of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Protobuf messages in a gRPC call.
    Grpc,
    /// The same messages, each a binary WebSocket message (EV-710).
    Protobuf,
    /// proto3-JSON, as the TypeScript client uses it (EV-720).
    Json,
    /// Action Engine 0.4.0 (section 7.3).
    Msgpack,
}

/// One message of a WebSocket, assembled from its frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WebSocketFrame {
    /// A text message; the transport has checked that it is UTF-8.
    Text(Bytes),
    /// A binary message.
    Binary(Bytes),
}

/// The result of dialect detection on a first frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetectedDialect {
    /// This dialect, for the whole session.
    Dialect(Dialect),
    /// Not decided yet: an empty binary message is a no-op in every dialect.
    Nothing,
    /// Not one of our dialects.
    Foreign,
}

impl Dialect {
    /// The dialects of WebSockets.
    pub const OF_SOCKETS: [Self; 3] = [Self::Protobuf, Self::Json, Self::Msgpack];

    /// The name in SESSION_INFO and in logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Protobuf => "websocket-protobuf",
            Self::Json => "websocket-json",
            Self::Msgpack => "action-engine-msgpack",
        }
    }

    /// The WebSocket subprotocol that selects it without detection.
    #[must_use]
    pub const fn subprotocol(self) -> Option<&'static str> {
        match self {
            Self::Grpc => None,
            Self::Protobuf => Some("evergreen.v2.proto"),
            Self::Json => Some("evergreen.v2.json"),
            Self::Msgpack => Some("actionengine.msgpack"),
        }
    }

    /// The dialect of a subprotocol.
    #[must_use]
    pub fn of_subprotocol(name: &str) -> Option<Self> {
        Self::OF_SOCKETS
            .into_iter()
            .find(|dialect| dialect.subprotocol() == Some(name))
    }

    /// How metadata after the first fragment is handled by default (EV-405).
    #[must_use]
    pub const fn metadata(self) -> MetadataMode {
        match self {
            Self::Grpc | Self::Protobuf => MetadataMode::Lenient,
            // Their clients put a whole prompt (system text, user text, image) into one node, each fragment with its
            // own metadata.
            Self::Json | Self::Msgpack => MetadataMode::PerChunk,
        }
    }

    /// Whether a session in this dialect can be resumed: 0.4.0 has no messages for that (D-29).
    #[must_use]
    pub const fn resumes(self) -> bool {
        !matches!(self, Self::Msgpack)
    }

    /// Whether a JSON value must not be split over fragments: the TypeScript client parses each fragment by itself
    /// (EV-722).
    #[must_use]
    pub const fn needs_whole_json(self) -> bool {
        matches!(self, Self::Json)
    }

    /// Whether an output is one leaf whatever its shape, of chunks that each have their own metadata: clients of 0.4.0
    /// know no trees (EV-733, EV-740).
    #[must_use]
    pub const fn needs_flat_outputs(self) -> bool {
        matches!(self, Self::Msgpack)
    }

    /// Detects the dialect from the first frame of a WebSocket.
    #[must_use]
    pub fn detect(first: &WebSocketFrame) -> DetectedDialect {
        match first {
            WebSocketFrame::Text(text) => {
                // White space is skipped in text alone: in a binary frame a leading newline is the tag of protobuf's
                // field 1.
                let byte = text.iter().find(|byte| !byte.is_ascii_whitespace());
                match byte {
                    Some(b'{') => DetectedDialect::Dialect(Self::Json),
                    _ => DetectedDialect::Foreign,
                }
            }
            WebSocketFrame::Binary(bytes) => match bytes.first() {
                None => DetectedDialect::Nothing,
                Some(b'{') => DetectedDialect::Dialect(Self::Json),
                // The tags of fields 1 and 2 of SessionMessage; there are no others.
                Some(0x0a | 0x12) => DetectedDialect::Dialect(Self::Protobuf),
                // A msgpack bin of each size.
                Some(0xc4..=0xc6) => DetectedDialect::Dialect(Self::Msgpack),
                Some(_) => DetectedDialect::Foreign,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ev_701_the_first_frame_shows_the_dialect() {
        let text = |text: &'static str| WebSocketFrame::Text(Bytes::from_static(text.as_bytes()));
        let binary = |bytes: &'static [u8]| WebSocketFrame::Binary(Bytes::from_static(bytes));
        for (frame, expect) in [
            (text("{}"), DetectedDialect::Dialect(Dialect::Json)),
            (text(" \r\n\t{"), DetectedDialect::Dialect(Dialect::Json)),
            (
                binary(b"{\"actions\":[]}"),
                DetectedDialect::Dialect(Dialect::Json),
            ),
            (binary(b"\n{"), DetectedDialect::Dialect(Dialect::Protobuf)),
            (
                binary(b"\x0a\x00"),
                DetectedDialect::Dialect(Dialect::Protobuf),
            ),
            (
                binary(b"\x12\x00"),
                DetectedDialect::Dialect(Dialect::Protobuf),
            ),
            (
                binary(b"\xc4\x03\x90\x90\x00"),
                DetectedDialect::Dialect(Dialect::Msgpack),
            ),
            (binary(b"\xc5"), DetectedDialect::Dialect(Dialect::Msgpack)),
            (binary(b"\xc6"), DetectedDialect::Dialect(Dialect::Msgpack)),
            (binary(b""), DetectedDialect::Nothing),
            (binary(b"\x90"), DetectedDialect::Foreign),
            (binary(b" {"), DetectedDialect::Foreign),
            (binary(b"\x1a"), DetectedDialect::Foreign),
            (text(""), DetectedDialect::Foreign),
            (text("[]"), DetectedDialect::Foreign),
            (text("HELLO {}"), DetectedDialect::Foreign),
        ] {
            assert_eq!(Dialect::detect(&frame), expect, "{frame:?}");
        }
    }

    #[test]
    fn ev_701_subprotocols_select_without_detection() {
        for dialect in Dialect::OF_SOCKETS {
            let name = dialect.subprotocol().unwrap();
            assert_eq!(Dialect::of_subprotocol(name), Some(dialect));
        }
        assert_eq!(Dialect::of_subprotocol("lmtp"), None);
        assert_eq!(Dialect::of_subprotocol("evergreen.v2"), None);
    }
}
