//! The client's end of a session, over gRPC or a WebSocket: raw messages, no library of ours but the msgpack dialect.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use bytes::{Bytes, BytesMut};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use prost::Message as _;
use sapwood_proto::evergreen::socket::{Codec, FrameContent};
use sapwood_proto::evergreen::wire::SessionMessage;
use sapwood_proto::evergreen::{Dialect, WebSocketFrame, protobuf};
use sapwood_proto::session::Side;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{WebSocketStream, client_async};
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

/// Where sessions are opened.
#[derive(Clone, Debug)]
pub enum Peer {
    /// A connection for many sessions.
    Grpc(Channel),
    /// An address; each session is a connection.
    WebSocket(SocketAddr),
    /// The same, in the msgpack dialect.
    Msgpack(SocketAddr),
}

impl Peer {
    /// A server's gRPC side, with the settings that every client of ours has.
    ///
    /// # Errors
    /// If nobody listens.
    pub async fn grpc(address: SocketAddr) -> Result<Self> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(4 << 20);
        Ok(Self::Grpc(endpoint.connect().await?))
    }

    /// Opens a session that keeps nothing it has passed on (EV-984); `window` messages may wait to be sent.
    ///
    /// # Errors
    /// If the server refuses.
    pub async fn open(&self, window: usize) -> Result<Wire> {
        match self {
            Self::Grpc(channel) => {
                let (send, receive) = mpsc::channel(window);
                let mut request = Request::new(ReceiverStream::new(receive));
                request
                    .metadata_mut()
                    .insert("evergreen-retain", MetadataValue::from_static("unread"));
                let codec = ProstCodec::<SessionMessage, SessionMessage>::default();
                let mut grpc =
                    tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(16 << 20);
                grpc.ready().await?;
                let path = http::uri::PathAndQuery::from_static(PATH);
                let answer = grpc.streaming(request, path, codec).await?;
                Ok(Wire::Grpc(send, Box::new(answer.into_inner())))
            }
            Self::WebSocket(address) | Self::Msgpack(address) => {
                let pack = match self {
                    Self::Msgpack(_) => Some(Pack::default()),
                    _ => None,
                };
                let url = format!("ws://{address}/evergreen?evergreen-retain=unread");
                let mut request = url.into_client_request()?;
                // Clients that speak msgpack name no subprotocol: the first frame shows it.
                if pack.is_none() {
                    let protocol = http::HeaderValue::from_static("evergreen.v2.proto");
                    request
                        .headers_mut()
                        .insert(http::header::SEC_WEBSOCKET_PROTOCOL, protocol);
                }
                let io = TcpStream::connect(address).await?;
                io.set_nodelay(true)?;
                let (socket, _) = client_async(request, io).await?;
                let (sink, incoming) = socket.split();
                let (send, receive) = mpsc::channel(window);
                // Whoever sends and receives in one task stands still when both sides' buffers are full.
                tokio::spawn(forward(receive, sink, pack.clone()));
                Ok(Wire::WebSocket(send, incoming, pack))
            }
        }
    }
}

/// A session's connection.
#[derive(Debug)]
pub enum Wire {
    /// A call.
    Grpc(mpsc::Sender<SessionMessage>, Box<Streaming<SessionMessage>>),
    /// A socket.
    WebSocket(
        mpsc::Sender<SessionMessage>,
        SplitStream<Socket>,
        Option<Pack>,
    ),
}

impl Wire {
    /// Sends a message.
    ///
    /// # Errors
    /// If the session is over.
    pub async fn send(&mut self, message: SessionMessage) -> Result<()> {
        match self {
            Self::Grpc(send, _) | Self::WebSocket(send, ..) => {
                send.send(message).await.context("the session has ended")
            }
        }
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// If the session ended, or its bytes are no message.
    pub async fn receive(&mut self) -> Result<SessionMessage> {
        let early = "the session ended early";
        match self {
            Self::Grpc(_, incoming) => incoming.message().await?.context(early),
            Self::WebSocket(_, incoming, pack) => loop {
                let Message::Binary(bytes) = incoming.next().await.context(early)?? else {
                    continue;
                };
                match pack {
                    None => return Ok(SessionMessage::decode(bytes)?),
                    Some(pack) => {
                        if let Some(message) = pack.read(bytes)? {
                            return Ok(message);
                        }
                    }
                }
            },
        }
    }

    /// Says that nothing more comes, and waits for the end.
    ///
    /// # Errors
    /// If the session does not end well.
    pub async fn finish(self) -> Result<()> {
        match self {
            Self::Grpc(send, mut incoming) => {
                drop(send);
                while incoming.message().await?.is_some() {}
            }
            Self::WebSocket(send, mut incoming, _) => {
                drop(send);
                while let Some(Ok(_)) = incoming.next().await {}
            }
        }
        Ok(())
    }
}

type Socket = WebSocketStream<TcpStream>;

/// The msgpack dialect, spoken by our own codec: it alone knows its outer and inner frames. Both directions share it.
#[derive(Clone, Debug)]
pub struct Pack(Arc<Mutex<Codec>>);

impl Default for Pack {
    fn default() -> Self {
        let codec = Codec::new(Dialect::Msgpack, Side::Client);
        Self(Arc::new(Mutex::new(codec)))
    }
}

impl Pack {
    fn write(&self, message: &SessionMessage) -> Result<Bytes> {
        let message = protobuf::decode(message.encode_to_vec().as_slice())?;
        let mut out = BytesMut::new();
        let mut codec = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        codec.encode(&message, 0, &mut out);
        Ok(out.freeze())
    }

    fn read(&self, bytes: Bytes) -> Result<Option<SessionMessage>> {
        let mut codec = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let FrameContent::Message(message) = codec.decode(WebSocketFrame::Binary(bytes))? else {
            return Ok(None);
        };
        let mut out = BytesMut::new();
        protobuf::encode(&message, &mut out);
        Ok(Some(SessionMessage::decode(out)?))
    }
}

/// Sends what comes, many messages at a time, and closes at the end; a connection that breaks shows on the other half.
async fn forward(
    mut messages: mpsc::Receiver<SessionMessage>,
    mut sink: SplitSink<Socket, Message>,
    pack: Option<Pack>,
) -> Result<()> {
    let mut batch = Vec::new();
    while messages.recv_many(&mut batch, BATCH).await > 0 {
        for message in batch.drain(..) {
            let bytes = match &pack {
                None => message.encode_to_vec().into(),
                Some(pack) => pack.write(&message)?,
            };
            sink.feed(Message::Binary(bytes)).await?;
        }
        sink.flush().await?;
    }
    Ok(sink.close().await?)
}

/// Messages sent before a flush.
const BATCH: usize = 64;
const PATH: &str = "/evergreen.v2.EvergreenService/StartSession";
