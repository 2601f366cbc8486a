//! Clients resume their streams after a lost connection (LM-963 to LM-966), over real sockets.

use std::time::Duration;

use sapwood_engine::EngineOwner;
use sapwood_proto::lmtp::ConnectionLimits;
use sapwood_proto::time::Time;
use sapwood_server::faces::lmtp;
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Running, by_hand, key, spawned, until};
use serde_json::{Value, json};

use super::{chatter, client, kernel, message, stepped, tokens_and_end, with_config};

const AGREE: &str = r#"MODEL_INFO {"stream_id":0,"model":"parrot","data":{"lmtp":{"version":2,"features":["resume","cancel"]}}}"#;
const GENERATE: &str = r#"GENERATE {"model":"parrot","prompt":[7],"stream_id":1,"temperature":1,"seed":3,"max_tokens":20}"#;

/// The token of the session.
pub(super) async fn agreed(socket: &mut Socket) -> String {
    socket.send_text(AGREE).await;
    let (word, items) = message(socket).await;
    assert_eq!(word, "MSG");
    items[0]["lmtp"]["session"].as_str().unwrap().to_owned()
}

pub(super) fn resume(name: &str, after: i64) -> String {
    format!(
        r#"RESUME {{"stream_id":9,"model":"parrot","session":"{name}","streams":[{{"stream_id":1,"after_seq":{after}}}]}}"#
    )
}

async fn read(
    socket: &mut Socket,
    owner: &mut EngineOwner,
    items: usize,
    now: &mut u64,
) -> Vec<Value> {
    let mut all = Vec::new();
    while all.len() < items {
        owner.step(Time::from_millis(*now));
        *now += 1;
        all.extend(message(socket).await.1);
    }
    all
}

/// LM-606, LM-963, LM-964: the tokens are those of an uncut run, each once.
#[tokio::test]
async fn lm_965_a_stream_resumes_after_a_lost_connection_without_loss() {
    let mut runs = Vec::new();
    for cut in [false, true] {
        let (mut owner, server) = stepped(chatter()).await;
        let mut now = 0;
        let mut socket = client(&server).await;
        let name = agreed(&mut socket).await;
        assert!(name.starts_with("s_") && name.len() == 2 + 22, "{name}");
        socket.send_text(GENERATE).await;
        socket.send_text("X {}").await;
        message(&mut socket).await;
        let mut items = read(&mut socket, &mut owner, 5, &mut now).await;
        if cut {
            let connections = &server.shared.metrics.lmtp.connections_open;
            drop(socket);
            until("no client is connected", || connections.get() == 0).await;
            for _ in 0..4 {
                owner.step(Time::from_millis(now));
                now += 1;
            }
            assert!(!owner.is_empty(), "the stream continues");
            socket = client(&server).await;
            let other = agreed(&mut socket).await;
            assert_ne!(name, other);
            let after = items.last().unwrap()["seq"].as_i64().unwrap();
            socket.send_text(&resume(&name, after)).await;
            let (word, answer) = message(&mut socket).await;
            assert_eq!(word, "MSG");
            assert_eq!(answer[0]["resumed"], json!([1]), "{answer:?}");
        }
        while items.last().unwrap()["finish_reason"].is_null() {
            owner.step(Time::from_millis(now));
            now += 1;
            items.extend(message(&mut socket).await.1);
        }
        assert_eq!(items.len(), 20);
        for (seq, item) in items.iter().enumerate() {
            assert_eq!(item["seq"], json!(seq));
        }
        assert!(owner.is_empty());
        // Counters of the first connection are not decremented.
        assert_eq!(server.shared.metrics.lmtp.items.get(), 20);
        runs.push(tokens_and_end(&items));
    }
    assert_eq!(runs[0], runs[1]);
}

#[tokio::test]
async fn lm_965_resume_closes_a_connection_that_is_still_open() {
    let (mut owner, server) = stepped(chatter()).await;
    let mut old = client(&server).await;
    let name = agreed(&mut old).await;
    old.send_text(GENERATE).await;
    old.send_text("X {}").await;
    message(&mut old).await;
    let mut now = 0;
    read(&mut old, &mut owner, 3, &mut now).await;
    let mut new = client(&server).await;
    agreed(&mut new).await;
    new.send_text(&resume(&name, -1)).await;
    assert_eq!(message(&mut new).await.1[0]["resumed"], json!([1]));
    let (reply, close) = old.rest().await;
    assert_eq!((reply.len(), close), (0, None));
    let items = message(&mut new).await.1;
    assert_eq!(items.len(), 3, "from the beginning: {items:?}");
    // The token is used up.
    let mut third = client(&server).await;
    agreed(&mut third).await;
    third.send_text(&resume(&name, -1)).await;
    assert_eq!(message(&mut third).await.1[0]["code"], json!("stream_gone"));
}

/// LM-506: a session is removed after its grace.
#[tokio::test]
async fn lm_964_a_session_ends_with_a_normal_close_or_after_its_grace() {
    for (goodbye, grace) in [(true, Duration::from_secs(30)), (false, Duration::ZERO)] {
        let (mut owner, engine) = by_hand(chatter());
        let config = lmtp::Config {
            limits: std::sync::Arc::new(ConnectionLimits {
                resume_grace: grace,
                ..ConnectionLimits::default()
            }),
            ..lmtp::Config::default()
        };
        let server = with_config(kernel("parrot", engine), config).await;
        let mut socket = client(&server).await;
        let name = agreed(&mut socket).await;
        socket.send_text(GENERATE).await;
        socket.send_text("X {}").await;
        message(&mut socket).await;
        owner.step(Time::ZERO);
        if goodbye {
            socket.close().await;
        } else {
            drop(socket);
        }
        let cancelled = server
            .shared
            .metrics
            .cancelled
            .with_label_values(&["client"]);
        until("it is cancelled", || cancelled.get() == 1).await;
        owner.step(Time::from_millis(1));
        assert!(owner.is_empty());
        let mut socket = client(&server).await;
        agreed(&mut socket).await;
        socket.send_text(&resume(&name, -1)).await;
        let answer = message(&mut socket).await.1;
        assert_eq!(answer[0]["code"], json!("stream_gone"));
        assert_eq!(answer[0]["retryable"], json!(true));
    }
}

/// A session token works only with the key of its session.
#[tokio::test]
async fn lm_965_a_session_belongs_to_its_key() {
    let keys = vec![key("one", "secret-one"), key("two", "secret-two")];
    let kernel = kernel("parrot", spawned(chatter()));
    let server = Running::start(kernel, Default::default(), keys).await;
    let open = async |secret: &str| {
        let bearer = format!("Bearer {secret}");
        let headers = [("authorization", &*bearer)];
        Socket::open(&server, "/lmtp", &headers).await.unwrap()
    };
    let mut socket = open("secret-one").await;
    let name = agreed(&mut socket).await;
    for (secret, code) in [("secret-two", "stream_gone"), ("secret-one", "")] {
        let mut other = open(secret).await;
        agreed(&mut other).await;
        other.send_text(&resume(&name, -1)).await;
        let answer = message(&mut other).await.1;
        assert_eq!(answer[0]["code"].as_str().unwrap_or_default(), code);
    }
}

/// LM-115: `POST /lmtp` does not offer resume, because a closed response cannot be told from a lost one.
#[tokio::test]
async fn lm_964_resume_is_not_negotiated_above_the_limit_of_sessions() {
    let config = lmtp::Config {
        resumable_sessions_each: 1,
        ..lmtp::Config::default()
    };
    let server = with_config(kernel("parrot", spawned(chatter())), config).await;
    let mut first = client(&server).await;
    agreed(&mut first).await;
    let mut second = client(&server).await;
    second.send_text(AGREE).await;
    let answer = message(&mut second).await.1;
    assert_eq!(answer[0]["lmtp"]["features"], json!(["cancel"]));
    assert_eq!(answer[0]["lmtp"].get("session"), None);
    // The session's room is free when the session has ended.
    first.close().await;
    loop {
        second.send_text(AGREE).await;
        let SocketReply::Text(text) = second.received().await else {
            panic!("no answer");
        };
        if text.contains(r#""session":"s_"#) {
            break;
        }
    }
}

/// LM-952: the window pauses one stream, and its sequence.
#[tokio::test]
async fn lm_952_a_stream_with_a_full_window_pauses_until_an_ack() {
    let server = with_config(
        kernel("parrot", spawned(chatter())),
        lmtp::Config::default(),
    )
    .await;
    let mut socket = client(&server).await;
    socket.send_text(&AGREE.replace("resume", "window")).await;
    message(&mut socket).await;
    socket
        .send_text(&GENERATE.replace(r#""seed":3"#, r#""seed":3,"window":2"#))
        .await;
    let mut seen = 0;
    while seen < 20 {
        let mut inside = 0;
        while inside < 2 {
            inside += message(&mut socket).await.1.len();
        }
        assert_eq!(inside, 2);
        // No other item is in flight: this is answered next.
        socket.send_text("X {}").await;
        assert_eq!(message(&mut socket).await.0, "MSG");
        seen += inside;
        let ack = format!(
            r#"ACK {{"stream_id":1,"model":"parrot","seq":{}}}"#,
            seen - 1
        );
        socket.send_text(&ack).await;
    }
}
