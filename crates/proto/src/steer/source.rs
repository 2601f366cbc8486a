//! [`SteerSource`]: steerers by name, as requests ask for them.

use super::{Steer, VariablesSharer};
use crate::code::Code;
use crate::error_reason::ErrorReason;

/// Who asks for a steerer (AI-902).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteerUser<'a> {
    /// The name of the caller's key; `localhost` without keys.
    pub name: &'a str,
    /// May do everything.
    pub is_admin: bool,
    /// May run modules by hash and tags of others, not only public tags, its own and built-in constraints.
    pub may_control: bool,
}

/// A request for a steerer.
#[derive(Clone, Copy, Debug)]
pub struct SteerCall<'a> {
    /// Who asks.
    pub user: SteerUser<'a>,
    /// A module id, a tag, or `sapwood:KIND` for a native constraint (AI-313, AI-331, AI-840).
    pub controller: &'a str,
    /// The argument, as the controller gets it.
    pub arg: &'a str,
    /// The request asks for the reports of every step ([`Steer::take_report`]).
    pub watched: bool,
    /// The request has stop texts or stop tokens, which are looked for in sampled tokens alone: a native constraint then has what
    /// it forces sampled too, so that its text ends where it would without [`Pre::Run`](super::Pre::Run) (AI-843).
    pub stops: bool,
    /// Shares the variables of the request.
    pub sharer: Option<&'a dyn VariablesSharer>,
}

/// Why there is no steerer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SteerRefusal {
    /// One of the closed set of codes.
    pub code: Code,
    /// The finer name.
    pub reason: ErrorReason,
    /// A message for people.
    pub message: String,
}

/// Opens steerers for the requests of one model.
pub trait SteerSource: Send + Sync {
    /// Returns a steerer that has not begun. May take as long as a grammar takes to compile, so it is called where
    /// waiting is allowed.
    ///
    /// # Errors
    /// There is no such controller, the caller may not run it, or the argument is wrong.
    fn open(&self, call: SteerCall<'_>) -> Result<Box<dyn Steer>, SteerRefusal>;
}
