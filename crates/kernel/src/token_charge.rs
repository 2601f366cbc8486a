//! Charges the tokens of a model call to a caller.

use std::fmt;

use crate::error::Error;

/// The account that a call's tokens are charged to. A layer puts one into [`crate::Call::token_charge`]; the functions of models charge
/// it as they go, so that a call that is cut short has paid for what it got.
pub trait TokenCharge: fmt::Debug + Send + Sync {
    /// Whose requests share what was computed of their prompts (LM-609). 0 is nobody in particular.
    fn prefix_scope(&self) -> u64;

    /// A prompt of so many tokens is about to be computed.
    ///
    /// # Errors
    /// [`Error::RateLimited`] if that is more than there is; then nothing is charged.
    fn prompt(&self, tokens: u32) -> Result<(), Error>;

    /// So many tokens were generated.
    fn output(&self, tokens: u32);
}
