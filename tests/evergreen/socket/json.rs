//! Proto3 JSON as the TypeScript client sends and reads it (section 7.2).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sapwood_engine::scripted;
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Running, spawned, with_model};
use serde_json::Value;

fn json(reply: &SocketReply) -> Value {
    match reply {
        SocketReply::Text(text) => serde_json::from_str(text).unwrap(),
        other => panic!("{other:?} is no text"),
    }
}

fn fragments(reply: &[SocketReply]) -> Vec<Value> {
    let lists = reply
        .iter()
        .map(|reply| json(reply)["nodeFragments"].clone());
    lists
        .flat_map(|list| list.as_array().cloned().unwrap_or_default())
        .collect()
}

async fn generating() -> Running {
    let model = scripted::Config::default();
    Running::over(with_model(spawned(model))).await
}

const FINISH: &str = r#"{"actions":[{"name":"FINISH"}]}"#;

/// EV-720, EV-721
#[tokio::test]
async fn ev_723_recorded_messages_of_the_typescript_client_are_answered_in_its_format() {
    let server = generating().await;
    let mut socket = Socket::open(&server, "/", &[]).await.unwrap();
    for text in [
        r#"{"actions":[{"targetSpec":{"id":"evergreen://parrot"},"name":"GENERATE","inputs":[{"name":"prompt","id":"u1"}],"outputs":[{"name":"response","id":"u2"}]}]}"#,
        r#"{"nodeFragments":[{"id":"u1","chunkFragment":{"metadata":{"mimetype":"text/plain","role":"USER"},"data":"SGkh"},"seq":0,"continued":true}]}"#,
        r#"{"nodeFragments":[{"id":"u1","seq":1,"continued":false}]}"#,
        FINISH,
    ] {
        socket.send_text(text).await;
    }
    let (reply, close) = socket.rest().await;
    assert_eq!(close, Some((1000, String::new())));
    let all = fragments(&reply);
    assert!(all.len() > 1);
    for (seq, fragment) in all.iter().enumerate() {
        assert_eq!(fragment["id"], "u2");
        assert_eq!(fragment["seq"], seq);
        assert_eq!(fragment["continued"], seq + 1 < all.len());
        let metadata = &fragment["chunkFragment"]["metadata"];
        assert_eq!(
            metadata["mimetype"], "text/plain",
            "on every one, {fragment}"
        );
        assert_eq!(metadata["role"], "ASSISTANT", "on every one, {fragment}");
        assert_eq!(fragment.get("childIds"), None);
    }
}

/// The text of a node, put together from its fragments.
fn whole(all: &[Value], node: &str) -> String {
    let of = all.iter().filter(|fragment| fragment["id"] == node);
    let data = of.filter_map(|fragment| fragment["chunkFragment"]["data"].as_str());
    let bytes = data.flat_map(|data| STANDARD.decode(data).unwrap());
    String::from_utf8(bytes.collect()).unwrap()
}

/// EV-605, EV-606: the examples of the page as they are printed there. The model repeats the last message.
#[tokio::test]
async fn d_51_the_conversation_examples_of_the_page_run() {
    let page = include_str!("../../../docs/faces/evergreen.md");
    let mut sections = page.split("\n## ");
    let section = sections.find(|section| section.starts_with("Conversations\n"));
    let blocks = section.unwrap().split("```json\n").skip(1);
    let examples: Vec<&str> = blocks.filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(examples.len(), 2);
    let server = generating().await;
    let mut socket = Socket::speaking(&server, "evergreen.v2.json").await;
    for example in examples {
        socket.send_text(example).await;
    }
    socket.send_text(FINISH).await;
    let (reply, close) = socket.rest().await;
    assert_eq!(close, Some((1000, String::new())));
    let all = fragments(&reply);
    assert_eq!(whole(&all, "a"), "What is a tree?");
    assert_eq!(
        whole(&all, "b"),
        "What is a tree?",
        "the question is about the answer"
    );
    assert_eq!(whole(&all, "a2"), "And a forest?");
}

/// EV-903
#[tokio::test]
async fn ev_720_errors_are_sent_as_json_before_the_close() {
    let server = Running::with_test_functions().await;
    for (text, reason, code) in [
        (r#"{"actions":"#, "BAD_MESSAGE", 1007),
        (
            r#"{"nodeFragments":[{"id":"p","chunkFragment":{"data":"*"}}]}"#,
            "BAD_MESSAGE",
            1007,
        ),
        (
            r#"{"nodeFragments":[{"id":"p","seq":3},{"id":"p","seq":9}]}"#,
            "SEQ_PAST_FINAL",
            1008,
        ),
    ] {
        let mut socket = Socket::speaking(&server, "evergreen.v2.json").await;
        socket.send_text(text).await;
        let (reply, close) = socket.rest().await;
        let error = &json(reply.last().unwrap())["error"];
        assert_eq!(error["code"], 3);
        assert_eq!(error["status"], "INVALID_ARGUMENT");
        let detail = &error["details"][0];
        assert_eq!(detail["@type"], "type.googleapis.com/google.rpc.ErrorInfo");
        assert_eq!(
            (&detail["reason"], &detail["domain"]),
            (&reason.into(), &"evergreen.sapwood".into())
        );
        assert_eq!(close, Some((code, format!("INVALID_ARGUMENT: {reason}"))));
    }
}

#[tokio::test]
async fn ev_722_choices_are_sent_one_after_the_other_and_listed_before() {
    let server = generating().await;
    let mut socket = Socket::speaking(&server, "evergreen.v2.json").await;
    socket
        .send_text(
            r#"{"actions":[{"name":"GENERATE","inputs":[{"name":"prompt","id":"p"},{"name":"config","id":"c"}],"outputs":[{"name":"response","id":"r"}]}],
                "nodeFragments":[{"id":"p","chunkFragment":{"metadata":{"mimetype":"text/plain","role":"USER"},"data":"SGkh"}},
                {"id":"c","chunkFragment":{"metadata":{"mimetype":"application/json"},"data":"eyJuIjozLCJtYXhfdG9rZW5zIjoxMn0="}}]}"#,
        )
        .await;
    socket.send_text(FINISH).await;
    let (reply, close) = socket.rest().await;
    assert_eq!(close, Some((1000, String::new())));
    let all = fragments(&reply);
    let children: Vec<&Value> = all
        .iter()
        .filter_map(|fragment| fragment["childIds"].as_array())
        .flatten()
        .collect();
    assert_eq!(children.len(), 3);
    let mut order: Vec<&Value> = Vec::new();
    let mut known: Vec<&Value> = Vec::new();
    for fragment in &all {
        known.extend(fragment["childIds"].as_array().into_iter().flatten());
        let id = &fragment["id"];
        if id == "r" {
            continue;
        }
        assert!(known.contains(&id), "announced before, {fragment}");
        if order.last() != Some(&id) {
            order.push(id);
        }
    }
    assert_eq!(order, children, "each from its beginning to its end");
    assert_eq!(all.last().unwrap()["id"], "r");
}

#[tokio::test]
async fn ev_722_json_values_are_not_split_over_fragments() {
    let server = Running::with_test_functions().await;
    let mut socket = Socket::speaking(&server, "evergreen.v2.json").await;
    let piece = |node: &str, mime: &str, seq: usize, data: &str, more: bool| {
        format!(
            r#"{{"id":"{node}","seq":{seq},"continued":{more},"chunkFragment":{{"metadata":{{"mimetype":"{mime}"}},"data":"{data}"}}}}"#
        )
    };
    let whole = "application/json";
    let lines = "application/x-ndjson";
    let list = [
        // {"a":  1}
        piece("p", whole, 0, "eyJhIjo=", true),
        // {"b":1}\n{"b"  :2}\n
        piece("q", lines, 0, "eyJiIjoxfQp7ImIi", true),
        piece("q", lines, 1, "OjJ9Cg==", false),
    ];
    let echo = |node: &str, out: &str| {
        format!(
            r#"{{"name":"echo","inputs":[{{"name":"text","id":"{node}"}}],"outputs":[{{"name":"response","id":"{out}"}}]}}"#
        )
    };
    let text = format!(
        r#"{{"actions":[{},{}],"nodeFragments":[{}]}}"#,
        echo("p", "r"),
        echo("q", "s"),
        list.join(",")
    );
    socket.send_text(&text).await;
    let last = piece("p", whole, 1, "MX0=", false);
    socket
        .send_text(&format!(r#"{{"nodeFragments":[{last}]}}"#))
        .await;
    socket.send_text(FINISH).await;
    let (reply, _) = socket.rest().await;
    let all = fragments(&reply);
    let data = |node: &str| {
        let of = all.iter().filter(|fragment| fragment["id"] == *node);
        of.filter_map(|fragment| fragment["chunkFragment"]["data"].as_str())
            .collect::<Vec<_>>()
    };
    assert_eq!(data("r"), ["eyJhIjoxfQ=="]);
    assert_eq!(data("s"), ["eyJiIjoxfQo=", "eyJiIjoyfQo="]);
}
