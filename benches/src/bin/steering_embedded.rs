//! Measures the tokens per second of the embedded engine with and without steerers, on the demo model (AI-1108).
//!
//! ```text
//! steering_embedded [--rounds N] [--model FILE.gguf] [--json] [--gate]
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use sapwood_benches::embedded::demo_file;
use sapwood_benches::report::Report;
use sapwood_benches::steering::table::Table;
use sapwood_benches::steering::tokens::{COLUMNS, Load, cases, compare};
use sapwood_engine::embedded::{LoadOptions, ModelSource, load};
use sapwood_engine::model::Model;
use sapwood_engine::{Config, Engine};
use serde_json::json;

/// Tokens per second of the embedded engine with and without steerers
#[derive(Parser)]
struct Args {
    /// Measured rounds
    #[arg(long, default_value_t = 4)]
    rounds: usize,
    /// Another model than the demo's
    #[arg(long)]
    model: Option<PathBuf>,
    #[command(flatten)]
    report: Report,
}

const SEQUENCES: [usize; 3] = [1, 8, 40];
/// Tokens of each sequence.
const TOKENS: usize = 48;
/// Never complete within so many tokens.
const LIST: &str = r#"{"type":"array","minItems":1000,"items":{"type":"object","additionalProperties":false,
    "required":["name","age"],"properties":{"name":{"type":"string"},"age":{"type":"integer"}}}}"#;
/// The share of the unsteered rate that must be left.
const GOAL: f64 = 0.95;

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let path = match args.model {
        Some(path) => path,
        None => demo_file()?,
    };
    let title = path
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let source = ModelSource::File(path);
    let mut table = Table::new("Tokens per second of the embedded engine", &COLUMNS);
    let constraints = [
        ("regex of prose", "sapwood:regex", r"(.|\n)*"),
        ("JSON list of objects", "sapwood:json-schema", LIST),
    ];
    for sequences in SEQUENCES {
        let options = LoadOptions {
            kept_prefixes: Some(0),
            parallel: u32::try_from(sequences)?,
            ..LoadOptions::default()
        };
        let model = load("bench", &source, &options, &mut |_| true)?;
        let vocabulary = model.vocabulary();
        let engine = Engine::spawn(Box::new(model), Config::default())?;
        let load = Load {
            sequences,
            tokens: TOKENS,
            rounds: args.rounds,
        };
        compare(
            &mut table,
            &title,
            &engine,
            cases(&vocabulary, &constraints)?,
            load,
            Some(GOAL),
        )?;
    }
    let json = json!([table.json()]);
    args.report.print(table.text(), &json)?;
    Ok(args.report.exit(table.passed()))
}
