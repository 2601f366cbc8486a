//! The client that drives both servers: opens streams without end, and counts their events.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// The counters so far.
#[derive(Debug, Default)]
pub struct Count {
    /// Number of events.
    pub events: AtomicU64,
    /// Bytes, including those of HTTP.
    pub bytes: AtomicU64,
}

/// Streams under load; dropping this ends them.
#[derive(Debug)]
pub struct Load {
    /// The counters so far.
    pub count: Arc<Count>,
    tasks: JoinSet<Result<()>>,
}

impl Load {
    /// Opens `streams` streams, each over a connection of its own.
    ///
    /// # Errors
    /// If no server listens.
    pub async fn begin(address: SocketAddr, streams: u32) -> Result<Self> {
        let count = Arc::new(Count::default());
        let mut tasks = JoinSet::new();
        for _ in 0..streams {
            let mut io = TcpStream::connect(address).await?;
            io.set_nodelay(true)?;
            io.write_all(request(address).as_bytes()).await?;
            tasks.spawn(listen(io, Arc::clone(&count), address));
        }
        Ok(Self { count, tasks })
    }

    /// Fails if a stream could not be read.
    ///
    /// # Errors
    /// The error of that stream.
    pub fn check(&mut self) -> Result<()> {
        match self.tasks.try_join_next() {
            Some(ended) => ended?,
            None => Ok(()),
        }
    }
}

pub(super) fn request(address: SocketAddr) -> String {
    let body = format!(
        "{{\"text_input\":\"ab\",\"stream\":true,\"ignore_eos\":true,\"max_tokens\":{MAX_TOKENS}}}"
    );
    format!(
        "POST /v2/models/load/generate_stream HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Events end with an empty line, which occurs nowhere else; a chunk of HTTP has one event or more.
async fn listen(mut io: TcpStream, count: Arc<Count>, address: SocketAddr) -> Result<()> {
    let mut room = vec![0; ROOM_BYTES];
    let mut last = 0;
    loop {
        let read = io.read(&mut room).await?;
        let Some(reply) = room.get(..read).filter(|reply| !reply.is_empty()) else {
            bail!("the server closed a connection");
        };
        let mut events = 0;
        for &byte in reply {
            events += u64::from(byte == b'\n' && last == b'\n');
            last = byte;
        }
        count.events.fetch_add(events, Ordering::Relaxed);
        count.bytes.fetch_add(read as u64, Ordering::Relaxed);
        // The last chunk of a stream that has ended.
        if reply.ends_with(b"\r\n0\r\n\r\n") {
            io.write_all(request(address).as_bytes()).await?;
        } else if reply.starts_with(b"HTTP/1.1 ") && !reply.starts_with(b"HTTP/1.1 200") {
            bail!("the server says {}", String::from_utf8_lossy(reply));
        }
    }
}

const ROOM_BYTES: usize = 64 * 1024;
/// Below the limit `new_tokens` of section 14.
const MAX_TOKENS: u32 = 4096;
