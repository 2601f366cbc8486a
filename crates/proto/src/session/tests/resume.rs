//! EV-940 to EV-943: a connection that is cut at any point is resumed without a loss.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

use super::harness::*;
use crate::evergreen::{Dialect, Fragment, Payload, Reason, SessionLimits, WireMessage};
use crate::session::{
    ActionKey, ActionRequest, ActionStart, Config, CursorId, CursorRead, LeafOrder, NodeKey,
    SessionMachine, SessionOutput, Side,
};
use crate::time::Time;

fn config(entropy: u64) -> Config {
    Config {
        entropy,
        resume: true,
        limits: std::sync::Arc::new(SessionLimits {
            // Many small messages, so that there are many places to cut.
            coalesce_bytes: 150,
            outbound_queue_bytes: 700,
            ..SessionLimits::default()
        }),
        ..Config::default()
    }
}

/// A client, a server and the messages between them.
struct Pair {
    client: SessionMachine,
    server: SessionMachine,
    up: VecDeque<WireMessage>,
    down: VecDeque<WireMessage>,
    /// Echoes that the server runs.
    runs: Vec<(ActionStart, CursorId, bool)>,
    started: Vec<String>,
    /// A reader at the client that reads during arrival, and the items that it has read.
    reader: Option<CursorId>,
    items: Vec<Item>,
    /// Whether the client has half-closed on this connection and the server has received that.
    half_close: bool,
    over: bool,
}

impl Pair {
    fn new() -> Self {
        Self {
            client: SessionMachine::new(Side::Client, config(1), T0),
            server: SessionMachine::new(Side::Server, config(2), T0),
            up: VecDeque::new(),
            down: VecDeque::new(),
            runs: Vec::new(),
            started: Vec::new(),
            reader: None,
            items: Vec::new(),
            half_close: false,
            over: false,
        }
    }

    /// Both sides do all work that needs no connection, then each sends one message.
    fn work(&mut self) {
        while let Some(output) = self.client.poll() {
            match output {
                SessionOutput::HalfClose => self.half_close = true,
                SessionOutput::Close(status) => assert!(status.is_none(), "{status:?}"),
                _ => {}
            }
        }
        if let Some(cursor) = self.reader {
            drain(&mut self.client, cursor, &mut self.items);
        }
        self.serve();
        self.up.extend(self.client.next_message(T0));
        self.down.extend(self.server.next_message(T0));
        self.serve();
    }

    /// Sends the client's messages until it may write again.
    fn make_room(&mut self) {
        while !self.client.nodes().has_room() {
            self.up.extend(self.client.next_message(T0));
        }
    }

    fn serve(&mut self) {
        while let Some(output) = self.server.poll() {
            match output {
                SessionOutput::Start(start) => {
                    self.started.push(start.name.to_string());
                    let cursor = self
                        .server
                        .nodes()
                        .open(start.inputs[0].1, Some(start.action));
                    self.runs.push((*start, cursor, false));
                }
                SessionOutput::Close(status) => {
                    assert!(status.is_none(), "{status:?}");
                    self.over = true;
                }
                _ => {}
            }
        }
        let server = &mut self.server;
        for (start, cursor, done) in &mut self.runs {
            while !*done && server.nodes().has_room() {
                match server.nodes().read(*cursor) {
                    CursorRead::Piece(piece) => {
                        let output = start.outputs[0].1;
                        server
                            .nodes()
                            .write(output, &piece.metadata, piece.data)
                            .unwrap();
                    }
                    CursorRead::Pending => break,
                    CursorRead::Busy => server.nodes().begin_turn(),
                    CursorRead::End => {
                        server.calls().finish(start.action);
                        *done = true;
                    }
                    CursorRead::Reference(_) => unreachable!("there are no references"),
                    CursorRead::Failed(status) => panic!("{status:?}"),
                }
            }
        }
    }

    /// One message arrives; `false` if none is on its way.
    fn arrive(&mut self, upwards: bool) -> bool {
        let (queue, side) = if upwards {
            (&mut self.up, &mut self.server)
        } else {
            (&mut self.down, &mut self.client)
        };
        let Some(message) = queue.pop_front() else {
            return false;
        };
        side.handle(message, T0).unwrap();
        true
    }

    /// Cuts the connection and reconnects. The server notices the loss only after `unaware` more messages.
    fn cut(&mut self, unaware: usize) {
        self.client.lost(T0);
        for _ in 0..unaware {
            // After the half-close a server that has sent everything ends the session.
            if self.server.is_half_closed() {
                break;
            }
            self.serve();
            let _ = self.server.next_message(T0);
        }
        self.server.lost(T0);
        assert!(self.client.next_message(T0).is_none() && self.server.next_message(T0).is_none());
        (self.up, self.down) = (VecDeque::new(), VecDeque::new());
        self.half_close = false;
        self.client.returned(T0);
        self.server.returned(T0);
    }

    /// Plays to the end and cuts the connection after each of these numbers of messages; returns the total number.
    fn play(&mut self, cuts: &[usize], unaware: usize) -> usize {
        let (mut cuts, mut arrived) = (cuts.iter().copied().peekable(), 0);
        let mut total = 0;
        loop {
            self.work();
            if !self.over && cuts.peek() == Some(&arrived) {
                cuts.next();
                arrived = 0;
                self.cut(unaware);
                continue;
            }
            // Both directions in turn.
            let first = arrived % 2 == 0;
            if self.arrive(first) || self.arrive(!first) {
                (arrived, total) = (arrived + 1, total + 1);
                continue;
            }
            if self.half_close {
                self.half_close = false;
                self.server.end_of_input(T0);
                continue;
            }
            if self.over && self.up.is_empty() && self.down.is_empty() {
                self.client.end_of_input(T0);
                return total;
            }
            assert!(self.client.aborted().is_none() && self.server.aborted().is_none());
            let unsent = self.client.has_message() || self.server.has_message();
            assert!(unsent || self.over, "nothing moves any more");
        }
    }
}

fn call(client: &mut SessionMachine, input: NodeKey, output: &str) -> (ActionKey, NodeKey) {
    let node = client.nodes().node(output).unwrap();
    let call = ActionRequest {
        name: format!("echo to {output}").into(),
        inputs: vec![("text".into(), input)],
        outputs: vec![("response".into(), node)],
        ..ActionRequest::default()
    };
    (client.calls().call(call).unwrap(), node)
}

/// Runs three echoes, one of another's output and one of a tree; returns what was read and which actions ran.
fn session(cuts: &[usize], unaware: usize) -> (Vec<Vec<Item>>, Vec<String>, usize) {
    let mut pair = Pair::new();
    let client = &mut pair.client;
    let text = of("text/plain", "USER").unwrap();
    let input = client.nodes().make(None).unwrap();
    let (_, first) = call(client, input, "first");
    let (_, second) = call(client, first, "second");
    let list = client.nodes().make(None).unwrap();
    let (_, third) = call(client, list, "third");
    // Read during arrival: content that was delivered before a cut must not be delivered again.
    let cursor = client.nodes().open(second, None);
    pair.reader = Some(cursor);
    for word in 0..6 {
        pair.make_room();
        let data = Bytes::from(format!("word {word} ").repeat(9));
        pair.client.nodes().write(input, &text, data).unwrap();
    }
    pair.make_room();
    let client = &mut pair.client;
    client.nodes().end(input, &text).unwrap();
    client.nodes().list(list, &[input, first]).unwrap();
    client.nodes().end(list, &text).unwrap();
    client.calls().finish_sending();
    let total = pair.play(cuts, unaware);
    let stop = drain(&mut pair.client, cursor, &mut pair.items);
    assert_eq!(stop, Stop::End, "{cuts:?}");
    let mut all = vec![pair.items];
    for node in [first, third] {
        let (items, stop) = read_node(&mut pair.client, node, None);
        assert_eq!(stop, Stop::End, "{cuts:?}");
        all.push(items);
    }
    pair.started.sort();
    (all, pair.started, total)
}

/// EV-109, EV-204, EV-940, EV-942
#[test]
fn ev_943_a_session_cut_at_any_message_loses_nothing_and_runs_nothing_twice() {
    let (contents, started, total) = session(&[], 0);
    assert_eq!(
        started,
        ["echo to first", "echo to second", "echo to third"]
    );
    assert!(contents.iter().all(|items| !items.is_empty()));
    assert!(total > 30, "{total} messages are not many places to cut");
    // A message that is cut is lost as a whole: transports deliver whole messages only.
    for unaware in [0, 1, 50] {
        for at in 0..=total {
            let cut = session(&[at], unaware);
            assert_eq!(
                (&cut.0, &cut.1),
                (&contents, &started),
                "cut at {at}, {unaware}"
            );
        }
    }
    // Cut again during the resume, several times.
    for at in 0..total {
        for again in 0..3 {
            let cut = session(&[at, again, 0, 5, 2], 2);
            assert_eq!(
                (&cut.0, &cut.1),
                (&contents, &started),
                "cut at {at} and {again}"
            );
        }
    }
}

#[test]
fn ev_940_a_session_waits_for_a_new_connection_within_its_grace() {
    let at = |seconds| Time::new(Duration::from_secs(seconds));
    let mut server = server_with(|config, _| config.resume = true);
    act(&mut server, action("f", "", "o=o")).unwrap();
    let run = start(&mut server);
    let text = of("text/plain", "").unwrap();
    server.lost(at(10));
    // The action continues up to the bounds of the queue; nothing is sent, and no stall is counted.
    server
        .nodes()
        .write(run.outputs[0].1, &text, Bytes::from_static(b"meanwhile"))
        .unwrap();
    assert!(server.next_message(at(11)).is_none() && !server.has_message());
    assert_eq!(server.wake_at(at(11)), Some(at(70)));
    server.tick(at(69));
    assert!(server.aborted().is_none());
    let mut other = server_with(|config, _| config.resume = true);
    other.lost(at(10));
    other.tick(at(70));
    assert_eq!(reason(other.aborted().unwrap()), Reason::Cancelled);
    // D-29: nothing is sent before RESUME, for which there are five seconds.
    server.returned(at(69));
    assert!(server.next_message(at(69)).is_none());
    assert_eq!(server.wake_at(at(69)), Some(at(74)));
    let mut silent = server_with(|config, _| config.resume = true);
    silent.lost(at(1));
    silent.returned(at(2));
    silent.tick(at(7));
    assert!(silent.aborted().is_some());
    // Before RESUME, another action could be one that was sent on the old connection.
    let mut hasty = server_with(|config, _| config.resume = true);
    hasty.lost(T0);
    hasty.returned(T0);
    assert_eq!(
        act(&mut hasty, action("g", "", "o=o")),
        Err(Reason::BadMessage)
    );
    let have = leaf("h", 0, "{\"nodes\":{\"o\":0},\"actions\":0}");
    feed(&mut server, [have]).unwrap();
    act(&mut server, action("RESUME", "have=h", "have=mine")).unwrap();
    let sent = sent(&mut server);
    assert_eq!(
        &*sent[0].id, "mine",
        "the report that the client waits for is sent first"
    );
    let texts = text_sent_to(&sent, "mine");
    assert_eq!(
        texts, "{\"nodes\":{\"h\":1},\"actions\":1}",
        "RESUME itself is not counted"
    );
    assert!(sent.iter().any(|fragment| &*fragment.id == "o"));
}

#[test]
fn ev_940_a_returning_session_is_not_paused_before_resume() {
    // A returning session is not paused (EV-802): RESUME itself would wait behind the pause.
    let mut paused = server_with(|config, limits| {
        config.resume = true;
        limits.inbound_high_bytes = 10;
    });
    act(&mut paused, action("f", "in=p", "")).unwrap();
    feed(&mut paused, [more("p", 0, "more than ten bytes")]).unwrap();
    assert!(paused.inbound_paused());
    paused.lost(T0);
    assert!(
        !paused.inbound_paused(),
        "messages of the old connection are ignored"
    );
    paused.returned(T0);
    assert!(!paused.inbound_paused());
    feed(&mut paused, [leaf("h", 0, "{}")]).unwrap();
    act(&mut paused, action("RESUME", "have=h", "")).unwrap();
    assert!(paused.inbound_paused());
}

#[test]
fn ev_940_the_end_of_the_connection_is_the_end_without_resume_or_after_a_half_close() {
    // A client that has half-closed does not reconnect.
    let mut ended = server_with(|config, _| config.resume = true);
    act(&mut ended, action("f", "", "o=o")).unwrap();
    ended.lost(T0);
    ended.end_of_input(T0);
    assert!(ended.aborted().is_some());
    // Without the option the end of the connection is the end.
    let mut server = server_with(|_, _| {});
    server.lost(T0);
    assert_eq!(reason(server.aborted().unwrap()), Reason::Cancelled);
}

#[test]
fn ev_942_malformed_reports_and_unexpected_resumes_are_refused() {
    let refused = act(&mut server(), action("RESUME", "have=h", "have=m"));
    assert_eq!(refused, Err(Reason::Unimplemented));
    let back = || {
        let mut server = server_with(|config, _| config.resume = true);
        server.lost(T0);
        server.returned(T0);
        server
    };
    assert_eq!(
        act(&mut back(), action("RESUME", "", "")),
        Err(Reason::MissingInput)
    );
    assert_eq!(
        act(&mut back(), action("RESUME", "had=h", "")),
        Err(Reason::UnknownParam)
    );
    assert_eq!(
        act(&mut back(), action("RESUME", "have=h", "result=r")),
        Err(Reason::UnknownParam)
    );
    for text in [
        "",
        "[]",
        "{\"nodes\":[]}",
        "{\"nodes\":{\"a\":-1}}",
        "{\"actions\":\"1\"}",
    ] {
        let mut server = back();
        feed(&mut server, [leaf("h", 0, text)]).unwrap();
        let refused = act(&mut server, action("RESUME", "have=h", "have=m"));
        assert_eq!(refused, Err(Reason::BadConfig), "{text}");
    }
    // A report of unknown nodes and actions is clamped: nothing is sent, and nothing breaks.
    let mut server = back();
    feed(
        &mut server,
        [leaf(
            "h",
            0,
            "{\"nodes\":{\"x\":9,\"m\":99},\"actions\":77}",
        )],
    )
    .unwrap();
    act(&mut server, action("RESUME", "have=h", "")).unwrap();
    assert!(sent(&mut server).is_empty());
    assert_eq!(act(&mut server, action("f", "", "o=o")), Ok(()));
}

/// The text of a leaf among what was sent.
fn text_sent_to(sent: &[Fragment], id: &str) -> String {
    let chunks = sent.iter().filter(|fragment| &*fragment.id == id);
    let payloads = chunks.filter_map(|fragment| fragment.chunk.as_ref()?.payload.as_ref());
    payloads
        .map(|payload| match payload {
            Payload::Data(data) => std::str::from_utf8(data).unwrap(),
            _ => "",
        })
        .collect()
}

/// EV-801
#[test]
fn ev_942_completed_resumes_retain_nothing() {
    let mut pair = Pair::new();
    let text = of("text/plain", "USER").unwrap();
    let input = pair.client.nodes().make(None).unwrap();
    let (_, first) = call(&mut pair.client, input, "first");
    pair.client
        .nodes()
        .write(input, &text, Bytes::from_static(b"half"))
        .unwrap();
    let calm = |pair: &mut Pair| {
        loop {
            pair.work();
            if !pair.arrive(true) && !pair.arrive(false) && pair.up.is_empty() {
                break;
            }
        }
    };
    calm(&mut pair);
    let mut costs = Vec::new();
    for unaware in 0..100 {
        pair.cut(unaware % 3);
        // Sometimes it is cut again before either side has received a whole report.
        for _ in 0..unaware % 5 {
            pair.work();
            pair.arrive(true);
            pair.work();
            pair.arrive(unaware % 2 == 0);
        }
        if unaware % 5 > 0 {
            pair.cut(0);
        }
        calm(&mut pair);
        let cost = |side: &SessionMachine| (side.retained_bytes(), side.calls.nodes.graph.live());
        costs.push((cost(&pair.client), cost(&pair.server)));
    }
    assert!(costs.windows(2).all(|pair| pair[0] == pair[1]), "{costs:?}");
    pair.client.nodes().end(input, &text).unwrap();
    pair.client.calls().finish_sending();
    pair.play(&[], 0);
    let (items, stop) = read_node(&mut pair.client, first, None);
    assert_eq!((items[0].data.as_slice(), stop), (&b"half"[..], Stop::End));
}

/// EV-801
#[test]
fn ev_942_one_resume_at_a_time_whose_text_is_counted_and_bounded() {
    let back = |max_nodes: usize| {
        let mut server = server_with(|config, limits| {
            (config.resume, config.partial_failure) = (true, true);
            limits.max_nodes = max_nodes;
        });
        server.lost(T0);
        server.returned(T0);
        server
    };
    let mut server = back(9);
    let text = format!("{{\"x\":\"{}", "y".repeat(500));
    feed(&mut server, [more("h", 0, &text)]).unwrap();
    let before = server.retained_bytes();
    act(&mut server, action("RESUME", "have=h", "have=m")).unwrap();
    let copied = text.len() as u64;
    assert_eq!(server.retained_bytes(), before + copied + "m".len() as u64);
    let mut twice = back(9);
    act(&mut twice, action("RESUME", "have=h", "")).unwrap();
    assert_eq!(
        act(&mut twice, action("RESUME", "have=i", "")),
        Err(Reason::BadMessage)
    );
    feed(&mut server, [leaf("h", 1, "\"}")]).unwrap();
    assert!(outputs(&mut server).is_empty());
    assert!(!text_sent_to(&sent(&mut server), "m").is_empty());
    assert_eq!(server.retained_bytes(), 0, "all of it is refunded");
    // More nodes than there can be.
    for (entries, accepted) in [(3, true), (4, false)] {
        let mut server = back(3);
        let nodes: Vec<String> = (0..entries).map(|at| format!("\"n{at}\":0")).collect();
        let have = format!("{{\"nodes\":{{{}}}}}", nodes.join(","));
        feed(&mut server, [leaf("h", 0, &have)]).unwrap();
        let expect = if accepted {
            Ok(())
        } else {
            Err(Reason::BadConfig)
        };
        let resumed = act(&mut server, action("RESUME", "have=h", ""));
        assert_eq!(resumed, expect, "{entries}");
    }
}

/// A server that sends a tree of three leaves, and the fragments that its client has after `taken` messages.
fn leaves_under_way(taken: usize, dialect: Dialect) -> (SessionMachine, Vec<(String, i32)>) {
    let mut server = server_with(|config, limits| {
        (config.resume, config.leaf_order) = (true, LeafOrder::for_client_of(dialect));
        limits.coalesce_bytes = 1;
    });
    act(&mut server, action("f", "", "o=o")).unwrap();
    let run = start(&mut server);
    let (tree, text) = (run.outputs[0].1, of("text/plain", "").unwrap());
    let children: Vec<NodeKey> = (0..3)
        .map(|_| server.nodes().make(Some(run.action)).unwrap())
        .collect();
    server.nodes().list(tree, &children).unwrap();
    for word in ["one", "two"] {
        for child in &children {
            let data = Bytes::from_static(word.as_bytes());
            server.nodes().write(*child, &text, data).unwrap();
        }
    }
    let mut has = Vec::new();
    for _ in 0..taken {
        let Some(message) = server.next_message(T0) else {
            break;
        };
        let taken = message.fragments.into_iter();
        has.extend(taken.map(|fragment| (fragment.id.to_string(), fragment.seq)));
        if has.len() == 3 {
            // The first leaf ends before the connection is lost, if three fragments were sent.
            server.nodes().end(children[0], &text).unwrap();
        }
    }
    server.lost(T0);
    for child in &children {
        let _ = server.nodes().end(*child, &text);
    }
    server.calls().finish(run.action);
    (server, has)
}

/// EV-508, EV-722
#[test]
fn ev_942_leaves_take_their_turns_after_a_resume_and_what_waits_is_counted_once() {
    for before in [Dialect::Grpc, Dialect::Json] {
        for after in [Dialect::Protobuf, Dialect::Json] {
            for taken in 0..9 {
                let (mut server, has) = leaves_under_way(taken, before);
                server.set_leaf_order(LeafOrder::for_client_of(after));
                server.returned(T0);
                let mut next = std::collections::BTreeMap::new();
                for (id, seq) in &has {
                    next.insert(id.clone(), seq + 1);
                }
                let have = serde_json::json!({"nodes": next, "actions": 0}).to_string();
                feed(&mut server, [leaf("h", 0, &have)]).unwrap();
                act(&mut server, action("RESUME", "have=h", "")).unwrap();
                let what = format!("{before:?}, {after:?}, {taken}: {has:?}");
                let rest = sent(&mut server);
                assert_eq!(server.calls.nodes.sender.bytes(), 0, "{what}");
                assert!(
                    rest.last()
                        .is_some_and(|last| &*last.id == "o" && last.last),
                    "{what}"
                );
                // No fragment twice: a tree, its end, and three leaves of two words each.
                let before_that = has.len();
                let mut all = has;
                all.extend(rest.iter().map(|it| (it.id.to_string(), it.seq)));
                all.sort();
                all.dedup();
                assert_eq!(all.len(), before_that + rest.len(), "{what}");
                let mut order: Vec<&str> = rest.iter().map(|it| &*it.id).collect();
                order.retain(|id| *id != "o");
                order.dedup();
                let mut once = order.clone();
                once.sort_unstable();
                once.dedup();
                let in_turn = order.len() == once.len();
                assert!(in_turn || after == Dialect::Protobuf, "{what}: {order:?}");
            }
        }
    }
}

/// EV-940, EV-943
#[test]
fn ev_911_dropped_nodes_are_kept_until_a_resumed_client_has_them() {
    let mut server = server_with(|config, limits| {
        (config.resume, config.partial_failure) = (true, true);
        limits.coalesce_bytes = 1;
    });
    act(&mut server, action("f", "", "a=a b=b")).unwrap();
    let run = start(&mut server);
    let text = of("text/plain", "").unwrap();
    for (_, node) in &run.outputs {
        let data = Bytes::from_static(b"kept");
        server.nodes().end_with_data(*node, &text, data).unwrap();
    }
    server.calls().finish(run.action);
    act(&mut server, action("DROP", "node=a node.1=b", "")).unwrap();
    let first = server.next_message(T0).unwrap();
    assert_eq!(first.fragments.len(), 1, "one of the two is sent");
    let resume = |server: &mut SessionMachine, have: &str, id: &str| {
        server.lost(T0);
        server.returned(T0);
        feed(server, [leaf(id, 0, have)]).unwrap();
        act(server, action("RESUME", &format!("have={id}"), "")).unwrap();
    };
    // Both messages are lost: neither node may be freed before both were sent.
    for id in ["h1", "h2"] {
        resume(&mut server, "{}", id);
        server.next_message(T0).unwrap();
    }
    resume(&mut server, "{}", "h3");
    let rest = sent(&mut server);
    assert_eq!(rest.len(), 2, "{rest:?}");
    assert_eq!(
        server.calls.nodes.lifetime.batches(),
        0,
        "all batches are freed then"
    );
    // A node that the client has already is freed at once.
    act(&mut server, action("g", "", "c=c")).unwrap();
    let run = start(&mut server);
    let data = Bytes::from_static(b"kept");
    let node = run.outputs[0].1;
    server.nodes().end_with_data(node, &text, data).unwrap();
    act(&mut server, action("DROP", "node=c", "")).unwrap();
    assert_eq!(server.calls.nodes.lifetime.batches(), 1);
    resume(&mut server, "{\"nodes\":{\"c\":1}}", "h4");
    assert_eq!(server.calls.nodes.lifetime.batches(), 0);
}

/// EV-801
#[test]
fn ev_942_sent_actions_are_retained_and_charged_until_the_peer_has_them() {
    let mut client = SessionMachine::new(Side::Client, config(1), T0);
    let before = client.retained_bytes();
    client
        .calls()
        .call(ActionRequest {
            name: "f".into(),
            ..ActionRequest::default()
        })
        .unwrap();
    client
        .calls()
        .call(ActionRequest {
            name: "g".into(),
            ..ActionRequest::default()
        })
        .unwrap();
    assert_eq!(client.retained_bytes(), before + 2 * 65);
    let mut sizes = Vec::new();
    // The server reports each time how many actions it has, which may be fewer than were known before.
    for known in [1, 0, 2] {
        client.lost(T0);
        client.returned(T0);
        let hello = client.next_message(T0).unwrap();
        let answer = hello.actions[0].outputs[0].id.clone();
        let have = format!("{{\"actions\":{known}}}");
        feed(&mut client, [leaf(&answer, 0, &have)]).unwrap();
        outputs(&mut client);
        let again = client
            .next_message(T0)
            .map_or(0, |message| message.actions.len());
        sizes.push(again);
    }
    assert_eq!(sizes, [1, 1, 0]);
    // With too little room in the quota, no action is sent that could not be sent again.
    let mut config = config(1);
    config.limits = std::sync::Arc::new(SessionLimits {
        retained_bytes: 100,
        ..SessionLimits::default()
    });
    let mut client = SessionMachine::new(Side::Client, config, T0);
    client
        .calls()
        .call(ActionRequest {
            name: "f".into(),
            ..ActionRequest::default()
        })
        .unwrap();
    let refused = client.calls().call(ActionRequest {
        name: "g".into(),
        ..ActionRequest::default()
    });
    assert_eq!(reason(&refused.unwrap_err()), Reason::RetainedLimit);
    assert_eq!(client.next_message(T0).unwrap().actions.len(), 1);
    // Without resume nothing is retained.
    client.without_resume();
    for _ in 0..9 {
        client
            .calls()
            .call(ActionRequest {
                name: "g".into(),
                ..ActionRequest::default()
            })
            .unwrap();
    }
}

#[test]
fn ev_942_answered_actions_are_not_retained() {
    let mut client = SessionMachine::new(Side::Client, config(1), T0);
    let call = |client: &mut SessionMachine| {
        let node = client.calls().expect().unwrap();
        let outputs = vec![("response".into(), node)];
        let name = "f".into();
        client
            .calls()
            .call(ActionRequest {
                name,
                outputs,
                ..ActionRequest::default()
            })
            .unwrap();
        client.id(node).unwrap().to_string()
    };
    let asked = |client: &SessionMachine| client.calls.link.asked_bytes();
    let ids: Vec<String> = (0..4).map(|_| call(&mut client)).collect();
    let each = asked(&client) / 4;
    let before = client.retained_bytes();
    // A peer that has begun to answer the third action has received the first two as well.
    feed(&mut client, [more(&ids[2], 0, "x")]).unwrap();
    assert_eq!(asked(&client), each);
    let retained = (64 + 1 + "text/plain".len()) as u64;
    assert_eq!(client.retained_bytes(), before + retained - 3 * each);
    feed(&mut client, [leaf(&ids[0], 0, "x"), leaf(&ids[2], 1, "y")]).unwrap();
    assert_eq!(asked(&client), each);
    // A later report counts from there.
    outputs(&mut client);
    while client.next_message(T0).is_some() {}
    client.lost(T0);
    client.returned(T0);
    let hello = client.next_message(T0).unwrap();
    let answer = hello.actions[0].outputs[0].id.clone();
    feed(&mut client, [leaf(&answer, 0, r#"{"actions":3}"#)]).unwrap();
    outputs(&mut client);
    let again = client.next_message(T0).unwrap();
    assert_eq!(again.actions.len(), 1);
    assert_eq!(again.actions[0].outputs[0].id, ids[3]);
    // A long session retains unfinished actions only.
    for _ in 0..1_000 {
        let id = call(&mut client);
        feed(&mut client, [leaf(&id, 0, "x")]).unwrap();
        outputs(&mut client);
        assert_eq!(asked(&client), 0);
    }
}
