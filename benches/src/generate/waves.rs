//! Streams that come to their end, a number of them at a time, at any server that sends server-sent events.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// How often the same path is asked for with other bodies, and by how many at a time.
#[derive(Clone, Debug)]
pub struct Waves {
    /// Where the server listens.
    pub address: SocketAddr,
    /// The path that answers with events.
    pub path: &'static str,
    /// Streams at a time; each of them is followed by the next until all have had their turn.
    pub at_once: u32,
    /// What they ask.
    pub bodies: Arc<Vec<String>>,
}

/// What came of it.
#[derive(Debug)]
pub struct Answered {
    /// From connecting to the first event, of each stream.
    pub first: Vec<Duration>,
    /// From the beginning of the first stream to the end of the last.
    pub took: Duration,
    /// Bytes that were read, those of HTTP among them.
    pub bytes: usize,
}

impl Waves {
    /// Asks everything once.
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

/// Asks once: how long the first event took, and everything that came.
///
/// # Errors
/// If the server refuses, or says no event.
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

/// About what a stream says.
const ROOM_BYTES: usize = 64 * 1024;
