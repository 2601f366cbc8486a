//! Section 5 of the Evergreen page: chunks, metadata and references.

use std::sync::Arc;

use bytestring::ByteString;
use prost_types::Any;

use super::harness::*;
use crate::evergreen::{Chunk, Fragment, Metadata, MetadataMode, Payload, Reason};

const MODES: [MetadataMode; 3] = [
    MetadataMode::Strict,
    MetadataMode::Lenient,
    MetadataMode::PerChunk,
];

/// Feeds `list` in every order and expects, for strict, lenient and per-chunk, this abort or these items' texts.
fn in_every_mode(list: &[Fragment], expect: [Result<&[&str], Reason>; 3]) {
    for (mode_of, expect) in MODES.into_iter().zip(expect) {
        for order in orders(list) {
            let mut session = mode(mode_of);
            let outcome = feed(&mut session, order.clone()).map(|()| texts(&mut session, "p"));
            let outcome = outcome
                .as_ref()
                .map(Vec::as_slice)
                .map_err(|reason| *reason);
            let expect =
                expect.map(|texts| texts.iter().map(ToString::to_string).collect::<Vec<_>>());
            assert_eq!(
                outcome,
                expect.as_deref().map_err(|reason| *reason),
                "{mode_of:?}: {order:?}"
            );
        }
    }
}

fn last(fragment: Fragment) -> Fragment {
    Fragment {
        last: true,
        ..fragment
    }
}

#[test]
fn ev_401_seq_0_types_the_leaf() {
    let missing = Err(Reason::MetadataMissing);
    in_every_mode(&[last(chunk("p", 0, None, Some("x")))], [missing; 3]);
    in_every_mode(
        &[chunk("p", 0, None, Some("x")), leaf("p", 1, "y")],
        [missing; 3],
    );
    in_every_mode(&[empty("p", 0, false), leaf("p", 1, "y")], [missing; 3]);
    // Only per-chunk mode accepts a later fragment with metadata of its own.
    let typed = last(chunk("p", 1, of("text/plain", ""), Some("y")));
    in_every_mode(
        &[empty("p", 0, false), typed],
        [Err(Reason::MetadataRepeated), missing, Ok(&["y"])],
    );
    // Buffered without a type until seq 0 arrives: every order is accepted.
    in_every_mode(
        &[more("p", 0, "a"), more("p", 1, "b"), leaf("p", 2, "c")],
        [Ok(&["abc"]); 3],
    );
}

/// EV-210
#[test]
fn ev_402_metadata_of_seq_0_holds_for_the_leaf_and_children_may_differ() {
    let mut session = server();
    feed(
        &mut session,
        [
            tree("t", 0, &["a", "b"]),
            chunk("a", 0, of("text/plain", "USER"), Some("1")),
            leaf("a", 1, "2"),
            last(chunk("b", 0, of("image/png", ""), Some("3"))),
        ],
    )
    .unwrap();
    assert_eq!(
        content(&mut session, "t").0,
        [item("text/plain", "USER", "12"), item("image/png", "", "3")]
    );
}

#[test]
fn ev_403_ev_411_data_and_references_mix_in_one_leaf() {
    let reference = |seq, uri: &str, is_last| {
        let payload = Some(Payload::Ref(ByteString::from(uri)));
        let metadata = (seq == 0).then(|| Arc::new(Metadata::of("text/plain")));
        Fragment {
            id: "p".into(),
            seq,
            last: is_last,
            chunk: Some(Chunk { metadata, payload }),
            ..Fragment::default()
        }
    };
    let list = [
        reference(0, "data:,one%20", false),
        more("p", 1, "two "),
        reference(2, "data:;base64,dGhyZWU=", true),
    ];
    in_every_mode(&list, [Ok(&["one two three"]); 3]);
    // Metadata alone is legal, and an item.
    in_every_mode(
        &[last(chunk("p", 0, of("text/plain", ""), None))],
        [Ok(&[""]); 3],
    );
}

/// EV-411
#[test]
fn ev_410_a_reference_is_refused_when_it_is_read_and_only_then() {
    for (uri, expect) in [
        ("ftp://h/x", Reason::RefScheme),
        ("file:///etc/passwd", Reason::RefDenied),
        ("data:;base64,!", Reason::RefScheme),
    ] {
        let payload = Some(Payload::Ref(ByteString::from(uri)));
        let chunk = Some(Chunk {
            metadata: of("text/plain", ""),
            payload,
        });
        let mut session = server();
        let refers = Fragment {
            id: "r".into(),
            last: true,
            chunk,
            ..Fragment::default()
        };
        feed(
            &mut session,
            [tree("t", 0, &["a", "r"]), leaf("a", 0, "first"), refers],
        )
        .unwrap();
        let (items, stop) = content(&mut session, "t");
        assert_eq!((items.len(), stop), (1, Stop::Failed(expect)), "{uri}");
        assert!(session.aborted().is_none(), "only the reader fails");
        assert_eq!(texts(&mut session, "a"), ["first"]);
    }
}

#[test]
fn ev_404_we_send_metadata_at_seq_0_only_and_an_empty_output_as_one_fragment() {
    let mut session = server();
    act(&mut session, action("f", "", "out=o none=e")).unwrap();
    let start = start(&mut session);
    let text = of("text/plain", "ASSISTANT").unwrap();
    let (out, none) = (start.outputs[0].1, start.outputs[1].1);
    session.nodes().write(out, &text, "a".into()).unwrap();
    sent(&mut session);
    session.nodes().write(out, &text, "b".into()).unwrap();
    session.nodes().end(out, &text).unwrap();
    session.nodes().end(none, &text).unwrap();
    let wire = |fragment: Fragment| -> Vec<u8> {
        let message = fragments([fragment]);
        let mut bytes = Vec::new();
        crate::evergreen::protobuf::encode(&message, &mut bytes);
        bytes
    };
    let all = sent(&mut session);
    let [second, empty_output] = all.as_slice() else {
        panic!("{all:?}")
    };
    assert_eq!(
        (second.seq, second.last),
        (1, true),
        "the last unsent piece becomes the final one"
    );
    let decoded = crate::evergreen::protobuf::decode(&*wire(second.clone())).unwrap();
    assert_eq!(decoded.fragments[0].chunk.as_ref().unwrap().metadata, None);
    let chunk = Some(Chunk {
        metadata: Some(text),
        payload: None,
    });
    assert_eq!(
        *empty_output,
        Fragment {
            id: "e".into(),
            seq: 0,
            last: true,
            chunk,
            ..Fragment::default()
        }
    );
}

#[test]
fn ev_405_metadata_after_the_first_is_judged_by_mode() {
    let repeated = Err(Reason::MetadataRepeated);
    let conflict = Err(Reason::MetadataConflict);
    let first = || chunk("p", 0, of("text/plain", "USER"), Some("a"));
    let again = |mimetype: &str, role: &str| last(chunk("p", 1, of(mimetype, role), Some("b")));
    in_every_mode(
        &[first(), again("text/plain", "USER")],
        [repeated, Ok(&["ab"]), Ok(&["a", "b"])],
    );
    in_every_mode(
        &[first(), again("TEXT/plain", "")],
        [repeated, Ok(&["ab"]), Ok(&["a", "b"])],
    );
    in_every_mode(
        &[first(), again("", "")],
        [repeated, Ok(&["ab"]), Ok(&["a", "b"])],
    );
    in_every_mode(
        &[first(), again("text/html", "")],
        [repeated, conflict, Ok(&["a", "b"])],
    );
    in_every_mode(
        &[first(), again("text/plain", "SYSTEM")],
        [repeated, conflict, Ok(&["a", "b"])],
    );
    // Metadata is compared without a payload as well.
    let silent = |mimetype| last(chunk("p", 1, of(mimetype, ""), None));
    in_every_mode(
        &[first(), silent("text/plain")],
        [repeated, Ok(&["a"]), Ok(&["a", ""])],
    );
    in_every_mode(
        &[first(), silent("image/png")],
        [repeated, conflict, Ok(&["a", ""])],
    );
    // In per-chunk mode a fragment without metadata continues the current chunk.
    let list = [
        first(),
        chunk("p", 1, of("image/png", ""), Some("b")),
        leaf("p", 2, "c"),
    ];
    in_every_mode(&list, [repeated, conflict, Ok(&["a", "bc"])]);
}

#[test]
fn ev_406_an_empty_mimetype_is_an_octet_stream_and_the_length_is_limited() {
    assert_eq!(Metadata::default().mimetype(), "application/octet-stream");
    for (bytes, expect) in [(256, Ok(())), (257, Err(Reason::BadName))] {
        let mimetype = "a".repeat(bytes);
        assert_eq!(
            feed(&mut server(), [chunk("p", 0, of(&mimetype, ""), None)]),
            expect
        );
    }
}

/// EV-407
#[test]
fn ev_408_metadata_is_kept_with_the_chunk_and_its_size_is_limited() {
    let meta = |bytes: usize| {
        let any = Any {
            type_url: String::new(),
            value: vec![0; bytes],
        };
        let capture_time = Some(prost_types::Timestamp {
            seconds: 7,
            nanos: 1,
        });
        let metadata = Metadata::of("text/plain");
        Some(Arc::new(Metadata {
            file_name: "../x/cat.png".into(),
            capture_time,
            experimental: vec![any],
            ..metadata
        }))
    };
    for (bytes, expect) in [(65_536, Ok(())), (65_537, Err(Reason::FragmentLimit))] {
        let mut session = server();
        assert_eq!(
            feed(&mut session, [last(chunk("p", 0, meta(bytes), Some("x")))]),
            expect
        );
    }
    let mut session = server();
    feed(&mut session, [last(chunk("p", 0, meta(3), Some("x")))]).unwrap();
    let node = session.nodes().node("p").unwrap();
    let cursor = session.nodes().open(node, None);
    let crate::session::CursorRead::Piece(piece) = session.nodes().read(cursor) else {
        panic!("there is one")
    };
    let retained = meta(3).unwrap();
    assert_eq!(
        (piece.metadata.capture_time, &piece.metadata.experimental),
        (retained.capture_time, &retained.experimental)
    );
    assert_eq!(&*piece.metadata.file_name, "cat.png");
}
