//! Byte samples of the schema.

mod round_trip;

use bytes::Bytes;
use prost::Message;

use super::wire::*;

/// A fragment of a leaf, as the codec of every dialect returns it.
pub(in crate::evergreen) fn leaf(
    id: &str,
    seq: i32,
    last: bool,
    chunk: Option<super::Chunk>,
) -> super::Fragment {
    super::Fragment {
        id: id.into(),
        seq,
        last,
        chunk,
        ..super::Fragment::default()
    }
}

fn chunk(mimetype: &str, role: &str, data: &'static [u8]) -> Chunk {
    Chunk {
        metadata: Some(ChunkMetadata {
            mimetype: mimetype.into(),
            role: role.into(),
            ..Default::default()
        }),
        payload: Some(Payload::Data(Bytes::from_static(data))),
    }
}

fn fragment(id: &str, seq: i32, continued: bool) -> NodeFragment {
    NodeFragment {
        id: id.into(),
        seq,
        continued,
        ..Default::default()
    }
}

fn fragments(list: Vec<NodeFragment>) -> SessionMessage {
    SessionMessage {
        node_fragments: list,
        actions: Vec::new(),
    }
}

/// Bytes from hex with blanks.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    digits
        .chunks(2)
        .map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap())
        .collect()
}

#[test]
fn schema_byte_samples() {
    let named = |name: &str, id: &str| NamedParameter {
        name: name.into(),
        id: id.into(),
    };
    let action = Action {
        name: "GENERATE".into(),
        inputs: vec![named("prompt", "p")],
        outputs: vec![named("response", "r")],
        ..Default::default()
    };
    let table: Vec<(SessionMessage, &str)> = vec![
        (
            SessionMessage {
                node_fragments: Vec::new(),
                actions: vec![action],
            },
            "12 26 12 08 47454e4552415445 1a 0b 0a 06 70726f6d7074 12 01 70 22 0d 0a 08 726573706f6e7365 12 01 72",
        ),
        (
            fragments(vec![NodeFragment {
                chunk_fragment: Some(chunk("text/plain", "", b"hi")),
                ..fragment("p", 0, false)
            }]),
            "0a 17 0a 01 70 2a 12 0a 0c 0a 0a 746578742f706c61696e 52 02 6869",
        ),
        (
            fragments(vec![NodeFragment {
                chunk_fragment: Some(chunk("text/plain", "ASSISTANT", b"Yes")),
                ..fragment("r", 0, true)
            }]),
            "0a 25 0a 01 72 18 01 2a 1e 0a 17 0a 0a 746578742f706c61696e 12 09 415353495354414e54 52 03 596573",
        ),
        (
            fragments(vec![fragment("r", 1, false)]),
            "0a 05 0a 01 72 10 01",
        ),
        (
            fragments(vec![NodeFragment {
                child_ids: vec!["p".into(), "r".into()],
                ..fragment("t", 0, false)
            }]),
            "0a 09 0a 01 74 22 01 70 22 01 72",
        ),
        (SessionMessage::default(), ""),
    ];
    for (message, bytes) in table {
        let bytes = hex(bytes);
        assert_eq!(message.encode_to_vec(), bytes);
        assert_eq!(SessionMessage::decode(Bytes::from(bytes)).unwrap(), message);
    }
}

#[test]
fn payloads_are_views_of_the_receive_buffer() {
    let wire = Bytes::from(
        fragments(vec![NodeFragment {
            chunk_fragment: Some(chunk("text/plain", "", b"shared")),
            ..fragment("p", 0, false)
        }])
        .encode_to_vec(),
    );
    let range = wire.as_ptr_range();
    let message = SessionMessage::decode(wire).unwrap();
    let Some(Payload::Data(data)) = message.node_fragments[0]
        .chunk_fragment
        .as_ref()
        .and_then(|chunk| chunk.payload.as_ref())
    else {
        panic!("a payload was sent");
    };
    assert!(
        range.contains(&data.as_ptr()),
        "data is a view of the buffer"
    );
}

#[test]
fn descriptors_name_the_service() {
    let set = prost_types::FileDescriptorSet::decode(crate::generated::DESCRIPTORS).unwrap();
    let services: Vec<&str> = set
        .file
        .iter()
        .flat_map(|file| &file.service)
        .map(|service| service.name())
        .collect();
    assert_eq!(services, ["EvergreenService"]);
    assert!(
        set.file
            .iter()
            .any(|file| file.name() == "google/protobuf/any.proto"),
        "imports are included"
    );
}
