//! Integration tests that need more than one crate: faces over real sockets, and the simulation.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a test's name says what it shows, and what it cannot do without is a failed test"
)]

mod controllers;
mod evergreen;
mod faces;
mod gate;
mod generate;
mod infill;
mod lmtp;
mod one_core;
mod samplers;
mod upstreams;
