//! Sessions resume after their connection is cut at any byte (EV-940 to EV-943, D-29), over real sockets.
//!
//! [`Cutter`] is a proxy between client and server that cuts a connection after a number of bytes. Resuming by hand, in
//! another dialect or transport, is in `across`.

mod across;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, stream};
use sapwood_kernel::session::test_functions;
use sapwood_kernel::{Call, Chunks, InputSpec, Kernel, Mime, OutputSpec, Port, Spec, raw};
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood_proto::evergreen::wire::SessionMessage;
use sapwood_proto::evergreen::{SessionLimits, Status};
use sapwood_server::faces::evergreen::Config;
use sapwood_tests::raw::{action, call, code_and_reason, end, fragments, json, leaf};
use sapwood_tests::{Running, in_time, key, request, until};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_tungstenite::tungstenite;
use tonic::Streaming;

use super::extensions::finished;
use super::loopback::text;

/// A proxy that cuts its n-th connection after the n-th number of bytes; connections beyond the list are not cut.
pub(super) struct Cutter {
    address: SocketAddr,
    pub(super) connections: Arc<AtomicUsize>,
    /// Bytes forwarded on the last connection.
    pub(super) bytes: Arc<AtomicUsize>,
    /// Byte counts at which a write was forwarded as a whole; nearly always the end of a message.
    borders: Arc<Mutex<Vec<usize>>>,
}

impl Cutter {
    pub(super) async fn before(server: SocketAddr, shares: Vec<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let cutter = Self {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
            bytes: Arc::default(),
            borders: Arc::default(),
        };
        let (connections, bytes) = (Arc::clone(&cutter.connections), Arc::clone(&cutter.bytes));
        let borders = Arc::clone(&cutter.borders);
        tokio::spawn(async move {
            let mut shares = shares.into_iter();
            while let Ok((client, _)) = listener.accept().await {
                connections.fetch_add(1, Ordering::Relaxed);
                bytes.store(0, Ordering::Relaxed);
                let server = TcpStream::connect(server).await.unwrap();
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let share = shares.next().unwrap_or(usize::MAX);
                pass(client, server, share, (&bytes, &borders)).await;
            }
        });
        cutter
    }

    /// Forwards one connection until `stopped` fires; then nothing listens any more.
    async fn until_stopped(server: SocketAddr, mut stopped: mpsc::Receiver<()>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let cutter = Self {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
            bytes: Arc::default(),
            borders: Arc::default(),
        };
        tokio::spawn(async move {
            let (client, _) = listener.accept().await.unwrap();
            let server = TcpStream::connect(server).await.unwrap();
            let bytes = (&AtomicUsize::new(0), &Mutex::default());
            // Either may be cancelled: the connection ends then.
            tokio::select! {
                () = pass(client, server, usize::MAX, bytes) => {}
                _ = stopped.recv() => {}
            }
        });
        cutter
    }

    /// Its address in a dialect: the scheme, and what follows the port.
    pub(super) fn at(&self, (scheme, rest): Dialect) -> ServerAddress {
        ServerAddress::new(format!("{scheme}://{}{rest}", self.address))
    }
}

/// A scheme, and what follows the port.
pub(super) type Dialect = (&'static str, &'static str);

/// The dialects whose sessions can be resumed.
pub(super) const DIALECTS: [Dialect; 3] = [
    ("http", ""),
    ("ws", "/?dialect=protobuf"),
    ("ws", "/?dialect=json"),
];

/// The bytes forwarded, and the offsets where writes ended.
type Passed<'a> = (&'a AtomicUsize, &'a Mutex<Vec<usize>>);

/// Forwards both ways until `share` bytes have passed or one side has closed; then drops the connection.
async fn pass(client: TcpStream, server: TcpStream, share: usize, bytes: Passed<'_>) {
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    // Either may be cancelled: the other direction has ended, and the connection with it.
    tokio::select! {
        () = one_way(client_reads, server_writes, share, bytes) => {}
        () = one_way(server_reads, client_writes, share, bytes) => {}
    }
}

async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    share: usize,
    (bytes, borders): Passed<'_>,
) {
    let mut buf = [0; 4096];
    loop {
        let left = share.saturating_sub(bytes.load(Ordering::Relaxed));
        let most = left.min(buf.len());
        if most == 0 {
            return;
        }
        let Ok(read @ 1..) = from.read(&mut buf[..most]).await else {
            return;
        };
        let before = bytes.fetch_add(read, Ordering::Relaxed);
        borders.lock().unwrap().push(before + read);
        if to.write_all(&buf[..read]).await.is_err() {
            return;
        }
    }
}

/// `twice`: sends every chunk of its input two times, and counts its runs.
fn request_timer(runs: &Arc<AtomicUsize>) -> Kernel {
    let runs = Arc::clone(runs);
    let spec = Spec::new("twice", "Gives every chunk two times.")
        .inputs([InputSpec::new("text").streaming()])
        .outputs([OutputSpec::new(Port::MAIN, Mime::ANY).wire("response")]);
    let kernel = Kernel::new();
    kernel
        .add(raw(spec, move |call: Call| -> Chunks {
            runs.fetch_add(1, Ordering::Relaxed);
            let chunks = call.read("text").unwrap();
            let twice = chunks.flat_map(|chunk| {
                let mut chunk = chunk.unwrap();
                chunk.part = 0;
                stream::iter([Ok(chunk.clone()), Ok(chunk)])
            });
            twice.boxed()
        }))
        .unwrap();
    kernel
}

/// A conversation: a stream passes through two functions while it is written, and a third call reads it again. Returns
/// `None` if the connection was cut before there was a session.
async fn conversation(
    cutter: &Cutter,
    dialect: Dialect,
) -> Option<Result<(String, String), Arc<Status>>> {
    let options = ClientSessionOptions {
        resume: true,
        ..ClientSessionOptions::default()
    };
    let session = ClientSession::connect(&cutter.at(dialect), options)
        .await
        .ok()?;
    assert!(session.announces("resume"));
    let talk = async {
        let mut input = session.write()?;
        let once = session.call(request("twice", &[("text", input.node())], &["response"]))?;
        let first = once.output("response").unwrap();
        let again = session.call(request("twice", &[("text", &first)], &["response"]))?;
        let mut reader = again.output("response").unwrap().read();
        let mut got = String::new();
        for index in 0..20 {
            let piece = format!("<{index}:{}>", "x".repeat(40));
            let data = Bytes::from(piece.clone());
            input.write(&text(""), data).await.unwrap();
            // All of this piece is back before the next one is written.
            let wanted = got.len() + 4 * piece.len();
            while got.len() < wanted {
                let piece = reader.next().await.unwrap()?;
                got.push_str(std::str::from_utf8(&piece.data).unwrap());
            }
        }
        input.end(&text("")).unwrap();
        assert!(reader.next().await.is_none());
        let last = session.call(request("twice", &[("text", &first)], &["response"]))?;
        let last = last.output("response").unwrap().read();
        let last = last.whole().await?;
        // If the cut hit the end of the session, everything had arrived before.
        session.close().await?;
        Ok((got, String::from_utf8(last).unwrap()))
    };
    Some(talk.await)
}

/// EV-940, EV-941, EV-942, EV-975
#[tokio::test]
async fn ev_943_a_session_cut_at_or_within_any_message_resumes_without_loss() {
    for dialect in DIALECTS {
        let runs = Arc::new(AtomicUsize::new(0));
        let server = Running::over(request_timer(&runs)).await;
        let uncut = Cutter::before(server.address, Vec::new()).await;
        let expect = conversation(&uncut, dialect).await.unwrap().unwrap();
        let borders = uncut.borders.lock().unwrap().clone();
        assert!(borders.len() > 40, "{} messages", borders.len());
        assert_eq!(runs.load(Ordering::Relaxed), 3);
        // At each border, within the message before it or the head of the one after it, and again during the resume.
        let cuts = borders.iter().enumerate().flat_map(|(index, &border)| {
            let again = [usize::MAX, 600][usize::from(index % 4 == 0)];
            let inside = [border - 9, border + 3][usize::from(index % 2 == 0)];
            [(border, again), (inside, usize::MAX)]
        });
        // Before that there is no session, or the client does not have its token.
        let cuts = cuts.filter(|(at, _)| *at > 1_000);
        let (mut resumed, mut tried) = (0, 0);
        for (at, again) in cuts {
            runs.store(0, Ordering::Relaxed);
            let cutter = Cutter::before(server.address, vec![at, again]).await;
            let Some(cut) = conversation(&cutter, dialect).await else {
                continue;
            };
            let connections = cutter.connections.load(Ordering::Relaxed);
            let what = format!("{dialect:?} cut at {at}, {again}");
            let cut = cut.unwrap_or_else(|status| panic!("{what}: {status:?}"));
            assert_eq!(cut, expect, "{what}");
            assert_eq!(runs.load(Ordering::Relaxed), 3, "{what}");
            tried += 1;
            resumed += usize::from(connections > 1);
        }
        assert!(resumed > 80 && resumed + 9 >= tried, "{resumed} of {tried}");
        // If the response headers are cut, nobody has the token, and the session waits until its grace is over.
        closed_in_time(&server, SessionLimits::default().resume_grace).await;
    }
}

/// EV-943
#[tokio::test]
async fn ev_975_a_client_that_is_cut_after_every_reconnect_backs_off_and_gives_up() {
    let server = Running::over(request_timer(&Arc::default())).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tries = Arc::new(AtomicUsize::new(0));
    let (cut, mut received) = mpsc::channel::<()>(1);
    let (to, counted) = (server.address, Arc::clone(&tries));
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let server = TcpStream::connect(to).await.unwrap();
        let bytes = (&AtomicUsize::new(0), &Mutex::default());
        // Either may be cancelled: the connection ends then.
        tokio::select! {
            () = pass(client, server, usize::MAX, bytes) => {}
            _ = received.recv() => {}
        }
        // The listener stops after this many: a failed test says more than an endless one.
        while counted.fetch_add(1, Ordering::Relaxed) < 1_000 {
            let (client, _) = listener.accept().await.unwrap();
            let _ = tokio_tungstenite::accept_hdr_async(client, agree).await;
        }
    });
    let options = ClientSessionOptions {
        resume: true,
        ..ClientSessionOptions::default()
    };
    let address = ServerAddress::new(format!("ws://{address}/?dialect=protobuf"));
    let session = ClientSession::connect(&address, options).await.unwrap();
    let input = session.write().unwrap();
    let once = session.call(request("twice", &[("text", input.node())], &["response"]));
    let mut reader = once.unwrap().output("response").unwrap().read();
    tokio::time::pause();
    cut.send(()).await.unwrap();
    assert!(reader.next().await.unwrap().is_err());
    let tries = tries.load(Ordering::Relaxed);
    assert!((5..100).contains(&tries), "{tries} tries");
}

/// Accepts every client, in the first dialect that it offers.
#[expect(clippy::result_large_err, reason = "the library's signature")]
fn agree(
    request: &tungstenite::handshake::server::Request,
    mut answer: tungstenite::handshake::server::Response,
) -> Result<tungstenite::handshake::server::Response, tungstenite::handshake::server::ErrorResponse>
{
    let name = http::header::SEC_WEBSOCKET_PROTOCOL;
    if let Some(offered) = request.headers().get(&name) {
        answer.headers_mut().insert(name, offered.clone());
    }
    Ok(answer)
}

/// Waits until no session is left, on the virtual clock and for at most twice the grace.
pub(super) async fn closed_in_time(server: &Running, grace: Duration) {
    let open = &server.shared.metrics.evergreen.sessions_open;
    in_time("all sessions have ended", grace * 2, || open.get() == 0).await;
}

const RESUME: (&str, &str) = ("evergreen-resume", "1");
const TOKEN: &str = "evergreen-session-token";

/// A session by hand: its sender, its responses, and its token if it has one.
async fn by_hand(
    server: &Running,
    headers: &[(&'static str, &str)],
) -> (
    mpsc::Sender<SessionMessage>,
    Streaming<SessionMessage>,
    Option<String>,
) {
    let (send, messages) = mpsc::channel(8);
    let mut answers = call(server, ReceiverStream::new(messages), headers)
        .await
        .unwrap();
    send.send(action("SESSION_INFO", &[], &[("info", "i")]))
        .await
        .unwrap();
    let info: serde_json::Value = serde_json::from_str(&finished(&mut answers, "i").await).unwrap();
    let token = info["session_token"].as_str().map(str::to_owned);
    (send, answers, token)
}

/// How a call with this token is answered, at once or at its end.
async fn back(server: &Running, token: &str, key: Option<&str>) -> (i32, String) {
    let mut headers = vec![(TOKEN, token)];
    let bearer = key.map(|key| format!("Bearer {key}"));
    headers.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
    // An accepted client has to send RESUME first; this one ends its stream instead.
    let nothing = stream::iter(Vec::<SessionMessage>::new());
    match call(server, nothing, &headers).await {
        Ok(answers) => code_and_reason(end(answers).await),
        Err(status) => code_and_reason(Some(sapwood_net::evergreen::grpc::from_grpc(&status))),
    }
}

#[tokio::test]
async fn ev_941_a_second_connection_takes_over_and_the_first_ends_with_superseded() {
    let server = Running::with_test_functions().await;
    let (_first, answers, token) = by_hand(&server, &[RESUME]).await;
    let token = token.unwrap();
    assert_eq!(token.len(), 43, "32 bytes in base64url");
    let (send, messages) = mpsc::channel(8);
    let header = [(TOKEN, token.as_str())];
    let mut second = call(&server, ReceiverStream::new(messages), &header)
        .await
        .unwrap();
    assert_eq!(
        code_and_reason(end(answers).await),
        (10, "SUPERSEDED".into())
    );
    let mut hello = action("RESUME", &[("have", "h")], &[("have", "theirs")]);
    let have = json("h", "{\"nodes\":{\"i\":9},\"actions\":0}");
    hello.node_fragments.push(have);
    send.send(hello).await.unwrap();
    let have = finished(&mut second, "theirs").await;
    assert_eq!(have, "{\"nodes\":{\"h\":1},\"actions\":1}");
    // It is an ordinary session again.
    let echo = action("echo", &[("text", "p")], &[("response", "r")]);
    send.send(echo).await.unwrap();
    send.send(fragments(vec![leaf("p", 0, 5)])).await.unwrap();
    assert_eq!(finished(&mut second, "r").await, "xxxxx");
    drop(send);
    assert_eq!(code_and_reason(end(second).await), (0, String::new()));
    until("the token ends with the session", || {
        server.shared.metrics.evergreen.sessions_open.get() == 0
    })
    .await;
    assert_eq!(back(&server, &token, None).await, (5, "NO_SESSION".into()));
}

#[tokio::test]
async fn ev_941_unknown_and_foreign_tokens_get_the_same_answer() {
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let config = Config {
        resumable_sessions: 1,
        ..Config::default()
    };
    let keys = vec![key("mine", "one"), key("theirs", "two")];
    let server = Running::start(kernel, config, keys).await;
    let mine = [RESUME, ("authorization", "Bearer one")];
    let (send, answers, token) = by_hand(&server, &mine).await;
    let token = token.unwrap();
    let removed = (5, "NO_SESSION".to_owned());
    assert_eq!(back(&server, &token, Some("two")).await, removed);
    for wrong in ["", "x", &"A".repeat(43), &token[1..]] {
        assert_eq!(
            back(&server, wrong, Some("one")).await,
            removed,
            "{wrong:?}"
        );
    }
    // A session above the limit has no token, and neither has one that did not ask.
    assert_eq!(by_hand(&server, &mine).await.2, None);
    assert_eq!(by_hand(&server, &mine[1..]).await.2, None);
    // A cancelled call does not count as a lost connection, whatever it was doing.
    let slow = action("slow", &[], &[("response", "s")]);
    send.send(slow).await.unwrap();
    let numbers = &server.shared.metrics.evergreen;
    until("it runs", || numbers.actions_open.get() == 1).await;
    drop((answers, send));
    until("nobody waits", || numbers.sessions_open.get() == 0).await;
    assert_eq!(back(&server, &token, Some("one")).await, removed);
}

#[tokio::test]
async fn ev_940_a_detached_session_ends_after_its_grace() {
    for dialect in DIALECTS {
        let server = Running::with_test_functions().await;
        let numbers = &server.shared.metrics.evergreen;
        let (stop, stopped) = mpsc::channel::<()>(1);
        let cutter = Cutter::until_stopped(server.address, stopped).await;
        let options = ClientSessionOptions {
            resume: true,
            ..ClientSessionOptions::default()
        };
        let session = ClientSession::connect(&cutter.at(dialect), options)
            .await
            .unwrap();
        let slow = session.call(request("slow", &[], &["response"])).unwrap();
        let mut reader = slow.output("response").unwrap().read();
        until("it runs", || numbers.actions_open.get() == 1).await;
        drop(stop);
        let began = tokio::time::Instant::now();
        closed_in_time(&server, SessionLimits::default().resume_grace).await;
        let waited = began.elapsed();
        assert!(waited >= Duration::from_secs(59), "{waited:?}");
        assert_eq!(numbers.actions_open.get(), 0);
        drop(session);
        assert!(reader.next().await.unwrap().is_err());
    }
}
