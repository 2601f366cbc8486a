//! The owner, stepped by hand with virtual time and scripted models.

mod accounts;
mod adapters;
mod bad_words;
mod cache;
mod checkpoints;
mod disk;
mod end_tokens;
mod endings;
mod faults;
mod following;
mod forks;
mod harness;
pub(in crate::owner) mod hooked_model;
mod infill;
mod life;
mod load;
mod opening;
mod overlap;
mod pieces;
mod probe;
mod reference;
mod rollbacks;
mod sampling_threads;
mod scoring;
mod speculation;
mod steering;
mod waits;
