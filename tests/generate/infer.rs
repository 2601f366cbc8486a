//! `infer` over HTTP, with JSON and with binary tensors (section 8).

use std::io::Read;

use flate2::read::{GzDecoder, ZlibDecoder};
use sapwood_engine::scripted::Script;
use sapwood_proto::generate::RequestLimits;
use sapwood_server::faces::generate::Config;
use sapwood_tests::Running;
use sapwood_tests::http::{Answer, Wire, post};
use serde_json::{Value, json};

use super::{demo, error, kernel, parrot, script};

const PATH: &str = "/v2/models/demo/infer";

async fn infer(server: &Running, headers: &[&str], body: &[u8]) -> Answer {
    Wire::connect(server.address)
        .await
        .ask(post(PATH, headers, body))
        .await
}

fn text(prompt: &str) -> Value {
    json!({"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [prompt]})
}

fn tokens(count: i64) -> Value {
    json!({"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [count]})
}

/// An output can be requested once.
#[tokio::test]
async fn tr_804_an_output_that_is_requested_twice_is_refused() {
    let server = demo().await;
    let once = json!({"name": "text_output"});
    let raw = json!({"name": "text_output", "parameters": {"binary_data": true}});
    for outputs in [json!([once, once]), json!([once, raw]), json!([raw, once])] {
        let body = json!({"id": "7", "inputs": [text("hi")], "outputs": outputs}).to_string();
        let answer = infer(&server, &[], body.as_bytes()).await;
        let text = "[request id: 7] output 'text_output' is requested twice for model 'demo'";
        assert_eq!((answer.summary().0, &*error(&answer)), (400, text));
    }
}

/// TR-806
#[tokio::test]
async fn tr_801_json_inputs_give_json_outputs() {
    let server = demo().await;
    let body = json!({"id": "7", "inputs": [tokens(2), text("one two three")]}).to_string();
    let answer = infer(&server, &[], body.as_bytes()).await;
    let expect = r#"{"id":"7","model_name":"demo","model_version":"1","outputs":[{"name":"text_output","datatype":"BYTES","shape":[1],"data":["one two"]}]}"#;
    assert_eq!(answer.summary(), (200, "application/json".into(), expect));
    assert_eq!(answer.head.header("inference-header-content-length"), None);
    // A client of another backend puts the batch dimension first, and uses other names.
    let other = json!({"inputs": [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [["one two three"]]},
        {"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [2]},
    ], "outputs": [{"name": "finish_reason"}, {"name": "text_output"}]});
    let answer = infer(&server, &[], other.to_string().as_bytes())
        .await
        .json();
    let named: Vec<_> = answer["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| (&it["name"], &it["data"]))
        .collect();
    assert_eq!(
        named,
        [
            (&json!("text_output"), &json!(["one two"])),
            (&json!("finish_reason"), &json!(["length"]))
        ]
    );
}

#[tokio::test]
async fn tr_401_bad_words_are_a_tensor_of_any_length() {
    let server = demo().await;
    for words in [&["", " two"][..], &["e two", "o three"], &[""]] {
        let bad = json!({"name": "bad_words", "shape": [words.len()], "datatype": "BYTES", "data": words});
        let body = json!({"inputs": [text("one two three"), bad]}).to_string();
        let answer = infer(&server, &[], body.as_bytes()).await.json();
        let reply = answer["outputs"][0]["data"][0].as_str().unwrap();
        let retained = words
            .iter()
            .any(|word| !word.is_empty() && reply.contains(word));
        assert!(reply.starts_with("one") && !retained, "{reply}");
        assert_eq!(reply == "one two three", words == [""]);
    }
}

/// TR-803
#[tokio::test]
async fn tr_802_binary_tensors_follow_the_json_in_requests_and_responses() {
    let server = demo().await;
    let head = r#"{"id":"7","inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":6}},{"name":"max_tokens","shape":[1],"datatype":"INT32","data":[4]}],"outputs":[{"name":"text_output","parameters":{"binary_data":true}}]}"#;
    let length = format!("inference-header-content-length: {}", head.len());
    let body = [head.as_bytes(), b"\x02\0\0\0hi"].concat();
    let answer = infer(&server, &[&length], &body).await;
    let json = r#"{"id":"7","model_name":"demo","model_version":"1","outputs":[{"name":"text_output","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":6}}]}"#;
    assert_eq!(
        answer.head.header("content-type").as_deref(),
        Some("application/octet-stream")
    );
    assert_eq!(
        answer.head.header("inference-header-content-length"),
        Some(json.len().to_string())
    );
    assert_eq!(answer.body, [json.as_bytes(), b"\x02\0\0\0hi"].concat());
    // The whole body is the prompt.
    let raw = infer(
        &server,
        &["inference-header-content-length: 0"],
        b"green tea",
    )
    .await;
    let json = r#"{"model_name":"demo","model_version":"1","outputs":[{"name":"text_output","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":13}}]}"#;
    let header = raw.head.header("inference-header-content-length");
    assert_eq!(header, Some(json.len().to_string()));
    assert_eq!(raw.body, [json.as_bytes(), b"\x09\0\0\0green tea"].concat());
    // The response is raw, too, and a body that is too large has an error text of its own.
    let large = vec![b'x'; 2_000];
    let config = Config {
        limits: RequestLimits {
            input_bytes: 1_000,
            ..RequestLimits::default()
        },
        ..Config::default()
    };
    let small = Running::generating(kernel(&[("demo", script(Script::Words))]), config).await;
    let answer = infer(&small, &["inference-header-content-length: 0"], &large).await;
    let text = "request body size of 2000 bytes exceeds the maximum allowed input size of 1000 bytes. Use \
                --http-max-input-size to increase the limit.";
    assert_eq!((answer.summary().0, &*error(&answer)), (400, text));
    for (header, behind, text) in [
        ("x".to_owned(), &b""[..], "Unable to parse Inference-Header-Content-Length, got: x".to_owned()),
        ("-1".to_owned(), b"", format!("inference header size should be in range (0, {}), got: -1", head.len())),
        ("9999".to_owned(), b"", format!("inference header size should be in range (0, {}), got: 9999", head.len())),
        (head.len().to_string(), b"\x02\0\0\0hi!", "unexpected additional input data for model 'demo'".into()),
        (head.len().to_string(), b"\x02\0\0\0h", "unexpected end of input data for input 'text_input'".into()),
        (
            head.len().to_string(),
            b"\x09\0\0\0hi",
            "[request id: 7] incomplete string data for inference input 'text_input' for model 'demo'".into(),
        ),
    ] {
        let header = format!("inference-header-content-length: {header}");
        let answer = infer(&server, &[&header], &[head.as_bytes(), behind].concat()).await;
        assert_eq!((answer.summary().0, error(&answer)), (400, text));
    }
    let wide = r#"{"inputs":[{"name":"max_tokens","shape":[1],"datatype":"INT32","parameters":{"binary_data_size":8}}]}"#;
    let length = format!("inference-header-content-length: {}", wide.len());
    let answer = infer(
        &server,
        &[&length],
        &[wide.as_bytes(), &[8, 0, 0, 0, 0, 0, 0, 0]].concat(),
    )
    .await;
    let text = "[request id: <id_unknown>] input byte size mismatch for input 'max_tokens' for model 'demo'. Expected 4, got 8";
    assert_eq!(error(&answer), text);
}

/// TR-805
#[tokio::test]
async fn tr_804_outputs_are_binary_on_request() {
    let server = demo().await;
    let ask = async |members: Value| {
        let mut body = json!({"inputs": [text("hi")]});
        body.as_object_mut()
            .unwrap()
            .extend(members.as_object().unwrap().clone());
        infer(&server, &[], body.to_string().as_bytes()).await
    };
    let kind = |answer: &Answer| answer.head.header("content-type").unwrap();
    let all =
        json!({"parameters": {"binary_data_output": true, "sequence_id": 7, "max_new_tokens": 1}});
    assert_eq!(kind(&ask(all).await), "application/octet-stream");
    let some =
        json!({"parameters": {"binary_data_output": true}, "outputs": [{"name": "text_output"}]});
    assert_eq!(kind(&ask(some).await), "application/json");
    for (members, text) in [
        (
            json!({"outputs": [{"name": "x"}]}),
            "[request id: <id_unknown>] unexpected inference output 'x' for model 'demo'",
        ),
        (
            json!({"parameters": {"triton_x": 1}}),
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            json!({"inputs": [tokens(1)]}),
            "missing required input(s) ['text_input']",
        ),
        (
            json!({"inputs": [text("a"), json!({"name": "other", "shape": [1], "datatype": "BYTES", "data": ["b"]})]}),
            "unexpected inference input 'other' for model 'demo'",
        ),
        (
            json!({"inputs": [json!({"name": "text_input", "shape": [1], "datatype": "INT32", "data": [1]})]}),
            "inference input 'text_input' data-type is 'INT32', but model 'demo' expects 'BYTES'",
        ),
        (
            json!({"inputs": [json!({"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]})]}),
            "unexpected shape for input 'text_input' for model 'demo'. Expected [1], got [2]",
        ),
        (
            json!({"inputs": [json!({"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a", "b"]})]}),
            "Shape does not match true shape of 'data' field",
        ),
        (json!({"inputs": {}}), "Unable to parse 'inputs'"),
    ] {
        let answer = ask(members).await;
        assert_eq!(answer.summary().0, 400);
        assert!(error(&answer).contains(text), "{}", error(&answer));
    }
}

#[tokio::test]
async fn tr_806_a_streamed_infer_is_refused() {
    let server = demo().await;
    let stream = json!({"name": "stream", "shape": [1], "datatype": "BOOL", "data": [true]});
    let body = json!({"inputs": [text("hi"), stream]}).to_string();
    let answer = infer(&server, &[], body.as_bytes()).await;
    let received = "HTTP end point doesn't support models with decoupled transaction policy";
    assert_eq!(
        (answer.summary().0, error(&answer).as_str()),
        (501, received)
    );
    let compat = Config {
        compat: true,
        ..Config::default()
    };
    let server = Running::generating(kernel(&[("demo", script(Script::Words))]), compat).await;
    let body = json!({"inputs": [text("hi")]}).to_string();
    assert_eq!(infer(&server, &[], body.as_bytes()).await.summary().0, 501);
    let unknown = infer(&server, &["content-encoding: br"], body.as_bytes()).await;
    assert_eq!(
        (unknown.summary().0, error(&unknown).as_str()),
        (501, "Unsupported compression type")
    );
}

#[tokio::test]
async fn tr_807_long_responses_are_compressed_if_the_client_accepts_it() {
    let server = demo().await;
    let prompt = "green tea ".repeat(200);
    let body = json!({"inputs": [text(&prompt)]}).to_string();
    for (accept, coding) in [
        ("gzip", Some("gzip")),
        ("br, deflate", Some("deflate")),
        ("gzip;q=0", None),
        ("br", None),
    ] {
        let header = format!("accept-encoding: {accept}");
        let answer = infer(&server, &[&header], body.as_bytes()).await;
        assert_eq!(answer.head.header("content-encoding").as_deref(), coding);
        let mut plain = String::new();
        match coding {
            Some("gzip") => GzDecoder::new(&*answer.body)
                .read_to_string(&mut plain)
                .unwrap(),
            Some(_) => ZlibDecoder::new(&*answer.body)
                .read_to_string(&mut plain)
                .unwrap(),
            None => (&*answer.body).read_to_string(&mut plain).unwrap(),
        };
        let received: Value = serde_json::from_str(&plain).unwrap();
        assert_eq!(received["outputs"][0]["data"], json!([prompt]));
    }
    let short = infer(
        &server,
        &["accept-encoding: gzip"],
        json!({"inputs": [text("a")]}).to_string().as_bytes(),
    )
    .await;
    assert_eq!(short.head.header("content-encoding"), None);
}

#[tokio::test]
async fn tr_801_outputs_have_the_shapes_of_a_custom_signature() {
    let server = parrot(|_| {}).await;
    let body = json!({"inputs": [
        {"name": "QUESTION", "shape": [1, 1], "datatype": "BYTES", "data": ["x"]},
        {"name": "LIVE", "shape": [1, 1], "datatype": "BOOL", "data": [false]},
        {"name": "hints", "shape": [1, 3], "datatype": "INT32", "data": [[1, 2, 3]]},
    ]});
    let mut wire = Wire::connect(server.address).await;
    let answer = wire
        .post("/v2/models/parrot/infer", &body.to_string())
        .await;
    assert_eq!(
        answer.json()["outputs"],
        json!([{"name": "ANSWER", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]}])
    );
}
