//! A mutex that the model checker can replace.
//!
//! The test `cursors_loom` has the other implementation.

pub(crate) use std::sync::Mutex;
