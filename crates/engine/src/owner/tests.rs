//! The owner, stepped by hand with virtual time and scripted models.

mod harness;
mod life;
