//! A scripted engine that the test steps, with virtual time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sapwood_proto::time::Time;

use crate::api::{
    ChoiceEnd, EngineError, EngineEvent, EventKind, GenerationRequest, Prompt, TokenUsage,
};
use crate::scripted::{Config as Script, Scripted};
use crate::{Config, DraftModel, Engine, EngineOwner, RequestHandle, StepReport};

/// A clock that the test sets; clones share the time.
#[derive(Clone, Default)]
pub(super) struct TestClock(Arc<Mutex<Time>>);

impl TestClock {
    pub(super) fn now(&self) -> Time {
        *self.0.lock().unwrap()
    }

    pub(super) fn go_to(&self, time: Time) {
        let mut now = self.0.lock().unwrap();
        *now = now.max(time);
    }
}

pub(super) struct Bench {
    /// The time of the last step, for steerers.
    pub(super) clock: TestClock,
    pub(super) owner: EngineOwner,
    pub(super) engine: Engine,
    pub(super) now: Time,
}

/// All events of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answer {
    /// Per choice: text, ids, finish.
    pub(super) choices: Vec<(String, Vec<u32>, Option<ChoiceEnd>)>,
    /// The choices that ended with an error while the request went on.
    pub(super) failed: Vec<(u32, EngineError)>,
    pub(super) usage: Option<TokenUsage>,
    pub(super) error: Option<EngineError>,
}

impl Answer {
    pub(super) fn take(&mut self, event: EngineEvent) {
        let choice = event.choice as usize;
        if self.choices.len() <= choice {
            self.choices
                .resize(choice + 1, (String::new(), Vec::new(), None));
        }
        assert!(
            self.error.is_none() && self.usage.is_none(),
            "nothing follows the last event"
        );
        let failed = self
            .failed
            .iter()
            .any(|(failed, _)| *failed == event.choice);
        let of_the_request = matches!(event.kind, EventKind::Usage(_) | EventKind::Error(_));
        assert!(!failed || of_the_request, "nothing follows a failure");
        let (text, ids, finish) = &mut self.choices[choice];
        match event.kind {
            EventKind::Tokens(tokens) => {
                assert!(finish.is_none(), "nothing follows a finish");
                ids.truncate(ids.len() - tokens.backtrack as usize);
                text.truncate(text.len() - tokens.withdrawn as usize);
                ids.extend(tokens.tokens.iter().map(|token| token.id));
                text.push_str(&tokens.text);
            }
            EventKind::Report(_) => {}
            EventKind::Finish(end) => *finish = Some(end),
            EventKind::Failed(cause) => self.failed.push((event.choice, cause)),
            EventKind::Usage(usage) => self.usage = Some(usage),
            EventKind::Error(cause) => self.error = Some(cause),
        }
    }

    pub(super) fn text(&self) -> &str {
        &self.choices[0].0
    }
}

impl Bench {
    pub(super) fn new(script: Script) -> Self {
        Self::with(script, Config::default())
    }

    pub(super) fn with(script: Script, config: Config) -> Self {
        let model = Box::new(Scripted::new(script).unwrap());
        Self::over(model, config)
    }

    pub(super) fn over(model: Box<dyn crate::model::Model>, config: Config) -> Self {
        Self::drafting(model, None, config)
    }

    pub(super) fn drafting(
        model: Box<dyn crate::model::Model>,
        draft: Option<DraftModel>,
        config: Config,
    ) -> Self {
        let config = Config {
            seed: config.seed.or(Some(1)),
            ..config
        };
        let (owner, engine) = Engine::by_hand_drafting(model, draft, config);
        Self {
            clock: TestClock::default(),
            owner,
            engine,
            now: Time::ZERO,
        }
    }

    pub(super) fn submit(&self, request: GenerationRequest) -> RequestHandle {
        self.engine.submit(request).unwrap()
    }

    /// Steps once, one millisecond after the last step.
    pub(super) fn step(&mut self) -> StepReport {
        self.step_after(Duration::from_millis(1))
    }

    /// Steps once, this long after the last step.
    pub(super) fn step_after(&mut self, pause: Duration) -> StepReport {
        self.now = self.now + pause;
        self.clock.go_to(self.now);
        self.owner.step(self.now)
    }

    /// Steps until there is no work; time jumps to the next wake-up. Returns the reports of all steps.
    pub(super) fn settle(&mut self) -> Vec<StepReport> {
        let mut reports = Vec::new();
        loop {
            let report = self.step();
            let wake_at = report.wake_at;
            reports.push(report);
            assert!(reports.len() < 100_000, "the engine does not come to rest");
            match wake_at {
                None => return reports,
                Some(at) => self.now = self.now.max(at),
            }
        }
    }

    /// Steps until the engine is idle, reading every event as it arrives.
    pub(super) fn answer(&mut self, request: GenerationRequest) -> Answer {
        let mut handle = self.submit(request);
        self.settle();
        read(&mut handle)
    }
}

/// Reads the events that are available.
pub(super) fn read(handle: &mut RequestHandle) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = handle.try_next() {
        answer.take(event);
    }
    answer
}

/// A request for raw text, greedy.
pub(super) fn request_for(text: &str) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Text(text.to_owned()));
    request.params.temperature = Some(0.0);
    request
}
