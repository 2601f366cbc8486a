//! Extensions of the protocol (section 10 of the Evergreen page), each once over a real socket.
//!
//! The session machine has tables of its own; these tests show that the whole server behaves the same.

use futures::stream;
use sapwood_proto::evergreen::wire::{NodeFragment, Payload, SessionMessage};
use sapwood_tests::raw::{action, call, code_and_reason, end, fragments, json, leaf};
use sapwood_tests::{Running, until};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Reads until the final fragment of `id`; returns the payload of all its fragments.
pub(super) async fn finished(answers: &mut Streaming<SessionMessage>, id: &str) -> String {
    let mut all = Vec::new();
    loop {
        let message = answers.message().await.unwrap().expect("it continues");
        let list = message.node_fragments.into_iter();
        for fragment in list.filter(|fragment| fragment.id == id) {
            let last = !fragment.continued;
            all.extend_from_slice(&payload(fragment));
            if last {
                return String::from_utf8_lossy(&all).into_owned();
            }
        }
    }
}

fn payload(fragment: NodeFragment) -> Vec<u8> {
    let payload = fragment.chunk_fragment.and_then(|chunk| chunk.payload);
    match payload {
        Some(Payload::Data(data)) => data.to_vec(),
        _ => Vec::new(),
    }
}

#[tokio::test]
async fn ev_911_a_dropped_node_frees_its_bytes_and_cannot_be_read_again() {
    let server = Running::with_test_functions().await;
    let numbers = &server.shared.metrics.evergreen;
    let (send, messages) = mpsc::channel(8);
    let headers = [("evergreen-partial-failure", "1")];
    let mut answers = call(&server, ReceiverStream::new(messages), &headers)
        .await
        .unwrap();
    let announced = answers_extensions(&server).await;
    assert!(announced.iter().any(|name| name == "drop"), "{announced:?}");
    let echo = |id: &str| action("echo", &[("text", "p")], &[("response", id)]);
    send.send(fragments(vec![leaf("p", 0, 100_000)]))
        .await
        .unwrap();
    send.send(echo("one")).await.unwrap();
    assert_eq!(finished(&mut answers, "one").await.len(), 100_000);
    let drop_both = [("node", "p"), ("tree", "one")];
    send.send(action("DROP", &drop_both, &[("result", "r")]))
        .await
        .unwrap();
    let result = finished(&mut answers, "r").await;
    assert!(
        result.starts_with("{\"dropped\":2,\"bytes\":200"),
        "{result}"
    );
    until("the bytes are free", || {
        numbers.retained_bytes.get() < 1_000
    })
    .await;
    send.send(echo("two")).await.unwrap();
    let refused = finished(&mut answers, "two").await;
    assert!(refused.contains("NODE_RELEASED"), "{refused:?}");
    drop(send);
    assert_eq!(code_and_reason(end(answers).await), (0, String::new()));
}

async fn answers_extensions(server: &Running) -> Vec<String> {
    server.session().await.extensions().to_vec()
}

#[tokio::test]
async fn ev_912_a_node_with_an_expired_ttl_cannot_be_read_again() {
    let server = Running::with_test_functions().await;
    let (send, messages) = mpsc::channel(8);
    let headers = [("evergreen-partial-failure", "1")];
    let mut answers = call(&server, ReceiverStream::new(messages), &headers)
        .await
        .unwrap();
    send.send(fragments(vec![leaf("p", 0, 10)])).await.unwrap();
    let now = json("now", "\"0s\"");
    let set = action(
        "SET_TTL",
        &[("node", "p"), ("ttl", "now")],
        &[("result", "r")],
    );
    send.send(set).await.unwrap();
    // The action is sent first and waits for its input.
    send.send(fragments(vec![now])).await.unwrap();
    assert_eq!(finished(&mut answers, "r").await, "{\"set\":true}");
    send.send(action("echo", &[("text", "p")], &[("response", "e")]))
        .await
        .unwrap();
    let refused = finished(&mut answers, "e").await;
    assert!(refused.contains("NODE_RELEASED"), "{refused:?}");
    drop(send);
    assert_eq!(code_and_reason(end(answers).await), (0, String::new()));
}

#[tokio::test]
async fn ev_924_finish_ends_a_session_whose_client_keeps_its_stream_open() {
    let server = Running::with_test_functions().await;
    let echo = action("echo", &[("text", "p")], &[("response", "r")]);
    let input = fragments(vec![leaf("p", 0, 10)]);
    let (send, messages) = mpsc::channel(8);
    for message in [echo, action("FINISH", &[], &[]), input] {
        send.send(message).await.unwrap();
    }
    // The input is too late: nothing is accepted after FINISH.
    let answers = call(&server, ReceiverStream::new(messages), &[])
        .await
        .unwrap();
    assert_eq!(
        code_and_reason(end(answers).await),
        (9, "INCOMPLETE_INPUT".into())
    );
    let (other, messages) = mpsc::channel(8);
    let list = [
        fragments(vec![leaf("p", 0, 10)]),
        action("FINISH", &[], &[]),
    ];
    for message in list {
        other.send(message).await.unwrap();
    }
    let answers = call(&server, ReceiverStream::new(messages), &[])
        .await
        .unwrap();
    assert_eq!(code_and_reason(end(answers).await), (0, String::new()));
    drop((send, other));
    let none = stream::iter(Vec::<SessionMessage>::new());
    assert!(end(call(&server, none, &[]).await.unwrap()).await.is_none());
}

/// EV-913
#[tokio::test]
async fn ev_921_a_status_output_ends_with_its_action() {
    let server = Running::with_test_functions().await;
    let (send, messages) = mpsc::channel(8);
    let mut answers = call(&server, ReceiverStream::new(messages), &[])
        .await
        .unwrap();
    let slow = action("slow", &[], &[("__status__", "s")]);
    send.send(slow).await.unwrap();
    send.send(action("CANCEL", &[("action", "s")], &[("result", "r")]))
        .await
        .unwrap();
    // An empty `google.rpc.Status` is OK: the caller has cancelled the action itself.
    assert_eq!(finished(&mut answers, "s").await, "");
    drop(send);
    assert_eq!(code_and_reason(end(answers).await), (0, String::new()));
}
