//! The baselines of EV-981: a tonic service and a WebSocket server that send every message straight back, with the
//! settings of our listener.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, SinkExt, StreamExt};
use http::header::SEC_WEBSOCKET_PROTOCOL;
use sapwood_proto::evergreen::wire::SessionMessage;
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::accept_hdr_async;
use tokio_tungstenite::tungstenite::handshake::server::{Request as Asked, Response as Answer};
use tokio_tungstenite::tungstenite::{self, Message};
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

/// The same over WebSockets; messages are sent back as raw bytes.
///
/// # Errors
/// Those of the listener.
pub async fn serve_websocket(listener: TcpListener) -> std::io::Result<()> {
    loop {
        let (io, _) = listener.accept().await?;
        io.set_nodelay(true)?;
        tokio::spawn(async move {
            // A broken connection is an error of the client.
            let _ = echo(io).await;
        });
    }
}

async fn echo(io: TcpStream) -> Result<(), tungstenite::Error> {
    #[expect(clippy::result_large_err, reason = "the library's signature")]
    let agree = |request: &Asked, mut answer: Answer| {
        let protocol = request.headers().get(SEC_WEBSOCKET_PROTOCOL).cloned();
        if let Some(protocol) = protocol {
            answer
                .headers_mut()
                .insert(SEC_WEBSOCKET_PROTOCOL, protocol);
        }
        Ok(answer)
    };
    let mut socket = accept_hdr_async(io, agree).await?;
    loop {
        let reply = match socket.next().now_or_never() {
            Some(reply) => reply,
            None => {
                socket.flush().await?;
                socket.next().await
            }
        };
        match reply.transpose()? {
            Some(message @ Message::Binary(_)) => socket.feed(message).await?,
            Some(_) => {}
            None => return Ok(()),
        }
    }
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
