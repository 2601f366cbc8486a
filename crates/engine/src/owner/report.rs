//! The result of one step, for tests, the simulator and the thread that decides how long to sleep.
//!
//! Metrics are in [`crate::stats`].

use sapwood_proto::time::Time;

/// A sequence, by the number that its engine gave it when it was submitted; never used again.
pub type SequenceId = u64;

/// What one step did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// Sequences that were given a slot.
    pub admitted: Vec<SequenceId>,
    /// Sequences in the batch with one token, which follows the last one sampled.
    pub decoded: Vec<SequenceId>,
    /// Sequences in the batch with tokens of a prompt, or tokens computed again or forced; and how many.
    pub prefilled: Vec<(SequenceId, u32)>,
    /// Sequences whose reader is too slow, from this step on.
    pub parked: Vec<SequenceId>,
    /// Sequences that lost their cells to others, and will be computed again.
    pub preempted: Vec<SequenceId>,
    /// Sequences that ended, with a finish or a fault.
    pub finished: Vec<SequenceId>,
    /// Sequences that ended because their reader left, before the batch was formed.
    pub cancelled: Vec<SequenceId>,
    /// Sequences whose steerer was late.
    pub late: Vec<SequenceId>,
    /// Sequences whose steerer suspended them.
    pub suspended: Vec<SequenceId>,
    /// Tokens appended to outputs.
    pub appended: u32,
    /// When there is something to do again, without a message from outside: at once if it is not after the step's
    /// time; `None`: never.
    pub wake_at: Option<Time>,
}

impl StepReport {
    /// Every sequence that the forward pass computed.
    pub fn batch(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.decoded
            .iter()
            .copied()
            .chain(self.prefilled.iter().map(|&(id, _)| id))
    }
}
