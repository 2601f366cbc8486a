//! A steerer with the behaviour that its test defines; it logs its calls.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sapwood_proto::steer::{
    Appended, Branch, Mask, Mid, Post, Pre, Sample, Splice, Steer, Steered, StepReport, StepWaker,
    Token,
};
use sapwood_proto::time::Time;

use super::harness::TestClock;

/// The calls that a test steerer received, in order.
pub(super) type Log = Arc<Mutex<Vec<String>>>;

/// Takes part in the step without forced tokens.
pub(super) fn run() -> Pre {
    forced(&[])
}

/// Takes part in the step and first appends these tokens.
pub(super) fn forced(tokens: &[Token]) -> Pre {
    Pre::Run {
        fast_forward: tokens.to_vec(),
    }
}

/// Samples without a restriction.
pub(super) fn free() -> Mid {
    sample(Sample::default())
}

/// Samples one of these tokens.
pub(super) fn masked(mask: Mask) -> Mid {
    sample(Sample {
        mask: Some(Arc::new(mask)),
        ..Sample::default()
    })
}

pub(super) fn sample(sample: Sample) -> Mid {
    Mid::One(Branch::Sample(sample))
}

pub(super) fn splice(backtrack: u32, tokens: &[Token]) -> Mid {
    Mid::One(Branch::Splice(Splice {
        backtrack,
        tokens: tokens.to_vec(),
    }))
}

pub(super) fn noop() -> Mid {
    Mid::One(Branch::Noop)
}

/// Behaves as its closures define, and logs its calls.
#[derive(Clone)]
pub(super) struct Probe {
    /// Called with the number of the round.
    pub(super) pre: fn(u32) -> Steered<Pre>,
    pub(super) mid: fn(u32) -> Steered<Option<Mid>>,
    pub(super) post: fn(u32, &[Token]) -> Steered<Post>,
    /// Called with the index of a branch before it is made.
    pub(super) fork: fn(u32) -> Steered<()>,
    /// Called with the number of the round after each step.
    pub(super) report: fn(u32) -> Option<StepReport>,
    pub(super) ends_at_eos: bool,
    /// Flushes are logged too.
    pub(super) logs_flushes: bool,
    /// The result of `mid` is available this long after its beginning.
    pub(super) slow: Duration,
    /// Measures `slow`.
    pub(super) clock: TestClock,
    round: u32,
    begun: Time,
    branch: String,
    pub(super) log: Log,
}

impl Probe {
    pub(super) fn new() -> Self {
        Self {
            pre: |_| Ok(run()),
            mid: |_| Ok(Some(free())),
            post: |_, _| Ok(Post::Continue),
            fork: |_| Ok(()),
            report: |_| None,
            ends_at_eos: false,
            logs_flushes: false,
            slow: Duration::ZERO,
            clock: TestClock::default(),
            round: 0,
            begun: Time::ZERO,
            branch: String::new(),
            log: Log::default(),
        }
    }

    fn note(&self, what: impl Into<String>) {
        let line = format!("{}{}", self.branch, what.into());
        self.log.lock().unwrap().push(line);
    }
}

impl Steer for Probe {
    fn begin(&mut self, _prompt: &[Token], _waker: &Arc<dyn StepWaker>) {}

    fn pre(&mut self) -> Steered<Option<Pre>> {
        self.note("pre");
        (self.pre)(self.round).map(Some)
    }

    fn mid_begin(&mut self, group: &[u32]) {
        if group.len() > 1 {
            self.note(format!("begin {group:?}"));
        } else {
            self.note("begin");
        }
        self.begun = self.clock.now();
    }

    fn mid_poll(&mut self) -> Steered<Option<Mid>> {
        if self.clock.now().since(self.begun) < self.slow {
            return Ok(None);
        }
        let mid = (self.mid)(self.round)?;
        if mid.is_some() {
            self.round += 1;
        }
        Ok(mid)
    }

    fn flush(&mut self) {
        if self.logs_flushes {
            self.note("flush");
        }
    }

    fn post(&mut self, appended: Appended<'_>) -> Steered<Post> {
        let Appended {
            backtrack,
            tokens,
            sampled,
        } = appended;
        self.note(format!("post {backtrack} {tokens:?} {sampled:?}"));
        (self.post)(backtrack, tokens)
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        (self.fork)(index)?;
        let branch = format!("{}{index}:", self.branch);
        Ok(Box::new(Self {
            branch,
            ..self.clone()
        }))
    }

    fn ends_at_eos(&self) -> bool {
        self.ends_at_eos
    }

    fn take_report(&mut self) -> Option<StepReport> {
        (self.report)(self.round)
    }
}
