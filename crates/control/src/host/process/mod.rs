//! The isolation mode `sequence`: each controller runs in a process of its own (AI-701, AI-702).
//!
//! ```text
//!   runtime ── socket ──► template (one thread, no guest code)
//!      │                     │ fork: a new sequence
//!      ├─────── socket ──► controller ── fork: a sequence's fork ──► controller
//!      └─────── socket ───────────────────────────────────────────────┘
//! ```
//!
//! - A fork of a sequence is a clone of its process, with the memory copied on write.
//! - A callback that must end is ended by killing its process. What is kept for several sequences, variables and the
//!   count of memory, is in the runtime, so it is whole afterwards.
//! - Each process holds one end of one socket, whose other end only the runtime holds: when the runtime ends, they end.
//! - All of them are descendants of the template, which reaps them; after a crash of the template, the runtime does.

mod asked;
mod bytes;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzz;
mod instance;
mod message;
mod outcome;
mod poller;
mod priority;
mod processes;
mod slot;
mod stream;
mod system;
mod template;
mod worker;

#[cfg(test)]
mod tests;

pub(super) use self::instance::ProcessInstance;
pub(crate) use self::poller::OutcomePoll;
pub(super) use self::processes::Processes;
pub(crate) use self::system::end_template;
#[cfg(test)]
pub(super) use self::template::serve as serve_as_template_of_test;
pub use self::template::serve_as_template;
