//! [`Home`]: what a controller in a process of its own asks of the runtime, where that is kept.

use std::fmt;

use sapwood_proto::steer::VariableWrite;

use super::failure::Abort;
use super::group::Versioned;
use super::group::variables::WriteResult;

/// The runtime, seen from a controller's process. Each call waits for the answer; without a runtime the process ends.
pub(super) trait Home: fmt::Debug + Send + Sync {
    /// Asks for memory of all instances together. It is given back when the process ends.
    fn charge(&self, bytes: usize) -> bool;

    /// Reads a variable of the request.
    fn read(&self, name: &str) -> Option<Versioned>;

    /// Writes a variable of the request.
    fn write(&self, write: &VariableWrite) -> Result<WriteResult, Abort>;
}
