//! The AICI runtime: what the ops of both channels do (AI-301 to AI-508).
//!
//! ```text
//!   main channel: one thread ─► MainChannel ─► P1 or P2 ─► Sequence (callbacks on the host's threads)
//!   side channel: one thread ─► SideChannel ─► workers ─► store, instances ─► Pending ─► bound by the main channel
//! ```
//!
//! The bookkeeping is pure: sequences, the clock and the waiting are given (`Sequence`, `Pace`), and
//! nothing knows how a message came. The threads are in [`crate::aicirt`].

mod answer;
mod constraint;
mod envelope;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod hello;
mod main_channel;
mod p1;
mod p2;
mod pending;
mod rows;
mod sequence;
mod side;
mod table;
mod translated;
mod wake;

pub use self::main_channel::Dialect;
pub use self::rows::{MaskType, P1Rows, Row};

pub(crate) use self::answer::AnswerRoom;
pub(crate) use self::constraint::{CONSTRAINT_PREFIX, ConstraintSequence, WireSteering};
pub(crate) use self::envelope::{RequestError, encode_failure, encode_unreadable};
pub(crate) use self::hello::WireFeatures;
pub(crate) use self::main_channel::{DialectCell, MainChannel, MainConfig, MainReply, NoRowFits};
pub(crate) use self::pending::{Pending, PendingLimits};
pub(crate) use self::sequence::Pace;
pub(crate) use self::side::{Launch, Launcher, SIDE_WORKERS, SendAnswer, SideChannel, SideParts};
pub(crate) use self::table::{LIST_MAX, StepClock, StepConfig};
pub(crate) use self::translated::WireInstance;
pub(crate) use self::wake::StepWake;

#[cfg(any(test, fuzzing))]
#[cfg_attr(not(test), expect(dead_code, reason = "tests use more of it"))]
#[expect(clippy::unwrap_used, reason = "a part of tests")]
mod scripted;
