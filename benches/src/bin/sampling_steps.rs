//! Measures what sampling adds to a step, by the number of output rows, the vocabulary and the sampling parameters.
//!
//! `cargo run --profile dist -p sapwood-benches --bin sampling_steps [--json]`. The engine steps over a model whose rows
//! are copied from a table in its forward pass, and the time of the copies is subtracted.
//!
//! Cost is processor time of all threads, as Linux reports it, so that a busy machine distorts it little. Wall time on
//! such a machine says something only as a ratio of rounds that alternate.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use sapwood_benches::dense::{Dense, steep_table, table};
use sapwood_benches::measure::{median, process_time};
use sapwood_engine::api::{GenerationRequest, Prompt};
use sapwood_engine::{Config, Engine, EngineOwner, RequestHandle};
use sapwood_proto::params::GenerationParams;
use sapwood_proto::time::Time;

const ROUNDS: usize = 5;
/// Rows that a round samples, in as many steps as they need.
const ROWS_OF_ROUND: u32 = 96;

/// Cost of sampling in a step
#[derive(Parser)]
struct Args {
    /// Threads that sample, beside the single one that they are compared with
    #[arg(long, default_value = "2")]
    threads: u32,
    /// Write JSON instead of a table
    #[arg(long)]
    json: bool,
}

struct Case {
    name: &'static str,
    params: GenerationParams,
    steep: bool,
}

fn cases() -> Vec<Case> {
    let case = |name, steep, change: fn(&mut GenerationParams)| {
        let mut params = GenerationParams {
            temperature: Some(0.7),
            ignore_eos: Some(true),
            ..GenerationParams::default()
        };
        change(&mut params);
        Case {
            name,
            params,
            steep,
        }
    };
    vec![
        case("greedy", true, |params| params.temperature = Some(0.0)),
        case("top-p 0.95", true, |params| params.top_p = Some(0.95)),
        case("top-p 0.95, flat rows", false, |params| {
            params.top_p = Some(0.95);
        }),
        case("min-p 0.05", true, |params| params.min_p = Some(0.05)),
        case("top-p 0.95, repetition 1.1, DRY", true, |params| {
            params.top_p = Some(0.95);
            params.repetition_penalty = Some(1.1);
            params.dry_multiplier = Some(0.8);
        }),
    ]
}

/// An engine all of whose sequences are decoded in each step.
struct Load {
    owner: EngineOwner,
    handles: Vec<RequestHandle>,
    copying: Arc<sapwood_benches::dense::Copying>,
    now: Time,
}

/// Milliseconds of one step.
#[derive(Clone, Copy)]
struct StepCost {
    core: f64,
    wall: f64,
}

impl Load {
    fn new(
        (rows, threads): (u32, u32),
        table: &Arc<[Vec<f32>]>,
        params: &GenerationParams,
    ) -> anyhow::Result<Self> {
        let model = Dense::with_table(rows, table)?;
        let copying = model.copying();
        let config = Config {
            seed: Some(1),
            sample_threads: Some(threads),
            ..Config::default()
        };
        let (owner, engine) = Engine::by_hand(Box::new(model), config);
        let submit = |_| {
            let mut request = GenerationRequest::new(Prompt::Tokens(vec![256, 97]));
            request.params = params.clone();
            Ok(engine.submit(request)?)
        };
        let mut load = Self {
            handles: (0..rows).map(submit).collect::<anyhow::Result<_>>()?,
            owner,
            copying,
            now: Time::ZERO,
        };
        while load.step() < rows as usize {}
        Ok(load)
    }

    /// Returns how many tokens were decoded.
    fn step(&mut self) -> usize {
        self.now = self.now + Duration::from_millis(1);
        let decoded = self.owner.step(self.now).decoded.len();
        for handle in &mut self.handles {
            while let Some(event) = handle.try_next() {
                std::hint::black_box(event);
            }
        }
        decoded
    }

    fn measure(&mut self, steps: u32) -> anyhow::Result<StepCost> {
        let copied = self.copying.times();
        let (core, wall) = (process_time()?, Instant::now());
        for _ in 0..steps {
            self.step();
        }
        let (core, wall) = (process_time()? - core, wall.elapsed());
        let copying = self.copying.times();
        let per_step = |time: Duration, before: Duration, after: Duration| {
            let own = time.saturating_sub(after.saturating_sub(before));
            own.as_secs_f64() * 1e3 / f64::from(steps)
        };
        Ok(StepCost {
            core: per_step(core, copied.0, copying.0),
            wall: per_step(wall, copied.1, copying.1),
        })
    }
}

/// The medians of one thread and of several, whose rounds alternate.
fn compare(
    (rows, threads): (u32, u32),
    table: &Arc<[Vec<f32>]>,
    params: &GenerationParams,
) -> anyhow::Result<[StepCost; 2]> {
    let mut loads = [
        Load::new((rows, 1), table, params)?,
        Load::new((rows, threads), table, params)?,
    ];
    let mut rounds = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (load, rounds) in loads.iter_mut().zip(&mut rounds) {
            rounds.push(load.measure(ROWS_OF_ROUND / rows)?);
        }
    }
    Ok(rounds.map(|rounds| StepCost {
        core: median(rounds.iter().map(|round| round.core).collect()),
        wall: median(rounds.iter().map(|round| round.wall).collect()),
    }))
}

#[expect(clippy::print_stdout, reason = "a bench prints its figures")]
fn main() -> anyhow::Result<()> {
    let Args { threads, json } = Args::parse();
    let mut figures = Vec::new();
    for tokens in [32_000, 152_000] {
        let flat: Arc<[Vec<f32>]> = table(tokens).into();
        let steep: Arc<[Vec<f32>]> = steep_table(tokens).into();
        for case in cases() {
            let table = if case.steep { &steep } else { &flat };
            for rows in [1, 8, 32] {
                let costs = compare((rows, threads), table, &case.params)?;
                figures.push((tokens, case.name, rows, costs));
            }
        }
    }
    if json {
        let rows = figures.iter().map(|(tokens, name, rows, [one, several])| {
            serde_json::json!({
                "vocabulary": tokens, "case": name, "rows": rows, "core_ms": one.core,
                "threads": threads, "core_ms_threads": several.core,
                "wall_ratio": several.wall / one.wall,
            })
        });
        println!("{}", serde_json::Value::from_iter(rows));
        return Ok(());
    }
    println!(
        "processor time of a step's sampling in ms, on 1 thread and on {threads}; wall time as a ratio"
    );
    for (tokens, name, rows, [one, several]) in figures {
        let ratio = several.wall / one.wall;
        println!(
            "{tokens:>7} {name:<32} {rows:>3} rows {:>8.3} {:>8.3} {ratio:>6.2}",
            one.core, several.core
        );
    }
    Ok(())
}
