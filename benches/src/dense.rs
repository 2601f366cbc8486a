//! [`Dense`]: a scripted model whose rows are logits, as those of real models.

use std::time::Duration;

use anyhow::Result;
use sapwood_engine::api::{ModelInfo, SharedVocabulary};
use sapwood_engine::model::{
    BatchEntry, Capacity, DecodeStop, Model, OutputRow, SlotId, SlotPurpose,
};
use sapwood_engine::scripted::{Config, Script, Scripted, ScriptedTokenizer};
use sapwood_proto::time::Time;

use crate::steering::gate::pause;

/// Rows of the table: more than fit into the first-level caches, because a model's rows do not stay there either.
pub const ROWS: usize = 16;

/// A scripted model whose rows are copied from a table.
pub struct Dense {
    scripted: Scripted,
    table: Vec<Vec<f32>>,
    row: Vec<f32>,
    at: usize,
    forward_pass: Duration,
}

impl Dense {
    /// A model for so many sequences. Its forward pass takes that long, without work for this machine's processors, as on a
    /// GPU.
    ///
    /// # Errors
    /// If the scripted model refuses its configuration.
    pub fn new(parallel: u32, forward_pass: Duration) -> Result<Self> {
        let script = Config {
            script: Script::Tokens,
            count: u32::MAX,
            tokenizer: Some(ScriptedTokenizer::Words),
            context_tokens: 4096,
            parallel,
            kept_prefixes: 0,
            ..Config::default()
        };
        let scripted = Scripted::new(script)?;
        let tokens = scripted.info().vocabulary_tokens as usize;
        Ok(Self {
            scripted,
            table: table(tokens),
            row: Vec::new(),
            at: 0,
            forward_pass,
        })
    }
}

/// Rows as models produce them: about normal, with a standard deviation of 3.
#[must_use]
pub fn table(tokens: usize) -> Vec<Vec<f32>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 24) as f32
    };
    let mut logit = || ((0..12).map(|_| uniform()).sum::<f32>() - 6.0) * 3.0;
    (0..ROWS)
        .map(|_| (0..tokens).map(|_| logit()).collect())
        .collect()
}

impl Model for Dense {
    fn info(&self) -> ModelInfo {
        self.scripted.info()
    }

    fn vocabulary(&self) -> SharedVocabulary {
        self.scripted.vocabulary()
    }

    fn capacity(&self) -> Capacity {
        self.scripted.capacity()
    }

    fn open(&mut self, slot: SlotId, opening: &SlotPurpose<'_>) {
        self.scripted.open(slot, opening);
    }

    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32) {
        self.scripted.fork(from, to, tokens);
    }

    fn truncate(&mut self, slot: SlotId, tokens: u32) {
        self.scripted.truncate(slot, tokens);
    }

    fn release(&mut self, slot: SlotId) {
        self.scripted.release(slot);
    }

    fn decode(&mut self, batch: &[BatchEntry], now: Time) -> Result<(), DecodeStop> {
        if !self.forward_pass.is_zero() {
            pause(self.forward_pass);
        }
        self.scripted.decode(batch, now)
    }

    fn row(&mut self, _index: usize, _now: Time) -> OutputRow<'_> {
        self.at = (self.at + 1) % ROWS;
        self.row.clone_from(&self.table[self.at]);
        OutputRow::Logits(&mut self.row)
    }
}
