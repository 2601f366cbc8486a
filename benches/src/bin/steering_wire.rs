//! Measures the AICI runtime over shared memory: pings, and steps of trivial controllers, in both dialects and with both
//! kinds of synchronisation (AI-1101, AI-1102, AI-1109).
//!
//! ```text
//! steering_wire [--rounds N] [--aicirt PATH] [--json] [--gate]
//! ```
//!
//! The runtime is a process of its own: this program, whose command `runtime` serves as `sapwood aicirt` does, or the
//! `sapwood` at PATH. The driver sends prepared messages and reads the answers whole, but parses nothing.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use sapwood_benches::measure::{Spread, micros};
use sapwood_benches::report::Report;
use sapwood_benches::steering::bare;
use sapwood_benches::steering::controllers::{self, trivial_p1, trivial_p2};
use sapwood_benches::steering::gate::pause;
use sapwood_benches::steering::runtime::{Runtime, RuntimeFlags, VOCABULARY, WireDialect};
use sapwood_benches::steering::table::{Table, number, pair};
use serde_json::json;

/// The AICI runtime over shared memory
#[derive(Parser)]
struct Args {
    /// Measured rounds
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Another runtime: the path of `sapwood`
    #[arg(long)]
    aicirt: Option<PathBuf>,
    #[command(flatten)]
    report: Report,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Subcommand)]
enum Role {
    /// Be the runtime
    Runtime(RuntimeFlags),
}

const SEQUENCES: [usize; 3] = [1, 10, 40];
/// Steps of a round.
const STEPS: usize = 60;
/// Steps of a round that are not counted.
const WARM: usize = 5;
/// What the documents say of the reference, tuned, in microseconds: the best of `post_pre_process` and `mid_process`.
const REFERENCE: [(f64, f64); 3] = [(79.0, 193.0), (385.0, 1_051.0), (1_253.0, 3_561.0)];

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if let Some(Role::Runtime(flags)) = &args.role {
        flags.serve()?;
        return Ok(ExitCode::SUCCESS);
    }
    let tables = [bare::table(VOCABULARY)?, pings(&args)?, steps(&args)?];
    let text: Vec<_> = tables.iter().map(Table::text).collect();
    let json = json!(tables.iter().map(Table::json).collect::<Vec<_>>());
    args.report.print(&text.join("\n"), &json)?;
    Ok(args.report.exit(tables.iter().all(Table::passed)))
}

const fn synchronisation(futex: bool) -> &'static str {
    if futex { "futex" } else { "semaphores" }
}

/// Round trips of `ping`: one after the other, and with a pause in which the runtime falls asleep.
fn pings(args: &Args) -> Result<Table> {
    let mut table = Table::new(
        "Ping",
        &[
            "Synchronisation",
            "Runtime",
            "Minimum / median, µs",
            "Goal for the median",
        ],
    );
    for futex in [true, false] {
        let mut runtime = Runtime::start(
            usize::from(futex),
            futex,
            WireDialect::P1,
            args.aicirt.as_ref(),
        )?;
        let (mut awake, mut asleep) = (Vec::new(), Vec::new());
        for _ in 0..args.rounds {
            for _ in 0..1_000 {
                awake.push(micros(runtime.round_trip(PING)?));
            }
            for _ in 0..100 {
                pause(PAUSE);
                asleep.push(micros(runtime.round_trip(PING)?));
            }
        }
        for (name, times, goal) in [
            ("awake", awake, AWAKE_GOAL),
            ("asleep", asleep, ASLEEP_GOAL),
        ] {
            let spread = Spread::of(times);
            let goal = if futex {
                table.at_most(spread.median, goal)
            } else {
                String::new()
            };
            table.row(&[
                synchronisation(futex).to_owned(),
                name.to_owned(),
                pair(spread),
                goal,
            ]);
        }
    }
    Ok(table)
}

const PING: &str = r#"{"op":"ping"}"#;
const PAUSE: Duration = Duration::from_millis(2);
/// Goals of AI-1102, in microseconds.
const AWAKE_GOAL: f64 = 5.0;
const ASLEEP_GOAL: f64 = 30.0;

/// A runtime with some sequences, and what was measured of it.
struct Case {
    futex: bool,
    dialect: WireDialect,
    sequences: usize,
    runtime: Runtime,
    post_pre: Vec<f64>,
    mid: Vec<f64>,
    cpu: Vec<f64>,
}

/// Steps of all combinations, in alternating rounds.
fn steps(args: &Args) -> Result<Table> {
    let mut cases = Vec::new();
    for sequences in SEQUENCES {
        for futex in [true, false] {
            for dialect in [WireDialect::P1, WireDialect::P2] {
                let number = 2 + cases.len();
                let runtime = Runtime::start(number, futex, dialect, args.aicirt.as_ref())?;
                let mut case = Case {
                    futex,
                    dialect,
                    sequences,
                    runtime,
                    post_pre: vec![],
                    mid: vec![],
                    cpu: vec![],
                };
                case.begin()?;
                cases.push(case);
            }
        }
    }
    for round in 0..=args.rounds {
        for case in &mut cases {
            // The first round warms up.
            case.round(round > 0)?;
        }
    }
    let mut table = Table::new(
        "Steps over the wire, trivial controllers, 32,000 tokens, rows of f32",
        &[
            "Dialect",
            "Synchronisation",
            "Sequences",
            "post_pre_process, minimum / median, µs",
            "mid_process, minimum / median, µs",
            "Step, median, µs",
            "Runtime's processor time per sequence, µs",
            "Reference of the documents, µs",
            "Goal: a third of it",
        ],
    );
    for case in cases {
        let index = SEQUENCES
            .iter()
            .position(|&it| it == case.sequences)
            .unwrap_or(0);
        let (post_pre, mid) = REFERENCE[index];
        let p1 = case.dialect == WireDialect::P1;
        let (ours_pre, ours_mid) = (Spread::of(case.post_pre), Spread::of(case.mid));
        let step = if p1 {
            ours_pre.median + ours_mid.median
        } else {
            ours_mid.median
        };
        let goal = table.at_most(step, (post_pre + mid) / 3.0);
        table.row(&[
            if p1 { "P1" } else { "P2" }.to_owned(),
            synchronisation(case.futex).to_owned(),
            case.sequences.to_string(),
            if p1 {
                pair(ours_pre)
            } else {
                "none".to_owned()
            },
            pair(ours_mid),
            number(step),
            number(Spread::of(case.cpu).min),
            format!("{post_pre:.0} + {mid:.0}"),
            goal,
        ]);
    }
    Ok(table)
}

impl Case {
    /// Uploads the controller, and binds the sequences 1 and up.
    fn begin(&mut self) -> Result<()> {
        let p1 = self.dialect == WireDialect::P1;
        let text = if p1 { trivial_p1() } else { trivial_p2() };
        let module = self.runtime.upload(&controllers::bytes(&text)?)?;
        let mut binds = String::new();
        for id in 1..=self.sequences {
            self.runtime.instantiate(&format!("r{id}"), &module)?;
            let comma = if id == 1 { "" } else { "," };
            write!(
                binds,
                r#"{comma}{{"id":{id},"req_id":"r{id}"{}}}"#,
                if p1 {
                    ""
                } else {
                    r#","tokens":[],"backtrack":0"#
                }
            )?;
        }
        let bind = if p1 {
            format!(r#"{{"op":"post_pre_process","post_ops":[],"pre_ops":[{binds}],"freed":[]}}"#)
        } else {
            format!(r#"{{"op":"mid_process","ops":[{binds}],"freed":[]}}"#)
        };
        self.runtime.round_trip(&bind)?;
        if p1 {
            self.runtime.round_trip(&self.mid_request())?;
        }
        Ok(())
    }

    fn ops(&self, members: &str) -> String {
        let ops: Vec<_> = (1..=self.sequences)
            .map(|id| format!(r#"{{"id":{id}{members}}}"#))
            .collect();
        ops.join(",")
    }

    fn mid_request(&self) -> String {
        let members = match self.dialect {
            WireDialect::P1 => "",
            WireDialect::P2 => r#","backtrack":0,"tokens":[42],"sampled":42"#,
        };
        let ops = self.ops(members);
        match self.dialect {
            WireDialect::P1 => format!(r#"{{"op":"mid_process","ops":[{ops}]}}"#),
            WireDialect::P2 => format!(r#"{{"op":"mid_process","ops":[{ops}],"freed":[]}}"#),
        }
    }

    fn round(&mut self, counts: bool) -> Result<()> {
        let posts = self.ops(r#","tokens":[42],"backtrack":0"#);
        let post_pre =
            format!(r#"{{"op":"post_pre_process","post_ops":[{posts}],"pre_ops":[],"freed":[]}}"#);
        let mid = self.mid_request();
        let mut cpu = 0;
        for step in 0..WARM + STEPS {
            if step == WARM {
                cpu = cpu_nanos(self.runtime.process_id())?;
            }
            let counts = counts && step >= WARM;
            if self.dialect == WireDialect::P1 {
                let took = micros(self.runtime.round_trip(&post_pre)?);
                self.post_pre.extend(counts.then_some(took));
            }
            let took = micros(self.runtime.round_trip(&mid)?);
            self.mid.extend(counts.then_some(took));
        }
        if counts {
            let spent = cpu_nanos(self.runtime.process_id())?.saturating_sub(cpu);
            self.cpu
                .push(spent as f64 / 1e3 / (STEPS * self.sequences) as f64);
        }
        Ok(())
    }
}

/// Processor time of all living threads of a process.
fn cpu_nanos(process: u32) -> Result<u64> {
    let mut nanos = 0;
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let stat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        let ran = stat.split_whitespace().next().context("no schedstat")?;
        nanos += ran.parse::<u64>()?;
    }
    Ok(nanos)
}
