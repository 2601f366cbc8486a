//! LMTP, the Language Model Transport Protocol: many streams of tokens over one connection, as `TYPE JSON`.
//!
//! Owns: the grammar and how it is read and written, the closed list of errors ([`Reason`], [`Fault`]), the limits, and
//! the two machines that speak it: [`Session`] at the server's end, [`Client`] at the other; [`pool`] chooses among several
//! servers. Refuses to know: sockets, tasks, clocks, engines, tokenizers. Version 2 is negotiated feature by feature
//! ([`Features`]); what is not is unknown or answered `not_negotiated` (LM-904).
//!
//! ```text
//!   bytes ──Lines / frames──► text ──► Session::handle ──► Output::Start ──► work ──► Session::step ──► next_message
//!   bytes ◄─────────────────── Client::generate …        text ──► Client::handle ──► Event
//! ```

mod client;
mod features;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod json;
mod limits;
mod lines;
mod message;
mod model;
mod outbound;
pub mod pool;
mod port;
mod read;
mod reason;
mod session;
mod write;

pub use client::{Call, Client, Event, Options, Received, Usage};
pub use features::{Feature, Features};
pub use limits::Limits;
pub use lines::{Line, Lines};
pub use message::{Finish, Generate, Id, Item, Score};
pub use model::{Ends, Load, Model, Models, Tokenizer, Vocabulary};
pub use port::{
    Carrier, Close, Config, Output, Piece, Start, Stats, Status, StreamKey, Unreadable, Work,
};
pub use reason::{Fault, Reason};
pub use session::Session;

#[cfg(test)]
mod tests;
