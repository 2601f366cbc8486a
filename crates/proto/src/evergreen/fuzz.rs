//! Fuzz entry points: arbitrary bytes as a message of each dialect.
//!
//! Built for tests and fuzzing only.

use bytes::{Bytes, BytesMut};

use super::socket::{Codec, FrameContent};
use super::{Dialect, MetadataMode, WebSocketFrame, WireMessage, protobuf};
use crate::session::{Config, CursorRead, SessionMachine, Side};
use crate::time::Time;

/// Decodes `bytes`; a decoded message survives a round trip, and no session panics on it.
///
/// # Panics
/// If an invariant of the dialect does not hold.
pub fn decode(bytes: &[u8]) {
    let Ok(message) = protobuf::decode(bytes) else {
        return;
    };
    let mut once = Vec::new();
    protobuf::encode(&message, &mut once);
    assert_eq!(
        once.len(),
        protobuf::encoded_len(&message),
        "encoded_len does not match the encoding"
    );
    let again = protobuf::decode(&*once).expect("our own encoding is decodable");
    let mut twice = Vec::new();
    protobuf::encode(&again, &mut twice);
    assert_eq!(once, twice, "the encoding changes after one round trip");
    for metadata in [
        MetadataMode::Strict,
        MetadataMode::Lenient,
        MetadataMode::PerChunk,
    ] {
        play(
            &message,
            Config {
                metadata,
                ..Config::default()
            },
        );
    }
}

/// The same for JSON.
///
/// # Panics
/// If an invariant of the dialect does not hold.
pub fn decode_json(bytes: &[u8]) {
    decode_as(
        Dialect::Json,
        WebSocketFrame::Text(Bytes::copy_from_slice(bytes)),
    );
}

/// The same for msgpack.
///
/// # Panics
/// If an invariant of the dialect does not hold.
pub fn decode_msgpack(bytes: &[u8]) {
    decode_as(
        Dialect::Msgpack,
        WebSocketFrame::Binary(Bytes::copy_from_slice(bytes)),
    );
}

fn decode_as(dialect: Dialect, frame: WebSocketFrame) {
    let text = matches!(frame, WebSocketFrame::Text(_));
    for side in [Side::Server, Side::Client] {
        let Ok(FrameContent::Message(message)) = Codec::new(dialect, side).decode(frame.clone())
        else {
            continue;
        };
        // Our output can be decoded, and does not change after one round trip. The second codec is of the other side,
        // which translates names back.
        let (mut once, mut twice) = (BytesMut::new(), BytesMut::new());
        Codec::new(dialect, side).encode(&message, 0, &mut once);
        let once = once.freeze();
        let again = if text {
            WebSocketFrame::Text(once.clone())
        } else {
            WebSocketFrame::Binary(once.clone())
        };
        let other = match side {
            Side::Server => Side::Client,
            Side::Client => Side::Server,
        };
        if let Ok(FrameContent::Message(again)) = Codec::new(dialect, other).decode(again) {
            if dialect == Dialect::Json {
                Codec::new(dialect, side).encode(&again, 0, &mut twice);
                assert_eq!(once, twice, "the encoding changes after one round trip");
            }
        } else {
            assert!(
                dialect == Dialect::Msgpack,
                "our own encoding is not decodable"
            );
        }
        let config = Config {
            metadata: dialect.metadata(),
            partial_failure: dialect == Dialect::Msgpack,
            ..Config::default()
        };
        play(&message, config);
    }
}

/// Checks that no session panics on the message.
fn play(message: &WireMessage, config: Config) {
    let mut session = SessionMachine::new(Side::Server, config, Time::ZERO);
    let ids: Vec<_> = message
        .fragments
        .iter()
        .map(|fragment| fragment.id.clone())
        .take(4)
        .collect();
    let _ = session.handle(message.clone(), Time::ZERO);
    for id in ids {
        let Ok(node) = session.nodes().node(&id) else {
            continue;
        };
        let cursor = session.nodes().open(node, None);
        for _ in 0..64 {
            if !matches!(session.nodes().read(cursor), CursorRead::Piece(_)) {
                break;
            }
        }
    }
    session.end_of_input(Time::ZERO);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::corpus::replay;

    #[test]
    fn the_corpus_is_replayed() {
        replay("evergreen_decode", super::decode);
        replay("evergreen_json", super::decode_json);
        replay("evergreen_msgpack", super::decode_msgpack);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            super::decode(&bytes);
            super::decode_json(&bytes);
            super::decode_msgpack(&bytes);
        }

        /// Inputs close to the samples, where interesting errors are.
        #[test]
        fn a_sample_with_some_bytes_changed_decodes_or_is_refused(
            name in prop::sample::select(vec!["fragment", "action", "status-ok", "node-ref", "abort"]),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let mut bytes = crate::evergreen::msgpack::tests::sample(name).to_vec();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            super::decode_msgpack(&bytes);
        }
    }
}
