//! The one client that drives every server: raw messages, a window, no library of ours.
//!
//! Owns: sending, counting, ending a round. Refuses to know: which server answers; both see the same bytes.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use sapwood_proto::evergreen::wire::{
    Action, Chunk, ChunkMetadata, NamedParameter, NodeFragment, Payload, SessionMessage,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

/// What one round is.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Payload of one chunk.
    pub bytes: usize,
    /// Chunks under way.
    pub window: usize,
}

/// What one round gave.
#[derive(Clone, Copy, Debug)]
pub struct Count {
    /// Chunks that came back.
    pub chunks: u64,
    /// How long it took.
    pub took: Duration,
}

impl Count {
    /// Chunks per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        #[allow(
            clippy::cast_precision_loss,
            reason = "counts of a few seconds are far below 2^52"
        )]
        let chunks = self.chunks as f64;
        chunks / self.took.as_secs_f64()
    }
}

/// Connects with the settings that every client of ours has.
///
/// # Errors
/// If nobody listens.
pub async fn connect(address: SocketAddr) -> Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .tcp_nodelay(true)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20);
    Ok(endpoint.connect().await?)
}

/// Echoes for about `span`, in one session that keeps nothing (EV-984).
///
/// # Errors
/// If the session fails.
pub async fn round(channel: &Channel, shape: Shape, span: Duration) -> Result<Count> {
    let began = Instant::now();
    let chunks = session(channel, shape, began, span).await?;
    Ok(Count {
        chunks,
        took: began.elapsed(),
    })
}

async fn session(channel: &Channel, shape: Shape, began: Instant, span: Duration) -> Result<u64> {
    let (send, receive) = mpsc::channel(shape.window + 2);
    let mut incoming = open(channel, ReceiverStream::new(receive)).await?;
    let payload = Bytes::from(vec![b'x'; shape.bytes]);
    send.send(opening()).await.context("the call has ended")?;
    let (mut sent, mut back) = (0_i32, 0_i32);
    while sent < i32::try_from(shape.window)? {
        send.send(fragment(sent, true, &payload)).await?;
        sent += 1;
    }
    let mut open = true;
    while back < sent {
        let message = incoming
            .message()
            .await?
            .context("the session ended early")?;
        back += i32::try_from(message.node_fragments.iter().filter(|f| carries(f)).count())?;
        while open && sent - back < i32::try_from(shape.window)? {
            open = sent < i32::MAX && began.elapsed() < span;
            send.send(fragment(sent, open, &payload)).await?;
            sent += 1;
        }
    }
    drop(send);
    while incoming.message().await?.is_some() {}
    ensure!(back == sent, "{sent} chunks went out and {back} came back");
    Ok(u64::try_from(back)?)
}

/// A session that has echoed one chunk of 32 bytes and then says nothing: hold it to keep it open.
#[derive(Debug)]
pub struct Idle {
    _send: mpsc::Sender<SessionMessage>,
    _incoming: Streaming<SessionMessage>,
}

/// Opens an idle session.
///
/// # Errors
/// If the session fails.
pub async fn idle(channel: &Channel) -> Result<Idle> {
    let (send, receive) = mpsc::channel(2);
    let mut incoming = open(channel, ReceiverStream::new(receive)).await?;
    send.send(opening()).await?;
    send.send(fragment(0, false, &Bytes::from_static(&[b'x'; 32])))
        .await?;
    let mut done = false;
    while !done {
        let message = incoming
            .message()
            .await?
            .context("the session ended early")?;
        done = message
            .node_fragments
            .iter()
            .any(|fragment| !fragment.continued);
    }
    Ok(Idle {
        _send: send,
        _incoming: incoming,
    })
}

async fn open(
    channel: &Channel,
    outgoing: impl Stream<Item = SessionMessage> + Send + 'static,
) -> Result<Streaming<SessionMessage>> {
    let codec = ProstCodec::<SessionMessage, SessionMessage>::default();
    let mut grpc = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(16 << 20);
    grpc.ready().await?;
    let path = http::uri::PathAndQuery::from_static("/evergreen.v2.EvergreenService/StartSession");
    let mut request = Request::new(outgoing.boxed());
    request
        .metadata_mut()
        .insert("evergreen-retain", MetadataValue::from_static("unread"));
    Ok(grpc.streaming(request, path, codec).await?.into_inner())
}

fn opening() -> SessionMessage {
    let bind = |name: &str, id: &str| {
        vec![NamedParameter {
            name: name.into(),
            id: id.into(),
        }]
    };
    let action = Action {
        name: "echo".into(),
        inputs: bind("text", "in"),
        outputs: bind("response", "out"),
        ..Action::default()
    };
    SessionMessage {
        actions: vec![action],
        ..SessionMessage::default()
    }
}

fn fragment(seq: i32, continued: bool, payload: &Bytes) -> SessionMessage {
    let metadata = (seq == 0).then(|| ChunkMetadata {
        mimetype: "text/plain".into(),
        ..ChunkMetadata::default()
    });
    let chunk = Chunk {
        metadata,
        payload: Some(Payload::Data(payload.clone())),
    };
    let fragment = NodeFragment {
        id: "in".into(),
        seq,
        continued,
        chunk_fragment: Some(chunk),
        ..NodeFragment::default()
    };
    SessionMessage {
        node_fragments: vec![fragment],
        ..SessionMessage::default()
    }
}

/// Whether a fragment carries a chunk back; closing ones without payload do not.
fn carries(fragment: &NodeFragment) -> bool {
    let payload = fragment
        .chunk_fragment
        .as_ref()
        .and_then(|chunk| chunk.payload.as_ref());
    matches!(payload, Some(Payload::Data(data)) if !data.is_empty())
}
