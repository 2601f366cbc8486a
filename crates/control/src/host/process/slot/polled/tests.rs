//! A process that the test plays, while its poller waits for the lock.

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, getpriority_process, pidfd_open};
use sapwood_proto::steer::StepReport;

use super::*;
use crate::host::controller::Outcome;
use crate::host::group::{Group, GroupMark, VariablesLimits};
use crate::host::process::asked::AskedCall;
use crate::host::process::message;
use crate::host::process::outcome::write_outcome;
use crate::host::process::slot::{SlotState, SlotSurroundings};
use crate::host::process::stream::{MessageOutbox, RECEIVED_BYTES};
use crate::host::result::{ResultLimits, Returned};
use crate::host::tests::{Bell, small, template_command};
use crate::host::{CallFailure, Host};

struct Played {
    slot: Arc<ProcessSlot>,
    socket: OwnedFd,
    process: Child,
    /// The last of it: its template ends with it.
    _host: Host,
}

impl Played {
    /// A process that has said hello.
    fn new() -> Self {
        let command = template_command("host::process::tests::a_rogue_template");
        let host = Host::in_processes(small(), command).unwrap();
        let group = Group::new(4, VariablesLimits::default());
        let counted = host.enter(&group).unwrap();
        let around = SlotSurroundings {
            processes: Arc::clone(host.processes().unwrap()),
            host: host.clone(),
            group,
            waker: Arc::new(Bell::default()),
            limits: ResultLimits {
                vocabulary: 100,
                branches: 4,
            },
        };
        let (slot, socket) = ProcessSlot::make(around, counted).unwrap();
        let process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&process), PidfdFlags::empty()).unwrap();
        let played = Self {
            slot,
            socket,
            process,
            _host: host,
        };
        played.send(message::bare(message::HELLO), vec![pidfd]);
        Bell::default().wait(|| played.slot.lock().process.is_some().then_some(()));
        played
    }

    fn send(&self, message: Vec<u8>, descriptors: Vec<OwnedFd>) {
        let mut outbox = MessageOutbox::default();
        outbox.push_with(message, descriptors);
        assert!(outbox.send(self.socket.as_fd(), usize::MAX).unwrap());
    }

    fn answer_pre(&self) {
        let result = Ok(Returned::Pre {
            num_forks: 1,
            suspend: false,
            ff_tokens: Vec::new(),
            wait: None,
        });
        let report = StepReport::default();
        self.send(write_outcome(&Outcome { result, report }), Vec::new());
    }

    /// Asks for `pre`. While the result is kept the poller receives nothing.
    fn asked(&self) -> MutexGuard<'_, SlotInner> {
        let mut inner = self.slot.lock();
        inner.asked.push_back(Asked::Call {
            kind: AskedCall::Pre,
            late: Duration::from_secs(1),
            time: Duration::from_secs(2),
            mark: GroupMark::default(),
        });
        self.slot.begin_next(&mut inner);
        inner
    }

    fn look(&self, inner: &mut SlotInner, now: Instant) -> Vec<SlotEffect> {
        let mut effects = Vec::new();
        let mut buffer = vec![0; RECEIVED_BYTES];
        self.slot
            .end_if_late_inner(inner, (now, &mut buffer), &mut effects);
        effects
    }

    fn priority(&self) -> i32 {
        getpriority_process(Some(Pid::from_child(&self.process))).unwrap()
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn ai_441_an_outcome_that_arrived_before_the_deadline_counts() {
    let played = Played::new();
    let mut inner = played.asked();
    let deadline = inner.deadline.unwrap();
    played.answer_pre();
    let effects = played.look(&mut inner, deadline);
    assert!(matches!(effects[..], [SlotEffect::Wake]));
    assert!(matches!(inner.state, SlotState::Good));
    assert!(inner.outcomes.pop_front().unwrap().result.is_ok());
    assert!(inner.deadline.is_none());
    drop(inner);
    let mut inner = played.asked();
    let deadline = inner.deadline.unwrap();
    let effects = played.look(&mut inner, deadline);
    assert!(matches!(effects[..], [SlotEffect::Wake]));
    let failure: CallFailure = inner.outcomes.pop_front().unwrap().result.unwrap_err();
    assert_eq!(failure.reason, ErrorReason::TIMEOUT);
    assert!(matches!(inner.state, SlotState::Failed));
}

#[test]
fn ai_441_a_late_process_has_a_low_priority_until_its_callback_ends() {
    let played = Played::new();
    let usual = played.priority();
    let mut inner = played.asked();
    let late = inner.running_since.unwrap() + Duration::from_secs(1);
    assert_eq!(inner.look_at(), Some(late));
    played.look(&mut inner, late - Duration::from_millis(1));
    assert_eq!(played.priority(), usual);
    played.look(&mut inner, late);
    assert_eq!(played.priority(), usual.max(15));
    assert_eq!(inner.look_at(), inner.deadline);
    let deadline = inner.deadline.unwrap();
    played.answer_pre();
    played.look(&mut inner, deadline);
    assert!(inner.outcomes.pop_front().unwrap().result.is_ok());
    // Not everybody may raise a priority.
    let is_final = played.slot.around.processes.priority().is_final();
    let expected = if is_final { usual.max(15) } else { usual };
    assert_eq!(played.priority(), expected);
}
