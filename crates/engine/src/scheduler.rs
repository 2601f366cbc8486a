//! The scheduler: decides which sequences are admitted, what each step computes, and which sequence is preempted when
//! the KV cache is full. It is pure: it only orders and counts sequences by their keys.
//!
//! ```text
//!   submit ──► waiting ── admit ─► running ── park ──► parked
//!                 ▲                   │                  │
//!                 ├ preempt, yield ───┘                  │
//!                 └───────────────── unpark ─────────────┘        remove: from anywhere
//! ```
//!
//! Order of admission: a sequence that has yielded its slot is last until as many were admitted as waited when it yielded; then
//! it counts as a new one, so that newcomers do not keep it waiting for ever. Otherwise the higher priority is first; then
//! sequences that have run before (preempted or parked); then callers take turns, and the connections of one caller
//! take turns within the caller's turns (D-54); then first come, first served.
//!
//! Ageing: one admission in [`crate::config::Config::ageing_turns`] goes to the priority of the new sequence that has
//! waited longest, so that no priority starves. If the sequence that is next does not fit, no other is admitted before
//! it, so that small requests do not starve a large one.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

/// The key of a sequence in its owner's slab.
pub(crate) type SequenceKey = usize;

/// The caller and connection in whose turn a sequence is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SchedulerTurn {
    pub(crate) caller: u64,
    /// A connection or session of that caller.
    pub(crate) connection: u64,
}

impl SchedulerTurn {
    /// The keys that take turns: the caller among callers, the connection among those of the same caller.
    const fn fair_keys(self) -> [FairKey; 2] {
        [(self.caller, None), (self.caller, Some(self.connection))]
    }
}

/// The key of a caller (`None`), or of one of its connections.
type FairKey = (u64, Option<u64>);

/// The turns of a caller, or of one of its connections.
#[derive(Clone, Copy, Debug)]
struct FairTurns {
    /// When it last had one.
    last: u64,
    /// Its waiting sequences.
    waiting: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SequenceStage {
    Waiting(WaitingFrom),
    Running,
    Parked,
}

/// How a sequence came to wait; the derived order is the order of admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum WaitingFrom {
    /// It was preempted or parked.
    Ran,
    New,
    /// It yielded its slot to other sequences, and is last until the scheduler's clock of admissions has reached `until`.
    Yielded {
        until: u64,
    },
}

#[derive(Clone, Copy, Debug)]
struct QueueMember {
    key: SequenceKey,
    priority: i32,
    turn: SchedulerTurn,
    arrival: u64,
    stage: SequenceStage,
}

/// Stages and turns of all sequences.
#[derive(Debug)]
pub(crate) struct Scheduler {
    /// Running and parked sequences, oldest first.
    begun: Vec<QueueMember>,
    /// Waiting sequences. By key, and not among the others: a caller may queue a hundred thousand and drop all of them at
    /// once, and a step must not look at those that wait.
    waiting: BTreeMap<SequenceKey, QueueMember>,
    slots: usize,
    running: usize,
    arrivals: u64,
    turns: u64,
    /// One in this many admissions of new sequences goes to the priority of the one that waits longest; 0: none.
    ageing: u32,
    /// Number of sequences admitted so far that were new, or had yielded their slot.
    new_admitted: u64,
    /// The turns of each caller with waiting sequences, and of each of their connections.
    turns_of: HashMap<FairKey, FairTurns>,
}

impl Scheduler {
    /// Creates a scheduler for at most `slots` running sequences.
    pub(crate) fn new(slots: usize, ageing: u32) -> Self {
        Self {
            begun: Vec::new(),
            waiting: BTreeMap::new(),
            slots: slots.max(1),
            running: 0,
            arrivals: 0,
            turns: 0,
            ageing,
            new_admitted: 0,
            turns_of: HashMap::new(),
        }
    }

    /// Returns a scheduler without sequences, with the same limits.
    pub(crate) fn emptied(&self) -> Self {
        Self::new(self.slots, self.ageing)
    }

    /// Adds a new waiting sequence.
    pub(crate) fn submit(&mut self, key: SequenceKey, priority: i32, turn: SchedulerTurn) {
        self.arrivals += 1;
        self.enqueue(QueueMember {
            key,
            priority,
            turn,
            arrival: self.arrivals,
            stage: SequenceStage::Waiting(WaitingFrom::New),
        });
    }

    /// Returns the eligible sequence to admit next; `None` if no slot is left or none is eligible.
    pub(crate) fn next(&self, eligible: impl Fn(SequenceKey) -> bool) -> Option<SequenceKey> {
        if self.running >= self.slots {
            return None;
        }
        // A sequence that is not eligible is passed over and does not block others: it waits for a sequence, not for a
        // slot.
        let waiting = || self.waiting.values().filter(|member| eligible(member.key));
        let aged = self.aged(waiting());
        waiting()
            .min_by_key(|member| self.rank(member, aged))
            .map(|member| member.key)
    }

    /// Returns the waiting sequences in the order in which they would be admitted now. Callers take turns, so each
    /// admission may change the order.
    pub(crate) fn admission_order(&self) -> Vec<SequenceKey> {
        let mut order: Vec<_> = self.waiting.values().collect();
        let aged = self.aged(self.waiting.values());
        // Cached, because a rank looks up the turns of its caller and connection, and there may be thousands to sort.
        order.sort_by_cached_key(|member| self.rank(member, aged));
        order.into_iter().map(|member| member.key).collect()
    }

    /// Returns the priority that ageing prefers, if the next admission is one of those that ageing decides.
    fn aged<'a>(&self, waiting: impl Iterator<Item = &'a QueueMember>) -> Option<i32> {
        if self.ageing == 0 || !(self.new_admitted + 1).is_multiple_of(self.ageing.into()) {
            return None;
        }
        // Only new sequences age, and those that count as new. Those that ran before come first within their priority anyway.
        let new = waiting.filter(|member| self.waiting_from(member) == WaitingFrom::New);
        let oldest = new.min_by_key(|member| member.arrival)?;
        Some(oldest.priority)
    }

    /// How a sequence waits now.
    fn waiting_from(&self, member: &QueueMember) -> WaitingFrom {
        match member.stage {
            SequenceStage::Waiting(WaitingFrom::Yielded { until }) if until <= self.turns => {
                WaitingFrom::New
            }
            SequenceStage::Waiting(waiting) => waiting,
            // Cannot occur: only waiting members are ranked.
            SequenceStage::Running | SequenceStage::Parked => WaitingFrom::Ran,
        }
    }

    /// The sort key of a waiting sequence; the lowest is admitted first.
    fn rank(&self, member: &QueueMember, aged: Option<i32>) -> impl Ord + use<> {
        let waiting = self.waiting_from(member);
        let last_turns = match waiting {
            // It had its caller's turn when it was first admitted.
            WaitingFrom::Ran => [0; 2],
            WaitingFrom::New | WaitingFrom::Yielded { .. } => {
                let last = |fair_key| self.turns_of.get(&fair_key).map_or(0, |turns| turns.last);
                member.turn.fair_keys().map(last)
            }
        };
        // Ageing raises the whole priority of the oldest sequence, not that sequence alone: within it, callers still
        // take turns.
        let urgency = (aged == Some(member.priority), member.priority);
        (
            // Before the priority: a sequence of high priority would otherwise get its slot back at once.
            matches!(waiting, WaitingFrom::Yielded { .. }),
            std::cmp::Reverse(urgency),
            waiting,
            last_turns,
            member.arrival,
        )
    }

    /// Returns how many eligible sequences wait for lack of a slot.
    pub(crate) fn missing_slots(&self, eligible: impl Fn(SequenceKey) -> bool) -> usize {
        let waits = self.waiting.keys().filter(|key| eligible(**key)).count();
        waits.saturating_sub(self.slots - self.running.min(self.slots))
    }

    /// Moves a waiting sequence to running.
    pub(crate) fn admit(&mut self, key: SequenceKey) {
        // A clock that counts admissions: only the order of turns matters.
        self.turns += 1;
        let now = self.turns;
        let Some(mut member) = self.dequeue(key) else {
            return;
        };
        if member.stage != SequenceStage::Waiting(WaitingFrom::Ran) {
            self.new_admitted += 1;
        }
        // A sequence that comes back was counted at its first admission; counting it again would cost its caller a
        // turn.
        if member.stage == SequenceStage::Waiting(WaitingFrom::New) {
            for fair_key in member.turn.fair_keys() {
                // Only those with other waiting sequences have turns left to take.
                if let Some(turns) = self.turns_of.get_mut(&fair_key) {
                    turns.last = now;
                }
            }
        }
        member.stage = SequenceStage::Running;
        self.running += 1;
        let index = self
            .begun
            .partition_point(|other| other.arrival < member.arrival);
        self.begun.insert(index, member);
    }

    /// Moves a running sequence to waiting, before those that never ran.
    pub(crate) fn preempt(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Waiting(WaitingFrom::Ran));
    }

    /// Moves a running sequence to waiting, after all others that wait.
    pub(crate) fn yield_slot(&mut self, key: SequenceKey) {
        // At least one: it does not get the slot back that it has just yielded.
        let others = u64::try_from(self.waiting.len()).unwrap_or(u64::MAX).max(1);
        let until = self.turns.saturating_add(others);
        self.release_slot(key, SequenceStage::Waiting(WaitingFrom::Yielded { until }));
    }

    /// Moves a running sequence to parked until its reader has caught up.
    pub(crate) fn park(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Parked);
    }

    /// Moves a parked sequence to waiting.
    pub(crate) fn unpark(&mut self, key: SequenceKey) {
        if let Some(index) = self.position(key, SequenceStage::Parked) {
            let mut member = self.begun.remove(index);
            // It waits like a preempted one, although it may still hold its slot: `running` counts against the batch,
            // not against the KV cache.
            member.stage = SequenceStage::Waiting(WaitingFrom::Ran);
            self.enqueue(member);
        }
    }

    /// Removes a sequence.
    pub(crate) fn remove(&mut self, key: SequenceKey) {
        if self.dequeue(key).is_some() {
            return;
        }
        if let Some(index) = self.begun.iter().position(|member| member.key == key) {
            let member = self.begun.remove(index);
            self.running -= usize::from(member.stage == SequenceStage::Running);
        }
    }

    /// Whether a sequence runs.
    pub(crate) fn is_running(&self, key: SequenceKey) -> bool {
        self.running().any(|running| running == key)
    }

    /// Returns the number of running sequences.
    pub(crate) fn running_count(&self) -> usize {
        self.running
    }

    /// The running sequences, oldest first.
    pub(crate) fn running(&self) -> impl Iterator<Item = SequenceKey> + '_ {
        self.in_stage(SequenceStage::Running)
    }

    /// The parked sequences, oldest first.
    pub(crate) fn parked(&self) -> impl Iterator<Item = SequenceKey> + '_ {
        self.in_stage(SequenceStage::Parked)
    }

    fn in_stage(&self, stage: SequenceStage) -> impl Iterator<Item = SequenceKey> + '_ {
        let begun = self.begun.iter();
        begun
            .filter(move |member| member.stage == stage)
            .map(|member| member.key)
    }

    /// Returns whether no sequence could run beside the one that does: none waits, or there is no slot for it.
    pub(crate) fn is_alone(&self) -> bool {
        self.running <= 1 && (self.waiting.is_empty() || self.running >= self.slots)
    }

    /// Returns the number of waiting sequences.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Selects the sequence to preempt among those for which `holds` is true: sequences that do not run before running
    /// ones, then the lowest priority, then the youngest. Never the last running sequence, and a running one only with
    /// `running_too`.
    pub(crate) fn victim(
        &self,
        running_too: bool,
        holds: impl Fn(SequenceKey) -> bool,
    ) -> Option<SequenceKey> {
        let runs = |member: &QueueMember| member.stage == SequenceStage::Running;
        let all = self.begun.iter().chain(self.waiting.values());
        let candidates = all.filter(|member| running_too || !runs(member));
        // The youngest of the lowest priority has usually computed the least, and would be the last to be admitted
        // again.
        let victim = candidates
            .filter(|member| holds(member.key))
            .min_by_key(|member| {
                (
                    runs(member),
                    member.priority,
                    std::cmp::Reverse(member.arrival),
                )
            })?;
        // The last running sequence stays, or a step could preempt everything and compute nothing.
        (!runs(victim) || self.running > 1).then_some(victim.key)
    }

    fn release_slot(&mut self, key: SequenceKey, stage: SequenceStage) {
        let Some(index) = self.position(key, SequenceStage::Running) else {
            return;
        };
        self.running -= 1;
        self.begun[index].stage = stage;
        if stage != SequenceStage::Parked {
            let member = self.begun.remove(index);
            self.enqueue(member);
        }
    }

    /// Adds a waiting sequence, and starts the turns of its caller and connection unless they take turns already.
    fn enqueue(&mut self, member: QueueMember) {
        for fair_key in member.turn.fair_keys() {
            let turns = self.turns_of.entry(fair_key).or_insert(FairTurns {
                // The present turn, not 0: a caller that is new in the queue comes after those that already take turns,
                // and one that leaves the queue and comes back is not always first.
                last: self.turns,
                waiting: 0,
            });
            turns.waiting += 1;
        }
        self.waiting.insert(member.key, member);
    }

    /// Takes a sequence from those that wait. A caller or connection of which none is left takes no turns, so that the
    /// table stays as small as the queue.
    fn dequeue(&mut self, key: SequenceKey) -> Option<QueueMember> {
        let member = self.waiting.remove(&key)?;
        for fair_key in member.turn.fair_keys() {
            if let Entry::Occupied(mut turns) = self.turns_of.entry(fair_key) {
                turns.get_mut().waiting -= 1;
                if turns.get().waiting == 0 {
                    turns.remove();
                }
            }
        }
        Some(member)
    }

    fn position(&self, key: SequenceKey, stage: SequenceStage) -> Option<usize> {
        let mut begun = self.begun.iter();
        begun.position(|member| member.key == key && member.stage == stage)
    }
}

/// The work that a running sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Runnable {
    pub(crate) key: SequenceKey,
    /// Known tokens that are not computed; at least 1. One is a decode, more are a prefill.
    pub(crate) pending: usize,
}

/// The oldest prompt is passed over in so many steps in a row at most.
pub(crate) const PASSED_OVER_MAX: u32 = 3;

/// What a sequence computes in this step: its next `tokens` pending tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepShare {
    pub(crate) key: SequenceKey,
    pub(crate) tokens: usize,
}

/// The limits of a step, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepBudget {
    /// The batch size of the model.
    pub(crate) batch: usize,
    /// Prompt tokens of this step; 0 counts as 1, because a prompt that never advances would keep its slot for nothing.
    pub(crate) prefill: usize,
    /// What each prompt after the first takes of them besides its own: the time of a further pass over the weights.
    pub(crate) pass: usize,
    /// KV cells that are free or can be evicted.
    pub(crate) room: usize,
    /// The oldest prompt is first, and not the shortest.
    pub(crate) oldest_first: bool,
}

/// Plans a step: every decode first, then prefill tokens. `work` is oldest first. Returns false if there is no room for
/// every decode and, if there are prompts, one prefill token; then one sequence has to be preempted.
///
/// The shortest prompts are first, so that a short prompt does not wait behind a long one. The oldest is first after
/// [`PASSED_OVER_MAX`] steps without it, so that it always progresses. It has a step now and then, and not a part of each, because
/// a model with cells for each slot computes sequences with different numbers of tokens one after the other, and reads its
/// weights for each.
pub(crate) fn plan(work: &[Runnable], budget: &StepBudget, shares: &mut Vec<StepShare>) -> bool {
    shares.clear();
    let most = budget.batch.min(budget.room);
    // Decodes first: each is one token for a client that is already reading, and prefill takes what they leave
    // (LM-604).
    let decodes = work.iter().filter(|work| work.pending == 1);
    shares.extend(
        decodes
            .map(|work| StepShare {
                key: work.key,
                tokens: 1,
            })
            .take(most),
    );
    let decoding = work.iter().filter(|work| work.pending == 1).count();
    let prompts = work.len() - decoding;
    // Room for some of the decodes is not enough: the others would stand still and keep their cells.
    if shares.len() < decoding {
        return false;
    }
    if prompts == 0 {
        return true;
    }
    let mut room = most - decoding;
    // A batch that is full of decodes is no lack of room: the prompts go on in a later step, and preempting would not
    // help.
    if room == 0 {
        return decoding == budget.batch;
    }
    let mut time = budget.prefill.max(1);
    let mut order: Vec<Runnable> = work
        .iter()
        .filter(|work| work.pending > 1)
        .copied()
        .collect();
    // `work` is oldest first and `order` keeps that; it is not empty, because `prompts` is not 0.
    let first = budget.oldest_first.then_some(order[0].key);
    // A stable sort: among prompts of equal length the older one is first.
    order.sort_by_key(|work| (Some(work.key) != first, work.pending));
    for (place, work) in order.into_iter().enumerate() {
        if place > 0 {
            time = time.saturating_sub(budget.pass);
        }
        let tokens = work.pending.min(time).min(room);
        if tokens == 0 {
            break;
        }
        time -= tokens;
        room -= tokens;
        shares.push(StepShare {
            key: work.key,
            tokens,
        });
    }
    true
}

#[cfg(test)]
mod tests;
