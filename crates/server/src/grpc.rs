//! What gRPC clients expect of any server: `grpc.health.v1` and reflection (EV-703, OA-901).
//!
//! Owns: these two services, and the task that keeps the first one true. Refuses to know: the faces' own services.

use std::convert::Infallible;

use axum::body::Body;
use axum::response::IntoResponse;
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::Service;

use crate::auth::{Access, Scope};
use crate::drain::Phase;
use crate::route::Route;
use crate::shared::{Face, Shared};

/// The services' routes, and what [`follow`] reports through.
pub(crate) fn routes(
    faces: &[Face],
) -> Result<(Vec<Route>, HealthReporter), tonic_reflection::server::Error> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let reflection = || {
        let all = faces.iter().flat_map(|face| &face.descriptors);
        all.fold(
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET),
            |builder, set| builder.register_encoded_file_descriptor_set(set),
        )
    };
    // Older tools know the alpha name of reflection only.
    let routes = vec![
        // It stands open, and asks for the name of a service.
        service(Access::Open, health.max_decoding_message_size(1024)),
        service(Access::Needs(Scope::Infer), reflection().build_v1()?),
        service(Access::Needs(Scope::Infer), reflection().build_v1alpha()?),
    ];
    Ok((routes, reporter))
}

fn service<S>(access: Access, service: S) -> Route
where
    S: NamedService
        + Service<http::Request<Body>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Response: IntoResponse + 'static,
    S::Future: Send + 'static,
{
    Route::grpc(format!("/{}/{{*rest}}", S::NAME), access, service)
}

/// Keeps `grpc.health.v1` equal to readiness until the drain is over.
pub(crate) async fn follow(reporter: HealthReporter, services: Vec<&'static str>, shared: Shared) {
    let mut readiness = shared.health.readiness();
    loop {
        let ready = *readiness.borrow_and_update();
        let status = if ready {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        // The empty name stands for the whole server.
        for service in std::iter::once(&"").chain(&services) {
            reporter.set_service_status(*service, status).await;
        }
        // Both may be cancelled: a change not yet seen is seen by the next wait.
        tokio::select! {
            _ = readiness.changed() => {}
            () = shared.drain.reached(Phase::Over) => return,
        }
    }
}
