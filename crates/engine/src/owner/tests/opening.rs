//! Requests whose steerer needs time to begin.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Begun, Combined, Mid, Post, Pre, Steer, SteerFailure, Steered, StepReport, StepWaker,
    Token,
};

use super::super::steer_rounds::MIN_WAIT;
use super::harness::{Bench, read, request_for};
use super::probe::Probe;
use super::steering::{echo, error_of};
use crate::Config;
use crate::api::{EventKind, FinishReason, GenerationRequest, Prompt};
use crate::scripted::Config as Script;

/// What the test sees and sets of a [`Beginner`].
#[derive(Default)]
struct Beginning {
    /// The result of `begin_poll`; it is called again if there is none.
    result: Option<Steered<Begun>>,
    prompt: Vec<Token>,
    seed: Option<u64>,
    waker: Option<Arc<dyn StepWaker>>,
    /// How often `pre` wakes the owner.
    wakes: u32,
}

/// Begins when the test lets it, and is a [`Probe`] then.
struct Beginner(Arc<Mutex<Beginning>>, Probe);

impl Steer for Beginner {
    fn seed(&mut self, seed: u64) {
        let mut beginning = self.0.lock().unwrap();
        assert!(beginning.prompt.is_empty(), "before the start");
        beginning.seed = Some(seed);
    }

    fn begin(&mut self, prompt: &[Token], waker: &Arc<dyn StepWaker>) {
        let mut beginning = self.0.lock().unwrap();
        assert_ne!(prompt, [0], "scripted panic");
        beginning.prompt = prompt.to_vec();
        beginning.waker = Some(Arc::clone(waker));
    }

    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        let result = self.0.lock().unwrap().result.clone();
        result.transpose()
    }

    fn pre(&mut self) -> Steered<Option<Pre>> {
        let mut beginning = self.0.lock().unwrap();
        if let Some(wakes) = beginning.wakes.checked_sub(1) {
            beginning.wakes = wakes;
            beginning.waker.as_ref().unwrap().wake();
        }
        self.1.pre()
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

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        self.1.fork(index)
    }

    fn take_report(&mut self) -> Option<StepReport> {
        self.1.take_report()
    }
}

fn beginner(text: &str) -> (GenerationRequest, Arc<Mutex<Beginning>>, Probe) {
    let (beginning, probe) = (Arc::<Mutex<Beginning>>::default(), Probe::new());
    let mut request = request_for(text);
    request.params.max_tokens = Some(2);
    request.steer = Some(Box::new(Beginner(Arc::clone(&beginning), probe.clone())));
    (request, beginning, probe)
}

/// Steps for a while, but not until the queue timeout.
fn wait(bench: &mut Bench) {
    for _ in 0..10 {
        bench.step();
    }
}

fn open(beginning: &Mutex<Beginning>, result: Steered<Begun>) {
    let mut beginning = beginning.lock().unwrap();
    beginning.result = Some(result);
    beginning.waker.as_ref().unwrap().wake();
}

/// The best tokens of each row that was shown.
type Shown = Arc<Mutex<Vec<Vec<(Token, f32)>>>>;

/// Wants to see some of the best tokens.
struct Viewer(Probe, usize, Shown);

impl Steer for Viewer {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn best_tokens_wanted(&self) -> usize {
        self.1
    }

    fn show_best_tokens(&mut self, best: &[(Token, f32)]) {
        self.2.lock().unwrap().push(best.to_vec());
    }

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

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        self.0.fork(index)
    }
}

#[test]
fn ai_1009_a_steerer_sees_the_best_tokens_before_masks_and_bias() {
    let mut bench = echo();
    let view = |wanted| {
        let shown = Arc::default();
        (
            Box::new(Viewer(Probe::new(), wanted, Arc::clone(&shown))),
            shown,
        )
    };
    let ((many, all), (two, some), (none, nothing)) = (view(1_000), view(2), view(0));
    let mut request = request_for("ab");
    request.params.max_tokens = Some(2);
    // What the request makes impossible is shown nevertheless.
    request.params.logit_bias = [(Token::from(b'a'), -100.0)].into();
    request.steer = Some(Combined::new(vec![many, two, none]));
    let mut handle = bench.submit(request);
    bench.settle();
    assert_ne!(read(&mut handle).text(), "ab");
    let (all, some) = (all.lock().unwrap(), some.lock().unwrap());
    assert_eq!(
        (all.len(), some.len(), nothing.lock().unwrap().len()),
        (2, 2, 0)
    );
    for (all, some) in all.iter().zip(some.iter()) {
        assert_eq!((all.len(), &all[..2]), (64, &some[..]));
        assert!(all.is_sorted_by(|left, right| left.1 >= right.1) && all[0].1 <= 0.0);
    }
    assert_eq!(all[0][0].0, Token::from(b'a'));
}

#[test]
fn ai_1010_a_steerer_has_the_seed_of_its_request() {
    let bench = echo();
    let (mut request, beginning, _) = beginner("ab");
    request.params.seed = Some(77);
    // As one of several steerers, too.
    let steerers = [request.steer.take(), beginner("ab").0.steer];
    request.steer = Some(Combined::new(steerers.into_iter().flatten().collect()));
    drop(bench.submit(request));
    assert_eq!(beginning.lock().unwrap().seed, Some(77));
}

#[test]
fn d_49_a_request_waits_outside_the_batch_until_its_steerer_has_begun() {
    let mut bench = echo();
    let (request, beginning, _) = beginner("ab");
    let mut handle = bench.submit(request);
    assert_eq!(
        beginning.lock().unwrap().prompt.len(),
        3,
        "BOS and two letters"
    );
    let mut other = bench.submit(request_for("other"));
    wait(&mut bench);
    assert_eq!(read(&mut other).text(), "other");
    assert_eq!(read(&mut handle).choices, []);
    assert_eq!(bench.engine.stats().requests_waiting.get(), 1);
    open(&beginning, Ok(Begun::default()));
    bench.settle();
    assert_eq!(read(&mut handle).text(), "ab");
    assert!(bench.owner.is_empty());
}

#[test]
fn d_49_the_prompt_that_a_steerer_gives_replaces_that_of_the_request() {
    let mut bench = echo();
    let (mut request, beginning, _) = beginner("ab");
    request.params.max_tokens = None;
    request.params.repetition_penalty = Some(1.1);
    let mut handle = bench.submit(request);
    wait(&mut bench);
    let context = bench.engine.info().context_tokens;
    open(
        &beginning,
        Ok(Begun {
            prompt: Some(vec![120; context as usize - 1]),
        }),
    );
    bench.settle();
    let answer = read(&mut handle);
    // A single token fits behind the prompt.
    assert_eq!(answer.text(), "x");
    let usage = answer.usage.unwrap();
    assert_eq!(
        (usage.prompt_tokens, usage.completion_tokens),
        (context - 1, 1)
    );
    assert_eq!(bench.engine.stats().requests_waiting.get(), 0);
}

#[test]
fn d_49_a_prompt_that_cannot_run_fails_the_request() {
    let context = echo().engine.info().context_tokens as usize;
    for (prompt, why) in [
        (Vec::new(), "empty"),
        (vec![1; context], "exceeds"),
        (vec![258], "outside the vocabulary"),
    ] {
        let mut bench = Bench::with(
            Script::default(),
            Config {
                queue_requests: 1,
                ..Config::default()
            },
        );
        let (request, beginning, _) = beginner("ab");
        let mut handle = bench.submit(request);
        wait(&mut bench);
        let prompt = Some(prompt);
        open(&beginning, Ok(Begun { prompt }));
        bench.settle();
        let answer = read(&mut handle);
        let (reason, message) = error_of(&answer);
        assert_eq!(reason, "bad-result");
        assert!(message.contains(why), "{message}");
        // It is not charged to the queue any more.
        assert_eq!(bench.answer(request_for("next")).text(), "next");
    }
}

#[test]
fn d_49_a_steerer_that_cannot_begin_fails_its_request_with_its_own_reason() {
    let mut bench = echo();
    let (mut request, beginning, mut probe) = beginner("ab");
    probe.report = |_| {
        Some(StepReport {
            logs: "no module".to_owned(),
            ..StepReport::default()
        })
    };
    request.steer = Some(Box::new(Beginner(Arc::clone(&beginning), probe)));
    request.watched = true;
    let mut handle = bench.submit(request);
    wait(&mut bench);
    let failure = SteerFailure {
        reason: ErrorReason::INIT,
        message: "no memory".to_owned(),
    };
    open(&beginning, Err(failure));
    bench.settle();
    let report = handle.try_next().map(|event| event.kind);
    assert!(matches!(report, Some(EventKind::Report(report)) if report.logs == "no module"));
    assert_eq!(error_of(&read(&mut handle)), ("init", "no memory"));
    // A panic of `begin` is seen by who submits.
    let (mut request, ..) = beginner("ab");
    request.prompt = Prompt::Tokens(vec![0]);
    let error = bench.engine.submit(request).unwrap_err();
    assert_eq!(
        (error.code.name(), error.reason.name()),
        ("controller-failed", "trap")
    );
    assert_eq!(bench.engine.stats().panics.get(), 1);
    assert_eq!(bench.answer(request_for("next")).text(), "next");
}

#[test]
fn d_49_limits_timeouts_and_cancellation_apply_to_a_request_that_is_opening() {
    let config = Config {
        queue_requests: 1,
        queue_timeout_ms: 100,
        ..Config::default()
    };
    let mut bench = Bench::with(Script::default(), config);
    // A quarter more than the limit is for callers that hold little.
    let refused = |bench: &Bench| bench.engine.submit(request_for("x")).err();
    let (mut request, _, _) = beginner("ab");
    request.timeout = Some(Duration::from_millis(50));
    request.params.n = Some(2);
    let mut handle = bench.submit(request);
    bench.step();
    assert_eq!(refused(&bench).unwrap().reason, "ENGINE_BUSY");
    bench.settle();
    assert_eq!(read(&mut handle).error.unwrap().reason, "timeout");
    // The time in the queue.
    let mut handle = bench.submit(beginner("ab").0);
    bench.settle();
    assert_eq!(read(&mut handle).error.unwrap().reason, "queue_timeout");
    // A stop ends every choice.
    let (mut request, ..) = beginner("ab");
    request.params.n = Some(2);
    let mut handle = bench.submit(request);
    bench.step();
    handle.stop();
    bench.settle();
    let answer = read(&mut handle);
    let ends = answer
        .choices
        .iter()
        .map(|choice| choice.2.clone().unwrap());
    let reasons: Vec<FinishReason> = ends.map(|end| end.reason).collect();
    assert_eq!(reasons, [FinishReason::Cancelled; 2]);
    assert_eq!(answer.usage.unwrap().completion_tokens, 0);
    // A reader that leaves.
    drop(bench.submit(beginner("ab").0));
    bench.step();
    assert!(bench.owner.is_empty());
    assert_eq!(refused(&bench), None);
}

#[test]
fn ai_503_further_choices_are_forked_after_begin_and_are_one_group() {
    let mut bench = echo();
    let (mut request, beginning, probe) = beginner("ab");
    request.params.n = Some(3);
    request.params.max_tokens = Some(1);
    let mut handle = bench.submit(request);
    wait(&mut bench);
    open(
        &beginning,
        Ok(Begun {
            prompt: Some(vec![120, 121]),
        }),
    );
    bench.settle();
    let answer = read(&mut handle);
    let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
    assert_eq!(texts, ["x"; 3]);
    let log = probe.log.lock().unwrap();
    let begins: Vec<&String> = log.iter().filter(|line| line.contains("begin")).collect();
    let expected = ["begin [1, 2, 3]", "1:begin [1, 2, 3]", "2:begin [1, 2, 3]"];
    assert_eq!(begins, expected);
}

#[test]
fn an_owner_that_ends_also_ends_requests_that_are_opening() {
    let bench = echo();
    let (request, ..) = beginner("ab");
    let mut handle = bench.submit(request);
    drop(bench.owner);
    assert_eq!(read(&mut handle).error.unwrap().reason, "engine_dead");
}

/// A wake-up of a steerer during a step leads to another step at once.
#[test]
fn d_49_a_wake_up_within_a_step_is_not_lost() {
    let mut bench = echo();
    let (mut request, beginning, mut probe) = beginner("ab");
    probe.pre = |_| Ok(Pre::Suspend);
    request.steer = Some(Box::new(Beginner(Arc::clone(&beginning), probe)));
    let _handle = bench.submit(request);
    beginning.lock().unwrap().result = Some(Ok(Begun::default()));
    beginning.lock().unwrap().wakes = 1;
    assert_eq!(bench.step().wake_at, Some(bench.now));
    assert_eq!(bench.step().wake_at, Some(bench.now + MIN_WAIT));
}
