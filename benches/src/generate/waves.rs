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
    /// Times between two reads with events of the same stream, of all streams.
    pub gaps: Vec<Duration>,
    /// The response to each body, by its place, including the head of HTTP.
    pub replies: Vec<(usize, Vec<u8>)>,
}

impl Answered {
    /// Bytes read, including those of HTTP.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.replies.iter().map(|(_, reply)| reply.len()).sum()
    }
}

/// The response to one request.
#[derive(Debug)]
pub struct Answer {
    /// Time from connecting to the first event.
    pub first: Duration,
    /// Times between two reads with events.
    pub gaps: Vec<Duration>,
    /// The whole response.
    pub reply: Vec<u8>,
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
        let mut answered = Answered {
            first: Vec::new(),
            took: Duration::ZERO,
            gaps: Vec::new(),
            replies: Vec::new(),
        };
        while let Some(ended) = tasks.join_next().await {
            for (place, answer) in ended?? {
                answered.first.push(answer.first);
                answered.gaps.extend(answer.gaps);
                answered.replies.push((place, answer.reply));
            }
        }
        answered.took = began.elapsed();
        Ok(answered)
    }

    async fn one_after_the_other(self, next: Arc<AtomicU32>) -> Result<Vec<(usize, Answer)>> {
        let mut answers = Vec::new();
        let take = || next.fetch_add(1, Ordering::Relaxed) as usize;
        loop {
            let place = take();
            let Some(body) = self.bodies.get(place) else {
                return Ok(answers);
            };
            answers.push((place, answer(self.address, self.path, body).await?));
        }
    }
}

/// Sends one request and reads its response to the end.
///
/// # Errors
/// If the server refuses, or sends no event.
pub async fn answer(address: SocketAddr, path: &str, body: &str) -> Result<Answer> {
    let began = Instant::now();
    let mut io = TcpStream::connect(address).await?;
    io.set_nodelay(true)?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    io.write_all((head + body).as_bytes()).await?;
    let (mut reply, mut first) = (Vec::with_capacity(ROOM_BYTES), None);
    let (mut gaps, mut last) = (Vec::new(), began);
    loop {
        let before = reply.len();
        if io.read_buf(&mut reply).await? == 0 {
            break;
        }
        // An event's beginning may have come with the read before.
        if !holds(&reply[before.saturating_sub(EVENT.len() - 1)..], EVENT) {
            continue;
        }
        let now = Instant::now();
        match first {
            None => first = Some(now - began),
            Some(_) => gaps.push(now - last),
        }
        last = now;
    }
    let rejection = || String::from_utf8_lossy(&reply).into_owned();
    ensure!(reply.starts_with(b"HTTP/1.1 200"), "{}", rejection());
    let first = first.with_context(rejection)?;
    Ok(Answer { first, gaps, reply })
}

fn holds(reply: &[u8], what: &[u8]) -> bool {
    reply.windows(what.len()).any(|part| part == what)
}

/// The beginning of an event, after the line before.
const EVENT: &[u8] = b"\ndata: ";
/// Approximate bytes of a stream.
const ROOM_BYTES: usize = 64 * 1024;
