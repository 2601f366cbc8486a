//! Measures the cost of sampling one token from a row of 32,000 logits, by the sampling parameters.
//!
//! `cargo run --profile dist -p sapwood-benches --bin sampling [--json]`. The engine steps over a model whose rows are
//! copied from a table; the same steps with greedy sampling are subtracted, so that only the cost of the sampler is
//! left. For comparison it also measures the textbook method: sorting the row.
//!
//! Time is the thread's processor time, as Linux reports it, so that a busy machine distorts it little.

use std::time::Duration;

use clap::Parser;
use sapwood_benches::measure::{core_time, median};
use sapwood_engine::api::{GenerationRequest, ModelInfo, Prompt, SharedVocabulary};
use sapwood_engine::model::{
    BatchEntry, Capacity, DecodeStop, Model, OutputRow, SlotId, SlotPurpose,
};
use sapwood_engine::scripted::{Config as Script, Script as Name, Scripted, ScriptedTokenizer};
use sapwood_engine::{Config, Engine};
use sapwood_proto::params::GenerationParams;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

const STEPS: u32 = 200;
const ROUNDS: usize = 9;
/// Rows of the table: more than fit into the first-level caches, because a model's rows do not stay there either.
const ROWS: usize = 16;

/// Cost of sampling one token
#[derive(Parser)]
struct Args {
    /// Write JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A scripted model whose rows are logits.
struct Logits {
    scripted: Scripted,
    table: Vec<Vec<f32>>,
    row: Vec<f32>,
    at: usize,
}

impl Logits {
    fn new() -> anyhow::Result<Self> {
        let script = Script {
            script: Name::Tokens,
            count: u32::MAX,
            tokenizer: Some(ScriptedTokenizer::Words),
            context_tokens: 4096,
            parallel: 1,
            kept_prefixes: 0,
            ..Script::default()
        };
        let scripted = Scripted::new(script)?;
        let tokens = scripted.info().vocabulary_tokens as usize;
        Ok(Self {
            scripted,
            table: table(tokens),
            row: Vec::new(),
            at: 0,
        })
    }
}

/// Rows as models produce them: about normal, with a standard deviation of 3.
fn table(tokens: usize) -> Vec<Vec<f32>> {
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

impl Model for Logits {
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
        self.scripted.decode(batch, now)
    }

    fn row(&mut self, _index: usize, _now: Time) -> OutputRow<'_> {
        self.at = (self.at + 1) % ROWS;
        self.row.clone_from(&self.table[self.at]);
        OutputRow::Logits(&mut self.row)
    }
}

/// Microseconds per token of a request.
fn engine(sampling: &GenerationParams, top_logprobs: Option<u32>) -> anyhow::Result<f64> {
    let config = Config {
        seed: Some(1),
        ..Config::default()
    };
    let (mut owner, engine) = Engine::by_hand(Box::new(Logits::new()?), config);
    let mut request = GenerationRequest::new(Prompt::Tokens(vec![256, 97]));
    request.params = sampling.clone();
    request.params.top_logprobs = top_logprobs;
    request.params.ignore_eos = Some(true);
    let mut handle = engine.submit(request)?;
    let mut now = Time::ZERO;
    for _ in 0..2 {
        owner.step(now);
    }
    let began = core_time()?;
    for _ in 0..STEPS {
        now = now + Duration::from_millis(1);
        std::hint::black_box(owner.step(now));
        while let Some(event) = handle.try_next() {
            std::hint::black_box(event);
        }
    }
    Ok(per_row(core_time()? - began))
}

/// Microseconds for sorting a row with its tokens.
fn sorted(table: &[Vec<f32>]) -> anyhow::Result<f64> {
    let mut order: Vec<(f32, Token)> = Vec::new();
    let began = core_time()?;
    for step in 0..STEPS as usize {
        order.clear();
        order.extend(table[step % ROWS].iter().copied().zip(0..));
        order.sort_unstable_by(|left, right| right.0.total_cmp(&left.0));
        std::hint::black_box(&order);
    }
    Ok(per_row(core_time()? - began))
}

fn per_row(spent: Duration) -> f64 {
    spent.as_secs_f64() * 1e6 / f64::from(STEPS)
}

fn cases() -> Vec<(&'static str, GenerationParams, Option<u32>)> {
    let plain = GenerationParams::default();
    let with = |change: fn(&mut GenerationParams)| {
        let mut sampling = plain.clone();
        change(&mut sampling);
        sampling
    };
    vec![
        ("temperature 1", plain.clone(), None),
        ("top-k 40", with(|sampling| sampling.top_k = Some(40)), None),
        (
            "top-p 0.9",
            with(|sampling| sampling.top_p = Some(0.9)),
            None,
        ),
        (
            "top-k 40, top-p 0.9, repetition 1.1",
            with(|sampling| {
                sampling.top_k = Some(40);
                sampling.top_p = Some(0.9);
                sampling.repetition_penalty = Some(1.1);
            }),
            None,
        ),
        (
            "min-p 0.05",
            with(|sampling| sampling.min_p = Some(0.05)),
            None,
        ),
        (
            "most likely, 5 log-probabilities",
            with(|sampling| sampling.temperature = Some(0.0)),
            Some(5),
        ),
    ]
}

#[expect(clippy::print_stdout, reason = "a bench prints its figures")]
fn main() -> anyhow::Result<()> {
    let Args { json } = Args::parse();
    let greedy = GenerationParams {
        temperature: Some(0.0),
        ..GenerationParams::default()
    };
    let tokens = Logits::new()?.info().vocabulary_tokens as usize;
    let table = table(tokens);
    let mut rows = vec![("sorting the row", median_of(|| sorted(&table))?)];
    for (name, sampling, top_logprobs) in cases() {
        let cost = median_of(|| Ok(engine(&sampling, top_logprobs)? - engine(&greedy, None)?))?;
        rows.push((name, cost));
    }
    if json {
        let rows = rows
            .iter()
            .map(|(name, cost)| serde_json::json!({"case": name, "us_per_token": cost}));
        println!("{}", serde_json::Value::from_iter(rows));
        return Ok(());
    }
    println!("µs per token, {tokens} logits; beside the most likely token, which one pass finds");
    for (name, cost) in rows {
        println!("{name:<40} {cost:>8.1}");
    }
    Ok(())
}

fn median_of(mut figure: impl FnMut() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    let figures = (0..ROUNDS)
        .map(|_| figure())
        .collect::<anyhow::Result<_>>()?;
    Ok(median(figures))
}
