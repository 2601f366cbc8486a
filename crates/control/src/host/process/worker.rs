//! The life of a controller's process: it runs one sequence's controller, and clones itself for a fork.
//!
//! Nothing here returns: the process ends when the runtime has closed its end of the socket, or after a failure, which
//! leaves an instance of no further use.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{PidfdFlags, getpid, pidfd_open};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, VariableWrite};

use super::message::{self, StartMessage};
use super::outcome::write_outcome;
use super::stream::{MessageInbox, MessageOutbox, RECEIVED_BYTES};
use super::system::{self, Forked};
use crate::host::LiveInstance;
use crate::host::budget::{InstanceLimiter, MemoryBudget};
use crate::host::config::HostConfig;
use crate::host::controller::{Controller, Outcome};
use crate::host::failure::{Abort, CallFailure};
use crate::host::group::variables::WriteResult;
use crate::host::group::{Group, Versioned};
use crate::host::home::Home;
use crate::host::program::Program;
use crate::host::random::SeededRandom;
use crate::host::state::{ControllerState, Surroundings};
use crate::trie::HostModel;

/// What a controller's process has from the template.
pub(super) struct FromTemplate {
    pub(super) program: Program,
    pub(super) model: Arc<HostModel>,
    pub(super) config: HostConfig,
}

/// Serves the runtime at the other end of `socket` until it closes it.
pub(super) fn work(inherited: &FromTemplate, socket: OwnedFd) -> ! {
    let home = Arc::new(HomeSocket(Mutex::new(Conversation::new(socket))));
    home.lock().introduce();
    let mut controller = None;
    loop {
        let message = home.lock().next();
        let Some((kind, body)) = message.split_first() else {
            system::exit(MISUNDERSTOOD);
        };
        match *kind {
            message::START => {
                let Some(start) = StartMessage::read(body) else {
                    system::exit(MISUNDERSTOOD);
                };
                controller = guarded(&home, || begin(inherited, &home, start));
            }
            message::CALL => {
                let (Some(mut present), Some((number, callback))) =
                    (controller.take(), message::read_call(body))
                else {
                    system::exit(MISUNDERSTOOD);
                };
                controller = guarded(&home, || {
                    let outcome =
                        Controller::call(&mut present, &callback, number, &inherited.config);
                    (Some(present), outcome)
                });
            }
            message::FORK => {
                let forked = home.lock().fork();
                if let (Some(controller), Some(forked)) = (&mut controller, forked) {
                    controller.draw_on(matches!(forked, Forked::Child));
                }
            }
            _ => system::exit(MISUNDERSTOOD),
        }
    }
}

/// Starts the controller.
fn begin(
    inherited: &FromTemplate,
    home: &Arc<HomeSocket>,
    start: StartMessage,
) -> (Option<Box<Controller>>, Outcome) {
    let FromTemplate {
        program,
        model,
        config,
    } = inherited;
    let home = Arc::clone(home) as Arc<dyn Home>;
    let group = Group::of_home(start.forks_max, start.variables, Arc::clone(&home));
    let budget = Arc::new(MemoryBudget::of_home(home));
    let member = match group.enter() {
        Ok(member) => member,
        Err(failure) => return (None, failed(failure)),
    };
    let surroundings = Surroundings {
        model: Arc::clone(model),
        arg: start.arg,
        abi: program.abi(),
        capabilities: start.capabilities,
        timer_resolution: config.timer_resolution,
        result_bytes: config.result_bytes,
        long_texts: None,
    };
    let mut state = ControllerState::new(
        surroundings,
        InstanceLimiter::new(budget, config.memory_bytes, config.table_elements),
        // The runtime counts instances; here there is one.
        (member, LiveInstance(Arc::new(AtomicU32::new(1)))),
        Arc::default(),
    );
    state.random = start.seed.map(SeededRandom::new);
    Controller::start(program, state, &start.prompt, config)
}

/// Runs the guest, and reports its outcome. Does not return after a failure.
fn guarded(
    home: &HomeSocket,
    run: impl FnOnce() -> (Option<Box<Controller>>, Outcome),
) -> Option<Box<Controller>> {
    let (controller, outcome) = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let text = "the controller could not be run";
        (None, failed(CallFailure::new(ErrorReason::TRAP, text)))
    });
    let failed = outcome.result.is_err();
    home.lock().send(write_outcome(&outcome));
    if failed {
        system::exit(0);
    }
    controller
}

fn failed(failure: CallFailure) -> Outcome {
    Outcome {
        result: Err(failure),
        report: StepReport::default(),
    }
}

/// The socket to the runtime. The lock is there because instances can be sent to threads; here it is always free.
#[derive(Debug)]
struct HomeSocket(Mutex<Conversation>);

#[derive(Debug)]
struct Conversation {
    socket: OwnedFd,
    inbox: MessageInbox,
    outbox: MessageOutbox,
    /// What came while an answer was waited for.
    kept: VecDeque<Vec<u8>>,
    buffer: Vec<u8>,
}

impl HomeSocket {
    fn lock(&self) -> MutexGuard<'_, Conversation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Home for HomeSocket {
    fn charge(&self, bytes: usize) -> bool {
        let answer = self.lock().ask(message::charge(bytes));
        message::read_charged(&answer).unwrap_or(false)
    }

    fn read(&self, name: &str) -> Option<Versioned> {
        let answer = self.lock().ask(message::read_variable(name));
        message::read_versioned(&answer).flatten()
    }

    fn write(&self, write: &VariableWrite) -> Result<WriteResult, Abort> {
        let answer = self.lock().ask(message::write_variable(write));
        message::read_written(&answer)
            .unwrap_or_else(|| Err(Abort::trap("the runtime cannot be understood")))
    }
}

impl Conversation {
    fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            inbox: MessageInbox::default(),
            outbox: MessageOutbox::default(),
            kept: VecDeque::new(),
            buffer: vec![0; RECEIVED_BYTES],
        }
    }

    /// Tells the runtime how this process can be ended.
    fn introduce(&mut self) {
        let watched = system::end_with_peer(self.socket.as_raw_fd());
        let (Ok(()), Ok(process)) = (watched, pidfd_open(getpid(), PidfdFlags::empty())) else {
            system::exit(NOT_STARTED);
        };
        self.outbox
            .push_with(message::bare(message::HELLO), vec![process]);
        self.flush();
    }

    /// The next message but for answers. Without a runtime the process ends.
    fn next(&mut self) -> Vec<u8> {
        match self.kept.pop_front() {
            Some(message) => message,
            None => self.receive(),
        }
    }

    fn receive(&mut self) -> Vec<u8> {
        loop {
            match self.inbox.next(usize::MAX) {
                Ok(Some(message)) => return message,
                Ok(None) => {}
                Err(_) => system::exit(MISUNDERSTOOD),
            }
            let received = self.inbox.receive(self.socket.as_fd(), &mut self.buffer);
            if !matches!(received, Ok(1..)) {
                system::exit(0);
            }
        }
    }

    /// Asks, and waits for the answer.
    fn ask(&mut self, question: Vec<u8>) -> Vec<u8> {
        self.send(question);
        loop {
            let mut message = self.receive();
            if message.first() == Some(&message::ANSWER) {
                message.remove(0);
                return message;
            }
            // The runtime does not wait for one callback before it asks for the next.
            self.kept.push_back(message);
        }
    }

    fn send(&mut self, message: Vec<u8>) {
        self.outbox.push(message);
        self.flush();
    }

    fn flush(&mut self) {
        // Waits until the runtime has room.
        if self.outbox.send(self.socket.as_fd(), usize::MAX).is_err() {
            system::exit(0);
        }
    }

    /// Clones this process. The clone goes on with a socket of its own, and with nothing that was meant for its parent.
    /// Returns which of the two this is; `None` if there is no clone.
    fn fork(&mut self) -> Option<Forked> {
        let Some(socket) = self.inbox.descriptor() else {
            system::exit(MISUNDERSTOOD);
        };
        let forked = system::fork();
        match &forked {
            Ok(Forked::Parent) => {
                drop(socket);
                self.send(message::forked(None));
            }
            Ok(Forked::Child) => {
                // Closes the parent's.
                let _ = std::mem::replace(&mut self.socket, socket);
                self.inbox = MessageInbox::default();
                self.outbox = MessageOutbox::default();
                self.kept.clear();
                self.introduce();
            }
            Err(error) => {
                drop(socket);
                self.send(message::forked(Some(&error.to_string())));
            }
        }
        forked.ok()
    }
}

/// Exit codes: nobody but a person with a debugger sees them.
const MISUNDERSTOOD: i32 = 101;
pub(super) const NOT_STARTED: i32 = 102;
