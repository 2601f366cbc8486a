//! Streams that end, a number of them at a time, at any server with server-sent events.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// The requests of a run: the same path with different bodies, a number of them at a time.
#[derive(Clone, Debug)]
pub struct Waves {
    /// The server's address.
    pub address: SocketAddr,
    /// The path of the request, whose response is an event stream.
    pub path: &'static str,
    /// Concurrent streams; each is followed by the next until all requests are done.
    pub at_once: u32,
    /// The bodies of the requests.
    pub bodies: Arc<Vec<String>>,
}

/// The result of a run.
#[derive(Debug)]
pub struct Answered {
    /// Time from connecting to the first event, of each stream.
    pub first: Vec<Duration>,
    /// Time from the start of the first stream to the end of the last.
    pub took: Duration,
    /// Bytes read, including those of HTTP.
    pub bytes: usize,
}

impl Waves {
    /// Sends every request once.
    ///
    /// # Errors
    /// If the server refuses a request, or a stream has no event.
    pub async fn ask(&self) -> Result<Answered> {
        let began = Instant::now();
        let next = Arc::new(AtomicU32::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..self.at_once {
            tasks.spawn(self.clone().one_after_the_other(Arc::clone(&next)));
        }
        let (mut first, mut bytes) = (Vec::new(), 0);
        while let Some(ended) = tasks.join_next().await {
            for (waited, read) in ended?? {
                first.push(waited);
                bytes += read;
            }
        }
        let took = began.elapsed();
        Ok(Answered { first, took, bytes })
    }

    async fn one_after_the_other(self, next: Arc<AtomicU32>) -> Result<Vec<(Duration, usize)>> {
        let mut answered = Vec::new();
        let take = || next.fetch_add(1, Ordering::Relaxed) as usize;
        while let Some(body) = self.bodies.get(take()) {
            let (waited, reply) = answer(self.address, self.path, body).await?;
            answered.push((waited, reply.len()));
        }
        Ok(answered)
    }
}

/// Sends one request: returns the time to the first event, and the whole response.
///
/// # Errors
/// If the server refuses, or sends no event.
pub async fn answer(address: SocketAddr, path: &str, body: &str) -> Result<(Duration, Vec<u8>)> {
    let began = Instant::now();
    let mut io = TcpStream::connect(address).await?;
    io.set_nodelay(true)?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    io.write_all((head + body).as_bytes()).await?;
    let (mut reply, mut waited) = (Vec::with_capacity(ROOM_BYTES), None);
    while io.read_buf(&mut reply).await? > 0 {
        if waited.is_none() && holds(&reply, b"\ndata: ") {
            waited = Some(began.elapsed());
        }
    }
    let rejection = || String::from_utf8_lossy(&reply).into_owned();
    ensure!(reply.starts_with(b"HTTP/1.1 200"), "{}", rejection());
    let waited = waited.with_context(rejection)?;
    Ok((waited, reply))
}

fn holds(reply: &[u8], what: &[u8]) -> bool {
    reply.windows(what.len()).any(|part| part == what)
}

/// Approximate bytes of a stream.
const ROOM_BYTES: usize = 64 * 1024;
