//! The gRPC service: one `StartSession` call is one session (EV-101).
//!
//! ```text
//!   call ─► options ─► admitted? ─► headers out at once (EV-702) ─► task: messages in ─► session ─► body: messages out
//!                                                                    └── aborted, or detached, when the body is dropped
//! ```

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use futures::future::{BoxFuture, Ready, ready};
use futures::{FutureExt, Stream, StreamExt};
use http::HeaderMap;
use sapwood_kernel::pool::{BlockingPool, LARGE_BYTES, TaskSize};
use sapwood_kernel::session::{ConnectionLoss, IncomingMessages, OutgoingMessages};
use sapwood_net::evergreen::grpc::{self, ReceivedMessage, ServerWire};
use sapwood_proto::evergreen::{Dialect, Reason, Status, WireMessage};
use tokio_util::task::AbortOnDropHandle;
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataValue;
use tonic::server::{Grpc, StreamingService};
use tonic::{Request, Response, Streaming};

use super::context::EvergreenContext;
use super::detached;
use super::options::{BadOption, RequestedOptions, TOKEN};
use super::unread;
use crate::auth::caller::Caller;
use crate::http::gunzip;
use crate::http::held_head;
use crate::http::rejection::Rejection;
use crate::http::request_trace;

/// The method as a tower service. Clones share everything.
#[derive(Clone)]
pub(super) struct EvergreenService(pub(super) Arc<EvergreenContext>);

impl tower::Service<http::Request<Body>> for EvergreenService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            let most = service.0.config.limits.max_message_bytes;
            let mut grpc = Grpc::new(ServerWire {
                long_bytes: LARGE_BYTES,
            })
            // Only accepted: compressed messages are never sent unasked (EV-703).
            .accept_compressed(CompressionEncoding::Gzip)
            .max_decoding_message_size(most);
            // Before the library sees the request: it would unpack a message whole, without charging it (D-47).
            let request = held_head::held(gunzip::unpacked(request, most), most);
            Ok(grpc.streaming(service, request).await.map(Body::new))
        })
    }
}

impl StreamingService<ReceivedMessage> for EvergreenService {
    type Response = WireMessage;
    type ResponseStream = GrpcResponseBody;
    type Future = Ready<Result<Response<GrpcResponseBody>, tonic::Status>>;

    /// Nothing is awaited here: the headers must not wait for a message (EV-702).
    fn call(&mut self, request: Request<Streaming<ReceivedMessage>>) -> Self::Future {
        ready(start(&self.0, request).map_err(|status| grpc::to_grpc(&status)))
    }
}

fn start(
    context: &EvergreenContext,
    request: Request<Streaming<ReceivedMessage>>,
) -> Result<Response<GrpcResponseBody>, Status> {
    let (metadata, extensions, incoming) = request.into_parts();
    let headers: HeaderMap = metadata.into_headers();
    let options = RequestedOptions::read(&headers).map_err(|malformed| refused(&malformed))?;
    let caller = Caller::of(&extensions).map_err(unchecked)?;
    let caller_identity = caller.identity.clone();
    let most = context.config.limits.max_message_bytes;
    // Before `admit`: the session that is resumed holds a place already, also during a drain and where the caller's
    // share is full.
    if let Some(token) = &options.token {
        let incoming = following(incoming, most);
        let messages = detached::connect(
            &context.detached,
            token,
            &caller_identity,
            Dialect::Grpc,
            incoming,
        )?;
        // The task is the registry's: a lost connection must not abort a session that can be resumed.
        return answer(context, messages, None, Some(token));
    }
    let position = context.admit(&caller_identity)?;
    let issued = options
        .resume
        .then(|| context.detached.issue(&caller_identity))
        .flatten();
    // Without a place in the registry the session runs all the same, without resume: its client sees that no token came.
    let Some((token, guard)) = issued else {
        let (session, messages) = context.open(Dialect::Grpc, options, None, &caller_identity);
        let orders = context.orders();
        let incoming =
            incoming.then(move |item| read(item, move |it| grpc::from_client(&it, most), |it| it));
        // A task of its own, and not the body's poll: HTTP/2 flow control stops polling a body whose client does not
        // read, and the session's timers and its input must go on then.
        let run = session.run(incoming, orders);
        // `map`, and not an `async` block, which would hold the run twice: before its first poll, and while it is awaited.
        let run = run.map(move |_| drop(position));
        let task = tokio::spawn(request_trace::carry_session(run));
        let task = AbortOnDropHandle::new(task);
        return answer(context, messages, Some(task), None);
    };
    let incoming = following(incoming, most);
    let issued = (token.clone(), guard);
    let messages = context.hold(Dialect::Grpc, options, issued, position, incoming);
    answer(context, messages, None, Some(token.text()))
}

/// The input of a session that can be resumed from one of its connections, in messages of at most `most` bytes. It tells
/// a lost connection, for which the session waits, from one that the client has ended (EV-940).
fn following(incoming: Streaming<ReceivedMessage>, most: usize) -> IncomingMessages {
    let lost = move |status: tonic::Status| {
        if grpc::was_cut(&status) {
            ConnectionLoss::Cut
        } else {
            ConnectionLoss::Ended(grpc::from_client(&status, most))
        }
    };
    incoming
        .then(move |item| read(item, lost, ConnectionLoss::Ended))
        .boxed()
}

/// Decodes a received message; a long one on another thread, in its caller's turn.
async fn read<E>(
    item: Result<ReceivedMessage, tonic::Status>,
    lost: impl FnOnce(tonic::Status) -> E,
    refused: impl FnOnce(Status) -> E,
) -> Result<WireMessage, E> {
    let bytes = match item {
        Ok(ReceivedMessage::Message(message)) => return Ok(message),
        Ok(ReceivedMessage::Unread(bytes)) => bytes,
        Err(status) => return Err(lost(status)),
    };
    // The next message is not asked for meanwhile (`Stream::then`), which keeps them in order.
    let (turn, size) = (
        request_trace::present_turn().caller,
        TaskSize::of(bytes.len()),
    );
    let reading = BlockingPool::global().run_only(turn, size, move || grpc::read(bytes));
    let read = reading.await.unwrap_or_else(|_logged| Err(unread()));
    read.map_err(refused)
}

fn answer(
    context: &EvergreenContext,
    messages: OutgoingMessages,
    task: Option<AbortOnDropHandle<()>>,
    token: Option<&str>,
) -> Result<Response<GrpcResponseBody>, Status> {
    let mut response = Response::new(GrpcResponseBody {
        messages,
        _task: task,
    });
    let names = context.config.extensions(Dialect::Grpc).join(", ");
    // Both are ASCII, which metadata takes: the parsing cannot fail.
    if let Ok(names) = names.parse::<MetadataValue<_>>() {
        response
            .metadata_mut()
            .insert("evergreen-extensions", names);
    }
    if let Some(Ok(mut token)) = token.map(str::parse::<MetadataValue<_>>) {
        token.set_sensitive(true);
        response.metadata_mut().insert(TOKEN, token);
    }
    Ok(response)
}

/// A request that reached this handler without an authenticated caller: it fails closed (D-45).
fn unchecked(rejection: Rejection) -> Status {
    Status::other(rejection.code, "UNCHECKED_CALLER", rejection.message)
}

/// An option that cannot be read: `BAD_CONFIG`, naming the option as the field.
fn refused(option: &BadOption) -> Status {
    let message = option.to_string();
    Status::new(Reason::BadConfig, message.clone()).with_field(option.name(), message)
}

/// The body of the answer. Dropping it, as hyper does when the client disconnects, ends the session's task and with it
/// every run (EV-109, EV-611); a resumable session is notified that its connection is lost.
pub(super) struct GrpcResponseBody {
    messages: OutgoingMessages,
    _task: Option<AbortOnDropHandle<()>>,
}

impl Stream for GrpcResponseBody {
    type Item = Result<WireMessage, tonic::Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = self.messages.poll_next_unpin(cx);
        polled.map(|item| item.map(|result| result.map_err(|end| grpc::to_grpc(&end))))
    }
}
