//! Replay buffers of the streams of a session, and their windows (LM-952, LM-963, LM-964). A stream whose items fit
//! neither into its buffer nor into its window is parked.
//!
//! Most buffers have nothing unsent: an item is sent at once, and a copy is retained. Items wait in three cases: a lost
//! connection, items that are replayed, and a full window.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

use bytes::{BufMut as _, Bytes};

use super::outbox::Outbox;
use crate::lmtp::port::StreamKey;
use crate::lmtp::{ConnectionLimits, StreamId};
use crate::replay::ReplayBuffer;
use crate::time::Time;

/// Flow control: the number of items that may be unacknowledged (LM-952).
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    size: u64,
    /// Items below this number are acknowledged.
    acked: u64,
    /// Since when the window has been full without an acknowledgement.
    full: Option<Time>,
}

/// The items of one stream, and whether they may be sent.
#[derive(Debug)]
pub(super) struct StreamReplay {
    id: StreamId,
    /// Whether the stream can be resumed; only then its items carry their numbers.
    resumable: bool,
    items: ReplayBuffer<Bytes>,
    /// Items wait for their turn or the window. Without it, all are sent, and the next is sent as it comes.
    waits: bool,
    window: Option<Window>,
    /// Whether its stream is parked.
    parked: bool,
    /// Set once its stream has ended: when the buffer expires.
    until: Option<Time>,
}

impl StreamReplay {
    fn new(id: StreamId, resumable: bool, window: Option<u32>) -> Self {
        Self {
            id,
            resumable,
            items: ReplayBuffer::new(0, 0),
            waits: false,
            window: window.map(|size| Window {
                size: size.into(),
                acked: 0,
                full: None,
            }),
            parked: false,
            until: None,
        }
    }

    /// The first number outside of the window: this item and all after it must not be sent yet.
    fn closed_from(&self) -> u64 {
        self.window
            .map_or(u64::MAX, |window| window.acked.saturating_add(window.size))
    }

    /// Whether the buffer is full and no item can be dropped; `all` is the number of bytes in all buffers.
    fn is_full(&self, limits: &ConnectionLimits, all: usize) -> bool {
        let room = self.items.len() < limits.resume_items
            && self.items.bytes() < limits.resume_bytes
            && all < limits.resume_session_bytes;
        // Only sent items can be evicted. While nothing waits, all items were sent, so there is always one to evict.
        !room && self.waits && self.items.next_unsent() == self.items.first()
    }

    /// Whether the next item is outside of the window.
    fn is_closed(&self) -> bool {
        self.items.next() >= self.closed_from()
    }

    fn has_unsent(&self) -> bool {
        self.items.has_unsent()
    }

    /// Marks the first unsent item as sent. Returns its bytes if it is dropped, because nobody can ask for it again.
    fn advance(&mut self) -> usize {
        self.items.advance();
        if self.resumable {
            return 0;
        }
        self.items.evict().unwrap_or(0)
    }
}

/// The replay buffers of a session.
#[derive(Debug, Default)]
pub(super) struct ReplayBuffers {
    of: BTreeMap<StreamKey, StreamReplay>,
    ids: BTreeMap<StreamId, StreamKey>,
    /// Buffers of ended streams, in the order in which they expire.
    ended: VecDeque<StreamKey>,
    /// Buffers with items that may be sent; they take turns, in order of admission.
    flowing: BTreeSet<StreamKey>,
    /// The buffer that has or last had its turn, and the bytes left of that turn.
    turn: Option<(StreamKey, usize)>,
    /// Buffers with a window.
    windows: BTreeSet<StreamKey>,
    bytes: usize,
    /// The connection is lost: all items wait.
    detached: bool,
}

impl ReplayBuffers {
    /// Begins a stream. An earlier buffer under its id is removed.
    pub(super) fn begin(
        &mut self,
        key: StreamKey,
        id: &StreamId,
        resumable: bool,
        window: Option<u32>,
    ) {
        self.adopt(key, StreamReplay::new(id.clone(), resumable, window));
    }

    /// Removes the buffer under an id.
    pub(super) fn remove(&mut self, id: &StreamId) {
        if let Some(key) = self.named(id) {
            drop(self.take(key));
        }
    }

    /// The buffer of the latest stream with this id.
    pub(super) fn named(&self, id: &StreamId) -> Option<StreamKey> {
        self.ids.get(id).copied()
    }

    /// Whether its items are numbered, so that the stream can be resumed.
    pub(super) fn is_numbered(&self, key: StreamKey) -> bool {
        self.of.get(&key).is_some_and(|replay| replay.resumable)
    }

    /// Whether a stream with this id has unsent items.
    pub(super) fn has_unsent(&self, id: &StreamId) -> bool {
        let replay = self.named(id).and_then(|key| self.of.get(&key));
        replay.is_some_and(StreamReplay::has_unsent)
    }

    /// Whether everything from `seq` on can be replayed.
    pub(super) fn reaches(&self, key: StreamKey, seq: u64) -> bool {
        let replay = self.of.get(&key);
        replay.is_some_and(|replay| replay.items.check(seq).is_ok())
    }

    /// Appends an item: to the message that is being composed, or to wait. Returns whether its stream must be parked
    /// now.
    pub(super) fn put(
        &mut self,
        key: StreamKey,
        outbox: &mut Outbox,
        now: Time,
        item: Bytes,
    ) -> bool {
        // Field by field, so that the limits are borrowed beside the messages and not cloned for each item.
        let Outbox {
            messages: outbound,
            limits,
            ..
        } = outbox;
        let Some(replay) = self.of.get_mut(&key) else {
            outbound.item(limits.max_frame_out, |out| out.put_slice(&item));
            return false;
        };
        // Once one item waits, all after it wait as well, or they would overtake it.
        replay.waits |= replay.is_closed();
        if replay.waits {
            self.bytes += replay.items.push(item);
        } else {
            outbound.item(limits.max_frame_out, |out| out.put_slice(&item));
            self.bytes += replay.items.push(item);
            self.bytes -= replay.advance();
        }
        self.fit(key, limits);
        // First evict, then ask whether the buffer is full: only unsent items park a stream.
        let Some(replay) = self.of.get_mut(&key) else {
            return false;
        };
        let closed = replay.is_closed();
        // The timeout starts when the window is filled, not with the first item beyond it: a parked stream produces no
        // such item.
        if let Some(window) = replay.window.as_mut().filter(|_| closed) {
            window.full.get_or_insert(now);
        }
        let parks = (closed || replay.is_full(limits, self.bytes)) && !replay.parked;
        replay.parked |= parks;
        parks
    }

    /// Sends waiting items, as far as there is room. Returns the streams that may continue.
    pub(super) fn flow(&mut self, outbox: &mut Outbox, now: Time) -> Vec<StreamKey> {
        let mut goes_on = Vec::new();
        if self.detached {
            return goes_on;
        }
        let Outbox {
            messages: outbound,
            limits,
            coalesce,
            ..
        } = outbox;
        // Replayed items fill the outbox to its low mark only, so that a replay alone never parks the whole session
        // (LM-607). An empty outbox takes one item of any size.
        while outbound.is_empty() || outbound.bytes < limits.outbox_low_bytes {
            let Some(key) = self.take_turn() else {
                break;
            };
            let replay = self.of.get_mut(&key);
            let Some(replay) = replay.filter(|replay| replay.waits) else {
                self.flowing.remove(&key);
                continue;
            };
            // By the next unsent item, unlike `is_closed`: after a rewind that item is not the newest one.
            let closed = replay.items.next_unsent() >= replay.closed_from();
            if let Some(item) = replay.items.peek().filter(|_| !closed) {
                outbound.item(limits.max_frame_out, |out| out.put_slice(item));
                if !*coalesce {
                    outbound.end_items();
                }
                if let Some((_, left)) = &mut self.turn {
                    *left = left.saturating_sub(item.len());
                }
                self.bytes -= replay.advance();
                continue;
            }
            // The window is closed, or all items are sent. An acknowledgement puts the buffer back into `flowing`.
            self.flowing.remove(&key);
            if let Some(window) = replay.window.as_mut().filter(|_| closed) {
                window.full.get_or_insert(now);
            }
            if !replay.has_unsent() {
                replay.waits = false;
                // With a closed window the stream stays parked: its next item could not be sent.
                if !closed && std::mem::take(&mut replay.parked) {
                    goes_on.push(key);
                }
            }
        }
        goes_on
    }

    /// Selects the buffer to send from. Turns are counted in bytes: a stream that is faster than its client always has
    /// more to send, and the others must not wait for its end.
    fn take_turn(&mut self) -> Option<StreamKey> {
        let last = match self.turn {
            Some((key, left)) if left > 0 && self.flowing.contains(&key) => return Some(key),
            last => last.map(|(key, _)| key),
        };
        // By key and not by position, since the buffer that had the last turn may have left `flowing`.
        let behind = last.and_then(|last| {
            let behind = (Bound::Excluded(last), Bound::Unbounded);
            self.flowing.range(behind).next()
        });
        let next = behind.or_else(|| self.flowing.first()).copied()?;
        self.turn = Some((next, TURN_BYTES));
        Some(next)
    }

    /// Handles an acknowledgement of everything below a number. Stale and impossible numbers are ignored (LM-952).
    pub(super) fn acknowledge(&mut self, key: StreamKey, below: u64, now: Time) {
        let Some(replay) = self.of.get_mut(&key) else {
            return;
        };
        let sent = replay.items.next_unsent();
        let Some(window) = replay.window.as_mut().filter(|_| below <= sent) else {
            return;
        };
        if below <= window.acked {
            return;
        }
        window.acked = below;
        let closed = sent >= window.acked.saturating_add(window.size);
        // An acknowledgement is progress: a window that is still full gets the whole timeout again.
        window.full = window.full.filter(|_| closed).map(|_| now);
        // Queued even if nothing is unsent: the stream may be parked by its window, and only `flow` unparks it.
        replay.waits = true;
        self.flowing.insert(key);
    }

    /// The stream ends early: its end is sent without waiting for the window.
    pub(super) fn open_window(&mut self, key: StreamKey) {
        if self.windows.remove(&key)
            && let Some(replay) = self.of.get_mut(&key)
        {
            replay.window = None;
            // A closed window has taken the buffer out of `flowing`.
            if replay.waits {
                self.flowing.insert(key);
            }
        }
    }

    /// Whether the connection is lost.
    pub(super) const fn is_detached(&self) -> bool {
        self.detached
    }

    /// The same for all streams.
    pub(super) fn open_windows(&mut self) {
        while let Some(&key) = self.windows.first() {
            self.open_window(key);
        }
    }

    /// Whether all items were sent; unacknowledged items may be in flight.
    pub(super) fn is_sent(&self) -> bool {
        let waits = |key| self.of.get(key).is_some_and(StreamReplay::has_unsent);
        self.flowing.is_empty() && !self.windows.iter().any(waits)
    }

    /// Number of ended streams whose end waits for the window.
    pub(super) fn ended_behind_windows(&self) -> usize {
        let is_ended = |replay: &StreamReplay| replay.until.is_some() && replay.has_unsent();
        let windows = self.windows.iter();
        windows
            .filter(|key| self.of.get(key).is_some_and(is_ended))
            .count()
    }

    /// The first stream whose client has acknowledged nothing for `timeout`.
    pub(super) fn stalled(&self, timeout: Duration) -> Option<(Time, StreamKey)> {
        if self.detached {
            // Without a connection no acknowledgement can arrive, so the timeouts stand still (D-29).
            return None;
        }
        // A stream whose end was sent needs no further acknowledgement.
        let full = |replay: &StreamReplay| {
            let has_output = replay.until.is_none() || replay.has_unsent();
            Some(replay.window?.full? + timeout).filter(|_| has_output)
        };
        let stalls = self.windows.iter();
        let stalls = stalls.filter_map(|key| Some((full(self.of.get(key)?)?, *key)));
        stalls.min()
    }

    /// Discards unsent items and closes the window.
    pub(super) fn discard_unsent(&mut self, key: StreamKey) -> Option<StreamId> {
        let replay = self.of.get_mut(&key)?;
        self.bytes -= replay.items.discard_unsent();
        replay.waits = false;
        replay.window = None;
        let id = replay.id.clone();
        self.windows.remove(&key);
        self.flowing.remove(&key);
        Some(id)
    }

    /// The number of the next item, if items are numbered.
    pub(super) fn seq(&self, key: StreamKey) -> Option<u64> {
        let replay = self.of.get(&key).filter(|replay| replay.resumable);
        replay.map(|replay| replay.items.next())
    }

    /// The stream has ended: its items are retained until the given time, if there is room.
    pub(super) fn end(&mut self, key: StreamKey, until: Time, limits: &ConnectionLimits) {
        let Some(replay) = self.of.get_mut(&key) else {
            return;
        };
        replay.until = Some(until);
        self.ended.push_back(key);
        // As many ended streams as live ones; RESUME accepts twice `max_streams` names for this reason.
        if self.ended.len() > limits.max_streams {
            self.remove_one(None);
        }
    }

    /// When the next buffer expires.
    pub(super) fn expires_at(&self) -> Option<Time> {
        // A detached session expires as a whole, after `resume_grace`.
        let first = self.ended.front().filter(|_| !self.detached);
        first.and_then(|key| self.of.get(key)?.until)
    }

    /// Removes expired buffers; a buffer with unsent items is retained for another `grace`.
    pub(super) fn expire(&mut self, now: Time, grace: Duration) {
        while self.expires_at().is_some_and(|until| until <= now) {
            let Some(key) = self.ended.pop_front() else {
                return;
            };
            match self.of.get_mut(&key).filter(|replay| replay.has_unsent()) {
                Some(replay) => {
                    replay.until = Some(now + grace);
                    // At the back, so that `ended` stays sorted: no other buffer expires later than a whole `grace`
                    // from now.
                    self.ended.push_back(key);
                }
                None => drop(self.take(key)),
            }
        }
    }

    /// The connection is lost: items that the client may not have received wait to be sent again. Returns the streams
    /// to park because their buffers are full.
    pub(super) fn hold(&mut self, limits: &ConnectionLimits) -> Vec<StreamKey> {
        self.detached = true;
        self.flowing.clear();
        // No buffer takes turns without a connection; `resume` of the next session queues it there.
        let mut full = Vec::new();
        for (key, replay) in &mut self.of {
            let acked = replay.window.map_or(0, |window| window.acked);
            // This cannot fail: `acked` is at most `next`, and the number is not below `first`.
            let _ = replay.items.rewind(replay.items.first().max(acked));
            replay.waits = true;
            if replay.is_full(limits, self.bytes) && !std::mem::replace(&mut replay.parked, true) {
                full.push(*key);
            }
        }
        full
    }

    /// Removes a buffer.
    pub(super) fn take(&mut self, key: StreamKey) -> Option<StreamReplay> {
        let replay = self.of.remove(&key)?;
        self.bytes -= replay.items.bytes();
        self.flowing.remove(&key);
        self.windows.remove(&key);
        if replay.until.is_some() {
            self.ended.retain(|ended| *ended != key);
        }
        // A later stream may have taken the id: `adopt` enters the new key before it removes the old buffer.
        if self.ids.get(&replay.id) == Some(&key) {
            self.ids.remove(&replay.id);
        }
        Some(replay)
    }

    /// Adds a buffer whose client has received everything before `seq`, and sends the rest. If its stream has ended, it
    /// is retained for `grace`.
    pub(super) fn resume(
        &mut self,
        key: StreamKey,
        mut replay: StreamReplay,
        seq: u64,
        (now, grace): (Time, Duration),
    ) {
        // This cannot fail: the caller has checked `reaches`.
        let _ = replay.items.rewind(seq);
        replay.waits = true;
        replay.until = replay.until.map(|_| now + grace);
        if let Some(window) = &mut replay.window {
            window.acked = window.acked.max(seq);
            // The stall timeout stood still while the client was away, and starts anew.
            window.full = window.full.map(|_| now);
        }
        // The client has received these, so it cannot ask for them after another loss.
        while replay.items.first() < seq && replay.items.evict().is_some() {}
        self.adopt(key, replay);
        self.flowing.insert(key);
    }

    fn adopt(&mut self, key: StreamKey, replay: StreamReplay) {
        // A client may reuse the id of an ended stream (LM-508); only the latest one can be resumed by it.
        if let Some(earlier) = self.ids.insert(replay.id.clone(), key)
            && earlier != key
        {
            let _ = self.take(earlier);
        }
        self.bytes += replay.items.bytes();
        if replay.until.is_some() {
            self.ended.push_back(key);
        }
        if replay.window.is_some() {
            self.windows.insert(key);
        }
        self.of.insert(key, replay);
    }

    /// Makes room for the newest item of a buffer.
    fn fit(&mut self, key: StreamKey, limits: &ConnectionLimits) {
        // Whole buffers of ended streams are removed before single items of this one, which still runs.
        while self.bytes > limits.resume_session_bytes && self.remove_one(Some(key)) {}
        let total = limits.resume_session_bytes;
        let Some(replay) = self.of.get_mut(&key) else {
            return;
        };
        while replay.items.len() > limits.resume_items
            || replay.items.bytes() > limits.resume_bytes
            || self.bytes > total
        {
            // Only unsent items are left: they stay although they exceed the limit, and `is_full` parks the stream
            // (LM-964).
            let Some(bytes) = replay.items.evict() else {
                return;
            };
            self.bytes -= bytes;
        }
    }

    /// Removes the oldest buffer of an ended stream without unsent items, except `but`; returns whether there was one.
    fn remove_one(&mut self, but: Option<StreamKey>) -> bool {
        // The unsent items of an ended stream include its end, which the client must still receive (LM-501).
        let idle = |key: &StreamKey| self.of.get(key).is_some_and(|replay| !replay.has_unsent());
        let found = self
            .ended
            .iter()
            .copied()
            .find(|key| Some(*key) != but && idle(key));
        found.is_some_and(|key| self.take(key).is_some())
    }
}

/// Bytes of a buffer's turn before the next buffer has its turn.
const TURN_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lmtp::port::Config;

    /// Sends what is due and returns the bytes per stream, which the item's letter identifies.
    fn flow(replays: &mut ReplayBuffers, outbox: &mut Outbox) -> Vec<(u8, usize)> {
        replays.flow(outbox, Time::ZERO);
        let mut out = Vec::new();
        while let Some(message) = outbox.take(Time::ZERO) {
            for letter in [b'a', b'b', b'c'] {
                let count = message.iter().filter(|byte| **byte == letter).count();
                if count > 0 {
                    out.push((letter, count));
                }
            }
        }
        out
    }

    #[test]
    fn lm_952_a_stream_that_cannot_be_resumed_retains_no_sent_items() {
        let config = Config::default();
        let (mut replays, mut outbox) = (ReplayBuffers::default(), Outbox::new(&config));
        let key = StreamKey(1);
        replays.begin(key, &StreamId::new("1"), false, Some(2));
        for _ in 0..3 {
            replays.put(key, &mut outbox, Time::ZERO, Bytes::from_static(b"aa"));
        }
        assert_eq!(flow(&mut replays, &mut outbox), [(b'a', 4)]);
        assert_eq!(replays.bytes, 2, "the one that the window holds back");
        replays.acknowledge(key, 2, Time::ZERO);
        assert_eq!(flow(&mut replays, &mut outbox), [(b'a', 2)]);
        assert_eq!((replays.bytes, replays.of[&key].items.len()), (0, 0));
    }

    #[test]
    fn lm_964_after_a_resume_streams_take_turns_by_bytes() {
        let config = Config {
            coalesce: false,
            limits: std::sync::Arc::new(ConnectionLimits {
                outbox_low_bytes: 4_000,
                ..ConnectionLimits::default()
            }),
            ..Config::default()
        };
        let (mut replays, mut outbound) = (ReplayBuffers::default(), Outbox::new(&config));
        let keys = [1, 2, 3].map(StreamKey);
        for (key, name) in keys.iter().zip(["1", "2", "3"]) {
            replays.begin(*key, &StreamId::new(name), true, None);
        }
        replays.hold(&config.limits);
        let give = |replays: &mut ReplayBuffers, outbound: &mut Outbox, at: usize, bytes: usize| {
            let item = vec![b'a' + u8::try_from(at).unwrap(); bytes].into();
            replays.put(keys[at], outbound, Time::ZERO, item);
        };
        for (at, items) in [(0, 400), (1, 20), (2, 20)] {
            for _ in 0..items {
                give(&mut replays, &mut outbound, at, 1_000);
            }
        }
        for key in keys {
            let replay = replays.take(key).unwrap();
            replays.resume(key, replay, 0, (Time::ZERO, Duration::ZERO));
        }
        replays.detached = false;
        // The connection takes little at a time, and the first stream produces as much again each time.
        let mut sent = [0_usize; 3];
        let mut all = 0;
        while sent[1] < 20_000 || sent[2] < 20_000 {
            for (letter, bytes) in flow(&mut replays, &mut outbound) {
                sent[usize::from(letter - b'a')] += bytes;
                all += bytes;
                give(&mut replays, &mut outbound, 0, 1_000);
            }
            assert!(all < 200_000, "the others wait: {sent:?}");
        }
        assert!(
            sent[0] >= 16_000,
            "and the first one has its turns as well: {sent:?}"
        );
    }
}
