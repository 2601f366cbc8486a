//! Tests of what surrounds messages: statuses of actions, half-close, abort and close.

use bytes::BytesMut;

use super::*;
use crate::evergreen::msgpack::tests::{hex, sample};
use crate::evergreen::{NodeId, Param};
use crate::session::{Config, SessionMachine};
use crate::time::Time;

fn binary(bytes: Bytes) -> WebSocketFrame {
    WebSocketFrame::Binary(bytes)
}

fn message(received: Result<FrameContent, Status>) -> WireMessage {
    match received {
        Ok(FrameContent::Message(message)) => message,
        other => panic!("{other:?} is no message"),
    }
}

/// A msgpack server that has received the action of the sample.
fn with_action() -> (Codec, WireMessage) {
    let mut codec = Codec::new(Dialect::Msgpack, Side::Server);
    let message = message(codec.decode(binary(sample("action"))));
    (codec, message)
}

fn data(id: &str, seq: i32, last: bool) -> Fragment {
    let metadata = Some(Arc::new(crate::evergreen::Metadata::of("text/plain")));
    let payload = Some(Payload::Data(Bytes::from_static(b"x")));
    Fragment {
        id: NodeId::from(id.to_owned()),
        seq,
        last,
        chunk: Some(Chunk { metadata, payload }),
        ..Fragment::default()
    }
}

fn ended(id: &str, status: Option<Status>) -> Fragment {
    Fragment {
        chunk: Some(Chunk {
            metadata: None,
            payload: Some(Payload::Status(status.map(Arc::new))),
        }),
        ..data(id, 0, true)
    }
}

fn send(codec: &mut Codec, fragments: Vec<Fragment>) -> Bytes {
    let mut out = BytesMut::new();
    let message = WireMessage {
        fragments: fragments.into(),
        ..WireMessage::default()
    };
    codec.encode(&message, 0, &mut out);
    out.freeze()
}

/// The fragments of some bytes as `id@seq`, with the code of those that are failures.
fn decoded(bytes: &[u8]) -> Vec<(String, u8)> {
    let read = msgpack::decode(Bytes::copy_from_slice(bytes)).unwrap();
    let one = |fragment: Fragment| {
        assert!(fragment.last);
        let code = match fragment.chunk.and_then(|chunk| chunk.payload) {
            Some(Payload::Status(Some(status))) => status.code.grpc(),
            _ => 0,
        };
        (format!("{}@{}", fragment.id, fragment.seq), code)
    };
    read.message.fragments.into_iter().map(one).collect()
}

/// EV-735
#[test]
fn ev_736_an_action_has_two_status_nodes_beside_its_ports() {
    let (_, message) = with_action();
    let outputs: Vec<(&str, &str)> = message.actions[0]
        .outputs
        .iter()
        .map(|param| (&*param.name, &*param.id))
        .collect();
    let expect = [
        ("response", "r"),
        ("__dispatch_status__", "A1#__dispatch_status__"),
        ("__status__", "A1#__status__"),
    ];
    assert_eq!(outputs, expect);
}

#[test]
fn ev_739_open_outputs_are_ended_in_a_message_before_the_abort() {
    let (mut codec, _) = with_action();
    send(&mut codec, vec![ended("A1#__dispatch_status__", None)]);
    send(&mut codec, vec![data("r", 0, false), data("r", 1, false)]);
    let status = Arc::new(Status::new(Reason::RetainedLimit, "full"));
    let words = codec.abort(&status, 0);
    let received: Vec<_> = words.iter().map(|word| decoded(word)).collect();
    let expect = vec![
        vec![("r@2".to_owned(), 8), ("A1#__status__@0".to_owned(), 8)],
        vec![("__abort__@0".to_owned(), 8)],
    ];
    assert_eq!(received, expect);
    let close = codec.close(Some(&status));
    assert_eq!(
        (close.code, &*close.reason),
        (1011, "RESOURCE_EXHAUSTED: RETAINED_LIMIT")
    );
    // Outputs that have ended are not ended again.
    let (mut codec, _) = with_action();
    for node in ["A1#__dispatch_status__", "r", "A1#__status__"] {
        send(&mut codec, vec![ended(node, None)]);
    }
    assert_eq!(codec.abort(&status, 0).len(), 1);
}

/// EV-924
#[test]
fn ev_738_an_empty_message_is_the_half_close_from_either_side() {
    let mut out = BytesMut::new();
    for side in [Side::Server, Side::Client] {
        let mut codec = Codec::new(Dialect::Msgpack, side);
        assert_eq!(
            codec.decode(binary(sample("half-close"))),
            Ok(FrameContent::Finish)
        );
        let with_header = hex("c4 07 90 90 01 a1 61 a1 62");
        assert_eq!(codec.decode(binary(with_header)), Ok(FrameContent::Nothing));
        assert!(codec.finish(0, &mut out));
        assert_eq!(out.split(), sample("half-close"));
    }
    for dialect in [Dialect::Protobuf, Dialect::Json] {
        assert!(Codec::new(dialect, Side::Client).finish(0, &mut out));
        let frame = match dialect {
            Dialect::Json => WebSocketFrame::Text(out.split().freeze()),
            _ => binary(out.split().freeze()),
        };
        let mut server = Codec::new(dialect, Side::Server);
        assert_eq!(&*message(server.decode(frame)).actions[0].name, FINISH);
        assert!(!server.finish(0, &mut out) && out.is_empty());
    }
}

#[test]
fn ev_742_reserved_names_are_translated_and_cancel_accepts_an_action_id() {
    let (mut codec, _) = with_action();
    let mut client = Codec::new(Dialect::Msgpack, Side::Client);
    let mut out = BytesMut::new();
    for (name, input, expect) in [
        ("CANCEL", "A1", ("CANCEL", "A1#__status__")),
        ("CANCEL", "r", ("CANCEL", "r")),
        ("__list_actions__", "A1", ("LIST_ACTIONS", "A1")),
        ("__ping__", "x", ("__ping__", "x")),
    ] {
        let action = Action {
            name: name.into(),
            inputs: vec![Param::new("action", input)],
            ..Action::default()
        };
        let asked = WireMessage {
            actions: vec![action],
            ..WireMessage::default()
        };
        client.encode(&asked, 0, &mut out);
        let received = message(codec.decode(binary(out.split().freeze())));
        let action = &received.actions[0];
        assert_eq!((&*action.name, &*action.inputs[0].id), expect);
    }
}

/// A client that has sent an action with these outputs, and the action's id.
fn asking(outputs: &[&'static str]) -> (Codec, NodeId) {
    let mut client = Codec::new(Dialect::Msgpack, Side::Client);
    let mut out = BytesMut::new();
    let action = Action {
        name: "F".into(),
        outputs: outputs.iter().map(|id| Param::new(*id, *id)).collect(),
        ..Action::default()
    };
    let asked = WireMessage {
        actions: vec![action],
        ..WireMessage::default()
    };
    client.encode(&asked, 0, &mut out);
    let read = msgpack::decode(out.freeze()).unwrap();
    (client, read.ids[0].clone())
}

/// EV-735, EV-976
#[test]
fn ev_972_a_client_removes_status_nodes_and_ends_outputs_left_open() {
    let failed = || Some(Status::other(Code::Internal, "", "no"));
    for (reply, expect) in [
        // Success; the server ended both outputs.
        (
            vec![
                data("a", 0, true),
                data("b", 0, true),
                ended("__status__", None),
            ],
            vec!["a@0", "b@0"],
        ),
        // Failure; the server ended one output.
        (
            vec![
                data("a", 0, true),
                data("b", 0, false),
                ended("__status__", failed()),
            ],
            vec!["a@0", "b@0", "b@1!"],
        ),
        // Success; the server did not end one output.
        (
            vec![data("a", 0, true), ended("__status__", None)],
            vec!["a@0", "b@0!"],
        ),
        // The action could not be dispatched.
        (
            vec![ended("__dispatch_status__", failed())],
            vec!["a@0!", "b@0!"],
        ),
        (vec![ended("__dispatch_status__", None)], vec![]),
    ] {
        let (mut client, id) = asking(&["a", "b"]);
        let reply = reply.into_iter().map(|mut fragment| {
            if fragment.id.starts_with("__") {
                fragment.id = format!("{id}#{}", fragment.id).into();
            }
            fragment
        });
        let bytes = send(
            &mut Codec::new(Dialect::Msgpack, Side::Server),
            reply.collect(),
        );
        let received = message(client.decode(binary(bytes)));
        let received: Vec<String> = received
            .fragments
            .iter()
            .map(|fragment| {
                let payload = fragment
                    .chunk
                    .as_ref()
                    .and_then(|chunk| chunk.payload.as_ref());
                let mark = if matches!(payload, Some(Payload::Status(Some(_)))) {
                    "!"
                } else {
                    ""
                };
                format!("{}@{}{mark}", fragment.id, fragment.seq)
            })
            .collect();
        assert_eq!(received, expect);
    }
}

#[test]
fn ev_903_the_peer_decodes_the_abort_of_every_dialect() {
    let status = Arc::new(Status::new(Reason::SeqPastFinal, "past").with("node", "p"));
    for (dialect, close) in [
        (Dialect::Protobuf, 1008),
        (Dialect::Json, 1008),
        (Dialect::Msgpack, 1011),
    ] {
        let mut server = Codec::new(dialect, Side::Server);
        let mut words = server.abort(&status, 0);
        assert_eq!(words.len(), 1);
        let bytes = words.remove(0).freeze();
        let frame = if server.is_text() {
            WebSocketFrame::Text(bytes)
        } else {
            binary(bytes)
        };
        let received = Codec::new(dialect, Side::Client).decode(frame);
        let Ok(FrameContent::Abort(received)) = received else {
            panic!("{received:?} is no abort");
        };
        assert_eq!((received.code, &*received.message), (status.code, "past"));
        if dialect != Dialect::Msgpack {
            assert_eq!(received, *status);
        }
        let closed = server.close(Some(&status));
        assert_eq!(
            (closed.code, &*closed.reason),
            (close, "INVALID_ARGUMENT: SEQ_PAST_FINAL")
        );
        assert_eq!(
            status_of_close(close, &closed.reason).unwrap().known(),
            status.known()
        );
        assert_eq!(server.close(None).code, 1000);
        assert_eq!(status_of_close(1000, ""), None);
    }
    let long = Status::other(Code::Internal, "é".repeat(200), "");
    let reason = Codec::new(Dialect::Json, Side::Server)
        .close(Some(&long))
        .reason;
    assert!(reason.len() <= 123 && reason.len() > 120);
}

#[test]
fn ev_701_a_later_frame_of_the_wrong_kind_is_refused() {
    let text = || WebSocketFrame::Text(Bytes::from_static(b"{}"));
    for dialect in [Dialect::Protobuf, Dialect::Msgpack] {
        let mut codec = Codec::new(dialect, Side::Server);
        assert_eq!(
            codec.decode(binary(Bytes::new())),
            Ok(FrameContent::Nothing)
        );
        let refused = codec.decode(text()).unwrap_err();
        assert_eq!(refused.known(), Some(Reason::BadMessage));
        assert_eq!(codec.close(Some(&refused)).code, 1003);
    }
    let mut json = Codec::new(Dialect::Json, Side::Server);
    let refused = json
        .decode(binary(Bytes::from_static(b"\x0a\x00")))
        .unwrap_err();
    assert_eq!(json.close(Some(&refused)).code, 1007);
    assert_eq!(
        json.decode(binary(Bytes::from_static(b"{}"))),
        Ok(FrameContent::Message(WireMessage {
            wire_bytes: 2,
            ..WireMessage::default()
        }))
    );
    let mut alien = Codec::new(Dialect::Protobuf, Side::Server);
    let refused = alien.decode(binary(sample("fragment"))).unwrap_err();
    assert_eq!(alien.close(Some(&refused)).code, 1007);
}

/// EV-203
#[test]
fn ev_740_every_child_of_a_tree_reaches_a_msgpack_peer() {
    for (side, other, config) in [
        (
            Side::Client,
            Side::Server,
            Config::for_server_of(Dialect::Msgpack),
        ),
        (
            Side::Server,
            Side::Client,
            Config::for_client_of(Dialect::Msgpack),
        ),
    ] {
        let mut session = SessionMachine::new(side, config, Time::ZERO);
        let made: Result<Vec<_>, _> = (0..4).map(|_| session.nodes().make(None)).collect();
        let [tree, children @ ..] = &made.unwrap()[..] else {
            panic!("four nodes were made");
        };
        session.nodes().list(*tree, children).unwrap();
        session.nodes().end(*tree, &Arc::default()).unwrap();
        let sent = session.next_message(Time::ZERO).unwrap();
        let mut out = BytesMut::new();
        Codec::new(Dialect::Msgpack, side).encode(&sent, 0, &mut out);
        let mut peer = Codec::new(Dialect::Msgpack, other);
        let received = message(peer.decode(binary(out.freeze()))).fragments;
        let listed = received.iter().flat_map(|fragment| &fragment.children);
        let ids = children.iter().map(|child| session.id(*child).unwrap());
        assert!(listed.eq(ids), "{received:?}");
        let seqs = received.iter().map(|fragment| fragment.seq);
        assert!(seqs.eq(0..3), "{received:?}");
    }
}
