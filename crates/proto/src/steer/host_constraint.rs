//! [`HostConstraint`]: a native constraint that a controller follows through the host's functions (AI-1007).
//!
//! A controller's host knows no grammars, and a source of constraints knows no controllers; both know this.

use std::time::Duration;

use super::{SharedMask, Steered, Token};

/// Opens constraints for the controllers of one model.
pub trait HostConstraintSource: Send + Sync {
    /// Makes what all constraints have in common, once, if that takes long. Whoever is about to clone its process calls
    /// it, so that the clones need not. Without it, the first constraint makes it.
    fn prepare(&self) {}

    /// Returns a constraint at its start. Blocks for at most the time of the call, and for no longer than any grammar may
    /// take to compile; a source of processes that are ended when they are late may block for longer.
    ///
    /// # Errors
    /// There is no such kind, the pattern is wrong, or it took too long. The text is for the controller's author.
    fn open(&self, call: HostConstraintCall<'_>) -> Result<Box<dyn HostConstraint>, String>;
}

/// Which constraint a controller asks for.
#[derive(Clone, Copy, Debug)]
pub struct HostConstraintCall<'a> {
    /// The name of a native constraint without `sapwood:`.
    pub kind: &'a str,
    /// The pattern itself.
    pub value: &'a str,
    /// Who runs the controller: callers have shares of the compiler.
    pub user: &'a str,
    /// How long the controller can wait.
    pub time: Duration,
}

/// Where one sequence is in a constraint. Every method computes on the calling thread, within the limits that the masks of
/// native constraints have.
pub trait HostConstraint: Send {
    /// For how long, from now on, the calls that follow may go on; `None` without a limit. One that is late fails, and the
    /// constraint cannot be followed any more. A source of processes that are ended when they are late need not look at it.
    fn limit_time(&mut self, _left: Option<Duration>) {}

    /// Goes on by one token. Returns whether the constraint allows it; if not, nothing changes.
    ///
    /// # Errors
    /// The constraint cannot be followed any more; so with all methods.
    fn consume(&mut self, token: Token) -> Steered<bool>;

    /// Takes back the last `tokens` tokens.
    ///
    /// # Errors
    /// There are not as many.
    fn rollback(&mut self, tokens: u32) -> Steered<()>;

    /// Returns the tokens that may follow, EOS included where the text may end; none where nothing may.
    ///
    /// # Errors
    /// The work for it exceeds its limit.
    fn mask(&mut self) -> Steered<SharedMask>;

    /// Returns tokens that must follow, not always all of them, as the model would tokenise their text.
    ///
    /// # Errors
    /// The work for it exceeds its limit.
    fn forced(&mut self) -> Steered<Vec<Token>>;

    /// Returns a copy, for a fork of the sequence.
    ///
    /// # Errors
    /// It is too large to be copied.
    fn fork(&mut self) -> Steered<Box<dyn HostConstraint>>;

    /// Returns the bytes that it takes, its compiled grammar included. They grow while it is used.
    fn bytes(&mut self) -> usize;
}
