//! [`Dense`]: a scripted model whose rows are logits, as those of real models.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use sapwood_engine::api::{ModelInfo, SharedVocabulary};
use sapwood_engine::model::{
    BatchEntry, Capacity, DecodeStop, Model, OutputRow, SlotId, SlotPurpose,
};
use sapwood_engine::scripted::{Config, Script, Scripted, ScriptedTokenizer};
use sapwood_proto::time::Time;

use crate::measure::core_time;
use crate::steering::gate::pause;

/// Rows of the table: more than fit into the first-level caches, because a model's rows do not stay there either.
pub const ROWS: usize = 16;

/// A scripted model whose rows are copied from a table, in its forward pass.
pub struct Dense {
    scripted: Scripted,
    table: Arc<[Vec<f32>]>,
    /// The rows of the last batch, by the index of their entry.
    rows: Vec<Vec<f32>>,
    at: usize,
    forward_pass: Duration,
    copying: Arc<Copying>,
}

/// What forward passes have taken so far: copying rows, which real models do not.
#[derive(Debug, Default)]
pub struct Copying {
    core_nanos: AtomicU64,
    wall_nanos: AtomicU64,
}

impl Copying {
    /// Processor time and wall time.
    #[must_use]
    pub fn times(&self) -> (Duration, Duration) {
        let of = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Ordering::Relaxed));
        (of(&self.core_nanos), of(&self.wall_nanos))
    }
}

impl Dense {
    /// A model for so many sequences. Its forward pass takes that long, without work for this machine's processors, as on a
    /// GPU.
    ///
    /// # Errors
    /// If the scripted model refuses its configuration.
    pub fn new(parallel: u32, forward_pass: Duration) -> Result<Self> {
        let vocab = Config::default().vocab;
        let table: Arc<[Vec<f32>]> = table(vocab as usize).into();
        Ok(Self {
            forward_pass,
            ..Self::with_table(parallel, &table)?
        })
    }

    /// A model for so many sequences, whose rows are those of a table.
    ///
    /// # Errors
    /// If the scripted model refuses its configuration.
    pub fn with_table(parallel: u32, table: &Arc<[Vec<f32>]>) -> Result<Self> {
        let script = Config {
            script: Script::Tokens,
            count: u32::MAX,
            tokenizer: Some(ScriptedTokenizer::Words),
            vocab: u32::try_from(table[0].len())?,
            context_tokens: 4096,
            parallel,
            kept_prefixes: 0,
            ..Config::default()
        };
        Ok(Self {
            scripted: Scripted::new(script)?,
            table: Arc::clone(table),
            rows: Vec::new(),
            at: 0,
            forward_pass: Duration::ZERO,
            copying: Arc::default(),
        })
    }

    /// What its forward passes take.
    #[must_use]
    pub fn copying(&self) -> Arc<Copying> {
        Arc::clone(&self.copying)
    }

    fn copy_rows(&mut self, batch: &[BatchEntry]) {
        self.rows.resize_with(batch.len(), Vec::new);
        for (row, _) in self
            .rows
            .iter_mut()
            .zip(batch)
            .filter(|(_, entry)| entry.row)
        {
            self.at = (self.at + 1) % ROWS;
            row.clone_from(&self.table[self.at]);
        }
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

/// Rows that are as steep as those of trained models: the logit falls with the logarithm of the rank, so that at
/// temperature 0.7 the best token has two thirds of the weight.
#[must_use]
pub fn steep_table(tokens: usize) -> Vec<Vec<f32>> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut below = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % limit as u64).unwrap_or(0)
    };
    let mut row: Vec<f32> = (1..=tokens)
        .map(|rank| 20.0 - 1.5 * (rank as f32).ln())
        .collect();
    (0..ROWS)
        .map(|_| {
            for last in (1..tokens).rev() {
                row.swap(last, below(last + 1));
            }
            row.clone()
        })
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
        let began = (core_time(), Instant::now());
        self.copy_rows(batch);
        let (core, wall) = (core_time(), began.1.elapsed());
        if let (Ok(before), Ok(after)) = (began.0, core) {
            let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            let copying = &self.copying;
            let spent = nanos(after.saturating_sub(before));
            copying.core_nanos.fetch_add(spent, Ordering::Relaxed);
            copying.wall_nanos.fetch_add(nanos(wall), Ordering::Relaxed);
        }
        self.scripted.decode(batch, now)
    }

    fn row(&mut self, index: usize, _now: Time) -> OutputRow<'_> {
        OutputRow::Logits(&mut self.rows[index])
    }

    fn rows(&mut self, indexes: &[usize]) -> Vec<Option<&mut [f32]>> {
        let rows = self.rows.iter_mut().enumerate();
        let asked = rows.filter(|(index, _)| indexes.binary_search(index).is_ok());
        asked.map(|(_, row)| Some(&mut row[..])).collect()
    }
}
