//! Floods of actions, nodes, reserved actions, offers, reconnects, pings and calls.

use futures::stream;
use prost::Message;
use sapwood_net::evergreen::ClientSessionOptions;
use sapwood_proto::evergreen::SessionLimits;
use sapwood_proto::evergreen::wire::SessionMessage;
use sapwood_tests::raw::{action, call, code_and_reason, end, fragments, json, leaf, open, tree};
use sapwood_tests::socket::{Socket, SocketReply, frame};
use sapwood_tests::{Running, request};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::super::extensions::finished;
use super::{honest, unharmed};

const PARTIAL: (&str, &str) = ("evergreen-partial-failure", "1");

async fn ended(
    server: &Running,
    messages: Vec<SessionMessage>,
    headers: &[(&'static str, &str)],
) -> (i32, String) {
    code_and_reason(end(call(server, stream::iter(messages), headers).await.unwrap()).await)
}

/// A message with `count` actions of one name, each with an output of its own.
fn many(count: usize, name: &str, inputs: &[(&str, &str)], output: &str) -> SessionMessage {
    let one = |at: usize| action(name, inputs, &[(output, &format!("{name}{at}"))]);
    SessionMessage {
        actions: (0..count).flat_map(|at| one(at).actions).collect(),
        ..SessionMessage::default()
    }
}

/// EV-510, EV-914, EV-930
#[tokio::test]
async fn ev_510_thousands_of_actions_run_only_up_to_the_action_limit() {
    let server = Running::with_test_functions().await;
    let running = &server.shared.metrics.evergreen.actions_open;
    let flood = many(5_000, "slow", &[], "response");
    for (flood, expect) in [
        (flood.clone(), (8, "ACTION_LIMIT")),
        // These end at once, so that as few of one message are unfinished together as of many messages (EV-102).
        (many(5_000, "LIST_ACTIONS", &[], "actions"), (0, "")),
        (many(5_000, "SESSION_INFO", &[], "info"), (0, "")),
    ] {
        let strict = ended(&server, vec![flood], &[]).await;
        assert_eq!(strict, (expect.0, expect.1.into()));
    }
    let (retained, messages) = open([flood]);
    let mut answers = call(&server, messages, &[PARTIAL]).await.unwrap();
    let last = finished(&mut answers, "slow4999").await;
    assert!(last.contains("ACTION_LIMIT"), "{last}");
    assert_eq!(running.get(), 256);
    honest(&server).await;
    drop((answers, retained));
    unharmed(&server).await;
}

/// Section 8.2
#[tokio::test]
async fn ev_801_too_many_nodes_or_children_end_the_session() {
    let server = Running::with_test_functions().await;
    let ids: Vec<String> = (0..70_000).map(|at| at.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let lists = ids.chunks(4_096).enumerate();
    let lists: Vec<_> = lists
        .map(|(at, ids)| tree(&format!("t{at}"), ids))
        .collect();
    let leaves = ids.chunks(5_000).map(|ids| {
        let list = ids.iter().map(|id| leaf(id, 0, 0));
        fragments(list.collect())
    });
    let too_wide = fragments(vec![tree("t", &ids[..4_097])]);
    for (what, messages, expect) in [
        ("children", vec![fragments(lists)], "NODE_LIMIT"),
        ("leaves", leaves.collect(), "NODE_LIMIT"),
        ("children of one fragment", vec![too_wide], "CHILD_LIMIT"),
    ] {
        let ended = ended(&server, messages, &[]).await;
        assert_eq!(ended, (8, expect.into()), "{what}");
    }
    unharmed(&server).await;
}

/// EV-911, EV-912: ids of nodes that exist and that do not; with outputs and without.
#[tokio::test]
async fn ev_913_thousands_of_reserved_actions_do_not_reach_the_action_limit() {
    let server = Running::with_test_functions().await;
    for (name, inputs, output) in [
        ("CANCEL", vec![("action", "slow0")], "result"),
        ("CANCEL", vec![("action", "nothing")], "result"),
        ("DROP", vec![("node", "p"), ("tree", "nothing")], "result"),
        ("SET_TTL", vec![("node", "p"), ("ttl", "ttl")], "result"),
    ] {
        let begin = many(3, "slow", &[], "response");
        let nodes = fragments(vec![leaf("p", 0, 10), json("ttl", "\"3600s\"")]);
        let silent = action(name, &inputs, &[]).actions.remove(0);
        let silent = SessionMessage {
            actions: vec![silent; 2_000],
            ..SessionMessage::default()
        };
        let wanted = many(500, name, &inputs, output);
        let flood = [begin, nodes].into_iter();
        let flood = flood.chain(vec![silent; 5]).chain([wanted]);
        let (retained, messages) = open(flood.collect::<Vec<_>>());
        let mut answers = call(&server, messages, &[PARTIAL]).await.unwrap();
        let last = finished(&mut answers, &format!("{name}499")).await;
        assert!(last.starts_with('{'), "{name}: {last}");
        honest(&server).await;
        drop((answers, retained));
        unharmed(&server).await;
    }
}

/// EV-812
#[tokio::test]
async fn ev_810_each_of_a_thousand_offers_replaces_the_one_before_within_the_limits() {
    let server = Running::with_test_functions().await;
    let list = |count: usize| {
        let one = |at: usize| format!("{{\"name\":\"f{at}\"}}");
        let all: Vec<String> = (0..count).map(one).collect();
        format!("{{\"actions\":[{}]}}", all.join(","))
    };
    let long = format!(
        "{{\"actions\":[{{\"name\":\"f\",\"description\":\"{}\"}}]}}",
        "x".repeat(300 << 10)
    );
    for (what, document, expect) in [
        ("all that may be", list(64), "{"),
        ("one more", list(65), "64"),
        ("a long one", long, "262144"),
        ("no JSON", "{\"actions\":[[[".into(), "must be JSON"),
    ] {
        let offers = (0..1_000).map(|at| {
            let mut offer = action(
                "OFFER_ACTIONS",
                &[("actions", "o")],
                &[("result", &format!("r{at}"))],
            );
            if at == 0 {
                offer.node_fragments.push(json("o", &document));
            }
            offer
        });
        let offers: Vec<SessionMessage> = offers.collect();
        let (retained, messages) = open(offers);
        let mut answers = call(&server, messages, &[PARTIAL]).await.unwrap();
        let last = finished(&mut answers, "r999").await;
        assert!(last.contains(expect), "{what}: {last}");
        honest(&server).await;
        drop((answers, retained));
    }
    unharmed(&server).await;
}

/// EV-942, D-29
#[tokio::test]
async fn ev_941_two_hundred_reconnects_are_one_session() {
    let server = Running::with_test_functions().await;
    let sessions = &server.shared.metrics.evergreen.sessions_open;
    let resume = [("evergreen-resume", "1"), PARTIAL];
    let (send, messages) = mpsc::channel(8);
    let mut first = call(&server, ReceiverStream::new(messages), &resume)
        .await
        .unwrap();
    send.send(action("SESSION_INFO", &[], &[("info", "i")]))
        .await
        .unwrap();
    let info = finished(&mut first, "i").await;
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let token = info["session_token"].as_str().unwrap().to_owned();
    let back = [("evergreen-session-token", &*token)];
    let mut before = (first, None);
    for round in 0..200 {
        let (have, theirs) = (format!("h{round}"), format!("theirs{round}"));
        let mut hello = action("RESUME", &[("have", &have)], &[("have", &theirs)]);
        let nothing = "{\"nodes\":{},\"actions\":0}";
        hello.node_fragments.push(json(&have, nothing));
        let (retained, messages) = open([hello]);
        let mut next = call(&server, messages, &back).await.unwrap();
        let ended = code_and_reason(end(before.0).await);
        assert_eq!(ended.0, 10, "{round}: {ended:?}");
        assert_eq!(sessions.get(), 1);
        // Every second client does not wait for the response.
        if round % 2 == 0 {
            finished(&mut next, &theirs).await;
        }
        before = (next, Some(retained));
    }
    honest(&server).await;
    drop(before);
    super::super::resume::closed_in_time(&server, SessionLimits::default().resume_grace).await;
    unharmed(&server).await;
}

/// EV-802: pongs that the client does not read are not queued.
#[tokio::test]
async fn ev_705_a_flood_of_pings_delays_no_other_client() {
    let server = Running::with_test_functions().await;
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    let pings = frame(0x89, &[b'?'; 125]).repeat(1_000);
    let ((), ()) = futures::join!(
        async {
            for _ in 0..100 {
                socket.raw(&pings).await;
            }
        },
        honest(&server)
    );
    let mut all = action("echo", &[("text", "p")], &[("response", "r")]);
    all.node_fragments = vec![leaf("p", 0, 10)];
    all.actions
        .push(action("FINISH", &[], &[]).actions.remove(0));
    socket.send(all.encode_to_vec()).await;
    let (reply, close) = socket.rest().await;
    assert!(matches!(reply[..], [SocketReply::Binary(_)]));
    assert_eq!(close, Some((1000, String::new())));
    unharmed(&server).await;
}

/// EV-101, EV-109: calls that are reset at once, all on one connection.
#[tokio::test]
async fn ev_109_a_thousand_reset_calls_leave_no_state() {
    let server = Running::with_test_functions().await;
    let first = server.session().await;
    for _ in 0..1_000 {
        let session = first
            .another(ClientSessionOptions::default())
            .await
            .unwrap();
        let call = session.call(request("slow", &[], &["response"])).unwrap();
        call.detach();
        drop(session);
    }
    honest(&server).await;
    drop(first);
    unharmed(&server).await;
}
