//! The decoder agrees with the generated code.

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message as _;

use super::super::wire::{self, SessionMessage};
use super::super::{Action, Chunk, Fragment, Metadata, Param, Payload, mimetype};
use super::*;

/// Decodes a message by way of the generated structs.
fn by_the_schema(bytes: &[u8]) -> Option<WireMessage> {
    let message = SessionMessage::decode(bytes).ok()?;
    Some(WireMessage {
        fragments: message.node_fragments.into_iter().map(fragment).collect(),
        actions: message.actions.into_iter().map(action).collect(),
        wire_bytes: bytes.len(),
    })
}

fn fragment(fragment: wire::NodeFragment) -> Fragment {
    let last = !fragment.continued;
    let mut chunk = fragment.chunk_fragment.map(chunk);
    if let Some(Chunk {
        metadata: Some(metadata),
        payload: Some(payload @ Payload::Data(_)),
    }) = &mut chunk
        && let Payload::Data(data) = &*payload
        && last
        && mimetype::is_status(&metadata.mimetype)
        && let Some(Some(status)) = Status::decode(data)
    {
        *payload = Payload::Status(Some(status.into()));
    }
    Fragment {
        id: fragment.id.into(),
        seq: fragment.seq,
        last,
        children: fragment.child_ids.into_iter().map(Into::into).collect(),
        range: None,
        chunk,
    }
}

fn chunk(chunk: wire::Chunk) -> Chunk {
    let metadata = |metadata: wire::ChunkMetadata| Metadata {
        mimetype: metadata.mimetype.into(),
        role: metadata.role.into(),
        file_name: metadata.original_file_name.into(),
        capture_time: metadata.capture_time,
        experimental: metadata.experimental,
    };
    Chunk {
        metadata: chunk.metadata.map(|found| metadata(found).into()),
        payload: chunk.payload.map(|payload| match payload {
            wire::Payload::Ref(uri) => Payload::Ref(uri.into()),
            wire::Payload::Data(data) => Payload::Data(data),
        }),
    }
}

fn action(action: wire::Action) -> Action {
    let params = |list: Vec<wire::NamedParameter>| {
        list.into_iter()
            .map(|param| Param::new(param.name, param.id))
            .collect()
    };
    Action {
        name: action.name.into(),
        target: action.target_spec.unwrap_or_default().id.into(),
        inputs: params(action.inputs),
        outputs: params(action.outputs),
        configs: action.configs,
    }
}

/// A field of any of the messages: its key, and a value that may or may not be of the kind that the schema has there.
fn field(value: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let tag = prop::sample::select(vec![1_u32, 2, 3, 4, 5, 6, 10, 100, 7]);
    (tag, 0_u8..12, value, any::<u64>()).prop_map(|(tag, kind, value, number)| {
        let mut bytes = Vec::new();
        let mut put = |number: u64| prost::encoding::encode_varint(number, &mut bytes);
        match kind {
            0..6 => {
                put(u64::from(tag) << 3 | 2);
                put(value.len() as u64);
                bytes.extend(value);
            }
            6..9 => {
                put(u64::from(tag) << 3);
                put(if kind == 6 { number } else { number % 3 });
            }
            9 => {
                put(u64::from(tag) << 3 | 5);
                bytes.extend([1; 4]);
            }
            10 => {
                put(u64::from(tag) << 3 | 1);
                bytes.extend([2; 8]);
            }
            // A group and what is in it; rarely closed by the tag that opened it.
            _ => {
                put(u64::from(tag) << 3 | 3);
                bytes.extend(value);
                let mut put = |number: u64| prost::encoding::encode_varint(number, &mut bytes);
                put((u64::from(tag) + u64::from(number % 9 == 0)) << 3 | 4);
            }
        }
        bytes
    })
}

/// Fields within fields, as deep as the schema is.
fn nested() -> impl Strategy<Value = Vec<u8>> {
    let text = prop_oneof![
        prop::collection::vec(prop::num::u8::ANY, 0..4),
        Just(b"text/plain".to_vec()),
        Just(mimetype::STATUS.as_bytes().to_vec()),
    ];
    text.prop_recursive(5, 48, 4, |inner| {
        prop::collection::vec(field(inner), 0..4).prop_map(|fields| fields.concat())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn any_fields_decode_as_in_the_generated_code(bytes in nested()) {
        prop_assert_eq!(decode(&*bytes).ok(), by_the_schema(&bytes));
    }

    #[test]
    fn truncated_messages_decode_as_in_the_generated_code(bytes in nested(), keep in 0.0..1.0) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a share of a small length")]
        let cut = &bytes[..(bytes.len() as f64 * keep) as usize];
        prop_assert_eq!(decode(cut).ok(), by_the_schema(cut));
    }
}

#[test]
fn ev_805_metadata_is_copied_and_payloads_are_views() {
    let message = SessionMessage {
        node_fragments: vec![wire::NodeFragment {
            id: "a".into(),
            chunk_fragment: Some(wire::Chunk {
                metadata: Some(wire::ChunkMetadata {
                    mimetype: "text/plain".into(),
                    ..Default::default()
                }),
                payload: Some(wire::Payload::Data(Bytes::from_static(b"shared"))),
            }),
            ..Default::default()
        }],
        actions: Vec::new(),
    };
    let bytes = Bytes::from(message.encode_to_vec());
    let range = bytes.as_ptr_range();
    let message = decode(bytes).unwrap();
    let chunk = message.fragments[0].chunk.as_ref().unwrap();
    let Some(Payload::Data(data)) = &chunk.payload else {
        panic!("a payload was sent");
    };
    assert!(range.contains(&data.as_ptr()));
    let metadata = chunk.metadata.as_ref().unwrap();
    assert!(!range.contains(&metadata.mimetype.as_ptr()));
}
