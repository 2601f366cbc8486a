//! The Evergreen face, from a client's end of a real socket, and the simulation.
//!
//! Owns: nothing; the harness is this crate's library. Refuses to know: the rest of the house.

mod abuse;
mod client;
mod extensions;
mod flow;
mod loopback;
mod references;
mod remote;
mod resume;
mod reverse;
mod simulation;
mod socket;
mod tls;
mod transcripts;
mod wire;
