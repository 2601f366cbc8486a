//! Controllers of tests: each callback is a line of a script, and a virtual clock decides what is late.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Mask, OutsideWrite, RequestVariables, StepReport, Token, VariableWrite,
};

use super::pending::{Pending, PendingLimits};
use super::sequence::{CallFailure, Callback, MidReturned, Outcome, Pace, Returned, Sequence};
use super::table::{StepClock, StepConfig};
use crate::host::Group;
use crate::wire::{SharedRegion, unlink_region};

/// The size of the vocabulary of tests.
pub(super) const VOCABULARY: usize = 100;
/// Its end-of-sequence token.
pub(super) const EOS: Token = 2;

/// What a callback does.
#[derive(Clone, Debug)]
pub(super) enum Line {
    Returns(Returned),
    Fails(&'static str),
    /// Returns this when the clock shows so many milliseconds.
    At(u64, Returned),
}

pub(super) fn pre(num_forks: u32, suspend: bool, ff_tokens: &[Token]) -> Line {
    Line::Returns(Returned::Pre {
        num_forks,
        suspend,
        ff_tokens: ff_tokens.to_vec(),
        wait: None,
    })
}

pub(super) fn runs() -> Line {
    pre(1, false, &[])
}

pub(super) fn post(stop: bool) -> Line {
    Line::Returns(Returned::Post { stop })
}

pub(super) fn mid(returned: MidReturned) -> Line {
    Line::Returns(Returned::Mid(returned))
}

/// Samples one token.
pub(super) fn only(token: Token) -> MidReturned {
    let mut mask = Mask::none(VOCABULARY);
    mask.allow(token);
    MidReturned::Sample(Some(Arc::new(mask)))
}

/// Writes a variable of a request, as somebody outside of it does.
pub(super) fn write(group: &Group, name: &str) {
    let write = VariableWrite {
        name: name.to_owned(),
        value: Vec::new(),
        append: false,
        when_version_is: None,
    };
    assert!(matches!(group.write(&write), OutsideWrite::Written(_)));
}

/// The calls of all sequences of a test, with the number of the sequence.
pub(super) type Calls = Arc<Mutex<Vec<(u32, Callback)>>>;

/// A sequence that follows its script. A fork has the rest of it.
#[derive(Clone, Debug)]
pub(super) struct Scripted {
    script: VecDeque<Line>,
    running: VecDeque<Line>,
    /// The script begins again at its end.
    repeats: bool,
    number: u32,
    calls: Calls,
    clock: Clock,
    report: StepReport,
    has_mid_time: bool,
}

impl Scripted {
    /// A sequence with the micros of each callback 10.
    pub(super) fn new(world: &World, script: impl IntoIterator<Item = Line>) -> Self {
        Self {
            script: script.into_iter().collect(),
            running: VecDeque::new(),
            repeats: false,
            number: 0,
            calls: Arc::clone(&world.calls),
            clock: world.clock.clone(),
            report: StepReport {
                micros: 10,
                ..StepReport::default()
            },
            has_mid_time: false,
        }
    }

    /// Its `pre` has the time of `mid`.
    pub(super) fn with_mid_time(mut self) -> Self {
        self.has_mid_time = true;
        self
    }

    /// Its callbacks at the start are already running.
    pub(super) fn starting(mut self, line: Line) -> Self {
        self.running.push_back(line);
        self
    }

    /// Its callbacks take no time.
    pub(super) fn in_no_time(mut self) -> Self {
        self.report.micros = 0;
        self
    }

    /// Its script never ends.
    pub(super) fn again_and_again(mut self) -> Self {
        self.repeats = true;
        self
    }

    /// Its callbacks write these variables.
    pub(super) fn writing(mut self, storage: Vec<VariableWrite>) -> Self {
        self.report.storage = storage;
        self
    }

    /// Its callbacks print this.
    pub(super) fn printing(mut self, logs: &str) -> Self {
        self.report.logs = logs.into();
        self
    }
}

impl Sequence for Scripted {
    fn bind(&mut self, id: u32) {
        self.number = id;
    }

    fn call(&mut self, callback: Callback) {
        self.call_all([callback]);
    }

    fn call_all<const N: usize>(&mut self, callbacks: [Callback; N]) {
        assert!(self.running.is_empty(), "nothing is outstanding");
        for callback in callbacks {
            self.calls.lock().unwrap().push((self.number, callback));
            let line = self.script.pop_front().expect("the script is longer");
            let fails = matches!(line, Line::Fails(_));
            if self.repeats {
                self.script.push_back(line.clone());
            }
            self.running.push_back(line);
            if fails {
                break;
            }
        }
    }

    fn poll(&mut self) -> Option<Outcome> {
        let result = match self.running.front()? {
            Line::At(at, _) if self.clock.milliseconds() < *at => return None,
            Line::At(_, returned) | Line::Returns(returned) => Ok(returned.clone()),
            Line::Fails(message) => Err(CallFailure::new(ErrorReason::TRAP, *message)),
        };
        self.running.pop_front();
        Some(Outcome {
            result,
            report: self.report.clone(),
        })
    }

    fn fork(&mut self) -> Result<Self, CallFailure> {
        Ok(self.clone())
    }

    fn needs_mid_time(&self) -> bool {
        self.has_mid_time
    }
}

/// A clock that moves when somebody waits, one millisecond at a time.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    start: Instant,
    passed: Arc<Mutex<Duration>>,
}

impl Clock {
    /// Lets time pass.
    pub(super) fn advance(&self, time: Duration) {
        *self.passed.lock().unwrap() += time;
    }

    fn milliseconds(&self) -> u64 {
        self.passed.lock().unwrap().as_millis() as u64
    }
}

impl Pace for Clock {
    fn now(&self) -> Instant {
        self.start + *self.passed.lock().unwrap()
    }

    fn wait(&self, until: Instant) {
        let mut passed = self.passed.lock().unwrap();
        *passed = (*passed + Duration::from_millis(1)).min(until - self.start);
    }
}

/// What a test of the main channel stands on.
pub(super) struct World {
    pub(super) clock: Clock,
    pub(super) pending: Arc<Pending<Scripted>>,
    pub(super) calls: Calls,
    pub(super) masks: SharedRegion,
    /// The same memory, for a channel that owns it.
    other: Mutex<Vec<SharedRegion>>,
}

impl World {
    pub(super) fn new() -> Self {
        Self::with_masks(4 * VOCABULARY * 4)
    }

    pub(super) fn with_masks(bytes: usize) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("/sww{}.{number}-bin-shm", std::process::id());
        let masks = SharedRegion::create(&name, bytes).unwrap();
        let other = (0..16).map(|_| SharedRegion::open(&name, bytes).unwrap());
        let other = Mutex::new(other.collect());
        unlink_region(&name).unwrap();
        Self {
            other,
            clock: Clock {
                start: Instant::now(),
                passed: Arc::default(),
            },
            pending: Pending::new(PendingLimits::default()),
            calls: Calls::default(),
            masks,
        }
    }

    /// An instance that waits to be bound.
    pub(super) fn instance(&self, request: &str, script: impl IntoIterator<Item = Line>) {
        self.add(request, Scripted::new(self, script));
    }

    pub(super) fn add(&self, request: &str, sequence: Scripted) {
        let now = self.clock.now();
        let reserved = self.pending.reserve(request, now).unwrap();
        reserved.ready(sequence, now);
    }

    pub(super) fn step(&self) -> StepClock<'_> {
        StepClock {
            arrival: self.clock.now(),
            pace: &self.clock,
        }
    }

    /// The region of masks, mapped once more.
    pub(super) fn masks_again(&self) -> SharedRegion {
        self.other.lock().unwrap().pop().unwrap()
    }

    /// The calls since the last time.
    pub(super) fn take_calls(&self) -> Vec<(u32, Callback)> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    /// The tokens that row `index` of P1 allows.
    pub(super) fn row(&self, index: usize) -> Vec<Token> {
        let mut bytes = Vec::new();
        let row = 4 * VOCABULARY;
        assert!(self.masks.read(index * row, row, &mut bytes));
        let elements = (0..).zip(bytes.chunks(4));
        let allowed = elements.filter(|(_, element)| *element == [0; 4]);
        allowed.map(|(token, _)| token).collect()
    }
}

pub(super) fn config() -> StepConfig {
    StepConfig {
        vocabulary: VOCABULARY,
        eos: EOS,
        pre_step_time: Duration::from_millis(4),
        step_time: Duration::from_millis(150),
        grace_time: Duration::from_millis(20),
        late_steps: 10,
        late_mid_skips: false,
        repeats_pre: false,
        forks: 16,
        sequences: 4_096,
    }
}
