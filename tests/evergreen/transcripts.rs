//! The conversations of the protocol document against a whole server, which must end them as expected.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sapwood_engine::scripted;
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Running, spawned, with_model};
use serde_json::{Value, json};

/// EV-403, EV-410, EV-601, EV-606, EV-612
#[tokio::test]
async fn ev_215_the_examples_of_the_document_end_as_expected_on_a_server() {
    let server = Running::over(with_model(spawned(scripted::Config::default()))).await;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/evergreen");
    let mut ends = BTreeMap::<String, usize>::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|kind| kind != "json") {
            continue;
        }
        let transcript: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for mode in ["strict", "lenient", "per-chunk"] {
            for (backwards, in_pieces) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let expected = ending(&transcript["expect"], mode);
                // Split into messages, such a conversation may fail earlier, with another error.
                if expected == "METADATA_REPEATED" && in_pieces {
                    continue;
                }
                let turns = turns(&transcript, backwards, in_pieces);
                let what = format!("{} {mode} {backwards} {in_pieces}", path.display());
                hold(&server, mode, &turns, expected, &what).await;
                *ends.entry(expected.to_owned()).or_default() += 1;
            }
        }
    }
    let shown: Vec<_> = ends
        .iter()
        .map(|(end, times)| (end.as_str(), *times))
        .collect();
    assert_eq!(
        shown,
        [("", 36), ("METADATA_REPEATED", 2), ("REF_DENIED", 8)]
    );
}

/// The reason that a transcript expects in this mode, of the abort or of an unreadable node; empty if there is none.
fn ending<'a>(expect: &'a Value, mode: &str) -> &'a str {
    let expect = expect.get(mode).unwrap_or_else(|| &expect["all"]);
    let fails = expect["fails"]
        .as_object()
        .and_then(|all| all.values().next());
    let reason = expect.get("abort").or(fails);
    reason.map_or("", |reason| reason.as_str().unwrap())
}

/// The client's messages, turn by turn.
fn turns(transcript: &Value, backwards: bool, in_pieces: bool) -> Vec<Vec<Value>> {
    let turn = |turn: &Value| {
        let mut items = turn["client"].as_array().unwrap().clone();
        if backwards {
            items.reverse();
        }
        let pieces = if in_pieces { 1 } else { items.len() };
        items.chunks(pieces).map(message).collect()
    };
    transcript["turns"]
        .as_array()
        .unwrap()
        .iter()
        .map(turn)
        .collect()
}

fn message(items: &[Value]) -> Value {
    let actions: Vec<_> = items
        .iter()
        .filter_map(|item| item.get("action"))
        .map(action)
        .collect();
    let fragments: Vec<_> = items
        .iter()
        .filter_map(|item| item.get("fragment"))
        .map(fragment)
        .collect();
    json!({"actions": actions, "nodeFragments": fragments})
}

fn action(item: &Value) -> Value {
    let params = |list: &Value| -> Vec<Value> {
        let pairs = list.as_object().unwrap().iter();
        pairs
            .map(|(name, id)| json!({"name": name, "id": id}))
            .collect()
    };
    json!({"name": item["name"], "inputs": params(&item["inputs"]), "outputs": params(&item["outputs"])})
}

/// An absent member is `null`, which means the same.
fn fragment(item: &Value) -> Value {
    let metadata = item
        .get("mimetype")
        .map(|mimetype| json!({"mimetype": mimetype, "role": item["role"]}));
    let data = item["data"].as_str().map(|data| STANDARD.encode(data));
    let chunk = item
        .get("children")
        .is_none()
        .then(|| json!({"metadata": metadata, "data": data, "ref": item["ref"]}));
    json!({
        "id": item["id"], "seq": item["seq"], "continued": item["continued"],
        "childIds": item["children"], "chunkFragment": chunk,
    })
}

/// A session from its first message to its Close.
async fn hold(server: &Running, mode: &str, turns: &[Vec<Value>], expected: &str, what: &str) {
    let path = format!("/evergreen?evergreen-metadata={mode}");
    let mut socket = Socket::open(server, &path, &[]).await.unwrap();
    // Conversations that fail do so in their first turn.
    let turns = if expected.is_empty() {
        turns
    } else {
        &turns[..1]
    };
    for message in turns.iter().flatten() {
        socket.send_text(&message.to_string()).await;
    }
    if expected.is_empty() {
        socket.send_text(r#"{"actions":[{"name":"FINISH"}]}"#).await;
    }
    let (reply, close) = socket.rest().await;
    let (code, received) = close.unwrap_or_else(|| panic!("{what}: no Close"));
    let reason = received.split_once(": ").map_or("", |(_, reason)| reason);
    assert_eq!(reason, expected, "{what}");
    if expected.is_empty() {
        assert_eq!(code, 1000, "{what}");
        assert_eq!(ended(&reply), wanted(turns), "{what}");
    }
}

/// The ids of the outputs that the actions name.
fn wanted(turns: &[Vec<Value>]) -> BTreeSet<String> {
    let messages = turns.iter().flatten();
    let actions = messages.flat_map(|message| message["actions"].as_array().unwrap());
    let outputs = actions.flat_map(|action| action["outputs"].as_array().unwrap());
    outputs
        .map(|output| output["id"].as_str().unwrap().to_owned())
        .collect()
}

/// The ids of the nodes that ended with content.
fn ended(reply: &[SocketReply]) -> BTreeSet<String> {
    let (mut filled, mut finished) = (BTreeSet::new(), BTreeSet::new());
    for reply in reply {
        let SocketReply::Text(text) = reply else {
            panic!("{reply:?} is no text")
        };
        let message: Value = serde_json::from_str(text).unwrap();
        for fragment in message["nodeFragments"].as_array().into_iter().flatten() {
            let id = fragment["id"].as_str().unwrap().to_owned();
            if fragment["chunkFragment"]["data"]
                .as_str()
                .is_some_and(|data| !data.is_empty())
            {
                filled.insert(id.clone());
            }
            if fragment["continued"] == false {
                finished.insert(id);
            }
        }
    }
    filled.intersection(&finished).cloned().collect()
}
