//! LMTP, the Language Model Transport Protocol: many token streams over one connection, as `TYPE JSON` messages.
//!
//! Features of version 2 are negotiated one by one ([`Features`]); a message type of a feature that was not negotiated
//! is answered `not_negotiated`, and its members count as unknown (LM-904).
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

pub use client::{
    ClientCallId, ClientEvent, ClientMachine, ClientTimeouts, ReceivedBranch, ReceivedItem,
    StreamUsage,
};
pub use features::{Feature, Features};
pub use limits::ConnectionLimits;
pub use lines::{LineSplitter, WireLine};
pub use message::{BranchEvent, GenerateRequest, Score, StreamFinish, StreamId, TokenItem};
pub use model::{
    InfillMarks, LmtpModelInfo, Load, ModelLookup, TextCodec, TextEnds, TokenizerInfo,
};
pub use port::{
    Config, LmtpClose, LmtpOutput, LmtpStats, MessageFraming, StreamDemand, StreamKey, StreamPiece,
    StreamStart, StreamUpdate, Unreadable,
};
pub use reason::{LmtpError, LmtpReason};
pub use session::LmtpSession;

#[cfg(test)]
mod tests;
