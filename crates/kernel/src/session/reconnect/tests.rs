//! Concurrent connections of one session, and changes of its dialect.

use futures::SinkExt;
use futures::channel::mpsc;
use sapwood_proto::evergreen::{Action, Chunk, Fragment, Metadata, Param, Payload, Reason};
use serde_json::Value;

use super::*;
use crate::Kernel;
use crate::session::{ResumeToken, Session, SessionOptions, open, test_functions};

fn resumable() -> (Session<()>, OutgoingMessages) {
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let options = SessionOptions {
        token: Some(ResumeToken("secret".into())),
        ..SessionOptions::default()
    };
    open(kernel, options, ())
}

fn connection() -> (
    mpsc::Sender<Result<WireMessage, ConnectionLoss>>,
    IncomingMessages,
) {
    let (send, incoming) = mpsc::channel(8);
    (send, incoming.boxed())
}

fn action(name: &str, inputs: &[(&str, &str)], outputs: &[(&str, &str)]) -> Action {
    let params = |list: &[(&str, &str)]| {
        let params = list.iter().map(|(name, id)| Param::new(*name, *id));
        params.collect()
    };
    Action {
        name: name.into(),
        inputs: params(inputs),
        outputs: params(outputs),
        ..Action::default()
    }
}

/// The RESUME of a client without any nodes, with further actions.
fn hello(more: Vec<Action>) -> Vec<WireMessage> {
    let have = Fragment {
        id: "h".into(),
        last: true,
        chunk: Some(Chunk {
            metadata: Some(Arc::new(Metadata::of("application/json"))),
            payload: Some(Payload::Data("{}".into())),
        }),
        ..Fragment::default()
    };
    let resume = WireMessage {
        fragments: [have].into_iter().collect(),
        actions: vec![action("RESUME", &[("have", "h")], &[("have", "theirs")])],
        ..WireMessage::default()
    };
    let more = WireMessage {
        actions: more,
        ..WireMessage::default()
    };
    vec![resume, more]
}

/// An action with all its inputs, whose output `r` is `hello`.
fn echo() -> WireMessage {
    let text = Fragment {
        id: "t".into(),
        last: true,
        chunk: Some(Chunk {
            metadata: Some(Arc::new(Metadata::of("text/plain"))),
            payload: Some(Payload::Data("hello".into())),
        }),
        ..Fragment::default()
    };
    WireMessage {
        fragments: [text].into_iter().collect(),
        actions: vec![action("echo", &[("text", "t")], &[("response", "r")])],
        ..WireMessage::default()
    }
}

/// The content of a node, as it arrives.
async fn content(outgoing: &mut OutgoingMessages, node: &str) -> String {
    let mut text = String::new();
    loop {
        let message = outgoing.next().await.unwrap().unwrap();
        for fragment in message.fragments {
            if *fragment.id != *node {
                continue;
            }
            if let Some(Payload::Data(data)) = fragment.chunk.and_then(|chunk| chunk.payload) {
                text.push_str(std::str::from_utf8(&data).unwrap());
            }
            if fragment.last {
                return text;
            }
        }
    }
}

async fn ended(mut outgoing: OutgoingMessages) -> Option<Reason> {
    loop {
        match outgoing.next().await {
            Some(Ok(_)) => {}
            Some(Err(status)) => return status.known(),
            None => return None,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn ev_941_the_last_of_many_concurrent_connections_wins() {
    let (session, first) = resumable();
    let (_send, incoming) = connection();
    let (connections, back) = session.connections(incoming);
    // More connections than a queue would hold, before the session's task is polled.
    let mut others = Vec::new();
    for _ in 0..20 {
        let (send, incoming) = connection();
        let outgoing = back.connect(Dialect::Grpc, incoming).unwrap();
        others.push((send, outgoing));
    }
    let (mut send, mut outgoing) = others.pop().unwrap();
    let task = tokio::spawn(session.run(connections, futures::stream::pending()));
    assert_eq!(ended(first).await, Some(Reason::Superseded));
    for (_, outgoing) in others {
        assert_eq!(ended(outgoing).await, Some(Reason::Superseded));
    }
    for message in hello(Vec::new()) {
        send.send(Ok(message)).await.unwrap();
    }
    let have = content(&mut outgoing, "theirs").await;
    assert_eq!(have, "{\"nodes\":{\"h\":1},\"actions\":0}");
    drop(send);
    assert!(task.await.unwrap().is_none());
    let (_send, incoming) = connection();
    assert!(
        back.connect(Dialect::Grpc, incoming).is_none(),
        "it is over"
    );
}

#[tokio::test]
async fn ev_941_a_connection_superseded_before_it_is_accepted_is_dropped() {
    let (session, _first) = resumable();
    let (_send, incoming) = connection();
    let (mut connections, back) = session.connections(incoming);
    let (mut early, incoming) = connection();
    let slow = NextConnection {
        connection: 1,
        dialect: Dialect::Grpc,
        incoming,
    };
    let now = back.link.now();
    assert_eq!(back.link.with(|live| live.take_over(now)), Some(1));
    // A second connection overtakes it between the two steps of its arrival.
    let (_second, incoming) = connection();
    let retained = back.connect(Dialect::Json, incoming).unwrap();
    back.slot.put(slow);
    let refused = early.send(Ok(WireMessage::default())).await;
    assert!(refused.is_err(), "nobody reads it");
    for _ in 0..4 {
        assert!(futures::poll!(connections.next()).is_pending());
    }
    assert_eq!(connections.link.dialect(), Dialect::Json);
    // The other order: the slow one is stored first, and has been superseded by the time it is accepted.
    let (_third, incoming) = connection();
    back.slot.put(NextConnection {
        connection: 2,
        dialect: Dialect::Grpc,
        incoming,
    });
    assert_eq!(back.link.with(|live| live.take_over(now)), Some(3));
    for _ in 0..4 {
        assert!(futures::poll!(connections.next()).is_pending());
    }
    assert_eq!(
        connections.link.dialect(),
        Dialect::Json,
        "it did not return"
    );
    drop(retained);
}

/// EV-914
#[tokio::test(start_paused = true)]
async fn ev_941_session_info_reports_the_current_dialect() {
    let (session, mut first) = resumable();
    let (mut send, incoming) = connection();
    let (connections, back) = session.connections(incoming);
    tokio::spawn(session.run(connections, futures::stream::pending()));
    let ask = |id: &str| action("SESSION_INFO", &[], &[("info", id)]);
    let first_ask = WireMessage {
        actions: vec![ask("i")],
        ..WireMessage::default()
    };
    send.send(Ok(first_ask)).await.unwrap();
    let info: Value = serde_json::from_str(&content(&mut first, "i").await).unwrap();
    assert_eq!(info["dialect"], "grpc");
    let (mut send, incoming) = connection();
    let mut second = back.connect(Dialect::Json, incoming).unwrap();
    for message in hello(vec![ask("j")]) {
        send.send(Ok(message)).await.unwrap();
    }
    let info: Value = serde_json::from_str(&content(&mut second, "j").await).unwrap();
    assert_eq!(info["dialect"], "websocket-json");
}

/// EV-109, EV-943
#[tokio::test(start_paused = true)]
async fn ev_940_a_client_cut_after_half_close_resumes_and_receives_the_rest() {
    // Whether the loss, and the end of the input, are noticed before the new connection arrives.
    for (lost, received) in [(false, true), (true, true), (true, false), (false, false)] {
        let (session, mut first) = resumable();
        let (mut send, incoming) = connection();
        let (connections, back) = session.connections(incoming);
        let mut task = Box::pin(session.run(connections, futures::stream::pending()));
        send.send(Ok(echo())).await.unwrap();
        assert!(futures::poll!(&mut task).is_pending());
        drop(send);
        if received {
            // Once to see the end, once because the messages before it are handled first.
            assert!(futures::poll!(&mut task).is_pending());
            assert!(futures::poll!(&mut task).is_pending());
            assert!(first.link.with(|live| live.machine().is_half_closed()));
        }
        if lost {
            first.cut();
            assert!(futures::poll!(&mut task).is_pending());
        }
        let (mut send, incoming) = connection();
        let mut second = back.connect(Dialect::Grpc, incoming).unwrap();
        for message in hello(Vec::new()) {
            send.send(Ok(message)).await.unwrap();
        }
        drop(send);
        let task = tokio::spawn(task);
        let mut output = String::new();
        while let Some(message) = second.next().await {
            for fragment in message.unwrap().fragments {
                if let Some(Payload::Data(data)) = fragment.chunk.and_then(|chunk| chunk.payload) {
                    output += &format!("{}={} ", fragment.id, str::from_utf8(&data).unwrap());
                }
            }
        }
        let have = "{\"nodes\":{\"t\":1,\"h\":1},\"actions\":1}";
        assert_eq!(
            output,
            format!("theirs={have} r=hello "),
            "{lost} {received}"
        );
        assert!(task.await.unwrap().is_none(), "{lost} {received}");
    }
}

/// EV-109
#[tokio::test(start_paused = true)]
async fn ev_940_after_half_close_only_a_connection_reported_as_cut_can_resume() {
    for cut in [false, true] {
        let (session, mut first) = resumable();
        let (mut send, incoming) = connection();
        let (connections, back) = session.connections(incoming);
        let task = tokio::spawn(session.run(connections, futures::stream::pending()));
        let slow = WireMessage {
            actions: vec![action("slow", &[], &[("response", "r")])],
            ..WireMessage::default()
        };
        send.send(Ok(slow)).await.unwrap();
        drop(send);
        while !first.link.with(|live| live.machine().is_half_closed()) {
            assert!(futures::poll!(first.next()).is_pending());
            tokio::task::yield_now().await;
        }
        if cut {
            first.cut();
        } else {
            drop(first);
        }
        let (_send, incoming) = connection();
        let returned = back.connect(Dialect::Protobuf, incoming);
        assert_eq!(returned.is_some(), cut);
        assert!(!task.is_finished());
        drop(returned);
        let ended = task.await.unwrap().unwrap();
        assert_eq!(ended.known(), Some(Reason::Cancelled));
    }
}
