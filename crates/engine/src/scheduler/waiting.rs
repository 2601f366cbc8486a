//! [`WaitingSequences`]: the waiting sequences, in the order in which they are admitted.
//!
//! ```text
//!   the caller whose last turn is longest ago
//!     └─ its highest priority, or the one that ageing prefers
//!          ├─ sequences that have run before, oldest first
//!          └─ the connection whose last turn is longest ago
//!               └─ new sequences, oldest first
//! ```
//!
//! Each level is sorted. What is next is found without a look at the others that wait, and whatever changes the order costs
//! the logarithm of the queue: one caller may queue tens of thousands of sequences.
//!
//! Invariants:
//! - A waiting sequence is in `new` or in `again`; and it is ready, which means in the queue of its caller, or else in `yielded` or in
//!   `aside`.
//! - `turns` has the callers with a ready sequence, and the turns of a priority its connections with one.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use super::{QueueMember, SequenceKey, SequenceStage, WaitingFrom};

#[derive(Clone, Debug, Default)]
pub(super) struct WaitingSequences {
    /// Sequences that have never run.
    new: BTreeMap<SequenceKey, QueueMember>,
    /// Sequences that have run before, and may hold KV cells.
    again: BTreeMap<SequenceKey, QueueMember>,
    /// Every caller with sequences, also with none that waits: a caller whose only stream is preempted keeps its turn, and does not
    /// come after those who had theirs while it ran.
    callers: HashMap<u64, CallerQueue>,
    /// The callers by their last turn.
    turns: BTreeMap<u64, u64>,
    /// Sequences that are last until so many were admitted, by that number and their arrival.
    yielded: BTreeMap<(u64, u64), SequenceKey>,
    /// Sequences that were passed over, by arrival.
    aside: BTreeMap<u64, PassedOver>,
    /// Gives each turn a number of its own.
    clock: u64,
    /// Sequences admitted so far.
    admitted: u64,
    /// One in this many admissions of a caller goes to the priority of its oldest sequence; 0: none.
    ageing: u32,
}

/// A sequence that was passed over.
#[derive(Clone, Copy, Debug)]
struct PassedOver {
    key: SequenceKey,
    /// The last turn of its connection: without it, one that is restored would be behind all other connections.
    turn: Option<u64>,
}

/// The ready sequences of a caller.
#[derive(Clone, Debug)]
struct CallerQueue {
    last_turn: u64,
    /// Its waiting, running and parked sequences.
    sequences: usize,
    /// Its sequences that were admitted since it has any.
    admitted: u64,
    priorities: BTreeMap<Reverse<i32>, PriorityQueue>,
    /// The priorities of the ready sequences, by arrival.
    arrivals: BTreeMap<u64, i32>,
}

/// The ready sequences of a caller with one priority.
#[derive(Clone, Debug, Default)]
struct PriorityQueue {
    /// Sequences that have run before, by arrival.
    again: BTreeMap<u64, SequenceKey>,
    connections: HashMap<u64, ConnectionQueue>,
    /// The connections by their last turn.
    turns: BTreeMap<u64, u64>,
}

/// The new sequences of a connection with one priority.
#[derive(Clone, Debug)]
struct ConnectionQueue {
    last_turn: u64,
    /// By arrival.
    new: BTreeMap<u64, SequenceKey>,
}

impl WaitingSequences {
    pub(super) fn new(ageing: u32) -> Self {
        Self {
            ageing,
            ..Self::default()
        }
    }

    pub(super) fn ageing(&self) -> u32 {
        self.ageing
    }

    /// Returns whether nothing is left of any sequence.
    #[cfg(test)]
    pub(super) fn is_unused(&self) -> bool {
        let queued = self.turns.len() + self.yielded.len() + self.aside.len();
        self.is_empty() && self.callers.is_empty() && queued == 0
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn len(&self) -> usize {
        self.new.len() + self.again.len()
    }

    /// Returns the number of sequences that were admitted so far.
    pub(super) fn admitted(&self) -> u64 {
        self.admitted
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = SequenceKey> + '_ {
        self.new.keys().chain(self.again.keys()).copied()
    }

    /// The sequences that have run before.
    pub(super) fn again(&self) -> impl Iterator<Item = &QueueMember> {
        self.again.values()
    }

    /// Counts a sequence of a caller, from its submission to its end.
    pub(super) fn join(&mut self, caller: u64) {
        let queue = self.callers.entry(caller).or_insert_with(|| {
            // A caller that has had no turn yet comes after those that already take turns, or many callers with one request
            // each would keep one with several waiting for ever.
            self.clock += 1;
            CallerQueue {
                last_turn: self.clock,
                sequences: 0,
                admitted: 0,
                priorities: BTreeMap::new(),
                arrivals: BTreeMap::new(),
            }
        });
        queue.sequences += 1;
    }

    /// Counts a sequence of a caller no more, so that the table does not grow with the number of callers ever seen.
    pub(super) fn leave(&mut self, caller: u64) {
        if let Entry::Occupied(mut queue) = self.callers.entry(caller) {
            queue.get_mut().sequences -= 1;
            if queue.get().sequences == 0 {
                queue.remove();
            }
        }
    }

    /// Adds a sequence, whose caller has joined.
    pub(super) fn insert(&mut self, member: QueueMember) {
        let members = match member.stage {
            SequenceStage::Waiting(WaitingFrom::New) => &mut self.new,
            _ => &mut self.again,
        };
        members.insert(member.key, member);
        self.enqueue(&member, None);
    }

    /// Removes a sequence; nobody has had a turn.
    pub(super) fn remove(&mut self, key: SequenceKey) -> Option<QueueMember> {
        let new = self.new.remove(&key);
        let member = new.or_else(|| self.again.remove(&key))?;
        if self.aside.remove(&member.arrival).is_none() {
            self.dequeue(&member);
        }
        Some(member)
    }

    /// Returns the sequence to admit next, of those that were not passed over.
    pub(super) fn next(&self) -> Option<SequenceKey> {
        let caller = self.turns.values().next();
        let next = caller.and_then(|caller| self.callers.get(caller)?.next(self.ageing));
        next.or_else(|| self.yielded.values().next().copied())
    }

    /// Passes a sequence over until it is restored. It changes nobody's turn.
    pub(super) fn set_aside(&mut self, key: SequenceKey) {
        if let Some(member) = self.get(key)
            && !self.aside.contains_key(&member.arrival)
        {
            let queue = self.callers.get(&member.turn.caller);
            let turn = queue.and_then(|queue| queue.connection_turn(&member));
            self.aside.insert(member.arrival, PassedOver { key, turn });
            self.dequeue(&member);
        }
    }

    /// The sequences that are passed over, oldest first.
    pub(super) fn aside(&self) -> impl Iterator<Item = SequenceKey> + '_ {
        self.aside.values().map(|passed| passed.key)
    }

    /// Passes a sequence over no longer.
    pub(super) fn restore(&mut self, key: SequenceKey) {
        if let Some(member) = self.get(key)
            && let Some(passed) = self.aside.remove(&member.arrival)
        {
            self.enqueue(&member, passed.turn);
        }
    }

    /// Removes a sequence that gets a slot: its caller and its connection have their turn.
    pub(super) fn admit(&mut self, key: SequenceKey) -> Option<QueueMember> {
        let mut member = self.remove(key)?;
        self.clock += 1;
        self.admitted += 1;
        if let Some(queue) = self.callers.get_mut(&member.turn.caller) {
            if self.turns.remove(&queue.last_turn).is_some() {
                self.turns.insert(self.clock, member.turn.caller);
            }
            queue.end_turn(&mut member, self.clock, self.ageing);
        }
        // Those that have yielded for long enough wait like those that were preempted, so that newcomers do not keep them waiting
        // for ever.
        while let Some(first) = self.yielded.first_entry()
            && first.key().0 <= self.admitted
        {
            let key = first.remove();
            if let Some(&member) = self.again.get(&key) {
                self.enqueue(&member, None);
            }
        }
        Some(member)
    }

    fn get(&self, key: SequenceKey) -> Option<QueueMember> {
        let member = self.new.get(&key).or_else(|| self.again.get(&key));
        member.copied()
    }

    /// Adds a sequence to the queue of its caller. `turn`: the last one of its connection, if it was passed over.
    fn enqueue(&mut self, member: &QueueMember, turn: Option<u64>) {
        if let SequenceStage::Waiting(WaitingFrom::Yielded { until }) = member.stage
            && until > self.admitted
        {
            self.yielded.insert((until, member.arrival), member.key);
            return;
        }
        let caller = member.turn.caller;
        let Some(queue) = self.callers.get_mut(&caller) else {
            return;
        };
        if queue.arrivals.is_empty() {
            self.turns.insert(queue.last_turn, caller);
        }
        self.clock += 1;
        queue.insert(member, turn.unwrap_or(self.clock));
    }

    /// Removes a sequence that is not passed over from its queue.
    fn dequeue(&mut self, member: &QueueMember) {
        if let SequenceStage::Waiting(WaitingFrom::Yielded { until }) = member.stage
            && self.yielded.remove(&(until, member.arrival)).is_some()
        {
            return;
        }
        let Some(queue) = self.callers.get_mut(&member.turn.caller) else {
            return;
        };
        queue.remove(member);
        if queue.arrivals.is_empty() {
            self.turns.remove(&queue.last_turn);
        }
    }
}

impl CallerQueue {
    fn next(&self, ageing: u32) -> Option<SequenceKey> {
        let priority = match self.is_aged(ageing) {
            // All of the oldest sequence's priority, and not that sequence alone: within it, connections still take turns.
            true => {
                let oldest = self.arrivals.values().next()?;
                self.priorities.get(&Reverse(*oldest))
            }
            false => self.priorities.values().next(),
        };
        priority?.next()
    }

    /// Returns whether ageing decides the next admission.
    fn is_aged(&self, ageing: u32) -> bool {
        // Counted for each caller: among several, every so-many-th admission of all could always be the same caller's.
        ageing > 0 && (self.admitted + 1).is_multiple_of(ageing.into())
    }

    /// Ends the turn of a sequence that is admitted, and was removed.
    fn end_turn(&mut self, member: &mut QueueMember, now: u64, ageing: u32) {
        // One that comes back had its connection's turn when it was admitted first.
        if member.stage == SequenceStage::Waiting(WaitingFrom::New)
            && let Some(queue) = self.priorities.get_mut(&Reverse(member.priority))
        {
            queue.end_turn(member.turn.connection, now);
        }
        // It keeps the priority that it was preferred to. Otherwise it would soon be preempted for those that have it, and
        // would compute its prompt again and again without a token.
        if self.is_aged(ageing)
            && let Some(&Reverse(highest)) = self.priorities.keys().next()
        {
            member.priority = member.priority.max(highest);
        }
        self.last_turn = now;
        self.admitted += 1;
    }

    /// The last turn of the connection of a sequence, if that has new ones.
    fn connection_turn(&self, member: &QueueMember) -> Option<u64> {
        let queue = self.priorities.get(&Reverse(member.priority))?;
        let connection = queue.connections.get(&member.turn.connection)?;
        Some(connection.last_turn)
    }

    /// Adds a sequence. A connection that had none yet has had its last turn then.
    fn insert(&mut self, member: &QueueMember, last_turn: u64) {
        self.arrivals.insert(member.arrival, member.priority);
        let queue = self.priorities.entry(Reverse(member.priority));
        queue.or_default().insert(member, last_turn);
    }

    fn remove(&mut self, member: &QueueMember) {
        self.arrivals.remove(&member.arrival);
        if let Some(queue) = self.priorities.get_mut(&Reverse(member.priority)) {
            queue.remove(member);
            if queue.next().is_none() {
                self.priorities.remove(&Reverse(member.priority));
            }
        }
    }
}

impl PriorityQueue {
    fn next(&self) -> Option<SequenceKey> {
        // Its client is in the middle of an answer.
        let again = self.again.values().next().copied();
        again.or_else(|| {
            let connection = self.turns.values().next()?;
            let queue = self.connections.get(connection)?;
            queue.new.values().next().copied()
        })
    }

    fn insert(&mut self, member: &QueueMember, last_turn: u64) {
        if member.stage != SequenceStage::Waiting(WaitingFrom::New) {
            self.again.insert(member.arrival, member.key);
            return;
        }
        let connection = member.turn.connection;
        let queue = self.connections.entry(connection).or_insert_with(|| {
            self.turns.insert(last_turn, connection);
            ConnectionQueue {
                last_turn,
                new: BTreeMap::new(),
            }
        });
        queue.new.insert(member.arrival, member.key);
    }

    fn remove(&mut self, member: &QueueMember) {
        if self.again.remove(&member.arrival).is_some() {
            return;
        }
        if let Entry::Occupied(mut queue) = self.connections.entry(member.turn.connection) {
            queue.get_mut().new.remove(&member.arrival);
            if queue.get().new.is_empty() {
                self.turns.remove(&queue.get().last_turn);
                queue.remove();
            }
        }
    }

    /// Moves a connection behind the others, if it still has sequences here.
    fn end_turn(&mut self, connection: u64, now: u64) {
        if let Some(queue) = self.connections.get_mut(&connection) {
            self.turns.remove(&queue.last_turn);
            self.turns.insert(now, connection);
            queue.last_turn = now;
        }
    }
}
