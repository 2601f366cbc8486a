//! The result of one step, for tests, the simulator and the engine's thread, which decides how long to sleep.
//!
//! Metrics are in [`crate::stats`].

use sapwood_proto::time::Time;

/// The number that the engine gave a sequence at submission; never reused.
pub type SequenceId = u64;

/// The result of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// The number of the step, from 1.
    pub step: u64,
    /// Sequences that were given a slot.
    pub admitted: Vec<SequenceId>,
    /// What admission has looked at: waiting sequences, and those that they were compared with.
    pub looked_at: usize,
    /// Sequences with one token in the batch that follows the last one sampled.
    pub decoded: Vec<SequenceId>,
    /// Sequences with tokens of a prompt, recomputed tokens or forced tokens in the batch; and how many.
    pub prefilled: Vec<(SequenceId, u32)>,
    /// Sequences that were parked in this step because their reader is too slow.
    pub parked: Vec<SequenceId>,
    /// Sequences that were preempted, and will be computed again.
    pub preempted: Vec<SequenceId>,
    /// Sequences that ended, with a finish or an error.
    pub finished: Vec<SequenceId>,
    /// Sequences that ended because their reader was dropped, before the batch was built.
    pub cancelled: Vec<SequenceId>,
    /// Sequences whose steerer was late.
    pub late: Vec<SequenceId>,
    /// Sequences whose steerer suspended them.
    pub suspended: Vec<SequenceId>,
    /// Tokens appended to outputs.
    pub appended: u32,
    /// When there is work again without a message from outside: at once if it is not after the step's time; `None`:
    /// never.
    pub wake_at: Option<Time>,
}

impl StepReport {
    /// Returns every sequence in the batch.
    pub fn batch(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.decoded
            .iter()
            .copied()
            .chain(self.prefilled.iter().map(|&(id, _)| id))
    }
}
