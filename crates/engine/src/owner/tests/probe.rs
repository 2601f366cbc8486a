//! A steerer with the behaviour that its test defines; it logs its calls.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sapwood_proto::steer::{Mid, Post, Pre, Steer, Steered, Token};
use sapwood_proto::time::Time;

/// The calls that a test steerer received, in order.
pub(super) type Log = Arc<Mutex<Vec<String>>>;

/// Behaves as its closures define, and logs its calls.
#[derive(Clone)]
pub(super) struct Probe {
    /// Called with the number of the round.
    pub(super) pre: fn(u32) -> Steered<Pre>,
    pub(super) mid: fn(u32) -> Steered<Option<Mid>>,
    pub(super) post: fn(u32, &[Token]) -> Steered<Post>,
    /// The result of `mid` is available this long after its beginning.
    pub(super) slow: Duration,
    round: u32,
    begun: Time,
    branch: String,
    pub(super) log: Log,
}

impl Probe {
    pub(super) fn new() -> Self {
        Self {
            pre: |_| {
                Ok(Pre::Run {
                    fast_forward: Vec::new(),
                })
            },
            mid: |_| {
                Ok(Some(Mid::Sample {
                    mask: None,
                    bias: Vec::new(),
                    temperature: None,
                }))
            },
            post: |_, _| Ok(Post::Continue),
            slow: Duration::ZERO,
            round: 0,
            begun: Time::ZERO,
            branch: String::new(),
            log: Log::default(),
        }
    }

    fn note(&self, what: impl Into<String>) {
        self.log
            .lock()
            .unwrap()
            .push(format!("{}{}", self.branch, what.into()));
    }
}

impl Steer for Probe {
    fn pre(&mut self) -> Steered<Pre> {
        self.note("pre");
        (self.pre)(self.round)
    }

    fn mid_begin(&mut self, now: Time) {
        self.note("begin");
        self.begun = now;
    }

    fn mid_poll(&mut self, now: Time) -> Steered<Option<Mid>> {
        if now.since(self.begun) < self.slow {
            return Ok(None);
        }
        let mid = (self.mid)(self.round)?;
        if mid.is_some() {
            self.round += 1;
        }
        Ok(mid)
    }

    fn post(&mut self, backtrack: u32, tokens: &[Token], sampled: bool) -> Steered<Post> {
        self.note(format!("post {backtrack} {tokens:?} {sampled}"));
        (self.post)(backtrack, tokens)
    }

    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>> {
        let branch = format!("{}{index}:", self.branch);
        Ok(Box::new(Self {
            branch,
            ..self.clone()
        }))
    }
}
