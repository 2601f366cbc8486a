//! Drives controllers without a model: a small vocabulary, and in the place of the model a preferred text.
//!
//! ```
//! use sapwood_guest::prelude::*;
//! use sapwood_guest::testing::{End, Scenario};
//!
//! /// Allows capital letters only.
//! #[derive(Clone, Default)]
//! struct Shout;
//!
//! impl Controller for Shout {
//!     fn step(&mut self, _step: Step<'_>) -> Decision {
//!         Decision::Sample(trie().mask_of((), |(), byte| byte.is_ascii_uppercase().then_some(())))
//!     }
//! }
//!
//! let run = Scenario::new("What? ").prefers(["AHA", "OHO"]).steps(4).run::<Shout>();
//! assert_eq!(run.texts(), ["AHAA"]);
//! assert_eq!(run.sequences[0].end, End::Length);
//! ```

mod cases;
mod steps;
mod vocabulary;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use cases::Case;
pub use steps::Steered;
pub use vocabulary::ToyModel;

use crate::native::{NativeController, SharedVariables};
use crate::{Controller, SequenceId, Token, Value};
use steps::Engine;

/// Runs a controller once, with a text that the model prefers. See [`Scenario`].
#[must_use]
pub fn run<C: Controller>(argument: &str, prompt: &str, preferred: &str) -> Run {
    Scenario::new(prompt)
        .argument(argument)
        .prefers([preferred])
        .run::<C>()
}

/// A request, and a model that prefers certain texts.
///
/// The n-th sequence prefers the n-th text (the last one, if there are fewer): at each step it samples the longest allowed
/// token that continues this text after as many bytes as it has generated so far. If no allowed token does, it samples
/// the end of the sequence where that is allowed, and else the allowed token of the lowest number.
#[derive(Clone, Debug)]
pub struct Scenario {
    prompt: String,
    argument: String,
    preferred: Vec<String>,
    steps_max: usize,
}

impl Scenario {
    /// A request with a prompt.
    #[must_use]
    pub fn new(prompt: &str) -> Self {
        Self {
            prompt: prompt.to_owned(),
            argument: String::new(),
            preferred: vec![String::new()],
            steps_max: 1_000,
        }
    }

    /// Sets the controller's argument.
    #[must_use]
    pub fn argument(mut self, argument: &str) -> Self {
        argument.clone_into(&mut self.argument);
        self
    }

    /// Sets the texts that the model prefers.
    #[must_use]
    pub fn prefers<'t>(mut self, texts: impl IntoIterator<Item = &'t str>) -> Self {
        self.preferred = texts.into_iter().map(str::to_owned).collect();
        self
    }

    /// Ends each sequence after this many steps; 1,000 if it is not set.
    #[must_use]
    pub const fn steps(mut self, steps_max: usize) -> Self {
        self.steps_max = steps_max;
        self
    }

    /// The controller's argument.
    #[must_use]
    pub fn argument_text(&self) -> &str {
        &self.argument
    }

    /// The tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> Vec<Token> {
        ToyModel::new().tokenize_text(self.prompt.as_bytes())
    }

    /// Runs a controller natively.
    #[must_use]
    pub fn run<C: Controller>(&self) -> Run {
        let variables = Arc::new(SharedVariables::default());
        let model = Arc::new(ToyModel::new());
        let first =
            NativeController::<C>::new(model, self.argument.as_str(), Arc::clone(&variables) as _);
        let mut run = match first {
            Ok(first) => self.drive(first),
            Err(panic) => Run::failed(panic.0),
        };
        run.variables = variables.snapshot();
        run
    }

    /// Runs something else that steers, such as a module, through the same steps.
    #[must_use]
    pub fn drive<S: Steered>(&self, first: S) -> Run {
        Engine::new(&self.preferred, self.steps_max).run(first, &self.prompt_tokens())
    }
}

/// What a run left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The sequences, in the order of their numbers.
    pub sequences: Vec<Sequence>,
    /// The variables at the end.
    pub variables: BTreeMap<String, Value>,
}

/// One sequence of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Its number: 0 for the first.
    pub id: SequenceId,
    /// What was generated, with what it has from the sequence that it was forked from.
    pub text: String,
    /// What the controller printed in it.
    pub logs: String,
    /// Why it ended.
    pub end: End,
}

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The controller stopped it.
    Stop,
    /// Nothing but the end of the sequence was allowed.
    Eos,
    /// It has all its steps.
    Length,
    /// No sequence did anything for more than three steps.
    Deadlock,
    /// The controller failed, with this message.
    Failed(String),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stop => f.write_str("stop"),
            Self::Eos => f.write_str("eos"),
            Self::Length => f.write_str("length"),
            Self::Deadlock => f.write_str("deadlock"),
            Self::Failed(message) => write!(f, "failed: {message}"),
        }
    }
}

impl Run {
    /// The texts of all sequences.
    #[must_use]
    pub fn texts(&self) -> Vec<&str> {
        self.sequences
            .iter()
            .map(|sequence| sequence.text.as_str())
            .collect()
    }

    /// The text of a variable; empty if there is none of that name.
    #[must_use]
    pub fn variable(&self, name: &str) -> String {
        self.variables
            .get(name)
            .map(Value::text)
            .unwrap_or_default()
    }

    fn failed(message: String) -> Self {
        let sequence = Sequence {
            id: 0,
            text: String::new(),
            logs: String::new(),
            end: End::Failed(message),
        };
        Self {
            sequences: vec![sequence],
            variables: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests;
