//! Observers of model calls: they see the request and its usage.

use std::fmt;

use sapwood_engine::api;

/// Observes a model call, for traces. A layer puts one into [`crate::Call::observer`]. It is called on the
/// way of the data, so it must neither wait nor do much.
pub trait CallObserver: fmt::Debug + Send + Sync {
    /// The request as it is about to be submitted.
    fn asked(&self, request: &api::GenerationRequest);

    /// The usage; not called for a request that ended early.
    fn took(&self, usage: &api::TokenUsage);
}
