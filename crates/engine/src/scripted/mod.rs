//! A deterministic model without weights, for tests, demonstrations and load tests (TR-1102 to TR-1107, D-11).
//!
//! Each output row is a function of script, seed, prompt and the tokens so far, so the same request gives the same
//! output whatever else runs.

mod config;
mod play;
mod steerers;
mod vocabulary;

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use crate::adapters::default_scales;
use crate::api::{EngineError, ModelInfo, SharedVocabulary};
use crate::model::{
    BatchEntry, Capacity, CheckpointTerms, DecodeStop, Model, OutputRow, RowArea, RowFinder,
    SlotId, SlotPurpose, StateRows,
};
use crate::ranking::{RankedRow, ZipfDistribution, mix};

pub use config::{
    Config, InvalidScript, Script, ScriptFinish, ScriptRule, ScriptStep, ScriptedFailure,
    ScriptedTokenizer, ToolCall, TransportCut,
};
use play::{Cue, Library, ScriptPlayback};
pub use steerers::ScriptedSteerers;
pub use vocabulary::ScriptedVocabulary;

/// The model. It never runs out of KV cells by itself, and never fails a whole batch.
#[derive(Debug)]
pub struct Scripted {
    saves: bool,
    /// Tokens of a sliding window; `usize::MAX` without one.
    window: usize,
    info: ModelInfo,
    capacity: Capacity,
    vocabulary: Arc<ScriptedVocabulary>,
    library: Library,
    distribution: ZipfDistribution,
    slots: Vec<Option<ScriptedSequence>>,
    batch: Vec<BatchEntry>,
    /// A hash of the scales of the adapters that compute.
    adapters: u64,
}

#[derive(Debug)]
struct ScriptedSequence {
    play: ScriptPlayback,
    seed: u64,
    prompt_tokens: usize,
    /// A hash of the tokens up to and including each position.
    hashes: Vec<u64>,
    /// The position of the first token that the window of the next one can still reach.
    oldest: usize,
    /// When its first row was requested, and the index of the next output token at that time.
    started: Option<(Time, usize)>,
}

impl Scripted {
    /// Creates the model that a configuration describes.
    ///
    /// # Errors
    /// [`InvalidScript`] names the invalid member.
    pub fn new(config: Config) -> Result<Self, InvalidScript> {
        let vocabulary = Arc::new(ScriptedVocabulary::new(&config));
        let vocabulary_tokens = vocabulary.len();
        let slots = config.parallel.max(1).saturating_add(config.kept_prefixes);
        let cells = config
            .cells
            .unwrap_or_else(|| config.context_tokens.saturating_mul(slots));
        let info = ModelInfo {
            name: config.name.clone(),
            architecture: "scripted".to_owned(),
            description: format!("scripted: {}", config.script.name()),
            context_tokens: config.context_tokens.max(2),
            vocabulary_tokens,
            parameters: 0,
            weight_bytes: 0,
            parallel: config.parallel.max(1),
            chat: config.chat,
            truncates: config.truncates,
            deterministic: Some(true),
            adapters: config.adapters.clone().into(),
            sampling: config.sampling.valid(),
        };
        let capacity = Capacity {
            slots,
            // Bookkeeping is per cell, and a scripted model gains nothing from a larger cache.
            cells: cells.min(1 << 24).max(info.context_tokens),
            batch_tokens: config.batch_tokens.max(info.parallel),
            // Rows in closed form need no memory.
            rows: config.batch_tokens.max(info.parallel),
            computes_together: true,
        };
        let adapters = hash_of(&default_scales(&config.adapters));
        let saves = config.saves;
        let window = match config.window_tokens {
            0 => usize::MAX,
            window => window as usize,
        };
        let distribution = ZipfDistribution::new(vocabulary_tokens, config.gap);
        let library = Library::new(config, Arc::clone(&vocabulary))?;
        let slots = (0..slots).map(|_| None).collect();
        Ok(Self {
            saves,
            window,
            info,
            capacity,
            vocabulary,
            library,
            distribution,
            slots,
            batch: Vec::new(),
            adapters,
        })
    }

    /// Where the owner must have asked before.
    fn assert_resumes(&self, slot: SlotId, tokens: u32) {
        assert!(
            self.can_resume(slot, tokens),
            "slot {slot} has lost what the token after {tokens} attends to"
        );
    }

    fn sequence(&mut self, slot: SlotId) -> Option<&mut ScriptedSequence> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }
}

impl Model for Scripted {
    fn info(&self) -> ModelInfo {
        self.info.clone()
    }

    fn vocabulary(&self) -> SharedVocabulary {
        Arc::clone(&self.vocabulary) as SharedVocabulary
    }

    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn open(&mut self, slot: SlotId, opening: &SlotPurpose<'_>) {
        let sequence = ScriptedSequence {
            play: self.library.play(opening),
            seed: opening.seed,
            prompt_tokens: opening.prompt.len(),
            // The prompt's length is known, and most outputs of tests are short.
            hashes: Vec::with_capacity(opening.prompt.len() + 64),
            oldest: 0,
            started: None,
        };
        if let Some(position) = self.slots.get_mut(slot as usize) {
            *position = Some(sequence);
        }
    }

    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32) {
        self.assert_resumes(from, tokens);
        let copied = |source: &mut ScriptedSequence| {
            let hashes = source.hashes[..tokens as usize].to_vec();
            (hashes, source.oldest)
        };
        let Some((hashes, oldest)) = self.sequence(from).map(copied) else {
            return;
        };
        if let Some(target) = self.sequence(to) {
            // Only the tokens are copied. The script stays that of the request for which the slot was opened.
            target.hashes = hashes;
            target.oldest = oldest;
        }
    }

    fn truncate(&mut self, slot: SlotId, tokens: u32) {
        self.assert_resumes(slot, tokens);
        if let Some(sequence) = self.sequence(slot) {
            sequence.hashes.truncate(tokens as usize);
        }
    }

    fn set_adapters(&mut self, scales: &[f32]) {
        self.adapters = hash_of(scales);
    }

    fn can_resume(&self, slot: SlotId, tokens: u32) -> bool {
        let sequence = self.slots.get(slot as usize).and_then(Option::as_ref);
        sequence.is_some_and(|sequence| {
            let (tokens, held) = (tokens as usize, sequence.hashes.len());
            let first = (tokens + 1).saturating_sub(self.window);
            let within = self.info.truncates && tokens < held && sequence.oldest <= first;
            tokens == 0 || tokens == held || within
        })
    }

    fn release(&mut self, slot: SlotId) {
        if let Some(position) = self.slots.get_mut(slot as usize) {
            *position = None;
        }
    }

    fn idle_cells_max(&self) -> usize {
        if self.saves { 32 } else { usize::MAX }
    }

    fn saved_bytes_max(&self) -> usize {
        if self.saves { 1 << 20 } else { 0 }
    }

    fn restores_in_part(&self) -> bool {
        self.info.truncates && self.window == usize::MAX
    }

    fn saved_size(&mut self, slot: SlotId) -> usize {
        let sequence = self.sequence(slot);
        sequence.map_or(0, |sequence| size_of_val(&sequence.hashes[..]))
    }

    fn save(&mut self, slot: SlotId) -> Option<Vec<u8>> {
        let hashes = &self.sequence(slot)?.hashes;
        let bytes = hashes.iter().flat_map(|hash| hash.to_le_bytes());
        Some(bytes.collect())
    }

    fn row_finder(&self) -> Option<RowFinder> {
        Some(|state, tokens| {
            let row_bytes = size_of::<u64>();
            let is_whole = state.len() == tokens * row_bytes;
            let areas = vec![RowArea {
                start: 0,
                row_bytes,
            }];
            is_whole.then(|| StateRows {
                state: state.into(),
                areas,
            })
        })
    }

    fn saved_identity(&self) -> Option<String> {
        self.saves.then(|| format!("scripted {}", self.info.name))
    }

    fn restore(&mut self, slot: SlotId, state: &[u8], tokens: u32) -> bool {
        let (hashes, rest) = state.as_chunks();
        let window = self.window;
        let Some(sequence) = self.sequence(slot) else {
            return false;
        };
        sequence.hashes = hashes
            .iter()
            .map(|&hash| u64::from_le_bytes(hash))
            .collect();
        sequence.oldest = sequence.hashes.len().saturating_sub(window);
        rest.is_empty() && sequence.hashes.len() == tokens as usize
    }

    fn checkpoint_terms(&self) -> Option<CheckpointTerms> {
        let windowed = self.window < usize::MAX;
        let terms = CheckpointTerms {
            kept_tokens: match self.info.truncates {
                true => u32::try_from(self.window - 1).unwrap_or(u32::MAX),
                false => 0,
            },
            slack: u32::from(self.info.truncates),
        };
        (self.saves && (windowed || !self.info.truncates)).then_some(terms)
    }

    fn checkpoint_size(&mut self, _: SlotId) -> usize {
        size_of::<u64>()
    }

    fn checkpoint(&mut self, slot: SlotId) -> Option<Vec<u8>> {
        let last = self.sequence(slot)?.hashes.last()?;
        Some(last.to_le_bytes().to_vec())
    }

    fn rewind(&mut self, slot: SlotId, checkpoint: &[u8], tokens: u32) -> bool {
        let window = self.window;
        let Some(sequence) = self.sequence(slot) else {
            return false;
        };
        let last = (tokens as usize).checked_sub(1);
        let last = last.and_then(|last| sequence.hashes.get(last));
        assert!(
            last.is_some_and(|last| last.to_le_bytes() == checkpoint),
            "the checkpoint is of other tokens"
        );
        sequence.hashes.truncate(tokens as usize);
        sequence.oldest = sequence.hashes.len().saturating_sub(window);
        true
    }

    fn decode(&mut self, batch: &[BatchEntry], _now: Time) -> Result<(), DecodeStop> {
        let adapters = self.adapters;
        let window = self.window;
        let (mut slot, mut begins) = (None, 0);
        for entry in batch {
            if let Some(sequence) = self.sequence(entry.slot) {
                // As llama.cpp, which computes a part of a batch at a time: what the first token of a part does not reach may be
                // overwritten by it.
                let held = sequence.hashes.len();
                if slot.replace(entry.slot) != Some(entry.slot) || held == begins + PART_TOKENS {
                    begins = held;
                    let reached = (held + 1).saturating_sub(window);
                    sequence.oldest = sequence.oldest.max(reached);
                }
                debug_assert_eq!(
                    sequence.hashes.len(),
                    entry.position as usize,
                    "positions have no gap"
                );
                let before = sequence.hashes.last().copied().unwrap_or_default();
                // A hash of the whole prefix: two contexts that differ anywhere, in their tokens or in the adapters that
                // computed them, have different rows from there on.
                let token = u64::from(entry.token) ^ adapters;
                sequence.hashes.push(mix(before ^ token));
            }
        }
        self.batch.clear();
        self.batch.extend_from_slice(batch);
        Ok(())
    }

    fn row(&mut self, index: usize, now: Time) -> OutputRow<'_> {
        let entry = self.batch[index];
        let distribution = self.distribution.clone();
        let Some(sequence) = self.sequence(entry.slot) else {
            return OutputRow::Failed(EngineError::internal(
                ErrorReason::NONE,
                "the slot of this row holds no sequence",
            ));
        };
        let hash = sequence.hashes.get(entry.position as usize);
        let hash = hash.copied().unwrap_or_default();
        if entry.position as usize + 1 < sequence.prompt_tokens {
            // Rows within the prompt are only scored: no script chooses a token, and the row must not depend on the
            // seed.
            return OutputRow::Ranked(RankedRow::new(&distribution, mix(hash), None));
        }
        let next = (entry.position as usize + 1).saturating_sub(sequence.prompt_tokens);
        // From the first row and not from `open`, and relative to the token that is next then: a sequence that was
        // preempted goes on at its pace.
        let (started, first) = *sequence.started.get_or_insert((now, next));
        let due = started
            + sequence
                .play
                .delay(next)
                .saturating_sub(sequence.play.delay_before(first));
        if due > now {
            return OutputRow::NotBefore(on_beat(due));
        }
        match sequence.play.cue(next) {
            Cue::Token(token) => OutputRow::Ranked(RankedRow::new(
                &distribution,
                mix(hash ^ sequence.seed),
                Some(token),
            )),
            Cue::End(reason) => OutputRow::End(reason),
            Cue::Fail(error) => OutputRow::Failed(error),
            // The owner sets no timer for `Time::MAX`: the request ends when it is cancelled or times out.
            Cue::Hang => OutputRow::NotBefore(Time::MAX),
            Cue::Panic => panic!("the script has a panic step here"),
        }
    }

    fn joins(&self, slot: SlotId, output: usize) -> bool {
        let sequence = self.slots.get(slot as usize).and_then(Option::as_ref);
        sequence.is_some_and(|sequence| sequence.play.joins(output))
    }
}

/// A hash of the scales of adapters; 0 if all are off.
fn hash_of(scales: &[f32]) -> u64 {
    let on = (1..).zip(scales).filter(|(_, scale)| **scale != 0.0);
    on.fold(0, |hash, (place, scale): (u64, &f32)| {
        mix(hash ^ (place << 32) ^ u64::from(scale.to_bits()))
    })
}

/// Rounds up to a whole millisecond, so that sequences of the same pace share their steps; a step costs the same for
/// one sequence as for all.
fn on_beat(due: Time) -> Time {
    let due = due.since_origin();
    match due.subsec_nanos() % BEAT_NANOS {
        0 => Time::new(due),
        over => Time::new(due.saturating_add(Duration::from_nanos((BEAT_NANOS - over).into()))),
    }
}

/// Tokens of one slot that are computed at a time.
const PART_TOKENS: usize = 8;

const BEAT_NANOS: u32 = 1_000_000;

#[cfg(test)]
mod tests;
