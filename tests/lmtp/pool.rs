//! A pool whose servers are killed.

mod hanging;
mod resume;

use futures::StreamExt;
use sapwood_engine::EngineOwner;
use sapwood_engine::scripted::{self, Script, ScriptRule, ScriptStep};
use sapwood_kernel::Kernel;
use sapwood_kernel::connect::lmtp::{LmtpModelTerms, function};
use sapwood_net::lmtp::pool::{LmtpPool, PoolEndpoint, PooledItems};
use sapwood_net::lmtp::{ConnectOptions, PeerAddress};
use sapwood_proto::lmtp::pool::{self as machine, Condition};
use sapwood_proto::lmtp::{GenerateRequest, LmtpReason, Score, StreamFinish};
use sapwood_proto::params::GenerationParams;
use sapwood_proto::time::Time;
use sapwood_server::ops::metrics::Format;
use sapwood_tests::{Running, until};

use super::{client, message, of_parrot, parrot, stepped, stream, tokens_and_end};

const SAYS: &str = "the quick brown fox jumps over it";

/// A script that continues from any part of its text, as models do: prompt and output are one text to it.
fn fluent() -> scripted::Config {
    let rule = |given: usize| ScriptRule {
        pattern: Some(format!("^say: {}$", &SAYS[..given])),
        steps: match &SAYS[given..] {
            "" => vec![ScriptStep::Finish(scripted::ScriptFinish::Stop)],
            rest => vec![ScriptStep::Text(rest.into())],
        },
    };
    scripted::Config {
        name: "parrot".into(),
        script: Script::Steps,
        rules: (0..=SAYS.len()).map(rule).collect(),
        ..scripted::Config::default()
    }
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn request() -> GenerateRequest {
    GenerateRequest {
        prompt: bytes("say: "),
        params: GenerationParams {
            max_tokens: Some(100),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    }
}

pub(super) async fn pool(servers: &[&Running], settings: machine::PoolOptions) -> LmtpPool {
    speaking(servers, ConnectOptions::default(), settings).await
}

async fn speaking(
    servers: &[&Running],
    options: ConnectOptions,
    settings: machine::PoolOptions,
) -> LmtpPool {
    let endpoints = servers.iter().map(|server| PoolEndpoint {
        address: PeerAddress::parse(&format!("{}/lmtp", server.address)).unwrap(),
        model: "parrot".into(),
        weight: 1,
    });
    LmtpPool::connect(endpoints.collect(), &options, settings)
        .await
        .unwrap()
}

/// The rest of a stream, with both engines stepped while there is work.
async fn rest(
    items: &mut PooledItems,
    owners: &mut [&mut EngineOwner],
) -> (Vec<u32>, Result<StreamFinish, LmtpReason>) {
    let mut tokens = Vec::new();
    loop {
        for owner in &mut *owners {
            owner.step(Time::ZERO);
        }
        // Both may be cancelled: an item stays where it is.
        tokio::select! {
            biased;
            item = items.next() => match item.expect("no stream ends silently") {
                Ok(item) => {
                    tokens.extend(item.token);
                    if let Some(finish) = item.finish {
                        return (tokens, Ok(finish));
                    }
                }
                Err(error) => return (tokens, Err(error.reason)),
            },
            () = tokio::task::yield_now() => {}
        }
    }
}

/// The next `count` tokens of a stream.
async fn some(items: &mut PooledItems, owner: &mut EngineOwner, count: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    while tokens.len() < count {
        owner.step(Time::ZERO);
        tokio::select! {
            biased;
            item = items.next() => tokens.extend(item.unwrap().unwrap().token),
            () = tokio::task::yield_now() => {}
        }
    }
    tokens
}

/// Sends the request of a stream, whose server has not computed anything for it.
async fn arrives(items: &mut PooledItems, server: &Running) {
    let metrics = &server.shared.metrics;
    let open = metrics.streams_open.with_label_values(&["lmtp"]);
    tokio::select! {
        item = items.next() => panic!("{item:?}"),
        () = until("it is asked", || open.get() == 1) => {}
    }
}

/// The whole text, and its end token.
fn whole() -> Vec<u32> {
    [bytes(SAYS), vec![257]].concat()
}

/// LM-801: the server is killed at several points of the stream.
#[tokio::test]
async fn lm_806_a_stream_continues_at_another_server_with_the_same_tokens() {
    for cut in [0, 1, 5, SAYS.len() - 1] {
        let (mut first, one) = stepped(fluent()).await;
        let (mut second, two) = stepped(fluent()).await;
        let pool = pool(&[&one, &two], machine::PoolOptions::default()).await;
        let mut items = pool.generate(request(), None);
        let mut tokens = some(&mut items, &mut first, cut).await;
        if cut == 0 {
            arrives(&mut items, &one).await;
        }
        one.kill().await;
        let (after, ended) = rest(&mut items, &mut [&mut second]).await;
        tokens.extend(after);
        assert_eq!(
            (tokens, ended),
            (whole(), Ok(StreamFinish::Stop)),
            "cut at {cut}"
        );
        assert_eq!(items.next().await, None);
        assert_eq!(pool.moved(), 1);
        let (metrics, positions) = (&two.shared.metrics, pool.peers());
        metrics.watch_pool("parrot", pool.clone());
        let text = metrics.render(Format::Text);
        for (slot, serving) in positions.iter().zip([0, 1]) {
            let labels = format!("{{model=\"parrot\",upstream=\"{}\"}}", slot.target);
            for line in [
                format!("sapwood_upstream_serving{labels} {serving}"),
                format!("sapwood_upstream_streams_open{labels} 0"),
            ] {
                assert!(text.contains(&line), "{line}: {text}");
            }
        }
        assert!(text.contains("sapwood_upstream_moved_total{model=\"parrot\"} 1"));
        let slots = pool.peers();
        assert_eq!(slots[0].condition, Condition::Away);
        assert_eq!(
            (slots[1].condition, slots[1].streams),
            (Condition::Serving, 0)
        );
        drop(two);
    }
}

#[tokio::test]
async fn lm_806_a_score_continues_at_another_server_with_the_same_tokens() {
    let (_first, one) = stepped(parrot()).await;
    let (mut second, two) = stepped(parrot()).await;
    let pool = pool(&[&one, &two], machine::PoolOptions::default()).await;
    let scored = bytes("what is scored");
    let mut score = pool.score(Score {
        prompt: bytes("x"),
        scored: scored.clone(),
        top_logprobs: 0,
        ..Score::default()
    });
    arrives(&mut score, &one).await;
    one.kill().await;
    let whole = rest(&mut score, &mut [&mut second]).await;
    assert_eq!(whole, (scored, Ok(StreamFinish::Stop)));
    assert_eq!((score.next().await, pool.moved()), (None, 1));
}

#[tokio::test]
async fn lm_806_a_lost_stream_with_a_penalty_fails() {
    let (mut first, one) = stepped(parrot()).await;
    let (mut second, two) = stepped(parrot()).await;
    let settings = machine::PoolOptions {
        seeded: false,
        ..machine::PoolOptions::default()
    };
    let pool = pool(&[&one, &two], settings).await;
    let mut penalised = pool.generate(
        GenerateRequest {
            params: GenerationParams {
                repetition_penalty: Some(1.5),
                ..request().params
            },
            ..request()
        },
        None,
    );
    let mut tokens = some(&mut penalised, &mut first, 2).await;
    one.kill().await;
    let (after, ended) = rest(&mut penalised, &mut [&mut second]).await;
    tokens.extend(after);
    assert!(bytes("say: ").starts_with(&tokens), "{tokens:?}");
    assert_eq!(ended, Err(LmtpReason::UpstreamError));
    assert_eq!(pool.moved(), 0);
}

#[tokio::test]
async fn lm_804_a_pool_without_a_server_fails_at_once_with_a_retry_delay() {
    let (_first, one) = stepped(fluent()).await;
    let (_second, two) = stepped(fluent()).await;
    let pool = pool(&[&one, &two], machine::PoolOptions::default()).await;
    let mut items = pool.generate(request(), None);
    let ended = tokio::spawn(async move { items.next().await.unwrap().unwrap_err() });
    one.kill().await;
    two.kill().await;
    let error = ended.await.unwrap();
    assert_eq!(error.reason, LmtpReason::UpstreamError);
    let error = pool
        .generate(request(), None)
        .next()
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(error.reason, LmtpReason::UpstreamError);
    assert!(error.reason.is_retryable() && error.retry_after.is_some());
}

/// LM-801, LM-803
#[tokio::test]
async fn lm_801_streams_of_a_pool_are_distributed_over_its_servers() {
    let (mut first, one) = stepped(fluent()).await;
    let (mut second, two) = stepped(fluent()).await;
    let pool = pool(&[&one, &two], machine::PoolOptions::default()).await;
    let mut streams: Vec<PooledItems> = (0..6).map(|_| pool.generate(request(), None)).collect();
    // A request is sent when its stream is polled.
    for items in &mut streams {
        tokio::select! {
            biased;
            _ = items.next() => panic!("an item although no engine was stepped"),
            () = tokio::task::yield_now() => {}
        }
    }
    let slots = pool.peers();
    assert_eq!((slots[0].streams, slots[1].streams), (3, 3));
    for items in &mut streams {
        let ended = rest(items, &mut [&mut first, &mut second]).await;
        assert_eq!(ended, (whole(), Ok(StreamFinish::Stop)));
    }
}

/// Requests of a version 2 client, and their results: buffers, masks, biases, scores, samples.
async fn conversation(server: &Running) -> Vec<(Vec<u64>, String)> {
    let mut socket = client(server).await;
    for request in [
        r#"MODEL_INFO {"stream_id":1,"model":"parrot","data":{"lmtp":{"version":2,"features":"all"}}}"#,
        r#"BUFFER {"stream_id":2,"model":"parrot","buffer":"b","append":[104,101,108]}"#,
        r#"MASK {"stream_id":3,"model":"parrot","mask":"m","allow":[[120,121]]}"#,
    ] {
        socket.send_text(request).await;
        let (word, answer) = message(&mut socket).await;
        assert!(
            word == "MSG" && answer[0].get("error").is_none(),
            "{answer:?}"
        );
    }
    let mut all = Vec::new();
    for (id, request) in [
        (
            4,
            r#"GENERATE {"stream_id":4,"model":"parrot","prefix":{"buffer":"b"},"prompt":[108,111],"keep":"c"}"#,
        ),
        (
            5,
            r#"GENERATE {"stream_id":5,"model":"parrot","prefix":{"buffer":"c"},"max_tokens":3}"#,
        ),
        (
            6,
            r#"GENERATE {"stream_id":6,"model":"parrot","prompt":[104],"mask":"m","max_tokens":4}"#,
        ),
        (
            7,
            r#"GENERATE {"stream_id":7,"model":"parrot","prompt":[104],"stop_tokens":[[104]]}"#,
        ),
        (
            8,
            r#"SCORE {"stream_id":8,"model":"parrot","prompt":[104],"scored":[104,105]}"#,
        ),
        (
            9,
            r#"GENERATE {"stream_id":9,"model":"absent","prompt":[104]}"#,
        ),
        (
            10,
            r#"GENERATE {"stream_id":10,"model":"parrot","prompt":[900]}"#,
        ),
    ] {
        socket.send_text(request).await;
        all.push(tokens_and_end(&stream(&mut socket, id).await));
    }
    all
}

/// LM-712: buffers and masks are features of our own face; a base server behind it gets full prompts and biases.
#[tokio::test]
async fn lm_807_a_pool_of_base_servers_serves_version_2() {
    let (one, two) = (of_parrot().await, of_parrot().await);
    let settings = machine::PoolOptions::default();
    for options in [ConnectOptions::base(), ConnectOptions::default()] {
        let pool = speaking(&[&one, &two], options, settings.clone()).await;
        let kernel = Kernel::new();
        kernel
            .add(function(&pool, "parrot", LmtpModelTerms::default()))
            .unwrap();
        let front = Running::start(kernel, Default::default(), Vec::new()).await;
        let received = conversation(&front).await;
        assert_eq!(received, conversation(&one).await);
        assert_eq!(received[0].0, [104, 101, 108, 108, 111, 257]);
        // Features that need a tokenizer are not offered.
        let mut socket = client(&front).await;
        socket.send_text(r#"MODEL_INFO {"stream_id":1,"model":"parrot","data":{"lmtp":{"version":2,"features":"all"}}}"#).await;
        let facts = &message(&mut socket).await.1[0]["model_info"];
        assert_eq!(
            (&facts["vocab_size"], &facts["eos"]),
            (&258.into(), &serde_json::json!([257]))
        );
        assert!(facts["tokenizer"].is_null());
        socket
            .send_text(r#"GENERATE {"stream_id":2,"model":"parrot","prompt_text":"x"}"#)
            .await;
        let (_, code) = tokens_and_end(&stream(&mut socket, 2).await);
        assert_eq!(code, "unsupported_operation");
    }
}

/// A long stream with at least one item.
async fn begun(pool: &LmtpPool, owner: &mut EngineOwner) -> PooledItems {
    let wanted = GenerateRequest {
        prompt: vec![1],
        params: GenerationParams {
            max_tokens: Some(1_000),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    };
    let mut items = pool.generate(wanted, None);
    some(&mut items, owner, 2).await;
    items
}

/// LM-506, LM-961: dropping a stream frees its sequence at the server.
#[tokio::test]
async fn lm_702_a_stream_that_is_dropped_is_cancelled_at_its_server() {
    let (mut owner, one) = stepped(super::chatter()).await;
    let pool = pool(&[&one], machine::PoolOptions::default()).await;
    let items = begun(&pool, &mut owner).await;
    drop(items);
    let open = one.shared.metrics.streams_open.with_label_values(&["lmtp"]);
    until("it is cancelled", || open.get() == 0).await;
    owner.step(Time::from_millis(1));
    assert!(owner.is_empty());
}
