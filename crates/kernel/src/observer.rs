//! Who is told what a model is asked and what that took.

use std::fmt;

use sapwood_engine::api;

/// Whoever watches the call of a model, for traces. A layer puts one into [`crate::Call::observer`]. It is called on the
/// way of the data, so it must neither wait nor do much.
pub trait CallObserver: fmt::Debug + Send + Sync {
    /// The request as it is about to be submitted.
    fn asked(&self, request: &api::GenerationRequest);

    /// What it took; not told for a request that ended early.
    fn took(&self, usage: &api::TokenUsage);
}
