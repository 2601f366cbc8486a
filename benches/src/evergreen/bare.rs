//! The anchor of EV-981: a tonic service that sends every message straight back, with the settings of our listener.
//!
//! Owns: the service, without any code of ours in its path. Refuses to know: sessions.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use sapwood_proto::evergreen::wire::SessionMessage;
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

/// Serves the echo until the process ends.
///
/// # Errors
/// Those of the listener.
pub async fn serve(listener: TcpListener) -> Result<(), tonic::transport::Error> {
    Server::builder()
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .add_service(Echo)
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await
}

#[derive(Clone)]
struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "evergreen.v2.EvergreenService";
}

impl tower_service::Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let codec = ProstCodec::<SessionMessage, SessionMessage>::default();
            let mut grpc = Grpc::new(codec).max_decoding_message_size(16 << 20);
            Ok(grpc.streaming(Back, request).await)
        })
    }
}

/// The response stream is the request stream.
struct Back;

impl StreamingService<SessionMessage> for Back {
    type Response = SessionMessage;
    type ResponseStream = Streaming<SessionMessage>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<SessionMessage>>) -> Self::Future {
        ready(Ok(Response::new(request.into_inner())))
    }
}
