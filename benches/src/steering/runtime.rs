//! A runtime in a process of its own, and the engine's side of the wire.
//!
//! The runtime is this program again, unless the path of another one is given: then it is started as an engine starts it,
//! with the flags of the reference.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Args, ValueEnum};
use sapwood_control::aicirt::{self, AicirtOptions, StepTimes, WireConstraints};
use sapwood_control::compiler::{CompilerOptions, CompilerPlace};
use sapwood_control::controllers::{Controllers, ControllersOptions};
use sapwood_control::host::Capabilities;
use sapwood_control::runtime::{Dialect, MaskType};
use sapwood_control::store::StoreOptions;
use sapwood_control::trie::TokenView;
use sapwood_control::wire::{EngineWire, MessageSlot, Received, Synchronisation, WireConfig};
use sapwood_engine::constraint::{ConstraintConfig, ConstraintSource, MaskWorkers};
use sapwood_proto::steer::SteerUser;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::controllers;
use super::gate::pause;
use super::vocabulary::MadeVocabulary;

/// Tokens of the vocabulary.
pub const VOCABULARY: usize = 32_000;
const SEED: u64 = 1;

/// What a runtime is started with. Also the flags with which this program is one.
#[derive(Args, Clone, Debug)]
pub struct RuntimeFlags {
    /// What the names of shared objects begin with
    #[arg(long)]
    pub name: String,
    /// Futexes instead of semaphores
    #[arg(long)]
    pub futex: bool,
    /// The form of the protocol
    #[arg(long)]
    pub dialect: WireDialect,
    /// The folder of modules
    #[arg(long)]
    pub cache_dir: PathBuf,
}

/// A form of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WireDialect {
    /// With `post_pre_process`.
    P1,
    /// Without.
    P2,
}

impl RuntimeFlags {
    fn wire(&self) -> WireConfig {
        WireConfig {
            synchronisation: if self.futex {
                Synchronisation::Futex
            } else {
                Synchronisation::Semaphores
            },
            ..WireConfig::new(&self.name)
        }
    }

    /// Is a runtime until the engine stops it.
    ///
    /// # Errors
    /// It cannot be started, or loses its engine.
    pub fn serve(&self) -> Result<()> {
        aicirt::begin(false)?;
        let compiler = CompilerOptions::new(CompilerPlace::InProcess);
        let options = ControllersOptions::new(StoreOptions::new(self.cache_dir.clone()), compiler);
        let controllers = Arc::new(Controllers::open(controllers::runtime_host()?, options)?);
        let programs = Arc::clone(&controllers);
        let vocabulary = MadeVocabulary::new(VOCABULARY, SEED);
        let constraints = Arc::new(ConstraintSource::new(
            vocabulary.shared(),
            ConstraintConfig::default(),
            Arc::new(MaskWorkers::new()),
        ));
        aicirt::run(AicirtOptions {
            wire: self.wire(),
            dialect: match self.dialect {
                WireDialect::P1 => Dialect::P1,
                WireDialect::P2 => Dialect::P2,
            },
            host: controllers.host().clone(),
            programs: Arc::new(move |user: SteerUser<'_>, name: &str| programs.find(user, name)),
            store: controllers,
            constraints: WireConstraints {
                sampling: Arc::new(constraints.with_fast_forward(false)),
                forwarding: constraints,
            },
            model: vocabulary.host_model(),
            bos: None,
            capabilities: Capabilities::ALL,
            mask_type: MaskType::F32,
            logits: 0,
            times: StepTimes {
                // A busy machine must not make a step late.
                pre_step: Duration::from_secs(5),
                step: Duration::from_secs(5),
                p2_step: Duration::from_secs(5),
                grace: Duration::from_millis(20),
                late_steps: 10,
                late_mid_skips: false,
            },
            pending_time: Duration::from_secs(300),
            forks: 16,
            restricted: false,
        })?;
        Ok(())
    }
}

/// The engine's side, and the process on the other one. Ends it when dropped.
#[derive(Debug)]
pub struct Runtime {
    wire: EngineWire,
    process: Child,
    answer: Vec<u8>,
    /// The folder of modules.
    _folder: TempDir,
}

impl Runtime {
    /// Starts a runtime: the program `other`, or this one with the command `runtime`.
    ///
    /// # Errors
    /// It does not answer.
    pub fn start(
        number: usize,
        futex: bool,
        dialect: WireDialect,
        other: Option<&PathBuf>,
    ) -> Result<Self> {
        let folder = TempDir::new()?;
        let flags = RuntimeFlags {
            name: format!("/swb{}.{number}-", std::process::id()),
            futex,
            dialect,
            cache_dir: folder.path().join("cache"),
        };
        let wire = EngineWire::create(&flags.wire())?;
        let mut command = match other {
            None => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("runtime");
                command
            }
            Some(path) => {
                let trie = folder.path().join("tokens.trie");
                let model = MadeVocabulary::new(VOCABULARY, SEED).host_model();
                std::fs::write(&trie, model.trie(TokenView::Named))?;
                let mut command = Command::new(path);
                command.args([
                    "aicirt",
                    "--server",
                    "--json-size=8",
                    "--bin-size=16",
                    "--tokenizer",
                ]);
                command.arg(trie);
                command
            }
        };
        command
            .args(["--name", &flags.name, "--cache-dir"])
            .arg(&flags.cache_dir);
        command.args([
            "--dialect",
            if dialect == WireDialect::P1 {
                "p1"
            } else {
                "p2"
            },
        ]);
        if futex {
            command.arg("--futex");
        }
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let mut runtime = Self {
            wire,
            process: process.context("start the runtime")?,
            answer: Vec::new(),
            _folder: folder,
        };
        runtime.round_trip(r#"{"op":"ping"}"#)?;
        Ok(runtime)
    }

    /// Sends a request on the main channel and waits for its answer. Returns how long that took.
    ///
    /// # Errors
    /// The runtime is gone, or refuses the request.
    pub fn round_trip(&mut self, request: &str) -> Result<Duration> {
        let wire = &mut self.wire;
        let slots = (&mut wire.requests, &mut wire.responses);
        let begin = Instant::now();
        exchange(slots, request, &mut self.answer)?;
        let took = begin.elapsed();
        check(request, &self.answer)?;
        Ok(took)
    }

    /// The same on the side channel; the answer's `data`.
    ///
    /// # Errors
    /// The runtime is gone, or refuses the request.
    pub fn side(&mut self, request: &Value) -> Result<Value> {
        let wire = &mut self.wire;
        let slots = (&mut wire.side_requests, &mut wire.side_responses);
        let request = request.to_string();
        exchange(slots, &request, &mut self.answer)?;
        check(&request, &self.answer)?;
        let mut answer: Value = serde_json::from_slice(&self.answer)?;
        Ok(answer["data"].take())
    }

    /// Uploads a module; returns its id.
    ///
    /// # Errors
    /// The runtime refuses it.
    pub fn upload(&mut self, module: &[u8]) -> Result<String> {
        let binary = STANDARD.encode(module);
        let data = self.side(&json!({"op": "mk_module", "$rid": "u", "binary": binary}))?;
        data["module_id"]
            .as_str()
            .map(str::to_owned)
            .context("no module id")
    }

    /// Starts an instance for the request `req_id`.
    ///
    /// # Errors
    /// The runtime refuses it.
    pub fn instantiate(&mut self, req_id: &str, module: &str) -> Result<()> {
        self.side(&json!({"op": "instantiate", "$rid": req_id, "req_id": req_id, "prompt": [256, 300, 301],
            "module_id": module, "module_arg": ""}))?;
        Ok(())
    }

    /// The id of its process.
    #[must_use]
    pub fn process_id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Never answered. If it is gone already, there is nothing to be stopped.
        let _ = self.wire.requests.send(br#"{"op":"stop"}"#);
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            if !matches!(self.process.try_wait(), Ok(None)) {
                return;
            }
            pause(Duration::from_millis(5));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn exchange(
    (requests, responses): (&mut MessageSlot, &mut MessageSlot),
    request: &str,
    answer: &mut Vec<u8>,
) -> Result<()> {
    requests.send(request.as_bytes())?;
    match responses.receive(answer, Some(Instant::now() + ANSWER_MAX))? {
        Received::Message => {}
        other => bail!("no answer to {}: {other:?}", start(request.as_bytes())),
    }
    Ok(())
}

fn check(request: &str, answer: &[u8]) -> Result<()> {
    // An error of a sequence is an `error` that is not empty; an error of the request has another type.
    let wrong = [
        &br#""type":"error""#[..],
        br#""type":"json-error""#,
        br#""error":"Error"#,
        br#""error":"Worker"#,
    ];
    let failed = wrong
        .iter()
        .any(|it| answer.windows(it.len()).any(|window| window == *it));
    ensure!(
        !failed,
        "the runtime answers {} to {}",
        start(answer),
        start(request.as_bytes())
    );
    Ok(())
}

fn start(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned()
}

const ANSWER_MAX: Duration = Duration::from_secs(60);
