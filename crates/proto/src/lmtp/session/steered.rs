//! State of a stream with a controller: the branches of its works, and what the controller has printed (LM-972, LM-973).
//!
//! A work of the engine begins as one branch, number 0, which is the sample that the work was started for. Each fork adds
//! a branch; the client sees it as a further sample of the stream, numbered over all works.

use std::collections::{BTreeMap, VecDeque};

/// The branches of one work.
///
/// Invariant: a branch runs exactly while its `left` is not 0. A work without forks that is not over runs branch 0.
#[derive(Debug)]
pub(super) struct Branches {
    /// Number of items that one branch may have.
    most: u64,
    /// Number of items that may still follow of branch 0.
    left: u64,
    /// The other branches, ended ones included: their forks name them.
    forks: BTreeMap<u32, Fork>,
}

#[derive(Debug)]
struct Fork {
    /// Its number in the stream.
    sample: u32,
    left: u64,
}

impl Branches {
    /// One branch with at most this many items.
    pub(super) const fn new(most: u64) -> Self {
        Self {
            most,
            left: most,
            forks: BTreeMap::new(),
        }
    }

    /// Counts an item of a running branch. Returns whether it was the last one that the branch may have; `None` if no such
    /// branch runs.
    pub(super) fn count(&mut self, branch: u32) -> Option<bool> {
        let left = match branch {
            0 => &mut self.left,
            fork => &mut self.forks.get_mut(&fork)?.left,
        };
        *left = left.checked_sub(1)?;
        let is_last = *left == 0;
        // Counted up again: the caller ends it, so that every end takes the same path.
        *left = (*left).max(1);
        Some(is_last)
    }

    /// Whether this branch runs.
    pub(super) fn runs(&self, branch: u32) -> bool {
        match branch {
            0 => self.left > 0,
            fork => self.forks.get(&fork).is_some_and(|fork| fork.left > 0),
        }
    }

    /// Ends a branch. Returns whether the work has no other.
    pub(super) fn end(&mut self, branch: u32) -> bool {
        match branch {
            0 => self.left = 0,
            fork => {
                if let Some(fork) = self.forks.get_mut(&fork) {
                    fork.left = 0;
                }
            }
        }
        self.left == 0 && self.forks.values().all(|fork| fork.left == 0)
    }

    /// Whether there is or was such a branch.
    pub(super) fn has(&self, branch: u32) -> bool {
        branch == 0 || self.forks.contains_key(&branch)
    }

    /// Adds a branch, as this sample of the stream.
    pub(super) fn fork(&mut self, branch: u32, sample: u32, inherited: u32) {
        // The engine counts exactly, voided tokens included; this bound need only not be below its.
        let left = self.most.saturating_sub(inherited.into()).max(1);
        self.forks.insert(branch, Fork { sample, left });
    }

    /// The sample that a branch is, where branch 0 is `own`.
    pub(super) fn sample(&self, branch: u32, own: u32) -> u32 {
        self.forks.get(&branch).map_or(own, |fork| fork.sample)
    }
}

/// What a stream with a controller has beyond other streams.
#[derive(Debug)]
pub(super) struct SteeredStream {
    /// Number of samples so far, forks included.
    samples: u32,
    /// Number of forced tokens sent.
    pub(super) forced: u64,
    /// What was printed and not sent yet, by sample, oldest first.
    log: VecDeque<(u32, String)>,
    log_bytes: usize,
}

impl SteeredStream {
    pub(super) const fn new(samples: u32) -> Self {
        Self {
            samples,
            forced: 0,
            log: VecDeque::new(),
            log_bytes: 0,
        }
    }

    /// The number of the next fork.
    pub(super) fn next_sample(&mut self) -> u32 {
        let sample = self.samples;
        self.samples = sample.saturating_add(1);
        sample
    }

    /// Adds what was printed. Above `max` bytes the oldest text is dropped (AI-608).
    pub(super) fn print(&mut self, sample: u32, text: &str, max: usize) {
        self.log_bytes += text.len();
        match self.log.back_mut() {
            Some((last, log)) if *last == sample => log.push_str(text),
            _ => self.log.push_back((sample, text.to_owned())),
        }
        while let Some(over) = self.log_bytes.checked_sub(max).filter(|over| *over > 0)
            && let Some((_, oldest)) = self.log.front_mut()
        {
            let cut = oldest.ceil_char_boundary(over);
            self.log_bytes -= cut;
            if cut == oldest.len() {
                self.log.pop_front();
            } else {
                oldest.drain(..cut);
            }
        }
    }

    /// Takes what was printed since the last call.
    pub(super) fn take_log(&mut self) -> VecDeque<(u32, String)> {
        self.log_bytes = 0;
        std::mem::take(&mut self.log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lm_973_a_work_is_over_when_its_last_branch_has_ended() {
        let mut branches = Branches::new(3);
        branches.fork(1, 4, 2);
        branches.fork(2, 5, 9);
        assert!(branches.has(0) && branches.has(2) && !branches.has(3));
        assert_eq!((branches.sample(0, 0), branches.sample(2, 0)), (0, 5));
        assert_eq!(branches.count(0), Some(false));
        // Of three items two are inherited, and of two none is left, but a branch has one.
        assert_eq!(
            (branches.count(1), branches.count(2)),
            (Some(true), Some(true))
        );
        assert!(!branches.end(0) && !branches.runs(0));
        assert_eq!((branches.count(0), branches.count(7)), (None, None));
        assert!(!branches.end(1));
        assert!(branches.end(2));
    }

    #[test]
    fn ai_608_what_was_printed_is_cut_at_its_beginning_between_characters() {
        let mut steered = SteeredStream::new(1);
        steered.print(0, "aé", 6);
        steered.print(1, "xyz", 6);
        assert_eq!(steered.log, [(0, "aé".to_owned()), (1, "xyz".to_owned())]);
        steered.print(1, "2", 5);
        assert_eq!(steered.log, [(1, "xyz2".to_owned())]);
        assert_eq!(steered.log_bytes, 4);
        assert_eq!(steered.take_log().len(), 1);
        steered.print(0, "123456", 6);
        assert_eq!(steered.take_log(), [(0, "123456".to_owned())]);
    }
}
