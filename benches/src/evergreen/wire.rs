//! The client's end of a session, over gRPC or a WebSocket: sends raw messages, without our client library except for
//! the msgpack codec.

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

/// The server of the sessions.
#[derive(Clone, Debug)]
pub enum Peer {
    /// A gRPC channel for many sessions.
    Grpc(Channel),
    /// The address of a WebSocket server; each session is a connection.
    WebSocket(SocketAddr),
    /// The same, in the msgpack dialect.
    Msgpack(SocketAddr),
}

impl Peer {
    /// The gRPC channel to a server, with the settings of our clients.
    ///
    /// # Errors
    /// If no server listens.
    pub async fn grpc(address: SocketAddr) -> Result<Self> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(4 << 20);
        Ok(Self::Grpc(endpoint.connect().await?))
    }

    /// Opens a session without retention (EV-984); `window` messages may wait to be sent.
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
                // Clients of the msgpack dialect name no subprotocol: the first frame identifies it.
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
                // Sending and receiving in one task would deadlock when the buffers of both sides are full, so a task
                // of its own sends.
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
    /// If the session ended, or its bytes cannot be decoded.
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

    /// Half-closes the session, and waits for its end.
    ///
    /// # Errors
    /// If the session does not end normally.
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

/// The codec of the msgpack dialect, which frames messages twice. Both directions share it.
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

/// Sends messages, many at a time, and closes at the end; a broken connection is reported by the receiving half.
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
