//! Fuzz entry point: arbitrary bytes as the frames of a client.
//!
//! What has to hold: the same messages however the bytes come, and none beyond its limit.

use super::SocketLoss;
use super::reader::{FrameReader, ReadFrame};

/// Bytes of a message; small, so that the fuzzer finds long ones.
const MESSAGE_BYTES_MAX: usize = 4_096;

/// Reads `bytes` behind the first, which says how many come at a time.
///
/// # Panics
/// If an invariant does not hold.
pub fn websocket(bytes: &[u8]) {
    let (most, bytes) = bytes.split_first().unwrap_or((&0, bytes));
    let whole = read(bytes, usize::MAX);
    let pieces = read(bytes, usize::from(*most) + 1);
    assert_eq!(whole, pieces, "how bytes come changes nothing");
    for sent in whole.0 {
        if let ReadFrame::Text(bytes) | ReadFrame::Binary(bytes) | ReadFrame::Ping(bytes) = sent {
            assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        }
    }
}

/// What was said, and how it ended, where at most `most` bytes come at a time.
fn read(bytes: &[u8], most: usize) -> (Vec<ReadFrame>, Option<SocketLoss>) {
    let mut reader = FrameReader::new(Vec::new(), MESSAGE_BYTES_MAX);
    let (mut all, mut rest) = (Vec::new(), bytes);
    loop {
        match reader.next() {
            Ok(Some(sent)) => all.push(sent),
            Err(lost) => return (all, Some(lost)),
            Ok(None) if rest.is_empty() => return (all, None),
            Ok(None) => {
                let room = reader.room();
                let count = most.min(rest.len()).min(room.capacity() - room.len());
                assert!(count > 0, "there is always room");
                let (now, later) = rest.split_at(count);
                room.extend_from_slice(now);
                rest = later;
                reader.came();
                reader.rest();
            }
        }
    }
}
