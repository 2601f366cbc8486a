//! The lock that what is model-checked is built on, so that the checker can put its own in its place.
//!
//! The test `cursors_loom` has the other implementation.

pub(crate) use std::sync::Mutex;
