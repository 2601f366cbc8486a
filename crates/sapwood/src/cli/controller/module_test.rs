//! `sapwood controller test`: runs a module against a scripted model, and compares what it writes.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use futures::StreamExt;
use sapwood_engine::api::{EngineError, EngineEvent, EventKind, GenerationRequest, Prompt};
use sapwood_engine::scripted::{self, Script, Scripted};
use sapwood_engine::{Config as EngineConfig, Engine};
use sapwood_proto::steer::{SteerCall, SteerSource, SteerUser};
use serde::Deserialize;
use serde_json::{Value, json};

use super::isolation::{Isolation, TestHost};
use super::step_times::{StepTimes, TimedSteer};
use crate::config::Config;
use crate::controllers::TestedModule;
use crate::failure::{CliError, Exit};
use crate::output;
use crate::plain::plain;

#[derive(Debug, Args)]
pub(super) struct TestControllerArgs {
    /// The Wasm module
    file: PathBuf,
    /// The tests: a JSON list of prompts and what is to come of them
    #[arg(value_name = "TESTS")]
    cases: PathBuf,
    /// How controllers are kept apart: a process for each sequence, or threads of this process; the default is both, one
    /// after the other
    #[arg(long, value_enum)]
    isolation: Option<Isolation>,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

/// One test.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TestCase {
    #[serde(default)]
    prompt: String,
    /// The controller's argument: a string as it is, other JSON as its text.
    #[serde(default)]
    argument: Value,
    /// What the model would write on its own, after the prompt.
    #[serde(default)]
    preferred: String,
    /// The text of each sequence, in the order of their numbers.
    #[serde(default)]
    expected: Option<Texts>,
    /// Instead of texts: the reason for which the request fails.
    #[serde(default)]
    error: Option<String>,
    #[serde(default = "max_tokens")]
    max_tokens: u32,
}

/// One text, or one for each sequence.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Each(Vec<String>),
}

const fn max_tokens() -> u32 {
    256
}

/// What came of a test.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Texts(Vec<String>),
    Error(String),
}

/// What came of a test in one of the modes.
#[derive(Debug)]
struct CaseResult {
    passed: bool,
    outcome: Outcome,
    times: StepTimes,
    isolation: Isolation,
}

impl TestControllerArgs {
    pub(super) async fn run(&self, config: &Config) -> Result<Exit, CliError> {
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|why| CliError::usage(format!("{}: {why}", path.display())))
        };
        let cases: Vec<TestCase> = serde_json::from_slice(&read(&self.cases)?)
            .map_err(|why| CliError::usage(format!("{}: {why}", self.cases.display())))?;
        let bytes = read(&self.file)?;
        let mut results = Vec::new();
        let (mut ran, mut failed) = (0_usize, 0_usize);
        for isolation in Isolation::tested(self.isolation) {
            let host = TestHost::start(isolation, &config.controllers)?;
            let module = TestedModule::load(&config.controllers, host.host(), &bytes)
                .map_err(|why| CliError::usage(format!("{}: {why}", self.file.display())))?;
            for case in &cases {
                let (outcome, times) = case.run(&module).await?;
                let passed = case.is_met_by(&outcome);
                ran += 1;
                failed += usize::from(!passed);
                let result = CaseResult {
                    passed,
                    outcome,
                    times,
                    isolation,
                };
                if self.json {
                    results.push(case.json(&result));
                } else {
                    output::data(case.shown(&result))?;
                }
            }
        }
        if self.json {
            output::json(&results)?;
        }
        if failed > 0 {
            return Err(CliError::new(format!("{failed} of {ran} tests failed")));
        }
        Ok(Exit::Ok)
    }
}

impl TestCase {
    /// Runs the module with the case's request, on a model of its own.
    async fn run(&self, module: &TestedModule) -> Result<(Outcome, StepTimes), CliError> {
        let engine = scripted_engine(&self.preferred)?;
        let arg = match &self.argument {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let steer = module.source(&engine).open(SteerCall {
            user: SteerUser {
                name: "localhost",
                is_admin: true,
                may_control: true,
            },
            controller: "module",
            arg: &arg,
            watched: false,
            stops: false,
            sharer: None,
        });
        let times = StepTimes::default();
        let steer = match steer {
            Ok(steer) => steer,
            Err(refusal) => return Ok((Outcome::Error(refusal.reason.name().to_owned()), times)),
        };
        let mut request = GenerationRequest::new(Prompt::Text(self.prompt.clone()));
        request.params.temperature = Some(0.0);
        request.params.max_tokens = Some(self.max_tokens);
        request.steer = Some(Box::new(TimedSteer::new(steer, &times)));
        let outcome = match engine.submit(request) {
            Ok(events) => collect(events).await,
            Err(error) => Outcome::of(&error),
        };
        engine.end();
        Ok((outcome, times))
    }

    fn is_met_by(&self, outcome: &Outcome) -> bool {
        match outcome {
            Outcome::Error(reason) => self.error.as_ref() == Some(reason),
            Outcome::Texts(texts) => self.error.is_none() && *texts == self.texts(),
        }
    }

    fn texts(&self) -> Vec<String> {
        match &self.expected {
            None => vec![String::new()],
            Some(Texts::One(text)) => vec![text.clone()],
            Some(Texts::Each(texts)) => texts.clone(),
        }
    }

    fn shown(&self, result: &CaseResult) -> String {
        let CaseResult {
            passed,
            outcome,
            isolation,
            ..
        } = result;
        let word = if *passed { "ok  " } else { "FAIL" };
        let mut shown = format!("{word} {}", quoted(&self.prompt));
        if let Some((steps, median, most)) = result.times.summary() {
            let (median, most) = (milliseconds(median), milliseconds(most));
            let _ = write!(
                shown,
                "  {steps} steps, median {median:.3} ms, at most {most:.3} ms"
            );
        }
        let _ = writeln!(shown, "  ({})", isolation.name());
        if !passed {
            let expected = match &self.error {
                Some(reason) => Outcome::Error(reason.clone()),
                None => Outcome::Texts(self.texts()),
            };
            let _ = writeln!(shown, "     expected {}", expected.shown());
            let _ = writeln!(shown, "     found    {}", outcome.shown());
        }
        shown
    }

    fn json(&self, result: &CaseResult) -> Value {
        let CaseResult {
            passed,
            outcome,
            isolation,
            ..
        } = result;
        let (texts, error) = match outcome {
            Outcome::Texts(texts) => (Some(texts), None),
            Outcome::Error(reason) => (None, Some(reason)),
        };
        let mut shown = json!({
            "prompt": self.prompt, "passed": passed, "texts": texts, "error": error,
            "isolation": isolation.name(),
        });
        if let Some((steps, median, most)) = result.times.summary() {
            shown["steps"] = steps.into();
            shown["median_ms"] = milliseconds(median).into();
            shown["max_ms"] = milliseconds(most).into();
        }
        shown
    }
}

/// An engine of a model that would write `text` after every prompt.
///
/// # Errors
/// There is no thread for it.
pub(super) fn scripted_engine(text: &str) -> Result<Engine, CliError> {
    let failed = |why: &dyn std::fmt::Display| CliError::new(format!("the scripted model: {why}"));
    let model = Scripted::new(scripted::Config {
        script: Script::Text,
        text: text.to_owned(),
        ..scripted::Config::default()
    });
    let model = model.map_err(|why| failed(&why))?;
    Engine::spawn(Box::new(model), EngineConfig::default()).map_err(|why| failed(&why))
}

/// A text on one line, with nothing that a terminal would obey.
fn quoted(text: &str) -> String {
    let escaped = text.escape_debug().to_string();
    format!("\"{}\"", plain(&escaped))
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Outcome {
    fn of(error: &EngineError) -> Self {
        Self::Error(error.reason.name().to_owned())
    }

    fn shown(&self) -> String {
        match self {
            Self::Texts(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| quoted(text)).collect();
                texts.join(", ")
            }
            Self::Error(reason) => format!("the error {}", plain(reason)),
        }
    }
}

/// Reads a request to its end.
async fn collect(mut events: sapwood_engine::RequestHandle) -> Outcome {
    let mut texts = vec![String::new()];
    let mut failed = None;
    while let Some(EngineEvent { choice, kind, .. }) = events.next().await {
        let choice = choice as usize;
        if choice >= texts.len() {
            texts.resize(choice + 1, String::new());
        }
        match kind {
            EventKind::Tokens(tokens) => {
                let text = &mut texts[choice];
                let kept = text.len().saturating_sub(tokens.withdrawn as usize);
                text.truncate(kept);
                text.push_str(&tokens.text);
            }
            EventKind::Error(error) => return Outcome::of(&error),
            // The others go on, but a test in which a sequence fails has not passed.
            EventKind::Failed(error) => {
                failed.get_or_insert_with(|| Outcome::of(&error));
            }
            EventKind::Report(_) | EventKind::Finish(_) | EventKind::Usage(_) => {}
        }
    }
    failed.unwrap_or(Outcome::Texts(texts))
}
