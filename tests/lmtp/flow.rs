//! Steps and frames, slow readers, disconnects, and draining.

use std::time::Duration;

use sapwood_engine::Engine;
use sapwood_proto::lmtp::ConnectionLimits;
use sapwood_proto::time::Time;
use sapwood_server::faces::lmtp;
use sapwood_server::ops::drain;
use sapwood_server::server;
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Faces, Running, by_hand, scripted, spawned, until};
use serde_json::json;

use super::{
    chatter, client, kernel, message, parrot, parsed, stepped, stream, tokens_and_end, with_config,
};

fn generate(id: usize, members: &str) -> String {
    format!(
        r#"GENERATE {{"model":"parrot","prompt":[72,105],"stream_id":{id},"top_logprobs":0{members}}}"#
    )
}

#[tokio::test]
async fn lm_601_the_items_of_a_step_share_a_frame_in_order_of_admission() {
    let (mut owner, server) = stepped(parrot()).await;
    let mut socket = client(&server).await;
    for id in 0..8 {
        socket.send_text(&generate(id, "")).await;
    }
    // The response follows all messages before it, so they have been handled.
    socket.send_text("X {}").await;
    assert_eq!(message(&mut socket).await.0, "MSG");
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    assert_eq!(open.get(), 8);
    let mut steps = Vec::new();
    for step in 0.. {
        owner.step(Time::from_millis(step));
        if owner.is_empty() {
            break;
        }
    }
    while steps.iter().map(Vec::len).sum::<usize>() < 24 {
        steps.push(message(&mut socket).await.1);
    }
    for (step, items) in steps.iter().enumerate() {
        let ids: Vec<u64> = items
            .iter()
            .map(|item| item["stream_id"].as_u64().unwrap())
            .collect();
        assert_eq!(ids, (0..8).collect::<Vec<_>>());
        let expect = [72, 105, 257][step];
        assert!(items.iter().all(|item| item["token"] == json!(expect)));
    }
    assert_eq!(steps.len(), 3);
    until("all are over", || open.get() == 0).await;
}

#[tokio::test]
async fn lm_601_coalesce_off_gives_one_item_per_message() {
    let (mut owner, engine) = by_hand(parrot());
    let config = lmtp::Config {
        coalesce: false,
        ..lmtp::Config::default()
    };
    let server = with_config(kernel("parrot", engine), config).await;
    let mut socket = client(&server).await;
    socket.send_text(&generate(1, "")).await;
    socket.send_text(&generate(2, "")).await;
    socket.send_text("X {}").await;
    assert_eq!(message(&mut socket).await.0, "MSG");
    while !owner.is_empty() || owner.step(Time::ZERO).step < 2 {
        owner.step(Time::ZERO);
    }
    for _ in 0..6 {
        assert_eq!(message(&mut socket).await.1.len(), 1);
    }
}

#[tokio::test]
async fn lm_506_a_disconnect_frees_its_sequences_by_the_next_step() {
    for close in [false, true] {
        let (mut owner, server) = stepped(chatter()).await;
        let numbers = &server.shared.metrics;
        let cancelled = numbers.cancelled.with_label_values(&["client"]);
        let mut socket = client(&server).await;
        for id in 0..4 {
            socket
                .send_text(&generate(id, r#","max_tokens":1000"#))
                .await;
        }
        socket.send_text("X {}").await;
        assert_eq!(message(&mut socket).await.0, "MSG");
        owner.step(Time::ZERO);
        assert!(!owner.is_empty());
        message(&mut socket).await;
        if close {
            socket.close().await;
        } else {
            drop(socket);
        }
        until("they are cancelled", || cancelled.get() == 4).await;
        until("nothing is open", || {
            numbers.lmtp.connections_open.get() == 0
        })
        .await;
        owner.step(Time::from_millis(1));
        assert!(owner.is_empty());
    }
}

/// LM-508
#[tokio::test]
async fn lm_508_the_id_of_a_live_stream_is_in_use_until_its_end() {
    let (mut owner, server) = stepped(parrot()).await;
    let mut socket = client(&server).await;
    socket.send_text(&generate(7, "")).await;
    socket.send_text(&generate(7, "")).await;
    let (word, items) = message(&mut socket).await;
    let expect =
        json!({"stream_id": 7, "error": "stream_id is in use", "code": "duplicate_stream"});
    assert_eq!((word.as_str(), &items[0]["code"]), ("MSG", &expect["code"]));
    for _ in 0..2 {
        while !owner.is_empty() || owner.step(Time::ZERO).step == 0 {
            owner.step(Time::ZERO);
        }
        owner.step(Time::ZERO);
        while !owner.is_empty() {
            owner.step(Time::ZERO);
        }
        let reply = stream(&mut socket, 7).await;
        assert_eq!(tokens_and_end(&reply), (vec![72, 105, 257], "stop".into()));
        socket.send_text(&generate(7, "")).await;
        socket.send_text("X {}").await;
        assert_eq!(message(&mut socket).await.0, "MSG");
        owner.step(Time::ZERO);
    }
}

/// LM-607: a client that does not read.
#[tokio::test]
async fn lm_607_a_slow_reader_delays_only_itself_and_loses_nothing() {
    let engine = spawned(sapwood_engine::scripted::Config {
        context_tokens: 1 << 20,
        ..chatter()
    });
    let server = with_config(kernel("parrot", engine.clone()), lmtp::Config::default()).await;
    let mut slow = client(&server).await;
    for id in 0..4 {
        // Items with many alternatives fill the socket buffers sooner.
        slow.send_text(&generate(id, r#","max_tokens":8000,"top_logprobs":40"#))
            .await;
    }
    until("it is parked", || engine.stats().streams_parked.get() == 4).await;
    let mut quick = client(&server).await;
    quick.send_text(&generate(1, r#","max_tokens":500"#)).await;
    assert_eq!(tokens_and_end(&stream(&mut quick, 1).await).0.len(), 500);
    assert_eq!(engine.stats().streams_parked.get(), 4);
    let (mut counts, mut ends) = ([0; 4], 0);
    while ends < 4 {
        let SocketReply::Text(text) = slow.received().await else {
            panic!("cut");
        };
        for (id, count) in counts.iter_mut().enumerate() {
            *count += text.matches(&format!(r#""stream_id":{id},"#)).count();
        }
        ends += text.matches(r#""finish_reason":"length""#).count();
    }
    assert_eq!(counts, [8_000; 4]);
}

#[tokio::test]
async fn lm_607_a_client_that_never_reads_is_disconnected() {
    let engine = spawned(sapwood_engine::scripted::Config {
        context_tokens: 1 << 22,
        ..chatter()
    });
    let config = lmtp::Config {
        limits: std::sync::Arc::new(ConnectionLimits {
            stall_timeout: Duration::from_millis(50),
            ..ConnectionLimits::default()
        }),
        ..lmtp::Config::default()
    };
    let server = with_config(kernel("parrot", engine.clone()), config).await;
    let numbers = &server.shared.metrics;
    let mut mute = client(&server).await;
    mute.send_text(&generate(1, r#","max_tokens":4000000,"top_logprobs":200"#))
        .await;
    let stalled = numbers.cancelled.with_label_values(&["stall"]);
    until("it is cut", || stalled.get() == 1).await;
    until("it is gone", || numbers.lmtp.connections_open.get() == 0).await;
    until("the engine is free", || {
        engine.stats().requests_running.get() == 0
    })
    .await;
    drop(mute);
}

async fn draining(engine: Engine, deadline: Duration) -> Running {
    let config = server::Config {
        drain: drain::Config {
            grace: Duration::ZERO,
            deadline,
            ..drain::Config::default()
        },
        ..server::Config::default()
    };
    Running::start_faces(
        config,
        kernel("parrot", engine),
        Faces::default(),
        Vec::new(),
    )
    .await
}

/// LM-505
#[tokio::test]
async fn lm_509_a_drain_refuses_new_streams_and_ends_open_ones_at_its_deadline() {
    let (_owner, engine) = by_hand(chatter());
    let server = draining(engine, Duration::from_millis(300)).await;
    let mut socket = client(&server).await;
    let mut idle = Socket::open(&server, "/", &[]).await.unwrap();
    socket.send_text(&generate(1, "")).await;
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    until("it is open", || open.get() == 1).await;
    let drain = server.shared.drain.clone();
    let outcome = tokio::spawn(async move { drain.run().await });
    server
        .shared
        .drain
        .reached(drain::DrainPhase::Refusing)
        .await;
    // Its protocol is not known yet.
    let SocketReply::Close(Some((code, _))) = idle.received().await else {
        panic!("not closed");
    };
    assert_eq!(code, 1001);
    socket.send_text(&generate(2, "")).await;
    let (rest, close) = socket.rest().await;
    let codes: Vec<_> = rest
        .iter()
        .map(|reply| match reply {
            SocketReply::Text(text) => parsed(text).1[0].clone(),
            other => panic!("{other:?}"),
        })
        .map(|item| (item["stream_id"].clone(), item["code"].clone()))
        .collect();
    assert_eq!(
        codes,
        [(json!(2), json!("draining")), (json!(1), json!("draining"))]
    );
    assert_eq!(close.map(|(code, _)| code), Some(1001));
    assert_eq!(outcome.await.unwrap().cut, 1);
}

/// LM-109, LM-302
#[tokio::test]
async fn lm_510_work_above_a_limit_is_refused_with_a_retry_delay() {
    let model = scripted(parrot());
    let limits = sapwood_engine::Config {
        queue_requests: 2,
        ..sapwood_engine::Config::default()
    };
    let (_owner, engine) = Engine::by_hand(model, limits);
    let config = lmtp::Config {
        connections: 1,
        limits: std::sync::Arc::new(ConnectionLimits {
            max_streams: 3,
            ..ConnectionLimits::default()
        }),
        ..lmtp::Config::default()
    };
    let server = with_config(kernel("parrot", engine), config).await;
    let mut socket = client(&server).await;
    for id in 0..4 {
        socket.send_text(&generate(id, "")).await;
    }
    // The engine's queue is checked after the limit of the connection.
    for id in [3, 2] {
        let items = stream(&mut socket, id).await;
        assert_eq!(tokens_and_end(&items).1, "server_overloaded", "{items:?}");
        assert_eq!(items[0]["retryable"], json!(true));
        assert!(items[0]["retry_after_ms"].as_u64().unwrap() > 0);
    }
    let refused = Socket::open(&server, "/lmtp", &[]).await;
    assert_eq!(refused.err().map(|status| status.as_u16()), Some(503));
    // LM-103: Evergreen connections do not count.
    assert!(Socket::open(&server, "/", &[]).await.is_ok());
}

/// LM-608: streams of two connections take turns.
#[tokio::test]
async fn lm_604_streams_join_between_steps() {
    let (mut owner, server) = stepped(chatter()).await;
    let mut first = client(&server).await;
    first.send_text(&generate(1, r#","max_tokens":50"#)).await;
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    until("it is open", || open.get() == 1).await;
    for step in 0..10 {
        owner.step(Time::from_millis(step));
    }
    let mut second = client(&server).await;
    second.send_text(&generate(1, r#","max_tokens":2"#)).await;
    second.send_text("X {}").await;
    assert_eq!(message(&mut second).await.0, "MSG");
    for step in 10..16 {
        owner.step(Time::from_millis(step));
    }
    assert_eq!(tokens_and_end(&stream(&mut second, 1).await).1, "length");
    assert!(!owner.is_empty(), "the first continues");
}

/// A connection with many waiting streams does not delay one with few.
#[tokio::test]
async fn lm_608_waiting_streams_of_connections_take_turns() {
    let (mut owner, server) = stepped(sapwood_engine::scripted::Config {
        parallel: 1,
        ..parrot()
    })
    .await;
    let (mut many, mut one) = (client(&server).await, client(&server).await);
    for id in 0..4 {
        many.send_text(&generate(id, r#","max_tokens":1"#)).await;
    }
    for socket in [&mut many, &mut one] {
        socket.send_text("X {}").await;
        assert_eq!(message(socket).await.0, "MSG");
    }
    one.send_text(&generate(9, r#","max_tokens":1"#)).await;
    one.send_text("X {}").await;
    assert_eq!(message(&mut one).await.0, "MSG");
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    let mut now = 0;
    // The first stream of the many, and then that of the other connection.
    while open.get() > 3 {
        owner.step(Time::from_millis(now));
        now += 1;
        tokio::task::yield_now().await;
    }
    assert_eq!(tokens_and_end(&stream(&mut one, 9).await).1, "length");
    while open.get() > 0 {
        owner.step(Time::from_millis(now));
        now += 1;
        tokio::task::yield_now().await;
    }
}
