//! Tests of the session machine, one file per section of the Evergreen page.

mod actions;
mod harness;
mod lifecycle;
mod metadata;
mod nodes;
mod reading;
