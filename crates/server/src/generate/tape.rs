//! What a stream has said, numbered, as far as it is kept (TR-1303).
//!
//! Owns: [`Tape`]: the numbers, how much is kept, where its reader stands. Refuses to know: readers, times and tasks.
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
pub(super) struct Tape {
    kept: VecDeque<Bytes>,
    /// The number of the last event, and of the last that was read; the first is 1.
    said: u64,
    read: u64,
    /// What is kept, and what of it was not read, with what it costs to keep it.
    bytes: usize,
    unread: usize,
    most: usize,
    end: Option<End>,
}

/// How a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With its last event.
    Well,
    /// Without its own end, as if its transport had failed.
    Cut,
}

/// What its reader gets next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Event(Bytes),
    End(End),
    /// It is still to be said.
    Later,
}

/// Why a stream does not go on behind an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind {
    /// What follows is no longer kept; the number of the first that is lost.
    Forgotten(u64),
    /// That event was never said.
    Unsaid,
}

impl Tape {
    /// Keeps this many bytes, or the last event where that is more.
    pub(super) const fn new(most: usize) -> Self {
        Self {
            kept: VecDeque::new(),
            said: 0,
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
    pub(super) fn say(&mut self, event: &[u8]) {
        if self.end.is_some() {
            return;
        }
        self.said += 1;
        let number = format!("id: {}\n", self.said);
        let event = Bytes::from([number.as_bytes(), event].concat());
        self.bytes += cost(&event);
        self.unread += cost(&event);
        self.kept.push_back(event);
        while self.bytes > self.most && self.first() <= self.read {
            let forgotten = self.kept.pop_front();
            self.bytes -= forgotten.as_ref().map_or(0, cost);
        }
    }

    /// The first end is the end.
    pub(super) fn end(&mut self, end: End) {
        self.end.get_or_insert(end);
    }

    /// Whether nothing is left to be read but a good end.
    pub(super) fn is_read(&self) -> bool {
        self.is_all(self.read)
    }

    /// Whether nothing is left behind this event but a good end.
    pub(super) fn is_all(&self, after: u64) -> bool {
        self.end == Some(End::Well) && self.said == after
    }

    /// Reads on.
    pub(super) fn next(&mut self) -> Next {
        let event = self.index(self.read).and_then(|at| self.kept.get(at));
        match event.cloned() {
            Some(event) => {
                self.read += 1;
                self.unread -= cost(&event);
                Next::Event(event)
            }
            None => self.end.map_or(Next::Later, Next::End),
        }
    }

    /// Whether it can be read on behind this event; 0 is the beginning.
    ///
    /// # Errors
    /// Where it cannot.
    pub(super) fn follows(&self, after: u64) -> Result<(), Behind> {
        if after > self.said {
            Err(Behind::Unsaid)
        } else if after + 1 < self.first() {
            Err(Behind::Forgotten(after + 1))
        } else {
            Ok(())
        }
    }

    /// The next to be read is the one behind this event.
    ///
    /// # Errors
    /// As [`Tape::follows`].
    pub(super) fn rewind(&mut self, after: u64) -> Result<(), Behind> {
        self.follows(after)?;
        self.read = after;
        let read = self.index(after).unwrap_or(0);
        self.unread = self.kept.iter().skip(read).map(cost).sum();
        Ok(())
    }

    /// The number of the first that is kept, or of the next one where none is.
    fn first(&self) -> u64 {
        self.said + 1 - self.kept.len() as u64
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

    fn read(tape: &mut Tape) -> Vec<String> {
        let mut all = Vec::new();
        while let Next::Event(event) = tape.next() {
            all.push(String::from_utf8(event.to_vec()).unwrap());
        }
        all
    }

    #[test]
    fn tr_1303_what_was_read_is_forgotten_where_room_is_needed_and_nothing_else() {
        let one = cost(&Bytes::from("id: 1\nx\n\n"));
        let mut tape = Tape::new(4 * one);
        // Half of the room, and nobody has read anything.
        for _ in 0..2 {
            assert!(tape.has_room());
            tape.say(b"x\n\n");
        }
        assert!(!tape.has_room());
        assert_eq!(read(&mut tape), ["id: 1\nx\n\n", "id: 2\nx\n\n"]);
        assert!(tape.has_room() && tape.next() == Next::Later);
        for _ in 0..2 {
            tape.say(b"x\n\n");
        }
        assert_eq!((tape.follows(0), tape.bytes), (Ok(()), 4 * one));
        read(&mut tape);
        tape.say(b"x\n\n");
        assert_eq!(tape.rewind(0), Err(Behind::Forgotten(1)));
        assert_eq!(tape.rewind(6), Err(Behind::Unsaid));
        assert_eq!(tape.rewind(1), Ok(()));
        assert!(!tape.has_room(), "four are to be read again");
        assert_eq!(read(&mut tape).len(), 4);
        // What is larger than the room is kept alone.
        tape.say(&[b'x'; 1_000]);
        assert_eq!(
            (tape.follows(4), tape.follows(5)),
            (Err(Behind::Forgotten(5)), Ok(()))
        );
        tape.end(End::Well);
        tape.end(End::Cut);
        tape.say(b"too late");
        assert!(!tape.is_read());
        assert_eq!(read(&mut tape).len(), 1);
        assert!(tape.is_read() && tape.next() == Next::End(End::Well));
        assert_eq!(tape.rewind(6), Ok(()));
    }

    #[derive(Clone, Copy, Debug)]
    enum Act {
        Say(usize),
        Read,
        Back(u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            (0..100_usize).prop_map(Act::Say),
            Just(Act::Read),
            (0..40_u64).prop_map(Act::Back),
        ]
    }

    proptest! {
        /// Whatever its readers do, they get each event in its turn, and what is kept is bounded.
        #[test]
        fn tr_1303_readers_who_come_and_go_see_every_event_in_its_turn(acts in prop::collection::vec(act(), 1..200)) {
            let most = 1_000;
            let mut tape = Tape::new(most);
            let mut said = Vec::new();
            let mut at = 0;
            for act in acts {
                match act {
                    Act::Say(length) if tape.has_room() => {
                        said.push("x".repeat(length));
                        tape.say(said[said.len() - 1].as_bytes());
                    }
                    Act::Say(_) => {}
                    Act::Read => match tape.next() {
                        Next::Event(event) => {
                            let expect = format!("id: {}\n{}", at + 1, said[at]);
                            prop_assert_eq!(event, expect);
                            at += 1;
                        }
                        _ => prop_assert_eq!(at, said.len()),
                    },
                    Act::Back(after) => {
                        let place = usize::try_from(after).unwrap();
                        match tape.rewind(after) {
                            Ok(()) => at = place,
                            Err(Behind::Unsaid) => prop_assert!(place > said.len()),
                            // What is not kept was read once, and there was no room for it.
                            Err(Behind::Forgotten(first)) => {
                                prop_assert_eq!(first, after + 1);
                                prop_assert!(place < said.len() && tape.first() > first);
                            }
                        }
                    }
                }
                prop_assert!(tape.bytes <= most && tape.unread <= tape.bytes);
            }
        }
    }
}
