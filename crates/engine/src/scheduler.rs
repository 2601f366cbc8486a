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
//! Order of admission ([`waiting`]): callers take turns (D-54), so that nothing that one caller sends, its priorities included,
//! delays another by more than a turn, but for a slot that the other has yielded. Within a caller the higher priority is first (LM-962); then sequences that have run before
//! (preempted or parked); then its connections take turns; then first come, first served. A sequence that has yielded its
//! slot is last until as many were admitted as waited when it yielded; then it waits like one that was preempted.
//!
//! Ageing: one admission of a caller in [`crate::config::Config::ageing_turns`] goes to the priority of its sequence that is
//! oldest, so that none of its streams starves. If the sequence that is next does not fit, no other is admitted before
//! it, so that small requests do not starve a large one.
//!
//! Preemption ([`Scheduler::victim`]) cannot go on for ever. A sequence that waits never displaces one that runs: only
//! a step that needs more cells preempts, and whatever is left advances in that step. Of the sequences that each caller would lose
//! last, the oldest is never preempted, so it ends, and then the next one is the oldest.

use std::collections::HashMap;

mod waiting;

use waiting::WaitingSequences;

/// The key of a sequence in its owner's slab.
pub(crate) type SequenceKey = usize;

/// The caller and connection in whose turn a sequence is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SchedulerTurn {
    pub(crate) caller: u64,
    /// A connection or session of that caller.
    pub(crate) connection: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SequenceStage {
    Waiting(WaitingFrom),
    Running,
    Parked,
}

/// How a sequence came to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitingFrom {
    /// It was preempted or parked.
    Ran,
    New,
    /// It yielded its slot to other sequences, and is last until `until` sequences were admitted in all.
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
    waiting: WaitingSequences,
    slots: usize,
    running: usize,
    arrivals: u64,
}

impl Scheduler {
    /// Creates a scheduler for at most `slots` running sequences.
    pub(crate) fn new(slots: usize, ageing: u32) -> Self {
        Self {
            begun: Vec::new(),
            waiting: WaitingSequences::new(ageing),
            slots: slots.max(1),
            running: 0,
            arrivals: 0,
        }
    }

    /// Returns a scheduler without sequences, with the same limits.
    pub(crate) fn emptied(&self) -> Self {
        Self::new(self.slots, self.waiting.ageing())
    }

    /// Adds a new waiting sequence.
    pub(crate) fn submit(&mut self, key: SequenceKey, priority: i32, turn: SchedulerTurn) {
        self.arrivals += 1;
        self.waiting.join(turn.caller);
        self.waiting.insert(QueueMember {
            key,
            priority,
            turn,
            arrival: self.arrivals,
            stage: SequenceStage::Waiting(WaitingFrom::New),
        });
    }

    /// Returns whether another sequence may run.
    pub(crate) fn has_slot(&self) -> bool {
        self.running < self.slots
    }

    /// Returns the sequence to admit next, of those that are not passed over; `None` if no slot is left.
    pub(crate) fn next(&self) -> Option<SequenceKey> {
        if !self.has_slot() {
            return None;
        }
        self.waiting.next()
    }

    /// Passes a waiting sequence over until it is restored: it waits for something else than a slot, and does not block others.
    pub(crate) fn set_aside(&mut self, key: SequenceKey) {
        self.waiting.set_aside(key);
    }

    /// The waiting sequences that are passed over, oldest first.
    pub(crate) fn aside(&self) -> impl Iterator<Item = SequenceKey> + '_ {
        self.waiting.aside()
    }

    /// Passes a sequence over no longer.
    pub(crate) fn restore(&mut self, key: SequenceKey) {
        self.waiting.restore(key);
    }

    /// Returns the waiting sequences in the order in which they would be admitted if nothing changed, those that are
    /// passed over included. It costs about as much as their admissions.
    pub(crate) fn admission_order(&self) -> Vec<SequenceKey> {
        // A copy admits them all: each turn changes the order of those that follow.
        let mut waiting = self.waiting.clone();
        for key in self.waiting.aside() {
            waiting.restore(key);
        }
        let next = || {
            let key = waiting.next()?;
            waiting.admit(key).map(|member| member.key)
        };
        std::iter::from_fn(next).collect()
    }

    /// Returns how many eligible sequences wait for lack of a slot.
    pub(crate) fn missing_slots(&self, eligible: impl Fn(SequenceKey) -> bool) -> usize {
        let waits = self.waiting.keys().filter(|key| eligible(*key)).count();
        waits.saturating_sub(self.slots - self.running.min(self.slots))
    }

    /// Moves a waiting sequence to running.
    pub(crate) fn admit(&mut self, key: SequenceKey) {
        let Some(mut member) = self.waiting.admit(key) else {
            return;
        };
        member.stage = SequenceStage::Running;
        self.running += 1;
        let index = self
            .begun
            .partition_point(|other| other.arrival < member.arrival);
        self.begun.insert(index, member);
    }

    /// Moves a running sequence to waiting, before those of its caller and priority that never ran.
    pub(crate) fn preempt(&mut self, key: SequenceKey) {
        self.release_slot(key, SequenceStage::Waiting(WaitingFrom::Ran));
    }

    /// Moves a running sequence to waiting, after all others that wait now.
    pub(crate) fn yield_slot(&mut self, key: SequenceKey) {
        // At least one: it does not get the slot back that it has just yielded.
        let others = u64::try_from(self.waiting.len()).unwrap_or(u64::MAX).max(1);
        let until = self.waiting.admitted().saturating_add(others);
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
            self.waiting.insert(member);
        }
    }

    /// Removes a sequence.
    pub(crate) fn remove(&mut self, key: SequenceKey) {
        let mut removed = self.waiting.remove(key);
        if removed.is_none()
            && let Some(index) = self.begun.iter().position(|member| member.key == key)
        {
            let member = self.begun.remove(index);
            self.running -= usize::from(member.stage == SequenceStage::Running);
            removed = Some(member);
        }
        if let Some(member) = removed {
            self.waiting.leave(member.turn.caller);
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
        self.running <= 1 && (self.waiting.is_empty() || !self.has_slot())
    }

    /// Returns the number of waiting sequences.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Selects the sequence to preempt among those that hold KV cells, so many tokens of each: one that does not run before one
    /// that does, and a running one only with `running_too`. Never the last running sequence.
    ///
    /// Of callers with several such sequences, the one that holds the most pays; if no caller has several, the one whose
    /// sequence is the youngest. It loses the lowest priority, then the youngest.
    pub(crate) fn victim(
        &self,
        running_too: bool,
        tokens: impl Fn(SequenceKey) -> Option<usize>,
    ) -> Option<SequenceKey> {
        let runs = |member: &QueueMember| member.stage == SequenceStage::Running;
        let all = self.begun.iter().chain(self.waiting.again());
        let holding = all.filter_map(|member| Some((member, tokens(member.key)?)));
        let mut holding: Vec<_> = holding.collect();
        if holding.iter().any(|(member, _)| !runs(member)) {
            holding.retain(|(member, _)| !runs(member));
        } else if !running_too || self.running <= 1 {
            // The last running sequence stays, or a step could preempt everything and compute nothing.
            return None;
        }
        let mut holders: HashMap<u64, CellHolder> = HashMap::new();
        for (member, tokens) in &holding {
            let holder = holders.entry(member.turn.caller).or_default();
            holder.sequences += 1;
            holder.tokens += tokens;
            holder.youngest = holder.youngest.max(member.arrival);
        }
        let (caller, _) = holders.into_iter().max_by_key(|(_, holder)| {
            // A caller's only one is not preempted for its size: those that come after it would do so again and again.
            let several = holder.sequences > 1;
            (
                several,
                usize::from(several) * holder.tokens,
                holder.youngest,
            )
        })?;
        // Not by priority among callers, who choose it themselves (LM-962). The youngest of a caller has usually computed the
        // least, and would be the last to be admitted again.
        let theirs = holding.iter().map(|(member, _)| member);
        let theirs = theirs.filter(|member| member.turn.caller == caller);
        let victim =
            theirs.min_by_key(|member| (member.priority, std::cmp::Reverse(member.arrival)));
        victim.map(|member| member.key)
    }

    fn release_slot(&mut self, key: SequenceKey, stage: SequenceStage) {
        let Some(index) = self.position(key, SequenceStage::Running) else {
            return;
        };
        self.running -= 1;
        self.begun[index].stage = stage;
        if stage != SequenceStage::Parked {
            let member = self.begun.remove(index);
            self.waiting.insert(member);
        }
    }

    fn position(&self, key: SequenceKey, stage: SequenceStage) -> Option<usize> {
        let mut begun = self.begun.iter();
        begun.position(|member| member.key == key && member.stage == stage)
    }
}

/// What a caller holds of the KV cells.
#[derive(Clone, Copy, Debug, Default)]
struct CellHolder {
    sequences: usize,
    /// The tokens of these sequences; what they share counts for each.
    tokens: usize,
    /// The arrival of the youngest.
    youngest: u64,
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
