//! [`Processes`]: the template's process, from the runtime's side.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, pidfd_open, pidfd_send_signal,
    set_child_subreaper, waitpgid,
};

use super::message::{self, LaunchedModule};
use super::poller::{OutcomePoll, Poller};
use super::priority::LatePriority;
use super::stream::{self, MessageOutbox};
use super::system;
use crate::host::config::HostConfig;

/// Starts controllers' processes. Dropping it ends the template, and with it all of them.
#[derive(Debug)]
pub(in crate::host) struct Processes {
    command: Vec<OsString>,
    config: Vec<u8>,
    template: Mutex<Option<RunningTemplate>>,
    poller: Poller,
    priority: LatePriority,
}

#[derive(Debug)]
struct RunningTemplate {
    control: OwnedFd,
    outbox: MessageOutbox,
    process: OwnedFd,
    /// The group of it and its clones.
    #[cfg(test)]
    group: Pid,
}

impl Processes {
    /// Starts the template: a program and its arguments that lead to [`serve_as_template`](super::serve_as_template).
    pub(in crate::host) fn start(
        command: Vec<OsString>,
        config: &HostConfig,
    ) -> io::Result<Arc<Self>> {
        // Should the template be killed, this process reaps what it leaves.
        set_child_subreaper(Some(getpid()))?;
        raise_descriptor_limit();
        let config = message::config(config);
        // Before the thread below exists.
        let template = start_template(&command, &config)?;
        Ok(Arc::new(Self {
            command,
            config,
            template: Mutex::new(Some(template)),
            poller: Poller::start()?,
            priority: LatePriority::new(),
        }))
    }

    /// The group of the template and its clones.
    #[cfg(test)]
    pub(in crate::host) fn group(&self) -> Option<Pid> {
        let template = self.template.lock().unwrap_or_else(PoisonError::into_inner);
        template.as_ref().map(|running| running.group)
    }

    pub(super) const fn poller(&self) -> &Poller {
        &self.poller
    }

    /// Lets an engine's thread receive outcomes itself.
    pub(in crate::host) fn outcome_poll(&self) -> OutcomePoll {
        self.poller.outcome_poll()
    }

    pub(super) const fn priority(&self) -> &LatePriority {
        &self.priority
    }

    /// Asks the template for a process that serves the other end of `socket`. If the template has ended, there is a new
    /// one.
    pub(super) fn launch(
        &self,
        module: &LaunchedModule,
        artefact: OwnedFd,
        socket: &OwnedFd,
    ) -> io::Result<()> {
        let message = module.message();
        let mut template = self.template.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..2 {
            let running = match &mut *template {
                Some(running) => running,
                None => template.insert(start_template(&self.command, &self.config)?),
            };
            let descriptors = vec![artefact.try_clone()?, socket.try_clone()?];
            running.outbox.push_with(message.clone(), descriptors);
            match running.send() {
                Ok(()) => return Ok(()),
                Err(error) => {
                    // It may be alive and stuck, with a message half received: of no use to anyone.
                    let _ = pidfd_send_signal(&running.process, Signal::KILL);
                    *template = None;
                    if error.kind() != io::ErrorKind::BrokenPipe
                        && error.kind() != io::ErrorKind::ConnectionReset
                    {
                        return Err(error);
                    }
                    tracing::warn!(
                        "the template of controllers' processes has ended; it is started again"
                    );
                }
            }
        }
        Err(io::ErrorKind::BrokenPipe.into())
    }
}

impl RunningTemplate {
    /// Sends all, for which the template may need a moment: it clones a process for each message.
    fn send(&mut self) -> io::Result<()> {
        loop {
            if self.outbox.send(self.control.as_fd(), usize::MAX)? {
                return Ok(());
            }
            let mut room = [PollFd::new(&self.control, PollFlags::OUT)];
            match rustix::event::poll(&mut room, Some(&ROOM_TIME)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let template = self
            .template
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = template.take()
            && let Ok(process) = running.process.try_clone()
        {
            drop(running);
            // This process may be about to end, and then nobody would reap the template. No controller is left that
            // could keep it waiting.
            let _ =
                rustix::event::poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&END_TIME));
        }
    }
}

impl Drop for RunningTemplate {
    fn drop(&mut self) {
        system::unset_template(self.control.as_fd());
    }
}

fn start_template(command: &[OsString], config: &[u8]) -> io::Result<RunningTemplate> {
    let (control, theirs) = stream::pair()?;
    let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        // A group of its own: engines end the runtime by its group, and what is in this one ends with its sockets. It
        // is also how the runtime knows whom to wait for when the template has ended.
        .process_group(0)
        .spawn()?;
    let group = Pid::from_child(&child);
    let process = pidfd_open(group, PidfdFlags::empty())?;
    reap(child)?;
    let mut running = RunningTemplate {
        control,
        outbox: MessageOutbox::default(),
        process,
        #[cfg(test)]
        group,
    };
    system::set_template(running.control.as_fd(), group.as_raw_nonzero().get());
    running.outbox.push(config.to_vec());
    running.send()?;
    Ok(running)
}

/// Waits for the template, and then for the processes that it has left to this one.
fn reap(mut template: Child) -> io::Result<()> {
    let group = Pid::from_child(&template);
    let wait = move || {
        match template.wait() {
            Ok(status) if status.success() => {}
            ended => tracing::warn!(?ended, "the template of controllers' processes"),
        }
        loop {
            match waitpgid(group, WaitOptions::empty()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                // There is none.
                Err(_) => return,
            }
        }
    };
    std::thread::Builder::new()
        .name("controller-reap".to_owned())
        .spawn(wait)?;
    Ok(())
}

/// Each process takes two descriptors of the runtime, and many systems give a thousand by default.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};

    let mut limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(DESCRIPTORS).min(DESCRIPTORS);
    if limit.current.is_some_and(|current| current < wanted) {
        limit.current = Some(wanted);
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, "few controllers can run at once");
        }
    }
}

/// How long the template may take to end.
const END_TIME: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};
const DESCRIPTORS: u64 = 4_096;
/// How long the template may leave a message unread.
const ROOM_TIME: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
