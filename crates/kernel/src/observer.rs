//! Observers of model calls: they see the request and its usage.

use std::fmt;

use sapwood_engine::api;

/// Observes a model call, for traces. A layer puts an `Arc<dyn CallObserver>` into [`crate::Call::own`]. It is
/// called on the hot path, so it must neither block nor do much.
pub trait CallObserver: fmt::Debug + Send + Sync {
    /// Called with the request before it is submitted.
    fn asked(&self, request: &api::GenerationRequest);

    /// Called with the usage; not for a request that ended early.
    fn took(&self, usage: &api::TokenUsage);
}
