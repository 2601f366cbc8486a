//! The golden transcripts, played in every order of arrival and in every metadata mode.

use std::collections::HashMap;
use std::path::Path;

use prost::Message as _;
use serde_json::Value;

use super::harness::*;
use crate::evergreen::wire::{
    Action, Chunk, ChunkMetadata, NamedParameter, NodeFragment, Payload, SessionMessage,
};
use crate::evergreen::{self, Fragment, MetadataMode, Reason, protobuf};
use crate::session::{NodeKey, SessionMachine};

/// EV-307, EV-403, EV-405, EV-410, EV-601, EV-606, EV-612
#[test]
fn ev_215_the_golden_transcripts_in_every_order_and_mode() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/evergreen");
    let mut played = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            let transcript: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            for (name, mode) in [
                ("strict", MetadataMode::Strict),
                ("lenient", MetadataMode::Lenient),
                ("per-chunk", MetadataMode::PerChunk),
            ] {
                let expect = [&transcript["expect"][name], &transcript["expect"]["all"]];
                let expect = expect
                    .into_iter()
                    .find(|value| !value.is_null())
                    .expect("an expectation");
                play(
                    &transcript["turns"],
                    mode,
                    expect,
                    &format!("{} {name}", path.display()),
                );
                played += 1;
            }
        }
    }
    assert_eq!(played, 4 * 3);
}

/// Every turn in every order; the turns before it in the order of the file.
fn play(turns: &Value, mode_of: MetadataMode, expect: &Value, what: &str) {
    let turns = turns.as_array().unwrap();
    for (at, turn) in turns.iter().enumerate() {
        for order in orders(turn["client"].as_array().unwrap()) {
            let mut session = mode(mode_of);
            let mut sent_all = Vec::new();
            let mut open = HashMap::new();
            let mut outcome = Ok(());
            for (index, turn) in turns.iter().enumerate() {
                let given = turn["client"].as_array().unwrap();
                let items = if index == at { &order } else { given };
                outcome = outcome.and_then(|()| send(&mut session, items));
                if outcome.is_ok() {
                    answer(&mut session, turn, &mut open);
                    sent_all.extend(sent(&mut session));
                }
            }
            check(
                &mut session,
                outcome,
                &sent_all,
                expect,
                &format!("{what}: {order:?}"),
            );
        }
    }
}

/// Sends each item as a message of its own, through the bytes of the dialect.
fn send(session: &mut SessionMachine, items: &[Value]) -> Result<(), Reason> {
    items.iter().try_for_each(|item| {
        let bytes = message(item).encode_to_vec();
        session
            .handle(protobuf::decode(&*bytes).unwrap(), T0)
            .map_err(|status| reason(&status))
    })
}

fn message(item: &Value) -> SessionMessage {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut message = SessionMessage::default();
    if let Some(action) = item["action"].as_object() {
        let params = |list: &Value| {
            let pairs = list.as_object().unwrap().iter();
            pairs
                .map(|(name, id)| NamedParameter {
                    name: name.clone(),
                    id: text(id),
                })
                .collect()
        };
        let (inputs, outputs) = (params(&action["inputs"]), params(&action["outputs"]));
        message.actions.push(Action {
            name: text(&action["name"]),
            inputs,
            outputs,
            ..Action::default()
        });
        return message;
    }
    let item = &item["fragment"];
    let payload = [
        item["data"]
            .as_str()
            .map(|data| Payload::Data(data.as_bytes().to_vec().into())),
        item["ref"].as_str().map(|uri| Payload::Ref(uri.to_owned())),
    ];
    let metadata = item["mimetype"].as_str().map(|mimetype| ChunkMetadata {
        mimetype: mimetype.to_owned(),
        role: text(&item["role"]),
        ..ChunkMetadata::default()
    });
    let chunk = Chunk {
        metadata,
        payload: payload.into_iter().flatten().next(),
    };
    message.node_fragments.push(NodeFragment {
        id: text(&item["id"]),
        seq: i32::try_from(item["seq"].as_i64().unwrap_or_default()).unwrap(),
        continued: item["continued"].as_bool().unwrap_or_default(),
        child_ids: item["children"]
            .as_array()
            .into_iter()
            .flatten()
            .map(text)
            .collect(),
        chunk_fragment: (chunk != Chunk::default()).then_some(chunk),
    });
    message
}

/// Plays the functions of a turn.
fn answer(session: &mut SessionMachine, turn: &Value, open: &mut HashMap<String, NodeKey>) {
    for start in starts(session) {
        for (_, node) in start.outputs {
            let id = session.id(node).unwrap().to_string();
            open.insert(id, node);
        }
    }
    let metadata = of("text/plain", "ASSISTANT").unwrap();
    for output in turn["server"].as_array().unwrap() {
        let node = open[output["output"].as_str().unwrap()];
        for piece in output["pieces"].as_array().unwrap() {
            session
                .nodes()
                .write(node, &metadata, piece.as_str().unwrap().to_owned().into())
                .unwrap();
        }
        session.nodes().end(node, &metadata).unwrap();
    }
}

fn check(
    session: &mut SessionMachine,
    outcome: Result<(), Reason>,
    sent_all: &[Fragment],
    expect: &Value,
    what: &str,
) {
    let abort = expect["abort"]
        .as_str()
        .map(|name| Reason::from_name(name).unwrap());
    assert_eq!(outcome.err(), abort, "{what}");
    let none = serde_json::Map::new();
    for (id, items) in expect["nodes"].as_object().unwrap_or(&none) {
        let item = |value: &Value| {
            let [mimetype, role, data] = [0, 1, 2].map(|at| value[at].as_str().unwrap());
            item(mimetype, role, data)
        };
        let wanted: Vec<Item> = items.as_array().unwrap().iter().map(item).collect();
        assert_eq!(content(session, id), (wanted, Stop::End), "{what}: {id}");
    }
    for (id, name) in expect["fails"].as_object().unwrap_or(&none) {
        let reason = Reason::from_name(name.as_str().unwrap()).unwrap();
        assert_eq!(content(session, id).1, Stop::Failed(reason), "{what}: {id}");
    }
    if let Some(wanted) = expect["sent"].as_array() {
        let shown: Vec<Value> = sent_all.iter().map(show).collect();
        assert_eq!(&shown, wanted, "{what}");
    }
}

fn show(fragment: &Fragment) -> Value {
    let payload = fragment
        .chunk
        .as_ref()
        .and_then(|chunk| chunk.payload.as_ref());
    let data = match payload {
        Some(evergreen::Payload::Data(data)) => std::str::from_utf8(data).unwrap(),
        _ => "",
    };
    serde_json::json!([&*fragment.id, fragment.seq, !fragment.last, data])
}
