//! The samples of the specification byte for byte, and the variants that other encoders send.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message as _;

use super::value::{ValueReader, put_int};
use super::*;
use crate::evergreen::tests::leaf;
use crate::evergreen::{Action, Param, json};
use crate::generated::sapwood::v1::ActionOptions;

/// A sample of `testdata`, by name.
pub(in crate::evergreen) fn sample(name: &str) -> Bytes {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/evergreen/msgpack/samples.txt");
    let text = std::fs::read_to_string(path).unwrap();
    let line = text
        .lines()
        .find(|line| line.split(' ').next() == Some(name));
    hex(line.unwrap().split_once(' ').unwrap().1)
}

/// Bytes from hex with blanks.
pub(in crate::evergreen) fn hex(text: &str) -> Bytes {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    let byte = |pair: &[u32]| u8::try_from(pair[0] * 16 + pair[1]).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn written(message: &WireMessage, ids: &[NodeId]) -> Bytes {
    let mut out = BytesMut::new();
    let context = EncodeContext {
        ids,
        now: NOW,
        older: false,
    };
    encode(message, context, &mut out);
    out.freeze()
}

fn fragments(list: Vec<Fragment>) -> WireMessage {
    WireMessage {
        fragments: list.into(),
        ..WireMessage::default()
    }
}

fn text(data: &'static str) -> Option<Chunk> {
    Some(Chunk {
        metadata: Some(Arc::new(Metadata::of("text/plain"))),
        payload: Some(Payload::Data(Bytes::from_static(data.as_bytes()))),
    })
}

fn status(status: Option<Status>) -> Option<Chunk> {
    Some(Chunk {
        metadata: None,
        payload: Some(Payload::Status(status.map(Arc::new))),
    })
}

fn bad() -> Status {
    Status::other(Code::InvalidRequest, "", "bad")
}

/// The action of the sample.
fn generate() -> Action {
    Action {
        name: "GENERATE".into(),
        inputs: vec![Param::new("prompt", "p")],
        outputs: vec![Param::new("response", "r")],
        ..Action::default()
    }
}

/// EV-735, EV-739
#[test]
fn ev_730_the_samples_are_written_and_read_byte_for_byte() {
    let action = WireMessage {
        actions: vec![generate()],
        ..WireMessage::default()
    };
    let table = [
        ("half-close", WireMessage::default()),
        ("fragment", fragments(vec![leaf("q", 0, false, text("yo"))])),
        (
            "fragment-at-128",
            fragments(vec![leaf("q", 128, false, text("yo"))]),
        ),
        ("null-chunk", fragments(vec![leaf("q", 1, true, None)])),
        ("action", action),
        (
            "status-ok",
            fragments(vec![leaf("A1#__status__", 0, true, status(None))]),
        ),
        (
            "abort",
            fragments(vec![leaf(ABORT, 0, true, status(Some(bad())))]),
        ),
    ];
    for (name, message) in table {
        let ids = [NodeId::from_static("A1")];
        let bytes = sample(name);
        assert_eq!(written(&message, &ids), bytes, "{name}");
        let read = decode(bytes.clone()).unwrap();
        assert_eq!(read.ids.len(), message.actions.len());
        let wire_bytes = bytes.len();
        assert_eq!(
            read.message,
            WireMessage {
                wire_bytes,
                ..message
            },
            "{name}"
        );
        assert!(!read.headers && !read.older, "{name}");
    }
}

#[test]
fn ev_730_integers_are_written_in_signed_forms_only() {
    for (value, bytes) in [
        (0, "00"),
        (127, "7f"),
        (128, "d1 0080"),
        (255, "d1 00ff"),
        (256, "d1 0100"),
        (32_767, "d1 7fff"),
        (32_768, "d2 00008000"),
        (65_536, "d2 00010000"),
        (i32::MAX, "d2 7fffffff"),
        (-1, "ff"),
        (-32, "e0"),
        (-33, "d0 df"),
        (-128, "d0 80"),
        (-129, "d1 ff7f"),
        (i32::MIN, "d2 80000000"),
    ] {
        let mut out = BytesMut::new();
        put_int(&mut out, value);
        assert_eq!(out, hex(bytes), "{value}");
        assert_eq!(value::int_len(value), out.len());
        assert_eq!(ValueReader::new(out.freeze()).int(), Ok(i64::from(value)));
    }
}

#[test]
fn ev_730_seqs_of_a_stream_of_40000_fragments_round_trip() {
    for seq in 0..40_001 {
        let message = fragments(vec![leaf("q", seq, false, text("x"))]);
        let bytes = written(&message, &[]);
        // The seq is a fixint, d1 or d2.
        let end = bytes.len() - 2;
        let marker = match seq {
            0..=127 => bytes[end - 1],
            128..=32_767 => bytes[end - 3],
            _ => bytes[end - 5],
        };
        assert!(matches!(marker, 0..=0x7f | 0xd1 | 0xd2), "{seq}");
        assert_eq!(decode(bytes).unwrap().message.fragments[0].seq, seq);
    }
}

/// Values in a bin.
fn bin(parts: &[&[u8]]) -> Bytes {
    let len = parts.iter().map(|part| part.len()).sum();
    let mut out = BytesMut::new();
    value::put_bin_head(&mut out, len);
    parts.iter().for_each(|part| out.put_slice(part));
    out.freeze()
}

/// A message around the bytes of one fragment.
fn around(fragment: &[u8]) -> Bytes {
    bin(&[&[0x91], &bin(&[fragment]), &[0x90, 0x00]])
}

/// A message of one final fragment `q` with this chunk.
fn holding(chunk: &str) -> Bytes {
    around(&[&[0][..], &bin(&[&hex(chunk)]), &hex("c2 a1 71 00")].concat())
}

/// The fragment of the sample, with the bytes after the chunk's bin replaced.
fn ending_in(rest: &str) -> Bytes {
    let head = "00 c4 14 c4 02 796f a0 c4 0d aa 746578742f706c61696e c0 00";
    around(&hex(&format!("{head} {rest}")))
}

#[test]
fn ev_731_every_form_of_an_integer_and_of_a_length_is_accepted() {
    for (rest, seq) in [
        ("c3 a1 71 05", 5),
        ("c3 a1 71 cc 80", 128),
        ("c3 a1 71 cd 0080", 128),
        ("c3 a1 71 ce 00000080", 128),
        ("c3 a1 71 cf 0000000000000080", 128),
        ("c3 a1 71 d0 05", 5),
        ("c3 a1 71 d1 0080", 128),
        ("c3 a1 71 d2 00000080", 128),
        ("c3 a1 71 d3 0000000000000080", 128),
        ("c3 d9 01 71 05", 5),
        ("c3 da 0001 71 05", 5),
        ("c3 db 00000001 71 05", 5),
        ("c3 a1 71 c0", APPEND),
        ("c3 a1 71 ff", APPEND),
        ("c3 a1 71 d3 ffffffffffffff00", APPEND),
    ] {
        let read = decode(ending_in(rest)).unwrap_or_else(|status| panic!("{rest}: {status}"));
        let fragment = &read.message.fragments[0];
        assert_eq!(
            (fragment.seq, fragment.last, &*fragment.id),
            (seq, false, "q"),
            "{rest}"
        );
        assert_eq!(fragment.chunk, text("yo"));
    }
    // A head that is larger than it has to be.
    let roomy = [&hex("c6 00000020")[..], &sample("fragment")[2..]].concat();
    assert_eq!(
        decode(roomy.into()).unwrap().message.fragments[0].chunk,
        text("yo")
    );
}

#[test]
fn ev_731_lenient_forms_of_a_chunk_are_accepted() {
    let chunk =
        |bytes: &str| decode(holding(bytes)).map(|mut read| read.message.fragments.remove(0).chunk);
    // No data at all, a reference instead; no metadata: an octet stream, which is a chunk of its own (EV-401).
    let reference = chunk("a6 646174613a2c c0").unwrap().unwrap();
    assert_eq!(reference.payload, Some(Payload::Ref("data:,".into())));
    assert_eq!(reference.metadata, Some(Arc::default()));
    let plain = chunk("c4 01 78 a0 c0").unwrap().unwrap();
    assert_eq!(plain.metadata.unwrap().mimetype(), mimetype::OCTET_STREAM);
    // A timestamp that holds nothing.
    let untimed = chunk("c4 01 78 a0 c4 08 a3 612f62 c4 01 c0 00")
        .unwrap()
        .unwrap();
    assert_eq!(*untimed.metadata.unwrap(), Metadata::of("a/b"));
    // An attribute that is no text, and one that is a role.
    let reply = chunk("c4 01 78 a0 c4 12 a3 612f62 c0 02 a1 6b a2 ff00 a4 726f6c65 a1 55")
        .unwrap()
        .unwrap();
    let reply = reply.metadata.unwrap();
    assert_eq!(&*reply.role, "U");
    let retained = Attributes::decode(&*reply.experimental[0].value).unwrap();
    assert_eq!(retained.attributes["k"], [0xff, 0]);
    // A null chunk with and without metadata (EV-734).
    assert_eq!(chunk("c4 00 a0 c0"), Ok(None));
    // A status chunk: a code and a message.
    let failed = chunk("c4 02 05 78 a0 c4 0d aa 5f5f7374617475735f5f c0 00")
        .unwrap()
        .unwrap();
    let Some(Payload::Status(Some(status))) = failed.payload else {
        panic!("a status was sent");
    };
    assert_eq!((status.code, &*status.message), (Code::NotFound, "x"));
}

fn refused(bytes: Bytes, what: &str) {
    let status = decode(bytes).expect_err(what);
    assert_eq!(status.known(), Some(Reason::BadMessage), "{what}");
}

#[test]
fn ev_731_malformed_messages_are_refused() {
    for bytes in [
        "",
        "90",
        "c4",
        "c4 05 90 90 00",
        // Trailing bytes after the message and after the headers.
        "c4 03 90 90 00 00",
        "c4 04 90 90 00 00",
        // A bin in place of a list, a str in place of a struct.
        "c4 04 c4 01 90 00",
        "c4 05 91 a1 71 90 00",
        // Counts without their entries, and a negative one.
        "c4 03 95 90 00",
        "c4 03 90 90 01",
        "c4 03 90 90 ff",
    ] {
        refused(hex(bytes), bytes);
    }
    for rest in [
        // A bin as flag and as id, an id that is not UTF-8, a seq beyond int32, a trailing byte.
        "c4 01 71 a1 71 00",
        "c3 c4 01 71 00",
        "c3 a1 ff 00",
        "c3 a1 71 ce 80000000",
        "c3 a1 71 00 00",
    ] {
        refused(ending_in(rest), rest);
    }
    // A str as data, a chunk with a trailing byte, data and reference at once; then an unknown variant.
    for chunk in ["a1 78 a1 78 c0", "c4 01 78 a0 c0 00", "c4 01 78 a1 78 c0"] {
        refused(holding(chunk), chunk);
    }
    refused(around(&hex("02 c4 00 c2 a1 71 00")), "variant 2");
    // A negative offset and length, and a str as offset.
    for range in ["ff c0", "00 ff", "a1 78 c0"] {
        let child = bin(&[&hex("a1 63"), &hex(range)]);
        refused(
            around(&[&hex("01")[..], &child, &hex("c2 a1 71 00")].concat()),
            range,
        );
    }
}

#[test]
fn ev_740_a_node_ref_selects_a_byte_range_of_its_child() {
    let read = decode(sample("node-ref")).unwrap().message;
    let fragment = &read.fragments[0];
    assert_eq!(
        (&*fragment.id, fragment.seq, fragment.last),
        ("n1", APPEND, true)
    );
    assert_eq!(fragment.children, ["child"]);
    assert_eq!(fragment.range.as_deref(), Some(&(3..8)));
    for (range, offset_and_len) in [
        (None, "00 c0"),
        (Some(0..7), "00 07"),
        (Some(3..u64::MAX), "03 c0"),
        (Some(200..200), "d1 00c8 00"),
        (Some(70_000..140_000), "d2 00011170 d2 00011170"),
    ] {
        let message = fragments(vec![Fragment {
            children: vec!["child".into()],
            range: range.map(Box::new),
            ..leaf("n1", 5, true, None)
        }]);
        let child = bin(&[&hex("a5 6368696c64"), &hex(offset_and_len)]);
        let around = [&hex("01")[..], &child, &hex("c2 a2 6e31 05")].concat();
        let bytes = bin(&[&[0x91], &bin(&[&around]), &[0x90, 0x00]]);
        assert_eq!(written(&message, &[]), bytes, "{offset_and_len}");
        let wire_bytes = bytes.len();
        let read = decode(bytes).unwrap().message;
        assert_eq!(
            read,
            WireMessage {
                wire_bytes,
                ..message
            }
        );
    }
}

#[test]
fn ev_731_the_number_of_entries_is_limited() {
    let one = hex("c4 0b 00 c4 04 c4 00 a0 c0 c2 a1 71 00");
    let many = |count: usize| {
        let mut list = BytesMut::new();
        value::put_list(&mut list, count);
        let bytes = bin(&[&list, &one[..].repeat(count), &[0x90, 0x00]]);
        decode(bytes).map(|read| read.message.fragments.len())
    };
    assert_eq!(many(ENTRIES_MAX), Ok(ENTRIES_MAX));
    let past = many(ENTRIES_MAX + 1).unwrap_err();
    assert_eq!(past.known(), Some(Reason::FragmentLimit));
}

/// A port without an id takes four bytes, and its id is as long as that of its action.
#[test]
fn d_47_the_ids_built_for_ports_are_limited_together() {
    let ports = |id_bytes: usize, count: usize| {
        let mut action = BytesMut::new();
        put_text(&mut action, "a".repeat(id_bytes).as_bytes());
        put_text(&mut action, b"f");
        value::put_list(&mut action, count);
        action.put_slice(&hex("c4 02 a0 a0").repeat(count));
        action.put_slice(&[0x90, 0x00]);
        decode(bin(&[&[0x90, 0x91], &bin(&[&action]), &[0x00]]))
            .map(|read| read.message.actions[0].inputs.len())
    };
    // One entry is the action, and the separator is part of an id.
    assert_eq!(ports(254, ENTRIES_MAX - 1), Ok(ENTRIES_MAX - 1));
    assert_eq!(ports(1 << 20, 31), Ok(31));
    for (id_bytes, count) in [(255, ENTRIES_MAX - 1), (1 << 20, 32)] {
        let refused = ports(id_bytes, count).unwrap_err();
        assert_eq!(refused.known(), Some(Reason::FragmentLimit));
    }
}

#[test]
fn ev_732_the_older_layout_is_detected_and_can_be_written() {
    // No count of headers, neither in the action nor in the message.
    let sample = sample("action");
    // The action's own count stands before the message's.
    let action = bin(&[&sample[6..sample.len() - 2]]);
    let older = bin(&[&[0x90, 0x91], &action]);
    let read = decode(older.clone()).unwrap();
    assert!(read.older);
    assert_eq!(read.message.actions, [generate()]);
    let mut out = BytesMut::new();
    let context = EncodeContext {
        ids: &read.ids,
        now: NOW,
        older: true,
    };
    encode(&read.message, context, &mut out);
    assert_eq!(out, older);
}

/// EV-733
#[test]
fn ev_734_only_a_final_empty_fragment_becomes_a_null_chunk() {
    let nothing = Some(Chunk {
        metadata: Some(Arc::new(Metadata::default())),
        payload: None,
    });
    for chunk in [None, nothing.clone()] {
        let bytes = written(&fragments(vec![leaf("q", 0, false, chunk)]), &[]);
        let read = decode(bytes).unwrap().message.fragments.remove(0);
        assert_eq!(read.chunk.unwrap().metadata.unwrap().mimetype, NOT_NULL);
    }
    let last = written(&fragments(vec![leaf("q", 1, true, nothing)]), &[]);
    assert_eq!(last, sample("null-chunk"));
}

#[test]
fn ev_737_an_unknown_action_has_the_message_of_action_engines_registry() {
    let unknown = Status::new(Reason::UnknownAction, "no such").with("action", "nope");
    let message = fragments(vec![leaf("A#__status__", 0, true, status(Some(unknown)))]);
    let read = decode(written(&message, &[])).unwrap();
    let Some(Payload::Status(Some(reply))) =
        &read.message.fragments[0].chunk.as_ref().unwrap().payload
    else {
        panic!("a status was sent");
    };
    assert_eq!(
        (reply.code, &*reply.message),
        (Code::NotFound, "Action not found in registry: nope.")
    );
}

/// EV-734: a port without an id has the default one.
#[test]
fn ev_741_headers_are_target_config_and_timeout() {
    let url = |name: &str| format!("type.googleapis.com/{name}");
    let options = ActionOptions {
        timeout: Some(prost_types::Duration {
            seconds: 1,
            nanos: 500_000_000,
        }),
    };
    let config = json::any::bytes_of("google.protobuf.Struct", r#"{"n":2}"#).unwrap();
    let action = Action {
        target: "demo".into(),
        configs: vec![
            Any {
                type_url: url("google.protobuf.Struct"),
                value: config,
            },
            Any {
                type_url: url("sapwood.v1.ActionOptions"),
                value: options.encode_to_vec(),
            },
        ],
        outputs: vec![Param::new("response", "")],
        ..generate()
    };
    let message = WireMessage {
        actions: vec![action.clone()],
        ..WireMessage::default()
    };
    let read = decode(written(&message, &[NodeId::from_static("A1")])).unwrap();
    let expect = Action {
        outputs: vec![Param::new("response", "A1#response")],
        ..action
    };
    assert_eq!(read.message.actions, [expect]);
    // An invalid config fails the action in the session; the decoder only has to pass it on.
    let header = hex("01 ae 736170776f6f642d636f6e666967 a1 7b");
    let broken = bin(&[&hex("a1 41 a1 46 90 90"), &header]);
    let broken = bin(&[&[0x90, 0x91], &broken, &[0x00]]);
    let read = decode(broken).unwrap();
    assert_eq!(read.message.actions[0].configs[0].value, [0xff]);
}

/// A config is built value by value, which takes a hundred times as much as its bytes.
#[test]
fn d_47_the_values_of_configs_are_limited_together() {
    let configured = |actions: usize, values: usize| {
        let json = format!(r#"{{"a":[{}]}}"#, vec!["0"; values].join(","));
        let mut action = BytesMut::from(&hex("a1 41 a1 46 90 90 01")[..]);
        put_text(&mut action, b"sapwood-config");
        put_text(&mut action, json.as_bytes());
        let action = bin(&[&action]);
        let mut list = BytesMut::from(&[0x90][..]);
        value::put_list(&mut list, actions);
        list.put_slice(&action.repeat(actions));
        list.put_u8(0x00);
        decode(bin(&[&list])).map(|read| read.message.actions.len())
    };
    // A brace and a bracket count four each, and a list has a comma less than values. The action and its header share
    // the limit: they take one value's place.
    let most = json::ANY_ENTRIES_MAX - 2 * 4 + 1 - 1;
    assert_eq!(configured(1, most), Ok(1));
    for (actions, values) in [(1, most + 1), (2, most / 2 + 1)] {
        let refused = configured(actions, values).unwrap_err();
        assert_eq!(refused.known(), Some(Reason::FragmentLimit));
    }
}

/// The time of the samples.
const NOW: i64 = 0x0006_2a99_ba0c_6000;
