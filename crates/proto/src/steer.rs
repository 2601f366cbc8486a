//! The interface of steerers, which constrain one sequence token by token.
//!
//! Implemented by Wasm controllers, runtimes in other processes, native constraints and the SDK's controllers; the
//! engine knows nothing else (DESIGN section 5, AI-801, D-12, D-49).
//!
//! ```text
//!   begin ─► pre … ─► mid_begin ─► (forward pass) ─► mid_poll … ─► (sample) ─► post ─► pre …
//! ```
//!
//! No method may block: one that has no result yet returns `None`, is called again, and calls its [`StepWaker`] when a
//! call would find the result. Who steers is asked for by name ([`SteerSource`]), once per request.

mod choice;
mod combined;
mod host_constraint;
mod mask;
mod source;
mod store;
mod variables;

use std::sync::Arc;
use std::time::Duration;

pub use self::choice::{
    CONTROLLER_ARG_BYTES_MAX, ConstraintChoice, ConstraintKind, ControllerChoice, InvalidChoice,
};
pub use self::combined::Combined;
pub use self::host_constraint::{HostConstraint, HostConstraintCall, HostConstraintSource};
pub use self::mask::{Mask, SharedMask};
pub use self::source::{SteerCall, SteerRefusal, SteerSource, SteerUser};
pub use self::store::{ControllerStore, ModuleInfo, ModulePage, TagInfo, TagPage, UploadedModule};
pub use self::variables::{NamedVariable, OutsideWrite, RequestVariables, VariablesSharer};
use crate::error_reason::ErrorReason;

/// A token id of the model's vocabulary.
pub type Token = u32;

/// Wakes an engine that waits for a steerer. May be called from any thread, at any time, more often than needed.
pub trait StepWaker: Send + Sync {
    /// A result that was missing is there.
    fn wake(&self);
}

/// The result of a steerer's method.
pub type Steered<T> = Result<T, SteerFailure>;

/// Why a steerer failed. The sequence ends as `controller-failed` with this reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct SteerFailure {
    /// The short, stable name (`trap`, `timeout`, `constraint_failed`, `deadlock` …).
    pub reason: ErrorReason,
    /// A message for humans. Contains nothing that a client must not see.
    pub message: String,
}

/// What a steerer wants to be done before its first step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Begun {
    /// Replaces the prompt of the request, if set.
    pub prompt: Option<Vec<Token>>,
}

/// How long a steerer waits for what it has named, before it is asked again all the same (AI-1005).
pub const WAIT_TIME_MAX: Duration = Duration::from_secs(1);

/// The request of [`Steer::pre`] for the coming step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pre {
    /// Take part in the step; first append these tokens (they need a forward pass, no sampling).
    Run {
        /// Tokens to append before sampling; often empty.
        fast_forward: Vec<Token>,
    },
    /// Skip this step. `pre` runs again before the next one (AI-813).
    Suspend,
    /// As [`Pre::Suspend`], by a steerer that knows what it waits for: until that happens, or [`WAIT_TIME_MAX`] has passed,
    /// `pre` returns this at once and runs nothing (AI-1005).
    Wait,
    /// Become this many sequences in all, this one included; at least 1.
    Fork(u32),
    /// End the sequence here.
    Stop,
}

/// The request of [`Steer::mid_poll`] for sampling.
#[derive(Clone, Debug, PartialEq)]
pub enum Mid {
    /// Go on as one sequence.
    One(Branch),
    /// Become as many sequences as there are branches, at least one; the first is this sequence. All of them sample from
    /// the same logits (AI-505).
    Fork(Vec<Branch>),
    /// End the sequence here.
    Stop,
}

/// How one sequence goes on in this step.
#[derive(Clone, Debug, PartialEq)]
pub enum Branch {
    /// Sample one token.
    Sample(Sample),
    /// Sample nothing; change the committed text.
    Splice(Splice),
    /// Neither sample nor append in this step.
    Noop,
}

/// How one token is sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// The allowed tokens; `None` allows all, which is cheaper than a full mask (AI-802).
    pub mask: Option<SharedMask>,
    /// Added to the logits, after the request's own bias.
    pub bias: Vec<(Token, f32)>,
    /// Replaces the request's temperature from this step on, until it is replaced again.
    pub temperature: Option<f32>,
    /// What happens instead of appending the sampled token; the first that applies wins.
    pub splices: Vec<ConditionalSplice>,
}

/// A splice that depends on the sampled token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionalSplice {
    /// It applies if the sampled token is one of these, or if there are none.
    pub when_sampled: Vec<Token>,
    /// The sampled token is appended before the tokens of the splice; otherwise it is dropped.
    pub keeps_sampled: bool,
    /// What happens. Here `backtrack` counts the committed tokens alone, and not the sampled token.
    pub splice: Splice,
}

/// Takes back committed tokens and appends others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Splice {
    /// How many committed tokens to take back; at most those after the prompt (AI-826).
    pub backtrack: u32,
    /// What to append instead.
    pub tokens: Vec<Token>,
}

/// What really happened to a sequence in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Appended<'t> {
    /// How many committed tokens were taken back; a sampled token that a splice dropped was never committed.
    pub backtrack: u32,
    /// The tokens appended after that.
    pub tokens: &'t [Token],
    /// The token that was sampled, if one was; with a splice it need not be among `tokens`.
    pub sampled: Option<Token>,
}

/// The request of [`Steer::post`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Post {
    /// Continue.
    Continue,
    /// End the sequence after the tokens just appended.
    Stop,
}

/// What the callbacks of one step printed and wrote, for those who watch a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// What was printed.
    pub logs: String,
    /// The successful writes of variables, in order.
    pub storage: Vec<VariableWrite>,
    /// Processor time of the callbacks, rounded down to 10 µs.
    pub micros: u64,
}

impl StepReport {
    /// Returns whether there is anything to show; time alone is not.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.logs.is_empty() && self.storage.is_empty()
    }
}

/// One successful write of a variable (AI-951).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableWrite {
    /// The variable's name.
    pub name: String,
    /// What was written or appended.
    pub value: Vec<u8>,
    /// Whether `value` was added to the end of what was there.
    pub append: bool,
    /// The version that the write required, if it required one.
    pub when_version_is: Option<u64>,
}

impl VariableWrite {
    /// Bytes of memory that it takes, about: many small ones take far more than their names and values.
    #[must_use]
    pub const fn held_bytes(&self) -> usize {
        WRITE_BYTES + self.name.len() + self.value.len()
    }
}

/// What a write takes beside its texts: itself, and two allocations.
const WRITE_BYTES: usize = 128;

/// Steers one sequence. The engine calls the methods in the order of the module's diagram, all from one thread.
pub trait Steer: Send {
    /// Sets the seed of the request, for steerers that draw at random. Called once, before [`Steer::begin`].
    fn seed(&mut self, _seed: u64) {}

    /// Starts with the tokens of the prompt. Called once, before everything else; must return at once. `waker` is for
    /// this steerer and all its forks.
    fn begin(&mut self, prompt: &[Token], waker: &Arc<dyn StepWaker>);

    /// Returns the result of [`Steer::begin`], or `None` if it is not ready yet. The sequence waits outside the batch
    /// until then.
    ///
    /// # Errors
    /// The request fails before its first token.
    fn begin_poll(&mut self) -> Steered<Option<Begun>> {
        Ok(Some(Begun::default()))
    }

    /// Sets the number of the sequence, unique in its request. Called once, before the first `pre`.
    fn bind(&mut self, _number: u32) {}

    /// Called at the start of a step, before the batch is formed, until there is a result; a sequence whose result is
    /// missing skips the step.
    ///
    /// # Errors
    /// The sequence fails.
    fn pre(&mut self) -> Steered<Option<Pre>>;

    /// Starts the computation for this step's sampling. Called before the forward pass; must return at once. `group`:
    /// the numbers of the sequences that a fork just made of one, the parent's first; its own alone without a fork.
    fn mid_begin(&mut self, group: &[u32]);

    /// Returns how many of the best tokens of each output row it wants to see: none by default, as it costs a sort.
    fn best_tokens_wanted(&self) -> usize {
        0
    }

    /// Shows the best tokens of an output row with their log-probabilities, best first: those of the model, before any mask
    /// and bias. Called when the forward pass has ended, before the step is sampled; forks share the row.
    fn show_best_tokens(&mut self, _best: &[(Token, f32)]) {}

    /// Returns the result of [`Steer::mid_begin`], or `None` if it is not ready yet. Called after the forward pass, and
    /// again in later steps while it is late (the sequence's output row is retained meanwhile).
    ///
    /// # Errors
    /// The sequence fails.
    fn mid_poll(&mut self) -> Steered<Option<Mid>>;

    /// Called after the calls of [`Steer::pre`], and after those of [`Steer::mid_begin`], of all sequences of a step. A
    /// steerer that collects what several sequences ask for sends it now. Must return at once.
    fn flush(&mut self) {}

    /// Reports what the result of [`Steer::mid_poll`] did; tokens that [`Steer::pre`] appended are not repeated. Must
    /// return at once; a steerer that decides elsewhere continues here and stops in the next `pre`.
    ///
    /// # Errors
    /// The sequence fails.
    fn post(&mut self, appended: Appended<'_>) -> Steered<Post>;

    /// Creates a steerer for a fork of this sequence, in the same state. `index` is the new branch's number (1, 2, …);
    /// the original sequence is branch 0. [`Steer::bind`] of the new one follows.
    ///
    /// # Errors
    /// The sequence fails.
    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>>;

    /// Returns whether the steerer would allow these tokens after `backtrack` tokens were taken back, without changing
    /// its state. Asked when another steerer of the same sequence forces tokens (AI-803).
    ///
    /// # Errors
    /// The sequence fails.
    fn would_accept(&mut self, _backtrack: u32, _tokens: &[Token]) -> Steered<bool> {
        Ok(true)
    }

    /// Returns whether a sampled EOS token ends the sequence. A controller sees it and decides itself (AI-804).
    fn ends_at_eos(&self) -> bool {
        true
    }

    /// Returns whether it may take back committed tokens, so that faces which cannot take back text hold it (AI-936).
    fn may_backtrack(&self) -> bool {
        false
    }

    /// Returns whether it fails by itself when a result takes too long. The engine then waits for as long as it takes, and
    /// the sequence skips its steps meanwhile (AI-851).
    fn limits_itself(&self) -> bool {
        false
    }

    /// Takes what the callbacks printed and wrote since the last call.
    fn take_report(&mut self) -> Option<StepReport> {
        None
    }
}
