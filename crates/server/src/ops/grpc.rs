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

/// The handles through which [`follow`] reports.
pub(crate) struct Reporter {
    reporter: HealthReporter,
    /// Cancelled when the server takes no new work, which ends all watchers.
    over: CancellationToken,
}

/// The routes of the services, and the handles for [`follow`].
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
    // Reflection under both names, because older tools know only the alpha one.
    let routes = vec![
        // An open route, whose request has only the name of a service: no need to decode more from anybody.
        health_route(health.max_decoding_message_size(1024), over.clone()),
        // Not open, unlike health: it lists what the server has.
        service(
            RouteAccess::Needs(KeyScope::Infer),
            reflection()
                .build_v1()?
                .max_decoding_message_size(QUESTION_BYTES),
        ),
        service(
            RouteAccess::Needs(KeyScope::Infer),
            reflection()
                .build_v1alpha()?
                .max_decoding_message_size(QUESTION_BYTES),
        ),
    ];
    Ok((routes, Reporter { reporter, over }))
}

/// Bytes of a request for reflection, which names a symbol or a file.
const QUESTION_BYTES: usize = 64 << 10;

/// Clients need not end a `Watch`, so it ends here when `over` is cancelled.
fn health_route<H: Health>(health: HealthServer<H>, over: CancellationToken) -> Route {
    let path = format!("/{}/{{*rest}}", HealthServer::<H>::NAME);
    let health = ServiceExt::<http::Request<Body>>::map_response(health, move |response| {
        response.map(|body| until_over(Body::new(body), over))
    });
    Route::grpc(path, RouteAccess::Open, health)
}

/// Ends `body` with UNAVAILABLE when `over` is cancelled and the frames that are ready have been sent.
fn until_over(body: Body, over: CancellationToken) -> Body {
    let frames = BodyStream::new(body);
    let over = Box::pin(over.cancelled_owned());
    let ended = stream::unfold(Some((frames, over)), async |both| {
        let (mut frames, mut over) = both?;
        // Both may be cancelled: after `over` the body is not read any further. Biased, so that the last status (NOT_SERVING)
        // is sent before the end.
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
    let status = tonic::Status::unavailable("the server is shutting down: use another one");
    // Fails only for a message that cannot be a header value.
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

/// Keeps `grpc.health.v1` equal to readiness until the drain is over. Watchers end when the drain refuses new work.
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
        // The empty name is that of the whole server.
        for service in std::iter::once(&"").chain(&services) {
            reporter.set_service_status(*service, status).await;
        }
        // Only now, after every watcher has been sent NOT_SERVING.
        if refusing && !ready {
            over.cancel();
        }
        // All arms may be cancelled: a change that was not seen is found by the next wait.
        tokio::select! {
            _ = readiness.changed() => {}
            // Disabled once it was reached, or the loop would spin.
            () = shared.drain.reached(DrainPhase::Refusing), if !refusing => {}
            () = shared.drain.reached(DrainPhase::Over) => return,
        }
    }
}
