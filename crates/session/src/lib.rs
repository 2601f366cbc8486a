//! The async shell around the Evergreen session machine, for clients and servers alike.
//!
//! [`sapwood_proto::session`] is a value without tasks; here are the lock that its tasks share, the wakers of waiting tasks,
//! its clock, and the handles with which a task reads, writes and calls. A transport is a stream and a sink of messages to
//! it: there are no sockets here, and no functions.
//!
//! ```text
//!   handles (peer) ──► SharedSession: lock { Live: machine + wakers } ◄── transport (messages), owner (chores), worker (actions)
//! ```

#![forbid(unsafe_code)]

mod clock;
mod live;
pub mod peer;
mod pump;
mod shared;
mod sync;

pub use self::clock::SessionClock;
pub use self::live::{Live, Wakers};
pub use self::pump::SessionPump;
pub use self::shared::SharedSession;
