//! Charges the tokens of a model call to a caller.

use std::fmt;

use crate::error::Error;

/// The account that a call's tokens are charged to. A layer puts an `Arc<dyn TokenCharge>` into
/// [`crate::Call::own`]; the functions of models charge it as they go, so that a call that is cut short has paid
/// for what it got.
pub trait TokenCharge: fmt::Debug + Send + Sync {
    /// The scope of the prefix cache that the requests share (LM-609). 0 stands for no caller in particular.
    fn prefix_scope(&self) -> u64;

    /// Charges the tokens of a prompt that is about to be computed.
    ///
    /// # Errors
    /// [`Error::RateLimited`] if that exceeds the allowance; then nothing is charged.
    fn prompt(&self, tokens: u32) -> Result<(), Error>;

    /// Charges generated tokens.
    fn output(&self, tokens: u32);
}
