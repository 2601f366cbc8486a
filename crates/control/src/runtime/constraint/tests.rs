//! A scripted constraint behind the callbacks of the wire.

use std::sync::Mutex;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Mask, Sample, Steered, StepReport, VariableWrite};

use super::*;
use crate::host::{Group, VariablesLimits};

type Calls = Arc<Mutex<Vec<String>>>;

/// Forces 5 and 6, allows 7, and then ends.
#[derive(Clone)]
struct Scripted {
    calls: Calls,
    text: Vec<Token>,
    forces: bool,
    /// Answers the first question of a step only when it is asked again.
    slow: bool,
    asked: bool,
}

struct NobodyWaits;

impl StepWaker for NobodyWaits {
    fn wake(&self) {}
}

impl Scripted {
    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    fn is_late(&mut self) -> bool {
        self.asked = self.slow && !self.asked;
        self.asked
    }
}

impl Steer for Scripted {
    fn begin(&mut self, prompt: &[Token], _waker: &Arc<dyn StepWaker>) {
        self.note(format!("begin {prompt:?}"));
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        if self.is_late() {
            return Ok(None);
        }
        let mut fast_forward = Vec::new();
        if self.forces && self.text.is_empty() {
            fast_forward = vec![5, 6];
            self.text.extend([5, 6]);
        }
        Ok(Some(Pre::Run { fast_forward }))
    }

    fn mid_begin(&mut self, group: &[u32]) {
        self.note(format!("mid {group:?}"));
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        if self.is_late() {
            return Ok(None);
        }
        if self.text.last() == Some(&7) {
            return Ok(Some(Mid::Stop));
        }
        let mut mask = Mask::none(10);
        mask.allow(7);
        Ok(Some(Mid::One(Branch::Sample(Sample {
            mask: Some(Arc::new(mask)),
            ..Sample::default()
        }))))
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let Appended {
            backtrack, tokens, ..
        } = appended;
        self.note(format!("post {backtrack} {tokens:?}"));
        self.text.truncate(self.text.len() - backtrack as usize);
        self.text.extend(tokens);
        match tokens {
            [.., 9] => Err(SteerFailure {
                reason: ErrorReason::CONSTRAINT_FAILED,
                message: "not 9".to_owned(),
            }),
            [.., 8] => Ok(Post::Stop),
            _ => Ok(Post::Continue),
        }
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        self.note(format!("fork {index}"));
        Ok(Box::new(self.clone()))
    }

    fn take_report(&mut self) -> Option<StepReport> {
        (self.text.last() == Some(&8)).then(|| StepReport {
            storage: vec![VariableWrite {
                name: "text".to_owned(),
                value: b"eight".to_vec(),
                append: false,
                when_version_is: None,
            }],
            ..StepReport::default()
        })
    }
}

struct Run {
    sequence: ConstraintSequence,
    calls: Calls,
}

impl Run {
    fn new(forces: bool, slow: bool) -> Self {
        let calls = Calls::default();
        let steer = Box::new(Scripted {
            calls: Arc::clone(&calls),
            text: Vec::new(),
            forces,
            slow,
            asked: false,
        });
        let waker: Arc<dyn StepWaker> = Arc::new(NobodyWaits);
        let request = Group::new(2, VariablesLimits::default()).enter().unwrap();
        let mut sequence = ConstraintSequence::new(steer, &[1, 2], &waker, request);
        let begun = sequence.poll().unwrap().result;
        assert_eq!(begun, Ok(Returned::Begun { prompt: None }));
        assert!(sequence.poll().is_none());
        calls.lock().unwrap().clear();
        Self { sequence, calls }
    }

    /// The outcome of a step, and the calls that it made.
    fn step(&mut self, backtrack: u32, tokens: &[Token]) -> (Outcome, Vec<String>) {
        self.sequence.call(Callback::Process {
            backtrack,
            tokens: tokens.to_vec(),
            sampled: tokens.last().copied(),
            fork_group: vec![4],
        });
        let mut polls = (0..10).map(|_| self.sequence.poll());
        let outcome = polls.find_map(|outcome| outcome).unwrap();
        assert!(self.sequence.poll().is_none());
        (outcome, std::mem::take(&mut self.calls.lock().unwrap()))
    }
}

fn branches(outcome: Outcome) -> Vec<ReturnedBranch> {
    match outcome.result {
        Ok(Returned::Branches(branches)) => branches,
        other => panic!("{other:?}"),
    }
}

fn allows_7(outcome: Outcome) -> bool {
    let branches = branches(outcome);
    branches[0].mask.as_ref().is_some_and(|mask| mask.allows(7))
}

#[test]
fn ai_840_a_constraint_takes_the_place_of_a_module() {
    for slow in [false, true] {
        let mut run = Run::new(true, slow);
        let (outcome, calls) = run.step(0, &[]);
        let forced = ReturnedSplice {
            when_sampled: Vec::new(),
            backtrack: 0,
            ff_tokens: vec![5, 6],
        };
        assert_eq!(branches(outcome)[0].splices, [forced]);
        assert_eq!(calls, Vec::<String>::new());
        // What was forced is not posted.
        let (outcome, calls) = run.step(0, &[5, 6]);
        assert!(allows_7(outcome));
        assert_eq!(calls, ["mid [4]"]);
        let (outcome, calls) = run.step(0, &[7]);
        assert_eq!(
            (branches(outcome).len(), &calls[..]),
            (0, &["post 0 [7]", "mid [4]"].map(String::from)[..])
        );
    }
}

/// An engine may do something else than it was told.
#[test]
fn ai_840_forced_tokens_that_were_not_appended_are_taken_back() {
    let mut run = Run::new(true, false);
    run.step(0, &[]);
    let (outcome, calls) = run.step(0, &[3]);
    assert!(allows_7(outcome));
    assert_eq!(calls, ["post 2 []", "post 0 [3]", "mid [4]"]);
    let mut run = Run::new(true, false);
    run.step(0, &[]);
    let (_outcome, calls) = run.step(0, &[5, 6, 3]);
    assert_eq!(calls, ["post 0 [3]", "mid [4]"]);
    // Nothing was done: it is forced again.
    let mut run = Run::new(true, false);
    run.step(0, &[]);
    let (outcome, calls) = run.step(0, &[]);
    assert_eq!(branches(outcome)[0].splices[0].ff_tokens, [5, 6]);
    assert_eq!(calls, ["post 2 []"]);
}

#[test]
fn ai_840_a_constraint_stops_fails_and_stores_its_text() {
    let mut run = Run::new(false, false);
    let (outcome, _calls) = run.step(0, &[8]);
    assert_eq!(outcome.report.storage[0].name, "text");
    assert_eq!(branches(outcome), []);
    let mut run = Run::new(false, false);
    let failure = run.step(0, &[9]).0.result.unwrap_err();
    assert_eq!(
        (failure.reason, &failure.message[..]),
        (ErrorReason::CONSTRAINT_FAILED, "not 9")
    );
    // A callback of the other generation is a mistake of the runtime.
    let mut run = Run::new(false, false);
    run.sequence.call(Callback::Pre);
    assert!(run.sequence.poll().unwrap().result.is_err());
}

/// AI-413
#[test]
fn ai_840_a_constraint_forks_as_often_as_its_request_may() {
    let mut run = Run::new(true, false);
    run.step(0, &[]);
    let mut fork = run.sequence.fork().unwrap();
    let failure = run.sequence.fork().err().unwrap();
    assert_eq!(failure.message, "too many forks (max=2)");
    drop(run);
    let again = fork.fork().unwrap();
    drop(again);
    let mut run = Run {
        sequence: fork,
        calls: Calls::default(),
    };
    // Both have forced the same.
    assert!(allows_7(run.step(0, &[5, 6]).0));
}
