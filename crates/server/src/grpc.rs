//! What gRPC clients expect of any server: `grpc.health.v1` and reflection (EV-703, OA-901).
//!
//! Owns: these two services, and the task that keeps the first one true. Refuses to know: the faces' own services.

use axum::Router;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::drain::Phase;
use crate::shared::{Face, Shared};

/// The services' routes, and what [`follow`] reports through.
pub(crate) fn routes(
    faces: &[Face],
) -> Result<(Router, HealthReporter), tonic_reflection::server::Error> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let reflection = || {
        let all = faces.iter().flat_map(|face| &face.descriptors);
        all.fold(
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET),
            |builder, set| builder.register_encoded_file_descriptor_set(set),
        )
    };
    let mut services = tonic::service::Routes::builder();
    // Older tools know the alpha name only.
    services.add_service(health);
    services.add_service(reflection().build_v1()?);
    services.add_service(reflection().build_v1alpha()?);
    // The server has a fallback of its own, and a router can have only one.
    Ok((
        services.routes().into_axum_router().reset_fallback(),
        reporter,
    ))
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
