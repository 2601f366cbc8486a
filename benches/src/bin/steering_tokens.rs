//! Measures the tokens per second of an engine with and without steerers, on scripted models: one whose forward pass takes no
//! time, so that only overhead is left, and one whose forward pass takes 10 ms elsewhere, as on a GPU (AI-1108).
//!
//! ```text
//! steering_tokens [--rounds N] [--json] [--gate]
//! ```

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use sapwood_benches::dense::Dense;
use sapwood_benches::report::Report;
use sapwood_benches::steering::table::Table;
use sapwood_benches::steering::tokens::{COLUMNS, Load, cases, compare};
use sapwood_engine::model::Model;
use sapwood_engine::{Config, Engine};
use serde_json::json;

/// Tokens per second with and without steerers
#[derive(Parser)]
struct Args {
    /// Measured rounds
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[command(flatten)]
    report: Report,
}

const SEQUENCES: u32 = 40;
/// The share of the unsteered rate that must be left.
const GOAL: f64 = 0.95;
const FORWARD_PASS: Duration = Duration::from_millis(10);

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let mut table = Table::new(
        "Tokens per second of scripted models, 32,000 tokens",
        &COLUMNS,
    );
    for (title, forward_pass, tokens, goal) in [
        ("forward pass of 0 ms", Duration::ZERO, 200, None),
        ("forward pass of 10 ms", FORWARD_PASS, 60, Some(GOAL)),
    ] {
        let model = Dense::new(SEQUENCES, forward_pass)?;
        let vocabulary = model.vocabulary();
        let engine = Engine::spawn(
            Box::new(model),
            Config {
                steer_ms: 1_000,
                ..Config::default()
            },
        )?;
        let load = Load {
            sequences: SEQUENCES as usize,
            tokens,
            rounds: args.rounds,
        };
        compare(
            &mut table,
            title,
            &engine,
            cases(
                &vocabulary,
                &[("regex of words", "sapwood:regex", "[ a-zA-Z]*")],
            )?,
            load,
            goal,
        )?;
    }
    let json = json!([table.json()]);
    args.report.print(table.text(), &json)?;
    Ok(args.report.exit(table.passed()))
}
