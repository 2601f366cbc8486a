//! References to external content: how a reader stops at one, passes it and fails at it.

use std::sync::Arc;

use bytestring::ByteString;

use super::harness::*;
use crate::evergreen::{Chunk, Fragment, Payload, Reason, Status};
use crate::session::{Config, CursorId, CursorRead, RetentionPolicy, SessionMachine};

fn following() -> SessionMachine {
    server_with(follow)
}

fn follow(config: &mut Config, _: &mut crate::evergreen::SessionLimits) {
    config.references = true;
}

fn refers(id: &str, seq: i32, mimetype: &str, uri: &str, last: bool) -> Fragment {
    let metadata = (!mimetype.is_empty()).then(|| of(mimetype, "")).flatten();
    let payload = Some(Payload::Ref(ByteString::from(uri)));
    Fragment {
        id: id.into(),
        seq,
        last,
        chunk: Some(Chunk { metadata, payload }),
        ..Fragment::default()
    }
}

fn open(session: &mut SessionMachine, id: &str) -> CursorId {
    let node = session.nodes().node(id).unwrap();
    session.nodes().open(node, None)
}

fn at(session: &mut SessionMachine, cursor: CursorId) -> (u32, bool, String) {
    match session.nodes().read(cursor) {
        CursorRead::Reference(found) => (found.item, found.first, found.content.uri().to_owned()),
        other => panic!("{other:?}"),
    }
}

fn piece(session: &mut SessionMachine, cursor: CursorId) -> (u32, bool, String) {
    match session.nodes().read(cursor) {
        CursorRead::Piece(found) => {
            let text = String::from_utf8(found.data.to_vec()).unwrap();
            (found.item, found.first, text)
        }
        other => panic!("{other:?}"),
    }
}

/// EV-403
#[test]
fn ev_410_a_reader_stays_at_a_reference_until_its_content_was_read() {
    let mut session = following();
    let list = [
        refers("a", 0, "text/plain", "file:///1", false),
        more("a", 1, "two"),
        refers("a", 2, "", "https://h/3", true),
        tree("t", 0, &["a", "b"]),
        refers("b", 0, "image/png", "s3://b/4", true),
    ];
    feed(&mut session, list).unwrap();
    let cursor = open(&mut session, "t");
    for _ in 0..3 {
        assert_eq!(at(&mut session, cursor), (0, true, "file:///1".into()));
    }
    session.nodes().end_reference(cursor);
    assert_eq!(piece(&mut session, cursor), (0, false, "two".into()));
    // The second call has no effect: there is no reference at the reader's position.
    assert_eq!(at(&mut session, cursor), (0, false, "https://h/3".into()));
    session.nodes().end_reference(cursor);
    assert_eq!(at(&mut session, cursor), (1, true, "s3://b/4".into()));
    session.nodes().end_reference(cursor);
    assert!(matches!(session.nodes().read(cursor), CursorRead::End));
    session.nodes().end_reference(cursor);
    assert!(matches!(session.nodes().read(cursor), CursorRead::End));
}

#[test]
fn ev_410_a_failed_reference_fails_its_reader_with_its_position() {
    let mut session = following();
    feed(
        &mut session,
        [refers("a", 0, "text/plain", "file:///1", true)],
    )
    .unwrap();
    let (one, other) = (open(&mut session, "a"), open(&mut session, "a"));
    at(&mut session, one);
    let rejection = Status::new(Reason::RefNotFound, "there is no such file");
    let status = session.nodes().fail_reference(one, &rejection);
    assert_eq!(
        (status.detail("node"), status.detail("seq")),
        (Some("a"), Some("0"))
    );
    let read = session.nodes().read(one);
    assert!(matches!(read, CursorRead::Failed(again) if Arc::ptr_eq(&again, &status)));
    assert_eq!(at(&mut session, other).2, "file:///1");
    assert!(session.aborted().is_none());
}

#[test]
fn ev_410_fetched_content_is_shared_by_readers_and_freed_with_the_fragment() {
    for retain in [RetentionPolicy::Session, RetentionPolicy::Unread] {
        let mut session = server_with(|config, _| {
            config.references = true;
            config.retain = retain;
        });
        feed(
            &mut session,
            [refers("a", 0, "text/plain", "file:///1", true)],
        )
        .unwrap();
        let (one, other) = (open(&mut session, "a"), open(&mut session, "a"));
        let fetched = |session: &mut SessionMachine, cursor| match session.nodes().read(cursor) {
            CursorRead::Reference(found) => Arc::downgrade(&found.content.keep(|| 7_u8)),
            other => panic!("{other:?}"),
        };
        let retained = fetched(&mut session, one);
        assert!(retained.ptr_eq(&fetched(&mut session, other)));
        session.nodes().end_reference(one);
        assert!(retained.upgrade().is_some(), "the other reads it still");
        session.nodes().end_reference(other);
        let released = retain == RetentionPolicy::Unread;
        assert_eq!(retained.upgrade().is_none(), released);
        session.abort(Status::new(Reason::Cancelled, "over"));
        assert!(retained.upgrade().is_none());
    }
}

#[test]
fn ev_306_referenced_content_counts_as_read() {
    for (bytes, fails) in [(6, false), (7, true)] {
        let mut session = server_with(|config, limits| {
            config.references = true;
            limits.max_read_bytes = 10;
        });
        let list = [more("a", 0, "1234"), refers("a", 1, "", "file:///1", true)];
        feed(&mut session, list).unwrap();
        let cursor = open(&mut session, "a");
        piece(&mut session, cursor);
        at(&mut session, cursor);
        session.nodes().count_reference(cursor, 3).unwrap();
        let counted = session.nodes().count_reference(cursor, bytes - 3);
        assert_eq!(counted.is_err(), fails, "{bytes}");
        let failed = matches!(session.nodes().read(cursor),
            CursorRead::Failed(status) if reason(&status) == Reason::FlattenLimit);
        assert_eq!(failed, fails);
    }
}

#[test]
fn ev_801_a_uri_counts_against_the_quota() {
    let retained = |uri: &str| {
        let mut session = following();
        feed(&mut session, [refers("a", 0, "text/plain", uri, true)]).unwrap();
        session.retained_bytes()
    };
    assert_eq!(retained("file:///12345") - retained("file:///"), 5);
}

#[test]
fn ev_801_a_rejected_reference_counts_with_the_status_that_its_readers_get() {
    for (uri, expect) in [("file:///1", Reason::RefDenied), ("x:", Reason::RefScheme)] {
        let mut session = server();
        feed(&mut session, [more("a", 0, "")]).unwrap();
        let before = session.retained_bytes();
        feed(&mut session, [refers("a", 1, "", uri, true)]).unwrap();
        let charged = session.retained_bytes() - before;
        let cursor = open(&mut session, "a");
        piece(&mut session, cursor);
        let CursorRead::Failed(status) = session.nodes().read(cursor) else {
            panic!("{uri} is rejected");
        };
        assert_eq!(status.known(), Some(expect));
        let entry = size_of_val(&status.details[0]);
        let held = size_of::<Status>() + status.text_bytes() + status.details.len() * entry;
        assert!(charged >= held as u64, "{uri}: {charged} of {held} bytes");
    }
}

#[test]
fn ev_410_reserved_actions_follow_no_references() {
    let mut session = following();
    let ttl = refers("ttl", 0, "application/json", "file:///ttl", true);
    feed(&mut session, [leaf("n", 0, "x"), ttl]).unwrap();
    let refused = act(
        &mut session,
        action("SET_TTL", "node=n ttl=ttl", "result=r"),
    );
    assert_eq!(refused, Err(Reason::RefDenied));
}
