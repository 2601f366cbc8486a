//! A model that fails in every way, and what is left standing.

use std::sync::{Arc, Mutex};

use sapwood_proto::code::Code;
use sapwood_proto::time::Time;

use super::harness::{Bench, read, say};
use crate::api::{Fault, ModelInfo, SharedVocabulary};
use crate::model::{Capacity, Entry, Model, Opening, Row, Slot, Stop};
use crate::scripted::{Config as Script, Scripted};
use crate::{Config, Engine};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    None,
    Full,
    Aborted,
    Failed,
    Dead,
    PanicInPass,
    PanicInRow,
    NotANumber,
}

/// A scripted model with trouble in its next pass that computes more than one slot, or in every pass.
struct Faulty {
    model: Scripted,
    trouble: Arc<Mutex<Trouble>>,
    lasting: bool,
    row: Vec<f32>,
    now: Trouble,
}

impl Model for Faulty {
    fn info(&self) -> ModelInfo {
        self.model.info()
    }
    fn vocabulary(&self) -> SharedVocabulary {
        self.model.vocabulary()
    }
    fn capacity(&self) -> Capacity {
        self.model.capacity()
    }
    fn open(&mut self, slot: Slot, opening: &Opening<'_>) {
        self.model.open(slot, opening);
    }
    fn fork(&mut self, from: Slot, to: Slot, tokens: u32) {
        self.model.fork(from, to, tokens);
    }
    fn truncate(&mut self, slot: Slot, tokens: u32) {
        self.model.truncate(slot, tokens);
    }
    fn release(&mut self, slot: Slot) {
        self.model.release(slot);
    }
    fn decode(&mut self, batch: &[Entry], now: Time) -> Result<(), Stop> {
        let mut trouble = self.trouble.lock().unwrap();
        self.now = *trouble;
        if !self.lasting {
            *trouble = Trouble::None;
        }
        drop(trouble);
        let fault = || Fault::new(Code::Internal, "broken", "broken");
        match self.now {
            Trouble::Full => Err(Stop::Full),
            Trouble::Aborted => Err(Stop::Aborted),
            Trouble::Failed => Err(Stop::Failed(fault())),
            Trouble::Dead => Err(Stop::Dead(fault())),
            Trouble::PanicInPass => panic!("broken"),
            _ => self.model.decode(batch, now),
        }
    }
    fn row(&mut self, index: usize, now: Time) -> Row<'_> {
        match self.now {
            Trouble::PanicInRow if index == 0 => panic!("broken"),
            Trouble::NotANumber if index == 0 => {
                self.row = vec![f32::NAN; 258];
                Row::Logits(&mut self.row)
            }
            _ => self.model.row(index, now),
        }
    }
}

fn faulty(lasting: bool) -> (Faulty, Arc<Mutex<Trouble>>) {
    let trouble = Arc::new(Mutex::new(Trouble::None));
    let model = Scripted::new(Script::default()).unwrap();
    (
        Faulty {
            model,
            trouble: Arc::clone(&trouble),
            lasting,
            row: Vec::new(),
            now: Trouble::None,
        },
        trouble,
    )
}

/// Two requests run, trouble comes in the third step, a third request comes after it.
fn play(trouble: Trouble) -> [String; 3] {
    let (model, switch) = faulty(false);
    let mut bench = Bench::over(Box::new(model), Config::default());
    let (mut first, mut second) = (bench.submit(say("first")), bench.submit(say("second")));
    bench.step();
    bench.step();
    *switch.lock().unwrap() = trouble;
    bench.step();
    let mut third = bench.submit(say("third"));
    bench.settle();
    [&mut first, &mut second, &mut third].map(|handle| {
        let answer = read(handle);
        answer.fault.as_ref().map_or_else(
            || answer.text().to_owned(),
            |fault| format!("{} {}", fault.code, fault.reason),
        )
    })
}

#[test]
fn trouble_ends_what_it_must_and_nothing_else() {
    let cases = [
        (Trouble::None, ["first", "second", "third"]),
        (Trouble::Full, ["first", "second", "third"]),
        (Trouble::Aborted, ["first", "second", "third"]),
        (
            Trouble::Failed,
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

#[test]
fn a_model_with_room_for_nobody_fails_the_last_one_and_does_not_loop() {
    let (model, switch) = faulty(true);
    *switch.lock().unwrap() = Trouble::Full;
    let mut bench = Bench::over(Box::new(model), Config::default());
    let mut handle = bench.submit(say("x"));
    bench.step();
    assert_eq!(read(&mut handle).fault.unwrap().reason, "CACHE_FULL");
}

/// TR-1105.
#[test]
fn a_script_that_panics_ends_its_request_only() {
    let rules = r#"{"script": "steps", "rules": [
        {"match": "bad", "steps": [{"text": "o"}, {"panic": true}]}, {"steps": [{"text": "fine"}]}]}"#;
    let mut bench = Bench::new(serde_json::from_str(rules).unwrap());
    let (mut bad, mut good) = (bench.submit(say("bad")), bench.submit(say("good")));
    bench.settle();
    let bad = read(&mut bad);
    assert_eq!(
        (bad.text(), bad.fault.as_ref().unwrap().reason),
        ("o", "model_panic")
    );
    assert_eq!(read(&mut good).text(), "fine");
}

#[test]
fn oa_913_a_panic_of_the_model_is_counted_and_a_lost_model_is_known_to_be_lost() {
    for (trouble, panics, dead) in [
        (Trouble::PanicInPass, 1, 0),
        (Trouble::PanicInRow, 1, 0),
        (Trouble::Failed, 0, 0),
        (Trouble::Dead, 0, 1),
    ] {
        let (model, switch) = faulty(false);
        let mut bench = Bench::over(Box::new(model), Config::default());
        let handle = bench.submit(say("first"));
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

/// OA-901, OA-913: whatever ended the thread, the watchdog sees that it is gone.
#[test]
fn oa_913_an_engine_whose_model_or_thread_is_lost_counts_as_stuck_for_ever() {
    let (model, switch) = faulty(true);
    *switch.lock().unwrap() = Trouble::Dead;
    let engine = Engine::spawn(Box::new(model), Config::default()).unwrap();
    assert_eq!(engine.stalled_for(), std::time::Duration::ZERO);
    let handle = engine.submit(say("x")).unwrap();
    assert_eq!(futures::executor::block_on_stream(handle).count(), 1);
    assert_eq!(engine.stalled_for(), std::time::Duration::MAX);
}

#[test]
fn a_lost_owner_tells_every_reader_and_refuses_what_comes() {
    let Bench { owner, engine, .. } = Bench::new(Script::default());
    let mut handle = engine.submit(say("x")).unwrap();
    drop(owner);
    assert_eq!(read(&mut handle).fault.unwrap().reason, "engine_dead");
    assert_eq!(engine.submit(say("x")).unwrap_err().reason, "engine_dead");
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
                let handle = engine.submit(say(text)).unwrap();
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
    let handle = engine.submit(say("x")).unwrap();
    drop(engine);
    let mut last = None;
    futures::executor::block_on_stream(handle).for_each(|event| last = Some(event));
    let crate::api::Kind::Fault(fault) = last.unwrap().kind else {
        panic!("no fault")
    };
    assert_eq!(fault.reason, "engine_dead");
    assert_eq!(clone.stalled_for(), std::time::Duration::ZERO);
}
