//! Trees with cycles, too much depth, or exponential size.

use futures::stream;
use prost::Message;
use sapwood_engine::scripted;
use sapwood_proto::evergreen::SessionLimits;
use sapwood_proto::evergreen::wire::{NodeFragment, SessionMessage};
use sapwood_tests::raw::{action, call, code_and_reason, end, fragments, leaf, tree};
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Running, spawned, with_model};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::super::extensions::finished;
use super::sizes::resident;
use super::{honest, unharmed};

async fn ended(server: &Running, messages: Vec<SessionMessage>) -> (i32, String) {
    code_and_reason(end(call(server, stream::iter(messages), &[]).await.unwrap()).await)
}

/// A chain of trees, each listing the next.
fn chain(length: usize) -> Vec<NodeFragment> {
    let link = |at: usize| tree(&at.to_string(), &[&(at + 1).to_string()]);
    (0..length).map(link).collect()
}

/// The fragments in messages of a thousand each.
fn thousands(list: &[NodeFragment]) -> Vec<SessionMessage> {
    list.chunks(1_000)
        .map(|part| fragments(part.to_vec()))
        .collect()
}

/// A binary bomb: each of `levels` trees lists the next one twice; `0` is the root.
fn bomb(levels: usize, last: NodeFragment) -> Vec<NodeFragment> {
    let level = |at: usize| {
        let next = (at + 1).to_string();
        tree(&at.to_string(), &[&next, &next])
    };
    let last = NodeFragment {
        id: levels.to_string(),
        ..last
    };
    (0..levels).map(level).chain([last]).collect()
}

fn read(id: &str) -> SessionMessage {
    action("echo", &[("text", id)], &[("response", "r")])
}

/// EV-308, EV-106
#[tokio::test]
async fn ev_217_a_cycle_ends_only_the_session_that_sends_it() {
    let server = Running::with_test_functions().await;
    let closed = |length: usize| {
        let mut replay = chain(length);
        replay.push(tree(&length.to_string(), &["0"]));
        replay
    };
    let itself = vec![fragments(vec![tree("a", &["b", "a"])])];
    let later = vec![
        fragments(vec![tree("a", &["b"])]),
        fragments(vec![tree("c", &["a"])]),
        fragments(vec![tree("b", &["c"])]),
    ];
    let output = action("echo", &[("text", "a")], &[("response", "b")]);
    let through = vec![output, fragments(vec![tree("a", &["b"])])];
    for (what, messages, reason) in [
        ("itself", itself, "CYCLE"),
        ("closed later", later, "CYCLE"),
        (
            "a long one in one message",
            vec![fragments(closed(5_000))],
            "CYCLE",
        ),
        ("one beyond the search", thousands(&closed(30_000)), ""),
        ("an action of its own output", through, "ACTION_CYCLE"),
    ] {
        let code = if reason.is_empty() { 0 } else { 3 };
        assert_eq!(
            ended(&server, messages).await,
            (code, reason.into()),
            "{what}"
        );
        honest(&server).await;
    }
    // The search for cycles has a budget of work; a reader of a longer cycle reaches the depth limit.
    let mut unseen = thousands(&closed(30_000));
    unseen.push(read("0"));
    assert_eq!(ended(&server, unseen).await, (8, "DEPTH_LIMIT".into()));
    unharmed(&server).await;
}

/// EV-306: a bomb of chunks and a bomb of empty nodes, as the input of a function.
#[tokio::test]
async fn ev_306_a_flatten_bomb_fails_the_action_that_reads_it_and_not_the_session() {
    let limits = SessionLimits {
        max_visits: 20_000,
        ..SessionLimits::default()
    };
    for (limits, last, retained) in [
        // Half of the visits are chunks of one byte.
        (limits, leaf("", 0, 1), 9_000..11_000),
        (SessionLimits::default(), NodeFragment::default(), 0..1),
    ] {
        let server = Running::limited(limits).await;
        let (send, messages) = mpsc::channel(8);
        let partial = [("evergreen-partial-failure", "1")];
        let messages = ReceiverStream::new(messages);
        let mut answers = call(&server, messages, &partial).await.unwrap();
        send.send(fragments(bomb(60, last.clone()))).await.unwrap();
        send.send(read("0")).await.unwrap();
        let echoed = finished(&mut answers, "r").await;
        assert!(echoed.contains("FLATTEN_LIMIT"), "{} bytes", echoed.len());
        let bytes = echoed.bytes().take_while(|&byte| byte == b'x').count();
        assert!(retained.contains(&bytes), "{bytes}");
        send.send(fragments(vec![leaf("p", 0, 5)])).await.unwrap();
        let next = action("echo", &[("text", "p")], &[("response", "s")]);
        send.send(next).await.unwrap();
        assert_eq!(finished(&mut answers, "s").await, "xxxxx");
        drop(send);
        assert_eq!(code_and_reason(end(answers).await), (0, String::new()));
        let strict = vec![fragments(bomb(60, last)), read("0")];
        assert_eq!(ended(&server, strict).await, (8, "FLATTEN_LIMIT".into()));
        unharmed(&server).await;
    }
}

/// GENERATE collects its whole prompt before prefill.
#[tokio::test]
async fn ev_306_a_flatten_bomb_as_a_prompt_is_refused_before_it_takes_memory() {
    let kernel = with_model(spawned(scripted::Config::default()));
    let server = Running::over(kernel).await;
    let generate = action("GENERATE", &[("prompt", "0")], &[("response", "r")]);
    let messages = vec![fragments(bomb(30, leaf("", 0, 1 << 20))), generate];
    let before = resident();
    let (code, reason) = ended(&server, messages).await;
    assert_eq!((code, &*reason), (8, "FUNCTION"));
    let grown = resident().saturating_sub(before);
    assert!(grown < 256 << 20, "{grown} bytes");
    unharmed(&server).await;
}

/// EV-106
#[tokio::test]
async fn ev_305_reading_a_chain_deeper_than_1024_fails_and_sending_it_does_not() {
    let server = Running::with_test_functions().await;
    let to_leaf = |length: usize| {
        let mut list = chain(length - 1);
        list.push(leaf(&(length - 1).to_string(), 0, 1));
        thousands(&list)
    };
    for (length, expect) in [(1_024, (0, "")), (1_025, (8, "DEPTH_LIMIT"))] {
        let mut messages = to_leaf(length);
        messages.push(read("0"));
        assert_eq!(ended(&server, messages).await, (expect.0, expect.1.into()));
    }
    // Nobody reads it, and it is dropped without recursion.
    assert_eq!(ended(&server, to_leaf(65_536)).await, (0, String::new()));
    let past = ended(&server, to_leaf(65_537)).await;
    assert_eq!(past, (8, "NODE_LIMIT".into()));
    unharmed(&server).await;
}

/// EV-903: the same errors, as a WebSocket closes with them.
#[tokio::test]
async fn ev_106_the_last_message_and_the_close_frame_have_the_reason() {
    let server = Running::with_test_functions().await;
    for (messages, close) in [
        (
            vec![fragments(vec![tree("a", &["a"])])],
            "INVALID_ARGUMENT: CYCLE",
        ),
        (
            vec![fragments(bomb(60, NodeFragment::default())), read("0")],
            "RESOURCE_EXHAUSTED: FLATTEN_LIMIT",
        ),
    ] {
        let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
        for message in messages {
            socket.send(message.encode_to_vec()).await;
        }
        let (reply, closed) = socket.rest().await;
        assert_eq!(closed, Some((1008, close.into())));
        let Some(SocketReply::Binary(last)) = reply.last() else {
            panic!("no last message: {reply:?}")
        };
        let last = SessionMessage::decode(last.clone()).unwrap();
        assert_eq!(last.node_fragments[0].id, "__abort__");
    }
    unharmed(&server).await;
}
