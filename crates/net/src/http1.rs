//! Sends one HTTP/1.1 request over its own connection.
//!
//! There is no pool. These requests are generations, which last for seconds, and files that are fetched once: a handshake more does
//! not show. A server that closes an idle connection while a POST is on its way makes it fail, and it must not be sent twice. Closing
//! the connection is how a server learns that nobody reads the rest. References may not share connections at all. gRPC
//! channels and exports of telemetry, with their many short requests, have the pools of `tonic` and `hyper-util`.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::task::AbortOnDropHandle;

/// Sends `request`, whose URI is in origin form.
///
/// # Errors
/// The connection breaks before the response head is received, or the response is not valid HTTP.
pub(crate) async fn exchange<B>(
    io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<B>,
) -> hyper::Result<Response<ResponseBody>>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut builder = http1::Builder::new();
    // The library's default is several hundred KiB, for the head of a response from a server that is not trusted.
    builder.max_buf_size(BUFFER_BYTES);
    let (mut sender, connection) = builder.handshake(TokioIo::new(io)).await?;
    // The task ends with the response body, which owns its handle; a failure of the connection is an error of the body.
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        let _shown_by_the_answer = connection.await;
    }));
    // A failure drops the handle, which closes the connection.
    let answer = sender.send_request(request).await?;
    Ok(answer.map(|body| ResponseBody {
        body,
        _connection: connection,
    }))
}

/// The body of a response, together with its connection.
#[derive(Debug)]
pub(crate) struct ResponseBody {
    body: Incoming,
    _connection: AbortOnDropHandle<()>,
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The maximum of bytes of a response head.
const BUFFER_BYTES: usize = 64 * 1024;
