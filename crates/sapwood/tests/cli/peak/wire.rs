//! Requests as an attacker writes them: bytes on a socket, no library in between.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long an answer is waited for; a connection that is left open is as good.
const WAIT_LIMIT: Duration = Duration::from_secs(20);

/// One way to send bytes.
#[derive(Clone, Debug)]
pub(super) enum Way {
    /// A body over HTTP/1, to this path, with these headers.
    Http(&'static str, &'static str),
    /// A message of gRPC to this method; packed by gzip or not.
    Grpc(&'static str, bool),
    /// One message on a WebSocket: its path, its subprotocol, and whether it is text.
    WebSocket(&'static str, &'static str, bool),
}

fn connect(address: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(WAIT_LIMIT)).unwrap();
    socket.set_write_timeout(Some(WAIT_LIMIT)).unwrap();
    socket
}

impl Way {
    /// Sends `bytes`, and waits for what comes back first.
    pub(super) fn send(&self, address: SocketAddr, bytes: &[u8]) {
        match self {
            Self::Http(path, headers) => {
                let mut socket = post(address, path, headers, bytes.len());
                // Whoever is refused early need not send all of it.
                let _ = socket.write_all(bytes);
                let _ = socket.read(&mut [0; 1024]);
            }
            Self::Grpc(path, packed) => {
                let mut http2 = Http2::connect(address);
                http2.open(1, path, *packed);
                http2.data(1, &grpc(bytes, *packed), true);
                http2.wait();
            }
            Self::WebSocket(path, protocol, is_text) => {
                let mut socket = upgraded(address, path, protocol);
                let _ = socket.write_all(&frame(if *is_text { 0x81 } else { 0x82 }, bytes.len()));
                let _ = socket.write_all(bytes);
                // A goodbye, so that there is an answer in any case.
                let _ = socket.write_all(&frame(0x88, 0));
                let _ = socket.read(&mut [0; 1024]);
            }
        }
    }
}

/// The head of a request with a body of so many bytes.
pub(super) fn post(address: SocketAddr, path: &str, headers: &str, length: usize) -> TcpStream {
    let mut socket = connect(address);
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    socket.write_all(head.as_bytes()).unwrap();
    socket
}

/// A connection that has become a WebSocket.
pub(super) fn upgraded(address: SocketAddr, path: &str, protocol: &str) -> TcpStream {
    let mut socket = connect(address);
    let head = format!(
        "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
         sec-websocket-protocol: {protocol}\r\n\r\n"
    );
    socket.write_all(head.as_bytes()).unwrap();
    let mut answer = [0; 4096];
    let read = socket.read(&mut answer).unwrap();
    assert!(
        answer[..read].starts_with(b"HTTP/1.1 101"),
        "{path} {protocol}"
    );
    socket
}

/// The head of a frame whose mask is zero, which leaves its payload as it is.
pub(super) fn frame(kind: u8, length: usize) -> Vec<u8> {
    let mut head = vec![kind, 0x80 | 127];
    head.extend((length as u64).to_be_bytes());
    if kind == 0x88 {
        head = vec![kind, 0x80];
    }
    head.extend([0; 4]);
    head
}

/// A message in its frame.
pub(super) fn grpc(message: &[u8], packed: bool) -> Vec<u8> {
    let message = if packed {
        gzip(message)
    } else {
        message.to_vec()
    };
    let mut bytes = vec![u8::from(packed)];
    bytes.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    bytes.extend(message);
    bytes
}

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(bytes).unwrap();
    packer.finish().unwrap()
}

/// So many bytes of zeros as a frame of zstd: blocks of one byte that is repeated (RFC 8878, 3.1.1.2).
pub(super) fn zstd_of_zeros(bytes: usize) -> Vec<u8> {
    const BLOCK: usize = 128 << 10;
    // No checksum, a window of 1 MiB.
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 10 << 3];
    let blocks = bytes / BLOCK;
    for block in 1..=blocks {
        let head = u32::from(block == blocks) | 1 << 1 | (BLOCK as u32) << 3;
        frame.extend(&head.to_le_bytes()[..3]);
        frame.push(0);
    }
    frame
}

/// An HTTP/2 connection with prior knowledge. It ignores flow control: what is sent must fit into the server's windows.
pub(super) struct Http2(TcpStream);

impl Http2 {
    pub(super) fn connect(address: SocketAddr) -> Self {
        let mut socket = connect(address);
        socket
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .unwrap();
        let mut this = Self(socket);
        this.frame(4, 0, 0, &[]);
        // The server's settings, which have to be there before much is sent.
        let _ = this.next();
        this.frame(4, 1, 0, &[]);
        this
    }

    /// Begins a call of gRPC.
    pub(super) fn open(&mut self, stream: u32, path: &str, packed: bool) {
        let mut block = Vec::new();
        let encoding = if packed { "gzip" } else { "identity" };
        for (name, value) in [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-encoding", encoding),
        ] {
            field(&mut block, name, value);
        }
        self.frame(1, 4, stream, &block);
    }

    pub(super) fn data(&mut self, stream: u32, bytes: &[u8], ends: bool) {
        for part in bytes.chunks(16 << 10) {
            self.frame(0, 0, stream, part);
        }
        self.frame(0, u8::from(ends), stream, &[]);
    }

    /// Waits for the end of an answer.
    pub(super) fn wait(&mut self) {
        while let Some((kind, flags)) = self.next() {
            // Headers or data with the end of the stream, a reset, a goodbye.
            if (matches!(kind, 0 | 1) && flags & 1 == 1) || matches!(kind, 3 | 7) {
                return;
            }
        }
    }

    fn next(&mut self) -> Option<(u8, u8)> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).ok()?;
        let [a, b, c, kind, flags, ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.0.read_exact(&mut payload).ok()?;
        Some((kind, flags))
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut bytes = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        bytes.extend([kind, flags]);
        bytes.extend(stream.to_be_bytes());
        bytes.extend(payload);
        // A connection that the server has ended is as good.
        let _ = self.0.write_all(&bytes);
    }
}

/// A header of fewer than 127 bytes, as it is and for no table.
fn field(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    for text in [name, value] {
        block.push(u8::try_from(text.len()).unwrap());
        block.extend(text.as_bytes());
    }
}
