//! What a request may hold, as often as fits into a quarter of a megabyte.

use super::wire::{Way, gzip};
use super::{GENERATE, INFER, MODEL_INFER, SESSION};

/// What it is, how it is sent, the bytes.
pub(super) type Row = (String, Way, Vec<u8>);

/// Of each row.
const BYTES: usize = 250_000;

/// `part` as often as fits, between `head` and `tail`.
fn filled(head: &str, part: &str, tail: &str) -> Vec<u8> {
    let count = (BYTES - head.len() - tail.len()) / part.len();
    let mut text = head.to_owned();
    text.push_str(&part.repeat(count));
    // The separator behind the last one.
    if text.ends_with(',') {
        text.pop();
    }
    (text + tail).into_bytes()
}

#[expect(clippy::too_many_lines, reason = "one table")]
pub(super) fn http() -> Vec<Row> {
    let mut rows = Vec::new();
    let text = r#"{"text_input":"x","#;
    for (what, path, body) in [
        (
            "stop words",
            GENERATE,
            filled(&format!(r#"{text}"stop_words":["#), r#""a","#, "]}"),
        ),
        (
            "bad words",
            GENERATE,
            filled(&format!(r#"{text}"bad_words":["#), r#""a","#, "]}"),
        ),
        (
            "numbers nobody knows",
            GENERATE,
            filled(&format!(r#"{text}"what":["#), "0,", "]}"),
        ),
        ("members", GENERATE, filled(text, r#""a":0,"#, r#""b":0}"#)),
        (
            "messages",
            GENERATE,
            filled(
                r#"{"messages":["#,
                r#"{"role":"user","content":"a"},"#,
                "]}",
            ),
        ),
        (
            "lists in lists",
            GENERATE,
            filled(&format!(r#"{text}"what":"#), "[", "}"),
        ),
        (
            "objects in objects",
            GENERATE,
            filled(&format!(r#"{text}"what":"#), r#"{"a":"#, "}"),
        ),
        (
            "a long name",
            GENERATE,
            filled(&format!(r#"{text}""#), "n", r#"":0}"#),
        ),
        (
            "a long text",
            GENERATE,
            filled(r#"{"text_input":""#, "word ", r#""}"#),
        ),
        (
            "sampling parameters",
            GENERATE,
            filled(
                &format!(r#"{text}"sampling_parameters":"{{\"stop\":["#),
                r#"\"a\","#,
                r#"]}"}"#,
            ),
        ),
        (
            "biases",
            GENERATE,
            filled(
                &format!(r#"{text}"logit_bias":{{"#),
                r#""1":0,"#,
                r#""2":0}}"#,
            ),
        ),
        ("inputs", INFER, filled(r#"{"inputs":["#, "{},", "]}")),
        (
            "outputs",
            INFER,
            filled(r#"{"outputs":["#, r#"{"name":"text_output"},"#, "]}"),
        ),
        (
            "parameters",
            INFER,
            filled(r#"{"parameters":{"#, r#""a":0,"#, r#""b":0}}"#),
        ),
        (
            "a shape",
            INFER,
            filled(
                r#"{"inputs":[{"name":"text_input","datatype":"BYTES","shape":["#,
                "1,",
                r#"],"data":["x"]}]}"#,
            ),
        ),
        (
            "elements",
            INFER,
            filled(
                r#"{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[62000],"data":["#,
                r#""a","#,
                "]}]}",
            ),
        ),
        (
            "elements in lists",
            INFER,
            filled(
                r#"{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":["#,
                "[],",
                "]}]}",
            ),
        ),
    ] {
        let packed = gzip(&body);
        let packing = Way::Http(path, "content-encoding: gzip\r\n");
        rows.push((
            what.to_owned(),
            Way::Http(path, "expect-nothing: x\r\n"),
            body,
        ));
        rows.push((format!("packed {what}"), packing, packed));
    }
    rows
}

/// A field with its content.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    let mut length = content.len();
    while length >= 0x80 {
        bytes.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    bytes.push(length as u8);
    [bytes, content.to_vec()].concat()
}

fn many(part: &[u8]) -> Vec<u8> {
    part.repeat(BYTES / part.len())
}

pub(super) fn grpc() -> Vec<Row> {
    let contents = |content: Vec<u8>| field(5, &field(5, &content));
    let infer = [
        ("inputs", many(&field(5, &[]))),
        ("outputs", many(&field(6, &[]))),
        ("raw inputs", many(&field(7, &[]))),
        ("parameters", many(&field(4, &field(1, b"a")))),
        ("a shape", field(5, &field(3, &many(&[1])))),
        ("parameters of a tensor", field(5, &many(&field(4, &[])))),
        ("numbers", contents(field(2, &many(&[1])))),
        ("long numbers", contents(field(3, &many(&[1])))),
        ("texts", contents(many(&field(8, &[])))),
        ("texts of one byte", contents(many(&field(8, b"a")))),
        ("a long name", field(1, &many(b"n"))),
        ("a long id", field(3, &many(b"n"))),
    ];
    let session = [
        ("fragments", many(&field(1, &[]))),
        ("actions", many(&field(2, &[]))),
        ("children", field(1, &many(&field(4, &[])))),
        ("configs", field(2, &many(&field(5, &[])))),
        ("a long id", field(1, &field(1, &many(b"n")))),
    ];
    let infer = infer
        .into_iter()
        .map(|(what, bytes)| (MODEL_INFER, what, bytes));
    let session = session
        .into_iter()
        .map(|(what, bytes)| (SESSION, what, bytes));
    let mut rows = Vec::new();
    for (path, what, bytes) in infer.chain(session) {
        rows.push((what.to_owned(), Way::Grpc(path, false), bytes.clone()));
        rows.push((format!("packed {what}"), Way::Grpc(path, true), bytes));
    }
    rows
}

pub(super) fn lmtp() -> Vec<Row> {
    let mut rows = Vec::new();
    let text = r#"GENERATE {"stream_id":1,"prompt":"x","#;
    for (what, message) in [
        (
            "stop texts",
            filled(&format!(r#"{text}"stop":["#), r#""a","#, "]}"),
        ),
        (
            "numbers nobody knows",
            filled(&format!(r#"{text}"what":["#), "0,", "]}"),
        ),
        ("members", filled(text, r#""a":0,"#, r#""b":0}"#)),
        (
            "tokens",
            filled(r#"GENERATE {"stream_id":1,"prompt":["#, "1,", "]}"),
        ),
        (
            "biases",
            filled(
                &format!(r#"{text}"logit_bias":{{"#),
                r#""1":0,"#,
                r#""2":0}}"#,
            ),
        ),
        (
            "lists in lists",
            filled(&format!(r#"{text}"what":"#), "[", "}"),
        ),
        ("a long word", filled("", "N", " {}")),
        (
            "a long name",
            filled(&format!(r#"{text}""#), "n", r#"":0}"#),
        ),
    ] {
        rows.push((
            what.to_owned(),
            Way::WebSocket("/lmtp", "lmtp.v2", true),
            message.clone(),
        ));
        let line = [message, b"\n".to_vec()].concat();
        rows.push((
            what.to_owned(),
            Way::Http("/lmtp", "content-type: text/plain\r\n"),
            line,
        ));
    }
    let json = Way::Http("/lmtp", "content-type: application/json\r\n");
    rows.push(("messages".to_owned(), json, filled("[", r#"["A",0],"#, "]")));
    let lines = Way::Http("/lmtp", "content-type: text/plain\r\n");
    rows.push(("lines".to_owned(), lines, filled("", "A {}\n", "")));
    rows
}

pub(super) fn evergreen() -> Vec<Row> {
    let mut rows = Vec::new();
    for (what, message) in [
        ("fragments", filled(r#"{"nodeFragments":["#, "{},", "]}")),
        ("actions", filled(r#"{"actions":["#, "{},", "]}")),
        (
            "children",
            filled(
                r#"{"nodeFragments":[{"id":"a","childIds":["#,
                r#""b","#,
                "]}]}",
            ),
        ),
        (
            "inputs",
            filled(
                r#"{"actions":[{"name":"GENERATE","inputs":["#,
                "{},",
                "]}]}",
            ),
        ),
        ("lists in lists", filled(r#"{"what":"#, "[", "}")),
        ("objects in objects", filled("", r#"{"a":"#, "")),
        ("numbers nobody knows", filled(r#"{"what":["#, "0,", "]}")),
        ("a long name", filled(r#"{""#, "n", r#"":0}"#)),
        (
            "a long id",
            filled(r#"{"nodeFragments":[{"id":""#, "n", r#""}]}"#),
        ),
    ] {
        rows.push((
            what.to_owned(),
            Way::WebSocket("/evergreen", "evergreen.v2.json", true),
            message,
        ));
    }
    let list = |name: &str, part: &[u8]| {
        let count = u32::try_from(BYTES / part.len()).unwrap();
        let mut bytes = vec![0x81, 0xa0 | name.len() as u8];
        bytes.extend(name.as_bytes());
        bytes.push(0xdd);
        bytes.extend(count.to_be_bytes());
        bytes.extend(many(part));
        bytes
    };
    for (what, message) in [
        ("fragments", list("node_fragments", &[0x80])),
        ("actions", list("actions", &[0x80])),
        ("fragments of nothing", list("node_fragments", &[0xc0])),
        ("lists in lists", many(&[0x91])),
        ("objects in objects", many(&[0x81, 0xa1, b'a'])),
        (
            "a list whose length is a lie",
            vec![0xdd, 0xff, 0xff, 0xff, 0xff],
        ),
    ] {
        rows.push((
            what.to_owned(),
            Way::WebSocket("/evergreen", "actionengine.msgpack", false),
            message,
        ));
    }
    rows
}
