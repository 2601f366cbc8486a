//! One steering alone, with scripted steerers.

use std::sync::Arc;

use sapwood_proto::steer::{ConditionalSplice, Mask, Splice, StepWaker, VariableWrite};

use super::*;

const RULES: SteerRules = SteerRules {
    deadline_budget: Duration::from_millis(10),
    vocabulary: 8,
};

/// Returns the results in order; `None` is a call without a result yet, and an empty list has no more of them.
#[derive(Default)]
struct Script {
    pres: Vec<Option<Pre>>,
    mids: Vec<Option<Mid>>,
    reports: Vec<StepReport>,
    /// The groups that `mid_begin` received.
    groups: Arc<std::sync::Mutex<Vec<Vec<u32>>>>,
    panics: bool,
    limits_itself: bool,
}

impl Steer for Script {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let fast_forward = Vec::new();
        Ok(match self.pres.pop() {
            Some(pre) => pre,
            None => Some(Pre::Run { fast_forward }),
        })
    }

    fn mid_begin(&mut self, group: &[u32]) {
        assert!(!self.panics, "scripted panic");
        self.groups.lock().unwrap().push(group.to_vec());
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

    fn limits_itself(&self) -> bool {
        self.limits_itself
    }

    fn take_report(&mut self) -> Option<StepReport> {
        self.reports.pop()
    }
}

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn steering(script: Script, panics: &Counter) -> Steering {
    Steering::new(Box::new(script), true, panics)
}

fn runs(pre: Steered<Option<Pre>>) -> bool {
    matches!(pre, Ok(Some(Pre::Run { .. })))
}

#[test]
fn a_round_is_pre_then_mid_then_pre_again() {
    let panics = Counter::default();
    let script = Script {
        mids: vec![Some(Mid::Stop)],
        ..Script::default()
    };
    let mut steering = steering(script, &panics);
    steering.begin_mid(at(0), &panics);
    assert!(!steering.is_in_mid(), "pre comes first");
    assert!(runs(steering.pre(at(0), RULES, &panics)));
    let again = steering.pre(at(0), RULES, &panics);
    assert_eq!(again, Ok(None), "once in a round");
    steering.begin_mid(at(0), &panics);
    assert!(steering.is_in_mid());
    let mid = steering.poll_mid(at(1), RULES, &panics);
    assert!(matches!(mid, Ok(Some(Mid::Stop))));
    assert!(runs(steering.pre(at(1), RULES, &panics)), "the next round");
}

#[test]
fn d_49_pre_is_called_until_it_has_a_result() {
    let panics = Counter::default();
    let script = Script {
        pres: vec![Some(Pre::Suspend), None, None],
        ..Script::default()
    };
    let mut steering = steering(script, &panics);
    for ms in [0, 1] {
        assert_eq!(steering.pre(at(ms), RULES, &panics), Ok(None));
        assert!(steering.is_in_pre() && !steering.is_suspended());
    }
    let pre = steering.pre(at(2), RULES, &panics);
    assert_eq!(pre, Ok(Some(Pre::Suspend)));
    assert!(steering.is_suspended() && !steering.is_in_pre());
}

#[test]
fn ai_812_lateness_counts_from_the_first_poll_that_finds_it() {
    let panics = Counter::default();
    let late = |failure: Steered<bool>| {
        let failure = failure.unwrap_err();
        assert_eq!(failure.reason, "timeout");
    };
    let mut in_mid = steering(Script::default(), &panics);
    let _ = in_mid.pre(at(0), RULES, &panics);
    in_mid.begin_mid(at(0), &panics);
    let mut in_pre = steering(
        Script {
            pres: vec![None; 4],
            ..Script::default()
        },
        &panics,
    );
    let _ = in_pre.pre(at(0), RULES, &panics);
    // A decode call of a minute is not the steerer's fault.
    for ms in [60_000, 60_099] {
        let mid = in_mid.poll_mid(at(ms), RULES, &panics);
        assert!(matches!(mid, Ok(None)) && in_mid.is_late());
        let pre = in_pre.pre(at(ms), RULES, &panics);
        assert!(matches!(pre, Ok(None)) && in_pre.is_late());
    }
    let mid = in_mid.poll_mid(at(60_100), RULES, &panics);
    late(mid.map(|mid| mid.is_some()));
    let pre = in_pre.pre(at(60_100), RULES, &panics);
    late(pre.map(|pre| pre.is_some()));
    // Each tenth that was seen is logged once.
    let report = in_mid.take_report(&panics).unwrap();
    let lines = [1, 10].map(|times| format!("⏲ timeout [deadline: 10ms; step {times}/10]\n"));
    assert_eq!(report.logs, lines.concat());
}

#[test]
fn ai_851_a_steerer_with_limits_of_its_own_is_waited_for() {
    let panics = Counter::default();
    let script = Script {
        mids: vec![Some(Mid::Stop), None, None, None],
        limits_itself: true,
        ..Script::default()
    };
    let mut steering = steering(script, &panics);
    let _ = steering.pre(at(0), RULES, &panics);
    steering.begin_mid(at(0), &panics);
    for ms in [10, 110, 60_000] {
        let mid = steering.poll_mid(at(ms), RULES, &panics);
        assert!(matches!(mid, Ok(None)) && steering.is_late());
    }
    let mid = steering.poll_mid(at(60_001), RULES, &panics);
    assert!(matches!(mid, Ok(Some(Mid::Stop))));
}

#[test]
fn a_panic_before_the_decode_call_is_reported_after_it() {
    let panics = Counter::default();
    let script = Script {
        panics: true,
        ..Script::default()
    };
    let mut steering = steering(script, &panics);
    let _ = steering.pre(at(0), RULES, &panics);
    steering.begin_mid(at(0), &panics);
    let mid = steering.poll_mid(at(1), RULES, &panics);
    assert!(matches!(mid, Err(failure) if failure.reason == "trap"));
    assert_eq!(panics.get(), 1);
}

#[test]
fn a_branch_goes_on_in_the_round_of_its_parent() {
    let panics = Counter::default();
    let script = Script {
        pres: vec![Some(Pre::Fork(2))],
        ..Script::default()
    };
    let mut parent = steering(script, &panics);
    parent.temperature = Some(0.5);
    let _ = parent.pre(at(0), RULES, &panics);
    let mut branch = parent.branch(1, &panics).unwrap();
    assert_eq!(branch.temperature, Some(0.5));
    assert_eq!(branch.pre(at(0), RULES, &panics), Ok(None));
    branch.begin_mid(at(0), &panics);
    assert!(branch.is_in_mid());
}

#[test]
fn ai_503_the_group_of_a_fork_is_for_the_next_mid_alone() {
    let panics = Counter::default();
    let groups = Arc::default();
    let script = Script {
        mids: vec![Some(Mid::Stop); 2],
        groups: Arc::clone(&groups),
        ..Script::default()
    };
    let mut steering = steering(script, &panics);
    steering.bind(7, &panics);
    steering.set_group(Arc::new([3, 7]));
    for _ in 0..2 {
        let _ = steering.pre(at(0), RULES, &panics);
        steering.begin_mid(at(0), &panics);
        let _ = steering.poll_mid(at(0), RULES, &panics);
    }
    assert_eq!(*groups.lock().unwrap(), [vec![3, 7], vec![7]]);
}

#[test]
fn reports_without_content_add_their_time_to_the_next() {
    let panics = Counter::default();
    let report = |logs: &str, micros| StepReport {
        logs: logs.to_owned(),
        micros,
        ..StepReport::default()
    };
    let write = StepReport {
        storage: vec![VariableWrite {
            name: "v".to_owned(),
            value: vec![1],
            append: false,
            when_version_is: None,
        }],
        ..StepReport::default()
    };
    // Taken from the end.
    let reports = vec![
        write.clone(),
        report("b", 5),
        report("", 30),
        report("", 10),
    ];
    let script = Script {
        reports,
        ..Script::default()
    };
    let mut steering = steering(script, &panics);
    let mut taken = || steering.take_report(&panics);
    assert_eq!((taken(), taken()), (None, None));
    assert_eq!(taken(), Some(report("b", 45)));
    assert_eq!((taken(), taken()), (Some(write), None));
}

#[test]
fn noops_without_end_count_as_suspended() {
    let panics = Counter::default();
    let noop = || Some(Mid::One(Branch::Noop));
    let script = Script {
        mids: std::iter::once(Some(Mid::Stop))
            .chain((0..=NOOPS_MAX).map(|_| noop()))
            .collect(),
        ..Script::default()
    };
    let mut steering = steering(script, &panics);
    let mut idle = Vec::new();
    for _ in 0..=NOOPS_MAX + 1 {
        let _ = steering.pre(at(0), RULES, &panics);
        steering.begin_mid(at(0), &panics);
        let _ = steering.poll_mid(at(0), RULES, &panics);
        idle.push(steering.is_idle());
    }
    let expected = [&[false; NOOPS_MAX as usize][..], &[true, false]].concat();
    assert_eq!(idle, expected);
}

#[test]
fn results_outside_the_vocabulary_are_refused() {
    let refused = |mid: Mid| {
        let panics = Counter::default();
        let script = Script {
            mids: vec![Some(mid)],
            ..Script::default()
        };
        let mut steering = steering(script, &panics);
        let _ = steering.pre(at(0), RULES, &panics);
        steering.begin_mid(at(0), &panics);
        steering.poll_mid(at(1), RULES, &panics).is_err()
    };
    let sample = |mask: Option<Mask>, bias, temperature| Sample {
        mask: mask.map(Arc::new),
        bias,
        temperature,
        splices: Vec::new(),
    };
    let one = |sample| Mid::One(Branch::Sample(sample));
    let good = sample(Some(Mask::all(8)), vec![(1, 0.5)], Some(1.0));
    assert!(!refused(one(good.clone())));
    let splicing = |tokens| Sample {
        splices: vec![ConditionalSplice {
            when_sampled: Vec::new(),
            keeps_sampled: false,
            splice: Splice {
                backtrack: 9,
                tokens,
            },
        }],
        ..Sample::default()
    };
    // Whether a backtrack fits is known when it applies.
    assert!(!refused(one(splicing(vec![7]))));
    assert!(!refused(Mid::Fork(vec![
        Branch::Noop,
        Branch::Sample(good.clone())
    ])));
    assert!(refused(Mid::Fork(Vec::new())));
    for bad in [
        sample(Some(Mask::all(9)), Vec::new(), None),
        sample(None, vec![(1, f32::NAN)], None),
        sample(None, vec![(1, 1e31)], None),
        sample(None, Vec::new(), Some(-1.0)),
        sample(None, Vec::new(), Some(100.5)),
        splicing(vec![8]),
    ] {
        let in_branch = Mid::Fork(vec![
            Branch::Sample(good.clone()),
            Branch::Sample(bad.clone()),
        ]);
        assert!(refused(in_branch), "{bad:?}");
        assert!(refused(one(bad)));
    }
}
