//! Tests of the session machine, one file per section of the Evergreen page.

mod actions;
mod dropping;
mod failures;
mod flow;
pub(super) mod harness;
mod lifecycle;
mod limits;
mod metadata;
mod nodes;
mod parts;
mod properties;
mod reading;
mod reference;
mod release;
mod resume;
mod reverse;
mod transcripts;
mod ttl;
mod work;
