//! Steerers that make their sequences wait: suspended ones, deadlocks, and late results.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sapwood_proto::steer::{Appended, Mid, Post, Pre, Steer, Steered, StepWaker, Token};

use super::harness::{Bench, read, request_for};
use super::probe::{Probe, free, noop, run};
use super::steering::{echo, error_of, steered};
use crate::scripted::Config as Script;

/// Suspends while its flag is set.
struct Waiter(Arc<Mutex<bool>>, Probe);

impl Steer for Waiter {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        if *self.0.lock().unwrap() {
            Ok(Some(Pre::Suspend))
        } else {
            self.1.pre()
        }
    }
    fn mid_begin(&mut self, group: &[u32]) {
        self.1.mid_begin(group);
    }
    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        self.1.mid_poll()
    }
    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        self.1.post(appended)
    }
    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(Self(Arc::default(), self.1.clone())))
    }
}

#[test]
fn ai_813_a_suspended_sequence_is_not_decoded_and_four_steps_are_a_deadlock() {
    let flag = Arc::new(Mutex::new(false));
    let mut bench = echo();
    let mut request = request_for("abcd");
    request.params.max_tokens = Some(4);
    request.steer = Some(Box::new(Waiter(Arc::clone(&flag), Probe::new())));
    let mut handle = bench.submit(request);
    let batches = |bench: &mut Bench, steps: u32| -> Vec<usize> {
        (0..steps).map(|_| bench.step().batch().count()).collect()
    };
    assert_eq!(batches(&mut bench, 2), [1, 1]);
    *flag.lock().unwrap() = true;
    assert_eq!(batches(&mut bench, 3), [0, 0, 0]);
    assert!(
        bench.step().wake_at.is_none() || read(&mut handle).error.is_some(),
        "the fourth is one too many"
    );
    let mut request = request_for("abcd");
    *flag.lock().unwrap() = true;
    request.params.max_tokens = Some(2);
    request.steer = Some(Box::new(Waiter(Arc::clone(&flag), Probe::new())));
    let mut handle = bench.submit(request);
    let report = bench.step();
    assert_eq!(report.suspended.len(), 1);
    assert!(report.wake_at.unwrap() > bench.now, "it does not spin");
    batches(&mut bench, 2);
    *flag.lock().unwrap() = false;
    bench.settle();
    assert_eq!(
        read(&mut handle).text(),
        "ab",
        "three steps are not a deadlock"
    );
}

/// Waits while its flag is set, and counts how often it was asked.
#[derive(Clone)]
struct NamedWait {
    flag: Arc<Mutex<bool>>,
    /// It waits in `mid`, as a P2 module does.
    in_mid: bool,
    probe: Probe,
}

impl Steer for NamedWait {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        if *self.flag.lock().unwrap() {
            return Ok(Some(Pre::Wait));
        }
        self.probe.pre()
    }
    fn mid_begin(&mut self, group: &[u32]) {
        self.probe.mid_begin(group);
    }
    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        if std::mem::take(&mut self.in_mid) {
            *self.flag.lock().unwrap() = true;
            return Ok(Some(noop()));
        }
        self.probe.mid_poll()
    }
    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        self.probe.post(appended)
    }
    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(self.clone()))
    }
}

#[test]
fn ai_1005_a_sequence_that_waits_is_no_deadlock_for_three_seconds() {
    for in_mid in [false, true] {
        let flag = Arc::new(Mutex::new(!in_mid));
        let mut bench = echo();
        let request = |bench: &Bench| {
            let mut request = request_for("abcd");
            request.params.max_tokens = Some(2);
            request.steer = Some(Box::new(NamedWait {
                flag: Arc::clone(&flag),
                in_mid,
                probe: Probe::new(),
            }));
            bench.submit(request)
        };
        let mut handle = request(&bench);
        for step in 0..2_500 {
            let report = bench.step();
            let decoded = usize::from(in_mid && step == 0);
            assert_eq!(report.batch().count(), decoded, "{in_mid} {step}");
            assert_eq!(report.suspended.len(), 1 - decoded, "{in_mid} {step}");
            assert!(report.wake_at.is_some(), "{in_mid} {step}");
        }
        *flag.lock().unwrap() = false;
        bench.settle();
        assert_eq!(read(&mut handle).text(), "ab", "{in_mid}");
        *flag.lock().unwrap() = !in_mid;
        let mut handle = request(&bench);
        let begun = bench.now;
        let answer = loop {
            bench.step();
            let answer = read(&mut handle);
            if answer.error.is_some() {
                break answer;
            }
        };
        assert_eq!(error_of(&answer).0, "deadlock", "{in_mid}");
        let waited = bench.now.since(begun);
        assert!((3_000..3_100).contains(&waited.as_millis()), "{waited:?}");
    }
}

#[test]
fn ai_1005_a_sequence_that_waits_is_no_deadlock_while_a_sibling_runs() {
    let flag = Arc::new(Mutex::new(true));
    let mut bench = echo();
    let mut request = request_for(&"x".repeat(20));
    request.params.max_tokens = Some(20);
    request.params.n = Some(2);
    request.steer = Some(Box::new(OneWaits(NamedWait {
        flag: Arc::clone(&flag),
        in_mid: false,
        probe: Probe::new(),
    })));
    let mut handle = bench.submit(request);
    for _ in 0..15 {
        bench.step_after(Duration::from_secs(1));
    }
    assert_eq!(read(&mut handle).error, None);
    *flag.lock().unwrap() = false;
    bench.settle();
    let answer = read(&mut handle);
    assert_eq!(answer.error, None);
}

/// The first sequence waits, its forks do not.
struct OneWaits(NamedWait);

impl Steer for OneWaits {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        self.0.pre()
    }
    fn mid_begin(&mut self, group: &[u32]) {
        self.0.mid_begin(group);
    }
    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        self.0.mid_poll()
    }
    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        self.0.post(appended)
    }
    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(NamedWait {
            flag: Arc::default(),
            ..self.0.clone()
        }))
    }
}

/// The parent waits for its child, which waits for the parent's slot.
#[test]
fn d_49_a_suspended_parent_yields_its_slot_to_its_child() {
    for parallel in [1, 2] {
        let done = Arc::new(Mutex::new(false));
        let family = Family {
            done: Arc::clone(&done),
            child: false,
            rounds: 0,
        };
        let mut bench = Bench::new(Script {
            parallel,
            ..Script::default()
        });
        let mut request = request_for("abc");
        request.steer = Some(Box::new(family));
        request.params.max_tokens = Some(3);
        let answer = bench.answer(request);
        assert_eq!(answer.error, None, "{parallel}");
        let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
        assert_eq!(texts, ["abc", "abc"], "{parallel}");
        assert!(*done.lock().unwrap());
    }
}

/// The first choice waits for the second, which waits for the prompt that the first would compute.
#[test]
fn d_49_a_suspended_choice_does_not_hold_up_those_that_share_its_prompt() {
    for parallel in [1, 2] {
        let done = Arc::new(Mutex::new(false));
        let first = Family {
            done: Arc::clone(&done),
            child: false,
            // Past the round in which it forks.
            rounds: 1,
        };
        let mut bench = Bench::new(Script {
            parallel,
            ..Script::default()
        });
        let mut request = request_for("abc");
        request.params.n = Some(2);
        request.params.max_tokens = Some(3);
        request.timeout = Some(Duration::from_secs(1));
        request.steer = Some(Box::new(first));
        let answer = bench.answer(request);
        assert_eq!(answer.error, None, "{parallel}");
        let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
        assert_eq!(texts, ["abc", "abc"], "{parallel}");
    }
}

/// A parent that forks once and then waits until its child has produced output.
#[derive(Clone)]
struct Family {
    done: Arc<Mutex<bool>>,
    child: bool,
    rounds: u32,
}

impl Steer for Family {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        self.rounds += 1;
        if !self.child && self.rounds == 1 {
            return Ok(Some(Pre::Fork(2)));
        }
        if !self.child && !*self.done.lock().unwrap() {
            return Ok(Some(Pre::Suspend));
        }
        Ok(Some(run()))
    }

    fn mid_begin(&mut self, _group: &[u32]) {}

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        Ok(Some(free()))
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        if self.child && appended.tokens.contains(&Token::from(b'c')) {
            *self.done.lock().unwrap() = true;
        }
        Ok(Post::Continue)
    }

    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        let child = Self {
            child: true,
            ..self.clone()
        };
        Ok(Box::new(child))
    }
}

/// Only steps in a row count, also if no sequence of the engine is suspended in the steps between.
#[test]
fn ai_813_suspensions_that_do_not_follow_each_other_are_no_deadlock() {
    let flag = Arc::new(Mutex::new(false));
    let mut bench = echo();
    let mut request = request_for("abcdefgh");
    request.params.max_tokens = Some(8);
    request.steer = Some(Box::new(Waiter(Arc::clone(&flag), Probe::new())));
    let mut handle = bench.submit(request);
    for _ in 0..8 {
        *flag.lock().unwrap() = true;
        assert_eq!(bench.step().suspended.len(), 1);
        *flag.lock().unwrap() = false;
        assert_eq!(bench.step().batch().count(), 1);
    }
    assert_eq!(read(&mut handle).text(), "abcdefgh");
}

/// A sequence that does nothing in its steps does not go on for ever either. AI-507: late runtimes answer so.
#[test]
fn ai_813_noops_without_end_are_a_deadlock() {
    let mut probe = Probe::new();
    probe.mid = |_| Ok(Some(noop()));
    let mut bench = echo();
    let mut handle = bench.submit(steered("ab", &probe));
    let reports = bench.settle();
    assert_eq!(error_of(&read(&mut handle)).0, "deadlock");
    assert!(
        reports.len() >= 10,
        "ten late answers of a runtime are no deadlock"
    );
}

/// The steerer that others wait for is late, and not suspended.
#[test]
fn ai_813_late_steps_do_not_count_as_suspended() {
    let mut bench = echo();
    let mut probe = Probe::new();
    probe.pre = |round| Ok(if round == 1 { Pre::Fork(2) } else { run() });
    probe.slow = Duration::from_millis(30);
    probe.clock = bench.clock.clone();
    let mut request = request_for("abcd");
    request.params.max_tokens = Some(3);
    let first = LateFamily(probe, false, Arc::default());
    request.steer = Some(Box::new(first));
    let mut handle = bench.submit(request);
    let suspended: usize = bench
        .settle()
        .iter()
        .map(|report| report.suspended.len())
        .sum();
    assert!(
        suspended > 10,
        "the parent waits for its child: {suspended}"
    );
    let answer = read(&mut handle);
    assert_eq!(answer.error, None);
    let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
    assert_eq!(texts, ["abc", "abc"]);
}

/// A parent that is suspended until its child has ended; all results are late.
struct LateFamily(Probe, bool, Arc<Mutex<bool>>);

impl Steer for LateFamily {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let waits = !self.1 && *self.2.lock().unwrap();
        if waits {
            Ok(Some(Pre::Suspend))
        } else {
            self.0.pre()
        }
    }

    fn mid_begin(&mut self, group: &[u32]) {
        self.0.mid_begin(group);
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        self.0.mid_poll()
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        if self.1 && appended.tokens == [Token::from(b'c')] {
            *self.2.lock().unwrap() = false;
        }
        self.0.post(appended)
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        *self.2.lock().unwrap() = true;
        let Self(probe, _, waits) = self;
        let mut child = probe.clone();
        child.pre = |_| Ok(run());
        assert_eq!(index, 1);
        Ok(Box::new(Self(child, true, Arc::clone(waits))))
    }
}

#[test]
fn a_deadlock_is_reported_with_its_reason() {
    let mut probe = Probe::new();
    probe.pre = |_| Ok(Pre::Suspend);
    let answer = echo().answer(steered("ab", &probe));
    assert_eq!(error_of(&answer).0, "deadlock");
}

#[test]
fn ai_812_a_late_steerer_keeps_its_row_and_does_not_delay_others() {
    let mut probe = Probe::new();
    probe.slow = Duration::from_millis(3);
    let mut bench = echo();
    probe.clock = bench.clock.clone();
    let mut slow = steered("ab", &probe);
    slow.params.max_tokens = Some(2);
    let (mut slow, mut quick) = (bench.submit(slow), bench.submit(request_for("0123456789")));
    let mut batches = Vec::new();
    for _ in 0..6 {
        let report = bench.step();
        batches.push((report.batch().collect::<Vec<_>>(), report.late));
    }
    let expected = [
        (vec![0, 1], vec![0]),
        (vec![1], vec![0]),
        (vec![1], vec![0]),
        // The row of the first decode call is used three steps later, without another one; then the next round begins.
        (vec![1], vec![]),
        (vec![0, 1], vec![0]),
    ];
    let batches: Vec<(Vec<u64>, Vec<u64>)> = batches
        .into_iter()
        .map(|(mut batch, late)| {
            batch.sort_unstable();
            (batch, late)
        })
        .collect();
    assert_eq!(&batches[..5], expected);
    bench.settle();
    assert_eq!(
        (read(&mut slow).text(), read(&mut quick).text()),
        ("ab", "0123456789")
    );
}

#[test]
fn ai_812_d_49_lateness_is_measured_in_time_and_not_in_steps() {
    let late = |step_ms: u64| {
        let mut probe = Probe::new();
        probe.slow = Duration::from_secs(3600);
        let mut bench = echo();
        probe.clock = bench.clock.clone();
        let mut handle = bench.submit(steered("ab", &probe));
        let mut steps = 0;
        loop {
            bench.step_after(Duration::from_millis(step_ms));
            steps += 1;
            let answer = read(&mut handle);
            if answer.error.is_some() {
                return (steps, error_of(&answer).0.to_owned());
            }
        }
    };
    // The first step begins `mid`, the second finds it late, and 250 ms later it fails.
    assert_eq!(late(30), (2 + 9, "timeout".to_owned()));
    // It is late from the 25th millisecond on.
    assert_eq!(late(5), (6 + 50, "timeout".to_owned()));
    assert_eq!(late(1), (26 + 250, "timeout".to_owned()));
    // A single long decode call is not the steerer's fault.
    assert_eq!(late(10_000), (3, "timeout".to_owned()));
}
