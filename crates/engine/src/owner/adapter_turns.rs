//! [`AdapterTurns`]: whose LoRA adapters compute in a step.
//!
//! One decode call computes with one set of adapters, and output rows are lost at the next call, so sequences with
//! different sets take turns: each step decodes those of one set. The next turn has the set whose sequence has waited
//! longest since its last turn, or since it got its slot. New sequences are therefore behind all that wait, and a set waits
//! for at most as many steps as there are sequences with a slot, whichever sets others ask for meanwhile.

use super::requests::Requests;
use crate::scheduler::Runnable;

/// The turns of sets of adapters, which [`RunningSequence::turn`](super::sequence::RunningSequence) records.
#[derive(Debug, Default)]
pub(super) struct AdapterTurns {
    /// The keys of the sets that have work in this step. A buffer that retains its allocation.
    keys: Vec<u64>,
}

impl AdapterTurns {
    /// Keeps the work of the set whose turn it is; returns how many sets have some.
    pub(super) fn keep_next(&mut self, requests: &Requests, work: &mut Vec<Runnable>) -> usize {
        let sequences = &requests.sequences;
        let key = |work: &Runnable| sequences[work.key].adapters;
        self.keys.clear();
        self.keys.extend(work.iter().map(key));
        self.keys.dedup();
        // The usual step, with nothing to choose: one pass over the sequences.
        if self.keys.len() > 1 {
            self.keys.sort_unstable();
            self.keys.dedup();
            let next = work.iter().min_by_key(|work| sequences[work.key].turn);
            if let Some(next) = next.map(key) {
                work.retain(|work| key(work) == next);
            }
        }
        self.keys.len()
    }

    /// Ends the turn of the set whose work was computed. Sequences that the step had no time for had their turn too, or
    /// their set would have the next one again.
    pub(super) fn end_turn(&self, requests: &mut Requests, work: &[Runnable]) {
        if self.keys.len() > 1 {
            // Behind those that got their slots in this step, which have had no turn yet.
            let turn = requests.report.step + 1;
            for work in work {
                requests.sequences[work.key].turn = turn;
            }
        }
    }
}
