//! The service itself: one `StartSession` call is one session (EV-101).
//!
//! Owns: headers, statuses as trailers, the session's task. Refuses to know: what a session does with a message.
//!
//! ```text
//!   call ─► options ─► admitted? ─► headers out at once (EV-702) ─► task: messages in ─► session ─► body: messages out
//!                                                                    └── aborted, or without connection, when the body is dropped
//! ```

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use futures::future::{BoxFuture, Ready, ready};
use futures::{Stream, StreamExt};
use http::HeaderMap;
use sapwood_kernel::pool::{LARGE_BYTES, Pool, Size};
use sapwood_kernel::session::{self, Incoming, Lost};
use sapwood_net::evergreen::grpc::{self, Received, ServerWire};
use sapwood_proto::evergreen::{Dialect, Message, Reason, Status};
use tokio_util::task::AbortOnDropHandle;
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataValue;
use tonic::server::{Grpc, StreamingService};
use tonic::{Request, Response, Streaming};

use super::held;
use super::house::House;
use super::options::{Malformed, Options, TOKEN};
use super::unread;
use crate::caller::Caller;
use crate::gunzip;
use crate::refusal::Refusal;
use crate::trail;

/// The method as a tower service. Clones share everything.
#[derive(Clone)]
pub(super) struct Service(pub(super) Arc<House>);

impl tower::Service<http::Request<Body>> for Service {
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
            .accept_compressed(CompressionEncoding::Gzip)
            .max_decoding_message_size(most);
            let request = gunzip::unpacked(request, most);
            Ok(grpc.streaming(service, request).await.map(Body::new))
        })
    }
}

impl StreamingService<Received> for Service {
    type Response = Message;
    type ResponseStream = Outgoing;
    type Future = Ready<Result<Response<Outgoing>, tonic::Status>>;

    /// Nothing is awaited here: the headers must not wait for a message (EV-702).
    fn call(&mut self, request: Request<Streaming<Received>>) -> Self::Future {
        ready(start(&self.0, request).map_err(|status| grpc::to_grpc(&status)))
    }
}

fn start(
    house: &House,
    request: Request<Streaming<Received>>,
) -> Result<Response<Outgoing>, Status> {
    let (metadata, extensions, incoming) = request.into_parts();
    let headers: HeaderMap = metadata.into_headers();
    let options = Options::read(&headers).map_err(|malformed| refused(&malformed))?;
    let caller = Caller::of(&extensions).map_err(unchecked)?;
    let visitor = caller.identity.clone();
    let most = house.config.limits.max_message_bytes;
    if let Some(token) = &options.token {
        let incoming = following(incoming, most);
        let messages = held::connect(&house.held, token, &visitor, Dialect::Grpc, incoming)?;
        let outgoing = Outgoing {
            messages,
            _task: None,
        };
        return answer(house, outgoing, Some(token));
    }
    let place = house.admit(&visitor)?;
    let issued = options.resume.then(|| house.held.issue(&visitor)).flatten();
    let Some((token, stay)) = issued else {
        let (session, messages) = house.open(Dialect::Grpc, options, None, &visitor);
        let orders = house.orders();
        let incoming =
            incoming.then(move |item| read(item, move |it| grpc::from_client(&it, most), |it| it));
        let task = tokio::spawn(trail::carry_session(async move {
            session.run(incoming, orders).await;
            drop(place);
        }));
        let _task = Some(AbortOnDropHandle::new(task));
        return answer(house, Outgoing { messages, _task }, None);
    };
    let incoming = following(incoming, most);
    let messages = house.hold(
        Dialect::Grpc,
        options,
        (token.clone(), stay),
        place,
        incoming,
    );
    let outgoing = Outgoing {
        messages,
        _task: None,
    };
    answer(house, outgoing, Some(token.text()))
}

/// What a connection gives that another one may follow, in messages of at most so many bytes.
fn following(incoming: Streaming<Received>, most: usize) -> Incoming {
    let lost = move |status: tonic::Status| {
        if grpc::was_cut(&status) {
            Lost::Cut
        } else {
            Lost::Ended(grpc::from_client(&status, most))
        }
    };
    incoming
        .then(move |item| read(item, lost, Lost::Ended))
        .boxed()
}

/// A message that has come; a long one is read elsewhere, in its caller's turn.
async fn read<E>(
    item: Result<Received, tonic::Status>,
    lost: impl FnOnce(tonic::Status) -> E,
    refused: impl FnOnce(Status) -> E,
) -> Result<Message, E> {
    let bytes = match item {
        Ok(Received::Message(message)) => return Ok(message),
        Ok(Received::Unread(bytes)) => bytes,
        Err(status) => return Err(lost(status)),
    };
    let (turn, size) = (trail::present_turn().caller, Size::of(bytes.len()));
    let reading = Pool::global().run_only(turn, size, move || grpc::read(bytes));
    let read = reading.await.unwrap_or_else(|_logged| Err(unread()));
    read.map_err(refused)
}

fn answer(
    house: &House,
    outgoing: Outgoing,
    token: Option<&str>,
) -> Result<Response<Outgoing>, Status> {
    let mut response = Response::new(outgoing);
    let names = house.config.extensions(Dialect::Grpc).join(", ");
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

fn unchecked(refusal: Refusal) -> Status {
    Status::other(refusal.code, "UNCHECKED_CALLER", refusal.message)
}

/// An option that cannot be read: `BAD_CONFIG`, naming the option as the field.
fn refused(option: &Malformed) -> Status {
    let message = option.to_string();
    Status::new(Reason::BadConfig, message.clone()).with_field(option.name(), message)
}

/// The body of the answer. Dropping it, as hyper does when the client goes away, ends the session's task and with it
/// every run (EV-109, EV-611); a session that can be come back to is told that its connection is lost.
pub(super) struct Outgoing {
    messages: session::Outgoing,
    _task: Option<AbortOnDropHandle<()>>,
}

impl Stream for Outgoing {
    type Item = Result<Message, tonic::Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = self.messages.poll_next_unpin(cx);
        polled.map(|item| item.map(|result| result.map_err(|end| grpc::to_grpc(&end))))
    }
}
