//! Masks are computed during the decode call (AI-811), with a clock that only the model advances.

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::steer::{Appended, Mid, Post, Pre, Steer, Steered, StepWaker, Token};
use sapwood_proto::time::Time;

use super::super::step_clock::StepClock;
use super::harness::{Bench, TestClock, read, request_for};
use super::hooked_model::{HookedModel, OnDecode};
use super::probe::{Probe, free, run};
use crate::Config;
use crate::model::BatchEntry;
use crate::scripted::Config as Script;

/// An engine whose decode calls take 20 ms on this clock.
fn slow_bench(clock: &TestClock) -> Bench {
    let advanced = clock.clone();
    let hook = OnDecode(move |_: &[BatchEntry]| {
        advanced.go_to(advanced.now() + Duration::from_millis(20));
    });
    let model = HookedModel::new(Script::default(), hook);
    let mut bench = Bench::over(Box::new(model), Config::default());
    let received = clock.clone();
    let waited = clock.clone();
    let wait = move |most, _decode| waited.go_to(waited.now() + most);
    bench.owner.clock = StepClock::running(move || received.now(), wait);
    bench
}

/// Milliseconds between two steps with tokens, until so many requests have ended.
fn gaps(bench: &mut Bench, clock: &TestClock, mut requests: usize) -> Vec<u128> {
    let mut appended = Vec::new();
    loop {
        let report = bench.owner.step(clock.now());
        if report.appended > 0 {
            appended.push(clock.now());
        }
        requests -= report.finished.len();
        if requests == 0 {
            break;
        }
        clock.go_to(report.wake_at.unwrap());
        assert!(clock.now() < Time::from_millis(10_000), "{report:?}");
    }
    let pairs = appended.windows(2);
    pairs
        .map(|pair| pair[1].since(pair[0]).as_millis())
        .collect()
}

/// Milliseconds between two tokens if the decode call takes 20 and the mask `mask_ms`.
fn between_tokens(mask_ms: u64) -> Vec<u128> {
    let clock = TestClock::default();
    let mut bench = slow_bench(&clock);
    let mut probe = Probe::new();
    probe.clock = clock.clone();
    probe.slow = Duration::from_millis(mask_ms);
    let mut request = request_for("abcdef");
    request.steer = Some(Box::new(probe));
    request.params.max_tokens = Some(6);
    let mut handle = bench.submit(request);
    let gaps = gaps(&mut bench, &clock, 1);
    assert_eq!(read(&mut handle).text(), "abcdef");
    gaps
}

#[test]
fn ai_811_the_mask_is_computed_while_the_model_computes() {
    // One after the other they would take 35 ms.
    assert_eq!(between_tokens(15), [20; 5]);
    // Only the excess of a slow mask over the decode call is waited for.
    let longer = between_tokens(30);
    assert!(
        longer.iter().all(|ms| (30..=31).contains(ms)) && longer.len() == 5,
        "{longer:?}"
    );
}

/// The result of `pre` takes half a millisecond, as does that of `mid`.
struct SlowPre {
    clock: TestClock,
    since: Option<Time>,
}

impl SlowPre {
    fn is_ready(&mut self) -> bool {
        let since = *self.since.get_or_insert_with(|| self.clock.now());
        let ready = self.clock.now().since(since) >= Duration::from_micros(500);
        self.since = self.since.filter(|_| !ready);
        ready
    }
}

impl Steer for SlowPre {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        Ok(self.is_ready().then(run))
    }

    fn mid_begin(&mut self, _group: &[u32]) {}

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        Ok(Some(free()))
    }

    fn post(&mut self, _appended: Appended<'_>) -> Steered<Post> {
        Ok(Post::Continue)
    }

    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        unreachable!("it never forks")
    }
}

/// Without the grace the sequence would miss every other decode call.
#[test]
fn d_49_a_step_waits_a_little_for_a_result_of_pre() {
    let clock = TestClock::default();
    let mut bench = slow_bench(&clock);
    let mut request = request_for("abcdef");
    request.params.max_tokens = Some(6);
    request.steer = Some(Box::new(SlowPre {
        clock: clock.clone(),
        since: None,
    }));
    let mut steered = bench.submit(request);
    let mut plain = request_for("abcdefghijkl");
    plain.params.max_tokens = Some(12);
    let _plain = bench.submit(plain);
    let mut decodes = Vec::new();
    for _ in 0..7 {
        let report = bench.owner.step(clock.now());
        decodes.push(report.decoded.len());
        clock.go_to(report.wake_at.unwrap());
    }
    assert_eq!(read(&mut steered).text(), "abcdef");
    // The first step has no decode call before it that the grace could be measured by.
    assert_eq!(decodes, [0, 1, 2, 2, 2, 2, 2]);
}

/// A steerer that never has a result delays the others by the grace of a step at most, and only until it is late.
#[test]
fn ai_812_others_are_sampled_in_time_beside_a_steerer_that_never_ends() {
    let clock = TestClock::default();
    let mut bench = slow_bench(&clock);
    let mut probe = Probe::new();
    probe.clock = clock.clone();
    probe.slow = Duration::from_secs(3_600);
    let mut request = request_for("endless");
    request.steer = Some(Box::new(probe));
    let mut endless = bench.submit(request);
    let mut plain = request_for("abcdefghijklmnopqrstuvwxyz");
    plain.params.max_tokens = Some(26);
    let mut plain = bench.submit(plain);
    let gaps = gaps(&mut bench, &clock, 2);
    assert_eq!(read(&mut plain).text(), "abcdefghijklmnopqrstuvwxyz");
    let cause = read(&mut endless).error.unwrap();
    assert_eq!(
        (cause.code.name(), cause.reason.name()),
        ("controller-failed", "timeout")
    );
    assert!(
        gaps.len() >= 25 && gaps.iter().all(|&ms| ms == 20 || ms == 21),
        "{gaps:?}"
    );
    assert!(gaps.iter().filter(|&&ms| ms == 21).count() <= 2, "{gaps:?}");
}
