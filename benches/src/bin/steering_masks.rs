//! Measures how long masks take: of native constraints over the positions of documents (AI-1104), and their widening into the
//! rows of the wire (AI-1107).
//!
//! ```text
//! steering_masks [--documents N] [--model FILE.gguf] [--json] [--gate]
//! ```
//!
//! The time of a mask is from `mid_begin` until it is there, with the hand-off to the worker's thread and back. The
//! processor time is that of the worker alone, which a busy machine does not distort. Positions whose token is forced need no
//! mask; they are counted.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Parser;
use sapwood_benches::measure::{Spread, micros};
use sapwood_benches::report::Report;
use sapwood_benches::steering::bare;
use sapwood_benches::steering::controllers;
use sapwood_benches::steering::documents::{Constraint, constraints};
use sapwood_benches::steering::gate::Gate;
use sapwood_benches::steering::table::{Table, number, pair};
use sapwood_benches::steering::vocabulary::MadeVocabulary;
use sapwood_control::runtime::{P1Rows, Row};
use sapwood_control::wire::{SharedRegion, unlink_region};
use sapwood_engine::api::SharedVocabulary;
use sapwood_engine::constraint::{ConstraintConfig, ConstraintSource, MaskWorkers};
use sapwood_proto::steer::{Appended, Branch, Mask, Mid, Pre, SharedMask, Steer, StepWaker, Token};
use serde_json::json;

/// How long masks take
#[derive(Parser)]
struct Args {
    /// Documents of each constraint, at most 100
    #[arg(long, default_value_t = 100)]
    documents: usize,
    /// Also with the vocabulary of this model
    #[arg(long)]
    model: Option<PathBuf>,
    #[command(flatten)]
    report: Report,
}

/// Goals of AI-1104 and AI-1107, in microseconds.
const MEDIAN_GOAL: f64 = 100.0;
const P99_GOAL: f64 = 1_000.0;
const WIDEN_GOAL: f64 = 250.0;
const SEED: u64 = 7;

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let mut vocabularies: Vec<(String, SharedVocabulary)> = [32_000, 49_152, 128_000]
        .into_iter()
        .map(|size| {
            (
                format!("made, {size}"),
                MadeVocabulary::new(size, 1).shared(),
            )
        })
        .collect();
    vocabularies.extend(real(args.model.as_ref())?);
    let tables = [
        bare::table(32_000)?,
        masks(&vocabularies, args.documents)?,
        widening()?,
    ];
    let text: Vec<_> = tables.iter().map(Table::text).collect();
    let json = json!(tables.iter().map(Table::json).collect::<Vec<_>>());
    args.report.print(&text.join("\n"), &json)?;
    Ok(args.report.exit(tables.iter().all(Table::passed)))
}

/// The demo model's vocabulary, and that of a file.
#[cfg(feature = "embedded")]
fn real(file: Option<&PathBuf>) -> Result<Vec<(String, SharedVocabulary)>> {
    use sapwood_benches::embedded::demo_file;
    use sapwood_engine::embedded::{LoadOptions, ModelSource, load};
    use sapwood_engine::model::Model;
    let mut found = Vec::new();
    for path in [Some(demo_file()?), file.cloned()].into_iter().flatten() {
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let model = load(
            &name,
            &ModelSource::File(path),
            &LoadOptions::default(),
            &mut |_| true,
        )?;
        let vocabulary = model.vocabulary();
        found.push((format!("{name}, {}", vocabulary.size()), vocabulary));
    }
    Ok(found)
}

#[cfg(not(feature = "embedded"))]
fn real(file: Option<&PathBuf>) -> Result<Vec<(String, SharedVocabulary)>> {
    anyhow::ensure!(file.is_none(), "--model needs the feature `embedded`");
    Ok(Vec::new())
}

/// What was measured of one constraint.
#[derive(Default)]
struct Figures {
    walls: Vec<f64>,
    cpus: Vec<f64>,
    /// Tokens that needed no mask.
    forced: usize,
    compile: f64,
}

fn masks(vocabularies: &[(String, SharedVocabulary)], documents: usize) -> Result<Table> {
    let mut table = Table::new(
        "Masks of native constraints, over the positions of 100 documents",
        &[
            "Vocabulary",
            "Constraint",
            "Masks",
            "Forced tokens",
            "Compile, ms",
            "Mask with hand-off, median / p99, µs",
            "Worker's processor time, median / p99, µs",
            "Goal",
        ],
    );
    for (name, vocabulary) in vocabularies {
        for constraint in constraints(SEED) {
            let figures = measure(vocabulary, &constraint, documents)
                .with_context(|| format!("{name}: {}", constraint.title))?;
            let (wall, cpu) = (Spread::of(figures.walls.clone()), Spread::of(figures.cpus));
            let goal = if name == "made, 32000" && constraint.controller == "sapwood:json-schema" {
                let median = table.at_most(wall.median, MEDIAN_GOAL);
                format!("median {median}, p99 {}", table.at_most(wall.p99, P99_GOAL))
            } else {
                String::new()
            };
            let both =
                |spread: Spread| format!("{} / {}", number(spread.median), number(spread.p99));
            table.row(&[
                name.clone(),
                constraint.title.to_owned(),
                figures.walls.len().to_string(),
                figures.forced.to_string(),
                number(figures.compile / 1e3),
                both(wall),
                both(cpu),
                goal,
            ]);
        }
    }
    Ok(table)
}

fn measure(
    vocabulary: &SharedVocabulary,
    constraint: &Constraint,
    documents: usize,
) -> Result<Figures> {
    let workers = Arc::new(MaskWorkers::with_threads(1));
    let config = ConstraintConfig {
        compile_time: std::time::Duration::from_secs(30),
        ..ConstraintConfig::default()
    };
    let source = ConstraintSource::new(Arc::clone(vocabulary), config, workers);
    // The token trie is built with the first constraint, and is no part of its compilation.
    controllers::open(&source, "sapwood:regex", "a")?;
    let begin = Instant::now();
    controllers::open(&source, constraint.controller, &constraint.arg)?;
    let mut figures = Figures {
        compile: micros(begin.elapsed()),
        ..Figures::default()
    };
    let gate = Gate::here();
    for document in constraint.documents.iter().take(documents) {
        let steer = controllers::open(&source, constraint.controller, &constraint.arg)?;
        follow(steer, &gate, vocabulary, document, &mut figures)
            .with_context(|| document.clone())?;
    }
    Ok(figures)
}

/// Writes a document under a constraint: of the allowed tokens always the longest that goes on with it.
fn follow(
    mut steer: Box<dyn Steer>,
    gate: &Arc<Gate>,
    vocabulary: &SharedVocabulary,
    document: &str,
    figures: &mut Figures,
) -> Result<()> {
    let waker: Arc<dyn StepWaker> = Arc::clone(gate) as _;
    steer.begin(&[], &waker);
    gate.wait(|| Ok(steer.begin_poll()?))?;
    steer.bind(1);
    let mut rest = document.as_bytes();
    loop {
        let Pre::Run { fast_forward } = gate.wait(|| Ok(steer.pre()?))? else {
            bail!("the constraint neither forces nor goes on");
        };
        for token in &fast_forward {
            let bytes = vocabulary.bytes(*token);
            rest = rest
                .strip_prefix(bytes)
                .context("what is forced is not in the document")?;
        }
        figures.forced += fast_forward.len();
        if rest.is_empty() {
            return Ok(());
        }
        let cpu = worker_nanos()?;
        let begin = Instant::now();
        steer.mid_begin(&[1]);
        let mid = gate.wait(|| Ok(steer.mid_poll()?))?;
        figures.walls.push(micros(begin.elapsed()));
        figures.cpus.push((worker_nanos()? - cpu) as f64 / 1e3);
        let Mid::One(Branch::Sample(sample)) = mid else {
            bail!("the constraint stops before the end");
        };
        let mask = sample.mask.context("no mask")?;
        let (token, len) = longest(vocabulary, &mask, rest)?;
        rest = &rest[len..];
        steer.post(Appended {
            backtrack: 0,
            tokens: &[token],
            sampled: Some(token),
        })?;
    }
}

/// The longest allowed token with which `rest` begins.
fn longest(
    vocabulary: &SharedVocabulary,
    mask: &SharedMask,
    rest: &[u8],
) -> Result<(Token, usize)> {
    let text = (0..=rest.len().min(24))
        .rev()
        .find_map(|len| std::str::from_utf8(&rest[..len]).ok());
    // What the tokenizer would take, if that is allowed; else all tokens are looked at.
    if let Some(&token) = vocabulary.tokenize(text.unwrap_or_default(), false).first() {
        let bytes = vocabulary.bytes(token);
        if !bytes.is_empty() && mask.allows(token) && rest.starts_with(bytes) {
            return Ok((token, bytes.len()));
        }
    }
    let fits = |token: &Token| {
        let bytes = vocabulary.bytes(*token);
        !bytes.is_empty() && rest.starts_with(bytes) && mask.allows(*token)
    };
    let token = (0..vocabulary.size() as Token)
        .filter(fits)
        .max_by_key(|&token| vocabulary.bytes(token).len())
        .with_context(|| format!("no token goes on with {}", String::from_utf8_lossy(rest)))?;
    Ok((token, vocabulary.bytes(token).len()))
}

/// Processor time of the thread that computes masks.
fn worker_nanos() -> Result<u64> {
    for thread in std::fs::read_dir("/proc/self/task")? {
        let folder = thread?.path();
        if std::fs::read_to_string(folder.join("comm"))?.trim() == "mask-0" {
            let stat = std::fs::read_to_string(folder.join("schedstat"))?;
            let ran = stat.split_whitespace().next().context("no schedstat")?;
            return Ok(ran.parse()?);
        }
    }
    Ok(0)
}

/// 40 rows of f32 in shared memory.
fn widening() -> Result<Table> {
    const VOCABULARY: usize = 32_000;
    const ROWS: usize = 40;
    let name = format!("/swb{}-rows", std::process::id());
    let region = SharedRegion::create(&name, ROWS * VOCABULARY * 4)?;
    unlink_region(&name)?;
    let rows = P1Rows::new(VOCABULARY);
    let mut table = Table::new(
        "Widening of 40 masks into rows of f32, 32,000 tokens",
        &["Masks", "Minimum / median, µs", "Goal for the median"],
    );
    let masks = [
        ("one token", 32_000),
        ("every 7th token", 7),
        ("every token", 1),
    ];
    let mut cases: Vec<_> = masks
        .map(|(title, every)| {
            let mut mask = Mask::none(VOCABULARY);
            (0..VOCABULARY as Token)
                .step_by(every)
                .for_each(|token| mask.allow(token));
            (title, mask, Vec::new())
        })
        .into();
    for _ in 0..300 {
        for (_, mask, times) in &mut cases {
            let begin = Instant::now();
            for row in 0..ROWS {
                rows.write(&region, row, Row::Mask(mask));
            }
            times.push(micros(begin.elapsed()));
        }
    }
    for (title, _, times) in cases {
        let spread = Spread::of(times);
        let goal = table.at_most(spread.median, WIDEN_GOAL);
        table.row(&[title.to_owned(), pair(spread), goal]);
    }
    Ok(table)
}
