//! The protocols of the server (*faces*), each in its own module; none imports another.
//!
//! What they share is in [`http`](crate::http), `resume` and `websocket`, and in `socket_dispatch`, which selects the
//! face of a WebSocket whose path does not name one.

pub mod controllers;
mod cut_body;
pub mod evergreen;
pub mod generate;
pub mod lmtp;
pub(crate) mod socket_dispatch;
