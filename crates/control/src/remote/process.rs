//! The runtime's process: its group, its end, and the vocabulary that it reads.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::options::RemoteCommand;
use crate::trie::{HostModel, TokenView};

/// A process that leads its group. It is killed at the latest when it is dropped, and never left unreaped.
#[derive(Debug)]
pub(super) struct RuntimeProcess {
    child: Child,
    group: ProcessGroup,
}

/// The right to kill a process group, which ends with the process: its number may then be another's.
#[derive(Clone, Debug)]
pub(super) struct ProcessGroup(Arc<Mutex<Option<Pid>>>);

impl RuntimeProcess {
    /// Starts a command with these arguments, and with no environment but its own: ours may hold secrets.
    pub(super) fn spawn(command: &RemoteCommand, args: &[OsString]) -> io::Result<Self> {
        let environment = command.environment.iter();
        let mut command = Command::new(&command.program);
        command
            .args(args)
            .env_clear()
            .envs(environment.map(|(name, value)| (name, value)))
            // Engines end a runtime by its group (AI-105), and so does this one.
            .process_group(0)
            .stdin(Stdio::null())
            // It is only written to by flags that are never given here.
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        let child = command.spawn()?;
        let pid = Pid::from_child(&child);
        Ok(Self {
            child,
            group: ProcessGroup(Arc::new(Mutex::new(Some(pid)))),
        })
    }

    pub(super) fn group(&self) -> ProcessGroup {
        self.group.clone()
    }

    /// Whether it has ended.
    pub(super) fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        match waitid(WaitId::Pid(Pid::from_child(&self.child)), options) {
            Ok(status) => status.is_some(),
            Err(error) => error != rustix::io::Errno::INTR,
        }
    }

    /// Waits until it has ended. It is still to be reaped.
    pub(super) fn wait_for_end(&self) {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let pid = Pid::from_child(&self.child);
        while matches!(
            waitid(WaitId::Pid(pid), options),
            Err(rustix::io::Errno::INTR)
        ) {}
    }

    /// Ends what is left of it, and of what it started.
    pub(super) fn reap(&mut self) -> io::Result<ExitStatus> {
        self.group.end();
        self.child.wait()
    }
}

impl Drop for RuntimeProcess {
    fn drop(&mut self) {
        // Nothing can be done about a failure: there is no such process any more.
        let _ = self.reap();
    }
}

impl ProcessGroup {
    fn pid(&self) -> MutexGuard<'_, Option<Pid>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills the group, unless its leader is reaped already.
    pub(super) fn kill(&self) {
        if let Some(pid) = *self.pid() {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    /// Kills the group for the last time. Before its leader is reaped: until then its number is taken.
    fn end(&self) {
        if let Some(pid) = self.pid().take() {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

/// The token trie of a model as a file that has no name, so that nothing of it is left behind however this process ends.
#[derive(Debug)]
pub(super) struct VocabularyFile(File);

impl VocabularyFile {
    pub(super) fn new(model: &HostModel) -> io::Result<Self> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("sapwood-vocabulary", flags)?;
        let mut file = File::from(file);
        file.write_all(model.trie(TokenView::Named))?;
        Ok(Self(file))
    }

    /// Its path for a child of this process.
    pub(super) fn path(&self) -> OsString {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}
