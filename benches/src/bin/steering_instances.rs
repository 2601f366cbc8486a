//! Measures what instances of controllers cost: forks (AI-1105), starts and uploads of a module as large as an interpreter
//! (AI-1106).
//!
//! ```text
//! steering_instances [--rounds N] [--json] [--gate]
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use sapwood_benches::measure::{Spread, micros};
use sapwood_benches::report::Report;
use sapwood_benches::steering::controllers::{self, Callbacks, trivial_p1};
use sapwood_benches::steering::gate::Gate;
use sapwood_benches::steering::table::{Table, number, pair};
use sapwood_benches::steering::{bare, vocabulary::MadeVocabulary};
use sapwood_control::compiler::{
    ChildLimits, CompilerOptions, CompilerPlace, compile_stdin_to_stdout,
};
use sapwood_control::controllers::{Controllers, ControllersOptions};
use sapwood_control::host::{
    Callback, Capabilities, Group, Host, HostConfig, Instance, Program, Returned, Start,
    VariablesLimits, compile,
};
use sapwood_control::module::ModuleId;
use sapwood_control::store::StoreOptions;
use sapwood_control::trie::HostModel;
use sapwood_proto::steer::{ControllerStore, SteerUser, StepWaker};
use serde_json::json;

/// What instances of controllers cost
#[derive(Parser)]
struct Args {
    /// Measured rounds
    #[arg(long, default_value_t = 50)]
    rounds: usize,
    /// Be the child that compiles a module
    #[arg(long, hide = true)]
    compiler_child: bool,
    #[command(flatten)]
    report: Report,
}

/// Goals of AI-1105 and AI-1106, in microseconds.
const FORK_GOAL: f64 = 300.0;
const START_GOAL: f64 = 1_000.0;
/// The same of uploads, in milliseconds; hashing comes on top of the second.
const UPLOAD_GOAL: f64 = 3_000.0;
const CACHED_GOAL: f64 = 5.0;

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if args.compiler_child {
        compile_stdin_to_stdout(ChildLimits::default(), |module| {
            compile(&HostConfig::default(), module)
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let bench = Bench {
        host: controllers::host()?,
        model: MadeVocabulary::new(32_000, 1).host_model(),
        gate: Gate::here(),
    };
    let tables = [
        bare::table(32_000)?,
        bench.forks(args.rounds)?,
        bench.starts(args.rounds)?,
        bench.uploads()?,
    ];
    let text: Vec<_> = tables.iter().map(Table::text).collect();
    let json = json!(tables.iter().map(Table::json).collect::<Vec<_>>());
    args.report.print(&text.join("\n"), &json)?;
    Ok(args.report.exit(tables.iter().all(Table::passed)))
}

struct Bench {
    host: Host,
    model: Arc<HostModel>,
    gate: Arc<Gate>,
}

impl Bench {
    fn start(&self, program: &Program) -> Result<Instance> {
        let start = Start {
            model: Arc::clone(&self.model),
            arg: Arc::from(""),
            prompt: vec![256, 300],
            group: Group::new(16, VariablesLimits::default()),
            capabilities: Capabilities::ALL,
            waker: Arc::clone(&self.gate) as Arc<dyn StepWaker>,
        };
        let mut instance = Instance::start(&self.host, program, start);
        let begun = self.outcome(&mut instance)?;
        ensure!(
            matches!(begun, Returned::Begun { .. }),
            "not begun: {begun:?}"
        );
        Ok(instance)
    }

    fn outcome(&self, instance: &mut Instance) -> Result<Returned> {
        let outcome = self.gate.wait(|| Ok(instance.poll()))?;
        outcome
            .result
            .map_err(|failure| anyhow::anyhow!("{}", failure.message))
    }

    fn call(&self, instance: &mut Instance, callback: Callback) -> Result<Returned> {
        instance.call(callback);
        self.outcome(instance)
    }

    /// From the request for a fork to the child's first answer.
    fn forks(&self, rounds: usize) -> Result<Table> {
        let mut table = Table::new(
            "Forks of a controller with 16 MiB of memory, 1 MiB of it written since the last fork",
            &[
                "Memory",
                "Fork",
                "Minimum / median, µs",
                "Goal for the median",
            ],
        );
        let fill = "(memory.fill (i32.const 65536) (i32.const 7) (i32.const 16711680))";
        let write = "(memory.fill (i32.const 1048576) (i32.const 9) (i32.const 1048576))";
        for (title, begin) in [
            ("1 MiB ever written", ""),
            ("all written at the start", fill),
        ] {
            let text = controllers::p1(&Callbacks {
                pages: 256,
                begin,
                post: write,
                ..Callbacks::default()
            });
            let program = controllers::load(&self.host, &text)?;
            let mut parent = self.start(&program)?;
            let (mut first, mut second) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                let post = Callback::Post {
                    backtrack: 0,
                    tokens: vec![42],
                };
                self.call(&mut parent, post)?;
                let mut children = Vec::new();
                for times in [&mut first, &mut second] {
                    let begin = Instant::now();
                    let forked = parent.fork();
                    let mut child =
                        forked.map_err(|failure| anyhow::anyhow!("{}", failure.message))?;
                    self.call(&mut child, Callback::Pre)?;
                    times.push(micros(begin.elapsed()));
                    children.push(child);
                }
            }
            for (name, times) in [("first", first), ("second", second)] {
                let spread = Spread::of(times);
                let goal = table.at_most(spread.median, FORK_GOAL);
                table.row(&[title.to_owned(), name.to_owned(), pair(spread), goal]);
            }
        }
        Ok(table)
    }

    /// From the request for an instance of a loaded module to its first result.
    fn starts(&self, rounds: usize) -> Result<Table> {
        let mut table = Table::new(
            "Starts of instances, init included, module loaded",
            &[
                "Module",
                "Bytes",
                "Minimum / median, µs",
                "Goal for the median",
            ],
        );
        for (title, text) in [("trivial", trivial_p1()), ("large", controllers::large())] {
            let program = controllers::load(&self.host, &text)?;
            let mut times = Vec::new();
            for _ in 0..rounds {
                let begin = Instant::now();
                let instance = self.start(&program)?;
                times.push(micros(begin.elapsed()));
                drop(instance);
            }
            let spread = Spread::of(times);
            let goal = table.at_most(spread.median, START_GOAL);
            let bytes = controllers::bytes(&text)?.len();
            table.row(&[title.to_owned(), bytes.to_string(), pair(spread), goal]);
        }
        Ok(table)
    }

    /// Uploads to an empty store, again, and after a restart; compiled in a child, as a server does.
    fn uploads(&self) -> Result<Table> {
        let mut table = Table::new(
            "Uploads of the large module",
            &["What", "Once, ms", "Goal, ms"],
        );
        let user = SteerUser {
            name: "bench",
            is_admin: true,
            may_control: true,
        };
        let module = bytes::Bytes::from(controllers::bytes(&controllers::large())?);
        let folder = tempfile::TempDir::new()?;
        let mut id = String::new();
        let begin = Instant::now();
        std::hint::black_box(ModuleId::of(&module));
        let hash = millis(begin);
        table.row(&[
            "Its hash, for comparison".to_owned(),
            number(hash),
            String::new(),
        ]);
        for opened in ["new", "opened again"] {
            let program = std::env::current_exe()?.into_os_string();
            let child = vec![program, "--compiler-child".into()];
            let compiler = CompilerOptions::new(CompilerPlace::Child(child));
            let options =
                ControllersOptions::new(StoreOptions::new(folder.path().to_owned()), compiler);
            let store = Controllers::open(self.host.clone(), options)?;
            if opened == "opened again" {
                let begin = Instant::now();
                store.find(user, &id).context("find the module")?;
                let took = number(millis(begin));
                table.row(&["First use after a restart".to_owned(), took, String::new()]);
            }
            for again in [false, true] {
                let begin = Instant::now();
                let uploaded = store.upload(user, module.clone()).context("upload")?;
                let took = millis(begin);
                id = uploaded.module_id;
                let (title, goal) = match again || opened != "new" {
                    false => ("To an empty store", UPLOAD_GOAL),
                    true => ("Of a known module", CACHED_GOAL + hash),
                };
                let goal = table.at_most(took, goal);
                table.row(&[format!("{title}, store {opened}"), number(took), goal]);
            }
        }
        Ok(table)
    }
}

fn millis(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}
