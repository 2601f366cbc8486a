//! What our client would never send: raw messages in a bare gRPC call.

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use prost::Message;
use sapwood_net::evergreen::grpc;
use sapwood_proto::evergreen::Status;
use sapwood_proto::evergreen::wire::{
    Action, Chunk, ChunkMetadata, NamedParameter, NodeFragment, Payload, SessionMessage,
};
use tokio::sync::oneshot;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codec::CompressionEncoding;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;
use tower::ServiceExt;

use super::Running;

/// Sends `messages` of any type and returns the responses.
///
/// # Errors
/// The call is refused before it begins.
pub async fn call<M: Message + Default + 'static>(
    server: &Running,
    messages: impl Stream<Item = M> + Send + 'static,
    headers: &[(&'static str, &str)],
) -> Result<Streaming<SessionMessage>, tonic::Status> {
    let mut request = Request::new(messages);
    for (name, value) in headers {
        request.metadata_mut().insert(*name, value.parse().unwrap());
    }
    begin(client(server).await, request).await
}

/// The same, with each message compressed.
pub async fn compressed<M: Message + Default + 'static>(
    server: &Running,
    messages: impl Stream<Item = M> + Send + 'static,
) -> Streaming<SessionMessage> {
    let client = client(server).await;
    let client = client.send_compressed(CompressionEncoding::Gzip);
    begin(client, Request::new(messages)).await.unwrap()
}

async fn client(server: &Running) -> Grpc<Channel> {
    Grpc::new(channel(server).await).max_decoding_message_size(usize::MAX)
}

async fn channel(server: &Running) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{}", server.address)).unwrap();
    endpoint.connect().await.unwrap()
}

/// Keeps a request stream open; dropping it ends the stream.
pub struct Open {
    _kept: oneshot::Sender<()>,
}

/// A request stream of these messages that stays open while the guard lives.
pub fn open<T: Send + 'static>(
    items: impl IntoIterator<Item = T, IntoIter: Send + 'static>,
) -> (Open, BoxStream<'static, T>) {
    let (_kept, received) = oneshot::channel::<()>();
    let nothing = stream::once(received).filter_map(|_| std::future::ready(None));
    let items = stream::iter(items).chain(nothing).boxed();
    (Open { _kept }, items)
}

/// A request for gRPC's path with these bytes as its body, which need not be gRPC; with `more`, the body stays open.
/// Returns the start of the response.
pub async fn request(
    server: &Running,
    head: http::request::Builder,
    body: impl Into<Bytes>,
    more: bool,
) -> (http::Response<Body>, Option<Open>) {
    let (retained, body) = open([Ok::<_, tonic::Status>(Frame::data(body.into()))]);
    let retained = more.then_some(retained);
    let request = head.uri(format!("http://{}{}", server.address, grpc::PATH));
    let request = request.body(Body::new(StreamBody::new(body))).unwrap();
    let answer = channel(server).await.oneshot(request).await.unwrap();
    (answer, retained)
}

/// The head of a gRPC request.
pub fn head() -> http::request::Builder {
    let head = http::Request::builder().method("POST");
    head.header("content-type", "application/grpc")
        .header("te", "trailers")
}

/// The gRPC number and the reason, from the head of a response or from its trailers.
pub async fn outcome((answer, _kept): (http::Response<Body>, Option<Open>)) -> (i32, String) {
    let (head, body) = answer.into_parts();
    let trailers = body
        .collect()
        .await
        .ok()
        .and_then(|body| body.trailers().cloned());
    let status = trailers
        .iter()
        .chain([&head.headers])
        .find_map(tonic::Status::from_header_map);
    code_and_reason(
        status
            .filter(|status| status.code() != tonic::Code::Ok)
            .as_ref()
            .map(grpc::from_grpc),
    )
}

async fn begin<M: Message + Default + 'static>(
    mut client: Grpc<Channel>,
    request: Request<impl Stream<Item = M> + Send + 'static>,
) -> Result<Streaming<SessionMessage>, tonic::Status> {
    client.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static(grpc::PATH);
    let codec = ProstCodec::<M, SessionMessage>::default();
    Ok(client.streaming(request, path, codec).await?.into_inner())
}

/// The status with which a call ended; `None` if that was OK.
pub async fn end(mut answers: Streaming<SessionMessage>) -> Option<Status> {
    loop {
        match answers.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(status) => return Some(grpc::from_grpc(&status)),
        }
    }
}

/// The gRPC number and the reason of a status.
pub fn code_and_reason(end: Option<Status>) -> (i32, String) {
    end.map_or((0, String::new()), |status| {
        (status.code.grpc().into(), status.reason.to_string())
    })
}

/// A final leaf fragment of `bytes` bytes; the first of a node has metadata.
pub fn leaf(id: &str, seq: i32, bytes: usize) -> NodeFragment {
    let metadata = (seq == 0).then(|| ChunkMetadata {
        mimetype: "text/plain".into(),
        ..ChunkMetadata::default()
    });
    let payload = Some(Payload::Data(Bytes::from(vec![b'x'; bytes])));
    NodeFragment {
        id: id.into(),
        seq,
        chunk_fragment: Some(Chunk { metadata, payload }),
        ..NodeFragment::default()
    }
}

/// A whole leaf of JSON.
pub fn json(id: &str, text: &str) -> NodeFragment {
    let metadata = ChunkMetadata {
        mimetype: "application/json".into(),
        ..ChunkMetadata::default()
    };
    NodeFragment {
        id: id.into(),
        chunk_fragment: Some(Chunk {
            metadata: Some(metadata),
            payload: Some(Payload::Data(Bytes::copy_from_slice(text.as_bytes()))),
        }),
        ..NodeFragment::default()
    }
}

/// A leaf fragment of `bytes` bytes that is not the last.
pub fn piece(id: &str, seq: i32, bytes: usize) -> NodeFragment {
    NodeFragment {
        continued: true,
        ..leaf(id, seq, bytes)
    }
}

/// A message of fragments.
pub fn fragments(list: Vec<NodeFragment>) -> SessionMessage {
    SessionMessage {
        node_fragments: list,
        ..SessionMessage::default()
    }
}

/// A message with one action: parameters and ids.
pub fn action(name: &str, inputs: &[(&str, &str)], outputs: &[(&str, &str)]) -> SessionMessage {
    let bind = |pairs: &[(&str, &str)]| {
        let pairs = pairs.iter().map(|(name, id)| NamedParameter {
            name: (*name).into(),
            id: (*id).into(),
        });
        pairs.collect()
    };
    let action = Action {
        name: name.into(),
        inputs: bind(inputs),
        outputs: bind(outputs),
        ..Action::default()
    };
    SessionMessage {
        actions: vec![action],
        ..SessionMessage::default()
    }
}

/// A final fragment of a tree.
pub fn tree(id: &str, children: &[&str]) -> NodeFragment {
    NodeFragment {
        id: id.into(),
        child_ids: children.iter().map(|&child| child.into()).collect(),
        ..NodeFragment::default()
    }
}
