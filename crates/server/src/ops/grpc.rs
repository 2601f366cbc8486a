//! Standard gRPC services: `grpc.health.v1` and reflection (EV-703, OA-901).

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use futures::{StreamExt, stream};
use http::HeaderMap;
use http_body_util::{BodyStream, StreamBody};
use hyper::body::Frame;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio_util::sync::CancellationToken;
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;
use tower::{Service, ServiceExt};

use crate::auth::caller::Caller;
use crate::auth::identity::CallerIdentity;
use crate::auth::quotas::{CallerQuotas, Permit};
use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::context::{Face, ServerContext};
use crate::http::rejection::Rejection;
use crate::http::route::Route;
use crate::ops::drain::DrainPhase;
use crate::ops::metrics::ServerMetrics;

/// The handles through which [`follow`] reports.
pub(crate) struct Reporter {
    reporter: HealthReporter,
    /// Cancelled when the server takes no new work, which ends all watchers.
    over: CancellationToken,
}

/// The routes of the services, and the handles for [`follow`].
pub(crate) fn routes(
    faces: &[Face],
    metrics: &Arc<ServerMetrics>,
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
        health_route(
            health.max_decoding_message_size(1024),
            over.clone(),
            metrics,
        ),
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
fn health_route<H: Health>(
    health: HealthServer<H>,
    over: CancellationToken,
    metrics: &Arc<ServerMetrics>,
) -> Route {
    let path = format!("/{}/{{*rest}}", HealthServer::<H>::NAME);
    let watchers = Arc::new(Watchers::new(metrics));
    let health = tower::service_fn(move |request: http::Request<Body>| {
        let (health, over, watchers) = (health.clone(), over.clone(), Arc::clone(&watchers));
        async move {
            let permit = match watchers.admit(&request) {
                Ok(permit) => permit,
                Err(refused) => return Ok(refused.answer(request.headers())),
            };
            let response = health.oneshot(request).await?;
            Ok::<_, Infallible>(response.map(|body| until_over(Body::new(body), over, permit)))
        }
    });
    Route::grpc(path, RouteAccess::Open, health)
}

/// The open `Watch` calls. Nothing else bounds them: they need no key, have no deadline, and a connection has hundreds.
struct Watchers {
    /// Of callers with a key or a certificate, and of those without: these do not take the places of the others.
    known: Arc<CallerQuotas>,
    anonymous: Arc<CallerQuotas>,
    metrics: Arc<ServerMetrics>,
}

impl Watchers {
    fn new(metrics: &Arc<ServerMetrics>) -> Self {
        Self {
            known: CallerQuotas::new(WATCHERS, WATCHERS_EACH),
            anonymous: CallerQuotas::new(WATCHERS, WATCHERS_EACH),
            metrics: Arc::clone(metrics),
        }
    }

    /// The permit of a `Watch`; the other methods need none.
    fn admit(&self, request: &http::Request<Body>) -> Result<Option<Permit>, Rejection> {
        if !request.uri().path().ends_with("/Watch") {
            return Ok(None);
        }
        let caller = Caller::of(request.extensions())?;
        let quotas = match caller.identity {
            CallerIdentity::Anonymous(_) => &self.anonymous,
            CallerIdentity::Key(_) | CallerIdentity::Certificate(_) => &self.known,
        };
        let admitted = quotas.take(&caller.identity);
        admitted.map(Some).map_err(|full| {
            let rejected = &self.metrics.rejected;
            rejected.with_label_values(&[full.reason()]).inc();
            let message = "Too many health checks are being watched: end one, or try again later.";
            Rejection::new(Code::Overloaded, ErrorReason::SERVER_OVERLOADED, message)
        })
    }
}

/// `Watch` calls that are open at once, with a key and without; each takes some KiB.
const WATCHERS: u64 = 8_192;
/// Those of one key, or of one address without a key, behind which may be a whole cluster.
const WATCHERS_EACH: u64 = 1_024;

/// Ends `body` with UNAVAILABLE when `over` is cancelled and the frames that are ready have been sent. `permit` is released
/// with it.
fn until_over(body: Body, over: CancellationToken, permit: Option<Permit>) -> Body {
    let frames = BodyStream::new(body);
    let over = Box::pin(over.cancelled_owned());
    let ended = stream::unfold(Some((frames, over, permit)), async |state| {
        let (mut frames, mut over, permit) = state?;
        // Both may be cancelled: after `over` the body is not read any further. Biased, so that the last status (NOT_SERVING)
        // is sent before the end.
        tokio::select! {
            biased;
            frame = frames.next() => frame.map(|frame| (frame, Some((frames, over, permit)))),
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

#[cfg(test)]
mod tests {
    use axum::Router;
    use http::{Extensions, Request};

    use super::*;
    use crate::auth::scopes::Scopes;

    /// The gRPC status in the head of an answer; none where its stream has begun.
    fn refused(answer: &http::Response<Body>) -> Option<&str> {
        let status = answer.headers().get("grpc-status");
        status.map(|status| status.to_str().unwrap())
    }

    #[tokio::test]
    async fn d_45_watches_of_one_caller_are_limited_and_checks_are_not() {
        let metrics = Arc::new(ServerMetrics::new().unwrap());
        let (_reporter, health) = tonic_health::server::health_reporter();
        let route = health_route(health, CancellationToken::new(), &metrics);
        let routes: Router = Router::new().route(&route.path, route.methods);
        let ask = async |caller: &str, method: &str| {
            let caller = Caller {
                identity: CallerIdentity::Key(caller.into()),
                ..Caller::anonymous(&Extensions::new(), Scopes::default())
            };
            let request = Request::post(format!("/grpc.health.v1.Health/{method}"))
                .header("content-type", "application/grpc")
                .extension(caller)
                // A message without content: the whole server.
                .body(Body::from(&[0_u8; 5][..]));
            routes.clone().oneshot(request.unwrap()).await.unwrap()
        };
        let mut open = Vec::new();
        for _ in 0..WATCHERS_EACH {
            open.push(ask("anna", "Watch").await);
        }
        assert!(open.iter().all(|answer| refused(answer).is_none()));
        assert_eq!(refused(&ask("anna", "Watch").await), Some("14"));
        assert_eq!(metrics.rejected.with_label_values(&["share"]).get(), 1);
        assert_eq!(refused(&ask("anna", "Check").await), None);
        assert_eq!(refused(&ask("ben", "Watch").await), None);
        open.pop();
        assert_eq!(refused(&ask("anna", "Watch").await), None);
    }
}
