//! P1 with scripted controllers and a virtual clock.

mod late;
mod mid;
mod pre;
mod requests;
mod waits;

use std::time::Duration;

use serde_json::{Value, json};

use super::super::scripted::*;
use super::super::sequence::{Callback, MidReturned, Pace, Returned};
use super::super::table::StepConfig;
use super::*;
use crate::host::{Group, VariablesLimits, Waiting};

/// An engine's view of a P1 main channel.
struct Engine {
    world: World,
    p1: P1<Scripted>,
}

impl Engine {
    fn new() -> Self {
        Self::with(config())
    }

    fn with(config: StepConfig) -> Self {
        Self {
            world: World::new(),
            p1: P1::new(config),
        }
    }

    /// With one bound sequence, 4, whose script goes on after its first `pre`.
    fn bound(script: impl IntoIterator<Item = Line>) -> Self {
        let mut engine = Self::new();
        engine.bind(4, [runs()].into_iter().chain(script));
        engine
    }

    fn bind(&mut self, id: u64, script: impl IntoIterator<Item = Line>) {
        let request = format!("r{id}");
        self.world.instance(&request, script);
        let bound = self.post_pre(json!({"pre_ops": [{"id": id, "req_id": request}]}));
        assert!(bound["pre_seqs"][id.to_string()].is_object(), "{bound}");
        self.world.take_calls();
    }

    fn try_post_pre(&mut self, request: Value) -> Result<Value, String> {
        let request = serde_json::from_value(request).unwrap();
        let answer = self
            .p1
            .post_pre_process(request, &self.world.pending, self.world.step());
        answer
            .map(|it| serde_json::to_value(it).unwrap())
            .map_err(|error| error.text)
    }

    fn post_pre(&mut self, request: Value) -> Value {
        self.try_post_pre(request).unwrap()
    }

    fn try_mid(&mut self, ops: Value) -> Result<Value, String> {
        let request = serde_json::from_value(json!({"ops": ops})).unwrap();
        let step = self.world.step();
        let answer = self.p1.mid_process(&request, &self.world.masks, step);
        answer
            .map(|it| serde_json::to_value(it).unwrap())
            .map_err(|error| error.text)
    }

    fn mid(&mut self, ops: Value) -> Value {
        self.try_mid(ops).unwrap()
    }
}

fn all() -> Vec<Token> {
    (0..VOCABULARY as Token).collect()
}

/// A `pre` whose result is there at this time.
fn pre_at(at: u64) -> Line {
    Line::At(
        at,
        Returned::Pre {
            num_forks: 1,
            suspend: false,
            ff_tokens: vec![],
            wait: None,
        },
    )
}

/// A sequence in the group whose `pre` suspends and waits for a variable.
fn waits_for(name: &str) -> (Arc<Group>, Line) {
    let group = Group::new(4, VariablesLimits::default());
    let wait = Some(Waiting::of_test(&group, &[name]));
    let line = Line::Returns(Returned::Pre {
        num_forks: 1,
        suspend: true,
        ff_tokens: vec![],
        wait,
    });
    (group, line)
}
