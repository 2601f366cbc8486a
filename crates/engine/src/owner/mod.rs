//! The one thread that touches a model.

mod report;

use std::time::Instant;

use sapwood_proto::time::Time;

use crate::engine::{Config, Engine, Inbox};
use crate::model::Model;

pub use report::{SequenceId, StepReport};

/// Owns a model and steps its sequences.
pub struct Owner {
    _model: Box<dyn Model>,
    inbox: Inbox,
}

impl Owner {
    /// An owner that the caller steps, and the engine that submits to it.
    #[must_use]
    pub fn by_hand(model: Box<dyn Model>, config: Config) -> (Self, Engine) {
        Engine::make(model, config)
    }

    pub(crate) fn new(model: Box<dyn Model>, _config: Config, inbox: Inbox) -> Self {
        Self {
            _model: model,
            inbox,
        }
    }

    /// One step.
    pub fn step(&mut self, _now: Time) -> StepReport {
        while let Ok(command) = self.inbox.commands.try_recv() {
            self.inbox.queue.leave(command.submission.prompt.len());
        }
        StepReport::default()
    }
}

pub(crate) fn run(mut owner: Owner, started: Instant) {
    while !owner.inbox.bell.is_closing() {
        owner.step(Time::new(started.elapsed()));
        std::thread::park();
    }
}
