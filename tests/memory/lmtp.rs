//! Memory after LMTP streams that are abandoned, never read, or invalid.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sapwood_proto::lmtp::ConnectionLimits;
use sapwood_server::faces::lmtp;
use sapwood_tests::socket::{Socket, SocketReply, frame};
use sapwood_tests::{Faces, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::test_server::TestServer;
use super::{TURN, live_bytes, usual_growth};

/// Resumable sessions are removed at once.
async fn open() -> TestServer {
    let limits = ConnectionLimits {
        resume_grace: Duration::ZERO,
        ..ConnectionLimits::default()
    };
    TestServer::open(Faces {
        lmtp: lmtp::Config {
            limits: Arc::new(limits),
            ..lmtp::Config::default()
        },
        ..Faces::default()
    })
    .await
}

impl TestServer {
    async fn client(&self) -> Socket {
        Socket::open(&self.server, "/lmtp", &[]).await.unwrap()
    }

    /// A client that does not read.
    async fn mute(&self) -> Socket {
        Socket::narrow(&self.server, "/lmtp").await.unwrap()
    }

    /// Short streams of a client that reads.
    async fn others(&self) {
        let mut socket = self.client().await;
        for id in 0..5 {
            socket.send_text(&generate(id, 5)).await;
            let mut ends = 0;
            while ends == 0 {
                ends = ends_in(&next_text(&mut socket).await);
            }
        }
        socket.close().await;
    }

    /// Yields until `number` no longer changes; returns it.
    async fn settled(&self, number: impl Fn() -> usize) -> usize {
        let mut last = 0;
        loop {
            let now = number();
            if now > 0 && now == last {
                return now;
            }
            last = now;
            self.others().await;
        }
    }
}

const AGREE: &str =
    r#"MODEL_INFO {"stream_id":0,"model":"m","data":{"lmtp":{"version":2,"features":["resume"]}}}"#;

fn generate(id: usize, max_tokens: u32) -> String {
    format!(
        r#"GENERATE {{"model":"m","prompt":[72,105],"stream_id":{id},"max_tokens":{max_tokens}}}"#
    )
}

async fn next_text(socket: &mut Socket) -> String {
    match socket.received().await {
        SocketReply::Text(text) => text,
        other => panic!("no message: {other:?}"),
    }
}

fn ends_in(text: &str) -> usize {
    text.matches(r#""finish_reason":"length""#).count()
}

/// The number of ways to use and leave a connection.
const WAYS: usize = 7;

/// A client that uses and leaves a connection in one of the [`WAYS`].
async fn visit(context: &TestServer, way: usize) {
    let mut socket = context.client().await;
    socket.send_text(&generate(1, 4_000)).await;
    match way {
        // Before the first item, in the middle, and with a close.
        0 => {}
        1 => drop(next_text(&mut socket).await),
        2 => {
            next_text(&mut socket).await;
            socket.close().await;
        }
        // With many streams, of which one has ended.
        3 => {
            for id in 2..16 {
                socket.send_text(&generate(id, 4_000)).await;
            }
            socket.send_text(&generate(16, 1)).await;
            while ends_in(&next_text(&mut socket).await) == 0 {}
        }
        // After an invalid message.
        4 => {
            for _ in 0..16 {
                socket.send_text("nonsense").await;
            }
            let (_, close) = socket.rest().await;
            assert_eq!(close.map(|(code, _)| code), Some(1008));
        }
        // Resumable, with no grace.
        5 => {
            socket.send_text(AGREE).await;
            while !next_text(&mut socket).await.contains("\"session\"") {}
            socket.send_text(&generate(2, 4_000)).await;
            while !next_text(&mut socket).await.contains("\"stream_id\":2,") {}
        }
        // Over HTTP, in the middle of the response.
        _ => {
            let mut tcp = TcpStream::connect(context.server.address).await.unwrap();
            let line = generate(1, 4_000) + "\n";
            let head = format!(
                "POST /lmtp HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
                line.len()
            );
            tcp.write_all((head + &line).as_bytes()).await.unwrap();
            tcp.read_exact(&mut [0; 600]).await.unwrap();
        }
    }
}

/// LM-506, LM-610, LM-964
#[tokio::test]
async fn lm_1305_clients_that_leave_in_any_way_leave_no_sequences_tasks_or_memory() {
    let _turn = TURN.lock().await;
    let context = open().await;
    context
        .keeps_nothing(WAYS, async |way| visit(&context, way).await)
        .await;
}

/// LM-1304: thousands of streams on one connection, repeatedly.
#[tokio::test]
async fn lm_610_thousands_of_streams_of_one_connection_leave_no_memory() {
    let _turn = TURN.lock().await;
    let context = open().await;
    let mut socket = context.client().await;
    let mut after = Vec::new();
    for _ in 0..9 {
        for id in 0..1_000 {
            let max_tokens = 1 + u32::try_from(id % 4).unwrap();
            socket.send_text(&generate(id, max_tokens)).await;
        }
        let (mut ends, mut tokens) = (0, 0);
        while ends < 1_000 {
            let text = next_text(&mut socket).await;
            assert!(!text.contains("\"error\""), "{text}");
            ends += ends_in(&text);
            tokens += text.matches("{\"token\"").count();
        }
        assert_eq!((ends, tokens), (1_000, 2_500));
        let stats = context.stats();
        until("the engine has nothing left", || {
            stats.requests_running.get() + stats.requests_waiting.get() == 0
        })
        .await;
        after.push(live_bytes());
    }
    assert!(usual_growth(&after) < 32 << 10, "{after:?}");
}

/// A thousand streams of a client that does not read at first.
async fn unread(context: &TestServer) {
    let mut mute = context.mute().await;
    let computed = context.stats().generation_tokens.get();
    for id in 0..1_000 {
        mute.send_text(&generate(id, 120)).await;
    }
    let (mut visits, mut last) = (0, 0);
    loop {
        context.others().await;
        visits += 1;
        // The number of tokens for the other clients is known.
        let now = context.stats().generation_tokens.get() - computed - 25 * visits;
        if std::mem::replace(&mut last, now) == now && now > 0 {
            break;
        }
    }
    // The system's socket buffers may hold some megabytes, which is up to 40,000 tokens.
    assert!(last < 100_000, "{last} tokens computed for nobody");
    let full = live_bytes();
    context.others().await;
    let grown = live_bytes() - full;
    assert!(grown < 64 << 10, "{grown} bytes for others");
    let mut ends = 0;
    while ends < 1_000 {
        ends += ends_in(&next_text(&mut mute).await);
    }
}

/// LM-608: other clients are served meanwhile, and the slow reader receives everything in the end.
#[tokio::test]
async fn lm_607_memory_is_constant_with_a_thousand_unread_streams() {
    let _turn = TURN.lock().await;
    let context = open().await;
    // The first round grows buffers to the largest batch and queue, which stay that large.
    unread(&context).await;
    let before = context.left().await;
    unread(&context).await;
    let after = context.left().await;
    let grown = after - before;
    assert!(grown < 128 << 10, "{grown} bytes left");
}

/// Lines that get an error each, but are never malformed, so LM-202 does not close the connection.
const FLOODS: [&[&str]; 4] = [
    &["nonsense", "FOO {}"],
    &[r#"GENERATE {"model":"nobody","prompt":[1],"stream_id":1}"#],
    &[r#"GENERATE {"model":"m","prompt":"x","stream_id":1}"#],
    &[r#"MODEL_INFO {"stream_id":1,"model":"m"}"#],
];

/// LM-202, LM-203: responses wait for room, and the server does not read meanwhile.
#[tokio::test]
async fn lm_607_memory_is_constant_under_floods_with_unread_answers() {
    let _turn = TURN.lock().await;
    let context = open().await;
    context.others().await;
    let before = context.left().await;
    for lines in FLOODS {
        let mut socket = context.mute().await;
        let batch: Vec<u8> = lines
            .iter()
            .cycle()
            .take(200)
            .flat_map(|line| frame(0x81, line.as_bytes()))
            .collect();
        let sent = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&sent);
        let flood = tokio::spawn(async move {
            loop {
                socket.raw(&batch).await;
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        context.settled(|| sent.load(Ordering::Relaxed)).await;
        let grown = live_bytes() - before;
        assert!(grown < 4 << 20, "{grown} bytes of {}", lines[0]);
        flood.abort();
        assert!(flood.await.unwrap_err().is_cancelled());
        let after = context.left().await;
        let grown = after - before;
        assert!(grown < 128 << 10, "{grown} bytes left of {}", lines[0]);
    }
}

/// LM-1304: a connection does not keep a buffer as large as its largest message.
#[tokio::test]
async fn lm_1201_large_messages_pin_no_memory() {
    let _turn = TURN.lock().await;
    let context = open().await;
    context.others().await;
    context.left().await;
    let before = live_bytes();
    let mut sockets = Vec::new();
    for mut large in [generate(1, 1), "nonsense".to_owned()] {
        large.extend(std::iter::repeat_n(' ', (4 << 20) - large.len()));
        let mut socket = context.client().await;
        // Sent as raw bytes, because the client's library keeps large buffers.
        socket.raw(&frame(0x81, large.as_bytes())).await;
        next_text(&mut socket).await;
        sockets.push(socket);
    }
    context.others().await;
    let grown = live_bytes() - before;
    assert!(grown < 1 << 20, "{grown} bytes");
}
