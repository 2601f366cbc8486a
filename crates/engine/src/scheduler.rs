//! The scheduler: admission, fairness, the make-up of a step, and preemption when the KV cache is full.
//!
//! It orders numbers and counts.
//!
//! ```text
//!   submit ──► waiting ── admit ─► running ── park ──► parked
//!                 ▲                   │                  │
//!                 ├ preempt, yield ───┘                  │
//!                 └───────────────── unpark ─────────────┘        remove: from anywhere
//! ```
//!
//! Among those that wait the higher priority goes first; then who ran already (preempted or parked); then callers take
//! turns, and the connections of one caller within its turns (D-54); then first come, first served. Ageing: one turn in so many is that of the priority of whoever has waited longest,
//! so that none waits for ever. A sequence that has yielded its slot comes after all others. One that has its turn and does not
//! fit holds back the others of its turn, so a large request is not starved by small ones.

use std::collections::HashMap;

/// A sequence, by the number its owner has for it.
pub(crate) type SequenceKey = usize;

/// In whose turn a sequence waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SchedulerTurn {
    pub(crate) caller: u64,
    /// A connection or session of that caller's.
    pub(crate) connection: u64,
}

impl SchedulerTurn {
    /// Who takes turns with others: the caller with callers, its connection with those of the same caller.
    const fn takers(self) -> [FairKey; 2] {
        [(self.caller, None), (self.caller, Some(self.connection))]
    }
}

/// A caller, or one of its connections.
type FairKey = (u64, Option<u64>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SequenceStage {
    Waiting(WaitingFrom),
    Running,
    Parked,
}

/// What a waiting sequence comes from; the first goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum WaitingFrom {
    /// It was preempted or parked.
    Ran,
    New,
    /// It gave its slot to others.
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

/// The order among sequences.
#[derive(Debug)]
pub(crate) struct Scheduler {
    members: Vec<QueueMember>,
    slots: usize,
    running: usize,
    arrivals: u64,
    turns: u64,
    /// One in so many turns of new sequences goes to the priority of the one that waits longest; 0: none.
    ageing: u64,
    /// New sequences seated.
    seated: u64,
    /// When each caller with waiting sequences had its last turn, and each of their connections.
    last_turn: HashMap<FairKey, u64>,
}

impl Scheduler {
    /// A scheduler for at most `slots` running sequences. One turn in `ageing` is that of the oldest's priority.
    pub(crate) fn new(slots: usize, ageing: u32) -> Self {
        Self {
            members: Vec::new(),
            slots: slots.max(1),
            running: 0,
            arrivals: 0,
            turns: 0,
            ageing: ageing.into(),
            seated: 0,
            last_turn: HashMap::new(),
        }
    }

    /// A new sequence waits.
    pub(crate) fn submit(&mut self, key: SequenceKey, priority: i32, turn: SchedulerTurn) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        // Who comes anew stands behind those that already take turns.
        self.stand_in_line(turn);
        let stage = SequenceStage::Waiting(WaitingFrom::New);
        self.members.push(QueueMember {
            key,
            priority,
            turn,
            arrival,
            stage,
        });
    }

    /// The sequence whose turn it is, if there is a slot and an eligible sequence waits.
    pub(crate) fn next(&self, eligible: impl Fn(SequenceKey) -> bool) -> Option<SequenceKey> {
        if self.running >= self.slots {
            return None;
        }
        let waiting = || self.in_wait().filter(|member| eligible(member.key));
        let aged = self.aged(waiting());
        waiting()
            .min_by_key(|member| self.rank(member, aged))
            .map(|member| member.key)
    }

    /// The waiting sequences, in the order in which they would be admitted now: callers take turns, so each admission may change it.
    pub(crate) fn line(&self) -> Vec<SequenceKey> {
        let mut line: Vec<_> = self.in_wait().collect();
        let aged = self.aged(self.in_wait());
        line.sort_by_key(|member| self.rank(member, aged));
        line.into_iter().map(|member| member.key).collect()
    }

    fn in_wait(&self) -> impl Iterator<Item = &QueueMember> {
        let waits = |member: &&QueueMember| matches!(member.stage, SequenceStage::Waiting(_));
        self.members.iter().filter(waits)
    }

    /// The priority whose turn it is because of how long one of those waits, if it is such a turn.
    fn aged<'a>(&self, waiting: impl Iterator<Item = &'a QueueMember>) -> Option<i32> {
        if self.ageing == 0 || !(self.seated + 1).is_multiple_of(self.ageing) {
            return None;
        }
        let new = waiting.filter(|member| member.stage == SequenceStage::Waiting(WaitingFrom::New));
        let oldest = new.min_by_key(|member| member.arrival)?;
        Some(oldest.priority)
    }

    /// The lowest goes first.
    fn rank(&self, member: &QueueMember, aged: Option<i32>) -> impl Ord + use<> {
        let waiting = match member.stage {
            SequenceStage::Waiting(waiting) => waiting,
            SequenceStage::Running | SequenceStage::Parked => WaitingFrom::Ran,
        };
        let last_turns = match waiting {
            WaitingFrom::Ran => [0; 2],
            WaitingFrom::New | WaitingFrom::Yielded => {
                let last = |taker| self.last_turn.get(&taker).copied().unwrap_or(0);
                member.turn.takers().map(last)
            }
        };
        let urgency = (aged == Some(member.priority), member.priority);
        (
            waiting == WaitingFrom::Yielded,
            std::cmp::Reverse(urgency),
            waiting,
            last_turns,
            member.arrival,
        )
    }

    /// How many eligible sequences wait although there is no slot for them.
    pub(crate) fn missing_slots(&self, eligible: impl Fn(SequenceKey) -> bool) -> usize {
        let waits = self.in_wait().filter(|member| eligible(member.key)).count();
        waits.saturating_sub(self.slots - self.running.min(self.slots))
    }

    /// A waiting sequence runs.
    pub(crate) fn admit(&mut self, key: SequenceKey) {
        self.turns += 1;
        let now = self.turns;
        let Some(member) = self.member(key) else {
            return;
        };
        let fresh = member.stage == SequenceStage::Waiting(WaitingFrom::New);
        member.stage = SequenceStage::Running;
        let turn = member.turn;
        self.running += 1;
        if fresh {
            self.seated += 1;
            for taker in turn.takers() {
                self.last_turn.insert(taker, now);
            }
        }
        self.remove_turn(turn);
    }

    /// A running sequence waits again, before those that never ran.
    pub(crate) fn preempt(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Waiting(WaitingFrom::Ran));
    }

    /// A running sequence gives its slot to waiting ones, and comes after them.
    pub(crate) fn yield_slot(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Waiting(WaitingFrom::Yielded));
    }

    /// A running sequence gives its slot away until its reader has caught up.
    pub(crate) fn park(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Parked);
    }

    /// A parked sequence waits for a slot.
    pub(crate) fn unpark(&mut self, key: SequenceKey) {
        if let Some(member) = self
            .member(key)
            .filter(|member| member.stage == SequenceStage::Parked)
        {
            member.stage = SequenceStage::Waiting(WaitingFrom::Ran);
            let turn = member.turn;
            self.stand_in_line(turn);
        }
    }

    /// A sequence is over.
    pub(crate) fn remove(&mut self, key: SequenceKey) {
        if let Some(index) = self.members.iter().position(|member| member.key == key) {
            let member = self.members.remove(index);
            self.running -= usize::from(member.stage == SequenceStage::Running);
            self.remove_turn(member.turn);
        }
    }

    /// Whether a sequence runs.
    pub(crate) fn is_running(&self, key: SequenceKey) -> bool {
        let runs =
            |member: &QueueMember| member.key == key && member.stage == SequenceStage::Running;
        self.members.iter().any(runs)
    }

    /// How many run.
    pub(crate) fn running_count(&self) -> usize {
        self.running
    }

    /// The running sequences, oldest first.
    pub(crate) fn running(&self) -> impl Iterator<Item = SequenceKey> + '_ {
        self.members
            .iter()
            .filter(|member| member.stage == SequenceStage::Running)
            .map(|member| member.key)
    }

    /// The parked sequences, oldest first.
    pub(crate) fn parked(&self) -> impl Iterator<Item = SequenceKey> + '_ {
        self.members
            .iter()
            .filter(|member| member.stage == SequenceStage::Parked)
            .map(|member| member.key)
    }

    /// How many wait.
    pub(crate) fn waiting(&self) -> usize {
        self.in_wait().count()
    }

    /// Who gives up its cells: of those that hold some, who does not run before who runs, then the lowest priority, then
    /// the youngest. Never the last one that runs, and none that runs unless `running_too`.
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
        let victim = candidates
            .filter(|member| holds(member.key))
            .min_by_key(|member| {
                (
                    runs(member),
                    member.priority,
                    std::cmp::Reverse(member.arrival),
                )
            })?;
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
            self.stand_in_line(turn);
        }
    }

    /// A caller and its connection take turns from now on, unless they do already.
    fn stand_in_line(&mut self, turn: SchedulerTurn) {
        for taker in turn.takers() {
            self.last_turn.entry(taker).or_insert(self.turns);
        }
    }

    /// Forgets the turns of a caller or connection that waits for nothing, so that the table is as small as the queue.
    fn remove_turn(&mut self, turn: SchedulerTurn) {
        for taker in turn.takers() {
            let waits = |member: &QueueMember| member.turn.takers().contains(&taker);
            if !self.in_wait().any(waits) {
                self.last_turn.remove(&taker);
            }
        }
    }

    fn member(&mut self, key: SequenceKey) -> Option<&mut QueueMember> {
        self.members.iter_mut().find(|member| member.key == key)
    }
}

/// What a running sequence could compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Runnable {
    pub(crate) key: SequenceKey,
    /// Tokens that are known and not computed; at least 1. One is a decode, more are a prefill.
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
    /// The model's batch.
    pub(crate) batch: usize,
    /// Prefill when nothing is decoded.
    pub(crate) alone: usize,
    /// The step when something is.
    pub(crate) step: usize,
    /// Prefill at least, for each prompt that waits.
    pub(crate) prefill_min: usize,
    /// Cells to be had.
    pub(crate) room: usize,
}

/// Shares out a step: every decode, then prefill tokens: the more, the more prompts wait. `work` is oldest first. False: there is not room for every
/// decode and, where prompts wait, one token of them; then one sequence has to be preempted.
///
/// A quarter of the prefill goes to the oldest prompt, so that it always gets on; the rest goes to the shortest ones
/// first, so that a short prompt is not stuck behind a long one.
pub(crate) fn plan(work: &[Runnable], budget: &StepBudget, shares: &mut Vec<StepShare>) -> bool {
    shares.clear();
    let most = budget.batch.min(budget.room);
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
    if shares.len() < decoding {
        return false;
    }
    if prompts == 0 {
        return true;
    }
    let wanted = match decoding {
        0 => budget.alone,
        _ => budget.step.saturating_sub(decoding),
    };
    let least = budget.prefill_min.saturating_mul(prompts);
    let mut left = wanted.max(least).min(most - decoding);
    if left == 0 {
        return decoding == budget.batch;
    }
    let mut order: Vec<Runnable> = work
        .iter()
        .filter(|work| work.pending > 1)
        .copied()
        .collect();
    let oldest = order[0];
    let assured = oldest.pending.min(left.div_ceil(4));
    left -= assured;
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
