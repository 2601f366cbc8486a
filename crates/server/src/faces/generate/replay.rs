//! [`EventReplay`]: the numbered events of a resumable stream, with its end (TR-1303).
//!
//! Unread events take at most half of the room, and then the model waits. The other half is for events that were read,
//! from which a client continues that has lost the last ones on the way.

use axum::body::Bytes;
use sapwood_proto::replay::{ReplayBuffer, ReplayGap};

/// The events of one stream. Events that were read are evicted where room is needed; unread ones never are.
#[derive(Debug)]
pub(super) struct EventReplay {
    /// The first event is number 1; 0 is the position before it.
    events: ReplayBuffer<Bytes>,
    /// Size limit of the buffer, in bytes.
    most: usize,
    end: Option<StreamEnd>,
}

/// How a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEnd {
    /// After its last event.
    Well,
    /// Without its own end, as if its transport had failed.
    Cut,
}

/// What a reader gets next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReplayNext {
    Event(Bytes),
    End(StreamEnd),
    /// There is no event yet.
    Later,
}

impl EventReplay {
    /// Retains this many bytes, or the last event where that is more. Small events cost more than their bytes.
    pub(super) const fn new(most: usize) -> Self {
        Self {
            events: ReplayBuffer::new(1, size_of::<Bytes>()),
            most,
            end: None,
        }
    }

    /// Whether another event may be pushed.
    pub(super) const fn has_room(&self) -> bool {
        self.events.unsent_bytes() * 2 < self.most
    }

    /// Appends an event. After the end nothing is appended.
    pub(super) fn push(&mut self, event: &[u8]) {
        // A cancellation ends the stream while its task may still be at an event.
        if self.end.is_some() {
            return;
        }
        let number = format!("id: {}\n", self.events.next());
        self.events
            .push(Bytes::from([number.as_bytes(), event].concat()));
        // Only events that were read are evicted, so the new one stays, however large it is.
        while self.events.bytes() > self.most && self.events.evict().is_some() {}
    }

    /// Ends the stream; only the first end counts.
    pub(super) fn end(&mut self, end: StreamEnd) {
        self.end.get_or_insert(end);
    }

    /// Whether everything was read, and the stream ended well.
    pub(super) fn is_read(&self) -> bool {
        self.is_all(self.events.next_unsent() - 1)
    }

    /// Whether nothing follows this event but a good end.
    pub(super) fn is_all(&self, after: u64) -> bool {
        self.end == Some(StreamEnd::Well) && self.events.next() == after + 1
    }

    /// Reads the next event.
    pub(super) fn next(&mut self) -> ReplayNext {
        match self.events.peek().cloned() {
            Some(event) => {
                self.events.advance();
                ReplayNext::Event(event)
            }
            None => self.end.map_or(ReplayNext::Later, ReplayNext::End),
        }
    }

    /// Checks that a reader can continue after this event; 0 is the beginning.
    ///
    /// # Errors
    /// If it cannot.
    pub(super) fn follows(&self, after: u64) -> Result<(), ReplayGap> {
        // Saturating, because the number is the client's. No stream has that many events.
        self.events.check(after.saturating_add(1))
    }

    /// Makes the event after this one the next to be read.
    ///
    /// # Errors
    /// As [`EventReplay::follows`].
    pub(super) fn rewind(&mut self, after: u64) -> Result<(), ReplayGap> {
        self.events.rewind(after.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(replay: &mut EventReplay) -> Vec<String> {
        let mut all = Vec::new();
        while let ReplayNext::Event(event) = replay.next() {
            all.push(String::from_utf8(event.to_vec()).unwrap());
        }
        all
    }

    #[test]
    fn tr_1303_only_events_that_were_read_are_evicted_and_only_for_room() {
        let one = "id: 1\nx\n\n".len() + size_of::<Bytes>();
        let mut replay = EventReplay::new(4 * one);
        // Half of the room, and nothing was read.
        for _ in 0..2 {
            assert!(replay.has_room());
            replay.push(b"x\n\n");
        }
        assert!(!replay.has_room());
        assert_eq!(read(&mut replay), ["id: 1\nx\n\n", "id: 2\nx\n\n"]);
        assert!(replay.has_room() && replay.next() == ReplayNext::Later);
        for _ in 0..2 {
            replay.push(b"x\n\n");
        }
        assert_eq!(
            (replay.follows(0), replay.events.bytes()),
            (Ok(()), 4 * one)
        );
        read(&mut replay);
        replay.push(b"x\n\n");
        assert_eq!(replay.rewind(0), Err(ReplayGap::Evicted(1)));
        assert_eq!(replay.rewind(6), Err(ReplayGap::Unsaid));
        assert_eq!(replay.rewind(1), Ok(()));
        assert!(!replay.has_room(), "four are to be read again");
        assert_eq!(read(&mut replay).len(), 4);
        // An event that is larger than the buffer is kept alone.
        replay.push(&[b'x'; 1_000]);
        assert_eq!(
            (replay.follows(4), replay.follows(5)),
            (Err(ReplayGap::Evicted(5)), Ok(()))
        );
        replay.end(StreamEnd::Well);
        replay.end(StreamEnd::Cut);
        replay.push(b"too late");
        assert!(!replay.is_read());
        assert_eq!(read(&mut replay).len(), 1);
        assert!(replay.is_read() && replay.next() == ReplayNext::End(StreamEnd::Well));
        assert_eq!(replay.rewind(6), Ok(()));
    }

    #[derive(Clone, Copy, Debug)]
    enum Act {
        Send(usize),
        Read,
        Back(u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            (0..100_usize).prop_map(Act::Send),
            Just(Act::Read),
            (0..40_u64).prop_map(Act::Back),
        ]
    }

    proptest! {
        /// Whatever its readers do, they get each event in order, and the buffer is bounded.
        #[test]
        fn tr_1303_readers_that_come_and_go_get_every_event_in_order(acts in prop::collection::vec(act(), 1..200)) {
            let most = 1_000;
            let mut replay = EventReplay::new(most);
            let mut sent = Vec::new();
            let mut at = 0;
            for act in acts {
                match act {
                    Act::Send(length) if replay.has_room() => {
                        sent.push("x".repeat(length));
                        replay.push(sent[sent.len() - 1].as_bytes());
                    }
                    Act::Send(_) => {}
                    Act::Read => match replay.next() {
                        ReplayNext::Event(event) => {
                            let expect = format!("id: {}\n{}", at + 1, sent[at]);
                            prop_assert_eq!(event, expect);
                            at += 1;
                        }
                        _ => prop_assert_eq!(at, sent.len()),
                    },
                    Act::Back(after) => {
                        let registration = usize::try_from(after).unwrap();
                        match replay.rewind(after) {
                            Ok(()) => at = registration,
                            Err(ReplayGap::Unsaid) => prop_assert!(registration > sent.len()),
                            // An evicted event was read once, and there was no room for it.
                            Err(ReplayGap::Evicted(first)) => {
                                prop_assert_eq!(first, after + 1);
                                prop_assert!(registration < sent.len() && replay.events.first() > first);
                            }
                        }
                    }
                }
                prop_assert!(replay.events.bytes() <= most);
            }
        }
    }
}
