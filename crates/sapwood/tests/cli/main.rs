//! The command as a user has it: the real binary, its exit codes, what it prints where.
//!
//! Models are scripted, ports are free ones, the environment is empty.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[cfg(target_os = "linux")]
mod aicirt;
mod basics;
mod calls;
mod chat;
mod controllers;
#[cfg(feature = "demo-model")]
mod demo;
mod hub;
mod hub_server;
#[cfg(target_os = "linux")]
mod isolated;
#[cfg(target_os = "linux")]
mod kills;
mod mock;
#[cfg(target_os = "linux")]
mod peak;
mod process;
mod reasoning;
mod remote;
mod sampling;
mod secrets;
mod server;
#[cfg(feature = "embedded")]
mod smollm2;
mod sockets;
mod traces;
#[cfg(all(feature = "embedded", target_os = "linux"))]
mod trial;
mod upstream;
