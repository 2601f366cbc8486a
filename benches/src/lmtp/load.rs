//! The client that drives every server: opens streams without end, and counts their items.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use futures::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::{Message, Utf8Bytes};
use tokio_tungstenite::{WebSocketStream, client_async};

/// The parameters of a round.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Streams, over all connections.
    pub streams: u32,
    /// Connections that share the streams.
    pub connections: u32,
    /// How tokens are sampled.
    pub sampling: Sampling,
}

/// How the streams of a round sample their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// The most likely token.
    Greedy,
    /// All with the same temperature, limits, seed and bias.
    Alike,
    /// Each with parameters of its own (LM-1306).
    Mixed,
}

/// The counters so far.
#[derive(Debug, Default)]
pub struct Count {
    /// Items.
    pub tokens: AtomicU64,
    /// Messages.
    pub frames: AtomicU64,
    /// Bytes of text.
    pub bytes: AtomicU64,
}

/// Connections under load; dropping this closes them.
#[derive(Debug)]
pub struct Load {
    /// The counters so far.
    pub count: Arc<Count>,
    tasks: JoinSet<Result<()>>,
}

impl Load {
    /// Connects, and requests all streams of `shape` at the LMTP server at `address`.
    ///
    /// # Errors
    /// If no server listens there, or the upgrade is refused.
    pub async fn begin(address: SocketAddr, shape: Shape) -> Result<Self> {
        let count = Arc::new(Count::default());
        let mut tasks = JoinSet::new();
        let each = shape.streams / shape.connections;
        for connection in 0..shape.connections {
            let mut socket = connect(address).await?;
            for stream in 1..=each {
                let text = generate(stream, connection * each + stream, shape.sampling);
                socket.feed(Message::text(text)).await?;
            }
            socket.flush().await?;
            let first = connection * each;
            tasks.spawn(listen(socket, Arc::clone(&count), first, shape.sampling));
        }
        Ok(Self { count, tasks })
    }

    /// Fails if a connection has ended.
    ///
    /// # Errors
    /// The reason of that end.
    pub fn check(&mut self) -> Result<()> {
        match self.tasks.try_join_next() {
            Some(ended) => ended?.and_then(|()| bail!("the server closed a connection")),
            None => Ok(()),
        }
    }
}

/// Opens an idle connection to the server.
///
/// # Errors
/// If no server listens there, or the upgrade is refused.
pub async fn connect(address: SocketAddr) -> Result<WebSocketStream<TcpStream>> {
    let io = TcpStream::connect(address).await?;
    io.set_nodelay(true)?;
    let (socket, _) = client_async(format!("ws://{address}/lmtp"), io)
        .await
        .context("upgrade")?;
    Ok(socket)
}

async fn listen(
    mut socket: WebSocketStream<TcpStream>,
    count: Arc<Count>,
    first: u32,
    sampling: Sampling,
) -> Result<()> {
    while let Some(message) = socket.next().await {
        let Message::Text(text) = message? else {
            continue;
        };
        let tokens = text.matches("{\"token\"").count() as u64;
        count.tokens.fetch_add(tokens, Ordering::Relaxed);
        count.frames.fetch_add(1, Ordering::Relaxed);
        count.bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
        if tokens == 0 || text.contains("\"error\"") {
            bail!("the server says {text}");
        }
        if text.contains("\"length\"") {
            for stream in ended(&text) {
                let text = generate(stream, first + stream, sampling);
                socket.send(Message::text(text)).await?;
            }
        }
    }
    Ok(())
}

/// The streams that ended within a message.
fn ended(text: &Utf8Bytes) -> Vec<u32> {
    let items = text
        .split("{\"token\"")
        .filter(|item| item.contains("\"length\""));
    let id = |item: &str| {
        let digits = item.split_once("\"stream_id\":")?.1;
        digits.split(',').next()?.parse().ok()
    };
    items.filter_map(id).collect()
}

fn generate(stream: u32, number: u32, sampling: Sampling) -> String {
    let own = match sampling {
        Sampling::Greedy => String::new(),
        Sampling::Alike => members(50),
        Sampling::Mixed => members(number),
    };
    format!(
        "GENERATE {{\"model\":\"load\",\"prompt\":[256,{}],\"max_tokens\":{MAX_TOKENS},\"stream_id\":{stream}{own}}}",
        97 + number % 26
    )
}

fn members(number: u32) -> String {
    let share = f64::from(number % 100) / 100.0;
    format!(
        ",\"temperature\":{:.2},\"top_p\":{:.3},\"top_k\":{},\"seed\":{number},\"logit_bias\":{{\"{}\":{:.2}}}",
        0.5 + share,
        0.5 + share / 2.0,
        20 + number % 40,
        300 + number,
        1.0 - share,
    )
}

/// Less than the context of the model of this bench.
const MAX_TOKENS: u32 = 100_000;
