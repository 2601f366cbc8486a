//! Memory of Evergreen sessions that end, or do not read.

use std::sync::Arc;

use bytes::Bytes;
use futures::stream;
use sapwood_engine::scripted;
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, SessionNode};
use sapwood_proto::evergreen::Metadata;
use sapwood_tests::raw::{action, call, fragments, leaf};
use sapwood_tests::{Running, request, spawned, until, with_model};

use super::{TURN, live_bytes};

async fn write(session: &ClientSession, data: &Bytes) -> SessionNode {
    let text = Arc::new(Metadata::of("text/plain"));
    let mut writer = session.write().unwrap();
    writer.write(&text, data.clone()).await.unwrap();
    writer.end(&text).unwrap()
}

async fn echo(session: &ClientSession, data: &Bytes) {
    let input = write(session, data).await;
    let call = request("echo", &[("text", &input)], &["response"]);
    let call = session.call(call).unwrap();
    let output = call.output("response").unwrap().read();
    assert_eq!(output.whole().await.unwrap().len(), data.len());
}

/// Fifty short sessions.
async fn echoes(over: &ClientSession) {
    for _ in 0..50 {
        let session = over.another(ClientSessionOptions::default()).await.unwrap();
        echo(&session, &Bytes::from_static(b"ping")).await;
        session.close().await.unwrap();
    }
}

#[tokio::test]
async fn ev_104_memory_after_a_thousand_sessions_equals_memory_after_ten() {
    let _turn = TURN.lock().await;
    let server = Running::with_test_functions().await;
    let sessions_open = &server.shared.metrics.evergreen.sessions_open;
    let first = server.session().await;
    let data = Bytes::from(vec![b'x'; 1 << 20]);
    let mut after_ten = 0;
    for count in 1..=1_000 {
        let session = first
            .another(ClientSessionOptions::default())
            .await
            .unwrap();
        write(&session, &data).await;
        match count % 4 {
            // Every way to end: a close, a drop, with running work, after an answer.
            0 => session.close().await.unwrap(),
            1 => drop(session),
            2 => {
                let call = session.call(request("slow", &[], &["response"])).unwrap();
                drop((call, session));
            }
            _ => {
                echo(&session, &data.slice(..1_000)).await;
                drop(session);
            }
        }
        until("the session is gone", || sessions_open.get() == 1).await;
        if count == 10 {
            after_ten = live_bytes();
        }
    }
    let grown = live_bytes() - after_ten;
    assert!(grown < 128 << 10, "{grown} bytes in 990 sessions");
}

/// EV-803
#[tokio::test]
async fn ev_805_memory_is_constant_with_a_client_that_never_reads() {
    let _turn = TURN.lock().await;
    let engine = spawned(scripted::Config {
        script: scripted::Script::Tokens,
        context_tokens: 1 << 20,
        count: 1 << 19,
        ..scripted::Config::default()
    });
    let server = Running::over(with_model(engine.clone())).await;
    let other = server.session().await;
    echoes(&other).await;
    let before = live_bytes();
    let generate = action("GENERATE", &[("prompt", "p")], &[("response", "r")]);
    let messages = stream::iter([generate, fragments(vec![leaf("p", 0, 10)])]);
    let unread = call(&server, messages, &[]).await.unwrap();
    // Generation stops: other calls continue, and no token is computed meanwhile.
    let tokens = || engine.stats().generation_tokens.get();
    let mut computed = 0;
    while tokens() == 0 || std::mem::replace(&mut computed, tokens()) != tokens() {
        echoes(&other).await;
    }
    assert!(engine.stats().streams_parked.get() == 1 && computed < 1 << 18);
    let parked = live_bytes();
    // A queue of 1 MiB in tokens of five bytes, each with the overhead of its log entry.
    assert!(parked - before < 16 << 20, "{} bytes", parked - before);
    echoes(&other).await;
    let grown = live_bytes() - parked;
    assert!(grown < 64 << 10, "{grown} bytes in other sessions");
    drop(unread);
}

#[tokio::test]
async fn ev_805_small_payloads_pin_no_large_receive_buffer() {
    let _turn = TURN.lock().await;
    let server = Running::with_test_functions().await;
    // The large fragment is retained once; later ones are duplicates and dropped, and the small ones are retained.
    let message = |round: i32| {
        let small = leaf(&format!("small {round}"), 0, 100);
        fragments(vec![leaf("large", 0, 4 << 20), small])
    };
    let (send, receive) = tokio::sync::mpsc::channel(1);
    let messages = tokio_stream::wrappers::ReceiverStream::new(receive);
    let before = live_bytes();
    let mut answers = call(&server, messages, &[]).await.unwrap();
    for round in 0..30 {
        send.send(message(round)).await.unwrap();
    }
    // A response to the last message shows that all of them have been handled.
    let ping = fragments(vec![leaf("ping", 0, 1)]);
    send.send(ping).await.unwrap();
    let echo = action("echo", &[("text", "ping")], &[("response", "pong")]);
    send.send(echo).await.unwrap();
    answers.message().await.unwrap().unwrap();
    let grown = live_bytes() - before;
    assert!(
        ((4 << 20)..(40 << 20)).contains(&grown),
        "{grown} bytes for one fragment of 4 MiB, buffers of both sides, and 30 small ones"
    );
    drop((send, answers));
}
