//! Fuzz entry point: arbitrary bytes as server-sent events.
//!
//! Invariants: the same events however the bytes are split, and none beyond the limits. Built for tests and fuzzing
//! only.

use super::{SseEvent, SseLimits, SseReader, Violation};

/// Small, so that the fuzzer finds long lines.
const LIMITS: SseLimits = SseLimits {
    line_bytes: 512,
    event_bytes: 1_024,
};

/// Reads the `bytes` after the first one, which determines how they are split.
///
/// # Panics
/// If an invariant does not hold.
pub fn events(bytes: &[u8]) {
    let (cut, bytes) = bytes.split_first().unwrap_or((&0, bytes));
    let whole = read(bytes.chunks(bytes.len().max(1)));
    let pieces = read(bytes.chunks(usize::from(*cut) + 1));
    assert_eq!(whole, pieces, "how bytes are cut changes nothing");
    for event in whole.0 {
        assert!(event.data.len() <= LIMITS.event_bytes);
        assert!(event.name.len().max(event.id.len()) <= LIMITS.line_bytes);
    }
}

fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<SseEvent>, Result<(), Violation>) {
    let mut events = SseReader::new(LIMITS);
    let mut all = Vec::new();
    for piece in pieces {
        events.push(piece);
        loop {
            match events.next() {
                Ok(Some(event)) => all.push(event),
                Ok(None) => break,
                Err(violation) => return (all, Err(violation)),
            }
        }
    }
    (all, events.finish())
}

#[cfg(test)]
mod tests {
    use crate::corpus::replay;

    #[test]
    fn the_corpus_is_replayed() {
        replay("sse_events", super::events);
    }
}
