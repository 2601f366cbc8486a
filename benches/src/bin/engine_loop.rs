//! Measures the cost per token of the engine's own loop, compared with a bare loop over the same scripted rows.
//!
//! `cargo run --profile dist -p sapwood-benches --bin engine_loop [--json]`. The bare loop requests rows from the model
//! and takes the most likely token; the engine does the same behind its scheduler, cache bookkeeping, sampler, text
//! assembly and outboxes. Reading the events is timed separately: in a server it happens on other threads.
//!
//! Time is the thread's processor time, as Linux reports it, so that a busy machine distorts it little.

use std::time::Duration;

use clap::Parser;
use sapwood_benches::measure::{core_time, median};
use sapwood_engine::api::{GenerationRequest, Prompt};
use sapwood_engine::model::{BatchEntry, Model, OutputRow, SlotPurpose};
use sapwood_engine::scripted::{Config as Script, Script as Name, Scripted};
use sapwood_engine::{Config, Engine, RequestHandle};
use sapwood_proto::time::Time;

const SEQUENCES: [u32; 3] = [1, 16, 64];
const STEPS: u32 = 1500;
/// Steps between two readings of the clock; fewer than an outbox holds.
const STRIDE: u32 = 50;
const ROUNDS: usize = 5;

/// Cost of the engine's own loop per token
#[derive(Parser)]
struct Args {
    /// Write JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Nanoseconds per token, medians of alternating rounds.
struct Figures {
    sequences: u32,
    bare: f64,
    step: f64,
    read: f64,
}

impl Figures {
    fn own(&self) -> f64 {
        self.step - self.bare
    }
}

fn model() -> anyhow::Result<Scripted> {
    let script = Script {
        script: Name::Tokens,
        count: u32::MAX,
        context_tokens: 4096,
        parallel: 64,
        kept_prefixes: 0,
        ..Script::default()
    };
    Ok(Scripted::new(script)?)
}

fn per_token(spent: Duration, sequences: u32) -> f64 {
    spent.as_secs_f64() * 1e9 / f64::from(STEPS * sequences)
}

/// The same rows without an engine.
fn bare(sequences: u32) -> anyhow::Result<f64> {
    let mut model = model()?;
    let prompt = [256, 97];
    for slot in 0..sequences {
        let opening = SlotPurpose {
            prompt: &prompt,
            seed: u64::from(slot),
            choice: 0,
            max_tokens: None,
        };
        model.open(slot, &opening);
    }
    let mut tokens = vec![256; sequences as usize];
    let mut batch = Vec::new();
    let mut began = core_time()?;
    for position in 0..STEPS + 2 {
        if position == 2 {
            began = core_time()?;
        }
        batch.clear();
        batch.extend((0..).zip(&tokens).map(|(slot, &token)| BatchEntry {
            slot,
            position,
            token,
            row: true,
        }));
        model
            .decode(&batch, Time::ZERO)
            .map_err(|stop| anyhow::anyhow!("{stop:?}"))?;
        for (index, token) in tokens.iter_mut().enumerate() {
            if let OutputRow::Ranked(ranking) = model.row(index, Time::ZERO) {
                *token = ranking.first();
            }
        }
    }
    std::hint::black_box(&tokens);
    Ok(per_token(core_time()? - began, sequences))
}

/// The same tokens through the engine: returns the time in steps, and the time spent reading.
fn engine(sequences: u32) -> anyhow::Result<(f64, f64)> {
    let (mut owner, engine) = Engine::by_hand(
        Box::new(model()?),
        Config {
            seed: Some(1),
            ..Config::default()
        },
    );
    let mut handles = Vec::new();
    for _ in 0..sequences {
        handles.push(engine.submit(GenerationRequest::new(Prompt::Tokens(vec![256, 97])))?);
    }
    let mut now = Time::ZERO;
    let (mut stepping, mut reading) = (Duration::ZERO, Duration::ZERO);
    // The first two steps prefill the prompts.
    for _ in 0..2 {
        owner.step(now);
    }
    for _ in 0..STEPS / STRIDE {
        let began = core_time()?;
        for _ in 0..STRIDE {
            now = now + Duration::from_millis(1);
            std::hint::black_box(owner.step(now));
        }
        let stepped = core_time()?;
        handles.iter_mut().for_each(drain);
        stepping += stepped - began;
        reading += core_time()? - stepped;
    }
    Ok((
        per_token(stepping, sequences),
        per_token(reading, sequences),
    ))
}

fn drain(handle: &mut RequestHandle) {
    while let Some(event) = handle.try_next() {
        std::hint::black_box(event);
    }
}

fn measure(sequences: u32) -> anyhow::Result<Figures> {
    let (mut bares, mut steps, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        bares.push(bare(sequences)?);
        let (step, read) = engine(sequences)?;
        steps.push(step);
        reads.push(read);
    }
    Ok(Figures {
        sequences,
        bare: median(bares),
        step: median(steps),
        read: median(reads),
    })
}

#[expect(clippy::print_stdout, reason = "a bench prints its figures")]
fn main() -> anyhow::Result<()> {
    let Args { json } = Args::parse();
    let figures = SEQUENCES
        .into_iter()
        .map(measure)
        .collect::<anyhow::Result<Vec<_>>>()?;
    if json {
        let rows = figures.iter().map(|row| {
            serde_json::json!({
                "sequences": row.sequences, "bare_ns_per_token": row.bare, "step_ns_per_token": row.step,
                "own_ns_per_token": row.own(), "read_ns_per_token": row.read,
            })
        });
        println!("{}", serde_json::Value::from_iter(rows));
        return Ok(());
    }
    println!("sequences  bare ns/token  step ns/token  own ns/token  read ns/token");
    for row in &figures {
        let own = row.own();
        println!(
            "{:>9} {:>14.0} {:>14.0} {own:>13.0} {:>14.0}",
            row.sequences, row.bare, row.step, row.read
        );
    }
    Ok(())
}
