//! Replay buffers: numbered items that a client may receive again or later (LM-952, LM-963, LM-964).
//!
//! ```text
//!        first              waiting              next
//!   gone │ said, and kept    │ not said yet       │
//!        └── goes when the room is needed          └── a stream whose items do not fit any more is parked
//! ```
//!
//! Most rings wait for nothing: an item is put out at once and kept beside. Three things make one wait: a lost connection,
//! items that are replayed, and a window that is full.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};

use crate::lmtp::outbound::LmtpOutbound;
use crate::lmtp::port::{Config, StreamKey};
use crate::lmtp::{ConnectionLimits, StreamId};
use crate::time::Time;

/// How many items a client takes without a word (LM-952).
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    size: u64,
    /// Items below this number were acknowledged.
    acked: u64,
    /// Since when nothing was, though all that may be under way is.
    full: Option<Time>,
}

/// The items of one stream.
#[derive(Debug)]
pub(super) struct ReplayBuffer {
    id: StreamId,
    /// What was asked for, in short; `None` if nobody comes back for it, and its items bear no numbers.
    request: Option<u64>,
    /// The number of the oldest item that is kept.
    first: u64,
    items: VecDeque<Bytes>,
    bytes: usize,
    /// The number of the first item that was not put out, if there is one or the next will be.
    waiting: Option<u64>,
    window: Option<Window>,
    /// Its work stands still.
    parked: bool,
    /// Its stream has ended; when it is forgotten.
    until: Option<Time>,
}

impl ReplayBuffer {
    fn new(id: StreamId, request: Option<u64>, window: Option<u32>) -> Self {
        Self {
            id,
            request,
            first: 0,
            items: VecDeque::new(),
            bytes: 0,
            waiting: None,
            window: window.map(|size| Window {
                size: size.into(),
                acked: 0,
                full: None,
            }),
            parked: false,
            until: None,
        }
    }

    /// The number of the item that comes next.
    fn next(&self) -> u64 {
        self.first + self.items.len() as u64
    }

    /// Items from this number on may not be put out yet.
    fn closed_from(&self) -> u64 {
        self.window
            .map_or(u64::MAX, |window| window.acked.saturating_add(window.size))
    }

    /// Nothing can be let go, and there is no room for another item; `all` bytes are kept for all streams.
    fn is_full(&self, limits: &ConnectionLimits, all: usize) -> bool {
        let room = self.items.len() < limits.resume_items
            && self.bytes < limits.resume_bytes
            && all < limits.resume_session_bytes;
        !room && self.waiting == Some(self.first)
    }

    /// The number of the first item that was not sent.
    fn next_unsent(&self) -> u64 {
        self.waiting.unwrap_or_else(|| self.next())
    }

    /// Whether there is an item that was not sent.
    fn has_unsent(&self) -> bool {
        self.next_unsent() < self.next()
    }

    /// Lets the oldest item go, if it was put out. Returns its bytes.
    fn shed(&mut self) -> Option<usize> {
        if self.waiting.is_some_and(|waiting| waiting <= self.first) {
            return None;
        }
        let bytes = self.items.pop_front()?.len();
        self.first += 1;
        self.bytes -= bytes;
        Some(bytes)
    }

    /// The same items for another id (LM-963). The first member of that name is the item's own: only a token is before it.
    fn renamed(&self, id: &StreamId) -> VecDeque<Bytes> {
        let old = [NAME, self.id.as_json().as_bytes()].concat();
        let rename = |item: &Bytes| {
            let at = item.windows(old.len()).position(|part| part == old);
            let Some(at) = at else {
                return item.clone();
            };
            let mut renamed = BytesMut::with_capacity(item.len());
            renamed.put_slice(&item[..at]);
            renamed.put_slice(NAME);
            renamed.put_slice(id.as_json().as_bytes());
            renamed.put_slice(&item[at + old.len()..]);
            renamed.freeze()
        };
        self.items.iter().map(rename).collect()
    }
}

/// How an id stands in an item.
const NAME: &[u8] = b"\"stream_id\":";

/// The rings of a session.
#[derive(Debug, Default)]
pub(super) struct ReplayBuffers {
    of: BTreeMap<StreamKey, ReplayBuffer>,
    ids: BTreeMap<StreamId, StreamKey>,
    /// Those of ended streams, in the order in which they are forgotten.
    ended: VecDeque<StreamKey>,
    /// Those with items that may be put out; they take turns, in order of admission.
    flowing: BTreeSet<StreamKey>,
    /// Whose turn it is or was last, and how many bytes are left of it.
    turn: Option<(StreamKey, usize)>,
    /// Those with a window.
    windows: BTreeSet<StreamKey>,
    bytes: usize,
    /// The connection is lost: everything waits.
    detached: bool,
}

impl ReplayBuffers {
    /// A stream begins. What was kept under its id is forgotten.
    pub(super) fn begin(
        &mut self,
        key: StreamKey,
        id: &StreamId,
        request: Option<u64>,
        window: Option<u32>,
    ) {
        self.adopt(key, ReplayBuffer::new(id.clone(), request, window));
    }

    /// Nobody comes back any more to what was kept under an id.
    pub(super) fn remove(&mut self, id: &StreamId) {
        if let Some(key) = self.named(id) {
            drop(self.take(key));
        }
    }

    /// The ring of the latest stream with this id.
    pub(super) fn named(&self, id: &StreamId) -> Option<StreamKey> {
        self.ids.get(id).copied()
    }

    /// Whether its items bear numbers, so that a client can come back to it.
    pub(super) fn is_numbered(&self, key: StreamKey) -> bool {
        let replay = self.of.get(&key);
        replay.is_some_and(|replay| replay.request.is_some())
    }

    /// Whether a stream of this id has something to say that waits.
    pub(super) fn has_unsent(&self, id: &StreamId) -> bool {
        let replay = self.named(id).and_then(|key| self.of.get(&key));
        replay.is_some_and(ReplayBuffer::has_unsent)
    }

    /// Whether this was asked for.
    pub(super) fn is_of(&self, key: StreamKey, request: u64) -> bool {
        self.of
            .get(&key)
            .is_some_and(|replay| replay.request == Some(request))
    }

    /// Whether everything since `seq` can be replayed.
    pub(super) fn reaches(&self, key: StreamKey, seq: u64) -> bool {
        let replay = self.of.get(&key);
        replay.is_some_and(|replay| (replay.first..=replay.next()).contains(&seq))
    }

    /// Takes an item: into the message that is being made, or for later. Whether its stream has to stand still now.
    pub(super) fn put(
        &mut self,
        key: StreamKey,
        outbound: &mut LmtpOutbound,
        config: &Config,
        now: Time,
        write: impl FnOnce(&mut BytesMut),
    ) -> bool {
        let limits = &*config.limits;
        let Some(replay) = self.of.get_mut(&key) else {
            outbound.item(limits.max_frame_out, write);
            return false;
        };
        let mut item = BytesMut::new();
        write(&mut item);
        let item = item.freeze();
        if replay.waiting.is_none() && replay.next() >= replay.closed_from() {
            replay.waiting = Some(replay.next());
        }
        if replay.waiting.is_none() {
            outbound.item(limits.max_frame_out, |out| out.put_slice(&item));
        }
        replay.bytes += item.len();
        self.bytes += item.len();
        replay.items.push_back(item);
        self.fit(key, limits);
        let Some(replay) = self.of.get_mut(&key) else {
            return false;
        };
        let closed = replay.next() >= replay.closed_from();
        if let Some(window) = replay.window.as_mut().filter(|_| closed) {
            window.full.get_or_insert(now);
        }
        let parks = (closed || replay.is_full(limits, self.bytes)) && !replay.parked;
        replay.parked |= parks;
        parks
    }

    /// Puts out what waits, as far as there is room. Returns the streams that may go on.
    pub(super) fn flow(
        &mut self,
        outbound: &mut LmtpOutbound,
        config: &Config,
        now: Time,
    ) -> Vec<StreamKey> {
        let mut goes_on = Vec::new();
        if self.detached {
            return goes_on;
        }
        let limits = &*config.limits;
        while outbound.is_empty() || outbound.bytes < limits.outbox_low_bytes {
            let Some(key) = self.take_turn() else {
                break;
            };
            let replay = self.of.get_mut(&key);
            let Some((replay, seq)) =
                replay.and_then(|replay| replay.waiting.map(|seq| (replay, seq)))
            else {
                self.flowing.remove(&key);
                continue;
            };
            let at = usize::try_from(seq - replay.first).unwrap_or(usize::MAX);
            let item = replay.items.get(at).filter(|_| seq < replay.closed_from());
            if let Some(item) = item {
                outbound.item(limits.max_frame_out, |out| out.put_slice(item));
                if !config.coalesce {
                    outbound.end_items();
                }
                if let Some((_, left)) = &mut self.turn {
                    *left = left.saturating_sub(item.len());
                }
                replay.waiting = Some(seq + 1);
                continue;
            }
            self.flowing.remove(&key);
            let closed = seq >= replay.closed_from();
            if let Some(window) = replay.window.as_mut().filter(|_| closed) {
                window.full.get_or_insert(now);
            }
            if seq == replay.next() {
                replay.waiting = None;
                if !closed && std::mem::take(&mut replay.parked) {
                    goes_on.push(key);
                }
            }
        }
        goes_on
    }

    /// Whose items go next. Turns are counted in bytes: a stream that gives faster than its client reads has always more,
    /// and the others must not wait for its end.
    fn take_turn(&mut self) -> Option<StreamKey> {
        let last = match self.turn {
            Some((key, left)) if left > 0 && self.flowing.contains(&key) => return Some(key),
            last => last.map(|(key, _)| key),
        };
        let behind = last.and_then(|last| {
            let behind = (Bound::Excluded(last), Bound::Unbounded);
            self.flowing.range(behind).next()
        });
        let next = behind.or_else(|| self.flowing.first()).copied()?;
        self.turn = Some((next, TURN_BYTES));
        Some(next)
    }

    /// What is acknowledged: everything below this number. Stale and impossible numbers change nothing (LM-952).
    pub(super) fn acknowledge(&mut self, key: StreamKey, below: u64, now: Time) {
        let Some(replay) = self.of.get_mut(&key) else {
            return;
        };
        let sent = replay.next_unsent();
        let Some(window) = replay.window.as_mut().filter(|_| below <= sent) else {
            return;
        };
        if below <= window.acked {
            return;
        }
        window.acked = below;
        let closed = sent >= window.acked.saturating_add(window.size);
        window.full = window.full.filter(|_| closed).map(|_| now);
        // With nothing left to say it goes on from the place where it stood.
        replay.waiting.get_or_insert(sent);
        self.flowing.insert(key);
    }

    /// The stream ends early: its end is sent without waiting for the window.
    pub(super) fn open_window(&mut self, key: StreamKey) {
        if self.windows.remove(&key)
            && let Some(replay) = self.of.get_mut(&key)
        {
            replay.window = None;
            if replay.waiting.is_some() {
                self.flowing.insert(key);
            }
        }
    }

    /// The same for all.
    pub(super) fn open_windows(&mut self) {
        while let Some(&key) = self.windows.first() {
            self.open_window(key);
        }
    }

    /// Whether all items were sent, but for those in flight.
    pub(super) fn is_sent(&self) -> bool {
        let waits = |key| self.of.get(key).is_some_and(ReplayBuffer::has_unsent);
        self.flowing.is_empty() && !self.windows.iter().any(waits)
    }

    /// The first stream whose client has acknowledged nothing for so long.
    pub(super) fn stalled(&self, timeout: Duration) -> Option<(Time, StreamKey)> {
        if self.detached {
            return None;
        }
        // A stream whose end was sent has nothing to wait for.
        let full = |replay: &ReplayBuffer| {
            let has_output = replay.until.is_none() || replay.has_unsent();
            Some(replay.window?.full? + timeout).filter(|_| has_output)
        };
        let stalls = self.windows.iter();
        let stalls = stalls.filter_map(|key| Some((full(self.of.get(key)?)?, *key)));
        stalls.min()
    }

    /// What waits in a ring is not said any more.
    pub(super) fn discard_unsent(&mut self, key: StreamKey) -> Option<StreamId> {
        let replay = self.of.get_mut(&key)?;
        if let Some(waiting) = replay.waiting.take() {
            let sent = usize::try_from(waiting.saturating_sub(replay.first)).unwrap_or(usize::MAX);
            let dropped: usize = replay
                .items
                .drain(sent.min(replay.items.len())..)
                .map(|item| item.len())
                .sum();
            replay.bytes -= dropped;
            self.bytes -= dropped;
        }
        replay.window = None;
        let id = replay.id.clone();
        self.windows.remove(&key);
        self.flowing.remove(&key);
        Some(id)
    }

    /// The number of the next item, if it bears one.
    pub(super) fn seq(&self, key: StreamKey) -> Option<u64> {
        let replay = self.of.get(&key).filter(|replay| replay.request.is_some());
        replay.map(ReplayBuffer::next)
    }

    /// The number of the first item that was not sent.
    pub(super) fn next_unsent(&self, key: StreamKey) -> Option<u64> {
        self.of.get(&key).map(ReplayBuffer::next_unsent)
    }

    /// The stream has ended: its items are kept until then, if there is room.
    pub(super) fn end(&mut self, key: StreamKey, until: Time, limits: &ConnectionLimits) {
        let Some(replay) = self.of.get_mut(&key) else {
            return;
        };
        replay.until = Some(until);
        self.ended.push_back(key);
        if self.ended.len() > limits.max_streams {
            self.remove_one(None);
        }
    }

    /// When the next is forgotten.
    pub(super) fn expires_at(&self) -> Option<Time> {
        let first = self.ended.front().filter(|_| !self.detached);
        first.and_then(|key| self.of.get(key)?.until)
    }

    /// Forgets those whose time is over; who has something to say yet is kept for another `grace`.
    pub(super) fn expire(&mut self, now: Time, grace: Duration) {
        while self.expires_at().is_some_and(|until| until <= now) {
            let Some(key) = self.ended.pop_front() else {
                return;
            };
            match self.of.get_mut(&key).filter(|replay| replay.has_unsent()) {
                Some(replay) => {
                    replay.until = Some(now + grace);
                    self.ended.push_back(key);
                }
                None => drop(self.take(key)),
            }
        }
    }

    /// The connection is lost: what its client may not have got waits for it. Returns the streams that have no room to go
    /// on.
    pub(super) fn hold(&mut self, limits: &ConnectionLimits) -> Vec<StreamKey> {
        self.detached = true;
        self.flowing.clear();
        let mut full = Vec::new();
        for (key, replay) in &mut self.of {
            let acked = replay.window.map_or(0, |window| window.acked);
            replay.waiting = Some(replay.first.max(acked));
            if replay.is_full(limits, self.bytes) && !std::mem::replace(&mut replay.parked, true) {
                full.push(*key);
            }
        }
        full
    }

    /// Takes a ring out.
    pub(super) fn take(&mut self, key: StreamKey) -> Option<ReplayBuffer> {
        let replay = self.of.remove(&key)?;
        self.bytes -= replay.bytes;
        self.flowing.remove(&key);
        self.windows.remove(&key);
        if replay.until.is_some() {
            self.ended.retain(|ended| *ended != key);
        }
        if self.ids.get(&replay.id) == Some(&key) {
            self.ids.remove(&replay.id);
        }
        Some(replay)
    }

    /// Takes a ring in whose client wants everything from `seq` on; what is before it was received. If its stream has ended,
    /// it is kept for `grace`.
    pub(super) fn resume(
        &mut self,
        key: StreamKey,
        mut replay: ReplayBuffer,
        seq: u64,
        (now, grace): (Time, Duration),
    ) {
        replay.waiting = Some(seq);
        replay.until = replay.until.map(|_| now + grace);
        if let Some(window) = &mut replay.window {
            window.acked = window.acked.max(seq);
            window.full = window.full.map(|_| now);
        }
        while replay.first < seq && replay.shed().is_some() {}
        self.adopt(key, replay);
        self.flowing.insert(key);
    }

    /// Gives a stream another id, and replays it from its first item.
    pub(super) fn rename(&mut self, key: StreamKey, id: &StreamId, (now, grace): (Time, Duration)) {
        let Some(mut replay) = self.take(key) else {
            return;
        };
        replay.items = replay.renamed(id);
        replay.bytes = replay.items.iter().map(Bytes::len).sum();
        replay.id = id.clone();
        if let Some(window) = &mut replay.window {
            (window.acked, window.full) = (0, None);
        }
        self.resume(key, replay, 0, (now, grace));
    }

    fn adopt(&mut self, key: StreamKey, replay: ReplayBuffer) {
        if let Some(earlier) = self.ids.insert(replay.id.clone(), key)
            && earlier != key
        {
            let _ = self.take(earlier);
        }
        self.bytes += replay.bytes;
        if replay.until.is_some() {
            self.ended.push_back(key);
        }
        if replay.window.is_some() {
            self.windows.insert(key);
        }
        self.of.insert(key, replay);
    }

    /// Makes room for the newest item of a ring.
    fn fit(&mut self, key: StreamKey, limits: &ConnectionLimits) {
        while self.bytes > limits.resume_session_bytes && self.remove_one(Some(key)) {}
        let total = limits.resume_session_bytes;
        let Some(replay) = self.of.get_mut(&key) else {
            return;
        };
        while replay.items.len() > limits.resume_items
            || replay.bytes > limits.resume_bytes
            || self.bytes > total
        {
            let Some(bytes) = replay.shed() else {
                return;
            };
            self.bytes -= bytes;
        }
    }

    /// Forgets the oldest ended stream that has nothing to say, but not this one; whether there was one.
    fn remove_one(&mut self, but: Option<StreamKey>) -> bool {
        let idle = |key: &StreamKey| self.of.get(key).is_some_and(|replay| !replay.has_unsent());
        let found = self
            .ended
            .iter()
            .copied()
            .find(|key| Some(*key) != but && idle(key));
        found.is_some_and(|key| self.take(key).is_some())
    }
}

/// Bytes of one stream's items before the next one's have their turn.
const TURN_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lmtp::port::MessageFraming;

    /// What is put out next, in bytes, by the stream that the item's letter names.
    fn flow(
        replays: &mut ReplayBuffers,
        outbound: &mut LmtpOutbound,
        config: &Config,
    ) -> Vec<(u8, usize)> {
        replays.flow(outbound, config, Time::ZERO);
        let mut out = Vec::new();
        while let Some(message) = outbound.take(MessageFraming::Frames) {
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
    fn lm_964_after_a_resume_streams_take_turns_however_much_one_of_them_gives() {
        let config = Config {
            coalesce: false,
            limits: std::sync::Arc::new(ConnectionLimits {
                outbox_low_bytes: 4_000,
                ..ConnectionLimits::default()
            }),
            ..Config::default()
        };
        let (mut replays, mut outbound) = (ReplayBuffers::default(), LmtpOutbound::new(false));
        let keys = [1, 2, 3].map(StreamKey);
        for (key, name) in keys.iter().zip(["1", "2", "3"]) {
            replays.begin(*key, &StreamId::new(name), Some(7), None);
        }
        replays.hold(&config.limits);
        let give =
            |replays: &mut ReplayBuffers, outbound: &mut LmtpOutbound, at: usize, bytes: usize| {
                let item = vec![b'a' + u8::try_from(at).unwrap(); bytes];
                replays.put(keys[at], outbound, &config, Time::ZERO, |out| {
                    out.put_slice(&item)
                });
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
        // The connection takes little at a time, and the first stream gives as much again each time.
        let mut sent = [0_usize; 3];
        let mut all = 0;
        while sent[1] < 20_000 || sent[2] < 20_000 {
            for (letter, bytes) in flow(&mut replays, &mut outbound, &config) {
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
