//! Lost connections of a pool: those of its clients, and those to its servers.

use sapwood_tests::proxy::Proxy;
use sapwood_tests::socket::Socket;
use serde_json::{Value, json};

use super::*;
use crate::lmtp::resume::{agreed, resume};

/// `count` more items from a face, with the engines behind it stepped.
async fn read(socket: &mut Socket, owners: &mut [&mut EngineOwner], count: usize) -> Vec<Value> {
    let mut all = Vec::new();
    while all.len() < count {
        for owner in &mut *owners {
            owner.step(Time::ZERO);
        }
        // Both may be cancelled: a message stays where it is.
        tokio::select! {
            biased;
            (word, items) = message(socket) => {
                assert_eq!(word, "TOKEN");
                all.extend(items);
            }
            () = tokio::task::yield_now() => {}
        }
    }
    all
}

/// LM-965: the client is disconnected while the server of its stream is lost; the output is the same.
#[tokio::test]
async fn lm_807_a_client_resumes_a_stream_that_its_pool_has_moved() {
    for options in [ConnectOptions::base(), ConnectOptions::default()] {
        let (mut first, one) = stepped(fluent()).await;
        let (mut second, two) = stepped(fluent()).await;
        let pool = speaking(&[&one, &two], options, machine::PoolOptions::default()).await;
        let kernel = Kernel::new();
        let far = function(&pool, "parrot", LmtpModelTerms::default());
        kernel.add(far).unwrap();
        let front = Running::start(kernel, Default::default(), Vec::new()).await;
        let mut socket = client(&front).await;
        let name = agreed(&mut socket).await;
        let prompt = json!(bytes("say: "));
        let generate =
            json!({"stream_id": 1, "model": "parrot", "prompt": prompt, "max_tokens": 100});
        socket.send_text(&format!("GENERATE {generate}")).await;
        let mut items = read(&mut socket, &mut [&mut first, &mut second], 5).await;
        let before = items.len();
        drop(socket);
        let open = &front.shared.metrics.lmtp.connections_open;
        until("no client is connected", || open.get() == 0).await;
        // It continues without its client, and then moves to another server.
        first.step(Time::ZERO);
        one.kill().await;
        until("it continues at the other server", || pool.moved() == 1).await;
        let mut socket = client(&front).await;
        agreed(&mut socket).await;
        let last = items[before - 1]["seq"].as_i64().unwrap();
        socket.send_text(&resume(&name, last)).await;
        let answer = message(&mut socket).await.1;
        assert_eq!(answer[0]["resumed"], json!([1]), "{answer:?}");
        while items[items.len() - 1]["finish_reason"].is_null() {
            items.extend(read(&mut socket, &mut [&mut second], 1).await);
        }
        for (seq, item) in items.iter().enumerate() {
            assert_eq!(item["seq"], json!(seq));
        }
        let (tokens, end) = tokens_and_end(&items);
        let expect: Vec<_> = whole().into_iter().map(u64::from).collect();
        assert_eq!((tokens, &*end), (expect, "stop"));
        // The same request again gives the same tokens.
        let again = json!({"stream_id": 2, "model": "parrot", "prompt": prompt, "max_tokens": 100});
        socket.send_text(&format!("GENERATE {again}")).await;
        let mut repeated: Vec<Value> = Vec::new();
        while repeated
            .last()
            .is_none_or(|item| item["finish_reason"].is_null())
        {
            repeated.extend(read(&mut socket, &mut [&mut second], 1).await);
        }
        assert_eq!(tokens_and_end(&repeated), tokens_and_end(&items));
    }
}

/// A pool of one server behind a proxy that can be cut.
async fn over(proxy: &Proxy) -> LmtpPool {
    let endpoint = PoolEndpoint {
        address: PeerAddress::parse(&format!("{}/lmtp", proxy.address)).unwrap(),
        model: "parrot".into(),
        weight: 1,
    };
    let settings = machine::PoolOptions::default();
    LmtpPool::connect(vec![endpoint], &ConnectOptions::default(), settings)
        .await
        .unwrap()
}

/// Another server could not continue it, because a penalty depends on the output.
#[tokio::test]
async fn lm_965_streams_survive_a_short_loss_of_the_upstream_connection() {
    let mut runs = Vec::new();
    for cuts in [0, 1, 3] {
        let (mut owner, server) = stepped(super::super::chatter()).await;
        let proxy = Proxy::to(server.address).await;
        let pool = over(&proxy).await;
        let wanted = GenerateRequest {
            prompt: vec![7],
            params: GenerationParams {
                max_tokens: Some(20),
                temperature: Some(1.0),
                seed: Some(3),
                repetition_penalty: Some(1.5),
                ..GenerationParams::default()
            },
            ..GenerateRequest::default()
        };
        let mut items = pool.generate(wanted, None);
        let mut tokens = Vec::new();
        for _ in 0..cuts {
            tokens.extend(some(&mut items, &mut owner, 3).await);
            proxy.cut();
            owner.step(Time::ZERO);
        }
        let (after, end) = rest(&mut items, &mut [&mut owner]).await;
        tokens.extend(after);
        assert_eq!(
            (tokens.len(), end),
            (20, Ok(StreamFinish::Length)),
            "{cuts} cuts"
        );
        assert_eq!(pool.moved(), 0);
        runs.push(tokens);
    }
    assert!(runs[0] == runs[1] && runs[0] == runs[2], "{runs:?}");
}

/// LM-506: a dropped pool closes its connection normally, so the server retains nothing.
#[tokio::test]
async fn lm_964_dropping_a_pool_cancels_its_streams_at_the_server() {
    let (mut owner, server) = stepped(super::super::chatter()).await;
    let pool = pool(&[&server], machine::PoolOptions::default()).await;
    let items = begun(&pool, &mut owner).await;
    drop((pool, items));
    let metrics = &server.shared.metrics;
    let open = metrics.streams_open.with_label_values(&["lmtp"]);
    until("it is cancelled", || open.get() == 0).await;
    until("no client is connected", || {
        metrics.lmtp.connections_open.get() == 0
    })
    .await;
    owner.step(Time::from_millis(1));
    assert!(owner.is_empty());
}
