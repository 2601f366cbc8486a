//! The dialect of Action Engine 0.4.0, byte by byte (section 7.3). Its own client is tested in `tests/foreign/`.

use std::collections::BTreeMap;

use bytes::Bytes;
use sapwood_proto::evergreen::{Payload, SessionLimits, msgpack};
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Running, spawned, until, with_model};

/// A sample of the specification by name.
fn sample(name: &str) -> Bytes {
    let samples = include_str!("../../../testdata/evergreen/msgpack/samples.txt");
    let line = samples
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let hex: String = line.unwrap().split_whitespace().collect();
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

/// A struct: its values in a bin.
fn wrap(values: &[&[u8]]) -> Vec<u8> {
    let inner = values.concat();
    let mut out = match inner.len() {
        len @ 0..256 => vec![0xc4, len as u8],
        len => [&[0xc5], &(len as u16).to_be_bytes()[..]].concat(),
    };
    out.extend(inner);
    out
}

fn text(text: &str) -> Vec<u8> {
    let mut out = if text.len() < 32 {
        vec![0xa0 | text.len() as u8]
    } else {
        vec![0xd9, text.len() as u8]
    };
    out.extend_from_slice(text.as_bytes());
    out
}

fn list(items: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0x90 | items.len() as u8];
    items.iter().for_each(|item| out.extend(item));
    out
}

fn ports(ports: &[(&str, &str)]) -> Vec<u8> {
    let port = |(name, id): &(&str, &str)| wrap(&[&text(name), &text(id)]);
    list(&ports.iter().map(port).collect::<Vec<_>>())
}

fn call(id: &str, name: &str, inputs: &[(&str, &str)], outputs: &[(&str, &str)]) -> Vec<u8> {
    wrap(&[
        &text(id),
        &text(name),
        &ports(inputs),
        &ports(outputs),
        &[0],
    ])
}

/// A fragment of text; `seq` may be anything, nil included.
fn piece(node: &str, seq: &[u8], data: &str, continued: bool) -> Vec<u8> {
    let metadata = wrap(&[&text("text/plain"), &[0xc0], &[0]]);
    let chunk = wrap(&[&wrap(&[data.as_bytes()]), &text(""), &metadata]);
    let continued = [if continued { 0xc3 } else { 0xc2 }];
    wrap(&[&[0], &chunk, &continued, &text(node), seq])
}

/// A fragment, not the last, that refers to bytes of another node; the length is nil for the rest.
fn node_ref(node: &str, seq: u8, child: &str, offset: u8, len: u8) -> Vec<u8> {
    let child = wrap(&[&text(child), &[offset], &[len]]);
    wrap(&[&[1], &child, &[0xc3], &text(node), &[seq]])
}

fn message(fragments: &[Vec<u8>], actions: &[Vec<u8>]) -> Vec<u8> {
    wrap(&[&list(fragments), &list(actions), &[0]])
}

async fn speaking(server: &Running) -> Socket {
    Socket::speaking(server, "actionengine.msgpack").await
}

/// What a node holds: texts of its fragments, and its status (`None`: none; OK is code 0).
#[derive(Debug, Default, PartialEq, Eq)]
struct Detached {
    texts: Vec<String>,
    status: Option<(u8, String)>,
    ended: bool,
}

/// Assembles the nodes from the server's messages. Fragments are in order, and none follows a final one.
fn nodes(reply: &[SocketReply]) -> BTreeMap<String, Detached> {
    let mut nodes: BTreeMap<String, Detached> = BTreeMap::new();
    let mut next: BTreeMap<String, i32> = BTreeMap::new();
    for reply in reply {
        let SocketReply::Binary(bytes) = reply else {
            panic!("{reply:?} is no binary message")
        };
        for fragment in msgpack::decode(bytes.clone()).unwrap().message.fragments {
            let id = fragment.id.to_string();
            let retained = nodes.entry(id.clone()).or_default();
            let position = next.entry(id).or_default();
            assert_eq!(
                (fragment.seq, retained.ended),
                (*position, false),
                "{}",
                fragment.id
            );
            *position += 1;
            retained.ended = fragment.last;
            assert!(
                fragment.last || fragment.chunk.is_some(),
                "no null chunk before the end"
            );
            match fragment.chunk.and_then(|chunk| chunk.payload) {
                Some(Payload::Data(data)) => {
                    retained
                        .texts
                        .push(String::from_utf8(data.to_vec()).unwrap());
                }
                Some(Payload::Status(status)) => {
                    let reply = status.map(|status| (status.code.grpc(), status.message.clone()));
                    retained.status = Some(reply.unwrap_or_default());
                }
                _ => {}
            }
        }
    }
    nodes
}

fn ok() -> Detached {
    Detached {
        status: Some((0, String::new())),
        ended: true,
        ..Detached::default()
    }
}

/// EV-735, EV-736, EV-738
#[tokio::test]
async fn ev_733_each_chunk_is_a_fragment_and_an_action_gets_both_statuses() {
    let server = Running::with_test_functions().await;
    let other = Socket::open(&server, "/elsewhere", &[]).await;
    assert!(other.is_err(), "only on paths that are served");
    // Detected by its first byte, as its clients choose no subprotocol.
    let mut socket = Socket::open(&server, "/", &[]).await.unwrap();
    let echo = call("A", "echo", &[("text", "p")], &[("response", "")]);
    let first = [
        piece("p", &[0], "one ", true),
        piece("p", &[1], "two", true),
    ];
    socket.send(message(&first, &[echo])).await;
    socket
        .send(message(&[piece("p", &[2], "!", false)], &[]))
        .await;
    socket.send(sample("half-close")).await;
    let (reply, close) = socket.rest().await;
    assert_eq!(
        reply.last(),
        Some(&SocketReply::Binary(sample("half-close")))
    );
    assert_eq!(close, Some((1000, String::new())));
    let mut nodes = nodes(&reply);
    let response = Detached {
        texts: ["one ", "two", "!"].map(String::from).to_vec(),
        ended: true,
        ..Detached::default()
    };
    // EV-734: a port without an id has the default one.
    assert_eq!(nodes.remove("A#response"), Some(response));
    assert_eq!(nodes.remove("A#__dispatch_status__"), Some(ok()));
    assert_eq!(nodes.remove("A#__status__"), Some(ok()));
    assert!(nodes.is_empty(), "{nodes:?}");
}

/// EV-730
#[tokio::test]
async fn ev_735_the_status_comes_after_all_outputs_however_long_they_are() {
    let server = Running::with_test_functions().await;
    let mut socket = speaking(&server).await;
    let long = "x".repeat(60_000);
    let echo = call("A", "echo", &[("text", "p")], &[("response", "r")]);
    socket.send(message(&[], &[echo])).await;
    for seq in 0..40 {
        let last = seq == 39;
        let metadata = wrap(&[&text("text/plain"), &[0xc0], &[0]]);
        let chunk = wrap(&[&wrap(&[long.as_bytes()]), &text(""), &metadata]);
        let continued = [if last { 0xc2 } else { 0xc3 }];
        let fragment = wrap(&[&[0], &chunk, &continued, &text("p"), &[seq]]);
        socket.send(message(&[fragment], &[])).await;
    }
    socket.send(sample("half-close")).await;
    let (reply, _) = socket.rest().await;
    let ids = reply.iter().flat_map(|reply| {
        let SocketReply::Binary(bytes) = reply else {
            panic!()
        };
        let read = msgpack::decode(bytes.clone()).unwrap();
        read.message
            .fragments
            .into_iter()
            .map(|fragment| fragment.id.to_string())
    });
    let ids: Vec<String> = ids.collect();
    assert_eq!(ids.iter().filter(|id| *id == "r").count(), 40);
    assert_eq!(ids.first().unwrap(), "A#__dispatch_status__");
    assert_eq!(ids.last().unwrap(), "A#__status__");
}

#[tokio::test]
async fn ev_737_a_failure_ends_the_outputs_of_its_action_and_not_the_session() {
    let server = Running::with_test_functions().await;
    let mut socket = speaking(&server).await;
    let unknown = call("A", "nobody", &[], &[("response", "")]);
    let failing = call("B", "fail", &[], &[("response", "")]);
    socket.send(message(&[], &[unknown, failing])).await;
    let echo = call("C", "echo", &[("text", "p")], &[("response", "")]);
    socket
        .send(message(&[piece("p", &[0], "on", false)], &[echo]))
        .await;
    socket.send(sample("half-close")).await;
    let (reply, close) = socket.rest().await;
    let nodes = nodes(&reply);
    assert_eq!(close, Some((1000, String::new())));
    let unknown = (5, "Action not found in registry: nobody.".to_owned());
    for node in ["A#response", "A#__dispatch_status__", "A#__status__"] {
        assert_eq!(nodes[node].status, Some(unknown.clone()), "{node}");
    }
    assert_eq!(nodes["B#__dispatch_status__"], ok());
    let code = |node: &str| nodes[node].status.as_ref().map(|status| status.0);
    assert_eq!(code("B#response"), Some(13));
    assert_eq!(code("B#__status__"), Some(13));
    assert!(!nodes["B#response"].texts.is_empty());
    assert_eq!(
        (&*nodes["C#response"].texts, code("C#__status__")),
        (&["on".to_owned()][..], Some(0))
    );
}

#[tokio::test]
async fn ev_738_a_message_with_headers_alone_is_no_half_close() {
    let server = Running::with_test_functions().await;
    let mut socket = speaking(&server).await;
    socket
        .send(wrap(&[&[0x90], &[0x90], &[1], &text("a"), &text("b")]))
        .await;
    let echo = call("A", "echo", &[("text", "p")], &[("response", "")]);
    socket
        .send(message(&[piece("p", &[0], "x", false)], &[echo]))
        .await;
    socket.send(sample("half-close")).await;
    let (reply, _) = socket.rest().await;
    assert_eq!(nodes(&reply)["A#response"].texts, ["x"]);
}

#[tokio::test]
async fn ev_739_an_abort_sends_the_status_of_every_open_node_before_the_close() {
    let server = Running::with_test_functions().await;
    let running = &server.shared.metrics.evergreen.actions_open;
    let mut socket = speaking(&server).await;
    let slow = |id| call(id, "slow", &[], &[("response", "")]);
    socket.send(message(&[], &[slow("A"), slow("B")])).await;
    until("both run", || running.get() == 2).await;
    // Only the server may write the node of an output.
    socket
        .send(message(&[piece("A#response", &[0], "x", false)], &[]))
        .await;
    let (mut reply, close) = socket.rest().await;
    assert_eq!(
        close,
        Some((1011, "INVALID_ARGUMENT: NODE_OWNER".to_owned()))
    );
    let last = reply.split_off(reply.len() - 1);
    let abort = nodes(&last);
    assert_eq!(abort.len(), 1);
    assert_eq!(abort["__abort__"].status.as_ref().unwrap().0, 3);
    let nodes = nodes(&reply);
    for node in ["A#response", "A#__status__", "B#response", "B#__status__"] {
        assert_eq!(nodes[node].status.as_ref().unwrap().0, 3, "{node}");
    }
    let mut socket = speaking(&server).await;
    socket.send(vec![0xc4, 0x01]).await;
    let (_, close) = socket.rest().await;
    assert_eq!(
        close,
        Some((1007, "INVALID_ARGUMENT: BAD_MESSAGE".to_owned()))
    );
}

/// EV-955
#[tokio::test]
async fn d_55_a_msgpack_session_may_echo_more_than_its_quota_without_an_option() {
    let quota = 1 << 20;
    let server = Running::limited(SessionLimits {
        retained_bytes: quota,
        ..SessionLimits::default()
    })
    .await;
    let mut socket = speaking(&server).await;
    let echo = call("A", "echo", &[("text", "p")], &[("response", "")]);
    socket.send(message(&[], &[echo])).await;
    let data = "x".repeat(20_000);
    let (mut sent, mut back) = (0, 0);
    while sent < 4 * quota as usize {
        socket
            .send(message(&[piece("p", &[0xc0], &data, true)], &[]))
            .await;
        sent += data.len();
        // Like a conversation: the answer is read before the next question is sent.
        while back < sent {
            let SocketReply::Binary(bytes) = socket.received().await else {
                panic!("the session has ended after {back} bytes");
            };
            for fragment in msgpack::decode(bytes).unwrap().message.fragments {
                let payload = fragment.chunk.and_then(|chunk| chunk.payload);
                if let (Some(Payload::Data(data)), "A#response") = (payload, &*fragment.id) {
                    back += data.len();
                }
            }
        }
    }
    socket
        .send(message(&[piece("p", &[0xc0], "", false)], &[]))
        .await;
    socket.send(sample("half-close")).await;
    let (_, close) = socket.rest().await;
    assert_eq!(close.map(|(code, _)| code), Some(1000));
}

/// EV-731
#[tokio::test]
async fn ev_740_the_first_duplicate_wins_late_fragments_are_ignored_and_no_seq_is_the_next() {
    let server = Running::with_test_functions().await;
    let mut socket = speaking(&server).await;
    let echo = call("A", "echo", &[("text", "p")], &[("response", "")]);
    let fragments = [
        piece("p", &[0xc0], "a", true),
        piece("p", &[0], "no", true),
        piece("p", &[0xff], "b", true),
        piece("p", &[0xc0], "c", false),
        piece("p", &[7], "past", true),
        piece("p", &[0xc0], "past", false),
    ];
    socket.send(message(&fragments, &[echo])).await;
    // A final fragment that arrives after a fragment past the end.
    let echo = call("B", "echo", &[("text", "q")], &[("response", "")]);
    let fragments = [
        piece("q", &[2], "out", true),
        piece("q", &[1], "y", false),
        piece("q", &[0], "x", true),
    ];
    socket.send(message(&fragments, &[echo])).await;
    socket.send(sample("half-close")).await;
    let (reply, close) = socket.rest().await;
    assert_eq!(close, Some((1000, String::new())));
    let nodes = nodes(&reply);
    assert_eq!(nodes["A#response"].texts, ["a", "b", "c"]);
    assert_eq!(nodes["B#response"].texts, ["x", "y"]);
}

#[tokio::test]
async fn ev_740_a_node_may_mix_chunks_and_node_refs() {
    let server = Running::with_test_functions().await;
    let mut socket = speaking(&server).await;
    let echo = call("A", "echo", &[("text", "m")], &[("response", "")]);
    let fragments = [
        piece("m", &[0], "first ", true),
        node_ref("m", 1, "whole", 0, 0xc0),
        node_ref("m", 2, "whole", 3, 5),
        piece("m", &[3], " last", false),
        piece("whole", &[0], "01234", true),
        piece("whole", &[1], "56789", false),
    ];
    socket.send(message(&fragments, &[echo])).await;
    socket.send(sample("half-close")).await;
    let (reply, close) = socket.rest().await;
    assert_eq!(close, Some((1000, String::new())));
    let nodes = nodes(&reply);
    let expect = ["first ", "01234", "56789", "34", "567", " last"];
    assert_eq!(nodes["A#response"].texts, expect);
    assert_eq!(nodes["A#__status__"], ok());
}

#[tokio::test]
async fn ev_740_choices_share_one_port_and_carry_their_number() {
    let engine = spawned(sapwood_engine::scripted::Config::default());
    let server = Running::over(with_model(engine)).await;
    let mut socket = speaking(&server).await;
    let ports = [("prompt", "p"), ("config", "c")];
    let call = call("A", "GENERATE", &ports, &[("response", "")]);
    let config = piece("c", &[0], r#"{"n":2,"max_tokens":4}"#, false);
    socket
        .send(message(&[piece("p", &[0], "Hi", false), config], &[call]))
        .await;
    socket.send(sample("half-close")).await;
    let (reply, _) = socket.rest().await;
    let mut choices = Vec::new();
    for reply in &reply {
        let SocketReply::Binary(bytes) = reply else {
            panic!()
        };
        for fragment in msgpack::decode(bytes.clone()).unwrap().message.fragments {
            assert!(
                fragment.children.is_empty(),
                "no NodeRef for a 0.4.0 client"
            );
            let metadata = fragment.chunk.and_then(|chunk| chunk.metadata);
            let attributes = metadata.map(|metadata| metadata.experimental.clone());
            choices.extend(attributes.into_iter().flatten().map(|any| any.value));
        }
    }
    let of = |choice: &[u8]| {
        choices
            .iter()
            .filter(|value| value.ends_with(choice))
            .count()
    };
    assert!(of(b"0") > 0 && of(b"1") > 0, "{choices:?}");
    assert_eq!(nodes(&reply)["A#__status__"], ok());
}

/// EV-742
#[tokio::test]
async fn ev_741_finished_actions_are_released_and_a_long_session_does_not_grow() {
    let server = Running::with_test_functions().await;
    let retained = &server.shared.metrics.evergreen.retained_bytes;
    let mut socket = speaking(&server).await;
    let mut most = 0;
    for round in 0..40 {
        let (id, node) = (format!("A{round}"), format!("p{round}"));
        let echo = call(&id, "echo", &[("text", &node)], &[("response", "")]);
        let long = "x".repeat(200);
        socket
            .send(message(&[piece(&node, &[0], &long, false)], &[echo]))
            .await;
        let status = format!("{id}#__status__");
        loop {
            let reply = socket.received().await;
            if nodes_of(&reply).contains(&status) {
                break;
            }
        }
        // Later fragments of it are ignored.
        socket
            .send(message(&[piece(&node, &[1], "late", true)], &[]))
            .await;
        if round == 10 {
            most = retained.get();
        }
    }
    let ids = 30 * 100;
    assert!(
        retained.get() <= most + ids,
        "{} after {most}",
        retained.get()
    );
    let ping = call("P", "__ping__", &[], &[]);
    let list = call("L", "__list_actions__", &[], &[("actions", "")]);
    let slow = call("S", "slow", &[], &[("response", "")]);
    let cancel = call("C", "CANCEL", &[("action", "S")], &[("result", "")]);
    socket.send(message(&[], &[ping, list, slow])).await;
    socket.send(message(&[], &[cancel])).await;
    socket.send(sample("half-close")).await;
    let (reply, _) = socket.rest().await;
    let nodes = nodes(&reply);
    assert_eq!(nodes["P#__status__"], ok());
    assert!(nodes["L#actions"].texts.concat().contains("\"echo\""));
    assert_eq!(nodes["C#result"].texts, [r#"{"cancelled":true}"#]);
    assert_eq!(nodes["S#__status__"], ok());
}

fn nodes_of(reply: &SocketReply) -> Vec<String> {
    let SocketReply::Binary(bytes) = reply else {
        panic!()
    };
    let read = msgpack::decode(bytes.clone()).unwrap();
    read.message
        .fragments
        .iter()
        .map(|fragment| fragment.id.to_string())
        .collect()
}

#[tokio::test]
async fn ev_732_an_older_client_gets_responses_in_its_own_layout() {
    let server = Running::with_test_functions().await;
    let mut socket = speaking(&server).await;
    let echo = wrap(&[
        &text("A"),
        &text("echo"),
        &ports(&[("text", "p")]),
        &ports(&[("response", "r")]),
    ]);
    let older = wrap(&[&list(&[piece("p", &[0], "old", false)]), &list(&[echo])]);
    socket.send(older).await;
    let reply = socket.received().await;
    let SocketReply::Binary(bytes) = reply else {
        panic!()
    };
    assert!(msgpack::decode(bytes).unwrap().older);
}
