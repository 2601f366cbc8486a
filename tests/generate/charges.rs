//! How long the byte budget is charged for a prompt whose model is not ready yet (D-47).

use futures::channel::mpsc;
use sapwood_server::http::body_budget;
use sapwood_server::server;
use sapwood_tests::gate::CallGate;
use sapwood_tests::http::{Wire, post};
use sapwood_tests::{Faces, until};

use super::grpc::{Grpc, prompt, text};
use super::*;

/// Bytes of a prompt.
const PROMPT: usize = 100_000;

/// A server whose model sends a piece of text and goes on, behind a gate.
async fn gated(each: usize) -> (Running, CallGate) {
    let model = scripted::Config {
        context_tokens: 1 << 18,
        ..steps(vec![ScriptStep::Text("a".into()), ScriptStep::Hang(true)])
    };
    let kernel = kernel(&[("m", model)]);
    let gate = CallGate::before(&kernel, "m");
    let config = server::Config {
        body_budget: body_budget::Config {
            each,
            ..body_budget::Config::default()
        },
        ..server::Config::default()
    };
    let server = Running::start_faces(config, kernel, Faces::default(), Vec::new()).await;
    (server, gate)
}

fn charged(server: &Running) -> usize {
    usize::try_from(server.shared.metrics.body_bytes.get()).unwrap()
}

#[tokio::test]
async fn d_47_a_message_of_a_stream_is_charged_until_its_model_has_it() {
    let (server, gate) = gated(8 << 20).await;
    let mut grpc = Grpc::connect(&server).await;
    let (mut send, messages) = mpsc::channel(4);
    let mut answers = grpc.stream(messages, false).await;
    for (before, streams) in [(0, true), (1, false)] {
        let message = prompt("m", "1", &"x".repeat(PROMPT), streams);
        send.try_send(message).unwrap();
        until("the call waits", || gate.begun() > before).await;
        assert!(charged(&server) >= PROMPT, "{}", charged(&server));
        gate.open(1);
        if streams {
            let first = answers.message().await.unwrap().unwrap();
            assert_eq!(text(&first.infer_response.unwrap()), "a");
        }
        // It goes on, and has said nothing if it does not stream.
        until("nothing is charged", || charged(&server) == 0).await;
    }
}

/// Otherwise the third message would find no room, which ends the call.
#[tokio::test]
async fn d_47_a_stream_is_not_read_on_while_its_messages_hold_their_share() {
    let (server, gate) = gated(256 << 10).await;
    let mut grpc = Grpc::connect(&server).await;
    let (mut send, messages) = mpsc::channel(8);
    let mut answers = grpc.stream(messages, false).await;
    // Those that do not stream send nothing when they begin.
    let streams = |call: usize| !call.is_multiple_of(2);
    for call in 1..=5 {
        let message = prompt("m", "", &"x".repeat(PROMPT), streams(call));
        send.try_send(message).unwrap();
    }
    for call in 1..=5 {
        until("a call waits", || gate.begun() == call).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(gate.begun(), call);
        // What was taken of the message on its way here is not charged any more.
        until("one message is charged", || charged(&server) < 2 * PROMPT).await;
        gate.open(1);
        if streams(call) {
            let first = answers.message().await.unwrap().unwrap();
            assert_eq!(first.error_message, "");
            assert_eq!(text(&first.infer_response.unwrap()), "a");
        }
    }
    until("nothing is charged", || charged(&server) == 0).await;
}

#[tokio::test]
async fn d_47_a_body_is_charged_until_its_model_has_it_also_when_the_head_is_out() {
    let (server, gate) = gated(8 << 20).await;
    let body = format!(r#"{{"text_input":"{}","stream":true}}"#, "x".repeat(PROMPT));
    let mut wire = Wire::connect(server.address).await;
    let path = "/v2/models/m/generate_stream";
    wire.send(post(path, &["sapwood-keepalive: 1"], body.as_bytes()))
        .await;
    assert_eq!(wire.head().await.status, 200);
    assert_eq!(wire.chunk().await.unwrap(), b": ping\n\n");
    assert_eq!(gate.begun(), 1);
    assert!(charged(&server) >= PROMPT, "{}", charged(&server));
    gate.open(1);
    until("nothing is charged", || charged(&server) == 0).await;
}
