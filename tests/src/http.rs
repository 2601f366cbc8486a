//! HTTP/1.1 as bytes on a socket, for what a client library would hide: exact heads, chunks as they arrive, resets.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::WAIT_LIMIT;

/// A connection.
pub struct Wire {
    socket: TcpStream,
    /// Bytes that are read and not yet used.
    ahead: Vec<u8>,
}

/// The head of a response.
#[derive(Clone, Debug)]
pub struct Head {
    /// The status code.
    pub status: u16,
    /// Names in lower case, in order.
    pub headers: Vec<(String, String)>,
}

/// A whole response.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its head.
    pub head: Head,
    /// Its body, without the framing.
    pub body: Vec<u8>,
    /// The chunks it came in, if it was chunked.
    pub chunks: Vec<Vec<u8>>,
    /// Whether it ended as its framing says.
    pub complete: bool,
}

impl Head {
    /// The value of a header; all of them if there are several.
    pub fn header(&self, name: &str) -> Option<String> {
        let found = self.headers.iter().filter(|(mine, _)| mine == name);
        let values: Vec<&str> = found.map(|(_, value)| value.as_str()).collect();
        (!values.is_empty()).then(|| values.join(", "))
    }
}

impl Answer {
    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}", self.text()))
    }

    /// Status, content type and text: what most tests compare.
    pub fn summary(&self) -> (u16, String, &str) {
        let kind = self.head.header("content-type").unwrap_or_default();
        (self.head.status, kind, self.text())
    }

    /// The events of a stream, as JSON.
    pub fn events(&self) -> Vec<Value> {
        let blocks = self.text().split_terminator("\n\n");
        blocks
            .map(|block| serde_json::from_str(block.strip_prefix("data: ").unwrap()).unwrap())
            .collect()
    }
}

/// A POST with this body and these header lines.
pub fn post(path: &str, headers: &[&str], body: &[u8]) -> Vec<u8> {
    let length = format!("content-length: {}", body.len());
    let lines: Vec<&str> = headers.iter().copied().chain([length.as_str()]).collect();
    [head("POST", path, &lines).as_bytes(), body].concat()
}

/// The head of a request.
pub fn head(method: &str, path: &str, headers: &[&str]) -> String {
    let lines: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}\r\n")
}

impl Wire {
    /// Connects.
    pub async fn connect(address: SocketAddr) -> Self {
        Self {
            socket: TcpStream::connect(address).await.unwrap(),
            ahead: Vec::new(),
        }
    }

    /// Sends bytes.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.socket.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Sends bytes; false if the other end has closed.
    pub async fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.socket.write_all(bytes).await.is_ok()
    }

    /// Sends a request and reads its response.
    pub async fn ask(&mut self, request: impl AsRef<[u8]>) -> Answer {
        self.send(request).await;
        self.answer().await
    }

    /// A POST.
    pub async fn post(&mut self, path: &str, body: &str) -> Answer {
        self.ask(post(path, &[], body.as_bytes())).await
    }

    /// A GET.
    pub async fn get(&mut self, path: &str) -> Answer {
        self.ask(head("GET", path, &[])).await
    }

    /// Reads a whole response.
    pub async fn answer(&mut self) -> Answer {
        let head = self.head().await;
        let length = head.header("content-length");
        let mut answer = Answer {
            body: Vec::new(),
            chunks: Vec::new(),
            complete: true,
            head,
        };
        if let Some(length) = length {
            let length = length.parse().unwrap();
            answer.complete = self.fill(length).await;
            answer.body = self.ahead.drain(..length.min(self.ahead.len())).collect();
        } else if answer.head.header("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk().await {
                if chunk.is_empty() {
                    return answer;
                }
                answer.body.extend_from_slice(&chunk);
                answer.chunks.push(chunk);
            }
            answer.complete = false;
        }
        answer
    }

    /// Reads the head of a response.
    pub async fn head(&mut self) -> Head {
        let end = self
            .until(b"\r\n\r\n")
            .await
            .expect("the head of a response");
        let text: Vec<u8> = self.ahead.drain(..end).collect();
        let text = String::from_utf8(text).unwrap();
        let mut lines = text.split_terminator("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        let headers = lines.filter_map(|line| line.split_once(": "));
        Head {
            status: status.parse().unwrap(),
            headers: headers
                .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
                .collect(),
        }
    }

    /// Reads a chunk of a body; the last one is empty. `None` if the connection ends before.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        let end = self.until(b"\r\n").await?;
        let size: Vec<u8> = self.ahead.drain(..end).collect();
        let size = std::str::from_utf8(&size).unwrap().trim();
        let size = usize::from_str_radix(size, 16).unwrap();
        if !self.fill(size + 2).await {
            return None;
        }
        let chunk = self.ahead.drain(..size).collect();
        self.ahead.drain(..2);
        Some(chunk)
    }

    /// Whether bytes of a response have arrived.
    pub async fn answered(&mut self) -> bool {
        let now = Duration::from_millis(1);
        let read = timeout(now, self.socket.read_buf(&mut self.ahead)).await;
        matches!(read, Ok(Ok(1..)))
    }

    /// Reads exactly `count` bytes.
    pub async fn bytes(&mut self, bytes: usize) -> Vec<u8> {
        assert!(self.fill(bytes).await, "the connection ended before");
        self.ahead.drain(..bytes).collect()
    }

    /// Whether the other end closes without another byte.
    pub async fn closes(&mut self) -> bool {
        self.ahead.is_empty() && !self.fill(1).await
    }

    async fn until(&mut self, mark: &[u8]) -> Option<usize> {
        loop {
            let found = self.ahead.windows(mark.len()).position(|it| it == mark);
            if let Some(at) = found {
                return Some(at + mark.len());
            }
            if !self.fill(self.ahead.len() + 1).await {
                return None;
            }
        }
    }

    /// Reads until there are so many bytes. False: the connection ended before.
    async fn fill(&mut self, bytes: usize) -> bool {
        while self.ahead.len() < bytes {
            let read = timeout(WAIT_LIMIT, self.socket.read_buf(&mut self.ahead));
            match read.await.expect("a response in time") {
                Ok(0) | Err(_) => return false,
                Ok(_) => {}
            }
        }
        true
    }
}
