//! WebSocket-protobuf: the messages of gRPC, each a binary message (EV-710).

use bytes::Bytes;
use prost::Message;
use sapwood_proto::evergreen::Status;
use sapwood_proto::evergreen::wire::{Payload, SessionMessage};
use sapwood_tests::Running;
use sapwood_tests::raw::{action, fragments, leaf, piece};
use sapwood_tests::socket::{Socket, SocketReply};

/// Sends messages.
async fn send(socket: &mut Socket, messages: impl IntoIterator<Item = SessionMessage>) {
    for message in messages {
        socket.send(message.encode_to_vec()).await;
    }
}

/// The message that was received.
fn message(reply: &SocketReply) -> SessionMessage {
    match reply {
        SocketReply::Binary(bytes) => SessionMessage::decode(bytes.clone()).unwrap(),
        other => panic!("{other:?} is no binary message"),
    }
}

/// The bytes of a node in a list of messages.
fn content(reply: &[SocketReply], id: &str) -> Vec<u8> {
    let all = reply.iter().flat_map(|reply| message(reply).node_fragments);
    let chunks = all
        .filter(|fragment| fragment.id == id)
        .filter_map(|fragment| fragment.chunk_fragment?.payload);
    chunks
        .flat_map(|payload| match payload {
            Payload::Data(data) => data,
            Payload::Ref(_) => Bytes::new(),
        })
        .collect()
}

/// The status in the last message.
fn last_words(reply: &[SocketReply]) -> Status {
    let last = message(reply.last().unwrap()).node_fragments.remove(0);
    assert_eq!((&*last.id, last.continued), ("__abort__", false));
    let chunk = last.chunk_fragment.unwrap();
    let kind = "application/x-protobuf; type=google.rpc.Status";
    assert_eq!(chunk.metadata.unwrap().mimetype, kind);
    let Some(Payload::Data(data)) = chunk.payload else {
        panic!("no data")
    };
    Status::decode(&data).unwrap().unwrap()
}

fn finish() -> SessionMessage {
    action("FINISH", &[], &[])
}

/// EV-924
#[tokio::test]
async fn ev_710_messages_are_those_of_grpc_and_finish_is_the_half_close() {
    let server = Running::with_test_functions().await;
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    assert!(
        socket.headers["evergreen-extensions"]
            .to_str()
            .unwrap()
            .contains("cancel")
    );
    let echo = action("echo", &[("text", "p")], &[("response", "r")]);
    send(&mut socket, [echo]).await;
    for seq in 0..3 {
        send(&mut socket, [fragments(vec![piece("p", seq, 5)])]).await;
    }
    send(&mut socket, [fragments(vec![leaf("p", 3, 5)]), finish()]).await;
    let (reply, close) = socket.rest().await;
    assert_eq!(content(&reply, "r"), vec![b'x'; 20]);
    let last = message(reply.last().unwrap()).node_fragments.pop().unwrap();
    assert!(!last.continued, "the output is final before the end");
    assert_eq!(close, Some((1000, String::new())));
}

#[tokio::test]
async fn ev_924_other_parts_of_the_message_with_finish_are_handled() {
    let server = Running::with_test_functions().await;
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    let mut all = finish();
    let echo = action("echo", &[("text", "p")], &[("response", "r")]);
    all.actions.extend(echo.actions);
    all.node_fragments = vec![leaf("p", 0, 7)];
    send(&mut socket, [all]).await;
    let (reply, close) = socket.rest().await;
    assert_eq!(content(&reply, "r").len(), 7);
    assert_eq!(close, Some((1000, String::new())));
    // An input that was never sent fails the action at once.
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    let echo = action("echo", &[("text", "p")], &[("response", "r")]);
    send(&mut socket, [echo, finish()]).await;
    let (reply, close) = socket.rest().await;
    assert_eq!(last_words(&reply).reason, "INCOMPLETE_INPUT");
    let reason = "FAILED_PRECONDITION: INCOMPLETE_INPUT".to_owned();
    assert_eq!(close, Some((1008, reason)));
}

#[tokio::test]
async fn ev_903_the_last_message_is_the_status_and_the_close_frame_repeats_it() {
    let server = Running::with_test_functions().await;
    let past = fragments(vec![leaf("p", 0, 1), leaf("p", 7, 1)]);
    let failing = action("fail", &[], &[("response", "r")]);
    for (bytes, code, reason, close) in [
        (past.encode_to_vec(), 3, "SEQ_PAST_FINAL", 1008),
        (vec![0x0a, 0x05, 0x01], 3, "BAD_MESSAGE", 1007),
        (failing.encode_to_vec(), 13, "FUNCTION", 1011),
    ] {
        let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
        socket.send(bytes).await;
        let (reply, found) = socket.rest().await;
        let status = last_words(&reply);
        assert_eq!((status.code.grpc(), &*status.reason), (code, reason));
        let text = format!("{}: {reason}", status.code.grpc_name());
        assert_eq!(found, Some((close, text)));
    }
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    send(
        &mut socket,
        [fragments(vec![leaf("p", 0, 1), leaf("p", 7, 1)])],
    )
    .await;
    let (reply, _) = socket.rest().await;
    let status = last_words(&reply);
    assert_eq!(status.detail("node"), Some("p"));
    assert_eq!(status.detail("seq"), Some("7"));
}

/// EV-930, EV-931
#[tokio::test]
async fn ev_930_partial_failure_can_be_set_in_the_query() {
    let server = Running::with_test_functions().await;
    let path = "/evergreen?evergreen-partial-failure=1";
    let mut socket = Socket::open(&server, path, &[]).await.unwrap();
    let failing = action("fail", &[], &[("response", "r"), ("__status__", "s")]);
    send(&mut socket, [failing, finish()]).await;
    let (reply, close) = socket.rest().await;
    assert!(content(&reply, "r").len() > 5 && !content(&reply, "s").is_empty());
    assert_eq!(close, Some((1000, String::new())));
}
