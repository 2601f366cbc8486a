//! The owner, stepped by hand with virtual time and scripted models.

mod bad_words;
mod cache;
mod endings;
mod faults;
mod following;
mod harness;
mod life;
mod load;
mod overlap;
mod pieces;
mod probe;
mod scoring;
mod steering;
