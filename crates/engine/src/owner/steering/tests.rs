//! One steering alone, with scripted steerers.

use std::sync::Arc;

use sapwood_proto::steer::{Mask, StepWaker};

use super::*;

const RULES: SteerRules = SteerRules {
    deadline_budget: Duration::from_millis(10),
    vocabulary: 8,
};

/// Returns the results in order; `None` is a `mid` without a result yet. Panics in `mid_begin` if told to.
#[derive(Default)]
struct Script {
    mids: Vec<Option<Mid>>,
    panics: bool,
}

impl Steer for Script {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let fast_forward = Vec::new();
        Ok(Some(Pre::Run { fast_forward }))
    }

    fn mid_begin(&mut self, _group: &[u32]) {
        assert!(!self.panics, "scripted panic");
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        Ok(self.mids.pop().flatten())
    }

    fn post(&mut self, _appended: Appended<'_>) -> Steered<Post> {
        Ok(Post::Continue)
    }

    fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
        Ok(Box::new(Self::default()))
    }
}

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

#[test]
fn a_round_is_pre_then_mid_then_pre_again() {
    let panics = Counter::default();
    let mids = vec![Some(Mid::Stop)];
    let mut steering = Steering::new(Box::new(Script {
        mids,
        panics: false,
    }));
    steering.begin_mid(at(0), &panics);
    assert!(!steering.is_in_mid(), "pre comes first");
    assert!(steering.pre(&panics).is_some());
    assert!(steering.pre(&panics).is_none(), "once in a round");
    steering.begin_mid(at(0), &panics);
    assert!(steering.is_in_mid());
    let mid = steering.poll_mid(at(1), RULES, &panics);
    assert!(matches!(mid, Ok(Some(Mid::Stop))));
    assert!(steering.pre(&panics).is_some(), "the next round");
}

#[test]
fn ai_812_lateness_counts_from_the_first_poll_that_finds_it() {
    let panics = Counter::default();
    let mut steering = Steering::new(Box::new(Script::default()));
    let _ = steering.pre(&panics);
    steering.begin_mid(at(0), &panics);
    // A decode call of a minute is not the steerer's fault.
    for ms in [60_000, 60_099] {
        let mid = steering.poll_mid(at(ms), RULES, &panics);
        assert!(matches!(mid, Ok(None)));
    }
    let late = steering.poll_mid(at(60_100), RULES, &panics);
    assert!(matches!(late, Err(failure) if failure.reason == "timeout"));
}

#[test]
fn a_panic_before_the_decode_call_is_reported_after_it() {
    let panics = Counter::default();
    let mut steering = Steering::new(Box::new(Script {
        mids: Vec::new(),
        panics: true,
    }));
    let _ = steering.pre(&panics);
    steering.begin_mid(at(0), &panics);
    let mid = steering.poll_mid(at(1), RULES, &panics);
    assert!(matches!(mid, Err(failure) if failure.reason == "trap"));
    assert_eq!(panics.get(), 1);
}

#[test]
fn a_branch_goes_on_in_the_round_of_its_parent() {
    let panics = Counter::default();
    let mut steering = Steering::new(Box::new(Script::default()));
    let mut branch = steering.branch(1, &panics).unwrap();
    assert!(branch.pre(&panics).is_none());
    branch.begin_mid(at(0), &panics);
    assert!(branch.is_in_mid());
}

#[test]
fn results_outside_the_vocabulary_are_refused() {
    let refused = |mid| {
        let panics = Counter::default();
        let mids = vec![Some(mid)];
        let mut steering = Steering::new(Box::new(Script {
            mids,
            panics: false,
        }));
        let _ = steering.pre(&panics);
        steering.begin_mid(at(0), &panics);
        steering.poll_mid(at(1), RULES, &panics).is_err()
    };
    let sample = |mask: Option<Mask>, bias, temperature| {
        Mid::One(Branch::Sample(Sample {
            mask: mask.map(Arc::new),
            bias,
            temperature,
            splices: Vec::new(),
        }))
    };
    assert!(!refused(sample(
        Some(Mask::all(8)),
        vec![(1, 0.5)],
        Some(1.0)
    )));
    assert!(refused(sample(Some(Mask::all(9)), Vec::new(), None)));
    assert!(refused(sample(None, vec![(1, f32::NAN)], None)));
    assert!(refused(sample(None, Vec::new(), Some(-1.0))));
}
