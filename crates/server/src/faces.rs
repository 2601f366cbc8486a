//! The protocols that clients speak with the server, each in its own module; none imports another.
//!
//! What they share stands below them: [`http`](crate::http), `resume`, the WebSockets, and here which of
//! them gets a WebSocket whose path does not say it.

pub mod evergreen;
pub mod generate;
pub mod lmtp;
pub(crate) mod socket_dispatch;
