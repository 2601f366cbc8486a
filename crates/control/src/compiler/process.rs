//! The parent's side of a compiler child.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use super::{CompilerOptions, child, code_bytes, time_for};
use crate::host::Artefact;
use crate::module::ModuleError;

/// Compiles a module in a new child, and returns when the child is gone.
pub(super) fn compile(
    command: &[OsString],
    module: &[u8],
    options: &CompilerOptions,
) -> Result<Artefact, ModuleError> {
    let time = time_for(options.time, code_bytes(module));
    let (mut running, input, output) = Running::start(command)?;
    let (sender, receiver) = sync_channel(1);
    let message = thread::scope(|scope| {
        // Both ends of a pipe can wait for each other, so each has a thread. Killing the child ends both.
        scope.spawn(move || {
            let mut input = input;
            // A child that ends early says why through its output or its status.
            let _ = child::write(&mut input, child::MODULE, module);
        });
        scope.spawn(move || {
            let mut output = output;
            let message = child::read(&mut output, options.artefact_bytes_max);
            // The receiver is gone only if the time is over.
            let _ = sender.send(message);
        });
        let message = receiver.recv_timeout(time.saturating_mul(CLOCK_FACTOR));
        running.kill();
        message
    });
    let status = running.wait();
    match message {
        // Our own program, told by nobody but us how to compile, over a pipe that only it has.
        Ok(Ok(Some((child::ARTEFACT, artefact)))) => Ok(Artefact::vouched_for(artefact)),
        Ok(Ok(Some((child::INVALID, reason)))) => {
            Err(ModuleError::invalid(String::from_utf8_lossy(&reason)))
        }
        Ok(Ok(Some((_, reason)))) => {
            let reason = String::from_utf8_lossy(&reason);
            tracing::warn!(%reason, "the compiler failed");
            Err(ModuleError::CompileFailed)
        }
        Ok(ended) => Err(failure(ended.err(), status.as_ref(), time)),
        Err(_timeout) => Err(timeout(time)),
    }
}

/// Why a child ended without a result.
fn failure(error: Option<io::Error>, status: Option<&ExitStatus>, time: Duration) -> ModuleError {
    let signal = status.and_then(ExitStatusExt::signal);
    if signal == Some(rustix::process::Signal::XCPU.as_raw()) {
        return timeout(time);
    }
    tracing::warn!(?error, ?status, "the compiler ended without a result");
    ModuleError::CompileFailed
}

const fn timeout(time: Duration) -> ModuleError {
    ModuleError::CompileTimeout {
        seconds: time.as_secs(),
    }
}

/// How much longer than its processor time a child may take by the clock. Its low priority leaves it a quarter of a
/// processor that one busy thread wants too, and an eighth where two do, as beside a model that uses all of them.
const CLOCK_FACTOR: u32 = 10;

/// A child that is killed and waited for at the latest when this is dropped.
struct Running(Option<Child>);

impl Running {
    fn start(command: &[OsString]) -> Result<(Self, ChildStdin, ChildStdout), ModuleError> {
        let cannot_start = |error: io::Error| {
            tracing::error!(%error, ?command, "cannot start the compiler");
            ModuleError::Host("the compiler cannot be started".to_owned())
        };
        let (program, arguments) = command
            .split_first()
            .ok_or_else(|| cannot_start(io::ErrorKind::InvalidInput.into()))?;
        let mut child = Command::new(program)
            .args(arguments)
            // It works on bytes of strangers, and the environment of a server holds keys.
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(cannot_start)?;
        let pipes = (child.stdin.take(), child.stdout.take());
        let running = Self(Some(child));
        match pipes {
            (Some(input), Some(output)) => Ok((running, input, output)),
            _ => Err(cannot_start(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Ends the child. One that has ended already keeps its status.
    fn kill(&mut self) {
        if let Some(child) = &mut self.0 {
            // It fails only if the child has been waited for.
            let _ = child.kill();
        }
    }

    fn wait(&mut self) -> Option<ExitStatus> {
        self.0.take()?.wait().ok()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        self.wait();
    }
}
