//! LMTP over one long HTTP request (LM-113): lines are sent in its body and received in the response body.

use std::convert::Infallible;

use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use futures::{Stream, StreamExt};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Request, Uri};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use sapwood_proto::lmtp::LmtpError;
use tokio::sync::mpsc;

use super::ConnectOptions;
use super::address::PeerAddress;
use super::wire::{self, LmtpConnection, OUTGOING_MAX, lost, next, until};
use crate::http1::exchange;

/// Sends the request, and waits for the response head.
///
/// # Errors
/// As [`LmtpConnection::to`].
pub(super) async fn open(
    uri: &Uri,
    address: &PeerAddress,
    options: &ConnectOptions,
) -> Result<LmtpConnection, LmtpError> {
    let io = wire::dial(uri, address).await?;
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    // A server takes the POST under `/lmtp` alone: `POST /` is answered with 405 (LM-102).
    let mut request = Request::post(if path == "/" { "/lmtp" } else { path })
        .header(HOST, uri.authority().map_or("", |host| host.as_str()))
        .header(CONTENT_TYPE, LINES)
        .header(ACCEPT, LINES);
    if let Some(key) = wire::credential(address)? {
        request = request.header(AUTHORIZATION, key);
    }
    // The body is endless from here on. The server answers without waiting for its end (LM-113).
    let (outgoing, messages) = mpsc::channel(OUTGOING_MAX);
    let body = StreamBody::new(lines(messages, options));
    let request = request
        .body(body)
        .map_err(|_| wire::bad("the address is not the URL of an HTTP server"))?;
    let answer = exchange(io, request).await.map_err(|error| {
        tracing::debug!(%error, "no answer");
        lost("the upstream does not answer there")
    })?;
    if !answer.status().is_success() {
        return Err(wire::refused_with(answer.status().as_u16()));
    }
    let reply = answer.into_body().into_data_stream();
    // A response body that breaks off ends the stream.
    let reply = reply.scan((), |(), bytes| std::future::ready(bytes.ok()));
    Ok(LmtpConnection::of(wire::cut(reply.boxed()), outgoing))
}

/// Yields a line for each message, and an empty line when idle, because servers time out a body without data.
fn lines(
    messages: mpsc::Receiver<Bytes>,
    options: &ConnectOptions,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + use<> {
    let every = options.ping;
    stream::unfold(messages, move |mut messages| async move {
        let mut line = BytesMut::new();
        // Both branches are cancel-safe: a message that was not received stays in the channel.
        tokio::select! {
            message = messages.recv() => line.extend_from_slice(&message?),
            // The interval starts again after each message, so a busy body has no empty lines. Servers skip them
            // (LM-110).
            () = until(next(every)) => {}
        }
        line.put_u8(b'\n');
        Some((Ok(Frame::data(line.freeze())), messages))
    })
}

const LINES: &str = "application/x-lmtp";
