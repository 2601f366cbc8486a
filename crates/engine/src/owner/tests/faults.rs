//! A model that fails in every way, and which requests survive.

use std::sync::{Arc, Mutex};

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use super::harness::{Bench, read, request_for};
use super::hooked_model::{HookedModel, ModelHooks};
use crate::api::EngineError;
use crate::model::{BatchEntry, DecodeStop, Model, OutputRow, SlotId, SlotPurpose};
use crate::scripted::{Config as Script, Scripted};
use crate::{Config, Engine};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    None,
    Full,
    Aborted,
    Failed,
    SlotsLost,
    Dead,
    PanicInPass,
    PanicInRow,
    PanicInOpen,
    PanicInTruncate,
    PanicInRelease,
    NotANumber,
}

/// Fails in the next decode call with more than one slot, or in every decode call.
struct Faulty {
    trouble: Arc<Mutex<Trouble>>,
    lasting: bool,
    row: Vec<f32>,
    now: Trouble,
}

impl ModelHooks for Faulty {
    fn open(&mut self, model: &mut Scripted, slot: SlotId, opening: &SlotPurpose<'_>) {
        self.panic_at(Trouble::PanicInOpen);
        model.open(slot, opening);
    }

    fn truncate(&mut self, model: &mut Scripted, slot: SlotId, tokens: u32) {
        self.panic_at(Trouble::PanicInTruncate);
        model.truncate(slot, tokens);
    }

    fn release(&mut self, model: &mut Scripted, slot: SlotId) {
        self.panic_at(Trouble::PanicInRelease);
        model.release(slot);
    }

    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        let mut trouble = self.trouble.lock().unwrap();
        self.now = *trouble;
        // A failure of another call waits for that call.
        let other = matches!(self.now, Trouble::PanicInOpen | Trouble::PanicInTruncate);
        if !self.lasting && !other {
            *trouble = Trouble::None;
        }
        drop(trouble);
        let error = || EngineError::new(Code::Internal, ErrorReason::custom("broken"), "broken");
        match self.now {
            Trouble::Full => Err(DecodeStop::Full),
            Trouble::Aborted => Err(DecodeStop::Aborted),
            Trouble::Failed => Err(DecodeStop::Failed(error())),
            Trouble::SlotsLost => Err(DecodeStop::SlotsLost(error())),
            Trouble::Dead => Err(DecodeStop::Dead(error())),
            Trouble::PanicInPass => panic!("broken"),
            _ => model.decode(batch, now),
        }
    }

    fn row<'a>(&'a mut self, model: &'a mut Scripted, index: usize, now: Time) -> OutputRow<'a> {
        match self.now {
            Trouble::PanicInRow if index == 0 => panic!("broken"),
            Trouble::NotANumber if index == 0 => {
                self.row = vec![f32::NAN; 258];
                OutputRow::Logits(&mut self.row)
            }
            _ => model.row(index, now),
        }
    }
}

impl Faulty {
    fn panic_at(&self, here: Trouble) {
        let mut trouble = self.trouble.lock().unwrap();
        if *trouble != here {
            return;
        }
        if !self.lasting {
            *trouble = Trouble::None;
        }
        drop(trouble);
        panic!("broken");
    }
}

fn faulty(lasting: bool) -> (HookedModel<Faulty>, Arc<Mutex<Trouble>>) {
    let trouble = Arc::new(Mutex::new(Trouble::None));
    let hooks = Faulty {
        trouble: Arc::clone(&trouble),
        lasting,
        row: Vec::new(),
        now: Trouble::None,
    };
    (HookedModel::new(Script::default(), hooks), trouble)
}

/// Two requests run, the failure occurs in the third step, and a third request comes after it.
fn play(trouble: Trouble) -> [String; 3] {
    let (model, switch) = faulty(false);
    let mut bench = Bench::over(Box::new(model), Config::default());
    let (mut first, mut second) = (
        bench.submit(request_for("first")),
        bench.submit(request_for("second")),
    );
    bench.step();
    bench.step();
    *switch.lock().unwrap() = trouble;
    bench.step();
    let mut third = bench.submit(request_for("third"));
    bench.settle();
    [&mut first, &mut second, &mut third].map(|handle| {
        let answer = read(handle);
        answer.error.as_ref().map_or_else(
            || answer.text().to_owned(),
            |cause| format!("{} {}", cause.code, cause.reason),
        )
    })
}

#[test]
fn model_failures_end_only_the_affected_requests() {
    let cases = [
        (Trouble::None, ["first", "second", "third"]),
        (Trouble::Full, ["first", "second", "third"]),
        (Trouble::Aborted, ["first", "second", "third"]),
        (
            Trouble::Failed,
            ["internal broken", "internal broken", "third"],
        ),
        (
            Trouble::SlotsLost,
            ["internal broken", "internal broken", "third"],
        ),
        (Trouble::Dead, ["internal broken"; 3]),
        (
            Trouble::PanicInPass,
            ["internal model_panic", "internal model_panic", "third"],
        ),
        (
            Trouble::PanicInRow,
            ["internal model_panic", "second", "third"],
        ),
        (
            Trouble::NotANumber,
            ["internal engine_error", "second", "third"],
        ),
    ];
    for (trouble, expected) in cases {
        assert_eq!(play(trouble), expected, "{trouble:?}");
    }
}

/// As recurrent models do whose states were being moved: also a prefix without a part in the batch is not to be used again.
#[test]
fn nothing_is_kept_of_slots_whose_contents_are_lost() {
    for (trouble, is_cached) in [(Trouble::Failed, true), (Trouble::SlotsLost, false)] {
        let (model, switch) = faulty(false);
        let mut bench = Bench::over(Box::new(model), Config::default());
        let cached = |bench: &mut Bench| {
            let mut handle = bench.submit(request_for("an earlier conversation"));
            bench.settle();
            read(&mut handle).usage.unwrap().cached_tokens
        };
        assert_eq!(cached(&mut bench), 0);
        let mut running = bench.submit(request_for("runs"));
        bench.step();
        *switch.lock().unwrap() = trouble;
        bench.settle();
        assert_eq!(read(&mut running).error.unwrap().reason, "broken");
        assert_eq!(cached(&mut bench) > 0, is_cached, "{trouble:?}");
    }
}

/// The model has less room than was counted: the plan is made anew without the youngest sequence, and the others have its time.
#[test]
fn a_plan_that_the_model_has_no_room_for_is_made_anew() {
    let (model, switch) = faulty(false);
    let mut bench = Bench::over(Box::new(model), Config::default());
    let prompts = ["stream", &"a".repeat(1_200), &"b".repeat(900), "short one"];
    let mut handles = vec![bench.submit(request_for(prompts[0]))];
    bench.step();
    handles.extend(
        prompts[1..]
            .iter()
            .map(|text| bench.submit(request_for(text))),
    );
    *switch.lock().unwrap() = Trouble::Full;
    let report = bench.step();
    assert_eq!(report.preempted, [3]);
    assert_eq!(report.decoded, [0]);
    let [(2, tokens)] = report.prefilled[..] else {
        panic!("the shorter of the long prompts: {:?}", report.prefilled)
    };
    let next = bench.step();
    let all: u32 = next.prefilled.iter().map(|share| share.1).sum();
    assert_eq!(next.prefilled[0].0, 3, "it has a slot again");
    assert_eq!(all, tokens, "as many as without it");
    // The step counts once for the oldest prompt, which is passed over three times.
    let oldest = |bench: &mut Bench| bench.step().prefilled[0].0 == 1;
    assert_eq!([0; 2].map(|_| oldest(&mut bench)), [false, true]);
    bench.settle();
    for (handle, prompt) in handles.iter_mut().zip(prompts) {
        let answer = read(handle);
        // The default of `max_tokens` ends the long ones.
        assert!(!answer.text().is_empty() && prompt.starts_with(answer.text()));
    }
}

#[test]
fn a_cache_without_room_for_one_sequence_fails_its_request() {
    let (model, switch) = faulty(true);
    *switch.lock().unwrap() = Trouble::Full;
    let mut bench = Bench::over(Box::new(model), Config::default());
    let mut handle = bench.submit(request_for("x"));
    bench.step();
    assert_eq!(read(&mut handle).error.unwrap().reason, "CACHE_FULL");
}

/// TR-1105.
#[test]
fn a_script_that_panics_ends_its_request_only() {
    let rules = r#"{"script": "steps", "rules": [
        {"match": "bad", "steps": [{"text": "o"}, {"panic": true}]}, {"steps": [{"text": "fine"}]}]}"#;
    let mut bench = Bench::new(serde_json::from_str(rules).unwrap());
    let (mut bad, mut good) = (
        bench.submit(request_for("bad")),
        bench.submit(request_for("good")),
    );
    bench.settle();
    let bad = read(&mut bad);
    assert_eq!(
        (bad.text(), bad.error.as_ref().unwrap().reason.name()),
        ("o", "model_panic")
    );
    assert_eq!(read(&mut good).text(), "fine");
}

#[test]
fn oa_913_model_panics_are_counted_and_a_lost_model_is_dead() {
    for (trouble, panics, dead) in [
        (Trouble::PanicInPass, 1, 0),
        (Trouble::PanicInRow, 1, 0),
        (Trouble::Failed, 0, 0),
        (Trouble::Dead, 0, 1),
    ] {
        let (model, switch) = faulty(false);
        let mut bench = Bench::over(Box::new(model), Config::default());
        let handle = bench.submit(request_for("first"));
        bench.step();
        *switch.lock().unwrap() = trouble;
        bench.step();
        let stats = bench.engine.stats();
        assert_eq!(
            (stats.panics.get(), stats.dead.get()),
            (panics, dead),
            "{trouble:?}"
        );
        drop(handle);
    }
}

/// OA-901, OA-913: whatever ended the thread, the watchdog reports it as stalled.
#[test]
fn oa_913_an_engine_with_a_lost_model_counts_as_stalled() {
    let (model, switch) = faulty(true);
    *switch.lock().unwrap() = Trouble::Dead;
    let engine = Engine::spawn(Box::new(model), Config::default()).unwrap();
    assert_eq!(engine.stalled_for(), std::time::Duration::ZERO);
    let handle = engine.submit(request_for("x")).unwrap();
    assert_eq!(futures::executor::block_on_stream(handle).count(), 1);
    assert_eq!(engine.stalled_for(), std::time::Duration::MAX);
}

#[test]
fn a_dropped_owner_fails_its_requests_and_new_ones() {
    let Bench { owner, engine, .. } = Bench::new(Script::default());
    let mut handle = engine.submit(request_for("x")).unwrap();
    drop(owner);
    assert_eq!(read(&mut handle).error.unwrap().reason, "engine_dead");
    assert_eq!(
        engine.submit(request_for("x")).unwrap_err().reason,
        "engine_dead"
    );
}

#[test]
fn a_spawned_engine_answers_and_ends_with_its_last_clone() {
    let model = Scripted::new(Script::default()).unwrap();
    let engine = Engine::spawn(Box::new(model), Config::default()).unwrap();
    let clone = engine.clone();
    let answers: Vec<String> = std::thread::scope(|scope| {
        let ask = |text: &'static str| {
            let engine = &engine;
            scope.spawn(move || {
                let handle = engine.submit(request_for(text)).unwrap();
                let mut answer = super::harness::Answer::default();
                futures::executor::block_on_stream(handle).for_each(|event| answer.take(event));
                answer.text().to_owned()
            })
        };
        let threads: Vec<_> = ["one", "two", "three"].map(ask).into_iter().collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(answers, ["one", "two", "three"]);
    drop(engine);
    let rules = r#"{"script": "steps", "rules": [{"steps": [{"hang": true}]}]}"#;
    let hanging = Scripted::new(serde_json::from_str(rules).unwrap()).unwrap();
    let engine = Engine::spawn(Box::new(hanging), Config::default()).unwrap();
    let handle = engine.submit(request_for("x")).unwrap();
    drop(engine);
    let mut last = None;
    futures::executor::block_on_stream(handle).for_each(|event| last = Some(event));
    let crate::api::EventKind::Error(error) = last.unwrap().kind else {
        panic!("no error")
    };
    assert_eq!(
        (error.reason.name(), &*error.message),
        ("model_unloaded", "the model was unloaded")
    );
    assert_eq!(clone.stalled_for(), std::time::Duration::ZERO);
}

/// A panic that no narrower guard catches: every running or waiting request ends with one error, and later requests are
/// answered.
#[test]
fn oa_913_an_uncaught_panic_ends_all_requests_and_the_owner_continues() {
    for trouble in [Trouble::PanicInOpen, Trouble::PanicInTruncate] {
        let (model, switch) = faulty(false);
        let mut bench = Bench::over(Box::new(model), Config::default());
        let mut first = bench.submit(request_for("first"));
        bench.step();
        *switch.lock().unwrap() = trouble;
        let mut second = match trouble {
            Trouble::PanicInOpen => bench.submit(request_for("second")),
            _ => bench.submit(rewinding()),
        };
        let mut done = Vec::new();
        while done.len() < 2 {
            bench.step();
            for handle in [&mut first, &mut second] {
                done.extend(read(handle).error);
            }
        }
        let ends: Vec<_> = done.iter().map(|cause| cause.reason).collect();
        assert_eq!(ends, ["engine_panic"; 2], "{trouble:?}");
        assert!(bench.owner.is_empty());
        let stats = Arc::clone(bench.engine.stats());
        assert_eq!((stats.panics.get(), stats.dead.get()), (1, 0));
        let third = "a third that is long enough to be kept";
        assert_eq!(bench.answer(request_for(third)).text(), third);
        let mut fresh = Bench::new(Script::default());
        fresh.answer(request_for(third));
        let cached = fresh.engine.stats().cells_used.get();
        assert!(cached > 0);
        assert_eq!(
            stats.cells_used.get(),
            cached,
            "no prefix of the earlier requests is cached"
        );
        assert_eq!(stats.requests_waiting.get(), 0);
    }
}

/// A request with a steerer that rewinds its first token once.
fn rewinding() -> crate::api::GenerationRequest {
    use super::probe::{free, splice};
    let mut probe = super::probe::Probe::new();
    probe.mid = |round| {
        Ok(Some(match round {
            1 => splice(1, &[u32::from(b'y')]),
            _ => free(),
        }))
    };
    let mut request = request_for("xx");
    request.steer = Some(Box::new(probe));
    request
}

#[test]
fn oa_913_a_model_that_cannot_release_its_slots_is_lost() {
    let (model, switch) = faulty(true);
    *switch.lock().unwrap() = Trouble::PanicInRelease;
    let mut bench = Bench::over(Box::new(model), Config::default());
    let mut request = request_for("x");
    request.params.max_tokens = Some(1);
    let mut handle = bench.submit(request);
    bench.settle();
    assert_eq!(bench.engine.stats().dead.get(), 1);
    assert!(read(&mut handle).usage.is_some() || bench.owner.is_empty());
    assert_eq!(
        bench.answer(request_for("y")).error.unwrap().reason,
        "engine_panic"
    );
}

struct PanickingWaker;

impl std::task::Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        panic!("a reader's waker");
    }
}

/// A reader's waker that panics does not affect other readers.
#[test]
fn a_panicking_waker_does_not_affect_other_requests() {
    let mut bench = Bench::new(Script::default());
    let (mut bad, mut good) = (
        bench.submit(request_for("bad")),
        bench.submit(request_for("good")),
    );
    let waker = std::task::Waker::from(Arc::new(PanickingWaker));
    let mut context = std::task::Context::from_waker(&waker);
    use futures::StreamExt;
    assert!(bad.poll_next_unpin(&mut context).is_pending());
    bench.settle();
    assert_eq!(read(&mut good).text(), "good");
    assert_eq!(read(&mut bad).text(), "bad");
    assert_eq!(bench.engine.stats().panics.get(), 1);
}

/// A second panic during the unwinding of a first one would end the process.
#[test]
fn several_wakers_that_panic_do_not_abort_an_engine_that_ends() {
    let waker = std::task::Waker::from(Arc::new(PanickingWaker));
    let mut context = std::task::Context::from_waker(&waker);
    use futures::StreamExt;
    let mut bench = Bench::new(Script::default());
    let mut handles: Vec<_> = ["a", "b"].map(|it| bench.submit(request_for(it))).into();
    bench.step();
    // Two more that the owner has not received.
    handles.extend(["c", "d"].map(|it| bench.submit(request_for(it))));
    for handle in &mut handles {
        while handle.poll_next_unpin(&mut context).is_ready() {}
    }
    drop(bench.owner);
    for handle in &mut handles {
        assert_eq!(read(handle).error.unwrap().reason, "engine_dead");
    }
}

/// A decode call that lasts as long as the test decides.
struct Slow {
    signals: crate::model::Interrupt,
    /// Receives a message at the start of each decode call.
    begun: std::sync::mpsc::SyncSender<()>,
    /// Each message causes a pulse; when the channel closes, the decode call returns.
    pulses: std::sync::mpsc::Receiver<()>,
    /// Receives a message after each pulse.
    pulsed: std::sync::mpsc::SyncSender<()>,
}

impl ModelHooks for Slow {
    fn interrupt(&mut self, _: &mut Scripted, signals: crate::model::Interrupt) {
        self.signals = signals;
    }

    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        let _ = self.begun.try_send(());
        while self.pulses.recv().is_ok() {
            self.signals.pulse();
            let _ = self.pulsed.send(());
        }
        model.decode(batch, now)
    }
}

/// A decode call may be longer than the watchdog's limit as long as the model pulses.
#[test]
fn oa_901_a_long_decode_call_that_pulses_is_not_stalled() {
    use std::sync::mpsc::sync_channel;
    use std::time::{Duration, Instant};
    let ((begun, in_pass), (pulse, pulses), (pulsed, alive)) =
        (sync_channel(1), sync_channel(0), sync_channel(1));
    let hooks = Slow {
        signals: crate::model::Interrupt::default(),
        begun,
        pulses,
        pulsed,
    };
    let model = HookedModel::new(Script::default(), hooks);
    let engine = Engine::spawn(Box::new(model), Config::default()).unwrap();
    let handle = engine.submit(request_for("x")).unwrap();
    in_pass.recv().unwrap();
    while engine.stalled_for() < Duration::from_millis(20) {
        std::thread::yield_now();
    }
    let before = Instant::now();
    pulse.send(()).unwrap();
    alive.recv().unwrap();
    let stalled = engine.stalled_for();
    // Both are measured in whole milliseconds.
    assert!(
        stalled <= before.elapsed() + Duration::from_millis(2),
        "{stalled:?}"
    );
    drop(pulse);
    assert!(futures::executor::block_on_stream(handle).count() > 1);
}

/// Keys and values that are no numbers would be the prefix of whoever asks next.
#[test]
fn what_gave_no_number_is_not_cached() {
    let prompt = "a prompt that is long enough to be cached";
    for (trouble, is_cached) in [(Trouble::None, true), (Trouble::NotANumber, false)] {
        let (model, switch) = faulty(true);
        let mut bench = Bench::over(Box::new(model), Config::default());
        *switch.lock().unwrap() = trouble;
        let failed = bench.answer(request_for(prompt));
        *switch.lock().unwrap() = Trouble::None;
        assert_eq!(failed.error.is_none(), is_cached);
        let next = bench.answer(request_for(prompt));
        assert_eq!(next.usage.unwrap().cached_tokens > 0, is_cached);
    }
}
