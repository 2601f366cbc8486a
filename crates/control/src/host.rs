//! Runs controllers: the only Wasm engine, in one of two isolation modes (AI-701). In `shared` instances live in this
//! process and run on threads of their own, in `sequence` each has a process; both have limits on time, memory, stack,
//! output and results.
//!
//! [`Host`] loads [`Program`]s; an [`Instance`] is one sequence's controller. Callers are engines' threads, so no
//! method of an instance waits: calls are queued, and outcomes polled.

mod artefact;
mod budget;
mod callback;
mod config;
mod controller;
mod cpu_time;
mod engine;
mod failure;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod group;
mod handles;
mod home;
mod imports;
mod instance;
mod log;
mod long_texts;
#[cfg(target_os = "linux")]
mod process;
mod program;
mod random;
mod result;
mod rounds;
mod start;
mod state;
mod threads;
mod unreported;
mod workers;
mod writes;

#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::StepReport;
use wasmtime::{Engine, Linker};

pub use self::artefact::Artefact;
use self::budget::{MEMORY_EXHAUSTED, MemoryBudget};
pub use self::callback::Callback;
pub use self::config::{ControllerRandom, HostConfig};
pub use self::controller::Outcome;
pub use self::engine::compile;
pub use self::failure::CallFailure;
pub(crate) use self::group::Member;
pub use self::group::{Group, Variables, VariablesLimits, Versioned, Waiting};
pub use self::instance::Instance;
use self::long_texts::LongTexts;
#[cfg(target_os = "linux")]
use self::process::Processes;
#[cfg(target_os = "linux")]
pub use self::process::serve_as_template;
#[cfg(target_os = "linux")]
pub(crate) use self::process::{OutcomePoll, end_template};
pub use self::program::Program;
pub(crate) use self::result::WAIT_NAMES_MAX;
pub use self::result::{MidReturned, Returned, ReturnedBranch, ReturnedSplice};
pub(crate) use self::rounds::PreRounds;
pub use self::start::Start;
pub use self::state::Capabilities;
use self::state::ControllerState;
pub(crate) use self::unreported::Unreported;
use self::workers::Workers;
use crate::module::{Abi, CheckedModule, ModuleError};

/// The Wasm engine cannot be started on this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the Wasm engine cannot be started: {0}")]
pub struct HostError(String);

/// A Wasm host. Cheap to clone. Its threads start with the first instance.
#[derive(Clone)]
pub struct Host(Arc<HostParts>);

struct HostParts {
    config: HostConfig,
    engine: Engine,
    p1: Linker<ControllerState>,
    p2: Linker<ControllerState>,
    budget: Arc<MemoryBudget>,
    live: Arc<AtomicU32>,
    workers: Workers,
    long_texts: Arc<LongTexts>,
    /// In the mode `sequence`.
    #[cfg(target_os = "linux")]
    processes: Option<Arc<Processes>>,
}

impl Host {
    /// A host with these limits, in the mode `shared`.
    ///
    /// # Errors
    /// The engine does not support this machine.
    pub fn new(config: HostConfig) -> Result<Self, HostError> {
        let failed = |error: wasmtime::Error| HostError(format!("{error:#}"));
        Self::with_engine(engine::running(&config).map_err(failed)?, config)
    }

    /// A host in the mode `sequence`. `template`: a program and its arguments that lead to [`serve_as_template`] with
    /// the model whose controllers are started here. It is started at once, so call this before other threads exist.
    /// This process becomes a subreaper: should the template be killed, its clones become children of this one.
    ///
    /// # Errors
    /// The engine does not support this machine, or the template cannot be started.
    #[cfg(target_os = "linux")]
    pub fn in_processes(
        config: HostConfig,
        template: Vec<std::ffi::OsString>,
    ) -> Result<Self, HostError> {
        let processes = Processes::start(template, &config);
        let processes = processes.map_err(|error| HostError(format!("no processes: {error}")))?;
        let failed = |error: wasmtime::Error| HostError(format!("{error:#}"));
        let engine = engine::one_by_one(&config).map_err(failed)?;
        let mut host = Self::with_engine(engine, config)?;
        if let Some(shared) = Arc::get_mut(&mut host.0) {
            shared.processes = Some(processes);
        }
        Ok(host)
    }

    fn with_engine(engine: Engine, config: HostConfig) -> Result<Self, HostError> {
        let failed = |error: wasmtime::Error| HostError(format!("{error:#}"));
        Ok(Self(Arc::new(HostParts {
            #[cfg(target_os = "linux")]
            processes: None,
            p1: imports::linker(&engine, Abi::P1).map_err(failed)?,
            p2: imports::linker(&engine, Abi::P2).map_err(failed)?,
            budget: Arc::new(MemoryBudget::new(config.memory_total_bytes)),
            live: Arc::default(),
            workers: Workers::new(engine.clone(), &config),
            long_texts: Arc::new(LongTexts::new(config.kept_threads())),
            engine,
            config,
        })))
    }

    /// The limits.
    #[must_use]
    pub fn config(&self) -> &HostConfig {
        &self.0.config
    }

    /// Compiles a module on this thread; [`compile`] does the same without a host, for a process of its own.
    ///
    /// # Errors
    /// The compiler cannot compile it.
    pub fn compile(&self, module: &CheckedModule) -> Result<Artefact, ModuleError> {
        engine::compile_with(&self.0.engine, module)
    }

    /// Names what artefacts depend on: engine version, compile options, CPU features. An artefact made under another
    /// key is of no use to this host (AI-321).
    #[must_use]
    pub fn artefact_key(&self) -> [u8; 32] {
        engine::artefact_key(&self.0.engine)
    }

    /// Loads an artefact of `module`.
    ///
    /// # Errors
    /// It was compiled for another host, or imports what there is not.
    pub fn load(
        &self,
        module: &CheckedModule,
        artefact: &Artefact,
    ) -> Result<Program, ModuleError> {
        #[cfg(target_os = "linux")]
        if self.0.processes.is_some() {
            return Program::remote(&self.0.engine, module, artefact);
        }
        let linker = match module.abi {
            Abi::P1 => &self.0.p1,
            Abi::P2 => &self.0.p2,
        };
        Program::load(&self.0.engine, linker, module, artefact)
    }

    /// Runs `aici_main` or `main` of a module once, on this thread and without a time limit (`--run`). Returns what it
    /// printed. Fails in the mode `sequence`, where this process runs no guest code.
    pub fn run_main(
        &self,
        program: &Program,
        start: Start,
    ) -> (Result<(), CallFailure>, StepReport) {
        threads::run_main(self, program, start)
    }

    /// Live instances of all requests.
    #[must_use]
    pub fn live(&self) -> u32 {
        self.0.live.load(Ordering::Relaxed)
    }

    /// Bytes of memory of all instances.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.0.budget.used()
    }

    fn budget(&self) -> &Arc<MemoryBudget> {
        &self.0.budget
    }

    fn long_texts(&self) -> &Arc<LongTexts> {
        &self.0.long_texts
    }

    #[cfg(target_os = "linux")]
    fn processes(&self) -> Option<&Arc<Processes>> {
        self.0.processes.as_ref()
    }

    /// In the mode `sequence`, lets one engine's thread receive the outcomes that it waits for.
    #[cfg(target_os = "linux")]
    pub(crate) fn outcome_poll(&self) -> Option<OutcomePoll> {
        self.processes().map(|processes| processes.outcome_poll())
    }

    fn workers(&self) -> &Workers {
        &self.0.workers
    }

    /// Counts one more instance of a request, until the returned values are dropped, and from the first on what the request's
    /// variables hold.
    fn enter(&self, group: &Arc<Group>) -> Result<(Member, LiveInstance), CallFailure> {
        let member = group.enter()?;
        if !group.variables().charge_to(self.budget()) {
            return Err(CallFailure::new(ErrorReason::MEMORY, MEMORY_EXHAUSTED));
        }
        Ok((member, self.count_live()?))
    }

    fn count_live(&self) -> Result<LiveInstance, CallFailure> {
        let limit = self.0.config.instances;
        let add = |live: u32| (live < limit).then_some(live + 1);
        let live = &self.0.live;
        let entered = live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        if entered.is_err() {
            return Err(CallFailure::new(ErrorReason::LIMIT, "too many sequences"));
        }
        Ok(LiveInstance(Arc::clone(live)))
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("live", &self.live())
            .field("memory_bytes", &self.memory_bytes())
            .finish_non_exhaustive()
    }
}

/// One live instance of a host.
#[derive(Debug)]
struct LiveInstance(Arc<AtomicU32>);

impl Drop for LiveInstance {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
