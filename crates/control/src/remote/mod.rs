//! Controllers in a runtime of another process, over shared memory (AI-850 to AI-854): the engine's side of the AICI
//! protocol.
//!
//! ```text
//!   engine's thread ── RemoteSteer ──► RemoteTable ──► exchange thread ──► main channel ─┐
//!   open, begin ────────────────────► SideQueue ────► side thread ──────► side channel ─┤ runtime process
//!   supervisor thread: creates the objects, spawns, shakes hands, waits for the end, starts again ┘
//! ```
//!
//! The engine's thread takes locks for the time of a map operation and never waits for the other process. What is decided
//! is decided by pure machines: `RemoteTable` (what the next message says), `Supervision` (when to start again), and the
//! codecs in `request`, `reply` and `rows`. One [`RemoteControllers`] serves one model.

mod epoch;
mod exchange;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod numbers;
mod options;
mod process;
mod reply;
mod request;
mod rows;
mod runtime;
mod side;
mod source;
mod steerer;
mod supervision;
mod table;

pub use self::numbers::RemoteNumbers;
pub use self::options::{RemoteCommand, RemoteLimits, RemoteOptions, RemoteStart};
pub use self::source::{FindModule, RemoteControllers};

#[cfg(test)]
mod tests;
