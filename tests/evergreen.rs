//! Tests of the Evergreen face over real sockets, and the simulation.

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
