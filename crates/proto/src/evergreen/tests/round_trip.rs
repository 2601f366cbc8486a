//! Messages that every dialect can represent decode to the same value in all of them.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use prost_types::Timestamp;

use crate::evergreen::socket::{Codec, FrameContent};
use crate::evergreen::{
    Action, Chunk, Dialect, Fragment, Metadata, Param, Payload, Reason, Status, WebSocketFrame,
    WireMessage,
};
use crate::session::Side;

fn text(most: usize) -> impl Strategy<Value = String> {
    prop::collection::vec(any::<char>(), 1..most).prop_map(|chars| chars.into_iter().collect())
}

/// Times that are whole microseconds, which is as fine as msgpack is.
fn metadata() -> impl Strategy<Value = Metadata> {
    let time = prop::option::of((0_i64..4_000_000_000, 0_i32..1_000_000));
    let mimetype = prop::sample::select(vec!["text/plain", "application/json", "image/png; q=1"]);
    (mimetype, "[A-Z]{0,9}", "[a-z.]{0,9}", time).prop_map(|(mimetype, role, name, time)| {
        Metadata {
            file_name: name.into(),
            capture_time: time.map(|(seconds, micros)| Timestamp {
                seconds,
                nanos: micros * 1000,
            }),
            ..Metadata::of(mimetype).with_role(role)
        }
    })
}

/// A fragment of a leaf at seq 0, or the end of one: only these have their whole content in every dialect.
fn fragment() -> impl Strategy<Value = Fragment> {
    let data =
        prop::collection::vec(any::<u8>(), 1..300).prop_map(|data| Payload::Data(data.into()));
    let uri = text(20).prop_map(|uri| Payload::Ref(uri.into()));
    let status = text(20).prop_map(|message| {
        let status = Status::other(Reason::BadConfig.code(), "", message);
        Payload::Status(Some(Arc::new(status)))
    });
    let chunk = prop_oneof![
        4 => (metadata(), prop_oneof![data, uri]).prop_map(|(metadata, payload)| Some(Chunk {
            metadata: Some(Arc::new(metadata)),
            payload: Some(payload),
        })),
        1 => status.prop_map(|status| Some(Chunk { metadata: None, payload: Some(status) })),
        1 => Just(None),
    ];
    (text(30), any::<bool>(), 1..i32::MAX, chunk).prop_map(|(id, last, seq, chunk)| {
        let ends = !matches!(
            &chunk,
            Some(Chunk {
                payload: Some(Payload::Data(_) | Payload::Ref(_)),
                ..
            })
        );
        Fragment {
            id: id.into(),
            seq: if ends { seq } else { 0 },
            last: last || ends,
            children: Vec::new(),
            range: None,
            chunk,
        }
    })
}

fn action() -> impl Strategy<Value = Action> {
    let params = || {
        prop::collection::vec((text(9), text(9)), 0..4).prop_map(|list| {
            list.into_iter()
                .map(|(name, id)| Param::new(name, id))
                .collect::<Vec<_>>()
        })
    };
    (text(20), text(20), params(), params()).prop_map(|(name, target, inputs, outputs)| Action {
        name: name.into(),
        target: target.into(),
        inputs,
        outputs,
        configs: Vec::new(),
    })
}

/// Encodes as a client and decodes as a server; removes what only this dialect adds.
fn round_trip(dialect: Dialect, message: &WireMessage) -> WireMessage {
    let mut out = BytesMut::new();
    Codec::new(dialect, Side::Client).encode(message, 0, &mut out);
    let bytes = out.freeze();
    let frame = match dialect {
        Dialect::Json => WebSocketFrame::Text(bytes),
        _ => WebSocketFrame::Binary(bytes),
    };
    let received = Codec::new(dialect, Side::Server).decode(frame);
    let Ok(FrameContent::Message(mut received)) = received else {
        panic!("{dialect:?} decodes to {received:?}");
    };
    received.wire_bytes = 0;
    for action in &mut received.actions {
        action
            .outputs
            .retain(|param| !param.id.starts_with("call-"));
    }
    for fragment in &mut received.fragments {
        // Some dialects mark a status by its mimetype.
        if let Some(Chunk {
            metadata,
            payload: Some(Payload::Status(_)),
        }) = &mut fragment.chunk
        {
            *metadata = None;
        }
    }
    received
}

proptest! {
    #[test]
    fn a_message_is_the_same_in_every_dialect(
        fragments in prop::collection::vec(fragment(), 0..4),
        actions in prop::collection::vec(action(), 1..3),
    ) {
        let message = WireMessage { fragments: fragments.into(), actions, wire_bytes: 0 };
        for dialect in Dialect::OF_SOCKETS {
            prop_assert_eq!(&round_trip(dialect, &message), &message, "{:?}", dialect);
        }
    }
}

#[test]
fn ev_408_metadata_survives_every_dialect() {
    let metadata = Metadata {
        file_name: "cat.png".into(),
        capture_time: Some(Timestamp {
            seconds: 5,
            nanos: 7000,
        }),
        ..Metadata::of("image/png").with_role("USER")
    };
    let fragment = Fragment {
        id: "i".into(),
        last: true,
        chunk: Some(Chunk {
            metadata: Some(Arc::new(metadata)),
            payload: Some(Payload::Data(Bytes::from_static(b"x"))),
        }),
        ..Fragment::default()
    };
    let message = WireMessage {
        fragments: [fragment].into_iter().collect(),
        ..WireMessage::default()
    };
    for dialect in Dialect::OF_SOCKETS {
        assert_eq!(round_trip(dialect, &message), message, "{dialect:?}");
    }
}
