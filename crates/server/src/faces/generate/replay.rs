//! A bounded replay buffer of numbered events (TR-1303).
//!
//! ```text
//!   forgotten │ read, and perhaps lost on the way │ not read yet │
//!             └──────────── `most` bytes ─────────────────┤
//!                                    half of it at most ──┴─► then nothing more is said
//! ```

use std::collections::VecDeque;

use axum::body::Bytes;

/// The events of one stream. What was read is forgotten where room is needed, the oldest first; what was not never is.
#[derive(Debug)]
pub(super) struct ReplayBuffer {
    events: VecDeque<Bytes>,
    /// The number of the last event, and of the last that was read; the first is 1.
    next_number: u64,
    read: u64,
    /// What is kept, and what of it was not read, with what it costs to keep it.
    bytes: usize,
    unread: usize,
    most: usize,
    end: Option<StreamEnd>,
}

/// How a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEnd {
    /// With its last event.
    Well,
    /// Without its own end, as if its transport had failed.
    Cut,
}

/// What its reader gets next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReplayNext {
    Event(Bytes),
    End(StreamEnd),
    /// It is still to be said.
    Later,
}

/// Why a stream does not go on behind an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayGap {
    /// What follows is no longer kept; the number of the first that is lost.
    Evicted(u64),
    /// That event was never said.
    Unsaid,
}

impl ReplayBuffer {
    /// Keeps this many bytes, or the last event where that is more.
    pub(super) const fn new(most: usize) -> Self {
        Self {
            events: VecDeque::new(),
            next_number: 0,
            read: 0,
            bytes: 0,
            unread: 0,
            most,
            end: None,
        }
    }

    /// Whether anything more may be said: what was not read takes half of the room at most, and one event.
    pub(super) const fn has_room(&self) -> bool {
        self.unread * 2 < self.most
    }

    /// Says an event. What is said behind the end is nothing.
    pub(super) fn push(&mut self, event: &[u8]) {
        if self.end.is_some() {
            return;
        }
        self.next_number += 1;
        let number = format!("id: {}\n", self.next_number);
        let event = Bytes::from([number.as_bytes(), event].concat());
        self.bytes += cost(&event);
        self.unread += cost(&event);
        self.events.push_back(event);
        // Only what was read: an event that nobody has seen is never dropped, even if it alone is larger than the room.
        while self.bytes > self.most && self.first() <= self.read {
            let removed = self.events.pop_front();
            self.bytes -= removed.as_ref().map_or(0, cost);
        }
    }

    /// The first end is the end.
    pub(super) fn end(&mut self, end: StreamEnd) {
        self.end.get_or_insert(end);
    }

    /// Whether nothing is left to be read but a good end.
    pub(super) fn is_read(&self) -> bool {
        self.is_all(self.read)
    }

    /// Whether nothing is left behind this event but a good end.
    pub(super) fn is_all(&self, after: u64) -> bool {
        self.end == Some(StreamEnd::Well) && self.next_number == after
    }

    /// Reads on.
    pub(super) fn next(&mut self) -> ReplayNext {
        let event = self.index(self.read).and_then(|at| self.events.get(at));
        match event.cloned() {
            Some(event) => {
                self.read += 1;
                self.unread -= cost(&event);
                ReplayNext::Event(event)
            }
            None => self.end.map_or(ReplayNext::Later, ReplayNext::End),
        }
    }

    /// Whether it can be read on behind this event; 0 is the beginning.
    ///
    /// # Errors
    /// Where it cannot.
    pub(super) fn follows(&self, after: u64) -> Result<(), ReplayGap> {
        if after > self.next_number {
            Err(ReplayGap::Unsaid)
        } else if after + 1 < self.first() {
            Err(ReplayGap::Evicted(after + 1))
        } else {
            Ok(())
        }
    }

    /// The next to be read is the one behind this event.
    ///
    /// # Errors
    /// As [`ReplayBuffer::follows`].
    pub(super) fn rewind(&mut self, after: u64) -> Result<(), ReplayGap> {
        self.follows(after)?;
        self.read = after;
        let read = self.index(after).unwrap_or(0);
        self.unread = self.events.iter().skip(read).map(cost).sum();
        Ok(())
    }

    /// The number of the first that is kept, or of the next one where none is.
    fn first(&self) -> u64 {
        self.next_number + 1 - self.events.len() as u64
    }

    /// Where the event behind this number is kept.
    fn index(&self, after: u64) -> Option<usize> {
        usize::try_from((after + 1).checked_sub(self.first())?).ok()
    }
}

/// What keeping an event takes: small ones cost more than their bytes.
fn cost(event: &Bytes) -> usize {
    event.len() + size_of::<Bytes>()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(replay: &mut ReplayBuffer) -> Vec<String> {
        let mut all = Vec::new();
        while let ReplayNext::Event(event) = replay.next() {
            all.push(String::from_utf8(event.to_vec()).unwrap());
        }
        all
    }

    #[test]
    fn tr_1303_what_was_read_is_forgotten_where_room_is_needed_and_nothing_else() {
        let one = cost(&Bytes::from("id: 1\nx\n\n"));
        let mut replay = ReplayBuffer::new(4 * one);
        // Half of the room, and nobody has read anything.
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
        assert_eq!((replay.follows(0), replay.bytes), (Ok(()), 4 * one));
        read(&mut replay);
        replay.push(b"x\n\n");
        assert_eq!(replay.rewind(0), Err(ReplayGap::Evicted(1)));
        assert_eq!(replay.rewind(6), Err(ReplayGap::Unsaid));
        assert_eq!(replay.rewind(1), Ok(()));
        assert!(!replay.has_room(), "four are to be read again");
        assert_eq!(read(&mut replay).len(), 4);
        // What is larger than the room is kept alone.
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
        /// Whatever its readers do, they get each event in its turn, and what is kept is bounded.
        #[test]
        fn tr_1303_readers_who_come_and_go_see_every_event_in_its_turn(acts in prop::collection::vec(act(), 1..200)) {
            let most = 1_000;
            let mut replay = ReplayBuffer::new(most);
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
                            // What is not kept was read once, and there was no room for it.
                            Err(ReplayGap::Evicted(first)) => {
                                prop_assert_eq!(first, after + 1);
                                prop_assert!(registration < sent.len() && replay.first() > first);
                            }
                        }
                    }
                }
                prop_assert!(replay.bytes <= most && replay.unread <= replay.bytes);
            }
        }
    }
}
