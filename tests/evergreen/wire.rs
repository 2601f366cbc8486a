//! What our client would never send: raw messages, a bare gRPC call.

use std::sync::Arc;

use bytes::Bytes;
use futures::stream;
use prost::Message;
use sapwood_kernel::Kernel;
use sapwood_kernel::session::test_functions;
use sapwood_net::evergreen::grpc;
use sapwood_proto::evergreen::wire::{
    Action, Chunk, ChunkMetadata, NamedParameter, NodeFragment, Payload, SessionMessage,
};
use sapwood_proto::evergreen::{Limits, Status};
use sapwood_server::evergreen::Config;
use tonic::codec::CompressionEncoding;
use tonic::transport::Endpoint;
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

use super::Running;

/// Sends `messages` of any type and gives what comes back.
async fn call<M: Message + Default + 'static>(
    server: &Running,
    messages: Vec<M>,
    headers: &[(&'static str, &str)],
) -> Result<Streaming<SessionMessage>, tonic::Status> {
    let channel = Endpoint::from_shared(format!("http://{}", server.address))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let mut client = tonic::client::Grpc::new(channel)
        .max_decoding_message_size(usize::MAX)
        .send_compressed(CompressionEncoding::Gzip);
    client.ready().await.unwrap();
    let mut request = Request::new(stream::iter(messages));
    for (name, value) in headers {
        request.metadata_mut().insert(*name, value.parse().unwrap());
    }
    let path = http::uri::PathAndQuery::from_static(grpc::PATH);
    let codec = ProstCodec::<M, SessionMessage>::default();
    Ok(client.streaming(request, path, codec).await?.into_inner())
}

async fn end(mut answers: Streaming<SessionMessage>) -> (i32, String) {
    loop {
        match answers.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return (0, String::new()),
            Err(status) => {
                let full = Status::decode(status.details()).flatten();
                return (
                    status.code() as i32,
                    full.map(|status| status.reason.to_string())
                        .unwrap_or_default(),
                );
            }
        }
    }
}

fn leaf(id: &str, seq: i32, bytes: usize) -> NodeFragment {
    let metadata = (seq == 0).then(|| ChunkMetadata {
        mimetype: "text/plain".into(),
        ..ChunkMetadata::default()
    });
    let payload = Some(Payload::Data(Bytes::from(vec![b'x'; bytes])));
    NodeFragment {
        id: id.into(),
        seq,
        chunk_fragment: Some(Chunk { metadata, payload }),
        ..NodeFragment::default()
    }
}

fn fragments(list: Vec<NodeFragment>) -> SessionMessage {
    SessionMessage {
        node_fragments: list,
        ..SessionMessage::default()
    }
}

/// EV-902
#[tokio::test]
async fn ev_703_messages_that_are_too_large_or_no_messages_end_with_their_reason() {
    let server = Running::with_test_functions().await;
    let whole = |id: &str| NodeFragment {
        continued: false,
        ..leaf(id, 0, 6 << 20)
    };
    let two = vec![fragments(vec![whole("a"), whole("b")])];
    assert_eq!(
        end(call(&server, two, &[]).await.unwrap()).await,
        (0, String::new())
    );
    let three = vec![fragments(vec![whole("a"), whole("b"), whole("c")])];
    assert_eq!(
        end(call(&server, three, &[]).await.unwrap()).await,
        (8, "MESSAGE_TOO_LARGE".into())
    );
    // Field 1 as a number where a message is expected.
    let alien = vec![prost_types::Timestamp {
        seconds: 5,
        nanos: 0,
    }];
    assert_eq!(
        end(call(&server, alien, &[]).await.unwrap()).await,
        (3, "BAD_MESSAGE".into())
    );
}

#[tokio::test]
async fn limits_hold_on_the_wire_at_the_limit_and_past_it() {
    let limits = Limits {
        max_fragment_bytes: 10,
        max_nodes: 3,
        max_id_bytes: 4,
        retained_bytes: 1000,
        ..Limits::default()
    };
    let config = Config {
        limits: Arc::new(limits),
        ..Config::default()
    };
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let server = Running::start(kernel, config, Vec::new()).await;
    for (list, reason) in [
        (vec![leaf("a", 0, 10)], ""),
        (vec![leaf("a", 0, 11)], "FRAGMENT_LIMIT"),
        (vec![leaf("a", 0, 1), leaf("b", 0, 1), leaf("c", 0, 1)], ""),
        (
            vec![
                leaf("a", 0, 1),
                leaf("b", 0, 1),
                leaf("c", 0, 1),
                leaf("d", 0, 1),
            ],
            "NODE_LIMIT",
        ),
        (vec![leaf("abcd", 0, 1)], ""),
        (vec![leaf("abcde", 0, 1)], "BAD_ID"),
    ] {
        let ended = end(call(&server, vec![fragments(list.clone())], &[])
            .await
            .unwrap())
        .await;
        assert_eq!(ended.1, reason, "{list:?}");
    }
}

#[tokio::test]
async fn malformed_options_are_refused_before_the_session_starts() {
    let server = Running::with_test_functions().await;
    for (name, value) in [
        ("evergreen-metadata", "sloppy"),
        ("evergreen-timeout-ms", "0"),
    ] {
        let refused = call(&server, vec![SessionMessage::default()], &[(name, value)])
            .await
            .unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{name}");
        assert!(refused.message().contains(name), "{}", refused.message());
    }
    // Unknown options are for servers to come.
    let known = call(
        &server,
        vec![SessionMessage::default()],
        &[("evergreen-from-tomorrow", "1")],
    )
    .await
    .unwrap();
    assert_eq!(end(known).await.0, 0);
}

/// EV-110
#[tokio::test]
async fn ev_110_an_input_that_never_came_is_named_at_half_close() {
    let server = Running::with_test_functions().await;
    let bind = |name: &str, id: &str| {
        vec![NamedParameter {
            name: name.into(),
            id: id.into(),
        }]
    };
    let action = Action {
        name: "echo".into(),
        inputs: bind("text", "never"),
        outputs: bind("response", "out"),
        ..Action::default()
    };
    let message = SessionMessage {
        actions: vec![action],
        ..SessionMessage::default()
    };
    let (code, reason) = end(call(&server, vec![message], &[]).await.unwrap()).await;
    assert_eq!((code, reason.as_str()), (9, "INCOMPLETE_INPUT"));
}
