//! Standard gRPC services: `grpc.health.v1` and reflection (EV-703, OA-901).

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use futures::{StreamExt, stream};
use http::HeaderMap;
use http_body_util::{BodyStream, StreamBody};
use hyper::body::Frame;
use tokio_util::sync::CancellationToken;
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;
use tower::{Service, ServiceExt};

use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::context::{Face, ServerContext};
use crate::http::route::Route;
use crate::ops::drain::DrainPhase;

/// What [`follow`] reports through.
pub(crate) struct Reporter {
    reporter: HealthReporter,
    /// The drain is over: the server takes no new work, and watchers end.
    over: CancellationToken,
}

/// The services' routes, and what [`follow`] reports through.
pub(crate) fn routes(
    faces: &[Face],
) -> Result<(Vec<Route>, Reporter), tonic_reflection::server::Error> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let over = CancellationToken::new();
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
        health_route(health.max_decoding_message_size(1024), over.clone()),
        service(
            RouteAccess::Needs(KeyScope::Infer),
            reflection().build_v1()?,
        ),
        service(
            RouteAccess::Needs(KeyScope::Infer),
            reflection().build_v1alpha()?,
        ),
    ];
    Ok((routes, Reporter { reporter, over }))
}

/// `Watch` is a stream that its client need not end, so that it ends here when `over` is cancelled.
fn health_route<H: Health>(health: HealthServer<H>, over: CancellationToken) -> Route {
    let path = format!("/{}/{{*rest}}", HealthServer::<H>::NAME);
    let health = ServiceExt::<http::Request<Body>>::map_response(health, move |response| {
        response.map(|body| until_over(Body::new(body), over))
    });
    Route::grpc(path, RouteAccess::Open, health)
}

/// Ends `body`, once all that it has at the moment is sent and `over` is cancelled, as a call whose server shuts down.
fn until_over(body: Body, over: CancellationToken) -> Body {
    let frames = BodyStream::new(body);
    let over = Box::pin(over.cancelled_owned());
    let ended = stream::unfold(Some((frames, over)), async |both| {
        let (mut frames, mut over) = both?;
        // Both may be cancelled: a body that is dropped is read no further.
        tokio::select! {
            biased;
            frame = frames.next() => frame.map(|frame| (frame, Some((frames, over)))),
            () = &mut over => Some((Ok(goodbye()), None)),
        }
    });
    Body::new(StreamBody::new(ended))
}

fn goodbye() -> Frame<Bytes> {
    let mut trailers = HeaderMap::new();
    let status = tonic::Status::unavailable("the server is shutting down: ask another one");
    // Its words can stand in a header: they are ours.
    let _ = status.add_header(&mut trailers);
    Frame::trailers(trailers)
}

fn service<S>(access: RouteAccess, service: S) -> Route
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

/// Keeps `grpc.health.v1` equal to readiness until the drain is over. When that takes no new work, watchers end.
pub(crate) async fn follow(
    Reporter { reporter, over }: Reporter,
    services: Vec<&'static str>,
    shared: ServerContext,
) {
    let mut readiness = shared.health.readiness();
    loop {
        let refusing = shared.drain.phase() >= DrainPhase::Refusing;
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
        // All watchers were sent above that it is not ready, if not before.
        if refusing && !ready {
            over.cancel();
        }
        // All may be cancelled: a change not yet seen is seen by the next wait.
        tokio::select! {
            _ = readiness.changed() => {}
            () = shared.drain.reached(DrainPhase::Refusing), if !refusing => {}
            () = shared.drain.reached(DrainPhase::Over) => return,
        }
    }
}
