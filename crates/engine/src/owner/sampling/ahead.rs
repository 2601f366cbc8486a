//! [`RowsAhead`]: samples output rows of a step on several threads, before they are taken in their order.
//!
//! Sampling a row is a pure function of the row, of the request and of what the sequence was before the step, so it does
//! not matter when and where it is done. What follows from a token happens on the owner's thread, in the order of the
//! rows, whatever the number of threads.
//!
//! Left for their turn are rows that depend on more: those whose steerer is asked then, and those after the first of a
//! sequence, which follow the tokens of its draft. Scores are left too.

use sapwood_proto::steer::Sample as SteeredSample;

use super::super::requests::Requests;
use super::super::sequence::RunningSequence;
use super::{RowLimits, RowTerms};
use crate::sampling::{RowTask, Sample, SampleError, SamplerPool};
use crate::scheduler::SequenceKey;
use crate::submission::RequestTerms;

/// How often sampling passes over a row, in the units of a greedy choice, which does so once.
const PASSES: usize = 3;

/// The tokens of rows that were sampled before their turn.
pub(super) struct RowsAhead {
    pool: SamplerPool,
    /// The model gives its rows one at a time.
    one_by_one: bool,
    /// Buffers that retain their allocations: the rows of the step that are sampled ahead.
    chosen: Vec<SequenceKey>,
    indexes: Vec<usize>,
    /// The results with the indexes of their entries, the next one last.
    sampled: Vec<(usize, Result<Sample, SampleError>)>,
}

impl RowsAhead {
    /// Samples on so many threads; `None`: on as many as there are processors.
    pub(super) fn new(threads: Option<u32>) -> Self {
        Self {
            pool: SamplerPool::new(threads),
            one_by_one: false,
            chosen: Vec::new(),
            indexes: Vec::new(),
            sampled: Vec::new(),
        }
    }

    /// Samples rows of this step, if they are enough for several threads.
    pub(super) fn sample(&mut self, requests: &mut Requests, rows: &[(SequenceKey, usize)]) {
        self.sampled.clear();
        let logits = rows.len() * requests.vocabulary_tokens as usize * PASSES;
        // Before single rows are looked at: most steps have too few.
        if self.one_by_one || self.pool.threads_for(rows.len(), logits) < 2 {
            return;
        }
        let logits = self.choose(requests, rows);
        let threads = self.pool.threads_for(self.chosen.len(), logits);
        if threads > 1 {
            self.sample_chosen(requests, threads);
        }
    }

    /// Chooses the rows that depend on nothing else in this step; returns how many logits sampling them passes over.
    fn choose(&mut self, requests: &Requests, rows: &[(SequenceKey, usize)]) -> usize {
        self.chosen.clear();
        self.indexes.clear();
        let mut passes = 0;
        for &(key, index) in rows {
            // The rows of a sequence are adjacent.
            let is_first = self.chosen.last() != Some(&key);
            let sequence = requests.sequences.get(key).filter(|_| is_first);
            if let Some(sequence) = sequence.filter(|sequence| is_independent(sequence)) {
                self.chosen.push(key);
                self.indexes.push(index);
                passes += passes_of(&requests.jobs[sequence.job].submission.terms);
            }
        }
        passes * requests.vocabulary_tokens as usize
    }

    fn sample_chosen(&mut self, requests: &mut Requests, threads: usize) {
        let stats = &requests.stats;
        let logits = requests.slots.model().rows(&self.indexes, &stats.panics);
        if logits.is_empty() {
            self.one_by_one = true;
            return;
        }
        let (sequences, jobs) = (&requests.sequences, &requests.jobs);
        let terms = |sequence: &RunningSequence| RowTerms {
            request: &jobs[sequence.job].submission.terms,
            ends: &requests.tokens.ends,
        };
        let unsteered = SteeredSample::default();
        let chosen = self.chosen.iter().map(|&key| &sequences[key]);
        let limits = chosen.clone();
        let limits = limits.map(|sequence| RowLimits::of(sequence, &terms(sequence), None));
        let limits: Vec<RowLimits> = limits.collect();
        let mut indexes = Vec::with_capacity(limits.len());
        let mut tasks = Vec::with_capacity(limits.len());
        let places = self.indexes.iter().zip(chosen).zip(&limits);
        for (((&index, sequence), limits), row) in places.zip(logits) {
            if let Some(row) = row {
                indexes.push(index);
                let params = limits.params(sequence, &terms(sequence), &unsteered);
                tasks.push(RowTask::new(row, params));
            }
        }
        self.pool.sample(&mut tasks, threads);
        let results = tasks.into_iter().map(RowTask::into_result);
        self.sampled.extend(indexes.into_iter().zip(results).rev());
        let panicked = |(_, sampled): &&(_, _)| matches!(sampled, Err(SampleError::Panicked));
        let panics = self.sampled.iter().filter(panicked).count();
        stats.panics.add(panics as u64);
    }

    /// Takes the result of the entry at `index`, if it was sampled ahead. Indexes are asked for in ascending order.
    #[inline]
    pub(super) fn take(&mut self, index: usize) -> Option<Result<Sample, SampleError>> {
        // Those before it were not asked for: another row has ended their request.
        while self.sampled.pop_if(|(at, _)| *at < index).is_some() {}
        let taken = self.sampled.pop_if(|(at, _)| *at == index);
        taken.map(|(_, sampled)| sampled)
    }
}

/// Whether the next row of a sequence is sampled with what is known before the step's first row.
fn is_independent(sequence: &RunningSequence) -> bool {
    sequence.steering.is_none()
        && !sequence.scored
        && sequence.next_in_prompt().is_none()
        && sequence.pending() == 0
        && sequence.slot.is_some()
        && sequence.asleep_until.is_none()
}

fn passes_of(terms: &RequestTerms) -> usize {
    let is_greedy = terms.sampling.temperature <= 0.0 && terms.top_logprobs.is_none();
    if is_greedy { 1 } else { PASSES }
}
