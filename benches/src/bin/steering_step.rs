//! Measures what steering in this process costs per step, without a model: trivial controllers in Wasm, a native constraint,
//! and controllers beside hostile ones (AI-1103, AI-1109).
//!
//! ```text
//! steering_step [--rounds N] [--json] [--gate]
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser;
use sapwood_benches::measure::{Spread, micros, process_time};
use sapwood_benches::report::Report;
use sapwood_benches::steering::controllers::{self, Callbacks, trivial_p1, trivial_p2};
use sapwood_benches::steering::gate::pause;
use sapwood_benches::steering::player::Player;
use sapwood_benches::steering::table::{Table, number, pair};
use sapwood_benches::steering::{bare, vocabulary::MadeVocabulary};
use sapwood_control::steer::ModelControllers;
use sapwood_control::trie::HostModel;
use sapwood_proto::steer::{Appended, Steer, SteerSource, Steered, StepWaker};
use serde_json::json;

const VOCABULARY: usize = 32_000;
const SEQUENCES: [usize; 3] = [1, 10, 40];
/// Steps of a round.
const STEPS: usize = 100;
/// Steps of a round that are not counted.
const WARM: usize = 10;
/// Forward passes that are computed elsewhere, as on a GPU, while controllers compute masks.
const FORWARD_PASSES: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_millis(1),
    Duration::from_millis(10),
];
/// Goals of AI-1103, in microseconds.
const SEQUENCE_GOAL: f64 = 5.0;
const FORTY_GOAL: f64 = 500.0;

/// Cost of a step of steerers in this process
#[derive(Parser)]
struct Args {
    /// Measured rounds
    #[arg(long, default_value_t = 8)]
    rounds: usize,
    #[command(flatten)]
    report: Report,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let model = MadeVocabulary::new(VOCABULARY, 1).host_model();
    let tables = [
        bare::table(VOCABULARY)?,
        trivial(&model, args.rounds)?,
        hostile(&model, args.rounds)?,
    ];
    let text: Vec<_> = tables.iter().map(Table::text).collect();
    let json = json!(tables.iter().map(Table::json).collect::<Vec<_>>());
    args.report.print(&text.join("\n"), &json)?;
    Ok(args.report.exit(tables.iter().all(Table::passed)))
}

fn open(source: &dyn SteerSource, sequences: usize) -> Result<Vec<Box<dyn Steer>>> {
    (0..sequences)
        .map(|_| controllers::open(source, "", ""))
        .collect()
}

/// Both forms of the trivial controller, in alternating rounds. What is measured of a step is what the forward pass does not
/// hide.
fn trivial(model: &Arc<HostModel>, rounds: usize) -> Result<Table> {
    let host = controllers::host()?;
    let sources = [("P1", trivial_p1()), ("P2", trivial_p2())];
    let mut table = Table::new(
        "Steps in this process, trivial controllers, 32,000 tokens",
        &[
            "Controller",
            "Forward pass, ms",
            "Sequences",
            "Step beside it, minimum / median, µs",
            "Per sequence, µs",
            "Processor time per sequence, µs",
            "Goal of a step",
            "Goal per sequence",
        ],
    );
    let cases = FORWARD_PASSES
        .iter()
        .flat_map(|&pass| SEQUENCES.map(|sequences| (pass, sequences)));
    for (pass, sequences) in cases {
        let mut players = Vec::new();
        for (name, text) in &sources {
            let source = controllers::source(&host, model, text)?;
            players.push((
                *name,
                Player::begin(open(&source, sequences)?)?,
                vec![],
                vec![],
            ));
        }
        for round in 0..=rounds {
            for (_, player, walls, cpus) in &mut players {
                let (times, cpu) = steps(player, pass)?;
                // The first round warms up.
                if round > 0 {
                    walls.extend(times);
                    cpus.push(cpu);
                }
            }
        }
        for (name, _, walls, cpus) in players {
            let wall = Spread::of(walls);
            let each = |figure: f64| number(figure / sequences as f64);
            // A single sequence has nobody to share the wake-ups of threads with.
            let goals = match sequences {
                1 => [String::new(), String::new()],
                40 => [
                    table.at_most(wall.median, FORTY_GOAL),
                    table.at_most(wall.median / 40.0, SEQUENCE_GOAL),
                ],
                _ => [
                    String::new(),
                    table.at_most(wall.median / sequences as f64, SEQUENCE_GOAL),
                ],
            };
            let [step_goal, goal] = goals;
            table.row(&[
                name.to_owned(),
                pass.as_millis().to_string(),
                sequences.to_string(),
                pair(wall),
                each(wall.median),
                each(Spread::of(cpus).min),
                step_goal,
                goal,
            ]);
        }
    }
    Ok(table)
}

/// The times of a round's steps without the forward pass in microseconds, and the processor time of one of them.
fn steps(player: &mut Player, pass: Duration) -> Result<(Vec<f64>, f64)> {
    let mut step = || {
        let mut passed = Duration::ZERO;
        let took = player.step(42, || {
            if !pass.is_zero() {
                let begin = Instant::now();
                pause(pass);
                passed = begin.elapsed();
            }
        })?;
        Ok::<_, anyhow::Error>(took - passed)
    };
    for _ in 0..WARM {
        step()?;
    }
    let cpu = process_time()?;
    let mut times = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        times.push(micros(step()?));
    }
    Ok((times, micros(process_time()? - cpu) / STEPS as f64))
}

/// A controller that harms others, and how it is played.
struct Hostile {
    title: &'static str,
    text: String,
    /// Forks in each step.
    forks: u32,
}

fn hostiles() -> Vec<Hostile> {
    let hostile = |title, callbacks: Callbacks<'_>, forks| Hostile {
        title,
        text: controllers::p1(&callbacks),
        forks,
    };
    let flood = "(local $n i32)
        (i32.store (i32.const 512) (i32.const 4096)) (i32.store (i32.const 516) (i32.const 65536))
        (loop $again
            (drop (call $write (i32.const 1) (i32.const 512) (i32.const 1) (i32.const 520)))
            (local.set $n (i32.add (local.get $n) (i32.const 1)))
            (br_if $again (i32.lt_u (local.get $n) (i32.const 2000))))";
    // Writes all of its memory, so that each fork has to copy it.
    let fill = "(memory.fill (i32.const 4096) (i32.const 7) (i32.const 8000000))";
    vec![
        hostile("none", Callbacks::default(), 0),
        hostile(
            "endless loop in mid",
            Callbacks {
                mid: "(loop $for_ever (br $for_ever))",
                ..Callbacks::default()
            },
            0,
        ),
        hostile(
            "log flood in mid",
            Callbacks {
                mid: flood,
                ..Callbacks::default()
            },
            0,
        ),
        hostile(
            "15 forks of 8 MB in each step",
            Callbacks {
                pages: 128,
                begin: fill,
                ..Callbacks::default()
            },
            15,
        ),
    ]
}

/// One hostile sequence. Nobody waits for it; if it fails, another one begins.
struct Neighbour {
    forks: u32,
    waker: Arc<dyn StepWaker>,
    source: ModelControllers,
    /// `None`: it has failed.
    phase: Option<Phase>,
    failures: usize,
}

enum Phase {
    Begins(Box<dyn Steer>),
    InPre(Box<dyn Steer>),
    InMid(Box<dyn Steer>),
}

impl Neighbour {
    /// Goes on if it can.
    fn poll(&mut self) -> Result<()> {
        let phase = match self.phase.take() {
            Some(phase) => phase,
            None => {
                let mut steer = controllers::open(&self.source, "", "")?;
                steer.begin(&[1], &self.waker);
                Phase::Begins(steer)
            }
        };
        self.phase = self.advance(phase).ok();
        self.failures += usize::from(self.phase.is_none());
        Ok(())
    }

    fn advance(&self, phase: Phase) -> Steered<Phase> {
        Ok(match phase {
            Phase::Begins(mut steer) => match steer.begin_poll()? {
                Some(_) => Phase::InPre(steer),
                None => Phase::Begins(steer),
            },
            Phase::InPre(mut steer) => {
                if steer.pre()?.is_none() {
                    return Ok(Phase::InPre(steer));
                }
                for index in 1..=self.forks {
                    // Refused where earlier ones are not freed yet. The copy is dropped at once.
                    let _fork = steer.fork(index);
                }
                steer.mid_begin(&[99]);
                Phase::InMid(steer)
            }
            Phase::InMid(mut steer) => {
                if steer.mid_poll()?.is_none() {
                    return Ok(Phase::InMid(steer));
                }
                steer.post(Appended {
                    backtrack: 0,
                    tokens: &[42],
                    sampled: Some(42),
                })?;
                Phase::InPre(steer)
            }
        })
    }
}

/// Steps of 39 trivial controllers beside one that is hostile.
fn hostile(model: &Arc<HostModel>, rounds: usize) -> Result<Table> {
    let mut table = Table::new(
        "Steps of 39 trivial controllers beside a hostile one",
        &[
            "Neighbour",
            "Step, minimum / median / p99, µs",
            "Failures of the neighbour",
        ],
    );
    let host = controllers::host()?;
    let hostiles = hostiles();
    let mut cases = Vec::new();
    for hostile in &hostiles {
        let source = controllers::source(&host, model, &trivial_p1())?;
        let player = Player::begin(open(&source, 39)?)?;
        cases.push((hostile, player, vec![]));
    }
    let mut failures = vec![0; cases.len()];
    for _ in 0..rounds {
        for (index, (hostile, player, walls)) in cases.iter_mut().enumerate() {
            let mut neighbour = Neighbour {
                forks: hostile.forks,
                waker: player.waker(),
                source: controllers::source(&host, model, &hostile.text)?,
                phase: None,
                failures: 0,
            };
            let until = Instant::now() + ROUND;
            while Instant::now() < until {
                neighbour.poll()?;
                let mut between = Ok(());
                let took = player.step(42, || between = neighbour.poll())?;
                between?;
                walls.push(micros(took));
            }
            failures[index] += neighbour.failures;
        }
    }
    for ((hostile, _, walls), failures) in cases.into_iter().zip(failures) {
        let wall = Spread::of(walls);
        let step = format!("{} / {}", pair(wall), number(wall.p99));
        table.row(&[hostile.title.to_owned(), step, failures.to_string()]);
    }
    Ok(table)
}

/// Long enough that an endless loop is interrupted in it.
const ROUND: Duration = Duration::from_millis(600);
