//! The trait of controllers, and what they decide.

use alloc::string::String;
use alloc::vec::Vec;

use crate::{Allowed, Mask, SequenceId, Token};

/// Steers one sequence token by token.
///
/// One value exists for each sequence. It is created by `Default::default()`, which may call every function of the host;
/// then [`Controller::init`] gets the prompt and [`Controller::step`] is called before each step. A fork has a copy of
/// it: in WebAssembly a copy of the whole memory, natively a clone. To share something between forks, use
/// [`Vars`](crate::Vars).
pub trait Controller: Default + Clone + Send + 'static {
    /// Called once with the tokens of the prompt.
    fn init(&mut self, _prompt: &[Token]) -> Init {
        Init::default()
    }

    /// Called before each step with what the step before it did. Decides what happens in this one.
    fn step(&mut self, step: Step<'_>) -> Decision;
}

/// What a controller wants to be done before the first step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Init {
    /// Replaces the prompt, if set. With the feature `p1` it must begin with the original prompt.
    pub prompt: Option<Vec<Token>>,
}

/// What really happened to the sequence in the step before. All is empty in the first step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step<'a> {
    /// How many committed tokens were taken back.
    pub backtrack: u32,
    /// The tokens that were appended after that.
    pub tokens: &'a [Token],
    /// The token that was sampled, if one was. After a splice it need not be among `tokens`.
    pub sampled: Option<Token>,
    /// The sequences that the last fork made, in the order of its branches; this sequence alone if there was no fork.
    pub fork_group: &'a [SequenceId],
}

impl Step<'_> {
    /// The index of this sequence in its fork group; 0 without a fork.
    #[must_use]
    pub fn fork_index(&self) -> usize {
        let own = crate::self_id();
        self.fork_group
            .iter()
            .position(|&id| id == own)
            .unwrap_or(0)
    }
}

/// What happens in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// End the sequence here.
    Stop,
    /// Nothing happens in this step; the controller is asked again in the next one. If all sequences of a request do this
    /// for more than three steps, the request ends as a deadlock.
    Noop,
    /// As [`Decision::Noop`], but the controller is not asked again before one of these variables changes, another sequence of
    /// the request ends, or a second has passed. Its own writes in this step are no change. At most 64 names; an empty list
    /// waits for the others to end. A host that does not know this asks again in the next step.
    Wait(Vec<String>),
    /// Sample one of these tokens.
    Sample(Mask),
    /// Sample nothing; change the committed text.
    Splice {
        /// How many committed tokens to take back; at most those after the prompt.
        backtrack: u32,
        /// What to append.
        tokens: Vec<Token>,
    },
    /// Go on with as many sequences as there are branches; this sequence is the first of them. One branch is no fork, and
    /// none is [`Decision::Stop`].
    Fork(Vec<Branch>),
}

impl Decision {
    /// Waits for a variable to change; see [`Decision::Wait`].
    #[must_use]
    pub fn wait_for(variable: &str) -> Self {
        Self::Wait(alloc::vec![variable.into()])
    }

    /// Appends tokens without sampling.
    #[must_use]
    pub const fn fast_forward(tokens: Vec<Token>) -> Self {
        Self::Splice {
            backtrack: 0,
            tokens,
        }
    }

    /// The branches that this decision stands for; none ends the sequence.
    #[must_use]
    pub fn into_branches(self) -> Vec<Branch> {
        match self {
            Self::Stop => Vec::new(),
            Self::Noop => alloc::vec![Branch::Noop],
            Self::Wait(names) => alloc::vec![Branch::Wait(names)],
            Self::Sample(mask) => alloc::vec![Branch::Sample(Sample::new(mask))],
            Self::Splice { backtrack, tokens } => alloc::vec![Branch::Splice { backtrack, tokens }],
            Self::Fork(branches) => branches,
        }
    }
}

impl From<Mask> for Decision {
    fn from(mask: Mask) -> Self {
        Self::Sample(mask)
    }
}

impl From<Sample> for Decision {
    fn from(sample: Sample) -> Self {
        Self::Fork(alloc::vec![Branch::Sample(sample)])
    }
}

/// How one sequence goes on.
#[derive(Clone, Debug, PartialEq)]
pub enum Branch {
    /// Sample one token.
    Sample(Sample),
    /// Sample nothing; change the committed text.
    Splice {
        /// How many committed tokens to take back.
        backtrack: u32,
        /// What to append.
        tokens: Vec<Token>,
    },
    /// Nothing happens in this step. With the feature `p1` a branch of a fork cannot be this.
    Noop,
    /// As [`Decision::Wait`]. With the feature `p1` a branch of a fork cannot be this.
    Wait(Vec<String>),
}

impl From<Mask> for Branch {
    fn from(mask: Mask) -> Self {
        Self::Sample(Sample::new(mask))
    }
}

impl From<Sample> for Branch {
    fn from(sample: Sample) -> Self {
        Self::Sample(sample)
    }
}

/// How one token is sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The allowed tokens.
    pub mask: Allowed,
    /// Replaces the request's temperature from this step on, until it is replaced again.
    pub temperature: Option<Temperature>,
    /// What happens instead of appending the sampled token alone; the first that applies wins.
    pub splices: Vec<ConditionalSplice>,
}

impl Sample {
    /// Samples one of these tokens.
    #[must_use]
    pub fn new(mask: impl Into<Allowed>) -> Self {
        Self {
            mask: mask.into(),
            temperature: None,
            splices: Vec::new(),
        }
    }

    /// Replaces the request's temperature from this step on. Ignored with the feature `p1`.
    #[must_use]
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.temperature = Some(Temperature::new(temperature));
        self
    }

    /// Adds a splice that depends on the sampled token.
    #[must_use]
    pub fn splice(mut self, splice: ConditionalSplice) -> Self {
        self.splices.push(splice);
        self
    }
}

/// A temperature, in millionths: the same value in WebAssembly, where it travels as text, and natively.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Temperature(u32);

impl Temperature {
    /// Rounds to millionths. Negative and undefined values become 0.
    #[must_use]
    pub fn new(temperature: f32) -> Self {
        // The conversion saturates, and turns NaN into 0.
        Self((f64::from(temperature) * 1e6 + 0.5) as u32)
    }

    /// The value in millionths.
    #[must_use]
    pub const fn millionths(self) -> u32 {
        self.0
    }

    /// The value.
    #[must_use]
    pub fn get(self) -> f32 {
        (f64::from(self.0) / 1e6) as f32
    }
}

/// A splice that depends on the sampled token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionalSplice {
    /// It applies if the sampled token is one of these, or if there are none.
    pub when_sampled: Vec<Token>,
    /// How many tokens to take back, counting the sampled one: 0 keeps it, 1 drops it.
    pub backtrack: u32,
    /// What to append.
    pub tokens: Vec<Token>,
}

impl ConditionalSplice {
    /// Whether it applies to a sampled token.
    #[must_use]
    pub fn applies_to(&self, sampled: Token) -> bool {
        self.when_sampled.is_empty() || self.when_sampled.contains(&sampled)
    }
}

#[cfg(test)]
mod tests {
    use super::Temperature;

    #[test]
    fn temperatures_are_millionths() {
        for (given, millionths) in [
            (0.0, 0),
            (0.7, 700_000),
            (1.0, 1_000_000),
            (-1.0, 0),
            (f32::NAN, 0),
        ] {
            assert_eq!(Temperature::new(given).millionths(), millionths);
        }
        assert_eq!(Temperature::new(0.7).get(), 0.7);
        assert_eq!(Temperature::new(1e-9).get(), 0.0);
    }
}
