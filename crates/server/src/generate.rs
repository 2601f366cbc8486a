//! Triton's generate extension, and the KServe v2 protocol around it, over HTTP and gRPC.
//!
//! Owns: the routes below `/v2` and the service `inference.GRPCInferenceService`, which functions are models there, the order of checks, statuses and headers. Refuses to
//! know: how a model computes, and every other face. What a body means is `proto::generate`'s.
//!
//! ```text
//!   path ─► method ─► version ─► model ─► body ─► tensors ─► a call of the kernel ─► responses ─► JSON | events | messages
//! ```

mod batch;
mod body;
mod burden;
mod call;
mod catalogue;
mod compression;
mod control;
mod ending;
mod endpoint;
mod events;
mod failure;
mod function;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod grpc;
mod held;
mod infer;
mod line;
mod metadata;
mod options;
mod path;
mod repository;
mod restricted;
mod resume;
mod running;
mod scripted;
mod sending;
mod stats;
mod tape;
mod text;
mod told;
mod unpacking;
mod wishes;

use std::sync::Arc;

use axum::body::Body;
use axum::routing::any;
use http::{Request, Response};
use sapwood_kernel::Kernel;
use sapwood_proto::generated::INFERENCE_DESCRIPTORS;

pub use control::{Explicit, Failed, Repository};
pub use options::{Config, Control, Model};
pub use restricted::{Category, Restriction};
pub use wishes::Forwarded;

use self::catalogue::Catalogue;
use crate::metrics;
use crate::route::Route;
use crate::shared::{Face, Shared};

/// The face over the functions of `kernel`.
#[must_use]
pub fn face(shared: Shared, kernel: Kernel, config: Config) -> Face {
    if config.metrics {
        let versions = config.versions().collect();
        shared.metrics.spell_for_triton(kernel.clone(), versions);
    }
    let catalogue = Arc::new(Catalogue::new(shared, kernel, config));
    let service = grpc::Service(Arc::clone(&catalogue));
    let serve = move |request: Request<Body>| {
        let catalogue = Arc::clone(&catalogue);
        async move { answer(catalogue, request).await }
    };
    Face {
        name: metrics::Face::Generate,
        // One handler for all: what a path means is decided before it is decoded (TR-201).
        routes: path::PATTERNS
            .iter()
            .map(|(path, access)| Route::http(*path, *access, any(serve.clone())))
            .chain(grpc::METHODS.map(|(path, access)| Route::grpc(path, access, service.clone())))
            .collect(),
        root: None,
        descriptors: vec![INFERENCE_DESCRIPTORS],
        services: vec![grpc::SERVICE],
    }
}

async fn answer(catalogue: Arc<Catalogue>, request: Request<Body>) -> Response<Body> {
    // Boxed: what waits in it is large, and a connection holds one for each request.
    Box::pin(endpoint::serve(catalogue, request)).await
}
