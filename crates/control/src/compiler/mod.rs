//! `Compiler`: turns instrumented modules into machine code, outside the serving process (AI-732).
//!
//! A module is a stranger's input to a large program, the code generator. In a server it therefore runs in a child
//! process: limits on memory and processor time end a module that is expensive to compile, and a crash costs the child.
//! The composition root starts the child by its own program with arguments that lead to [`compile_stdin_to_stdout`].

mod child;
mod host;
mod process;
#[cfg(test)]
mod tests;
mod timed_out;

use std::ffi::OsString;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use wasmparser::{Parser, Payload};

pub use self::child::{ChildLimits, compile_stdin_to_stdout};
use self::timed_out::TimedOutModules;
use crate::host::Artefact;
use crate::module::{CheckedModule, ModuleError, ModuleId};
use crate::store::ArtefactKey;

/// Compiles modules and loads what was compiled; implemented by the Wasm host.
pub trait ArtefactCompiler: Send + Sync {
    /// A module that is ready to be instantiated. A clone is cheap.
    type Program: Clone + Send + Sync;

    /// Names all that an artefact depends on beside its module: version of the engine, options, processor features.
    fn key(&self) -> ArtefactKey;

    /// Compiles a module.
    ///
    /// # Errors
    /// The engine refuses it.
    fn compile(&self, module: &CheckedModule) -> Result<Artefact, ModuleError>;

    /// Loads an artefact, which was compiled from this module under the same key.
    ///
    /// # Errors
    /// The artefact does not fit this engine.
    fn load(
        &self,
        module: &CheckedModule,
        artefact: &Artefact,
    ) -> Result<Self::Program, ModuleError>;

    /// Whether anything but the given clone uses the program.
    fn in_use(program: &Self::Program) -> bool;
}

/// Where modules are compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompilerPlace {
    /// In this process: for tests, and for a runtime that serves one user.
    InProcess,
    /// In a child: a program and its arguments. What it prints is run as machine code.
    Child(Vec<OsString>),
}

/// How much is compiled, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompilerOptions {
    /// Where.
    pub place: CompilerPlace,
    /// Processor time that a child may take for a module of usual size, with up to 4 MiB of code. For each further one it has
    /// 2.5 s more: interpreters of whole languages have several. The child yields to whatever else runs, so by the clock it
    /// may take ten times as long.
    pub time: Duration,
    /// Bytes of the largest artefact.
    pub artefact_bytes_max: u64,
    /// Modules compiled at once; each takes a core.
    pub jobs: usize,
    /// Modules that wait for that.
    pub waiting_max: usize,
}

impl CompilerOptions {
    /// The default limits.
    #[must_use]
    pub const fn new(place: CompilerPlace) -> Self {
        Self {
            place,
            time: Duration::from_secs(10),
            artefact_bytes_max: 256 << 20,
            jobs: 1,
            waiting_max: 32,
        }
    }
}

/// The time for a module with so many bytes of code, where one of usual size has `base`.
fn time_for(base: Duration, code_bytes: usize) -> Duration {
    let further = code_bytes.saturating_sub(USUAL_CODE_BYTES) as u64;
    // 2.5 s for each MiB, in ns for each byte.
    base + Duration::from_nanos(further.saturating_mul(2_384))
}

/// Bytes of the code of a module, which need not be valid. The other sections cost the code generator next to nothing, so
/// filling one of them must not buy time.
fn code_bytes(module: &[u8]) -> usize {
    let mut payloads = Parser::new(0).parse_all(module).map_while(Result::ok);
    let found = payloads.find_map(|payload| match payload {
        Payload::CodeSectionStart { size, .. } => Some(size as usize),
        _ => None,
    });
    // What a section claims is believed as far as there are bytes.
    found.unwrap_or_default().min(module.len())
}

/// Bytes of the code of a module of usual size at most.
const USUAL_CODE_BYTES: usize = 4 << 20;

/// Compiles a limited number of modules at once; the others wait their turn.
#[derive(Debug)]
pub(crate) struct Compiler {
    options: CompilerOptions,
    queue: Mutex<JobQueue>,
    job_ended: Condvar,
    timed_out: TimedOutModules,
}

#[derive(Debug, Default)]
struct JobQueue {
    running: usize,
    waiting: usize,
}

impl Compiler {
    pub(crate) fn new(options: CompilerOptions) -> Self {
        Self {
            options,
            queue: Mutex::default(),
            job_ended: Condvar::new(),
            timed_out: TimedOutModules::default(),
        }
    }

    /// Returns the artefact of `module`, which was uploaded as `bytes`.
    pub(crate) fn compile<C: ArtefactCompiler>(
        &self,
        _job: &CompilerJob<'_>,
        host: &C,
        module: &CheckedModule,
        bytes: &[u8],
    ) -> Result<Artefact, ModuleError> {
        let compiled = match &self.options.place {
            CompilerPlace::InProcess => host.compile(module),
            CompilerPlace::Child(command) => process::compile(command, bytes, &self.options),
        };
        compiled.inspect_err(|error| self.note(module.id, error))
    }

    /// Remembers a module that took too long to check or to compile.
    pub(crate) fn note(&self, id: ModuleId, error: &ModuleError) {
        if let ModuleError::CompileTimeout { seconds } = *error {
            self.timed_out.insert(id, seconds, Instant::now());
        }
    }

    /// Waits its turn, which does not count towards the time limit. A module that has taken too long a while ago is refused
    /// at once.
    pub(crate) fn start_job(&self, id: ModuleId) -> Result<CompilerJob<'_>, ModuleError> {
        self.timed_out.check(id, Instant::now())?;
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.running >= self.options.jobs {
            if queue.waiting >= self.options.waiting_max {
                return Err(ModuleError::Busy);
            }
            queue.waiting += 1;
            let ready = |queue: &mut JobQueue| queue.running >= self.options.jobs;
            queue = self
                .job_ended
                .wait_while(queue, ready)
                .unwrap_or_else(PoisonError::into_inner);
            queue.waiting -= 1;
        }
        queue.running += 1;
        Ok(CompilerJob(self))
    }
}

/// Room for one module to be checked and compiled.
#[must_use]
pub(crate) struct CompilerJob<'a>(&'a Compiler);

impl Drop for CompilerJob<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.running -= 1;
        self.0.job_ended.notify_one();
    }
}
