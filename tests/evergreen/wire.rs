//! What our client would never send: raw messages in a bare gRPC call.

use futures::stream;
use prost::Message;
use sapwood_proto::evergreen::SessionLimits;
use sapwood_proto::evergreen::wire::SessionMessage;
use sapwood_tests::Running;
use sapwood_tests::raw::{action, call, code_and_reason, compressed, end, fragments, leaf};

/// How a session of these messages, compressed (EV-703), ends: the gRPC number and the reason.
async fn ended<M: Message + Default + 'static>(
    server: &Running,
    messages: Vec<M>,
) -> (i32, String) {
    code_and_reason(end(compressed(server, stream::iter(messages)).await).await)
}

/// EV-902
#[tokio::test]
async fn ev_703_too_large_and_malformed_messages_end_with_their_reason() {
    let server = Running::with_test_functions().await;
    let whole = |id: &str| leaf(id, 0, 6 << 20);
    let two = vec![fragments(vec![whole("a"), whole("b")])];
    assert_eq!(ended(&server, two).await, (0, String::new()));
    let three = vec![fragments(vec![whole("a"), whole("b"), whole("c")])];
    assert_eq!(ended(&server, three).await, (8, "MESSAGE_TOO_LARGE".into()));
    // Field 1 as a number where a message is expected.
    let alien = vec![prost_types::Timestamp {
        seconds: 5,
        nanos: 0,
    }];
    assert_eq!(ended(&server, alien).await, (3, "BAD_MESSAGE".into()));
}

#[tokio::test]
async fn ev_703_the_size_limit_of_a_message_is_configurable() {
    let message = fragments(vec![leaf("a", 0, 2_000)]);
    let exact = message.encoded_len();
    for (max_message_bytes, expect) in [
        (exact, (0, String::new())),
        (exact - 1, (8, "MESSAGE_TOO_LARGE".into())),
    ] {
        let limits = SessionLimits {
            max_message_bytes,
            ..SessionLimits::default()
        };
        let server = Running::limited(limits).await;
        // A compressed message counts with its decompressed size.
        assert_eq!(ended(&server, vec![message.clone()]).await, expect);
        let plain = stream::iter([message.clone()]);
        let answers = call(&server, plain, &[]).await.unwrap();
        assert_eq!(code_and_reason(end(answers).await), expect);
    }
}

#[tokio::test]
async fn limits_hold_on_the_wire_at_the_limit_and_past_it() {
    let limits = SessionLimits {
        max_fragment_bytes: 10,
        max_nodes: 3,
        max_id_bytes: 4,
        retained_bytes: 1000,
        ..SessionLimits::default()
    };
    let server = Running::limited(limits).await;
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
        let (_, found) = ended(&server, vec![fragments(list.clone())]).await;
        assert_eq!(found, reason, "{list:?}");
    }
}

#[tokio::test]
async fn malformed_options_are_refused_before_the_session_starts() {
    let server = Running::with_test_functions().await;
    for (name, value) in [
        ("evergreen-metadata", "sloppy"),
        ("evergreen-timeout-ms", "0"),
    ] {
        let nothing = stream::iter([SessionMessage::default()]);
        let refused = call(&server, nothing, &[(name, value)]).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{name}");
        assert!(refused.message().contains(name), "{}", refused.message());
    }
    // Unknown options are ignored, for later versions.
    let nothing = stream::iter([SessionMessage::default()]);
    let known = call(&server, nothing, &[("evergreen-from-tomorrow", "1")]).await;
    assert!(end(known.unwrap()).await.is_none());
}

/// EV-110
#[tokio::test]
async fn ev_110_an_input_that_never_arrived_fails_at_half_close() {
    let server = Running::with_test_functions().await;
    let message = action("echo", &[("text", "never")], &[("response", "out")]);
    let (code, reason) = ended(&server, vec![message]).await;
    assert_eq!((code, reason.as_str()), (9, "INCOMPLETE_INPUT"));
}
