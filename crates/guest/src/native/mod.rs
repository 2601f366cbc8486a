//! Controllers without WebAssembly: the same type, run by a Rust program (AI-641).
//!
//! [`NativeController`] is one sequence's controller. What the host's functions return while it runs comes from a
//! [`Model`] and from [`Variables`]. [`testing`](crate::testing) drives it with a small vocabulary.

pub(crate) mod host;
mod variables;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

pub use variables::{SharedVariables, VariableWrite, Variables, WriteOutcome};

use crate::{Branch, Controller, Init, SequenceId, Step, Token, TokenTrie};
use host::Context;

/// What a controller can ask about the model.
pub trait Model: Send + Sync {
    /// The vocabulary, with the end-of-sequence token.
    fn trie(&self) -> TokenTrie;

    /// The tokens of a text; no special tokens, no added space.
    fn tokenize(&self, text: &[u8]) -> Vec<Token>;

    /// A setting of the engine; see [`config`](crate::config()). By default it can do everything.
    fn config(&self, name: &str) -> i32 {
        i32::from(matches!(name, "fork" | "backtrack" | "ff_tokens"))
    }
}

/// Why a controller failed: the message of its panic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerPanic(pub String);

impl std::fmt::Display for ControllerPanic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ControllerPanic {}

/// The controller of one sequence, with what it printed and wrote.
pub struct NativeController<C> {
    controller: C,
    context: Context,
}

impl<C: Controller> NativeController<C> {
    /// Creates the controller of a request's first sequence. `variables` are the request's.
    ///
    /// # Errors
    /// `Default::default()` of the controller panics.
    pub fn new(
        model: Arc<dyn Model>,
        argument: impl Into<Arc<str>>,
        variables: Arc<dyn Variables>,
    ) -> Result<Self, ControllerPanic> {
        let mut context = Context::new(model, argument.into(), variables);
        let controller = run(&mut context, C::default)?;
        Ok(Self {
            controller,
            context,
        })
    }

    /// Passes the prompt.
    ///
    /// # Errors
    /// The controller panics; it must not be used any more.
    pub fn begin(&mut self, prompt: &[Token]) -> Result<Init, ControllerPanic> {
        run(&mut self.context, || self.controller.init(prompt))
    }

    /// Sets the number of the sequence.
    pub fn bind(&mut self, sequence: SequenceId) {
        self.context.sequence = sequence;
    }

    /// Asks for the next step. No branches end the sequence.
    ///
    /// # Errors
    /// The controller panics; it must not be used any more.
    pub fn step(&mut self, step: Step<'_>) -> Result<Vec<Branch>, ControllerPanic> {
        run(&mut self.context, || {
            self.controller.step(step).into_branches()
        })
    }

    /// The controller of a fork, in the same state; nothing printed or written so far is its own.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self {
            controller: self.controller.clone(),
            context: self.context.fork(),
        }
    }

    /// Takes what it printed since the last call.
    pub fn take_logs(&mut self) -> String {
        std::mem::take(&mut self.context.logs)
    }

    /// Takes the successful writes of variables since the last call, in order.
    pub fn take_writes(&mut self) -> Vec<VariableWrite> {
        std::mem::take(&mut self.context.writes)
    }

    /// The controller itself, for tests of its state.
    #[must_use]
    pub const fn controller(&self) -> &C {
        &self.controller
    }
}

/// Runs code of the controller with its context in force. A panic is the controller's, not the program's.
fn run<T>(context: &mut Context, code: impl FnOnce() -> T) -> Result<T, ControllerPanic> {
    // Unwind safety: after a panic nothing of the controller is used but its context, which the panic cannot have
    // changed halfway.
    let result = host::enter(context, || catch_unwind(AssertUnwindSafe(code)));
    result.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|&text| text.to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        let message = text.unwrap_or_else(|| "the controller panicked".to_owned());
        context.logs.push_str(&message);
        context.logs.push('\n');
        ControllerPanic(message)
    })
}

#[cfg(test)]
mod tests;
