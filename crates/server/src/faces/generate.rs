//! Triton's generate extension, and the KServe v2 protocol around it, over HTTP and gRPC.
//!
//! The meaning of a body is in `proto::generate`.
//!
//! ```text
//!   path ─► method ─► version ─► model ─► body ─► tensors ─► a call of the kernel ─► responses ─► JSON | events | messages
//! ```

mod batch;
mod body;
mod call;
mod catalog;
mod choice_delta;
mod compression;
mod decompression;
mod detached;
mod embedding;
mod endpoint;
mod event_channel;
mod events;
mod function;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod grpc;
mod infer;
mod input_charge;
mod load_report;
mod metadata;
mod model_control;
mod offload;
mod options;
mod path;
mod replay;
mod repository;
mod request_end;
mod request_error;
mod request_options;
mod response_json;
mod restricted;
mod resume;
mod running;
mod scripted;
mod sending;
mod stats;
mod text;

use std::sync::Arc;

use axum::body::Body;
use axum::routing::any;
use http::Request;
use sapwood_kernel::Kernel;
use sapwood_proto::generated::INFERENCE_DESCRIPTORS;

pub use model_control::{ExplicitRepository, ModelControlError, Repository};
pub use options::{Config, ModelOptions, OnModelLoaded, ScriptControl};
pub use request_options::ForwardedHeaders;
pub use restricted::{Category, Restriction};

use self::catalog::ModelCatalog;
use crate::context::{Face, ServerContext};
use crate::http::route::Route;
use crate::ops::metrics;

/// The face over the functions of `kernel`.
#[must_use]
pub fn face(shared: ServerContext, kernel: Kernel, config: Config) -> Face {
    // Before the catalog takes the configuration: it moves the models out of it.
    if config.metrics {
        // The version of requests that name none, for each model with options of its own.
        let latest = |(name, model): (&String, &ModelOptions)| (name.clone(), model.latest());
        let versions = config.models.iter().map(latest).collect();
        shared.metrics.spell_for_triton(kernel.clone(), versions);
    }
    let catalog = Arc::new(ModelCatalog::new(shared, kernel, config));
    let service = grpc::InferenceService(Arc::clone(&catalog));
    let serve = move |request: Request<Body>| {
        // Boxed: what waits in it is large, and a connection holds one for each request.
        Box::pin(endpoint::serve(Arc::clone(&catalog), request))
    };
    Face {
        name: metrics::FaceLabel::Generate,
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
