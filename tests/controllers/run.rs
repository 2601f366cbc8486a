//! Runs: the stream to the letter, and its errors.

use std::time::Duration;

use super::*;

/// The body of a run of these moves.
fn moves(arg: &str) -> String {
    format!(r#"{{"controller":"moves","controller_arg":"{arg}","prompt":"ab"}}"#)
}

async fn run(server: &Running, body: &str) -> Answer {
    ask(server, "", "POST", "/v1/run", body.as_bytes()).await
}

/// The events of a run, checked against the rules that its client relies on (AI-913).
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.head.status, 200, "{}", answer.text());
    assert_eq!(
        answer.head.header("content-type").as_deref(),
        Some("text/event-stream")
    );
    assert!(answer.complete);
    let mut events = Vec::new();
    let mut ended = false;
    for line in answer.text().lines().filter(|line| !line.is_empty()) {
        assert!(!ended, "nothing follows the end: {line}");
        let data = line
            .strip_prefix("data: ")
            .unwrap_or_else(|| panic!("bad response line: {line}"));
        if data == "[DONE]" {
            ended = true;
        } else {
            events.push(serde_json::from_str(data).unwrap());
        }
    }
    assert!(ended && answer.text().ends_with("data: [DONE]\n\n"));
    let first: &Value = &events[0];
    assert_eq!(first["object"], "initial-run");
    assert!(first["id"].as_str().unwrap().starts_with("run-") && first["created"].is_u64());
    assert!(events.len() > 1, "at least one run");
    for event in &events[1..] {
        assert_eq!(event["object"], "run");
        for count in ["sampled_tokens", "ff_tokens", "cost"] {
            assert!(event["usage"][count].is_u64(), "{event}");
        }
        for fork in event["forks"].as_array().unwrap() {
            assert!(
                fork["index"].is_u64() && fork["storage"].is_array(),
                "{event}"
            );
            for text in ["text", "error", "logs"] {
                assert!(fork[text].is_string(), "{event}");
            }
        }
    }
    events
}

/// All text of a sequence, and how it ended.
fn text_and_end(events: &[Value], index: u64) -> (String, String) {
    let (mut text, mut end) = (String::new(), String::new());
    for event in &events[1..] {
        for fork in event["forks"].as_array().unwrap() {
            if fork["index"] == index {
                text.push_str(fork["text"].as_str().unwrap());
                end.push_str(fork["finish_reason"].as_str().unwrap_or_default());
            }
        }
    }
    (text, end)
}

#[tokio::test]
async fn ai_912_a_run_is_one_event_for_each_step_and_its_end() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let answer = run(&server, &moves("=yes")).await;
    let events = events(&answer);
    assert_eq!(events[0]["model"], "demo");
    assert_eq!(text_and_end(&events, 0), ("yes".into(), "aici-stop".into()));
    let usage = |event: &Value| event["usage"].to_string();
    // The prompt is BOS and two bytes.
    assert_eq!(
        usage(&events[1]),
        r#"{"sampled_tokens":1,"ff_tokens":3,"cost":5}"#
    );
    let last = events.last().unwrap();
    assert_eq!(
        usage(last),
        r#"{"sampled_tokens":3,"ff_tokens":5,"cost":11}"#
    );
    assert_eq!(
        answer.head.header("cache-control").as_deref(),
        Some("no-store")
    );
}

#[tokio::test]
async fn ai_911_none_is_a_plain_completion_that_ends_at_eos() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let body = r#"{"controller":"none","controller_arg":"hello"}"#;
    let events = events(&run(&server, body).await);
    // The model repeats its prompt.
    assert_eq!(text_and_end(&events, 0), ("hello".into(), "eos".into()));
    let body = r#"{"controller":"none","controller_arg":"hello","max_tokens":2}"#;
    let events = events_of(&server, body).await;
    assert_eq!(text_and_end(&events, 0), ("he".into(), "length".into()));
}

async fn events_of(server: &Running, body: &str) -> Vec<Value> {
    events(&run(server, body).await)
}

#[tokio::test]
async fn ai_911_a_request_that_cannot_run_has_a_status() {
    let (server, _) = server(&["demo"], keys()).await;
    for (body, status, code) in [
        ("{", 400, "invalid_json"),
        ("{}", 400, "invalid_value"),
        (
            r#"{"controller":"moves","n":2}"#,
            400,
            "unsupported_operation",
        ),
        (r#"{"controller":"nothing"}"#, 404, "controller_not_found"),
        (r#"{"controller":"private"}"#, 403, "insufficient_scope"),
        (r#"{"controller":"bad"}"#, 400, "invalid_grammar"),
        (
            r#"{"controller":"moves","model":"other"}"#,
            404,
            "model_not_found",
        ),
        (
            r#"{"controller":"moves","prompt":"abc","max_tokens":1000000}"#,
            400,
            "context_length_exceeded",
        ),
    ] {
        let answer = ask(&server, "app", "POST", "/v1/run", body.as_bytes()).await;
        assert_eq!(error(&answer), (status, code.into()), "{body}");
    }
}

/// AI-911: a prompt that fits with `max_tokens`, and one token more.
#[tokio::test]
async fn ai_911_prompt_and_max_tokens_fit_the_context_together() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let context = scripted::Config::default().context_tokens;
    let body = |max: u32| {
        format!(
            r#"{{"controller":"moves","controller_arg":"=a","prompt":"ab","max_tokens":{max}}}"#
        )
    };
    // BOS and two bytes.
    events_of(&server, &body(context - 3)).await;
    let over = run(&server, &body(context - 2)).await;
    assert_eq!(error(&over), (400, "context_length_exceeded".into()));
    assert!(
        over.json()["message"]
            .as_str()
            .unwrap()
            .contains("maximum context length is")
    );
}

#[tokio::test]
async fn ai_911_one_of_several_models_must_be_named() {
    let (server, _) = server(&["a", "b"], Vec::new()).await;
    let none = run(&server, &moves("=x")).await;
    assert_eq!(error(&none), (400, "invalid_value".into()));
    let named = r#"{"controller":"moves","controller_arg":"=x","model":"b"}"#;
    assert_eq!(events_of(&server, named).await[0]["model"], "b");
    // The prefix names it as well.
    let body = moves("=x");
    let answer = ask(&server, "", "POST", "/aici/a/v1/run", body.as_bytes()).await;
    assert_eq!(events(&answer)[0]["model"], "a");
}

#[tokio::test]
async fn ai_915_a_controller_that_fails_in_init_is_an_event() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let events = events_of(&server, &moves("?no luck")).await;
    assert_eq!(events.len(), 2);
    let fork = &events[1]["forks"][0];
    assert!(
        fork["error"].as_str().unwrap().contains("no luck"),
        "{fork}"
    );
    assert_eq!(text_and_end(&events, 0), (String::new(), "fail".into()));
}

#[tokio::test]
async fn ai_915_a_failure_after_some_text_ends_with_that_text() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let events = events_of(&server, &moves("=ab;!it trapped")).await;
    assert_eq!(text_and_end(&events, 0), ("ab".into(), "fail".into()));
    let last = &events.last().unwrap()["forks"][0];
    assert!(
        last["error"].as_str().unwrap().contains("it trapped"),
        "{last}"
    );
}

#[tokio::test]
async fn ai_914_a_backtrack_is_shown_in_the_text() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let events = events_of(&server, &moves("=abc;<2;=x")).await;
    let (text, end) = text_and_end(&events, 0);
    assert_eq!((&*text, &*end), ("abc ↩ x", "aici-stop"));
}

#[tokio::test]
async fn ai_914_forced_text_is_not_sampled() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let events = events_of(&server, &moves("+xyz;=a")).await;
    assert_eq!(
        text_and_end(&events, 0),
        ("xyza".into(), "aici-stop".into())
    );
    let usage = &events.last().unwrap()["usage"];
    assert_eq!(
        (&usage["sampled_tokens"], &usage["ff_tokens"]),
        (&1.into(), &6.into())
    );
}

/// A run of one token.
const NEXT: &str = r#"{"controller":"none","controller_arg":"x","max_tokens":1}"#;

/// A client that is gone ends its run: the model has a place for one request only.
#[tokio::test]
async fn ai_915_a_run_ends_with_its_client() {
    let kernel = Kernel::new();
    let (steering, _) = steering();
    let config = scripted::Config {
        parallel: 1,
        script: scripted::Script::Tokens,
        count: 1 << 20,
        tokens_per_s: 200.0,
        ..scripted::Config::default()
    };
    kernel
        .add(steered_model("demo", spawned(config), steering))
        .unwrap();
    let server = Running::start(kernel, Default::default(), Vec::new()).await;
    let mut wire = Wire::connect(server.address).await;
    let body = moves("*");
    wire.send(sapwood_tests::http::post("/v1/run", &[], body.as_bytes()))
        .await;
    assert_eq!(wire.head().await.status, 200);
    drop(wire);
    let next = tokio::time::timeout(Duration::from_secs(20), run(&server, NEXT)).await;
    assert_eq!(text_and_end(&events(&next.unwrap()), 0).1, "length");
}

/// AI-913: nothing but an empty line keeps the connection alive.
#[tokio::test]
async fn ai_913_a_silent_run_sends_empty_lines() {
    let config = Config {
        keep_alive: Duration::from_millis(20),
        head_wait: Duration::ZERO,
        ..Config::default()
    };
    let kernel = Kernel::new();
    let (steering, _) = steering();
    let slow = scripted::Config {
        ttft_ms: 300,
        ..scripted::Config::default()
    };
    kernel
        .add(steered_model("demo", spawned(slow), steering))
        .unwrap();
    let faces = Faces {
        controllers: config,
        ..Faces::default()
    };
    let server = Running::start_faces(server::Config::default(), kernel, faces, Vec::new()).await;
    let answer = run(&server, &moves("=a")).await;
    assert!(
        answer.text().contains("\n\n\n\ndata: "),
        "{}",
        answer.text()
    );
    assert_eq!(text_and_end(&events(&answer), 0).0, "a");
}

#[tokio::test]
async fn d_47_a_run_is_charged_until_its_model_has_it_also_when_the_head_is_out() {
    let kernel = Kernel::new();
    let (steering, _) = steering();
    let model = spawned(scripted::Config::default());
    kernel.add(steered_model("demo", model, steering)).unwrap();
    let gate = CallGate::before(&kernel, "demo");
    let faces = Faces {
        controllers: Config {
            head_wait: Duration::ZERO,
            ..Config::default()
        },
        ..Faces::default()
    };
    let server = Running::start_faces(server::Config::default(), kernel, faces, Vec::new()).await;
    let charged = &server.shared.metrics.body_bytes;
    let mut wire = Wire::connect(server.address).await;
    // As long as a blank is, it is no part of the prompt.
    let body = format!("{}{}", moves("*"), " ".repeat(100_000));
    wire.send(sapwood_tests::http::post("/v1/run", &[], body.as_bytes()))
        .await;
    assert_eq!(wire.head().await.status, 200);
    until("the call waits", || gate.begun() == 1).await;
    assert!(charged.get() >= 100_000, "{}", charged.get());
    gate.open(1);
    until("nothing is charged", || charged.get() == 0).await;
}

/// AI-912
#[tokio::test]
async fn ai_914_forks_are_numbered_and_begin_at_the_fork() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let events = events_of(&server, &moves("=ab;k3;p:x;w:n;#;=z")).await;
    for (index, text) in [(0, "ab0z"), (1, "1z"), (2, "2z")] {
        assert_eq!(
            text_and_end(&events, index),
            (text.into(), "aici-stop".into())
        );
    }
    let all = events[1..]
        .iter()
        .flat_map(|event| event["forks"].as_array().unwrap());
    let logs: String = all
        .clone()
        .map(|fork| fork["logs"].as_str().unwrap())
        .collect();
    assert_eq!(logs, "xxx");
    let written = all.flat_map(|fork| fork["storage"].as_array().unwrap());
    let written: Vec<_> = written.map(|write| &write["WriteVar"]["name"]).collect();
    assert_eq!(written, ["n", "n", "n"]);
}
