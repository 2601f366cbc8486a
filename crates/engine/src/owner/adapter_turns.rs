//! [`AdapterTurns`]: whose LoRA adapters compute in a step.
//!
//! One decode call computes with one set of adapters, and output rows are lost at the next call, so sequences with
//! different sets take turns: each step decodes those of one set. A set with *k* of *n* sequences has *k* of *n* turns, or
//! one caller with a set of its own would halve the speed of everybody else. This is fair queueing by virtual time:
//!
//! ```text
//!   virtual time:  one unit for each n contested steps
//!   due of a set:  when it has its next turn; the set that is due first has it, and is due again 1/k units later
//! ```
//!
//! A set that has no turn yet is due 1/k units from now, behind all that wait, so a set waits for about as many steps as
//! there are sequences with a slot, whichever sets others ask for meanwhile.

use super::requests::Requests;
use crate::scheduler::Runnable;

/// One unit of virtual time.
const UNIT: u64 = 1 << 20;

/// The turns of sets of adapters, which [`RunningSequence::due`](super::sequence::RunningSequence) records.
#[derive(Debug, Default)]
pub(super) struct AdapterTurns {
    /// The sets that have work in this step, by their keys. A buffer that retains its allocation.
    sets: Vec<SetWithWork>,
    /// Virtual time.
    now: u64,
    /// How many sequences have work in this step, of any set.
    sequences: u64,
}

#[derive(Debug)]
struct SetWithWork {
    key: u64,
    sequences: u64,
    /// Of its sequences the latest: others have slept in its turns.
    due: Option<u64>,
}

impl AdapterTurns {
    /// Keeps the work of the set whose turn it is; returns how many sets have some.
    pub(super) fn keep_next(&mut self, requests: &mut Requests, work: &mut Vec<Runnable>) -> usize {
        let sequences = &mut requests.sequences;
        self.sets.clear();
        self.sets.extend(work.iter().map(|work| SetWithWork {
            key: sequences[work.key].adapters,
            sequences: 1,
            due: sequences[work.key].due,
        }));
        let merge = |next: &mut SetWithWork, set: &mut SetWithWork| {
            let same = next.key == set.key;
            if same {
                set.sequences += next.sequences;
                set.due = set.due.max(next.due);
            }
            same
        };
        self.sets.dedup_by(merge);
        // The usual step, with nothing to choose: one pass over the sequences.
        if self.sets.len() > 1 {
            // Stable, so that they are in the order of the work among those with one key.
            self.sets.sort_by_key(|set| set.key);
            self.sets.dedup_by(merge);
        }
        if self.sets.len() > 1 {
            self.sequences = work.len() as u64;
            for set in &mut self.sets {
                set.due.get_or_insert(self.now + UNIT / set.sequences);
            }
            for work in work.iter() {
                let sequence = &mut sequences[work.key];
                sequence.due = self.of(sequence.adapters).and_then(|set| set.due);
            }
            let next = work.iter().min_by_key(|work| sequences[work.key].due);
            if let Some(next) = next.map(|work| sequences[work.key].adapters) {
                work.retain(|work| sequences[work.key].adapters == next);
            }
        }
        self.sets.len()
    }

    /// Ends the turn of the set whose work was computed. Sequences that the step had no time for had their turn too, or
    /// their set would have the next one again.
    pub(super) fn end_turn(&mut self, requests: &mut Requests, work: &[Runnable]) {
        if self.sets.len() <= 1 {
            return;
        }
        let turn = UNIT / (work.len() as u64).max(1);
        for work in work {
            let due = &mut requests.sequences[work.key].due;
            // One that has slept does not make up for it.
            *due = due.map(|due| due.max(self.now) + turn);
        }
        self.now += UNIT / self.sequences.max(1);
    }

    fn of(&self, key: u64) -> Option<&SetWithWork> {
        let at = self.sets.binary_search_by_key(&key, |set| set.key);
        at.ok().and_then(|at| self.sets.get(at))
    }
}
