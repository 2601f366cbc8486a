//! Tests of nodes: replay, views, trees and channels.

use std::sync::Arc;
use std::task::{Poll, Waker};

use bytes::Bytes;
use futures::executor::block_on;
use futures::{Stream, StreamExt, stream};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::error::Error;
use crate::from_chunks::Json;
use crate::meta::Meta;
use crate::name::Mime;
use crate::probe::{Count, Woken, drain, endless, paused, played, poll_once, texts, whole};

const SMALL: usize = size_of::<Chunk>();

fn oks(chunks: Vec<Chunk>) -> impl Iterator<Item = Result<Chunk>> {
    chunks.into_iter().map(Ok)
}

fn pending<S: Stream + Unpin>(stream: &mut S, waker: &Waker) -> bool {
    poll_once(stream, waker).is_pending()
}

#[test]
fn ke_121_every_reader_sees_every_chunk_and_the_same_end() {
    let count = Count::new();
    let items = oks(texts(["a", "b"])).chain([
        Err(Error::Denied { why: "no".into() }),
        Ok(Chunk::text("never")),
    ]);
    let node = Node::new(played(&count, items));
    let early = node.read();
    let middle = node.read();
    assert_eq!(drain(early), ["a", "b", "!permission-denied"]);
    assert_eq!(drain(middle), ["a", "b", "!permission-denied"]);
    assert!(node.is_complete());
    assert_eq!(drain(node.read()), ["a", "b", "!permission-denied"]);
    assert_eq!(
        (count.given(), count.dropped()),
        (3, 1),
        "the source ran once and is gone"
    );
}

proptest! {
    /// Readers that start at random times and are polled in random order read equal logs.
    #[test]
    fn ke_121_readers_at_random_times_see_equal_logs(
        pauses in prop::collection::vec(any::<bool>(), 0..30),
        turns in prop::collection::vec(0_usize..6, 0..200),
    ) {
        let count = Count::new();
        let items = pauses.iter().enumerate().flat_map(|(index, pause)| {
            let chunk = Some(Chunk::text(index.to_string()));
            if *pause { vec![None, chunk] } else { vec![chunk] }
        });
        let node = Node::new(paused(&count, items));
        let expect: Vec<String> = (0..pauses.len()).map(|index| index.to_string()).collect();
        let mut readers: Vec<Option<(Chunks, Vec<String>)>> = (0..6).map(|_| None).collect();
        let (_, waker) = Woken::new();
        for turn in turns {
            let (chunks, seen) = readers[turn].get_or_insert_with(|| (node.read(), Vec::new()));
            if let Poll::Ready(Some(Ok(chunk))) = poll_once(chunks, &waker) {
                seen.push(chunk.to_string());
            }
        }
        for (chunks, mut seen) in readers.into_iter().flatten() {
            seen.extend(drain(chunks));
            prop_assert_eq!(&seen, &expect);
        }
        prop_assert_eq!(drain(node.read()), expect);
        prop_assert_eq!(count.given(), pauses.len());
    }
}

#[test]
fn ke_122_nothing_progresses_unless_a_reader_is_polled() {
    let count = Count::new();
    let node = Node::new(endless(&count, texts(["a", "b", "c"])));
    let (mut first, mut second) = (node.read(), node.read());
    assert_eq!(count.polls(), 0);
    let waker = Waker::noop();
    assert!(poll_once(&mut first, waker).is_ready());
    assert!(poll_once(&mut second, waker).is_ready());
    assert_eq!(count.polls(), 1, "the second read the log");
    drop((first, second));
    assert_eq!(count.dropped(), 0, "a handle is kept: paused");
    let mut late = node.read();
    drop(node);
    assert!(poll_once(&mut late, waker).is_ready());
    assert_eq!((count.polls(), count.dropped()), (1, 0));
    drop(late);
    assert_eq!(count.dropped(), 1, "nobody is left");
}

#[test]
fn ke_123_a_waiting_reader_takes_over_when_the_polling_one_is_dropped() {
    let (mut writer, node) = Node::channel(1 << 20);
    let (mut first, mut second, mut third) = (node.read(), node.read(), node.read());
    let (woken_first, waker_first) = Woken::new();
    let (woken_second, waker_second) = Woken::new();
    assert!(pending(&mut first, &waker_first));
    assert!(pending(&mut second, &waker_second));
    assert!(pending(&mut third, Waker::noop()));
    drop(first);
    assert_eq!(woken_second.count(), 1, "a waiting reader takes over");
    assert!(pending(&mut second, &waker_second));
    block_on(writer.send(Chunk::text("x"))).unwrap();
    assert_eq!((woken_second.count(), woken_first.count()), (2, 0));
    assert_eq!(drain_ready(&mut second), ["x"]);
    assert_eq!(drain_ready(&mut third), ["x"]);
}

fn drain_ready(chunks: &mut Chunks) -> Vec<String> {
    let mut out = Vec::new();
    while let Poll::Ready(Some(Ok(chunk))) = poll_once(chunks, Waker::noop()) {
        out.push(chunk.to_string());
    }
    out
}

/// A source that wakes inside its own poll must not lose the readers that registered meanwhile.
#[test]
fn ke_123_a_wake_inside_the_poll_reaches_every_waiting_reader() {
    let count = Count::new();
    let node = Node::new(paused(&count, [None, Some(Chunk::text("x"))]));
    let (mut first, mut second) = (node.read(), node.read());
    let (woken, waker) = Woken::new();
    assert!(pending(&mut first, &waker));
    assert_eq!(woken.count(), 1);
    assert_eq!(
        drain_ready(&mut second),
        ["x"],
        "the first is never polled again"
    );
}

#[test]
fn ke_124_a_node_keeps_its_limit_and_one_chunk_more_fails() {
    let chunk = || Chunk::bytes(vec![0_u8; 1000]);
    for (chunks, expect_error) in [(3, false), (4, true)] {
        let count = Count::new();
        let keep = Retention::All { bytes: 3000 };
        let node = Node::with(played(&count, (0..chunks).map(|_| Ok(chunk()))), keep);
        let items: Vec<_> = block_on(node.read().collect());
        assert_eq!(items.iter().filter(|item| item.is_ok()).count(), 3);
        let limited = matches!(
            items.last(),
            Some(Err(Error::Limit {
                name: "node_bytes_max",
                max: 3000
            }))
        );
        assert_eq!(limited, expect_error);
        assert_eq!(count.dropped(), 1);
        assert_eq!(block_on(node.read().count()), items.len(), "replayed alike");
    }
    assert_eq!(Retention::default(), Retention::All { bytes: 64 << 20 });
}

/// Reading one view to its end before the other is a diamond; neither reader waits for the other.
#[test]
fn ke_124_a_diamond_does_not_deadlock() {
    let count = Count::new();
    let items =
        (0..100).map(|index| Ok(Chunk::text("x").on(if index % 2 == 0 { "" } else { "b" })));
    let node = Node::new(played(&count, items));
    assert_eq!(block_on(node.port("").whole()).unwrap().len(), 50);
    assert_eq!(block_on(node.port("b").whole()).unwrap().len(), 50);
}

#[test]
fn ke_125_the_slowest_reader_of_a_window_sets_the_pace() {
    let count = Count::new();
    let keep = Retention::Window { bytes: 2 * SMALL };
    let node = Node::with(
        played(&count, oks(texts(["0", "1", "2", "3", "4", "5"]))),
        keep,
    );
    let (mut fast, mut slow) = (node.read(), node.read());
    let (woken, waker) = Woken::new();
    for _ in 0..3 {
        assert!(poll_once(&mut fast, &waker).is_ready());
    }
    assert!(pending(&mut fast, &waker), "three are more than two");
    assert_eq!((count.given(), woken.count()), (3, 0));
    assert!(poll_once(&mut slow, Waker::noop()).is_ready());
    assert_eq!(woken.count(), 1, "there is room");
    assert!(poll_once(&mut fast, &waker).is_ready());
    assert!(matches!(
        poll_once(&mut node.read(), &waker),
        Poll::Ready(Some(Err(Error::Released)))
    ));
    drop(slow);
    assert_eq!(
        drain(fast),
        ["4", "5"],
        "dropping the slowest frees the window"
    );
}

#[test]
fn ke_125_a_reader_that_is_never_polled_holds_the_window() {
    let count = Count::new();
    let keep = Retention::Window { bytes: SMALL };
    let node = Node::with(played(&count, oks(texts(["0", "1", "2"]))), keep);
    let (mut fast, idle) = (node.read(), node.read());
    let (woken, waker) = Woken::new();
    assert!(poll_once(&mut fast, &waker).is_ready());
    assert!(poll_once(&mut fast, &waker).is_ready());
    assert!(pending(&mut fast, &waker));
    drop(idle);
    assert_eq!(woken.count(), 1);
    assert_eq!(drain(fast), ["2"]);
}

#[test]
fn ke_125_a_window_releases_chunks_that_every_reader_has_passed() {
    let data = Bytes::from(vec![7_u8; 4096]);
    let copies = data.clone();
    let keep = Retention::Window { bytes: 1 << 20 };
    let node = Node::with(
        stream::iter((0..64).map(move |_| Ok(Chunk::bytes(copies.clone()))))
            .chain(stream::pending()),
        keep,
    );
    let mut reader = node.read();
    for _ in 0..64 {
        let _chunk = poll_once(&mut reader, Waker::noop());
    }
    drop(data);
    // The source still has its copy; the log has none.
    let mut removed = node.read();
    assert!(matches!(
        poll_once(&mut removed, Waker::noop()),
        Poll::Ready(Some(Err(Error::Released)))
    ));
    assert!(
        pending(&mut reader, Waker::noop()),
        "a reader that came too late holds nothing back"
    );
}

#[test]
fn ke_126_a_node_inside_its_own_source_is_a_cycle() {
    let slot: Arc<Mutex<Option<Node>>> = Arc::default();
    let inside = slot.clone();
    let node = Node::new(stream::once(async move {
        let own = inside.lock().unwrap().clone().unwrap();
        own.read().next().await.unwrap()
    }));
    *slot.lock().unwrap() = Some(node.clone());
    assert_eq!(drain(node.read()), ["!invalid-request"]);
    let error = block_on(node.read().next()).unwrap().unwrap_err();
    assert!(matches!(error, Error::Cycle { .. }), "{error:?}");
    slot.lock().unwrap().take();
}

#[test]
fn ke_126_a_panicking_source_ends_the_node_and_poisons_nothing() {
    let node = Node::new(stream::iter(0..2).map(|index| match index {
        0 => Ok(Chunk::text("a")),
        _ => panic!("secret"),
    }));
    let before = source_panics();
    for _ in 0..2 {
        let items: Vec<_> = block_on(node.read().collect());
        assert!(
            matches!(&items[..], [Ok(_), Err(Error::Panicked { .. })]),
            "{items:?}"
        );
        assert!(!format!("{items:?}").contains("secret"));
    }
    // The panic is counted once, whatever the number of readers. Sources of other tests may panic concurrently.
    assert!(source_panics() > before);
}

#[test]
fn ke_127_a_writer_waits_while_enough_is_unread() {
    let (mut writer, node) = Node::channel(2 * SMALL);
    let mut reader = node.read();
    let (woken, waker) = Woken::new();
    block_on(writer.send(Chunk::text("a"))).unwrap();
    block_on(writer.send(Chunk::text("b"))).unwrap();
    {
        let mut third = std::pin::pin!(writer.send(Chunk::text("c")));
        let mut cx = Context::from_waker(&waker);
        assert!(third.as_mut().poll(&mut cx).is_pending());
        assert!(poll_once(&mut reader, Waker::noop()).is_ready());
        assert_eq!(woken.count(), 1);
        assert!(third.as_mut().poll(&mut cx).is_ready());
    }
    writer.finish();
    assert_eq!(drain(reader), ["b", "c"]);
    assert_eq!(drain(node.read()), ["a", "b", "c"]);
}

#[test]
fn ke_127_a_node_ends_as_its_writer_ended() {
    type Case = (fn(NodeWriter), &'static [&'static str]);
    let ends: [Case; 3] = [
        (NodeWriter::finish, &["a"]),
        (
            |writer| writer.fail(Error::Deadline),
            &["a", "!deadline-exceeded"],
        ),
        (drop, &["a", "!truncated"]),
    ];
    for (end, expect) in ends {
        let (mut writer, node) = Node::channel(1 << 10);
        block_on(writer.send(Chunk::text("a"))).unwrap();
        end(writer);
        assert_eq!(drain(node.read()), expect);
    }
    let (mut writer, node) = Node::channel(1);
    let reader = node.read();
    drop(node);
    block_on(writer.send(Chunk::text("a"))).unwrap();
    drop(reader);
    assert!(matches!(
        block_on(writer.send(Chunk::text("b"))),
        Err(Error::Cancelled)
    ));
}

#[test]
fn ke_128_a_tree_is_its_leaves_in_order() {
    let count = Count::new();
    let image = Chunk::bytes(&b"png"[..]).with_mime("image/png");
    let dialect = Chunk::text("b").with_meta(Meta::default().with_role("ASSISTANT"));
    let lazy = Node::new(played(&count, oks(vec![dialect, Chunk::text("c")])));
    let inner = Node::tree([Node::from(image), Node::tree([])]);
    let tree = Node::tree([Node::from("a"), inner, lazy]);
    let mut chunks = tree.read();
    assert!(poll_once(&mut chunks, Waker::noop()).is_ready());
    assert_eq!(count.polls(), 0, "a leaf is opened when it is reached");
    let all: Vec<Chunk> = block_on(tree.read().map(Result::unwrap).collect());
    let seen: Vec<_> = all
        .iter()
        .map(|chunk| (chunk.part, chunk.mime.as_str(), chunk.to_string()))
        .collect();
    let expect = [
        (0, "text/plain", "a"),
        (1, "image/png", "png"),
        (2, "text/plain", "b"),
        (2, "text/plain", "c"),
    ];
    assert_eq!(
        seen,
        expect.map(|(part, mime, text)| (part, mime, text.to_owned()))
    );
    assert_eq!(
        all[2].meta.as_ref().unwrap().role.as_deref(),
        Some("ASSISTANT")
    );
    assert!(tree.is_complete());
}

#[test]
fn ke_128_views_share_the_log() {
    let count = Count::new();
    let items = vec![
        Chunk::text("m"),
        Chunk::text("r").on(Port::REASONING),
        Chunk::text("2").with_choice(2),
    ];
    let node = Node::new(played(&count, oks(items)));
    let view: Vec<_> = block_on(
        node.port(Port::REASONING)
            .read()
            .map(Result::unwrap)
            .collect(),
    );
    assert_eq!(
        (
            view.len(),
            view[0].port.as_str(),
            view[0].to_string().as_str()
        ),
        (1, "", "r")
    );
    assert_eq!(whole(node.choice(2).run::<String>()).unwrap(), "2");
    assert_eq!(whole(node.run::<String>()).unwrap(), "m");
    assert_eq!(count.given(), 3, "one log");
    let error = Node::tree([
        Node::new(stream::iter([Err(Error::Released)])),
        Node::from("x"),
    ]);
    assert_eq!(drain(error.read()), ["!failed-precondition"]);
}

#[test]
fn ke_129_values_become_nodes_of_text_bytes_or_json() {
    let text = |node: Node| {
        let chunk = block_on(node.read().next()).unwrap().unwrap();
        (chunk.mime.to_string(), chunk.to_string())
    };
    for (node, mime, expect) in [
        (Node::from("a"), "text/plain", "a"),
        (Node::from(String::from("b")), "text/plain", "b"),
        (Node::from(crate::chunk::Text::from("c")), "text/plain", "c"),
        (
            Node::from(Bytes::from("d")),
            "application/octet-stream",
            "d",
        ),
        (Node::from(7_i64), "application/json", "7"),
        (Node::from(u8::MAX), "application/json", "255"),
        (Node::from(true), "application/json", "true"),
        (Node::from(1.5), "application/json", "1.5"),
        (Node::from(json!(null)), "application/json", "null"),
        (Node::from(json!("text")), "text/plain", "text"),
        (
            Node::from(json!({"a": [1]})),
            "application/json",
            "{\"a\":[1]}",
        ),
        (Node::from(Json(vec![1, 2])), "application/json", "[1,2]"),
        (
            Node::from(Chunk::text("e").with_mime(Mime::NDJSON)),
            "application/x-ndjson",
            "e",
        ),
    ] {
        assert_eq!(text(node), (mime.to_owned(), expect.to_owned()));
    }
    assert_eq!(drain(Node::from(f64::NAN).read()), ["!internal"]);
}

#[test]
fn ke_p4_eight_readers_hold_one_copy() {
    let data = Bytes::from(vec![1_u8; 1 << 16]);
    let chunk = Chunk::bytes(data.clone());
    let node = Node::new(stream::iter([Ok(chunk)]));
    let mut readers: Vec<Chunks> = (0..8).map(|_| node.read()).collect();
    for reader in &mut readers {
        let Poll::Ready(Some(Ok(read))) = poll_once(reader, Waker::noop()) else {
            panic!("one chunk for every reader");
        };
        assert_eq!(read.data.as_ptr(), data.as_ptr());
    }
}
