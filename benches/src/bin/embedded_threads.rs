//! Measures how many threads a decode should use, and whether idle workers should spin: the basis of the defaults.
//!
//! ```text
//! embedded_threads [--rounds N] [--steps N] [--json]
//! ```

use std::io::Write;
use std::process::{Child, Command};

use anyhow::Result;
use clap::Parser;
use sapwood_benches::embedded::{bare, model, processor_seconds};
use sapwood_benches::measure::median;
use sapwood_engine::embedded::LoadOptions;
use serde_json::json;

const SEQUENCES: [usize; 2] = [1, 8];

/// Tokens per second over threads and polling
#[derive(Parser)]
struct Args {
    /// Measured rounds
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Tokens of each sequence in a round
    #[arg(long, default_value_t = 48)]
    steps: usize,
    /// Write JSON too
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let Args {
        rounds,
        steps,
        json: as_json,
    } = Args::parse();
    let processors = std::thread::available_parallelism()?.get() as u32;
    let settings: Vec<(u32, u32)> = (1..=processors)
        .flat_map(|threads| [0, 50].map(|poll| (threads, poll)))
        .collect();
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{processors} processors; tokens per second (processor seconds per 100 tokens)"
    )?;
    for busy in [false, true] {
        let _load = busy.then(Load::start).transpose()?;
        let mut figures = vec![[vec![], vec![], vec![], vec![]]; settings.len()];
        for round in 0..rounds {
            for (figures, &(threads, poll)) in figures.iter_mut().zip(&settings) {
                let mut model = model(&LoadOptions {
                    threads: Some(threads),
                    poll,
                    ..LoadOptions::default()
                })?;
                for (index, &sequences) in SEQUENCES.iter().enumerate() {
                    let before = processor_seconds()?;
                    let taken = bare(&mut model, sequences, steps, round)?;
                    let tokens = (sequences * steps) as f64;
                    figures[2 * index].push(tokens / taken.as_secs_f64());
                    figures[2 * index + 1].push((processor_seconds()? - before) / tokens * 100.0);
                }
            }
        }
        for (figures, &(threads, poll)) in figures.into_iter().zip(&settings) {
            let [one, one_cost, eight, eight_cost] = figures.map(median);
            if as_json {
                let line = json!({"busy": busy, "threads": threads, "poll": poll, "tokens_per_second_1": one,
                    "tokens_per_second_8": eight, "processor_seconds_per_100_tokens_1": one_cost,
                    "processor_seconds_per_100_tokens_8": eight_cost});
                writeln!(out, "{line}")?;
            } else {
                writeln!(
                    out,
                    "busy {busy:5}  threads {threads}  poll {poll:2}  1 sequence {one:6.1} ({one_cost:.2})  \
                     8 sequences {eight:6.1} ({eight_cost:.2})"
                )?;
            }
        }
    }
    Ok(())
}

/// A process that keeps one processor busy. Killed when dropped.
struct Load(Child);

impl Load {
    fn start() -> Result<Self> {
        Ok(Self(
            Command::new("sh")
                .args(["-c", "while :; do :; done"])
                .spawn()?,
        ))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
