//! The template: a process with a single thread, which is cloned for each new sequence.
//!
//! It has what all controllers need, loaded once: the Wasm engine, programs, the model's vocabulary. It runs no guest
//! code itself, and serves no requests: a message to it is a module and a socket, and the clone goes on by itself.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;

use rustix::process::{Resource, Rlimit, getpid, getrlimit, set_child_subreaper, setrlimit};
use sapwood_proto::steer::StepReport;
use wasmtime::{Engine, Linker};

use super::message::{self, LaunchedModule};
use super::outcome::write_outcome;
use super::slot::no_process;
use super::stream::{MessageInbox, MessageOutbox, RECEIVED_BYTES};
use super::system::{self, Forked};
use super::worker::{self, FromTemplate};
use crate::host::config::HostConfig;
use crate::host::controller::Outcome;
use crate::host::failure::CallFailure;
use crate::host::program::Program;
use crate::host::state::ControllerState;
use crate::host::{engine, imports};
use crate::module::{Abi, ModuleId};
use crate::trie::HostModel;

/// Makes this process the template of the runtime that started it, whose socket is standard input. Returns when the
/// runtime has ended, and no controller is left.
///
/// # Errors
/// This process has more than one thread, or was not started by a runtime.
pub fn serve_as_template(model: Arc<HostModel>) -> io::Result<()> {
    // A clone of a process with threads has only one of them, and the locks of all.
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        let text = format!("the template must have one thread, and has {threads}");
        return Err(io::Error::other(text));
    }
    serve(model)
}

/// As [`serve_as_template`]; the caller knows that other threads hold nothing.
pub(in crate::host) fn serve(model: Arc<HostModel>) -> io::Result<()> {
    let control = take_standard_input()?;
    // Controllers whose parent has ended become children of this process, and are gone as soon as they end.
    set_child_subreaper(Some(getpid()))?;
    system::reap_children_at_once()?;
    prepare()?;
    let mut conversation = FromRuntime {
        control,
        inbox: MessageInbox::default(),
        buffer: vec![0; RECEIVED_BYTES],
    };
    let Some(config) = conversation.next()?.as_deref().and_then(config_of) else {
        return Err(io::Error::other("the runtime has another version"));
    };
    let mut template = LoadedTemplate::new(model, config)?;
    while let Some(message) = conversation.next()? {
        let artefact = conversation.inbox.descriptor();
        let socket = conversation.inbox.descriptor();
        let (Some(artefact), Some(socket)) = (artefact, socket) else {
            return Err(io::Error::other("a message without its descriptors"));
        };
        let body = message.get(1..).unwrap_or_default();
        let Some(module) = LaunchedModule::read(body) else {
            return Err(io::Error::other("a message that cannot be read"));
        };
        template.launch(&module, artefact, socket);
    }
    // They would end by themselves, because the other ends of their sockets are gone too; this is faster. Whoever reaps
    // this process need not know them.
    if let Err(error) = system::end_clones() {
        tracing::warn!(%error, "controllers' processes are not ended");
    }
    while let Err(rustix::io::Errno::INTR) | Ok(_) =
        rustix::process::wait(rustix::process::WaitOptions::empty())
    {}
    Ok(())
}

/// Moves the socket away from where libraries may read, and closes all else that the parent had open.
fn take_standard_input() -> io::Result<OwnedFd> {
    let control = io::stdin().as_fd().try_clone_to_owned()?;
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    system::set_standard_stream(nothing.as_fd(), 0)?;
    system::set_standard_stream(nothing.as_fd(), 1)?;
    drop(nothing);
    system::close_from(3, control.as_raw_fd());
    Ok(control)
}

/// Limits and properties that the clones inherit.
fn prepare() -> io::Result<()> {
    // A crash must not write what a stranger uploaded to the disk.
    setrlimit(
        Resource::Core,
        Rlimit {
            current: Some(0),
            maximum: Some(0),
        },
    )?;
    // Where memory is short, rather a controller ends than the engine. It may be refused.
    let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    // Guests run on the main thread's stack, which grows up to this limit.
    let mut stack = getrlimit(Resource::Stack);
    let enough = |bytes: Option<u64>| bytes.is_none_or(|bytes| bytes >= STACK_BYTES);
    if !enough(stack.current) && enough(stack.maximum) {
        stack.current = Some(STACK_BYTES);
        setrlimit(Resource::Stack, stack)?;
    }
    Ok(())
}

fn config_of(message: &[u8]) -> Option<HostConfig> {
    let (kind, body) = message.split_first()?;
    (*kind == message::CONFIG).then(|| message::read_config(body))?
}

struct FromRuntime {
    control: OwnedFd,
    inbox: MessageInbox,
    buffer: Vec<u8>,
}

impl FromRuntime {
    /// The next message; `None` if the runtime has ended.
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let next = self.inbox.next(MESSAGE_BYTES_MAX);
            if let Some(message) = next.map_err(|_| io::Error::other("a message is too long"))? {
                return Ok(Some(message));
            }
            let received = self.inbox.receive(self.control.as_fd(), &mut self.buffer);
            match received {
                Ok(0) => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                received => received?,
            };
        }
    }
}

struct LoadedTemplate {
    model: Arc<HostModel>,
    config: HostConfig,
    p1: Linker<ControllerState>,
    p2: Linker<ControllerState>,
    /// The last that were used, newest first.
    /// The latest first, each with the bytes of its artefact.
    programs: VecDeque<(Program, usize)>,
}

impl LoadedTemplate {
    fn new(model: Arc<HostModel>, config: HostConfig) -> io::Result<Self> {
        let failed = |error: wasmtime::Error| io::Error::other(format!("{error:#}"));
        let engine: Engine = engine::one_by_one(&config).map_err(failed)?;
        Ok(Self {
            p1: imports::linker(&engine, Abi::P1).map_err(failed)?,
            p2: imports::linker(&engine, Abi::P2).map_err(failed)?,
            model,
            config,
            programs: VecDeque::new(),
        })
    }

    /// Starts a controller's process. Failures are reported at its socket, as that process would.
    fn launch(&mut self, module: &LaunchedModule, artefact: OwnedFd, socket: OwnedFd) {
        let same_model =
            module.vocabulary == self.model.vocabulary() && module.eos == self.model.eos();
        if !same_model {
            return report(socket, no_process(&"it has another tokenizer"));
        }
        let program = match self.program(module, artefact) {
            Ok(program) => program,
            Err(error) => {
                tracing::error!(%error, "a controller cannot be loaded");
                return report(socket, no_process(&"the module does not load"));
            }
        };
        match system::fork() {
            Ok(Forked::Parent) => {}
            Ok(Forked::Child) => self.become_worker(program, socket),
            Err(error) => {
                tracing::warn!(%error, "no process for a controller");
                report(socket, no_process(&error));
            }
        }
    }

    fn program(&mut self, module: &LaunchedModule, artefact: OwnedFd) -> wasmtime::Result<Program> {
        let known = |(program, _): &(Program, usize)| program.id().as_bytes() == &module.id;
        if let Some(place) = self.programs.iter().position(known)
            && let Some(found) = self.programs.remove(place)
        {
            let program = found.0.clone();
            self.programs.push_front(found);
            return Ok(program);
        }
        let mut bytes = Vec::new();
        let mut file = File::from(artefact);
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        let linker = match module.abi {
            Abi::P1 => &self.p1,
            Abi::P2 => &self.p2,
        };
        let id = ModuleId::from_bytes(module.id);
        let parts = (id, module.abi, module.start.clone());
        let program = Program::handed_on(linker, parts, &bytes)?;
        // Once here rather than in each clone.
        if program.opens_constraints()
            && let Some(constraints) = self.model.constraints()
        {
            constraints.prepare();
        }
        let mut left = PROGRAM_BYTES.saturating_sub(bytes.len());
        self.programs.truncate(PROGRAMS - 1);
        self.programs.retain(|(_, bytes)| {
            let kept = left.checked_sub(*bytes);
            left = kept.unwrap_or(left);
            kept.is_some()
        });
        self.programs.push_front((program.clone(), bytes.len()));
        Ok(program)
    }

    fn become_worker(&self, program: Program, socket: OwnedFd) -> ! {
        // What a panic prints must not keep the runtime's standard error open.
        let silent = system::set_standard_stream(io::stdin().as_fd(), 2);
        // Also the template's socket: while one clone has it, the runtime cannot see that the template has ended.
        system::close_from(3, socket.as_raw_fd());
        if silent.is_err() {
            system::exit(worker::NOT_STARTED);
        }
        let inherited = FromTemplate {
            program,
            model: Arc::clone(&self.model),
            config: self.config.clone(),
        };
        worker::work(&inherited, socket)
    }
}

/// Reports a failure in the name of a process that there is not.
fn report(socket: OwnedFd, failure: CallFailure) {
    let outcome = Outcome {
        result: Err(failure),
        report: StepReport::default(),
    };
    let mut outbox = MessageOutbox::default();
    outbox.push(write_outcome(&outcome));
    // Nobody is left who could be told.
    let _ = outbox.send(socket.as_fd(), usize::MAX);
}

/// Programs that stay loaded.
const PROGRAMS: usize = 64;
/// Bytes of their artefacts, but for a larger one that was used last.
const PROGRAM_BYTES: usize = 512 << 20;
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// What guests may use, and what the host needs around them.
const STACK_BYTES: u64 = 8 << 20;
