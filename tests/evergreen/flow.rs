//! Quotas, pauses and queues (section 8.1 of the Evergreen page), over a real socket.
//!
//! The session machine's own tests assume that transports obey it: these check that they do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::{StreamExt, stream};
use prost::Message as _;
use sapwood_kernel::session::test_functions;
use sapwood_kernel::{Call, Chunk, Chunks, InputSpec, Kernel, Mime, OutputSpec, Port, Spec, raw};
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions};
use sapwood_proto::evergreen::wire::{NodeFragment, SessionMessage};
use sapwood_proto::evergreen::{SessionLimits, Status};
use sapwood_server::faces::evergreen::Config;
use sapwood_tests::raw::{action, call, code_and_reason, end, fragments, leaf, piece};
use sapwood_tests::socket::{Socket, frame};
use sapwood_tests::{Running, request, until};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::loopback::{text, whole};
use super::resume::closed_in_time;

async fn limited(limits: SessionLimits) -> Running {
    let config = Config {
        limits: Arc::new(limits),
        ..Config::default()
    };
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    Running::start(kernel, config, Vec::new()).await
}

/// How a session of these messages ends.
async fn ended(server: &Running, messages: Vec<SessionMessage>) -> Option<Status> {
    end(call(server, stream::iter(messages), &[]).await.unwrap()).await
}

#[tokio::test]
async fn ev_801_the_quota_of_a_session_holds_over_a_socket() {
    let server = limited(SessionLimits {
        retained_bytes: 100_000,
        ..SessionLimits::default()
    })
    .await;
    // The id, 64 bytes for the fragment, and the mimetype.
    let most = 100_000 - 1 - 64 - 10;
    assert!(
        ended(&server, vec![fragments(vec![leaf("p", 0, most)])])
            .await
            .is_none()
    );
    let past = ended(&server, vec![fragments(vec![leaf("p", 0, most + 1)])])
        .await
        .unwrap();
    assert_eq!(
        (&*past.reason, past.detail("limit"), past.detail("value")),
        ("RETAINED_LIMIT", Some("retained_bytes"), Some("100001"))
    );
}

/// EV-801, EV-984
#[tokio::test]
async fn ev_955_one_session_streams_many_times_its_quota() {
    let server = limited(SessionLimits {
        retained_bytes: 2 << 20,
        ..SessionLimits::default()
    })
    .await;
    let numbers = &server.shared.metrics.evergreen;
    let options = ClientSessionOptions {
        retain_unread: true,
        ..ClientSessionOptions::default()
    };
    let session = ClientSession::connect(&server.at(), options).await.unwrap();
    assert!(session.announces("retain"));
    let mut input = session.write().unwrap();
    let echo = request("echo", &[("text", input.node())], &["response"]);
    let call = session.call(echo).unwrap();
    let mut echoed = call.output("response").unwrap().read();
    let data = bytes::Bytes::from(vec![b'x'; 256 << 10]);
    for _ in 0..64 {
        input.write(&text(""), data.clone()).await.unwrap();
        let mut back = 0;
        while back < data.len() {
            back += echoed.next().await.unwrap().unwrap().data.len();
        }
        assert!(numbers.retained_bytes.get() <= 2 << 20);
    }
    input.end(&text("")).unwrap();
    assert!(echoed.next().await.is_none());
    let late = call.output("response").unwrap().read().whole().await;
    assert_eq!(&*late.unwrap_err().reason, "NODE_RELEASED");
    drop((echoed, call));
    session.close().await.unwrap();
}

#[tokio::test]
async fn ev_801_all_sessions_share_the_quota_of_the_server() {
    let config = Config {
        retained_bytes: 100_000,
        ..Config::default()
    };
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let server = Running::start(kernel, config, Vec::new()).await;
    let numbers = &server.shared.metrics.evergreen;
    let overhead = 1 + 64 + 10;
    let (hold, retained) = mpsc::channel(1);
    let first = call(&server, ReceiverStream::new(retained), &[])
        .await
        .unwrap();
    let sixty = fragments(vec![leaf("p", 0, 60_000 - overhead)]);
    hold.send(sixty).await.unwrap();
    until("the first one's bytes are counted", || {
        numbers.retained_bytes.get() == 60_000
    })
    .await;
    let rest = 40_000 - overhead;
    let fits = ended(&server, vec![fragments(vec![leaf("p", 0, rest)])]).await;
    assert_eq!(code_and_reason(fits), (0, String::new()));
    let past = ended(&server, vec![fragments(vec![leaf("p", 0, rest + 1)])])
        .await
        .unwrap();
    assert_eq!(
        (past.detail("limit"), past.detail("value")),
        (Some("server_retained_bytes"), Some("100001"))
    );
    assert_eq!(code_and_reason(Some(past)), (8, "RETAINED_LIMIT".into()));
    let aborts = numbers.aborts.with_label_values(&["RETAINED_LIMIT"]);
    assert_eq!((aborts.get(), numbers.retained_bytes.get()), (1, 60_000));
    // Outputs of functions count, too: echoing a third makes two thirds.
    let third = fragments(vec![leaf("p", 0, 30_000)]);
    let echo = action("echo", &[("text", "p")], &[("response", "r")]);
    let echoed = ended(&server, vec![third, echo]).await;
    assert_eq!(code_and_reason(echoed), (8, "RETAINED_LIMIT".into()));
    // The first session never asked for too much.
    drop(hold);
    assert!(end(first).await.is_none());
    until("its bytes are free again", || {
        numbers.retained_bytes.get() == 0
    })
    .await;
}

#[tokio::test]
async fn ev_804_up_to_4096_fragments_out_of_order_are_retained() {
    let server = Running::with_test_functions().await;
    let early = |count: i32| {
        let mut list: Vec<NodeFragment> = (1..=count).map(|seq| piece("p", seq, 1)).collect();
        list.reverse();
        list.chunks(1_000)
            .map(|part| fragments(part.to_vec()))
            .collect::<Vec<_>>()
    };
    // Retained fragments are delivered in order once the first one arrives.
    let mut messages = early(4_096);
    messages.push(action("echo", &[("text", "p")], &[("response", "r")]));
    messages.push(fragments(vec![piece("p", 0, 1), leaf("p", 4_097, 1)]));
    let mut answers = call(&server, stream::iter(messages), &[]).await.unwrap();
    let mut echoed = 0;
    while let Some(message) = answers.message().await.unwrap() {
        let chunks = message.node_fragments.into_iter();
        let chunks = chunks.filter_map(|fragment| fragment.chunk_fragment?.payload);
        echoed += chunks
            .map(|payload| match payload {
                sapwood_proto::evergreen::wire::Payload::Data(data) => data.len(),
                sapwood_proto::evergreen::wire::Payload::Ref(_) => 0,
            })
            .sum::<usize>();
    }
    assert_eq!(echoed, 4_098);
    let past = ended(&server, early(4_097)).await;
    assert_eq!(code_and_reason(past), (8, "REORDER_LIMIT".into()));
}

/// `ignore`: has an input, never reads it, and ends when notified.
fn ignoring(end: Arc<Notify>) -> Kernel {
    let spec = Spec::new("ignore", "Never reads.")
        .inputs([InputSpec::new("text").streaming()])
        .outputs([OutputSpec::new(Port::MAIN, Mime::ANY).wire("response")]);
    let kernel = Kernel::new();
    kernel
        .add(raw(spec, move |call: Call| -> Chunks {
            let end = Arc::clone(&end);
            // The call is kept alive: dropping it would release its inputs.
            stream::once(async move {
                end.notified().await;
                drop(call);
                Ok(Chunk::text("enough"))
            })
            .boxed()
        }))
        .unwrap();
    kernel
}

/// Gives all other tasks many turns; a task that has not stopped by then will not stop.
async fn busy(session: &ClientSession) {
    for _ in 0..30 {
        let mut writer = session.write().unwrap();
        writer.write(&text("USER"), "ping".into()).await.unwrap();
        let input = writer.end(&text("USER")).unwrap();
        let echo = request("echo", &[("text", &input)], &["response"]);
        let echo = session.call(echo).unwrap();
        assert_eq!(whole(echo.output("response")).await, "ping");
    }
}

/// EV-805: 64 MiB to an action that never reads.
#[tokio::test]
async fn ev_802_reading_pauses_while_an_action_does_not_read_and_continues_at_its_end() {
    const KIB: usize = 64;
    const PIECES: usize = 1_024;
    let enough = Arc::new(Notify::new());
    let server = Running::over(ignoring(Arc::clone(&enough))).await;
    let other = server.session().await;
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&taken);
    let begin = action("ignore", &[("text", "p")], &[("response", "r")]);
    let flood = stream::iter(0..PIECES).map(move |seq| {
        counted.fetch_add(1, Ordering::Relaxed);
        let seq = i32::try_from(seq).unwrap();
        fragments(vec![piece("p", seq, KIB << 10)])
    });
    let messages = stream::iter([begin]).chain(flood);
    let answers = call(&server, messages, &[]).await.unwrap();
    let mut last = 0;
    loop {
        busy(&other).await;
        let now = taken.load(Ordering::Relaxed);
        if now == last && now > 0 {
            break;
        }
        last = now;
    }
    let bytes = (last * KIB) << 10;
    let (high, slack) = (4 << 20, 2 << 20);
    assert!(
        (high..=high + slack).contains(&bytes),
        "the high-water mark, a window, and what buffers hold: {bytes}"
    );
    enough.notify_one();
    assert!(end(answers).await.is_none());
    assert_eq!(taken.load(Ordering::Relaxed), PIECES);
}

/// EV-802: reading must not pause while it holds back what a reader waits for.
/// EV-802, D-28
#[tokio::test]
async fn ev_109_a_disconnect_is_noticed_while_reading_is_paused() {
    let spec = Spec::new("deaf", "Reads nothing and never ends.")
        .inputs([InputSpec::new("text").streaming()])
        .outputs([OutputSpec::new(Port::MAIN, Mime::ANY).wire("response")]);
    let kernel = Kernel::new();
    kernel
        .add(raw(spec, |_: Call| -> Chunks { stream::pending().boxed() }))
        .unwrap();
    let config = Config {
        limits: Arc::new(SessionLimits {
            inbound_high_bytes: 1_000,
            ..SessionLimits::default()
        }),
        ..Config::default()
    };
    let server = Running::start(kernel, config, Vec::new()).await;
    let numbers = &server.shared.metrics.evergreen;
    for resume in ["0", "1"] {
        let headers = [
            ("sec-websocket-protocol", "evergreen.v2.proto"),
            ("evergreen-resume", resume),
        ];
        let mut socket = Socket::open(&server, "/", &headers).await.unwrap();
        let deaf = action("deaf", &[("text", "p")], &[("response", "r")]);
        socket.send(deaf.encode_to_vec()).await;
        until("it runs", || numbers.actions_open.get() == 1).await;
        for seq in 0..20 {
            let message = fragments(vec![piece("p", seq, 500)]);
            socket.send(message.encode_to_vec()).await;
        }
        // A Close frame behind bytes that are not read.
        socket.raw(&frame(0x88, &1000_u16.to_be_bytes())).await;
        drop(socket);
        // Before the first ping could time out; a resumable session also waits for its grace.
        let grace = Duration::from_secs(if resume == "1" { 40 } else { 8 });
        closed_in_time(&server, grace).await;
        assert_eq!(numbers.actions_open.get(), 0);
    }
}

#[tokio::test]
async fn ev_805_input_that_a_reader_waits_for_is_accepted_behind_a_flood() {
    let server = Running::with_test_functions().await;
    let session = server.session().await;
    let (mut wanted, mut flood) = (session.write().unwrap(), session.write().unwrap());
    let concat = request(
        "concat",
        &[("a", wanted.node()), ("b", flood.node())],
        &["response"],
    );
    let output = session.call(concat).unwrap();
    let data = bytes::Bytes::from(vec![b'b'; 256 << 10]);
    for _ in 0..40 {
        flood.write(&text(""), data.clone()).await.unwrap();
    }
    flood.end(&text("")).unwrap();
    wanted.write(&text(""), "a".into()).await.unwrap();
    wanted.end(&text("")).unwrap();
    let echoed = whole(output.output("response")).await;
    assert_eq!((echoed.len(), &echoed[..2]), (1 + (40 << 18), "ab"));
}
