//! The example controllers as modules in the host: they do what the same controllers do natively (AI-641).
//!
//! The modules are built by `cargo xtask ci --lane controllers`, which then runs these tests; only the example in the text
//! format needs no other compiler.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod options;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use sapwood_control::host::{
    Callback, Capabilities, Group, Host, HostConfig, Instance, MidReturned, Program, Returned,
    ReturnedBranch, Start, VariablesLimits,
};
use sapwood_control::module::{Abi, ModuleLimits, check};
use sapwood_control::trie::{HostModel, TokenEntry};
use sapwood_guest::testing::{Case, End, Run, Scenario, Steered, ToyModel};
use sapwood_guest::{Branch, ConditionalSplice, Init, Mask, Sample, Step, Token, Value};
use sapwood_proto::steer::{SharedMask, StepWaker};

use self::options::OptionsSource;

/// Wakes the test.
#[derive(Default)]
struct Waker {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl StepWaker for Waker {
    fn wake(&self) {
        *self.woken.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl Waker {
    fn wait(&self) {
        let mut woken = self.woken.lock().unwrap();
        while !*woken {
            woken = self.changed.wait(woken).unwrap();
        }
        *woken = false;
    }
}

/// What the sequences of one request share.
struct Request {
    host: Host,
    program: Program,
    argument: Arc<str>,
    group: Arc<Group>,
    waker: Arc<Waker>,
    written: Mutex<BTreeSet<String>>,
}

/// One sequence's module.
struct Module {
    request: Arc<Request>,
    instance: Option<Instance>,
    number: u32,
    logs: String,
    resume: Resume,
}

/// P1: the callback that the next step begins with.
#[derive(Clone, Copy, PartialEq)]
enum Resume {
    Post,
    /// The tokens of the splice that was returned were given to `post` already.
    Pre,
    Mid,
}

impl Module {
    fn call(&mut self, callback: Callback) -> Result<Returned, String> {
        self.instance.as_mut().unwrap().call(callback);
        self.outcome()
    }

    fn outcome(&mut self) -> Result<Returned, String> {
        let outcome = loop {
            if let Some(outcome) = self.instance.as_mut().unwrap().poll() {
                break outcome;
            }
            self.request.waker.wait();
        };
        self.logs.push_str(&outcome.report.logs);
        let names = outcome.report.storage.into_iter().map(|write| write.name);
        self.request.written.lock().unwrap().extend(names);
        outcome.result.map_err(|failure| failure.message)
    }

    fn post(&mut self, backtrack: u32, tokens: &[Token]) -> Result<bool, String> {
        let tokens = tokens.to_vec();
        match self.call(Callback::Post { backtrack, tokens })? {
            Returned::Post { stop } => Ok(stop),
            other => panic!("{other:?}"),
        }
    }

    /// P1: `pre` with its loop (AI-405); `None` if `mid` follows.
    fn pre(&mut self) -> Result<Option<Vec<Branch>>, String> {
        let mut appended = Vec::new();
        loop {
            let Returned::Pre {
                num_forks,
                suspend,
                ff_tokens,
                ..
            } = self.call(Callback::Pre)?
            else {
                panic!("not the result of pre");
            };
            if !ff_tokens.is_empty() {
                appended.extend_from_slice(&ff_tokens);
                if self.post(0, &ff_tokens)? {
                    return Ok(Some(vec![]));
                }
                continue;
            }
            if !appended.is_empty() {
                self.resume = Resume::Pre;
                let tokens = appended;
                return Ok(Some(vec![Branch::Splice {
                    backtrack: 0,
                    tokens,
                }]));
            }
            return Ok(match (suspend, num_forks) {
                (true, _) => Some(vec![Branch::Noop]),
                (false, 1) => None,
                (false, forks) => {
                    self.resume = Resume::Mid;
                    Some(vec![Branch::Noop; forks as usize])
                }
            });
        }
    }

    /// The mapping of the specification's table for P1 modules (AI-609).
    fn p1_step(&mut self, step: Step<'_>) -> Result<Vec<Branch>, String> {
        let resume = std::mem::replace(&mut self.resume, Resume::Post);
        if resume != Resume::Mid {
            let happened = step.backtrack > 0 || !step.tokens.is_empty();
            if resume == Resume::Post && happened && self.post(step.backtrack, step.tokens)? {
                return Ok(vec![]);
            }
            if let Some(branches) = self.pre()? {
                return Ok(branches);
            }
        }
        let fork_group = step.fork_group.to_vec();
        Ok(match self.call(Callback::Mid { fork_group })? {
            Returned::Mid(MidReturned::Stop) => vec![],
            Returned::Mid(MidReturned::Sample(mask)) => vec![mask_of(&mask.unwrap()).into()],
            Returned::Mid(MidReturned::Splice {
                backtrack,
                ff_tokens,
            }) => {
                vec![Branch::Splice {
                    backtrack,
                    tokens: ff_tokens,
                }]
            }
            other => panic!("{other:?}"),
        })
    }
}

impl Steered for Module {
    fn begin(&mut self, prompt: &[Token]) -> Result<Init, String> {
        let request = Arc::clone(&self.request);
        let start = Start {
            model: Arc::new(model()),
            arg: Arc::clone(&request.argument),
            prompt: prompt.to_vec(),
            group: Arc::clone(&request.group),
            capabilities: Capabilities::ALL,
            waker: Arc::clone(&request.waker) as _,
        };
        self.instance = Some(Instance::start(&request.host, &request.program, start));
        match self.outcome()? {
            Returned::Begun { prompt } => Ok(Init { prompt }),
            other => panic!("{other:?}"),
        }
    }

    fn bind(&mut self, sequence: u32) {
        self.number = sequence;
        self.instance.as_mut().unwrap().bind(sequence);
    }

    fn step(&mut self, step: Step<'_>) -> Result<Vec<Branch>, String> {
        if self.request.program.abi() == Abi::P1 {
            return self.p1_step(step);
        }
        let callback = Callback::Process {
            backtrack: step.backtrack,
            tokens: step.tokens.to_vec(),
            sampled: step.sampled,
            fork_group: step.fork_group.to_vec(),
        };
        match self.call(callback)? {
            Returned::Branches(branches) => Ok(branches.into_iter().map(branch_of).collect()),
            other => panic!("{other:?}"),
        }
    }

    fn fork(&mut self) -> Result<Self, String> {
        let instance = self.instance.as_mut().unwrap().fork();
        Ok(Self {
            request: Arc::clone(&self.request),
            instance: Some(instance.map_err(|failure| failure.message)?),
            number: self.number,
            logs: String::new(),
            resume: self.resume,
        })
    }

    fn take_logs(&mut self) -> String {
        std::mem::take(&mut self.logs)
    }
}

fn mask_of(mask: &SharedMask) -> Mask {
    Mask::from_words(mask.words().to_vec(), mask.vocabulary())
}

fn branch_of(branch: ReturnedBranch) -> Branch {
    let Some(mask) = &branch.mask else {
        let [splice] = &branch.splices[..] else {
            panic!("a branch without a mask has one splice: {branch:?}");
        };
        return Branch::Splice {
            backtrack: splice.backtrack,
            tokens: splice.ff_tokens.clone(),
        };
    };
    let mut sample = Sample::new(mask_of(mask));
    if let Some(temperature) = branch.temperature {
        sample = sample.temperature(temperature);
    }
    let splices = branch.splices.into_iter().map(|splice| ConditionalSplice {
        when_sampled: splice.when_sampled,
        backtrack: splice.backtrack,
        tokens: splice.ff_tokens,
    });
    sample.splices = splices.collect();
    Branch::Sample(sample)
}

/// The vocabulary of the native runs, as the host has it.
fn model() -> HostModel {
    let toy = ToyModel::new();
    let entries = toy
        .tokens()
        .iter()
        .map(|bytes| match bytes.strip_prefix(b"\xff") {
            Some(name) => TokenEntry::special(String::from_utf8_lossy(name)),
            None => TokenEntry::text(bytes.clone()),
        })
        .collect();
    // As `sapwood` has them: what a special token is called is none of its bytes.
    let bytes = toy.tokens().iter().map(|bytes| match bytes.first() {
        Some(0xff) => Vec::new(),
        _ => bytes.clone(),
    });
    let constraints = OptionsSource::new(bytes, ToyModel::EOS);
    HostModel::new(entries, ToyModel::EOS, move |text: &str| {
        toy.tokenize_text(text.as_bytes())
    })
    .with_constraints(Arc::new(constraints))
}

/// Runs a module. Its time limits are no part of these tests, which other tests may slow down.
fn run(module: &[u8], scenario: &Scenario) -> Run {
    let patient = Duration::from_secs(60);
    let config = HostConfig {
        init_time: patient,
        pre_step_time: patient,
        step_time: patient,
        ..HostConfig::default()
    };
    let host = Host::new(config).unwrap();
    let checked = check(module, &ModuleLimits::default()).unwrap();
    let program = host
        .load(&checked, &host.compile(&checked).unwrap())
        .unwrap();
    let request = Arc::new(Request {
        host,
        program,
        argument: scenario.argument_text().into(),
        group: Group::new(16, VariablesLimits::default()),
        waker: Arc::default(),
        written: Mutex::default(),
    });
    let first = Module {
        request: Arc::clone(&request),
        instance: None,
        number: 0,
        logs: String::new(),
        resume: Resume::Pre,
    };
    let mut run = scenario.drive(first);
    let written = request.written.lock().unwrap();
    let values = written.iter().map(|name| {
        let value = request.group.variables().read(name).unwrap();
        (
            name.clone(),
            Value {
                version: value.version,
                bytes: value.value.to_vec(),
            },
        )
    });
    run.variables = values.collect::<BTreeMap<_, _>>();
    run
}

/// A module that the lane has built.
#[expect(
    clippy::disallowed_methods,
    reason = "the lane that builds the modules says where they are"
)]
fn built(name: &str) -> Vec<u8> {
    let folder = std::env::var_os("SAPWOOD_CONTROLLERS");
    let folder = folder.expect("SAPWOOD_CONTROLLERS names the folder of the modules; run `cargo xtask ci --lane controllers`");
    let path = PathBuf::from(folder).join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Runs all cases on the modules with this ending.
fn run_cases(ending: &str) {
    let cases = Case::read(include_str!("../../../controllers/cases/cases.json")).unwrap();
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            let mut run = run(
                &built(&format!("{}{ending}", case.controller)),
                &case.scenario,
            );
            for sequence in &mut run.sequences {
                // The form with three callbacks notes what it cannot do.
                sequence.logs = sequence
                    .logs
                    .replace("this host cannot change the temperature\n", "");
            }
            case.check(&run).err()
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// AI-640
#[test]
#[ignore = "needs the modules that `cargo xtask ci --lane controllers` builds"]
fn ai_641_modules_do_what_the_same_controllers_do_natively() {
    run_cases(".wasm");
}

/// AI-602, AI-604
#[test]
#[ignore = "needs the modules that `cargo xtask ci --lane controllers` builds"]
fn ai_641_modules_of_the_form_with_three_callbacks_do_the_same() {
    run_cases(".p1.wasm");
}

/// AI-604
#[test]
#[ignore = "needs the modules that `cargo xtask ci --lane controllers` builds"]
fn ai_604_modules_in_c_and_of_a_new_project_run() {
    let c = run(
        &built("c-yes.wasm"),
        &Scenario::new("Is water wet? ").prefers(["no"]),
    );
    assert_eq!((c.texts(), &c.sequences[0].end), (vec!["yes"], &End::Stop));
    let new = run(
        &built("my-first.wasm"),
        &Scenario::new("").argument("red,green").prefers(["green"]),
    );
    assert_eq!(new.texts(), ["green"]);
    assert_eq!(new.sequences[0].logs, "the prompt has 0 tokens\n");
}

/// AI-602, AI-604
#[test]
fn ai_604_the_smallest_module_in_the_text_format_runs() {
    let module = wat::parse_str(include_str!("../../../controllers/wat/minimal.wat")).unwrap();
    let run = run(&module, &Scenario::new("Stars: ").prefers(["none"]));
    assert_eq!(
        (run.texts(), &run.sequences[0].end),
        (vec!["***"], &End::Stop)
    );
}
