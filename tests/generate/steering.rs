//! Controllers and constraints (TR-1305).

use std::sync::Arc;

use sapwood_engine::scripted::{Script, ScriptedSteerers};
use sapwood_kernel::{Kernel, Steering, steered_model};
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::scopes::KeyScope;
use sapwood_server::faces::generate::Config;
use sapwood_server::server;
use sapwood_tests::{Faces, Running, http, spawned};
use serde_json::{Value, json};

use super::{ask, error, script};

/// A kernel with the steered model `m`, and the source of its steerers.
fn steered_kernel() -> (Kernel, Arc<ScriptedSteerers>) {
    let source = Arc::new(ScriptedSteerers::default());
    let steering = Steering::new(Arc::clone(&source) as _);
    let kernel = Kernel::new();
    let engine = spawned(script(Script::Echo));
    kernel.add(steered_model("m", engine, steering)).unwrap();
    (kernel, source)
}

/// A server with that model, without keys.
async fn steered() -> (Running, Arc<ScriptedSteerers>) {
    let (kernel, source) = steered_kernel();
    (Running::generating(kernel, Config::default()).await, source)
}

fn with(members: &Value) -> String {
    let mut body = json!({"text_input": "hi", "return_finish_reason": true});
    let body = body.as_object_mut().map(|body| {
        body.extend(members.as_object().unwrap().clone());
        Value::Object(body.clone())
    });
    body.unwrap().to_string()
}

async fn generate(server: &Running, members: Value) -> (u16, Value) {
    let answer = ask(server, "/v2/models/m/generate", &with(&members)).await;
    (answer.head.status, answer.json())
}

#[tokio::test]
async fn tr_1305_patterns_and_controllers_steer_the_text() {
    let (server, source) = steered().await;
    for (members, text) in [
        (json!({"regex": "a+"}), "a+"),
        (
            json!({"json_schema": {"type": "null"}}),
            r#"{"type":"null"}"#,
        ),
        (json!({"json_schema": "{}"}), "{}"),
        (json!({"grammar": "start: \"a\""}), "start: \"a\""),
        (json!({"sampling_parameters": r#"{"regex": "b"}"#}), "b"),
        (
            json!({"controller": "dictate", "controller_arg": "yes"}),
            "yes",
        ),
        (
            json!({"controller": "dictate", "controller_arg": {"a": 1}}),
            r#"{"a":1}"#,
        ),
        (
            json!({"controller": "rewind", "controller_arg": "Hello|ence"}),
            "Hence",
        ),
    ] {
        let (status, answer) = generate(&server, members.clone()).await;
        assert_eq!(
            (status, &answer["text_output"], &answer["finish_reason"]),
            (200, &json!(text), &json!("stop")),
            "{members}"
        );
    }
    let calls = source.calls();
    // AI-902: without keys the caller is `localhost`, who may do everything.
    assert_eq!(calls[0], r#"localhost admin sapwood:regex {"value":"a+"}"#);
    assert_eq!(calls[5], "localhost admin dictate yes");
}

/// AI-936: text that may be taken back is not streamed before the end.
#[tokio::test]
async fn tr_1305_a_stream_never_has_text_that_is_taken_back() {
    let (server, _) = steered().await;
    for (controller, arg, text) in [("dictate", "abc", "abc"), ("rewind", "Hello|ence", "Hence")] {
        let body = with(&json!({"controller": controller, "controller_arg": arg, "stream": true}));
        let answer = ask(&server, "/v2/models/m/generate_stream", &body).await;
        let events = answer.events();
        let texts = events
            .iter()
            .map(|event| event["text_output"].as_str().unwrap());
        assert_eq!(texts.collect::<String>(), text);
        assert_eq!(events.last().unwrap()["finish_reason"], "stop");
    }
}

/// AI-933: a fork is one more choice, whole, in one piece and in a stream.
#[tokio::test]
async fn tr_1305_forks_are_further_elements_of_the_outputs() {
    let (server, _) = steered().await;
    let members = json!({"controller": "fork", "controller_arg": "ab|c|de"});
    let (_, answer) = generate(&server, members.clone()).await;
    assert_eq!(answer["text_output"], json!(["abc", "abde"]));
    assert_eq!(answer["finish_reason"], json!(["stop", "stop"]));
    let mut members = members;
    members["stream"] = true.into();
    let body = with(&members);
    let answer = ask(&server, "/v2/models/m/generate_stream", &body).await;
    let mut texts = [String::new(), String::new()];
    for event in answer.events() {
        match &event["text_output"] {
            Value::String(only) => texts[0] += only,
            Value::Array(each) => {
                for (text, piece) in texts.iter_mut().zip(each) {
                    text.push_str(piece.as_str().unwrap());
                }
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(texts, ["abc", "abde"]);
}

#[tokio::test]
async fn tr_1305_what_cannot_be_steered_is_refused_before_any_work() {
    let (server, _) = steered().await;
    for (members, status, message) in [
        (
            json!({"regex": "("}),
            400,
            "invalid grammar: unclosed group at 0",
        ),
        (
            json!({"regex": "a", "grammar": "b"}),
            400,
            "parameters 'regex' and 'grammar' cannot be combined: give one constraint",
        ),
        (
            json!({"controller": "nobody"}),
            404,
            "there is no controller \"nobody\"",
        ),
        (
            json!({"controller_arg": "x"}),
            400,
            "parameter 'controller_arg' needs a 'controller'",
        ),
    ] {
        for path in ["generate", "generate_stream"] {
            let path = format!("/v2/models/m/{path}");
            let answer = ask(&server, &path, &with(&members)).await;
            assert_eq!((answer.head.status, &*error(&answer)), (status, message));
            assert_eq!(
                answer.head.header("content-type").as_deref(),
                Some("application/json")
            );
        }
    }
}

#[tokio::test]
async fn tr_1305_a_controller_that_fails_is_an_error_event_with_its_code() {
    let (server, _) = steered().await;
    let body = with(&json!({"controller": "trap", "controller_arg": "ab", "stream": true}));
    let answer = ask(&server, "/v2/models/m/generate_stream", &body).await;
    let events = answer.events();
    let text = events.last().unwrap()["error"].as_str().unwrap();
    assert!(text.starts_with("controller: trap: "), "{text}");
    let body = with(&json!({"controller": "trap"}));
    let answer = ask(&server, "/v2/models/m/generate", &body).await;
    assert_eq!(answer.head.status, 500);
    assert_eq!(
        answer.head.header("sapwood-error").as_deref(),
        Some("controller-failed")
    );
}

/// The key of a request decides what it may run; a key without `control` runs native constraints all the same.
#[tokio::test]
async fn ai_902_a_controller_is_run_with_the_rights_of_the_key() {
    let (kernel, source) = steered_kernel();
    let key = |name: &str, scopes: &[KeyScope]| {
        ApiKey::new(
            name,
            &format!("{name}-secret"),
            scopes.iter().copied().collect(),
        )
    };
    let keys = vec![
        key("ann", &[KeyScope::Infer]),
        key("bob", &[KeyScope::Infer, KeyScope::Control]),
        key("eve", &[KeyScope::Infer, KeyScope::Admin]),
    ];
    let (config, faces) = (server::Config::default(), Faces::default());
    let server = Running::start_faces(config, kernel, faces, keys).await;
    let private = json!({"controller": "private", "controller_arg": "ok"});
    let native = json!({"regex": "ok"});
    for (name, members, status) in [
        ("ann", &private, 403),
        ("ann", &native, 200),
        ("bob", &private, 200),
        ("eve", &private, 200),
    ] {
        let bearer = format!("authorization: Bearer {name}-secret");
        let path = "/v2/models/m/generate";
        let request = http::post(path, &[&bearer], with(members).as_bytes());
        let mut wire = http::Wire::connect(server.address).await;
        assert_eq!(
            wire.ask(request).await.head.status,
            status,
            "{name} {members}"
        );
    }
    let calls = source.calls();
    let users: Vec<_> = calls.iter().map(|call| call.split(" ok").next()).collect();
    assert_eq!(
        users,
        [
            Some("ann infer private"),
            Some(r#"ann infer sapwood:regex {"value":"ok"}"#),
            Some("bob control private"),
            Some("eve admin private"),
        ]
    );
}

/// The same names as inputs and as parameters of `infer`.
#[tokio::test]
async fn tr_1305_infer_takes_the_same_fields() {
    let (server, _) = steered().await;
    let input = |name: &str, data: &str| json!({"name": name, "datatype": "BYTES", "shape": [1], "data": [data]});
    for body in [
        json!({"inputs": [input("text_input", "hi"), input("regex", "a+")]}),
        json!({"inputs": [input("text_input", "hi"), input("json_schema", "a+")]}),
        json!({"inputs": [input("text_input", "hi")], "parameters": {"regex": "a+"}}),
        json!({
            "inputs": [input("text_input", "hi"), input("controller_arg", "a+")],
            "parameters": {"controller": "dictate"},
        }),
    ] {
        let answer = ask(&server, "/v2/models/m/infer", &body.to_string()).await;
        let outputs = answer.json()["outputs"].clone();
        assert_eq!(outputs[0]["data"], json!(["a+"]), "{body} {outputs}");
    }
}
