//! Extensions that a request has to ask for (section 13).

use std::io::Read;

use flate2::read::{GzDecoder, ZlibDecoder};
use sapwood_engine::scripted::{Script, ScriptStep};
use sapwood_proto::generate::Signature;
use sapwood_server::faces::generate::{Config, ForwardedHeaders, ModelOptions};
use sapwood_tests::http::{Answer, Wire, head, post};
use sapwood_tests::{Faces, Running, key, spawned, until};
use serde_json::{Value, json};

use super::{ask, demo, error, kernel, playing, script, steps};

const ONE: &str = "/v2/models/demo/generate";
const STREAM: &str = "/v2/models/demo/generate_stream";

async fn with(server: &Running, path: &str, headers: &[&str], body: &str) -> Answer {
    let mut wire = Wire::connect(server.address).await;
    wire.ask(post(path, headers, body.as_bytes())).await
}

fn unpacked(coding: &str, bytes: &[u8]) -> String {
    let mut text = String::new();
    match coding {
        "gzip" => GzDecoder::new(bytes).read_to_string(&mut text),
        _ => ZlibDecoder::new(bytes).read_to_string(&mut text),
    }
    .unwrap();
    text
}

#[tokio::test]
async fn tr_1301_responses_from_1_kib_on_are_compressed_and_streams_never() {
    let server = demo().await;
    let long = "green tea ".repeat(200);
    let body = json!({"text_input": long}).to_string();
    for coding in ["gzip", "deflate"] {
        let accept = format!("accept-encoding: br, {coding}");
        let answer = with(&server, ONE, &[&accept], &body).await;
        let head = answer.head.header("content-encoding");
        assert_eq!(head.as_deref(), Some(coding));
        let received: Value = serde_json::from_str(&unpacked(coding, &answer.body)).unwrap();
        assert_eq!(received["text_output"], long);
        let short = with(&server, ONE, &[&accept], r#"{"text_input":"x"}"#).await;
        assert_eq!(short.head.header("content-encoding"), None);
        assert_eq!(short.json()["text_output"], "x");
        // Compressing a stream would delay its events.
        let body = r#"{"text_input":"one two three","stream":true}"#;
        let plain = with(&server, STREAM, &[&accept], body).await;
        assert_eq!(plain.head.header("content-encoding"), None);
    }
}

/// A ping sends the head, so a later failure is an event.
#[tokio::test]
async fn tr_1304_a_silent_stream_sends_pings_on_request() {
    let failure = sapwood_engine::scripted::ScriptedFailure {
        code: "internal".into(),
        message: "tired".into(),
    };
    let server = playing(vec![ScriptStep::SleepMs(1_500), ScriptStep::Error(failure)]).await;
    let path = "/v2/models/m/generate_stream";
    let body = r#"{"text_input":"x","stream":true}"#;
    let silent = with(&server, path, &[], body).await;
    assert_eq!(silent.summary().0, 500);
    let answer = with(&server, path, &["sapwood-keepalive: 1"], body).await;
    assert_eq!(answer.summary().0, 200);
    assert_eq!(answer.text(), ": ping\n\ndata: {\"error\":\"tired\"}\n\n");
    let wrong = with(&server, path, &["sapwood-keepalive: soon"], body).await;
    assert_eq!(wrong.summary().0, 400);
    assert_eq!(
        error(&wrong),
        "header 'sapwood-keepalive' must be seconds, from 1 to 3600"
    );
    // A stream that is never silent gets no ping.
    let server = demo().await;
    let answer = with(&server, STREAM, &["sapwood-keepalive: 1"], body).await;
    assert!(!answer.text().contains("ping"));
}

async fn batching() -> Running {
    let model = ModelOptions {
        signature: Some(Signature {
            max_batch_size: 3,
            ..Signature::union()
        }),
        ..ModelOptions::default()
    };
    let config = Config {
        models: [("demo".to_owned(), model)].into(),
        ..Config::default()
    };
    Running::generating(kernel(&[("demo", script(Script::Words))]), config).await
}

#[tokio::test]
async fn tr_1307_a_batch_gives_one_element_per_row_and_events_name_their_row() {
    let server = batching().await;
    let body = r#"{"text_input":["one two","three","four five six"],"max_tokens":2,"return_num_input_tokens":true}"#;
    let answer = ask(&server, ONE, body).await.json();
    assert_eq!(
        answer["text_output"],
        json!(["one two", "three", "four five"])
    );
    assert_eq!(answer["num_input_tokens"].as_array().unwrap().len(), 3);
    // Each row may have its own values, and a single prompt is not a batch.
    let body = r#"{"text_input":["one two","one two"],"max_tokens":[1,2]}"#;
    let answer = ask(&server, ONE, body).await.json();
    assert_eq!(answer["text_output"], json!(["one", "one two"]));
    let answer = ask(&server, ONE, r#"{"text_input":"one"}"#).await.json();
    assert_eq!(answer["text_output"], "one");
    let body = r#"{"text_input":["one two","three"],"stream":true}"#;
    let mut texts = [String::new(), String::new()];
    for event in ask(&server, STREAM, body).await.events() {
        let row = usize::try_from(event["batch_index"].as_u64().unwrap()).unwrap();
        texts[row].push_str(event["text_output"].as_str().unwrap());
    }
    assert_eq!(texts, ["one two", "three"]);
    let whole = ask(&server, STREAM, r#"{"text_input":["a","b"]}"#).await;
    let [event] = &whole.events()[..] else {
        panic!("without a stream there is one event: {}", whole.text())
    };
    assert_eq!(event["text_output"], json!(["a", "b"]));
    let many = ask(&server, ONE, r#"{"text_input":["a","b","c","d"]}"#).await;
    let received =
        "[request id: <id_unknown>] inference request batch-size must be from 1 to 3 for 'demo'";
    assert_eq!((many.summary().0, error(&many).as_str()), (400, received));
    let body = json!({"inputs": [
        {"name": "text_input", "shape": [2, 1], "datatype": "BYTES", "data": ["one", "two"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [4]}]});
    let answer = ask(&server, "/v2/models/demo/infer", &body.to_string()).await;
    let output = &answer.json()["outputs"][0];
    assert_eq!(
        (&output["shape"], &output["data"]),
        (&json!([2, 1]), &json!(["one", "two"]))
    );
}

/// The bounds of an answer in one piece hold for all rows of a batch together.
#[tokio::test]
async fn tr_1307_the_rows_of_a_batch_share_the_bounds_of_an_answer() {
    let server = batching().await;
    // Each row has 1,500 x 21 log-probabilities, and two of them have not yet too many.
    for (rows, status) in [(2, 200), (3, 400)] {
        let body = json!({"text_input": vec!["one"; rows], "ignore_eos": true, "max_tokens": 1_500, "logprobs": 20,
            "return_logprobs": true});
        let answer = ask(&server, ONE, &body.to_string()).await;
        assert_eq!(answer.summary().0, status, "{rows}");
        if status != 200 {
            assert!(error(&answer).contains("at most 65536 log-probabilities"));
        }
    }
    // A prompt that stands before each choice: the first is refused by the model, the second before it is copied.
    for (n, why) in [(1, "exceeds"), (3, "at most 16777216 bytes of text")] {
        let body =
            json!({"text_input": "x".repeat(6 << 20), "n": n, "exclude_input_in_output": false});
        let answer = ask(&server, ONE, &body.to_string()).await;
        assert!(error(&answer).contains(why), "{}", error(&answer));
    }
}

/// Headers that match the operator's pattern become parameters: here they make a scripted model fail.
#[tokio::test]
async fn tr_1309_headers_that_match_the_pattern_become_parameters() {
    let mut answers = Vec::new();
    for forwarded in [None, Some(ForwardedHeaders::new("^k").unwrap())] {
        let model = ModelOptions {
            signature: Some(super::parrot_signature()),
            controls: [(
                sapwood_server::faces::generate::ScriptControl::Code,
                "kind".into(),
            )]
            .into(),
            ..ModelOptions::default()
        };
        let config = Config {
            forwarded,
            models: [("parrot".to_owned(), model)].into(),
            ..Config::default()
        };
        let kernel = kernel(&[("parrot", script(Script::Echo))]);
        let server = Running::generating(kernel, config).await;
        let infer = r#"{"inputs":[{"name":"QUESTION","shape":[1,1],"datatype":"BYTES","data":["x"]},
            {"name":"LIVE","shape":[1,1],"datatype":"BOOL","data":[false]}]}"#;
        for (path, body) in [
            (
                "/v2/models/parrot/generate",
                r#"{"QUESTION":"x","LIVE":false}"#,
            ),
            ("/v2/models/parrot/infer", infer),
        ] {
            let answer = with(&server, path, &["Kind: strange", "other: 1"], body).await;
            answers.push(answer.summary().0);
        }
        for reply in super::grpc::with_metadata(&server, "kind", "strange").await {
            answers.push(if reply { 200 } else { 400 });
        }
    }
    assert_eq!(answers, [[200; 4], [400; 4]].concat());
}

/// OA-801
#[tokio::test]
async fn tr_1311_a_running_request_is_cancelled_by_its_id() {
    let engine = spawned(steps(vec![
        ScriptStep::Text("a".into()),
        ScriptStep::Hang(true),
    ]));
    let kernel = sapwood_kernel::Kernel::new();
    kernel
        .add(sapwood_kernel::model("m", engine.clone()))
        .unwrap();
    let keys = vec![key("anna", "sesame"), key("ben", "barley")];
    let faces = Faces::default();
    let server = Running::start_faces(Default::default(), kernel, faces, keys).await;
    let (anna, ben) = (
        "authorization: Bearer sesame",
        "authorization: Bearer barley",
    );
    let mut delete = Wire::connect(server.address).await;
    let path = "/v2/requests/a%2F1";
    let mut deleting = async |key: &str| {
        let answer = delete.ask(head("DELETE", path, &[key])).await;
        answer.summary().0
    };
    assert_eq!(deleting(anna).await, 404);
    let mut streams = Wire::connect(server.address).await;
    let body = br#"{"id":"a/1","text_input":"x","stream":true}"#;
    streams
        .send(post("/v2/models/m/generate_stream", &[anna], body))
        .await;
    assert_eq!(streams.head().await.status, 200);
    assert!(
        streams
            .chunk()
            .await
            .unwrap()
            .starts_with(b"data: {\"id\":\"a/1\"")
    );
    assert_eq!(deleting(ben).await, 404, "it is not his");
    assert_eq!(deleting(anna).await, 204);
    let last = streams.chunk().await.unwrap();
    assert_eq!(last, b"data: {\"error\":\"Request was cancelled\"}\n\n");
    assert_eq!(
        streams.chunk().await,
        Some(Vec::new()),
        "the stream ends well"
    );
    let cancelled = &server.shared.metrics.cancelled;
    let counted = ["delete", "client"].map(|why| cancelled.with_label_values(&[why]).get());
    assert_eq!(counted, [1, 0]);
    until("the sequence is gone", || {
        engine.stats().requests_running.get() == 0
    })
    .await;
    let mut one = Wire::connect(server.address).await;
    let body = br#"{"id":"a/1","text_input":"x"}"#;
    one.send(post("/v2/models/m/generate", &[anna], body)).await;
    until("it runs", || engine.stats().requests_running.get() == 1).await;
    assert_eq!(deleting(anna).await, 204);
    let answer = one.answer().await;
    assert_eq!(
        (answer.summary().0, error(&answer)),
        (400, "Request was cancelled".into())
    );
    let code = answer.head.header("sapwood-error");
    assert_eq!(code.as_deref(), Some("cancelled"));
    let get = Wire::connect(server.address)
        .await
        .ask(head("GET", path, &[anna]))
        .await;
    assert_eq!(get.head.header("allow").as_deref(), Some("DELETE"));
}
