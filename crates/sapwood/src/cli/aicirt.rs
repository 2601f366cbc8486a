//! `sapwood aicirt`: the AICI runtime, which an inference engine starts and drives over shared memory.
//!
//! The flags are those of the reference runtime (AI-102), so that an engine starts this one by its path alone: under a file
//! name that ends in `aicirt`, the binary is this command.

mod longest_tokens;
mod modules;
mod saved_trie;
mod template;
mod vocabulary;
mod wire_vocabulary;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use sapwood_control::aicirt::{self, AicirtError, AicirtOptions, StepTimes};
use sapwood_control::compiler::{CompilerOptions, CompilerPlace};
use sapwood_control::controllers::{Controllers, ControllersOptions};
use sapwood_control::host::{Capabilities, Host, HostConfig};
use sapwood_control::runtime::{Dialect, MaskType};
use sapwood_control::store::StoreOptions;
use sapwood_control::trie::TokenView;
use sapwood_control::wire::{Synchronisation, WireConfig, WireError};
use sapwood_proto::steer::SteerUser;

#[cfg(target_os = "linux")]
pub(super) use self::template::template_command;
pub(super) use self::template::{ControllerTemplate, TEMPLATE_NAME};
use self::vocabulary::LoadedVocabulary;
use super::Common;
use crate::failure::{CliError, Exit};
use crate::output;

/// Serve controllers to an engine over shared memory, in place of the reference runtime.
#[derive(Debug, Args)]
pub(super) struct AicirtCommand {
    /// Serve over shared memory
    #[arg(short, long)]
    server: bool,
    /// Prefix of the names of shared objects
    #[arg(short, long, default_value = "/aici0-", value_name = "PREFIX")]
    name: String,
    /// Regions without names, instead of those of --name: of a server that runs this program as its own runtime
    #[arg(
        long,
        hide = true,
        requires = "futex",
        value_delimiter = ',',
        value_name = "FILES"
    )]
    regions: Vec<String>,
    /// Wait on futexes instead of semaphores
    #[arg(long)]
    futex: bool,
    /// A tokenizer.json, the .gguf file of a model, a saved trie, or NAME for NAME.json in the folder of tokenizers
    #[arg(short, long, default_value = "llama", value_name = "FILE|NAME")]
    tokenizer: String,
    /// The folder of tokenizers
    #[arg(long, default_value = "./tokenizers", value_name = "DIR")]
    tokenizer_dir: PathBuf,
    /// Pad the vocabulary to this size
    #[arg(long, value_name = "TOKENS")]
    logits_size: Option<usize>,
    /// Size of each message region; the default is 8, in P2 128
    #[arg(long, value_name = "MIB")]
    json_size: Option<u32>,
    /// Size of the region of masks; the default is 16, in P2 64
    #[arg(long, value_name = "MIB")]
    bin_size: Option<u32>,
    /// Upper bound of spinning before a wait; at most 0.05 ms is ever used
    #[arg(long, default_value_t = 200, value_name = "MS")]
    busy_wait_time: u64,
    /// Live sequences of one request
    #[arg(long, default_value_t = 16, value_name = "N")]
    wasm_max_forks: u32,
    /// Linear memory of one controller
    #[arg(long, default_value_t = 64, value_name = "MIB")]
    wasm_max_memory: u32,
    /// Memory of all controllers together
    #[arg(long, default_value_t = 4096, value_name = "MIB")]
    wasm_max_memory_total: u32,
    /// Time for post and pre together (P1)
    #[arg(long, default_value_t = 4, value_name = "MS")]
    wasm_max_pre_step_time: u64,
    /// Time for mid; the default is 150, in P2 25
    #[arg(long, value_name = "MS")]
    wasm_max_step_time: Option<u64>,
    /// Late steps in a row until a sequence fails (P2 flag); the default is 10
    #[arg(long, value_name = "N")]
    wasm_max_timeout_steps: Option<u32>,
    /// Time for the callbacks at the start
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    wasm_max_init_time: u64,
    /// Time of a request between its start and its first step; then its controller is dropped
    #[arg(long, default_value_t = 300, value_name = "S")]
    pending_time: u64,
    /// Count instructions of each callback instead of its time, and end it after so many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    wasm_max_fuel: Option<u64>,
    /// Steps of the clock that controllers see (P2 flag); 0 stops it, which is the default
    #[arg(long, value_name = "US")]
    wasm_timer_resolution_us: Option<u64>,
    /// The engine can fork sequences (P2 flag)
    #[arg(long)]
    cap_fork: bool,
    /// The engine can take tokens back (P2 flag)
    #[arg(long)]
    cap_backtrack: bool,
    /// The engine can append tokens without sampling (P2 flag)
    #[arg(long)]
    cap_ff_tokens: bool,
    /// Elements of masks (P2 flag); the default is f32
    #[arg(long, value_enum, value_name = "TYPE")]
    bias_dtype: Option<BiasType>,
    /// Install a module, or name one that is installed
    #[arg(short, long, value_name = "FILE|ID")]
    module: Option<String>,
    /// Name a module of a release, whose tag is looked up; with --module FILE, the release that FILE is
    #[arg(long, value_name = "REF")]
    gh_module: Option<String>,
    /// Tag the module; may be repeated
    #[arg(long, value_name = "TAG")]
    tag: Vec<String>,
    /// Run the main function of the module once
    #[arg(short, long)]
    run: bool,
    /// The argument for --run
    #[arg(long, value_name = "FILE")]
    run_arg: Option<PathBuf>,
    /// Write the token trie and exit
    #[arg(long, value_name = "FILE")]
    save_tokenizer: Option<PathBuf>,
    /// Refuse uploads
    #[arg(long)]
    restricted: bool,
    /// Accepted for compatibility: prints one line and exits
    #[arg(long)]
    bench: bool,
    /// Accepted for compatibility: prints one line and exits
    #[arg(long)]
    fork: bool,
    /// The form of the protocol; auto: a P2 flag or the first op decides
    #[arg(long, value_enum, default_value = "auto")]
    dialect: DialectFlag,
    /// How controllers are kept apart: a process for each sequence, or threads of this process
    #[arg(long, value_enum, default_value = "sequence")]
    isolation: Isolation,
    /// Waited beyond a limit, once per request (P1)
    #[arg(long, default_value_t = 20, value_name = "MS")]
    wasm_grace_time: u64,
    /// What happens to a late mid in P1
    #[arg(long, value_enum, default_value = "fail")]
    late_mid: LateMid,
    /// The folder of modules and tags
    #[arg(long, default_value = "./cache", value_name = "DIR")]
    cache_dir: PathBuf,
    /// Bytes of that folder; a server that shares it makes room there, and this runtime never does
    #[arg(long, hide = true, value_name = "BYTES")]
    cache_limit: Option<u64>,
    /// Outlive the process that started this one
    #[arg(long)]
    keep: bool,
    /// Ask for realtime priority
    #[arg(long)]
    realtime: bool,
    /// What the engine logs
    #[arg(long, hide = true, env = "RUST_LOG", value_name = "FILTER")]
    rust_log: Option<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DialectFlag {
    Auto,
    P1,
    P1i,
    P2,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Isolation {
    Sequence,
    Shared,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LateMid {
    Fail,
    Skip,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum BiasType {
    F32,
    F16,
    Bf16,
    Bool,
}

impl AicirtCommand {
    pub(super) fn run(self, common: &Common) -> Result<Exit, CliError> {
        start_logs(common.log.as_deref(), self.rust_log.as_deref())?;
        if self.bench || self.fork {
            output::data("--bench and --fork do nothing in this runtime\n")?;
            return Ok(Exit::Ok);
        }
        self.check()?;
        let manages = self.module.is_some() || self.gh_module.is_some();
        if let Some(file) = &self.save_tokenizer {
            let loaded = self.vocabulary()?;
            let trie = loaded.model.trie(TokenView::Named);
            std::fs::write(file, trie).map_err(|error| {
                CliError::usage(format!("--save-tokenizer {}: {error}", file.display()))
            })?;
        } else if manages {
            self.manage()?;
        } else if self.server {
            self.serve()?;
        } else {
            return Err(CliError::new("missing --server"));
        }
        Ok(Exit::Ok)
    }

    fn check(&self) -> Result<(), CliError> {
        if !self.name.starts_with('/') {
            return Err(CliError::new(format!(
                "--name {}: it must begin with /",
                self.name
            )));
        }
        Ok(())
    }

    /// A flag that only P2 engines give fixes the dialect (AI-104).
    fn dialect(&self) -> Dialect {
        let p2_flag = self.wasm_max_timeout_steps.is_some()
            || self.wasm_timer_resolution_us.is_some()
            || self.cap_fork
            || self.cap_backtrack
            || self.cap_ff_tokens
            || self.bias_dtype.is_some();
        match self.dialect {
            DialectFlag::P2 => Dialect::P2,
            DialectFlag::P1 => Dialect::P1,
            DialectFlag::P1i => Dialect::P1i,
            DialectFlag::Auto if p2_flag => Dialect::P2,
            DialectFlag::Auto => Dialect::Auto,
        }
    }

    fn vocabulary(&self) -> Result<LoadedVocabulary, CliError> {
        vocabulary::load(&self.tokenizer, &self.tokenizer_dir, self.logits_size)
    }

    fn times(&self) -> StepTimes {
        let step = |default| Duration::from_millis(self.wasm_max_step_time.unwrap_or(default));
        StepTimes {
            pre_step: Duration::from_millis(self.wasm_max_pre_step_time),
            step: step(150),
            p2_step: step(25),
            grace: Duration::from_millis(self.wasm_grace_time),
            late_steps: self.wasm_max_timeout_steps.unwrap_or(10),
            late_mid_skips: matches!(self.late_mid, LateMid::Skip),
        }
    }

    fn host_config(&self, isolation: Isolation) -> HostConfig {
        let times = self.times();
        let step_time = match self.dialect() {
            Dialect::P2 => times.p2_step,
            Dialect::Auto | Dialect::P1 | Dialect::P1i => times.step,
        };
        HostConfig {
            memory_bytes: (self.wasm_max_memory as usize) << 20,
            memory_total_bytes: (self.wasm_max_memory_total as usize) << 20,
            init_time: Duration::from_millis(self.wasm_max_init_time),
            pre_step_time: times.pre_step,
            step_time,
            // The main channel counts late steps, and frees a sequence that has too many: a callback goes on until then. The
            // host's own limit is the last resort for a sequence that is never listed again.
            late_steps: times.late_steps.saturating_mul(100),
            grace_time: times.grace,
            fuel: self.wasm_max_fuel,
            timer_resolution: Duration::from_micros(self.wasm_timer_resolution_us.unwrap_or(0)),
            instances: match isolation {
                Isolation::Sequence => PROCESSES_MAX,
                Isolation::Shared => HostConfig::default().instances,
            },
            // The engine's and that of the main channel.
            busy_beside: 2,
            ..HostConfig::default()
        }
    }

    fn host(&self, isolation: Isolation) -> Result<Host, CliError> {
        let config = self.host_config(isolation);
        let host = match isolation {
            Isolation::Sequence => {
                let host = Host::in_processes(config, ControllerTemplate::command_of(self)?);
                return host.map_err(|error| {
                    CliError::usage(format!("{error}; --isolation shared needs no processes"))
                });
            }
            Isolation::Shared => Host::new(config),
        };
        host.map_err(|error| CliError::usage(error.to_string()))
    }

    fn controllers(&self, host: Host) -> Result<Controllers<Host>, CliError> {
        let program = std::env::current_exe()
            .map_err(|error| CliError::new(format!("cannot find this program: {error}")))?;
        let fuel = self.wasm_max_fuel.is_some();
        let child = super::compile_controller::command(program.into(), fuel);
        let compiler = CompilerOptions::new(CompilerPlace::Child(child));
        let store = self.store_options();
        let mut options = ControllersOptions::new(store, compiler);
        // A module whose smallest memory is larger could never be started.
        options.limits.memory_bytes = u64::from(self.wasm_max_memory) << 20;
        Controllers::open(host, options).map_err(|error| {
            CliError::usage(format!("--cache-dir {}: {error}", self.cache_dir.display()))
        })
    }

    fn store_options(&self) -> StoreOptions {
        let store = StoreOptions::new(self.cache_dir.clone());
        match self.cache_limit {
            Some(bytes_max) => StoreOptions {
                bytes_max,
                evicts: false,
                ..store
            },
            None => store,
        }
    }

    fn manage(&self) -> Result<(), CliError> {
        modules::run(
            // One module, run once or not at all.
            &self.controllers(self.host(Isolation::Shared)?)?,
            &modules::ModuleTask {
                module: self
                    .module
                    .as_deref()
                    .or(self.gh_module.as_deref())
                    .unwrap_or_default(),
                release: self.gh_module.as_deref().filter(|_| self.module.is_some()),
                tags: &self.tag,
                run: self.run,
                arg: self.run_arg.as_deref(),
            },
            || self.vocabulary(),
        )
    }

    const fn capabilities(&self) -> Capabilities {
        Capabilities {
            fork: self.cap_fork,
            backtrack: self.cap_backtrack,
            ff_tokens: self.cap_ff_tokens,
            logits: false,
        }
    }

    fn wire(&self) -> WireConfig {
        let p2 = self.dialect() == Dialect::P2;
        let size = |given: Option<u32>, p1_default, p2_default| {
            let mib = given.unwrap_or(if p2 { p2_default } else { p1_default });
            (mib as usize) << 20
        };
        WireConfig {
            synchronisation: if self.futex {
                Synchronisation::Futex
            } else {
                Synchronisation::Semaphores
            },
            message_bytes: size(self.json_size, 8, 128),
            mask_bytes: size(self.bin_size, 16, 64),
            spin: Duration::from_millis(self.busy_wait_time),
            files: self.regions.clone().try_into().ok(),
            ..WireConfig::new(&self.name)
        }
    }

    fn serve(&self) -> Result<(), CliError> {
        let failed = |error: AicirtError| CliError::exit(exit_of(&error), error.to_string());
        // Before any thread: controllers' processes are cloned from one that this starts (AI-702).
        let host = self.host(self.isolation)?;
        // Next: the engine may end while the tokenizer and the store are loaded (AI-106).
        aicirt::begin(self.keep).map_err(failed)?;
        if self.realtime
            && let Err(error) = sapwood_control::wire::ask_for_realtime()
        {
            tracing::warn!(%error, "no realtime priority");
        }
        let loaded = self.vocabulary()?;
        let controllers = Arc::new(self.controllers(host)?);
        let programs = Arc::clone(&controllers);
        aicirt::run(AicirtOptions {
            wire: self.wire(),
            dialect: self.dialect(),
            host: controllers.host().clone(),
            programs: Arc::new(move |user: SteerUser<'_>, name: &str| programs.find(user, name)),
            store: controllers,
            constraints: loaded.constraints,
            model: loaded.model,
            bos: loaded.bos,
            capabilities: self.capabilities(),
            mask_type: match self.bias_dtype {
                None | Some(BiasType::F32) => MaskType::F32,
                Some(BiasType::F16) => MaskType::F16,
                Some(BiasType::Bf16) => MaskType::Bf16,
                Some(BiasType::Bool) => MaskType::Bool,
            },
            logits: self.logits_size.unwrap_or(0),
            times: self.times(),
            pending_time: Duration::from_secs(self.pending_time),
            forks: self.wasm_max_forks,
            restricted: self.restricted,
        })
        .map_err(failed)
    }
}

/// Logs as `--log` says, else as `RUST_LOG`. That is the engine's, which waits for ever for a runtime that ends at its
/// start.
fn start_logs(given: Option<&str>, inherited: Option<&OsStr>) -> Result<(), CliError> {
    let inherited = inherited.filter(|_| given.is_none());
    let readable = inherited.map(|filter| filter.to_str().and_then(crate::logs::foreign));
    let filter = given.or_else(|| readable.as_ref()?.as_deref());
    crate::logs::Logs::start(filter.unwrap_or("info"))?;
    if readable == Some(None) {
        tracing::warn!(RUST_LOG = ?inherited, "this filter cannot be read; logging at info");
    }
    Ok(())
}

/// Live sequences where each has a process.
pub(super) const PROCESSES_MAX: u32 = 512;

/// The exit code of a runtime that ended otherwise than it was asked to (AI-107).
fn exit_of(error: &AicirtError) -> Exit {
    match error {
        AicirtError::Wire(WireError::Size { .. } | WireError::Open { .. }) | AicirtError::Masks => {
            Exit::Usage
        }
        AicirtError::Start(_) => Exit::Failure,
        AicirtError::Lost => Exit::Cut,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        aicirt: AicirtCommand,
    }

    fn parsed(flags: &str) -> AicirtCommand {
        let words = std::iter::once("aicirt").chain(flags.split_whitespace());
        Line::try_parse_from(words).unwrap().aicirt
    }

    /// AI-104
    #[test]
    fn ai_102_flags_of_p2_fix_it_and_say_what_the_engine_can() {
        for (flags, dialect, can) in [
            ("", Dialect::Auto, [false, false, false]),
            ("--cap-fork", Dialect::P2, [true, false, false]),
            ("--cap-backtrack", Dialect::P2, [false, true, false]),
            ("--cap-ff-tokens", Dialect::P2, [false, false, true]),
            ("--bias-dtype f32", Dialect::P2, [false, false, false]),
            (
                "--wasm-timer-resolution-us 0",
                Dialect::P2,
                [false, false, false],
            ),
            (
                "--wasm-max-timeout-steps=10",
                Dialect::P2,
                [false, false, false],
            ),
            ("--wasm-max-fuel 9", Dialect::Auto, [false, false, false]),
            (
                "--dialect p1i --cap-fork",
                Dialect::P1i,
                [true, false, false],
            ),
        ] {
            let command = parsed(flags);
            let Capabilities {
                fork,
                backtrack,
                ff_tokens,
                logits,
            } = command.capabilities();
            assert_eq!(command.dialect(), dialect, "{flags}");
            assert_eq!([fork, backtrack, ff_tokens], can, "{flags}");
            assert!(!logits, "{flags}");
        }
    }

    #[test]
    fn ai_323_a_runtime_of_a_server_has_its_limit_and_evicts_nothing() {
        let store = |flags: &str| {
            let options = parsed(flags).store_options();
            (options.bytes_max, options.evicts)
        };
        assert_eq!(store(""), (10 << 30, true));
        assert_eq!(store("--cache-limit 77"), (77, false));
    }

    #[test]
    fn ai_102_flags_of_limits_reach_the_host() {
        let config = |flags: &str| parsed(flags).host_config(Isolation::Shared);
        let default = config("");
        assert_eq!(default.timer_resolution, Duration::ZERO);
        assert_eq!((default.fuel, default.memory_bytes), (None, 64 << 20));
        for (flags, changed) in [
            (
                "--wasm-timer-resolution-us=1500",
                HostConfig {
                    timer_resolution: Duration::from_micros(1_500),
                    // A P2 flag: its time for mid is another one.
                    step_time: Duration::from_millis(25),
                    ..default.clone()
                },
            ),
            (
                "--wasm-max-fuel 77",
                HostConfig {
                    fuel: Some(77),
                    ..default.clone()
                },
            ),
            (
                "--wasm-max-memory 1",
                HostConfig {
                    memory_bytes: 1 << 20,
                    ..default.clone()
                },
            ),
            (
                "--wasm-max-init-time 7",
                HostConfig {
                    init_time: Duration::from_millis(7),
                    ..default
                },
            ),
        ] {
            assert_eq!(config(flags), changed, "{flags}");
        }
        let late = |flags: &str| parsed(flags).times().late_mid_skips;
        assert_eq!(
            ["", "--late-mid fail", "--late-mid=skip"].map(late),
            [false, false, true]
        );
        let pending = |flags: &str| parsed(flags).pending_time;
        assert_eq!(
            ["", "--pending-time 86400"].map(pending),
            [300, 86_400],
            "AI-314"
        );
    }
}
