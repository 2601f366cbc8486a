//! Who is told what a model is asked and what that took.
//!
//! Owns: the trait. Refuses to know: spans, formats, where they go.

use std::fmt;

use sapwood_engine::api;

/// Whoever watches the call of a model, for traces. A layer puts one into [`crate::Call::witness`]. It is called on the
/// way of the data, so it must neither wait nor do much.
pub trait Witness: fmt::Debug + Send + Sync {
    /// The request as it is about to be submitted.
    fn asked(&self, request: &api::Request);

    /// What it took; not told for a request that ended early.
    fn took(&self, usage: &api::Usage);
}
