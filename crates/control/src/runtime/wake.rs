//! [`StepWake`]: how the main channel waits for callbacks, and [`LaunchWaker`], which also continues an `instantiate`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use sapwood_proto::steer::StepWaker;

use super::sequence::Pace;
use super::side::SideQueue;
use crate::host::OutcomePoll;

/// Woken by controllers, waited on by the thread of the main channel.
#[derive(Debug, Default)]
pub(crate) struct StepWake {
    woken: AtomicBool,
    /// Held to notify and to begin a wait, so that no notification comes between a look at `woken` and the wait.
    waiting: Mutex<()>,
    changed: Condvar,
    /// Where controllers have processes, whose outcomes the thread of the main channel receives itself.
    processes: Option<OutcomePoll>,
    /// It waits for processes, and so not for `changed`.
    polling: AtomicBool,
}

impl StepWake {
    pub(crate) fn new(processes: Option<OutcomePoll>) -> Self {
        Self {
            processes,
            ..Self::default()
        }
    }

    fn poll(&self, processes: &OutcomePoll, until: Instant) {
        loop {
            // Before the look at `woken`: whoever sets that afterwards sees this.
            self.polling.store(true, Ordering::SeqCst);
            let is_woken = self.woken.swap(false, Ordering::SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            if is_woken || left.is_zero() {
                self.polling.store(false, Ordering::SeqCst);
                return;
            }
            processes.wait(left, || self.polling.store(false, Ordering::SeqCst));
        }
    }
}

impl StepWaker for StepWake {
    fn wake(&self) {
        // Whoever was woken already and has not looked yet finds everything: the results of a step come in groups.
        if self.woken.swap(true, Ordering::SeqCst) {
            return;
        }
        match &self.processes {
            Some(processes) => {
                if self.polling.load(Ordering::SeqCst) {
                    processes.wake();
                }
            }
            None => {
                let _held = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                self.changed.notify_one();
            }
        }
    }
}

impl Pace for StepWake {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn begin(&self) {
        if let Some(processes) = &self.processes {
            processes.begin();
        }
    }

    fn end(&self) {
        if let Some(processes) = &self.processes {
            processes.end();
        }
    }

    fn wait(&self, until: Instant) {
        if let Some(processes) = &self.processes {
            return self.poll(processes, until);
        }
        let mut held = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // A swap, which sees what was published before the last wake-up, although that one changed nothing.
        while !self.woken.swap(false, Ordering::AcqRel) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(held, left);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Wakes the side channel until the instance has begun, and the main channel from then on.
#[derive(Debug)]
pub(crate) struct LaunchWaker {
    step: Arc<StepWake>,
    side: Weak<SideQueue>,
    /// The number of the launch.
    number: u64,
    begun: AtomicBool,
}

impl LaunchWaker {
    pub(crate) fn new(step: Arc<StepWake>, side: &Arc<SideQueue>, number: u64) -> Self {
        Self {
            step,
            side: Arc::downgrade(side),
            number,
            begun: AtomicBool::new(false),
        }
    }

    /// The instance can be bound: from here on its outcomes are the main channel's.
    pub(crate) fn set_begun(&self) {
        self.begun.store(true, Ordering::Release);
    }
}

impl StepWaker for LaunchWaker {
    fn wake(&self) {
        if self.begun.load(Ordering::Acquire) {
            self.step.wake();
        } else if let Some(side) = self.side.upgrade() {
            side.begun(self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::host::tests::{P1, load, model, small, template_command};
    use crate::host::{
        Callback, Capabilities, Group, Host, Instance, Outcome, Start, VariablesLimits,
    };

    fn host() -> Host {
        let command = template_command("host::tests::in_processes::the_template_of_tests");
        Host::in_processes(small(), command).unwrap()
    }

    /// Waits as the main channel does.
    fn outcome(wake: &StepWake, instance: &mut Instance) -> Outcome {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(outcome) = instance.poll() {
                return outcome;
            }
            assert!(Instant::now() < until, "nothing happened for a minute");
            wake.wait(until);
        }
    }

    #[test]
    fn ai_701_a_thread_that_waits_for_processes_receives_what_they_send() {
        let host = host();
        let program = load(&host, &P1::default().text());
        let wake = Arc::new(StepWake::new(host.outcome_poll()));
        let start = |number| {
            let start = Start {
                model: model(),
                arg: "".into(),
                prompt: vec![0, number],
                group: Group::new(4, VariablesLimits::default()),
                capabilities: Capabilities::ALL,
                waker: Arc::clone(&wake) as _,
            };
            Instance::start(&host, &program, start)
        };
        let mut instances = [start(50), start(51), start(52)];
        // Nobody else listens from here on.
        wake.begin();
        for instance in &mut instances {
            assert!(outcome(&wake, instance).result.is_ok());
        }
        for instance in &mut instances {
            let fork_group = vec![3];
            instance.call_all([Callback::Pre, Callback::Mid { fork_group }]);
        }
        let mut clone = instances[0].fork().unwrap();
        clone.call(Callback::Pre);
        for instance in &mut instances {
            assert!(outcome(&wake, instance).result.is_ok());
            assert!(outcome(&wake, instance).result.is_ok());
        }
        assert!(outcome(&wake, &mut clone).result.is_ok());
        // And nobody but the poller's thread from here on.
        clone.call(Callback::Pre);
        wake.end();
        let bell = crate::host::tests::Bell::default();
        assert!(bell.wait(|| clone.poll()).result.is_ok());
    }

    #[test]
    fn a_wake_ends_a_wait_for_processes() {
        let host = host();
        let wake = StepWake::new(host.outcome_poll());
        wake.begin();
        let begun = Instant::now();
        for _ in 0..100 {
            std::thread::scope(|scope| {
                scope.spawn(|| wake.wake());
                wake.wait(begun + Duration::from_secs(60));
            });
        }
        assert!(begun.elapsed() < Duration::from_secs(60));
        // Nothing is left over: the next wait lasts as long as it may.
        let until = Instant::now() + Duration::from_millis(5);
        wake.wait(until);
        assert!(Instant::now() >= until);
    }
}
