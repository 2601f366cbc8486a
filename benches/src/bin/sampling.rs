//! Measures the cost of sampling one token from a row of 32,000 logits, by the sampling parameters.
//!
//! `cargo run --profile dist -p sapwood-benches --bin sampling [--json]`. The engine steps over a model whose rows are
//! copied from a table; the same steps with greedy sampling are subtracted, so that only the cost of the sampler is
//! left. For comparison it also measures the textbook method: sorting the row.
//!
//! Time is the thread's processor time, as Linux reports it, so that a busy machine distorts it little.

use std::time::Duration;

use clap::Parser;
use sapwood_benches::dense::{Dense, ROWS, table};
use sapwood_benches::measure::{core_time, median};
use sapwood_engine::api::{GenerationRequest, Prompt};
use sapwood_engine::model::Model;
use sapwood_engine::{Config, Engine};
use sapwood_proto::params::GenerationParams;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

const STEPS: u32 = 200;
const ROUNDS: usize = 9;

/// Cost of sampling one token
#[derive(Parser)]
struct Args {
    /// Write JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Microseconds per token of a request.
fn engine(sampling: &GenerationParams, top_logprobs: Option<u32>) -> anyhow::Result<f64> {
    let config = Config {
        seed: Some(1),
        ..Config::default()
    };
    let (mut owner, engine) = Engine::by_hand(Box::new(Dense::new(1, Duration::ZERO)?), config);
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
            "min-p 0.05, xtc",
            with(|sampling| {
                sampling.min_p = Some(0.05);
                sampling.xtc_probability = Some(0.5);
            }),
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
    let tokens = Dense::new(1, Duration::ZERO)?.info().vocabulary_tokens as usize;
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
