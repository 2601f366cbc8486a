//! Controllers in another process: the runtime that the configuration names, or this program as one.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sapwood_control::controllers::Controllers;
use sapwood_control::host::{Host, HostConfig, Program};
use sapwood_control::module::ModuleId;
use sapwood_control::remote::{
    FindModule, RemoteCommand, RemoteControllers, RemoteLimits, RemoteOptions, RemoteStart,
};
use sapwood_control::runtime::Dialect;
use sapwood_control::trie::HostModel;
use sapwood_control::wire::Synchronisation;
use sapwood_proto::steer::{SteerRefusal, SteerUser};

use super::{ModelParts, SharedControllers, folder, nothing_stored};
use crate::config::controllers::{ControllersConfig, DialectSetting, RuntimeConfig, SyncSetting};
use crate::trial;

/// Starts the runtime that the configuration names.
///
/// # Errors
/// It is no runtime for this model; for people.
pub(super) fn configured(
    shared: &Arc<SharedControllers>,
    runtime: &RuntimeConfig,
    ModelParts {
        model,
        truncates,
        step_observer,
    }: ModelParts,
) -> Result<RemoteControllers, String> {
    let config = &shared.config;
    let mut args: Vec<OsString> = runtime.args.iter().map(OsString::from).collect();
    if runtime.dialect == DialectSetting::P2 {
        // Flags that only runtimes of P2 know: what our engine can do.
        args.extend(capabilities(truncates));
    }
    let options = RemoteOptions {
        command: RemoteCommand {
            program: runtime.command.clone().into(),
            args,
            environment: environment(),
            own: false,
        },
        dialect: match runtime.dialect {
            DialectSetting::Auto => Dialect::Auto,
            DialectSetting::P1 => Dialect::P1,
            DialectSetting::P2 => Dialect::P2,
        },
        synchronisation: match runtime.sync {
            SyncSetting::Semaphores => Synchronisation::Semaphores,
            SyncSetting::Futex => Synchronisation::Futex,
        },
        message_bytes: 128 << 20,
        mask_bytes: mask_bytes(&model, 4),
        limits: limits(config, STEP_OF_OTHERS),
        forks: config.forks,
        model,
        numbers: Arc::clone(&shared.remote),
        step_observer,
    };
    RemoteControllers::new(
        options,
        Arc::new(ServerModules(Arc::clone(shared))),
        RemoteStart::Now,
    )
}

/// This program as the runtime, with the modules of the folder that it shares with the server.
///
/// # Errors
/// There is no folder, or this program cannot be found; for people.
pub(super) fn own(
    shared: &Arc<SharedControllers>,
    ModelParts {
        model,
        truncates,
        step_observer,
    }: ModelParts,
) -> Result<RemoteControllers, String> {
    let config = &shared.config;
    let options = RemoteOptions {
        command: RemoteCommand {
            program: trial::program().map_err(|why| why.to_string())?,
            args: arguments(config, &folder(config)?, truncates),
            environment: Vec::new(),
            own: true,
        },
        dialect: Dialect::P2,
        synchronisation: Synchronisation::Futex,
        // Half of it is for one message, of which the longest is an answer with the longest result for each of `ROWS`
        // sequences. Pages that are never written cost nothing.
        message_bytes: 128 << 20,
        mask_bytes: mask_bytes(&model, 1),
        limits: limits(config, Duration::ZERO),
        forks: config.forks,
        model,
        numbers: Arc::clone(&shared.remote),
        step_observer,
    };
    RemoteControllers::new(
        options,
        Arc::new(ServerModules(Arc::clone(shared))),
        RemoteStart::OnDemand,
    )
}

fn arguments(config: &ControllersConfig, folder: &Path, truncates: bool) -> Vec<OsString> {
    let mut args: Vec<OsString> = ["aicirt", "--log", "warn", "--isolation", "shared"]
        .map(OsString::from)
        .into();
    args.extend(["--dialect", "p2", "--bias-dtype", "bool"].map(OsString::from));
    args.extend(capabilities(truncates));
    for (flag, value) in [
        ("--wasm-max-forks", u64::from(config.forks)),
        ("--wasm-max-memory", config.memory_bytes.div_ceil(1 << 20)),
        // Rounded down: it is the limit, and at least that of one, which is checked.
        (
            "--wasm-max-memory-total",
            (config.memory_bytes_total >> 20).clamp(1, u32::MAX.into()),
        ),
        ("--wasm-max-step-time", config.step_ms),
        ("--wasm-max-init-time", config.init_ms),
        ("--cache-limit", config.store_bytes),
        ("--pending-time", PENDING_TIME.as_secs()),
    ] {
        args.extend([flag.into(), value.to_string().into()]);
    }
    if config.fuel > 0 {
        args.extend(["--wasm-max-fuel".into(), config.fuel.to_string().into()]);
    }
    args.extend(["--cache-dir".into(), folder.into()]);
    args
}

/// The flags that say what our engine can do. Not every model can take back tokens (AI-822).
fn capabilities(truncates: bool) -> impl Iterator<Item = OsString> {
    let backtrack = truncates.then_some("--cap-backtrack");
    let flags = ["--cap-fork", "--cap-ff-tokens"]
        .into_iter()
        .chain(backtrack);
    flags.map(OsString::from)
}

/// The modules of the server.
struct ServerModules(Arc<SharedControllers>);

impl ServerModules {
    fn store(&self) -> Result<&Controllers<Host>, SteerRefusal> {
        let store = self.0.opened().as_ref();
        store.map(|store| &**store).map_err(|_| nothing_stored())
    }
}

impl FindModule for ServerModules {
    fn find(&self, user: SteerUser<'_>, name: &str) -> Result<ModuleId, SteerRefusal> {
        self.store()?.find_module(user, name)
    }

    fn prepare(&self, id: ModuleId) -> Result<Program, SteerRefusal> {
        self.store()?.prepare(id)
    }

    fn bytes(&self, id: ModuleId) -> Result<Vec<u8>, SteerRefusal> {
        self.store()?.module_bytes(id)
    }
}

fn limits(config: &ControllersConfig, step_at_least: Duration) -> RemoteLimits {
    RemoteLimits::new(
        Duration::from_millis(config.step_ms).max(step_at_least),
        HostConfig::default().grace_time,
        Duration::from_millis(config.init_ms),
    )
}

/// Room for rows of `element_bytes` bytes for each token: those of as many sequences as a batch may have. Pages that are
/// never written cost nothing.
fn mask_bytes(model: &HostModel, element_bytes: usize) -> usize {
    let row = (model.vocabulary() + 1_000) * element_bytes;
    (row * ROWS).next_multiple_of(1 << 20).max(16 << 20)
}

/// The environment of this process without its settings, some of which are secrets.
fn environment() -> Vec<(OsString, OsString)> {
    std::env::vars_os()
        .filter(|(name, _)| !name.to_string_lossy().starts_with("SAPWOOD_"))
        .collect()
}

/// A request may wait in a queue for as long as the configuration says, and then for its prompt, before its controller has a
/// step. The server drops what it starts and does not need, so this is the last resort.
const PENDING_TIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Other runtimes have 150 ms for a step by default.
const STEP_OF_OTHERS: Duration = Duration::from_millis(150);
const ROWS: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    /// Its own time is 5 minutes, which requests of a long queue exceed.
    #[test]
    fn ai_314_our_own_runtime_drops_nothing_that_waits_for_a_slot() {
        let args = arguments(&ControllersConfig::default(), Path::new("folder"), false);
        let flag = args.iter().position(|arg| arg == "--pending-time").unwrap();
        let seconds: u64 = args[flag + 1].to_str().unwrap().parse().unwrap();
        assert!(seconds >= 12 * 60 * 60, "{seconds}");
    }
}
