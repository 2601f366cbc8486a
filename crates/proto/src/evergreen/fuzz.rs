//! Any bytes as a message of the protobuf dialect, for the fuzzer and for tests.
//!
//! Owns: what has to hold of decoding and encoding. Refuses to know: operations on sessions; `session::fuzz` has
//! those. Built for tests and fuzzing alone.

use super::{MetadataMode, protobuf};
use crate::session::{Config, Read, Session, Side};
use crate::time::Time;

/// Decodes `bytes`; what can be decoded survives a round, and no session falls over it.
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
        "lengths are told truly"
    );
    let again = protobuf::decode(&*once).expect("what we write can be read");
    let mut twice = Vec::new();
    protobuf::encode(&again, &mut twice);
    assert_eq!(once, twice, "writing settles after one round");
    for metadata in [
        MetadataMode::Strict,
        MetadataMode::Lenient,
        MetadataMode::PerChunk,
    ] {
        let mut session = Session::new(
            Side::Server,
            Config {
                metadata,
                ..Config::default()
            },
            Time::ZERO,
        );
        let ids: Vec<_> = message
            .fragments
            .iter()
            .map(|fragment| fragment.id.clone())
            .take(4)
            .collect();
        let _ = session.handle(message.clone(), Time::ZERO);
        for id in ids {
            let Ok(node) = session.node(&id) else {
                continue;
            };
            let cursor = session.open(node, None);
            for _ in 0..64 {
                if !matches!(session.read(cursor), Read::Piece(_)) {
                    break;
                }
            }
        }
        session.end_of_input(Time::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    #[test]
    fn the_corpus_is_replayed() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fuzz/corpus/evergreen_decode");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).expect("a committed corpus") {
            super::decode(&std::fs::read(entry.unwrap().path()).unwrap());
            files += 1;
        }
        assert!(files > 0);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            super::decode(&bytes);
        }
    }
}
