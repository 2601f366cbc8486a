//! The gRPC service `inference.GRPCInferenceService` (section 9), on the same models.

mod codec;
mod infer;
mod metadata;
mod stream;

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use futures::StreamExt;
use futures::future::{BoxFuture, ready};
use http::{Extensions, HeaderValue, StatusCode};
use http_body_util::{BodyStream, StreamBody};
use hyper::body::Frame;
use prost::Message;
use sapwood_proto::code::Code;
use sapwood_proto::generate::RequestLimits;
use sapwood_proto::generated::inference::ModelStreamInferResponse;
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataValue;
use tonic::server::Grpc;
use tonic::{Request, Response, Streaming};

use self::codec::{DeferredCodec, Encoded};
use super::catalog::ModelCatalog;
use super::request_error::{RequestError, retry_seconds};
use super::restricted::Category;
use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::faces::cut_body::flush_before_error;
use crate::http::gunzip;
use crate::http::held_head;
use crate::http::intake::BodyIntake;

/// The paths of its methods. Those that change what is loaded have routes of their own, for their scope.
pub(super) const METHODS: [(&str, RouteAccess); 3] = [
    (
        "/inference.GRPCInferenceService/{method}",
        RouteAccess::Needs(KeyScope::Infer),
    ),
    (
        "/inference.GRPCInferenceService/RepositoryModelLoad",
        RouteAccess::Needs(KeyScope::Admin),
    ),
    (
        "/inference.GRPCInferenceService/RepositoryModelUnload",
        RouteAccess::Needs(KeyScope::Admin),
    ),
];
/// The full name of the service.
pub(super) const SERVICE: &str = "inference.GRPCInferenceService";

/// The service. Clones share everything.
#[derive(Clone)]
pub(super) struct InferenceService(pub(super) Arc<ModelCatalog>);

impl tower::Service<http::Request<Body>> for InferenceService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let catalog = Arc::clone(&self.0);
        Box::pin(async move { Ok(answer(catalog, request).await) })
    }
}

async fn answer(catalog: Arc<ModelCatalog>, request: http::Request<Body>) -> http::Response<Body> {
    // One route serves nearly all methods, and so the name is read from the path. An unknown one is answered like the
    // others, by `metadata`.
    let path = request.uri().path().to_owned();
    let method = path.rsplit('/').next().unwrap_or_default();
    // First (TR-203): a caller without access learns nothing of a model, and costs no reading of its message.
    let restriction = &catalog.config.restricted.get(&Category::of_method(method));
    if let Some(Err(failure)) = restriction.map(|it| it.check_grpc(request.headers())) {
        return status(&failure).into_http();
    }
    let most = catalog.config.grpc_message_size;
    let most = match method {
        // A load may carry the whole configuration of a model.
        "ModelInfer" | "ModelStreamInfer" | "RepositoryModelLoad" => most,
        _ => most.min(QUESTION_BYTES),
    };
    let request = UnaryCall {
        request: held_head::held(gunzip::unpacked(request, most), most),
        most,
        limits: catalog.config.limits.clone(),
    };
    match method {
        "ModelInfer" => asked(request, |request| infer::answer(&catalog, request)).await,
        "ModelStreamInfer" => streamed(catalog, request).await,
        method => metadata::answer(method, catalog, request).await,
    }
}

/// A call whose messages are still to be read.
struct UnaryCall {
    request: http::Request<Body>,
    /// Bytes that one of them may have (TR-907).
    most: usize,
    limits: RequestLimits,
}

/// A unary method that is answered without waiting.
async fn logged<Q, A>(
    request: UnaryCall,
    answer: impl FnOnce(Q, &Extensions) -> Result<A, RequestError> + Send,
) -> http::Response<Body>
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
{
    asked(request, |request: Request<Q>| {
        let (_, extensions, message) = request.into_parts();
        ready(answer(message, &extensions))
    })
    .await
}

/// A unary method.
async fn asked<Q, A, W>(
    UnaryCall {
        request,
        most,
        limits,
    }: UnaryCall,
    answer: impl FnOnce(Request<Q>) -> W + Send,
) -> http::Response<Body>
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
    W: Future<Output = Result<A, RequestError>> + Send,
{
    // A tower service may be called again, and this closure is called once: it is taken out.
    let mut answer = Some(answer);
    let intake = request.extensions().get::<Arc<BodyIntake>>().cloned();
    let service = tower::service_fn(move |request: Request<Encoded>| {
        let (answer, limits, intake) = (answer.take(), limits.clone(), intake.clone());
        async move {
            // Cannot happen: the library calls the service of a unary method once.
            let answer =
                answer.ok_or_else(|| tonic::Status::internal("the call has a second message"))?;
            let (metadata, extensions, encoded) = request.into_parts();
            let (message, reservation) = encoded.decode(&limits, intake.as_ref()).await?;
            if let (Some(reservation), Some(intake)) = (reservation, intake) {
                // The message stays in memory until its response begins, and is charged as long.
                intake.keep(reservation);
            }
            let answered = answer(Request::from_parts(metadata, extensions, message)).await;
            answered.map(Response::new).map_err(|it| status(&it))
        }
    });
    let mut grpc = Grpc::new(DeferredCodec::<A>::default())
        .accept_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(most);
    let mut answered = grpc.unary(service, request).await.map(Body::new);
    // OUT_OF_RANGE is what the library answers to a message that is too large, and no error of this face. Clients know
    // RESOURCE_EXHAUSTED.
    if let Some(code) = answered.headers_mut().get_mut("grpc-status")
        && code == "11"
    {
        *code = HeaderValue::from_static("8");
    }
    answered
}

/// `ModelStreamInfer`. Nothing is awaited before the headers go out (TR-907).
async fn streamed(
    catalog: Arc<ModelCatalog>,
    UnaryCall {
        request,
        most,
        limits,
    }: UnaryCall,
) -> http::Response<Body> {
    let cut = Arc::new(AtomicBool::new(false));
    let cuts = Arc::clone(&cut);
    let intake = request.extensions().get::<Arc<BodyIntake>>().cloned();
    let service = tower::service_fn(move |request: Request<Streaming<Encoded>>| {
        let (limits, intake) = (limits.clone(), intake.clone());
        let request = request.map(|messages| {
            // `then` decodes one message at a time and in order. The next one is not read before this one is taken,
            // which bounds what a stream has charged.
            let decoded = messages.then(move |encoded| {
                let (limits, intake) = (limits.clone(), intake.clone());
                async move { encoded?.decode_of_stream(&limits, intake.as_ref()).await }
            });
            decoded.boxed()
        });
        let outgoing = stream::StreamBody::new(Arc::clone(&catalog), request, Arc::clone(&cuts));
        ready(Ok::<_, tonic::Status>(Response::new(outgoing)))
    });
    let mut grpc = Grpc::new(DeferredCodec::<ModelStreamInferResponse>::default())
        .accept_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(most);
    let answer = grpc.streaming(service, request).await;
    answer.map(|body| without_trailers_if(cut, Body::new(body)))
}

/// A response body that ends with an error in place of its trailers once `cut` is set, as a crashed server would (D-11).
fn without_trailers_if(cut: Arc<AtomicBool>, body: Body) -> Body {
    let frames = BodyStream::new(body).map(move |frame| {
        // Read after the body was polled: that is where the failure is encoded, which sets it.
        if frame.as_ref().is_ok_and(Frame::is_trailers) && cut.load(Ordering::Relaxed) {
            return Err(axum::Error::new("the script cuts the call"));
        }
        frame
    });
    Body::new(StreamBody::new(flush_before_error(frames)))
}

/// A failure as a status, with its code of the closed set in the metadata (TR-206).
pub(super) fn status(failure: &RequestError) -> tonic::Status {
    let mut status = tonic::Status::new(grpc_code(failure), failure.message.clone());
    let metadata = status.metadata_mut();
    metadata.insert(
        "sapwood-error",
        MetadataValue::from_static(failure.code.name()),
    );
    if let Some(wait) = failure.retry_after {
        metadata.insert("retry-after", MetadataValue::from(retry_seconds(wait)));
    }
    status
}

/// The gRPC code of a failure: an error of the request over HTTP is one here as well (TR-902, TR-1501).
fn grpc_code(failure: &RequestError) -> tonic::Code {
    // The status of HTTP is finer than the code: an unknown model is 400 there, and may be configured to be 404
    // (TR-204).
    let bad = failure.status == StatusCode::BAD_REQUEST;
    match failure.code {
        Code::InvalidRequest | Code::FailedPrecondition | Code::LimitExceeded | Code::Aborted => {
            tonic::Code::InvalidArgument
        }
        Code::NotFound | Code::Unimplemented if bad => tonic::Code::InvalidArgument,
        Code::AlreadyExists => tonic::Code::AlreadyExists,
        Code::Cancelled => tonic::Code::Cancelled,
        Code::Unauthenticated => tonic::Code::Unauthenticated,
        Code::NotFound => tonic::Code::NotFound,
        Code::RateLimited => tonic::Code::ResourceExhausted,
        Code::Unimplemented => tonic::Code::Unimplemented,
        // Not UNAVAILABLE, as for a restricted category: clients retry that, and would for ever.
        Code::PermissionDenied => tonic::Code::PermissionDenied,
        Code::Overloaded | Code::Unavailable | Code::DeadlineExceeded => tonic::Code::Unavailable,
        Code::Truncated | Code::UpstreamFailed | Code::ControllerFailed | Code::Internal => {
            tonic::Code::Internal
        }
    }
}

/// Bytes of a message that does not run a model: a few names, and settings (D-47).
const QUESTION_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::http::rejection::Rejection;

    /// TR-902: the one table, beside that of HTTP.
    #[test]
    fn tr_1501_every_code_has_its_grpc_status() {
        for (code, expect) in [
            (Code::InvalidRequest, tonic::Code::InvalidArgument),
            (Code::AlreadyExists, tonic::Code::AlreadyExists),
            (Code::FailedPrecondition, tonic::Code::InvalidArgument),
            (Code::LimitExceeded, tonic::Code::InvalidArgument),
            (Code::Cancelled, tonic::Code::Cancelled),
            (Code::Unauthenticated, tonic::Code::Unauthenticated),
            (Code::PermissionDenied, tonic::Code::PermissionDenied),
            (Code::NotFound, tonic::Code::NotFound),
            (Code::RateLimited, tonic::Code::ResourceExhausted),
            (Code::Unimplemented, tonic::Code::Unimplemented),
            (Code::Overloaded, tonic::Code::Unavailable),
            (Code::Unavailable, tonic::Code::Unavailable),
            (Code::DeadlineExceeded, tonic::Code::Unavailable),
            (Code::Internal, tonic::Code::Internal),
            (Code::Truncated, tonic::Code::Internal),
        ] {
            let status = status(&RequestError::new(code, "why"));
            assert_eq!((status.code(), status.message()), (expect, "why"), "{code}");
            assert_eq!(status.metadata().get("sapwood-error").unwrap(), code.name());
        }
        let unknown = RequestError::new(Code::NotFound, "why").with_status(StatusCode::BAD_REQUEST);
        assert_eq!(status(&unknown).code(), tonic::Code::InvalidArgument);
    }

    /// As over HTTP: a client that comes too early is refused again.
    #[test]
    fn tr_206_the_time_to_wait_is_rounded_up_to_whole_seconds() {
        for (milliseconds, seconds) in [(1, "1"), (1_000, "1"), (1_900, "2"), (7_001, "8")] {
            let wait = Duration::from_millis(milliseconds);
            let rejection = Rejection::new(Code::Overloaded, "server_overloaded".into(), "why");
            let failure = RequestError::from(rejection.after(wait));
            assert_eq!(failure.answer().headers()["retry-after"], seconds);
            let status = status(&failure);
            assert_eq!(status.metadata().get("retry-after").unwrap(), seconds);
        }
    }
}
