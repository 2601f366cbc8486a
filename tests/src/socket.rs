//! A raw WebSocket client: any frame that a client might send.

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::{HeaderMap, Request, StatusCode};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};

use super::Running;

/// The client's end.
pub struct Socket {
    stream: WebSocketStream<TcpStream>,
    /// The headers of the server's answer.
    pub headers: HeaderMap,
}

/// What the server sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketReply {
    /// A text message.
    Text(String),
    /// A binary message.
    Binary(Bytes),
    /// The end: close code and reason; `None` for a connection that ended without a Close frame.
    Close(Option<(u16, String)>),
}

impl Socket {
    /// Connects to `path` with these headers.
    ///
    /// # Errors
    /// The HTTP status of a server that refuses.
    pub async fn open(
        server: &Running,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Result<Self, StatusCode> {
        let tcp = TcpStream::connect(server.address).await.unwrap();
        Self::over(tcp, server, path, headers).await
    }

    /// Connects with small socket buffers, so that a client that does not read is noticed soon.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn narrow(server: &Running, path: &str) -> Result<Self, StatusCode> {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(NARROW_BYTES).unwrap();
        let tcp = socket.connect(server.address).await.unwrap();
        Self::over(tcp, server, path, &[]).await
    }

    async fn over(
        tcp: TcpStream,
        server: &Running,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Result<Self, StatusCode> {
        let mut request = Request::get(format!("ws://{}{path}", server.address))
            .header("host", server.address.to_string())
            .header("connection", "keep-alive, Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", generate_key());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        match client_async(request.body(()).unwrap(), tcp).await {
            Ok((stream, answer)) => Ok(Self {
                stream,
                headers: answer.headers().clone(),
            }),
            Err(Error::Http(answer)) => Err(answer.status()),
            Err(error) => panic!("no handshake: {error}"),
        }
    }

    /// Connects in a dialect.
    pub async fn speaking(server: &Running, subprotocol: &str) -> Self {
        let headers = [("sec-websocket-protocol", subprotocol)];
        let socket = Self::open(server, "/evergreen", &headers).await.unwrap();
        let chosen = &socket.headers["sec-websocket-protocol"];
        assert_eq!(chosen, subprotocol);
        socket
    }

    /// Sends a binary message.
    pub async fn send(&mut self, bytes: impl Into<Bytes>) {
        self.stream
            .send(Message::Binary(bytes.into()))
            .await
            .unwrap();
    }

    /// Sends a text message.
    pub async fn send_text(&mut self, text: &str) {
        self.stream.send(Message::text(text)).await.unwrap();
    }

    /// Sends a message cut into frames of `size` bytes.
    pub async fn send_in_pieces(&mut self, bytes: &[u8], size: usize) {
        let mut wire = Vec::new();
        let mut pieces = bytes.chunks(size).enumerate().peekable();
        while let Some((index, piece)) = pieces.next() {
            let kind = if index == 0 { 0x02 } else { 0x00 };
            let last = if pieces.peek().is_none() { 0x80 } else { 0x00 };
            wire.extend(frame(kind | last, piece));
        }
        self.raw(&wire).await;
    }

    /// Sends bytes that need not be a frame.
    pub async fn raw(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).await.unwrap();
    }

    /// The next message of the server.
    pub async fn received(&mut self) -> SocketReply {
        let mut close = None;
        loop {
            match self.stream.next().await {
                Some(Ok(Message::Text(text))) => return SocketReply::Text(text.to_string()),
                Some(Ok(Message::Binary(bytes))) => return SocketReply::Binary(bytes),
                Some(Ok(Message::Close(reply))) => {
                    close = reply.map(|frame| (frame.code.into(), frame.reason.to_string()));
                }
                Some(Ok(_)) => {}
                // After its Close frame, the server closes the connection.
                Some(Err(_)) | None => return SocketReply::Close(close),
            }
        }
    }

    /// All messages until the end, and the end.
    pub async fn rest(&mut self) -> (Vec<SocketReply>, Option<(u16, String)>) {
        let mut all = Vec::new();
        loop {
            match self.received().await {
                SocketReply::Close(close) => return (all, close),
                reply => all.push(reply),
            }
        }
    }

    /// Closes from this side, and waits until the server has closed, too.
    pub async fn close(mut self) {
        let _ = self.stream.close(None).await;
        self.rest().await;
    }
}

/// The size of small socket buffers.
const NARROW_BYTES: u32 = 16 << 10;

/// A frame of a client with a zero mask: the first byte of its head, and the payload.
pub fn frame(head: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![head];
    match payload.len() {
        len @ 0..126 => bytes.push(0x80 | len as u8),
        len @ 126..65_536 => {
            bytes.push(0x80 | 126);
            bytes.extend_from_slice(&(len as u16).to_be_bytes());
        }
        len => {
            bytes.push(0x80 | 127);
            bytes.extend_from_slice(&(len as u64).to_be_bytes());
        }
    }
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(payload);
    bytes
}
