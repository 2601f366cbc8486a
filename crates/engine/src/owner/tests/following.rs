//! Phases of requests without tokens, as their followers receive them.

use std::time::Duration;

use super::harness::{Bench, read, request_for};
use crate::RequestHandle;
use crate::api::GenerationRequest;
use crate::request_phase::{Follower, RequestPhase};
use crate::scripted::{Config as Script, Script as Name};

/// Ten tokens a second, one sequence at a time.
fn slow() -> Script {
    Script {
        tokens_per_s: 10.0,
        parallel: 1,
        ..Script::default()
    }
}

fn followed(bench: &Bench, mut request: GenerationRequest) -> (RequestHandle, Follower) {
    let follower = Follower::new();
    request.follower = Some(follower.clone());
    (bench.submit(request), follower)
}

/// Steps until this instant, at every wake-up time.
fn run_until(bench: &mut Bench, ms: u64) {
    let end = sapwood_proto::time::Time::from_millis(ms);
    while bench.now < end {
        let wake_at = bench.owner.step(bench.now).wake_at;
        let later = bench.now + Duration::from_millis(1);
        bench.now = wake_at.map_or(end, |at| at.max(later).min(end));
    }
}

fn ahead(phase: Option<RequestPhase>) -> Option<u32> {
    match phase {
        Some(RequestPhase::Waits { ahead, .. }) => Some(ahead),
        _ => None,
    }
}

#[test]
fn lm_921_queued_requests_report_how_many_are_ahead() {
    let mut bench = Bench::new(slow());
    let first = bench.submit(request_for("aaaaaaaaaaaaaaaaaaaa"));
    run_until(&mut bench, 50);
    let mut several = request_for("bbb");
    several.params.n = Some(3);
    let _several = bench.submit(several);
    let (_second, second_follower) = followed(&bench, request_for("bbbbb"));
    let mut urgent = request_for("c");
    urgent.params.priority = Some(1);
    let (_third, third_follower) = followed(&bench, urgent);
    run_until(&mut bench, 100);
    assert_eq!(second_follower.latest(), None, "it has only just arrived");
    run_until(&mut bench, 200);
    // A request counts once, however many choices it has; a higher priority is ahead of it.
    assert_eq!(ahead(second_follower.latest()), Some(2));
    assert_eq!(ahead(third_follower.latest()), Some(0));
    assert_eq!(third_follower.latest(), None, "nothing has happened since");
    // The phase is published again, and only the latest is retained.
    run_until(&mut bench, 700);
    assert_eq!(ahead(second_follower.latest()), Some(2));
    drop(first);
    run_until(&mut bench, 1_000);
    let Some(RequestPhase::Waits { ahead, eta }) = second_follower.latest() else {
        panic!("it is not reported as queued")
    };
    assert_eq!(ahead, 1, "the urgent request is ahead");
    let eta = eta.unwrap();
    assert!(
        eta > Duration::ZERO && eta < Duration::from_secs(2),
        "{eta:?}"
    );
}

#[test]
fn lm_921_prefill_progress_is_reported() {
    let script = Script {
        script: Name::Text,
        text: "x".to_owned(),
        batch_tokens: 100,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let mut prompt = request_for("");
    prompt.prompt = crate::api::Prompt::Tokens(vec![97; 1000]);
    let (mut handle, follower) = followed(&bench, prompt);
    let mut seen = Vec::new();
    for _ in 0..20 {
        // A decode call takes some time.
        bench.now = bench.now + Duration::from_millis(60);
        bench.owner.step(bench.now);
        if let Some(RequestPhase::Prefill { computed, prompt }) = follower.latest() {
            assert_eq!(prompt, 1000);
            seen.push(computed);
        }
    }
    assert!(seen.len() > 3 && seen.is_sorted(), "{seen:?}");
    assert!(
        seen.iter()
            .all(|computed| *computed <= 1000 && *computed % 100 == 0)
    );
    assert_eq!(read(&mut handle).text(), "x");
    assert_eq!(bench.settle().last().unwrap().wake_at, None);
    assert!(bench.owner.is_empty());
}

/// Two long outputs and cells for one and a half: one of them is preempted.
#[test]
fn lm_921_a_preempted_request_reports_it_and_continues() {
    let script = Script {
        script: Name::Tokens,
        count: 200,
        context_tokens: 250,
        cells: Some(300),
        kept_prefixes: 0,
        parallel: 2,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let (mut first, _) = followed(&bench, request_for("a"));
    let (mut second, follower) = followed(&bench, request_for("b"));
    bench.step();
    let mut displaced = 0;
    let mut reports = 0;
    while !bench.owner.is_empty() && reports < 10_000 {
        bench.now = bench.now + Duration::from_millis(20);
        let report = bench.owner.step(bench.now);
        displaced += report.preempted.len();
        reports += 1;
        if displaced > 0 && matches!(follower.latest(), Some(RequestPhase::Displaced { .. })) {
            break;
        }
    }
    assert!(displaced > 0, "no sequence was preempted");
    assert!(
        reports < 10_000 && !bench.owner.is_empty(),
        "the preemption was not reported"
    );
    let answers = [&mut first, &mut second].map(|handle| {
        bench.settle();
        read(handle).usage.unwrap().completion_tokens
    });
    assert_eq!(answers, [201, 201]);
}

/// Without a follower, or after the last one is dropped, no timer is set.
#[test]
fn lm_921_without_a_follower_no_timer_wakes_the_owner() {
    let hang = || {
        let script = r#"{"script": "steps", "rules": [{"steps": [{"hang": true}]}]}"#;
        let script: Script = serde_json::from_str(script).unwrap();
        Bench::new(script)
    };
    let mut bench = hang();
    let _hangs = bench.submit(request_for("x"));
    bench.step();
    let queue_timeout = bench.step().wake_at;
    let mut bench = hang();
    let (hangs, follower) = followed(&bench, request_for("x"));
    bench.step();
    let soon = bench.step().wake_at.unwrap();
    assert!(queue_timeout.is_none_or(|at| soon < at));
    bench.now = soon;
    let before = follower.latest();
    bench.step();
    assert_eq!(
        (before.is_none(), follower.latest().is_some()),
        (true, true)
    );
    drop(hangs);
    bench.now = bench.now + Duration::from_secs(1);
    bench.step();
    assert_eq!(bench.step().wake_at, None);
    assert!(bench.owner.is_empty());
}
