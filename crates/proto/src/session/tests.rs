//! Tests of the session machine, one file per section of the Evergreen page.

mod harness;
mod metadata;
mod nodes;
mod reading;
