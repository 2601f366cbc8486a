//! The variables of a running request, for somebody outside of it (AI-1006).

use std::fmt;
use std::sync::Arc;

use super::VariableWrite;

/// A variable at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedVariable {
    /// Its name.
    pub name: String,
    /// 1 for the first write; each write adds 1.
    pub version: u64,
    /// The bytes, which need not be text.
    pub value: Arc<Vec<u8>>,
}

/// What a write from outside did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutsideWrite {
    /// It was made; this is the version it made.
    Written(u64),
    /// The variable has this version, or does not exist: not the one that the write required.
    OtherVersion(Option<u64>),
    /// It would have exceeded a limit; the message names it.
    OverLimit(String),
}

/// The variables of one request. All methods take effect at one moment, and none waits for a controller.
pub trait RequestVariables: Send + Sync {
    /// All of them, by name.
    fn list(&self) -> Vec<NamedVariable>;

    /// Returns one of them.
    fn read(&self, name: &str) -> Option<NamedVariable>;

    /// Writes one, within the limits of those of controllers.
    fn write(&self, write: &VariableWrite) -> OutsideWrite;
}

/// Shares the variables of a request that is about to begin.
pub trait VariablesSharer: fmt::Debug + Send + Sync {
    /// Takes what is set before the controller starts: names and values.
    fn take_initial(&self) -> Vec<(String, Vec<u8>)>;

    /// The variables exist, with what is set. Called once, before the controller starts; not for steerers without variables.
    fn opened(&self, variables: Arc<dyn RequestVariables>);
}
