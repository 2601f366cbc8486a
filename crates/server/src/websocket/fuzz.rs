//! Fuzz entry point: arbitrary bytes as the frames of a client.
//!
//! Invariants: any split of the bytes gives the same messages, and none exceeds its limit.

use super::SocketLoss;
use super::reader::{FrameReader, ReadFrame};

/// Bytes of a message; small, so that the fuzzer finds long ones.
const MESSAGE_BYTES_MAX: usize = 4_096;

/// Reads all of `bytes` but the first, which is the number of bytes that arrive at a time.
///
/// # Panics
/// If an invariant does not hold.
pub fn websocket(bytes: &[u8]) {
    let (most, bytes) = bytes.split_first().unwrap_or((&0, bytes));
    let whole = read(bytes, usize::MAX);
    let pieces = read(bytes, usize::from(*most) + 1);
    assert_eq!(whole, pieces, "the split changes the result");
    for sent in whole.0 {
        if let ReadFrame::Text(bytes) | ReadFrame::Binary(bytes) | ReadFrame::Ping(bytes) = sent {
            assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        }
    }
}

/// The decoded frames, and the error at the end, if at most `most` bytes arrive at a time.
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
                assert!(count > 0, "there must always be room");
                let (now, later) = rest.split_at(count);
                room.extend_from_slice(now);
                rest = later;
                reader.came();
                reader.rest();
            }
        }
    }
}
