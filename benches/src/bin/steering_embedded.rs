//! Measures the tokens per second of the embedded engine with and without steerers (AI-1108). Rounds of all cases alternate.
//!
//! ```text
//! steering_embedded [--model demo|FILE.gguf]... [--sequences N,N] [--tokens N] [--rounds N] [--json] [--gate]
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
    /// A model: its file, or `demo`; may be repeated
    #[arg(long, value_name = "FILE", default_value = "demo")]
    model: Vec<PathBuf>,
    /// Sequences at once, one number after the other
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 40])]
    sequences: Vec<usize>,
    /// Tokens of each sequence
    #[arg(long, default_value_t = 48)]
    tokens: usize,
    #[command(flatten)]
    report: Report,
}

/// Never complete within so many tokens.
const LIST: &str = r#"{"type":"array","minItems":1000,"items":{"type":"object","additionalProperties":false,
    "required":["name","age"],"properties":{"name":{"type":"string"},"age":{"type":"integer"}}}}"#;
/// The share of the unsteered rate that must be left.
const GOAL: f64 = 0.95;

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let mut table = Table::new("Tokens per second of the embedded engine", &COLUMNS);
    for model in &args.model {
        let path = match model.to_str() {
            Some("demo") => demo_file()?,
            _ => model.clone(),
        };
        measure(&mut table, path, &args)?;
    }
    let json = json!([table.json()]);
    args.report.print(table.text(), &json)?;
    Ok(args.report.exit(table.passed()))
}

fn measure(table: &mut Table, path: PathBuf, args: &Args) -> Result<()> {
    let title = path
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let source = ModelSource::File(path);
    let constraints = [
        // Its end is a byte that no model writes: one that may end anywhere does.
        ("regex of prose", "sapwood:regex", r"[^\x00]*\x00"),
        ("JSON list of objects", "sapwood:json-schema", LIST),
    ];
    for &sequences in &args.sequences {
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
            tokens: args.tokens,
            rounds: args.rounds,
        };
        let cases = cases(&vocabulary, &constraints)?;
        compare(table, &title, &engine, cases, load, Some(GOAL))?;
    }
    Ok(())
}
