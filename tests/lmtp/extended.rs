//! Version 2 over a real socket and a real engine.

use std::sync::Arc;
use std::time::Duration;

use sapwood_engine::{Engine, EngineOwner, PrefixSharing, scripted};
use sapwood_proto::lmtp::ConnectionLimits;
use sapwood_proto::time::Time;
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::rate_limit::{self, TokenMeter};
use sapwood_server::faces::lmtp;
use sapwood_tests::socket::Socket;
use sapwood_tests::{Running, by_hand, spawned, until};
use serde_json::{Value, json};

use super::{
    chatter, client, kernel, message, of_parrot, parrot, stepped, stream, tokens_and_end,
    with_config,
};

const NEGOTIATE: &str = r#"MODEL_INFO {"stream_id":1,"model":"parrot","data":{"lmtp":{"version":2,"features":["text","cancel","usage","samples","teleport"]}}}"#;

fn text(items: &[Value]) -> String {
    items
        .iter()
        .filter_map(|item| item["text"].as_str())
        .collect()
}

async fn negotiated(server: &Running) -> Socket {
    let headers = [("sec-websocket-protocol", "lmtp.v2")];
    let socket = Socket::open(server, "/lmtp", &headers).await.unwrap();
    assert_eq!(socket.headers["sec-websocket-protocol"], "lmtp.v2");
    socket
}

/// LM-902, LM-903, LM-911, LM-950
#[tokio::test]
async fn lm_901_text_is_negotiated_and_generated_without_a_round_trip() {
    let server = of_parrot().await;
    let mut socket = client(&server).await;
    socket.send_text(NEGOTIATE).await;
    let ask = r#"GENERATE {"model":"parrot","prompt_text":"Größe","stream_id":2}"#;
    socket.send_text(ask).await;
    let (word, items) = message(&mut socket).await;
    assert_eq!(word, "MSG");
    let reply = &items[0]["lmtp"];
    assert_eq!(reply["version"], json!(2));
    assert_eq!(
        reply["features"],
        json!(["text", "cancel", "usage", "samples"])
    );
    let items = stream(&mut socket, 2).await;
    assert_eq!(text(&items), "Größe");
    assert_eq!(items[0]["prompt_len"], json!(8), "BOS counts");
    let usage = &items.last().unwrap()["usage"];
    assert_eq!(
        (&usage["prompt_tokens"], &usage["completion_tokens"]),
        (&json!(8), &json!(8))
    );
}

/// LM-950
#[tokio::test]
async fn lm_609_cached_prefixes_are_not_shared_between_keys() {
    for (prefix_sharing, theirs) in [(PrefixSharing::Scope, 0), (PrefixSharing::All, 38)] {
        let limits = sapwood_engine::Config {
            prefix_sharing,
            ..sapwood_engine::Config::default()
        };
        let engine = Engine::spawn(sapwood_tests::scripted(parrot()), limits).unwrap();
        let kernel = kernel("parrot", engine);
        let keys = ["anna", "ben"].map(|name| ApiKey {
            allowance: Some(Arc::new(TokenMeter::new(
                name,
                rate_limit::RateLimits::default(),
            ))),
            ..sapwood_tests::key(name, name)
        });
        let server = Running::start(kernel, Default::default(), keys.into()).await;
        let mut cached = Vec::new();
        for key in ["anna", "ben", "anna", "ben"] {
            let bearer = format!("Bearer {key}");
            let headers = [
                ("sec-websocket-protocol", "lmtp.v2"),
                ("authorization", &bearer),
            ];
            let mut socket = Socket::open(&server, "/lmtp", &headers).await.unwrap();
            let text = "the beginning of everything that I ask";
            let ask = json!({"model": "parrot", "prompt_text": text, "stream_id": 1});
            socket.send_text(&format!("GENERATE {ask}")).await;
            let items = stream(&mut socket, 1).await;
            cached.push(items.last().unwrap()["usage"]["cached_tokens"].clone());
        }
        assert_eq!(cached, [0, theirs, 38, 38], "{prefix_sharing:?}");
    }
}

#[tokio::test]
async fn lm_912_control_tokens_are_text_on_request() {
    let server = of_parrot().await;
    let mut socket = negotiated(&server).await;
    for (skip, reply) in [("true", "Hi"), ("false", "Hi</s></s>")] {
        let ask = format!(
            r#"GENERATE {{"model":"parrot","prompt_text":"Hi","ignore_eos":true,"max_tokens":4,"skip_special":{skip},"stream_id":1}}"#
        );
        socket.send_text(&ask).await;
        assert_eq!(text(&stream(&mut socket, 1).await), reply);
    }
}

/// LM-905, LM-913, LM-915
#[tokio::test]
async fn lm_905_the_subprotocol_enables_every_feature() {
    let server = of_parrot().await;
    let mut socket = negotiated(&server).await;
    socket
        .send_text(r#"TOKENIZE {"stream_id":1,"model":"parrot","text":"Hi"}"#)
        .await;
    let tokens = message(&mut socket).await.1[0]["tokens"].clone();
    assert!(
        [json!([256, 72, 105]), json!([72, 105])].contains(&tokens),
        "{tokens}"
    );
    socket
        .send_text(r#"DETOKENIZE {"stream_id":1,"model":"parrot","tokens":[72,105]}"#)
        .await;
    assert_eq!(message(&mut socket).await.1[0]["text"], json!("Hi"));
    let ask = r#"GENERATE {"model":"parrot","prompt_text":"Hello","stop":"lo","stream_id":2}"#;
    socket.send_text(ask).await;
    let items = stream(&mut socket, 2).await;
    assert_eq!(text(&items), "Hel");
    assert_eq!(
        items.last().unwrap()["stop_match"],
        json!("lo"),
        "{items:?}"
    );
    let ask =
        r#"GENERATE {"model":"parrot","messages":[{"role":"user","content":"Yes"}],"stream_id":3}"#;
    socket.send_text(ask).await;
    assert_eq!(text(&stream(&mut socket, 3).await), "Yes");
    let ask = r#"GENERATE {"model":"parrot","messages":[{"content":7}],"stream_id":4}"#;
    socket.send_text(ask).await;
    assert_eq!(
        tokens_and_end(&stream(&mut socket, 4).await).1,
        "invalid_value"
    );
}

#[tokio::test]
async fn lm_961_a_cancelled_stream_frees_its_sequence() {
    let (mut owner, server) = stepped(chatter()).await;
    let mut socket = negotiated(&server).await;
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    let ask = r#"GENERATE {"model":"parrot","prompt":[1],"max_tokens":500,"stream_id":1}"#;
    socket.send_text(ask).await;
    until("it is open", || open.get() == 1).await;
    owner.step(Time::ZERO);
    assert_eq!(message(&mut socket).await.0, "TOKEN");
    socket
        .send_text(r#"CANCEL {"stream_id":2,"model":"parrot","streams":[1,77]}"#)
        .await;
    let items = stream(&mut socket, 1).await;
    assert_eq!(items.last().unwrap()["finish_reason"], json!("cancelled"));
    let answer = message(&mut socket).await.1;
    assert_eq!(
        (&answer[0]["cancelled"], &answer[0]["unknown"]),
        (&json!([1]), &json!([77]))
    );
    owner.step(Time::from_millis(1));
    assert!(owner.is_empty());
}

/// Each sample is a sequence of the engine.
#[tokio::test]
async fn lm_973_a_stream_has_the_items_of_all_its_samples() {
    let server = of_parrot().await;
    let mut socket = negotiated(&server).await;
    let ask = r#"GENERATE {"model":"parrot","prompt":[72],"n":3,"stream_id":1}"#;
    socket.send_text(ask).await;
    let items = stream(&mut socket, 1).await;
    for sample in 0..3 {
        let tokens: Vec<_> = items
            .iter()
            .filter(|item| item["sample"] == json!(sample))
            .filter_map(|item| item["token"].as_u64())
            .collect();
        assert_eq!(tokens, [72, 257]);
    }
}

#[tokio::test]
async fn lm_914_scored_text_has_text_and_alternatives() {
    let server = of_parrot().await;
    let mut socket = negotiated(&server).await;
    let ask = r#"SCORE {"model":"parrot","prompt_text":"ab","scored_text":"ab","top_logprobs":1,"stream_id":1}"#;
    socket.send_text(ask).await;
    let items = stream(&mut socket, 1).await;
    assert_eq!(tokens_and_end(&items), (vec![97, 98], "stop".into()));
    assert_eq!(text(&items), "ab");
    // The parrot repeats its prompt, so it gives these tokens the highest probability.
    for (item, token) in items.iter().zip(["97", "98"]) {
        assert_eq!(item["top_logprobs"][token], item["logprob"]);
    }
}

/// LM-312
#[tokio::test]
async fn lm_974_prompt_logprobs_are_in_the_first_item() {
    let server = of_parrot().await;
    let mut socket = negotiated(&server).await;
    for (ask, scored) in [
        (r#"GENERATE {"prompt":[97,98,99],"n":2"#, 3),
        (r#"GENERATE {"prompt":[97,98,99]"#, 3),
        (r#"GENERATE {"prompt_text":"a""#, 2),
        (r#"GENERATE {"prompt":[97]"#, 1),
        (r#"SCORE {"prompt":[97,98],"scored":[99,97]"#, 2),
        (r#"SCORE {"prompt":[],"scored":[99,97]"#, 0),
    ] {
        socket
            .send_text(&format!(
                r#"{ask},"model":"parrot","prompt_logprobs":true,"stream_id":1}}"#
            ))
            .await;
        let mut items = stream(&mut socket, 1).await;
        items.retain(|item| item["sample"].as_u64().unwrap_or_default() == 0);
        let received = items[0]["prompt_logprobs"].as_array().unwrap();
        assert_eq!(received.len(), scored, "{ask}");
        for (at, logprob) in received.iter().enumerate() {
            let is_known = logprob.as_f64().is_some_and(|logprob| logprob <= 0.0);
            assert!(
                if at == 0 { logprob.is_null() } else { is_known },
                "{logprob}"
            );
        }
        assert!(
            items[1..]
                .iter()
                .all(|item| item["prompt_logprobs"].is_null())
        );
    }
}

#[tokio::test]
async fn lm_945_only_tokens_of_the_mask_are_sampled() {
    let server = of_parrot().await;
    let mut socket = negotiated(&server).await;
    let mask = r#"MASK {"model":"parrot","mask":"k","allow":[[98,99]],"stream_id":1}"#;
    socket.send_text(mask).await;
    let answer = message(&mut socket).await.1;
    assert_eq!(answer[0]["mask"]["allowed"], json!(2));
    let ask =
        r#"GENERATE {"model":"parrot","prompt":[97,98],"mask":"k","max_tokens":9,"stream_id":1}"#;
    socket.send_text(ask).await;
    let (tokens, end) = tokens_and_end(&stream(&mut socket, 1).await);
    assert_eq!((tokens.len(), &*end), (9, "length"));
    assert!(tokens.iter().all(|token| [98, 99].contains(token)));
}

#[tokio::test]
async fn lm_973_sample_i_equals_a_stream_whose_seed_is_greater_by_i() {
    let kernel = kernel("chatter", spawned(chatter()));
    let server = Running::start(kernel, Default::default(), Vec::new()).await;
    let mut socket = negotiated(&server).await;
    let ask = |seed: u32, n: &str, id: u32| {
        format!(
            r#"GENERATE {{"model":"chatter","prompt":[5],"max_tokens":4,"temperature":1,"seed":{seed},"stream_id":{id}{n}}}"#
        )
    };
    let mut alone = Vec::new();
    for seed in [10, 11] {
        socket.send_text(&ask(seed, "", 1)).await;
        alone.push(tokens_and_end(&stream(&mut socket, 1).await).0);
    }
    assert_ne!(alone[0], alone[1]);
    socket.send_text(&ask(10, r#","n":2"#, 2)).await;
    let items = stream(&mut socket, 2).await;
    for (sample, alone) in alone.iter().enumerate() {
        let own = items.iter().filter(|item| item["sample"] == json!(sample));
        let own: Vec<_> = own.cloned().collect();
        assert_eq!(&tokens_and_end(&own).0, alone);
        assert_eq!(own.last().unwrap()["sample_end"], json!("length"));
    }
}

/// A server whose engine the test steps, and that sends STATUS for every change.
async fn talkative(config: scripted::Config) -> (EngineOwner, Engine, Running) {
    let (owner, engine) = by_hand(config);
    let limits = ConnectionLimits {
        status_after: Duration::ZERO,
        status_interval: Duration::ZERO,
        ..ConnectionLimits::default()
    };
    let config = lmtp::Config {
        limits: Arc::new(limits),
        ..lmtp::Config::default()
    };
    let server = with_config(kernel("parrot", engine.clone()), config).await;
    (owner, engine, server)
}

/// The events of this stream, in order: its next STATUS.
async fn next(socket: &mut Socket, id: u64) -> (String, Value) {
    loop {
        let (word, items) = message(socket).await;
        let mut own = items.into_iter().filter(|item| item["stream_id"] == id);
        if let Some(item) = own.next() {
            return (word, item);
        }
    }
}

/// LM-922: `running` is sent with the first item, because the stream was reported as queued.
#[tokio::test]
async fn lm_921_status_reports_queueing_prefill_and_running() {
    let one_place = scripted::Config {
        parallel: 1,
        ..chatter()
    };
    let (mut owner, engine, server) = talkative(one_place).await;
    let (mut base, mut socket) = (client(&server).await, negotiated(&server).await);
    base.send_text(r#"GENERATE {"model":"parrot","prompt":[1],"max_tokens":900,"stream_id":1}"#)
        .await;
    let at = Time::from_millis;
    until("the first has the slot", || {
        !owner.step(at(0)).admitted.is_empty()
    })
    .await;
    let prompt = vec!["1"; 600].join(",");
    let ask = format!(
        r#"GENERATE {{"model":"parrot","prompt":[{prompt}],"max_tokens":3,"stream_id":2}}"#
    );
    socket.send_text(&ask).await;
    until("the second waits", || {
        owner.step(at(0));
        engine.stats().requests_waiting.get() == 1
    })
    .await;
    owner.step(at(100));
    let (word, reply) = next(&mut socket, 2).await;
    assert_eq!(word, "STATUS");
    assert_eq!(
        (&reply["event"], &reply["queue_pos"]),
        (&json!("queued"), &json!(0))
    );
    // STATUS is repeated while the stream waits.
    owner.step(at(200));
    assert_eq!(next(&mut socket, 2).await.1["event"], json!("queued"));
    // A base client receives only tokens.
    for _ in 0..3 {
        assert_eq!(message(&mut base).await.0, "TOKEN");
    }
    drop(base);
    until("the second has the slot", || {
        !owner.step(at(200)).admitted.is_empty()
    })
    .await;
    let mut progress = 0.0;
    for ms in [300, 400] {
        owner.step(at(ms));
        let (word, reply) = next(&mut socket, 2).await;
        assert_eq!((&*word, &reply["event"]), ("STATUS", &json!("prefill")));
        let received = reply["progress"].as_f64().unwrap();
        assert!(progress < received && received < 1.0, "{reply}");
        progress = received;
    }
    while !owner.is_empty() {
        owner.step(at(401));
    }
    let (word, reply) = next(&mut socket, 2).await;
    assert_eq!((&*word, &reply["event"]), ("STATUS", &json!("running")));
    let items = stream(&mut socket, 2).await;
    assert_eq!(
        (items.len(), tokens_and_end(&items).1.as_str()),
        (3, "length")
    );
}

#[tokio::test]
async fn lm_921_a_preempted_stream_is_reported_as_throttled() {
    let small = scripted::Config {
        parallel: 2,
        context_tokens: 250,
        cells: Some(300),
        kept_prefixes: 0,
        ..chatter()
    };
    let (mut owner, engine, server) = talkative(small).await;
    let mut socket = negotiated(&server).await;
    for id in [1, 2] {
        let ask = format!(
            r#"GENERATE {{"model":"parrot","prompt":[{id}],"max_tokens":200,"stream_id":{id}}}"#
        );
        socket.send_text(&ask).await;
    }
    until("both are in", || {
        owner.step(Time::ZERO);
        engine.stats().requests_running.get() == 2
    })
    .await;
    let mut steps = 0;
    until("one was preempted", || {
        steps += 1;
        assert!(steps < 1_000, "there is room for both");
        !owner.step(Time::ZERO).preempted.is_empty()
    })
    .await;
    owner.step(Time::from_millis(100));
    let reply = loop {
        let (word, items) = message(&mut socket).await;
        if word == "STATUS" {
            break items[0].clone();
        }
    };
    assert_eq!(
        (&reply["stream_id"], &reply["event"]),
        (&json!(2), &json!("throttled"))
    );
    assert!(reply["retry_after_ms"].is_u64(), "{reply}");
    while !owner.is_empty() {
        owner.step(Time::from_millis(100));
    }
    let items = stream(&mut socket, 2).await;
    assert_eq!(tokens_and_end(&items).1, "length", "it went on");
}
