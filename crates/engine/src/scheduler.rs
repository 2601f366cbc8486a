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
//! Order of admission: sequences that have yielded their slot are last. Otherwise the higher priority is first; then
//! sequences that have run before (preempted or parked); then callers take turns, and the connections of one caller
//! take turns within the caller's turns (D-54); then first come, first served.
//!
//! Ageing: one admission in [`crate::config::Config::ageing_turns`] goes to the priority of the new sequence that has
//! waited longest, so that no priority starves. If the sequence that is next does not fit, no other is admitted before
//! it, so that small requests do not starve a large one.

use std::collections::HashMap;

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
    /// It yielded its slot to other sequences.
    Yielded,
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
    members: Vec<QueueMember>,
    slots: usize,
    running: usize,
    arrivals: u64,
    turns: u64,
    /// One in this many admissions of new sequences goes to the priority of the one that waits longest; 0: none.
    ageing: u32,
    /// Number of new sequences admitted so far.
    new_admitted: u64,
    /// The last turn of each caller with waiting sequences, and of each of their connections.
    last_turn: HashMap<FairKey, u64>,
}

impl Scheduler {
    /// Creates a scheduler for at most `slots` running sequences.
    pub(crate) fn new(slots: usize, ageing: u32) -> Self {
        Self {
            members: Vec::new(),
            slots: slots.max(1),
            running: 0,
            arrivals: 0,
            turns: 0,
            ageing,
            new_admitted: 0,
            last_turn: HashMap::new(),
        }
    }

    /// Returns a scheduler without sequences, with the same limits.
    pub(crate) fn emptied(&self) -> Self {
        Self::new(self.slots, self.ageing)
    }

    /// Adds a new waiting sequence.
    pub(crate) fn submit(&mut self, key: SequenceKey, priority: i32, turn: SchedulerTurn) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        // A caller that is new in the queue comes after those that already take turns.
        self.start_turns(turn);
        let stage = SequenceStage::Waiting(WaitingFrom::New);
        self.members.push(QueueMember {
            key,
            priority,
            turn,
            arrival,
            stage,
        });
    }

    /// Returns the eligible sequence to admit next; `None` if no slot is left or none is eligible.
    pub(crate) fn next(&self, eligible: impl Fn(SequenceKey) -> bool) -> Option<SequenceKey> {
        if self.running >= self.slots {
            return None;
        }
        // A sequence that is not eligible is passed over and does not block others: it waits for a sequence, not for a
        // slot.
        let waiting = || self.waiting_members().filter(|member| eligible(member.key));
        let aged = self.aged(waiting());
        waiting()
            .min_by_key(|member| self.rank(member, aged))
            .map(|member| member.key)
    }

    /// Returns the waiting sequences in the order in which they would be admitted now. Callers take turns, so each
    /// admission may change the order.
    pub(crate) fn admission_order(&self) -> Vec<SequenceKey> {
        let mut order: Vec<_> = self.waiting_members().collect();
        let aged = self.aged(self.waiting_members());
        // Cached, because a rank looks up the turns of its caller and connection, and there may be thousands to sort.
        order.sort_by_cached_key(|member| self.rank(member, aged));
        order.into_iter().map(|member| member.key).collect()
    }

    fn waiting_members(&self) -> impl Iterator<Item = &QueueMember> {
        let waits = |member: &&QueueMember| matches!(member.stage, SequenceStage::Waiting(_));
        self.members.iter().filter(waits)
    }

    /// Returns the priority that ageing prefers, if the next admission is one of those that ageing decides.
    fn aged<'a>(&self, waiting: impl Iterator<Item = &'a QueueMember>) -> Option<i32> {
        if self.ageing == 0 || !(self.new_admitted + 1).is_multiple_of(self.ageing.into()) {
            return None;
        }
        // Only new sequences age. Those that ran before come first within their priority anyway.
        let new = waiting.filter(|member| member.stage == SequenceStage::Waiting(WaitingFrom::New));
        let oldest = new.min_by_key(|member| member.arrival)?;
        Some(oldest.priority)
    }

    /// The sort key of a waiting sequence; the lowest is admitted first.
    fn rank(&self, member: &QueueMember, aged: Option<i32>) -> impl Ord + use<> {
        let waiting = match member.stage {
            SequenceStage::Waiting(waiting) => waiting,
            // Cannot occur: only waiting members are ranked.
            SequenceStage::Running | SequenceStage::Parked => WaitingFrom::Ran,
        };
        let last_turns = match waiting {
            // It had its caller's turn when it was first admitted.
            WaitingFrom::Ran => [0; 2],
            WaitingFrom::New | WaitingFrom::Yielded => {
                let last = |fair_key| self.last_turn.get(&fair_key).copied().unwrap_or(0);
                member.turn.fair_keys().map(last)
            }
        };
        // Ageing raises the whole priority of the oldest sequence, not that sequence alone: within it, callers still
        // take turns.
        let urgency = (aged == Some(member.priority), member.priority);
        (
            // Before the priority: a sequence of high priority would otherwise get its slot back at once.
            waiting == WaitingFrom::Yielded,
            std::cmp::Reverse(urgency),
            waiting,
            last_turns,
            member.arrival,
        )
    }

    /// Returns how many eligible sequences wait for lack of a slot.
    pub(crate) fn missing_slots(&self, eligible: impl Fn(SequenceKey) -> bool) -> usize {
        let waits = self
            .waiting_members()
            .filter(|member| eligible(member.key))
            .count();
        waits.saturating_sub(self.slots - self.running.min(self.slots))
    }

    /// Moves a waiting sequence to running.
    pub(crate) fn admit(&mut self, key: SequenceKey) {
        // A clock that counts admissions: only the order of turns matters.
        self.turns += 1;
        let now = self.turns;
        let Some(member) = self.member(key) else {
            return;
        };
        let fresh = member.stage == SequenceStage::Waiting(WaitingFrom::New);
        member.stage = SequenceStage::Running;
        let turn = member.turn;
        self.running += 1;
        // A sequence that comes back was counted at its first admission; counting it again would cost its caller a
        // turn.
        if fresh {
            self.new_admitted += 1;
            for fair_key in turn.fair_keys() {
                self.last_turn.insert(fair_key, now);
            }
        }
        // After the stage changed: the admitted sequence is no longer among those that wait.
        self.remove_turn(turn);
    }

    /// Moves a running sequence to waiting, before those that never ran.
    pub(crate) fn preempt(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Waiting(WaitingFrom::Ran));
    }

    /// Moves a running sequence to waiting, after all others.
    pub(crate) fn yield_slot(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Waiting(WaitingFrom::Yielded));
    }

    /// Moves a running sequence to parked until its reader has caught up.
    pub(crate) fn park(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Parked);
    }

    /// Moves a parked sequence to waiting.
    pub(crate) fn unpark(&mut self, key: SequenceKey) {
        if let Some(member) = self
            .member(key)
            .filter(|member| member.stage == SequenceStage::Parked)
        {
            // It waits like a preempted one, although it may still hold its slot: `running` counts against the batch,
            // not against the KV cache.
            member.stage = SequenceStage::Waiting(WaitingFrom::Ran);
            let turn = member.turn;
            self.start_turns(turn);
        }
    }

    /// Removes a sequence.
    pub(crate) fn remove(&mut self, key: SequenceKey) {
        if let Some(index) = self.members.iter().position(|member| member.key == key) {
            let member = self.members.remove(index);
            self.running -= usize::from(member.stage == SequenceStage::Running);
            self.remove_turn(member.turn);
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
        let members = self.members.iter();
        members
            .filter(move |member| member.stage == stage)
            .map(|member| member.key)
    }

    /// Returns the number of waiting sequences.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting_members().count()
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
        let candidates = self
            .members
            .iter()
            .filter(|member| running_too || !runs(member));
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
        if let Some(member) = self
            .member(key)
            .filter(|member| member.stage == SequenceStage::Running)
        {
            member.stage = stage;
            let turn = member.turn;
            self.running -= 1;
            self.start_turns(turn);
        }
    }

    /// Starts the turns of a caller and its connection, unless they take turns already.
    fn start_turns(&mut self, turn: SchedulerTurn) {
        for fair_key in turn.fair_keys() {
            // The present turn, not 0: otherwise a caller that leaves the queue and comes back would always be first.
            self.last_turn.entry(fair_key).or_insert(self.turns);
        }
    }

    /// Removes the turns of a caller or connection without waiting sequences, so that the table stays as small as the
    /// queue.
    fn remove_turn(&mut self, turn: SchedulerTurn) {
        for fair_key in turn.fair_keys() {
            let waits = |member: &QueueMember| member.turn.fair_keys().contains(&fair_key);
            if !self.waiting_members().any(waits) {
                self.last_turn.remove(&fair_key);
            }
        }
    }

    fn member(&mut self, key: SequenceKey) -> Option<&mut QueueMember> {
        self.members.iter_mut().find(|member| member.key == key)
    }
}

/// The work that a running sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Runnable {
    pub(crate) key: SequenceKey,
    /// Known tokens that are not computed; at least 1. One is a decode, more are a prefill.
    pub(crate) pending: usize,
}

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
    /// Prefill tokens of a step without decodes.
    pub(crate) alone: usize,
    /// Tokens of a step with decodes.
    pub(crate) step: usize,
    /// Minimum of prefill tokens for each prompt that waits.
    pub(crate) prefill_min: usize,
    /// KV cells that are free or can be evicted.
    pub(crate) room: usize,
}

/// Plans a step: every decode first, then prefill tokens; the minimum of prefill grows with the number of prompts.
/// `work` is oldest first. Returns false if there is no room for every decode and, if there are prompts, one prefill
/// token; then one sequence has to be preempted.
///
/// A quarter of the prefill goes to the oldest prompt, so that it always progresses; the rest goes to the shortest
/// prompts first, so that a short prompt does not wait behind a long one.
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
    // Without decodes, a longer step delays only requests that have not arrived yet.
    let wanted = match decoding {
        0 => budget.alone,
        _ => budget.step.saturating_sub(decoding),
    };
    // This may exceed the budget of the step, so that many new prompts do not wait for one another. At least a token
    // each: a prompt that never advances would keep its slot for nothing.
    let least = budget.prefill_min.max(1).saturating_mul(prompts);
    let mut left = wanted.max(least).min(most - decoding);
    // A batch that is full of decodes is no lack of room: the prompts go on in a later step, and preempting would not
    // help.
    if left == 0 {
        return decoding == budget.batch;
    }
    let mut order: Vec<Runnable> = work
        .iter()
        .filter(|work| work.pending > 1)
        .copied()
        .collect();
    // `work` is oldest first and `order` keeps that; it is not empty, because `prompts` is not 0.
    let oldest = order[0];
    let assured = oldest.pending.min(left.div_ceil(4));
    left -= assured;
    // A stable sort: among prompts of equal length the older one is first.
    order.sort_by_key(|work| work.pending);
    for work in order {
        let floor = if work.key == oldest.key { assured } else { 0 };
        let more = (work.pending - floor).min(left);
        left -= more;
        if floor + more > 0 {
            shares.push(StepShare {
                key: work.key,
                tokens: floor + more,
            });
        }
    }
    true
}

#[cfg(test)]
mod tests;
