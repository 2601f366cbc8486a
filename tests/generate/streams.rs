//! `/generate` and `/generate_stream`: exact responses, what decides the status, and disconnects (sections 5, 6).

use sapwood_engine::scripted::{Script, ScriptFinish, ScriptStep, ScriptedFailure, TransportCut};
use sapwood_server::faces::generate::Config;
use sapwood_tests::http::{Wire, post};
use sapwood_tests::{Running, by_hand, until};
use serde_json::{Value, json};

use super::{ask, demo, error, kernel, playing, script, steps};

const STREAM: &str = "text/event-stream; charset=utf-8";

/// TR-205, TR-502, TR-503
#[tokio::test]
async fn tr_501_generate_returns_one_response_with_an_exact_head() {
    let server = demo().await;
    let body = r#"{"id":"a1","text_input":"green tea"}"#;
    // curl's default content type, and none.
    for headers in [
        &["content-type: application/x-www-form-urlencoded"][..],
        &[],
    ] {
        let mut wire = Wire::connect(server.address).await;
        let answer = wire
            .ask(post("/v2/models/demo/generate", headers, body.as_bytes()))
            .await;
        let expect =
            r#"{"id":"a1","model_name":"demo","model_version":"1","text_output":"green tea"}"#;
        assert_eq!(answer.summary(), (200, "application/json".into(), expect));
        assert_eq!(
            answer.head.header("content-length"),
            Some(expect.len().to_string())
        );
    }
    let answer = ask(&server, "/v2/models/demo/generate", r#"{"text_input":"x"}"#).await;
    assert_eq!(
        answer.text(),
        r#"{"model_name":"demo","model_version":"1","text_output":"x"}"#
    );
}

/// TR-406, TR-607
#[tokio::test]
async fn tr_601_a_stream_consists_of_events_only() {
    let server = demo().await;
    let body = r#"{"id":"a1","text_input":"Say two words","stream":true,"max_tokens":"16"}"#;
    let answer = ask(&server, "/v2/models/demo/generate_stream", body).await;
    assert_eq!(answer.summary().0, 200);
    assert_eq!(answer.summary().1, STREAM);
    assert_eq!(
        answer.head.header("cache-control").as_deref(),
        Some("no-cache")
    );
    assert_eq!(
        answer.head.header("x-accel-buffering").as_deref(),
        Some("no")
    );
    let begin = r#"data: {"id":"a1","model_name":"demo","model_version":"1","text_output":""#;
    let events: Vec<&str> = answer.text().split_inclusive("\n\n").collect();
    assert!(events.len() > 1);
    assert!(
        events
            .iter()
            .all(|event| event.starts_with(begin) && event.ends_with("\"}\n\n")),
        "{events:?}"
    );
    let text: String = answer
        .events()
        .iter()
        .map(|event| event["text_output"].as_str().unwrap())
        .collect();
    assert_eq!(text, "Say two words");
    let whole = ask(
        &server,
        "/v2/models/demo/generate",
        r#"{"text_input":"Say two words"}"#,
    )
    .await;
    assert_eq!(whole.json()["text_output"], text);
    let one = ask(
        &server,
        "/v2/models/demo/generate_stream",
        r#"{"text_input":"Say two words"}"#,
    )
    .await;
    assert_eq!(one.events().len(), 1);
    assert_eq!(one.events()[0]["text_output"], "Say two words");
}

/// A function that steps the engine and returns whether there was a batch; a stream of the words of a prompt.
async fn stepped(prompt: &str) -> (impl FnMut() -> bool, Running, Wire) {
    let (mut owner, engine) = by_hand(script(Script::Words));
    let kernel = sapwood_kernel::Kernel::new();
    kernel.add(sapwood_kernel::model("m", engine)).unwrap();
    let server = Running::generating(kernel, Config::default()).await;
    let mut wire = Wire::connect(server.address).await;
    let body = format!(r#"{{"text_input":"{prompt}","stream":true}}"#);
    let request = post("/v2/models/m/generate_stream", &[], body.as_bytes());
    wire.send(request).await;
    let mut time = 0;
    let step = move || {
        time += 1;
        let step = owner.step(sapwood_proto::time::Time::from_millis(time));
        step.appended > 0
    };
    (step, server, wire)
}

/// TR-606
#[tokio::test(flavor = "multi_thread")]
async fn tr_602_the_head_waits_for_the_first_response_and_each_event_is_one_chunk() {
    let (mut step, _server, mut wire) = stepped("one two").await;
    let reading = tokio::spawn(async move {
        let head = wire.head().await;
        (head, wire)
    });
    assert!(!reading.is_finished());
    while !step() {
        tokio::task::yield_now().await;
    }
    let (head, mut wire) = reading.await.unwrap();
    assert_eq!(head.status, 200);
    // Each event is sent before there is another.
    for word in ["one", " two"] {
        let chunk = String::from_utf8(wire.chunk().await.unwrap()).unwrap();
        let event = chunk.strip_prefix("data: ").unwrap();
        let event = event.strip_suffix("\n\n").unwrap();
        let event: Value = serde_json::from_str(event).unwrap();
        assert_eq!(event["text_output"], word);
        step();
    }
    assert_eq!(wire.chunk().await.unwrap_or_default(), b"");
}

/// Events that are ready in one poll are sent together (D-6): on one thread, nothing polls while tokens are generated.
#[tokio::test]
async fn tr_606_events_that_are_ready_together_are_one_chunk() {
    let (mut step, _server, mut wire) = stepped("one two three four").await;
    while !step() {
        tokio::task::yield_now().await;
    }
    assert_eq!(wire.head().await.status, 200);
    let mut reply = vec![wire.chunk().await.unwrap()];
    (0..10).for_each(|_| {
        step();
    });
    while let Some(chunk) = wire.chunk().await
        && !chunk.is_empty()
    {
        reply.push(chunk);
    }
    let counts: Vec<usize> = reply
        .iter()
        .map(|chunk| String::from_utf8_lossy(chunk).matches("data: ").count())
        .collect();
    assert_eq!(counts, [1, 3]);
}

/// TR-105, TR-505, TR-605
#[tokio::test]
async fn tr_604_a_first_error_decides_the_status_and_a_later_one_is_an_event() {
    let failure = |code: &str| {
        ScriptStep::Error(ScriptedFailure {
            code: code.into(),
            message: "the parrot is tired".into(),
        })
    };
    let received = r#"{"error":"the parrot is tired"}"#;
    let body = r#"{"text_input":"x","stream":true}"#;
    for (code, status) in [
        ("internal", 500),
        ("unavailable", 503),
        ("invalid-request", 400),
        ("unimplemented", 501),
    ] {
        let server = playing(vec![failure(code)]).await;
        let answer = ask(&server, "/v2/models/m/generate", body).await;
        assert_eq!(
            answer.summary(),
            (status, "application/json".into(), received),
            "{code}"
        );
        let answer = ask(&server, "/v2/models/m/generate_stream", body).await;
        assert_eq!(
            answer.summary(),
            (
                status,
                STREAM.into(),
                format!("data: {received}\n\n").as_str()
            ),
            "{code}"
        );
    }
    let server = playing(vec![ScriptStep::Text("x".into()), failure("internal")]).await;
    let answer = ask(&server, "/v2/models/m/generate_stream", body).await;
    assert_eq!(answer.summary().0, 200);
    let events = answer.events();
    assert_eq!(events.len(), 2);
    assert_eq!(events[0]["text_output"], "x");
    assert_eq!(events[1], json!({"error": "the parrot is tired"}));
    // An error before any work is plain JSON, at both endpoints.
    for tail in ["generate", "generate_stream"] {
        let answer = ask(
            &server,
            &format!("/v2/models/m/{tail}"),
            r#"{"text_input":"x","top_p":7}"#,
        )
        .await;
        assert_eq!(answer.summary().1, "application/json");
        assert_eq!(
            error(&answer),
            "parameter 'top_p' must be in (0, 1], got 7.0"
        );
    }
}

/// TR-603
#[tokio::test]
async fn tr_504_generate_needs_one_response_and_a_stream_may_have_none() {
    let text = "generate expects model to produce exactly 1 response, use generate stream for model that generates \
                various number of responses";
    let several = demo().await;
    let none = playing(vec![ScriptStep::Finish(ScriptFinish::Stop)]).await;
    for (server, path) in [(&several, "demo"), (&none, "m")] {
        let body = r#"{"text_input":"one two three","stream":true}"#;
        let answer = ask(server, &format!("/v2/models/{path}/generate"), body).await;
        assert_eq!(
            (answer.summary().0, error(&answer).as_str()),
            (500, text),
            "{path}"
        );
    }
    let answer = ask(
        &none,
        "/v2/models/m/generate_stream",
        r#"{"text_input":"x","stream":true}"#,
    )
    .await;
    assert_eq!(answer.summary(), (200, STREAM.into(), ""));
    // Without streaming there is always one response.
    let answer = ask(&none, "/v2/models/m/generate", r#"{"text_input":"x"}"#).await;
    assert_eq!(answer.json()["text_output"], "");
    // If there is an error among the responses, it is the result.
    let failing = playing(vec![
        ScriptStep::Text("a".into()),
        ScriptStep::Error(ScriptedFailure {
            code: "internal".into(),
            message: "broken".into(),
        }),
    ])
    .await;
    let answer = ask(
        &failing,
        "/v2/models/m/generate",
        r#"{"text_input":"x","stream":true}"#,
    )
    .await;
    assert_eq!(error(&answer), "broken");
}

/// OA-801: each counts as cancelled by the client.
#[tokio::test]
async fn tr_608_a_disconnect_frees_the_sequence_at_once() {
    let config = steps(vec![ScriptStep::Text("a".into()), ScriptStep::Hang(true)]);
    let engine = sapwood_tests::spawned(config);
    let kernel = sapwood_kernel::Kernel::new();
    kernel
        .add(sapwood_kernel::model("m", engine.clone()))
        .unwrap();
    let server = Running::generating(kernel, Config::default()).await;
    let running = |engine: &sapwood_engine::Engine| engine.stats().requests_running.get();
    for path in ["/v2/models/m/generate_stream", "/v2/models/m/generate"] {
        let mut wire = Wire::connect(server.address).await;
        wire.send(post(path, &[], br#"{"text_input":"x","stream":true}"#))
            .await;
        until("the sequence runs", || running(&engine) == 1).await;
        if path.ends_with("stream") {
            assert_eq!(wire.head().await.status, 200);
            wire.chunk().await.unwrap();
        }
        drop(wire);
        until("the sequence is gone", || running(&engine) == 0).await;
    }
    let cancelled = &server.shared.metrics.cancelled;
    let removed = cancelled.with_label_values(&["client"]);
    until("both are counted", || removed.get() == 2).await;
    let mut wire = Wire::connect(server.address).await;
    assert_eq!(wire.get("/v2/health/ready").await.summary().0, 200);
}

/// D-11: a script that cuts the transport ends the connection without the end of the stream.
#[tokio::test]
async fn tr_1105_a_script_can_cut_the_connection() {
    for cut in [TransportCut::Close, TransportCut::Reset] {
        let server = playing(vec![
            ScriptStep::Text("one ".into()),
            ScriptStep::SleepMs(20),
            ScriptStep::Cut(cut),
        ])
        .await;
        let body = r#"{"text_input":"x","stream":true}"#;
        let answer = ask(&server, "/v2/models/m/generate_stream", body).await;
        assert_eq!(answer.summary().0, 200);
        assert!(!answer.complete);
        let answer = ask(&server, "/v2/models/m/generate", r#"{"text_input":"x"}"#).await;
        assert_eq!(answer.summary().0, 500);
    }
    let server = playing(vec![ScriptStep::Panic(true)]).await;
    let answer = ask(&server, "/v2/models/m/generate", r#"{"text_input":"x"}"#).await;
    assert_eq!(answer.summary().0, 500);
    assert_eq!(
        ask(&server, "/v2/models/m/generate", "{").await.summary().0,
        400
    );
}

/// OA-801: each counts as timed out.
#[tokio::test]
async fn tr_404_a_request_that_takes_too_long_is_unavailable() {
    let server = playing(vec![ScriptStep::Text("a".into()), ScriptStep::Hang(true)]).await;
    let text = "[request id: 5] Request timeout expired";
    let answer = ask(
        &server,
        "/v2/models/m/generate",
        r#"{"id":"5","text_input":"x","timeout":20000}"#,
    )
    .await;
    assert_eq!((answer.summary().0, error(&answer).as_str()), (503, text));
    let body = r#"{"id":"5","text_input":"x","timeout":20000,"stream":true}"#;
    let answer = ask(&server, "/v2/models/m/generate_stream", body).await;
    assert_eq!(answer.events().last().unwrap()["error"], text);
    let mut wire = Wire::connect(server.address).await;
    let head = ["x-request-timeout-ms: 100"];
    let answer = wire
        .ask(post(
            "/v2/models/m/generate",
            &head,
            br#"{"id":"5","text_input":"x"}"#,
        ))
        .await;
    assert_eq!((answer.summary().0, error(&answer).as_str()), (503, text));
    let cancelled = &server.shared.metrics.cancelled;
    let counted = ["timeout", "client"].map(|why| cancelled.with_label_values(&[why]).get());
    assert_eq!(counted, [3, 0]);
}

#[tokio::test]
async fn tr_605_a_full_queue_is_a_json_error_at_both_endpoints() {
    let config = sapwood_engine::Config {
        queue_requests: 1,
        ..sapwood_engine::Config::default()
    };
    let model = sapwood_tests::scripted(script(Script::Echo));
    let (_owner, engine) = sapwood_engine::Engine::by_hand(model, config);
    let kernel = sapwood_kernel::Kernel::new();
    kernel
        .add(sapwood_kernel::model("m", engine.clone()))
        .unwrap();
    let server = Running::generating(kernel, Config::default()).await;
    let prompt = sapwood_engine::api::Prompt::Text("x".into());
    let _waiting = engine
        .submit(sapwood_engine::api::GenerationRequest::new(prompt))
        .unwrap();
    for tail in ["generate", "generate_stream"] {
        let answer = ask(
            &server,
            &format!("/v2/models/m/{tail}"),
            r#"{"id":"q","text_input":"x"}"#,
        )
        .await;
        assert_eq!(
            (answer.summary().0, answer.summary().1.as_str()),
            (503, "application/json")
        );
        assert_eq!(error(&answer), "[request id: q] Exceeds maximum queue size");
        assert!(answer.head.header("retry-after").is_some());
    }
}

#[tokio::test]
async fn tr_610_two_hundred_concurrent_streams_complete() {
    let server =
        Running::generating(kernel(&[("m", script(Script::Words))]), Config::default()).await;
    let streams = (0..200).map(|index| {
        let address = server.address;
        async move {
            let body = format!(r#"{{"id":"{index}","text_input":"one two three","stream":true}}"#);
            let mut wire = Wire::connect(address).await;
            wire.post("/v2/models/m/generate_stream", &body).await
        }
    });
    for answer in futures::future::join_all(streams).await {
        let text: String = answer
            .events()
            .iter()
            .map(|event| event["text_output"].as_str().unwrap())
            .collect();
        assert_eq!(text, "one two three");
    }
}

/// A stream whose tokens have no text, as those of a model that repeats its EOG token, comes in parts as well: what is
/// reported of the tokens does not wait for the end in memory.
#[tokio::test]
async fn tr_406_log_probabilities_of_tokens_without_text_are_sent_in_parts() {
    let server = demo().await;
    let body = json!({"text_input": "one", "stream": true, "ignore_eos": true, "max_tokens": 1000, "logprobs": 2,
        "return_logprobs": true, "return_num_output_tokens": true, "return_finish_reason": true});
    for choices in [1, 2] {
        let mut body = body.clone();
        body["n"] = choices.into();
        let answer = ask(
            &server,
            "/v2/models/demo/generate_stream",
            &body.to_string(),
        )
        .await;
        let events = answer.events();
        let tokens: Vec<u64> = events
            .iter()
            .map(|event| &event["num_output_tokens"])
            .map(|tokens| {
                tokens
                    .as_u64()
                    .unwrap_or_else(|| tokens[0].as_u64().unwrap())
            })
            .collect();
        assert_eq!(tokens.iter().sum::<u64>(), 1000, "{tokens:?}");
        assert!(tokens.iter().all(|&tokens| tokens <= 320), "{tokens:?}");
        let reason = &events[events.len() - 1]["finish_reason"];
        assert!(reason == "length" || reason[0] == "length");
    }
}
