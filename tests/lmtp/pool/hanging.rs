//! A server of a pool that hangs: it accepts what is sent, and answers nothing.

use std::time::Duration;

use sapwood_tests::proxy::Proxy;

use super::*;

/// A pool of two servers, the first behind a proxy that can hang.
async fn behind(proxy: &Proxy, two: &Running) -> LmtpPool {
    let endpoint = |address| PoolEndpoint {
        address: PeerAddress::parse(&format!("{address}/lmtp")).unwrap(),
        model: "parrot".into(),
        weight: 1,
    };
    let endpoints = vec![endpoint(proxy.address), endpoint(two.address)];
    // A server that is only slow, because the machine is busy, is used again after its next answer.
    let often = Duration::from_millis(50);
    let settings = machine::PoolOptions {
        probe_interval: often,
        back_off: often,
        back_off_max: often,
        ..machine::PoolOptions::default()
    };
    let options = ConnectOptions {
        request_timeout: Some(Duration::from_millis(200)),
        ..ConnectOptions::default()
    };
    LmtpPool::connect(endpoints, &options, settings)
        .await
        .unwrap()
}

/// Before the first item and in the middle; probes find it, so the minutes that an item may take are not waited for.
#[tokio::test]
async fn lm_804_streams_of_a_server_that_hangs_move_to_another() {
    for cut in [0, 3] {
        let (mut first, one) = stepped(fluent()).await;
        let (mut second, two) = stepped(fluent()).await;
        let proxy = Proxy::to(one.address).await;
        let pool = behind(&proxy, &two).await;
        let mut items = pool.generate(request(), None);
        let mut tokens = some(&mut items, &mut first, cut).await;
        proxy.hang();
        let (after, end) = rest(&mut items, &mut [&mut second]).await;
        tokens.extend(after);
        assert_eq!(
            (tokens, end),
            (whole(), Ok(StreamFinish::Stop)),
            "cut at {cut}"
        );
        assert_eq!(pool.moved(), 1);
        assert_eq!(pool.peers()[0].condition, Condition::Away);
    }
}

/// Only the pool's probes wake the reader of a stream that has no item yet.
#[tokio::test]
async fn lm_804_a_stream_without_an_item_moves_by_itself() {
    let (_first, one) = stepped(fluent()).await;
    let (mut second, two) = stepped(fluent()).await;
    let proxy = Proxy::to(one.address).await;
    let pool = behind(&proxy, &two).await;
    proxy.hang();
    let items = pool.generate(request(), None);
    let tokens = items.filter_map(async |item| item.unwrap().token);
    let reader = tokio::spawn(tokens.collect::<Vec<u32>>());
    let stepped = async {
        while !reader.is_finished() {
            second.step(Time::ZERO);
            tokio::task::yield_now().await;
        }
    };
    // Far less than the time for which a first item is waited for.
    tokio::time::timeout(Duration::from_secs(30), stepped)
        .await
        .unwrap();
    assert_eq!(reader.await.unwrap(), whole());
    assert_eq!(pool.moved(), 1);
}

#[tokio::test]
async fn lm_804_watchers_of_a_pool_are_notified_when_no_server_is_left() {
    let (one, two) = (of_parrot().await, of_parrot().await);
    let pool = pool(&[&one, &two], machine::PoolOptions::default()).await;
    let mut served = pool.served();
    assert!(*served.borrow_and_update());
    one.kill().await;
    two.kill().await;
    let nobody = served.wait_for(|served| !*served);
    assert!(!*nobody.await.unwrap());
}

/// A seed is kept: the other server computes the stream from its beginning, penalties included.
#[tokio::test]
async fn lm_806_a_seeded_stream_has_the_same_tokens_at_another_server() {
    let wanted = || GenerateRequest {
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
    let mut runs = Vec::new();
    for cut in [None, Some(0), Some(5)] {
        let (mut first, one) = stepped(super::super::chatter()).await;
        let (mut second, two) = stepped(super::super::chatter()).await;
        let pool = pool(&[&one, &two], machine::PoolOptions::default()).await;
        let mut items = pool.generate(wanted(), None);
        let mut tokens = some(&mut items, &mut first, cut.unwrap_or(0)).await;
        if cut.is_some() {
            one.kill().await;
        }
        let (after, end) = rest(&mut items, &mut [&mut first, &mut second]).await;
        tokens.extend(after);
        assert_eq!(
            (tokens.len(), end),
            (20, Ok(StreamFinish::Length)),
            "{cut:?}"
        );
        runs.push(tokens);
    }
    assert!(runs[0] == runs[1] && runs[0] == runs[2], "{runs:?}");
}
