//! [`ProcessSlot`]: what the runtime knows of a controller's process.

mod polled;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, StepWaker};

use super::asked::Asked;
use super::message;
use super::outcome;
use super::poller::PolledProcess;
use super::processes::Processes;
use super::stream::{self, MessageInbox, MessageOutbox, RECEIVED_BYTES};
use crate::host::budget::MEMORY_EXHAUSTED;
use crate::host::controller::Outcome;
use crate::host::failure::CallFailure;
use crate::host::group::variables::WriteResult;
use crate::host::group::{Group, Member};
use crate::host::result::{ResultLimits, Waits};
use crate::host::writes::StepWrites;
use crate::host::{Host, LiveInstance};

/// What a process and its forks have in common.
#[derive(Clone)]
pub(super) struct SlotSurroundings {
    pub(super) host: Host,
    pub(super) processes: Arc<Processes>,
    pub(super) group: Arc<Group>,
    pub(super) waker: Arc<dyn StepWaker>,
    pub(super) limits: ResultLimits,
}

/// The part of an instance that the poller shares.
pub(super) struct ProcessSlot {
    pub(super) around: SlotSurroundings,
    /// In the poller.
    number: u64,
    inner: Mutex<SlotInner>,
}

pub(super) struct SlotInner {
    socket: OwnedFd,
    inbox: MessageInbox,
    outbox: MessageOutbox,
    /// The poller waits for room in the socket.
    room_wanted: bool,
    /// The process, once it has said hello.
    process: Option<OwnedFd>,
    /// What the process has been asked to do, in order.
    pub(super) asked: VecDeque<Asked<Arc<ProcessSlot>>>,
    pub(super) outcomes: VecDeque<Outcome>,
    /// The id that the controller sees.
    pub(super) id: u32,
    /// Since when the process does the first thing of `asked`.
    pub(super) running_since: Option<Instant>,
    /// When the process is killed.
    deadline: Option<Instant>,
    /// When its callback is so late that it loses its priority.
    slows_at: Option<Instant>,
    /// It has lost it.
    is_slowed: bool,
    writes: StepWrites,
    /// Bytes of the budget that it has.
    pub(super) charged: usize,
    pub(super) member: Member,
    live: Option<LiveInstance>,
    pub(super) state: SlotState,
    /// A fork that its parent's process has not reported yet: how it went, the parent's slot will know.
    pub(super) is_awaited: bool,
    /// The instance is gone.
    pub(super) dropped: bool,
}

pub(super) enum SlotState {
    Good,
    /// The next call returns why; nobody was waiting when it happened.
    Failing(CallFailure),
    Failed,
}

/// What follows from a message, done without the lock.
enum SlotEffect {
    Wake,
    FailChild(Arc<ProcessSlot>, CallFailure),
    Forked(Arc<ProcessSlot>),
}

impl fmt::Debug for ProcessSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessSlot")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

impl ProcessSlot {
    /// A slot, and the socket of the process that will serve it.
    pub(super) fn make(
        around: SlotSurroundings,
        (member, live): (Member, LiveInstance),
    ) -> io::Result<(Arc<Self>, OwnedFd)> {
        let (ours, theirs) = stream::pair()?;
        let slot = Arc::new(Self {
            number: around.processes.poller().number(),
            around,
            inner: Mutex::new(SlotInner {
                socket: ours,
                inbox: MessageInbox::default(),
                outbox: MessageOutbox::default(),
                room_wanted: false,
                process: None,
                asked: VecDeque::new(),
                outcomes: VecDeque::new(),
                id: 0,
                running_since: None,
                deadline: None,
                slows_at: None,
                is_slowed: false,
                writes: StepWrites::default(),
                charged: 0,
                member,
                live: Some(live),
                state: SlotState::Good,
                is_awaited: false,
                dropped: false,
            }),
        });
        let polled = Arc::clone(&slot) as Arc<dyn PolledProcess>;
        let poller = slot.around.processes.poller();
        poller.add(slot.number, slot.lock().socket.as_fd(), polled)?;
        Ok((slot, theirs))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, SlotInner> {
        // Nothing that can panic runs under the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message, or as much of it as there is room for now.
    pub(super) fn send(
        &self,
        inner: &mut SlotInner,
        message: Vec<u8>,
        descriptor: Option<OwnedFd>,
    ) {
        match descriptor {
            Some(descriptor) => inner.outbox.push_with(message, vec![descriptor]),
            None => inner.outbox.push(message),
        }
        self.send_queued(inner);
    }

    fn send_queued(&self, inner: &mut SlotInner) {
        // As much as is received at once: one that reads large variables holds up no other.
        let sent = inner.outbox.send(inner.socket.as_fd(), RECEIVED_BYTES);
        let wanted = match sent {
            Ok(all) => !all,
            // The end of the process is received as such.
            Err(_) => false,
        };
        if wanted != inner.room_wanted {
            inner.room_wanted = wanted;
            let poller = self.around.processes.poller();
            poller.watch_room(self.number, inner.socket.as_fd(), wanted);
        }
    }

    pub(super) fn set_deadline(&self, inner: &mut SlotInner, time: Option<Duration>) {
        inner.deadline = time.and_then(|time| Instant::now().checked_add(time));
        if let Some(deadline) = inner.deadline {
            self.around.processes.poller().look_at(deadline);
        }
    }

    /// The process begins with the first thing of `asked`, if it exists.
    pub(super) fn begin_next(&self, inner: &mut SlotInner) {
        if inner.process.is_none() {
            return;
        }
        let config = self.around.host.config();
        inner.slows_at = None;
        let now = Instant::now();
        let time = match inner.asked.front() {
            None => {
                inner.running_since = None;
                inner.deadline = None;
                return;
            }
            Some(Asked::Start) => {
                let time = config.init_time.saturating_add(config.grace_time);
                time.saturating_add(KILL_TIME)
            }
            Some(Asked::Call {
                kind, late, time, ..
            }) => {
                if kind.begins_step() {
                    inner.writes.begin_step();
                }
                let slows_after = self.around.processes.priority().slows_after(*late);
                inner.slows_at = now.checked_add(slows_after);
                *time
            }
            Some(Asked::Fork { .. }) => HELLO_TIME,
        };
        inner.running_since = Some(now);
        inner.deadline = now.checked_add(time);
        if let Some(at) = inner.look_at() {
            self.around.processes.poller().look_at(at);
        }
    }

    /// Takes bytes of the memory of all instances. They are given back when the process has ended.
    pub(super) fn charge(&self, bytes: usize) -> bool {
        self.charge_inner(&mut self.lock(), bytes)
    }

    fn charge_inner(&self, inner: &mut SlotInner, bytes: usize) -> bool {
        if inner.live.is_none() {
            // It has ended already, and gives nothing back any more.
            return true;
        }
        let config = self.around.host.config();
        let tables = 2 * config.table_elements * size_of::<usize>();
        let most = config.memory_bytes.saturating_add(tables);
        // The process keeps to its limit by itself, unless its controller has taken it over.
        if inner.charged.saturating_add(bytes) > most {
            return false;
        }
        let granted = self.around.host.budget().charge(bytes);
        if granted {
            inner.charged += bytes;
        }
        granted
    }

    fn take_messages(&self, inner: &mut SlotInner, effects: &mut Vec<SlotEffect>) {
        let bytes_max =
            outcome::bytes_max(self.around.limits, self.around.group.variables().limits());
        loop {
            let understood = match inner.inbox.next(bytes_max) {
                Ok(None) => return,
                Ok(Some(message)) => self.take_message(inner, &message, effects),
                Err(_) => None,
            };
            if understood.is_none() {
                tracing::error!("a controller's process sent what cannot be understood");
                let text = "the controller could not be run";
                let failure = CallFailure::new(ErrorReason::TRAP, text);
                return self.fail_inner(inner, failure, effects);
            }
        }
    }

    /// Takes a message. `None`: no controller's process would send it.
    fn take_message(
        &self,
        inner: &mut SlotInner,
        message: &[u8],
        effects: &mut Vec<SlotEffect>,
    ) -> Option<()> {
        let (kind, body) = message.split_first()?;
        if *kind == message::HELLO {
            if inner.process.is_some() {
                return None;
            }
            inner.process = Some(inner.inbox.descriptor()?);
            if inner.dropped || !matches!(inner.state, SlotState::Good) {
                inner.end_if_unwanted();
                return Some(());
            }
            self.begin_next(inner);
            return Some(());
        }
        if !matches!(inner.state, SlotState::Good) {
            // It is being killed; what it says no longer counts.
            return Some(());
        }
        match *kind {
            message::OUTCOME => self.take_outcome(inner, body, effects),
            message::FORKED => self.take_forked(inner, body, effects),
            message::READ | message::WRITE | message::CHARGE => self.answer(inner, *kind, body),
            _ => None,
        }
    }

    fn take_outcome(
        &self,
        inner: &mut SlotInner,
        body: &[u8],
        effects: &mut Vec<SlotEffect>,
    ) -> Option<()> {
        let waits = Waits {
            member: &inner.member,
            mark: inner.asked.front()?.mark(),
        };
        let mut returned = outcome::read_outcome(body, self.around.limits, &waits)?;
        if !inner.asked.front()?.is_answered_by(&returned) {
            return None;
        }
        inner.asked.pop_front();
        self.restore_priority(inner);
        returned.report.storage = inner.writes.take();
        if returned.result.is_err() {
            // The process ends by itself, or has never been.
            inner.outcomes.push_back(returned);
            inner.state = SlotState::Failed;
            inner.fail_rest(effects);
            inner.kill();
            effects.push(SlotEffect::Wake);
            return Some(());
        }
        inner.outcomes.push_back(returned);
        self.begin_next(inner);
        // Whoever queued two calls waits for the second, so one wake-up is enough.
        if !inner
            .asked
            .iter()
            .any(|asked| matches!(asked, Asked::Call { .. }))
        {
            effects.push(SlotEffect::Wake);
        }
        inner.end_if_unwanted();
        Some(())
    }

    fn take_forked(
        &self,
        inner: &mut SlotInner,
        body: &[u8],
        effects: &mut Vec<SlotEffect>,
    ) -> Option<()> {
        let forked = message::read_forked(body)?;
        let Some(Asked::Fork { slot, charged }) = inner.asked.front() else {
            return None;
        };
        let (child, charged) = (Arc::clone(slot), *charged);
        inner.asked.pop_front();
        match forked {
            Err(error) => effects.push(SlotEffect::FailChild(child, no_process(&error))),
            Ok(()) => {
                // What its parent has got since it was asked.
                if child.charge(inner.charged - charged) {
                    effects.push(SlotEffect::Forked(child));
                } else {
                    let failure = CallFailure::new(ErrorReason::MEMORY, MEMORY_EXHAUSTED);
                    effects.push(SlotEffect::FailChild(child, failure));
                }
            }
        }
        self.begin_next(inner);
        inner.end_if_unwanted();
        Some(())
    }

    /// Answers a question that the process waits for.
    fn answer(&self, inner: &mut SlotInner, kind: u8, body: &[u8]) -> Option<()> {
        // One question at a time: the answers of others would be kept for it without end.
        if inner.outbox.waiting() > OUTBOX_BYTES_MAX {
            return None;
        }
        let variables = self.around.group.variables();
        let answer = match kind {
            message::READ => message::variable(variables.read(message::read_name(body)?).as_ref()),
            message::WRITE => {
                let write = message::read_write(body)?;
                if inner.writes.made() >= variables.limits().writes_per_step {
                    return None;
                }
                let result = variables.write(&write, inner.member.number());
                if matches!(result, Ok(WriteResult::Written(_))) {
                    inner.writes.push(write, variables.limits().total_bytes);
                }
                message::written(&result)
            }
            _ => {
                let bytes = message::read_charge(body)?;
                message::charged(self.charge_inner(inner, bytes))
            }
        };
        inner.outbox.push(answer.head);
        if let Some(value) = answer.value {
            inner.outbox.push_shared(value);
        }
        self.send_queued(inner);
        Some(())
    }

    /// Fails what was asked for, and ends the process.
    pub(super) fn fail(&self, failure: &CallFailure) {
        let mut effects = Vec::new();
        let mut inner = self.lock();
        inner.is_awaited = false;
        // Of a fork, which has not been asked for anything, the first outcome says it.
        if inner.asked.is_empty() && matches!(inner.state, SlotState::Good) {
            inner.fail_calls(1, failure.clone());
            inner.state = SlotState::Failed;
            inner.kill();
            effects.push(SlotEffect::Wake);
        } else {
            self.fail_inner(&mut inner, failure.clone(), &mut effects);
        }
        drop(inner);
        self.carry_out(effects);
    }

    fn fail_inner(
        &self,
        inner: &mut SlotInner,
        failure: CallFailure,
        effects: &mut Vec<SlotEffect>,
    ) {
        if matches!(inner.state, SlotState::Good) {
            let calls = inner.calls();
            if calls == 0 {
                inner.state = SlotState::Failing(failure);
            } else {
                inner.fail_calls(1, failure);
                inner.state = SlotState::Failed;
                if let Some(first) = inner.asked.iter().position(Asked::has_outcome) {
                    inner.asked.remove(first);
                }
            }
            effects.push(SlotEffect::Wake);
        }
        inner.fail_rest(effects);
        inner.kill();
    }

    fn carry_out(&self, effects: Vec<SlotEffect>) {
        for effect in effects {
            match effect {
                SlotEffect::Wake => self.around.waker.wake(),
                SlotEffect::FailChild(child, failure) => child.fail(&failure),
                SlotEffect::Forked(child) => child.begin_forked(),
            }
        }
    }

    /// The parent's process has cloned itself.
    fn begin_forked(&self) {
        let mut effects = Vec::new();
        let mut inner = self.lock();
        inner.is_awaited = false;
        if inner.live.is_none() {
            // It has ended meanwhile.
            self.fail_inner(&mut inner, died(), &mut effects);
        } else if inner.process.is_none() {
            self.set_deadline(&mut inner, Some(HELLO_TIME));
        }
        drop(inner);
        self.carry_out(effects);
    }
}

impl SlotInner {
    /// When the poller has something to do with the process, although it sends nothing.
    fn look_at(&self) -> Option<Instant> {
        self.slows_at.into_iter().chain(self.deadline).min()
    }

    /// How many outcomes are owed.
    fn calls(&self) -> usize {
        self.asked
            .iter()
            .filter(|asked| asked.has_outcome())
            .count()
    }

    /// The outcomes of so many calls of which the first fails with `failure`.
    pub(super) fn fail_calls(&mut self, calls: usize, failure: CallFailure) {
        let mut storage = self.writes.take();
        let failures = std::iter::once(failure).chain(std::iter::repeat(CallFailure::previous()));
        for failure in failures.take(calls) {
            self.outcomes.push_back(Outcome {
                result: Err(failure),
                report: StepReport {
                    storage: std::mem::take(&mut storage),
                    ..StepReport::default()
                },
            });
        }
    }

    /// Fails everything that is still asked for, after the first failure.
    fn fail_rest(&mut self, effects: &mut Vec<SlotEffect>) {
        for asked in std::mem::take(&mut self.asked) {
            match asked {
                Asked::Fork { slot: child, .. } => {
                    effects.push(SlotEffect::FailChild(child, CallFailure::previous()));
                }
                _ => self.fail_calls(1, CallFailure::previous()),
            }
        }
        self.running_since = None;
        self.deadline = None;
        self.slows_at = None;
    }

    /// Ends the process of a sequence that is gone, unless a fork is still to be made.
    pub(super) fn end_if_unwanted(&mut self) {
        let forks = self
            .asked
            .iter()
            .any(|asked| matches!(asked, Asked::Fork { .. }));
        if !matches!(self.state, SlotState::Good) || (self.dropped && !forks) {
            self.kill();
        }
    }

    fn kill(&mut self) {
        self.deadline = None;
        self.slows_at = None;
        match &self.process {
            // It may have ended already.
            Some(process) => drop(pidfd_send_signal(process, Signal::KILL)),
            // Not there yet: it finds the end of its socket, and is killed when it says hello.
            None => drop(rustix::net::shutdown(
                &self.socket,
                rustix::net::Shutdown::Write,
            )),
        }
    }
}

/// The end of the socket has come, and nothing has said why.
fn died() -> CallFailure {
    CallFailure::new(ErrorReason::RUNTIME_LOST, "the controller's process died")
}

/// The system gives no process.
pub(super) fn no_process(error: &dyn fmt::Display) -> CallFailure {
    let text = format!("no process for the controller: {error}");
    CallFailure::new(ErrorReason::LIMIT, text)
}

/// How long a process may take until it says hello: it is cloned, and a module loaded for it.
pub(super) const HELLO_TIME: Duration = Duration::from_secs(10);
/// A callback looks at its time in host functions too, and then says more than a kill; so it has this much longer.
pub(super) const KILL_TIME: Duration = Duration::from_millis(2);
/// What may wait to be sent while a process asks for more.
const OUTBOX_BYTES_MAX: usize = 16 << 20;
