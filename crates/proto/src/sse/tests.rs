//! Tests.

use proptest::prelude::*;

use super::*;

/// The data of all events, and how the stream ended.
fn read(pieces: &[&[u8]], limits: SseLimits) -> (Vec<String>, Result<(), Violation>) {
    let mut events = SseReader::new(limits);
    let mut all = Vec::new();
    for piece in pieces {
        events.push(piece);
        loop {
            match events.next() {
                Ok(Some(event)) => all.push(String::from_utf8_lossy(&event.data).into_owned()),
                Ok(None) => break,
                Err(violation) => return (all, Err(violation)),
            }
        }
    }
    (all, events.finish())
}

fn whole(text: &str) -> (Vec<String>, Result<(), Violation>) {
    read(&[text.as_bytes()], SseLimits::default())
}

/// Forms that real servers send, beside those of TR-601.
#[test]
fn tr_601_events_are_read_as_servers_write_them() {
    for (text, expect) in [
        ("", &[][..]),
        ("data: a\n\n", &["a"]),
        ("data:a\n\n", &["a"]),
        ("data:  a \n\n", &[" a "]),
        ("data: a\r\n\r\n", &["a"]),
        ("data: a\r\rdata: b\r\r", &["a", "b"]),
        ("data: a\n\r\n", &["a"]),
        (": ping\n\ndata: a\n\n:\n\n", &["a"]),
        ("data: a\ndata: b\n\n", &["a\nb"]),
        ("data: a\ndata: b\ndata:\n\n", &["a\nb\n"]),
        ("data\n\n", &[""]),
        ("data: \n\n", &[""]),
        ("event: x\nid: 3\nretry: 10\ndata: a\nother: b\n\n", &["a"]),
        ("event: x\n\ndata: a\n\n", &["a"]),
        ("\u{feff}data: a\n\n", &["a"]),
        ("data: a\n\n\u{feff}data: b\n\n", &["a"]),
        (
            "\n\n\ndata: {\"a\":\"caf\u{e9}: x\"}\n\n\n",
            &["{\"a\":\"caf\u{e9}: x\"}"],
        ),
        ("datum: a\n\ndata: b\n\n", &["b"]),
    ] {
        let (events, end) = whole(text);
        assert_eq!(events, expect, "{text:?}");
        assert_eq!(end, Ok(()), "{text:?}");
    }
    let mut events = SseReader::default();
    events.push(b"event: done\ndata: x\n\ndata: y\n\n");
    assert_eq!(events.next().unwrap().unwrap().name, "done");
    assert_eq!(
        events.next().unwrap().unwrap().name,
        "",
        "the name is of one event"
    );
    events.push(b"id: 7\ndata: a\n\nid: a\0b\ndata: b\n\nid\ndata: c\n\n");
    let id = || Some(events.next().ok()??.id);
    let ids: Vec<_> = std::iter::from_fn(id).collect();
    assert_eq!(ids, ["7", "7", ""]);
}

/// A stream that ends within its last event was cut off.
#[test]
fn tr_602_an_event_counts_with_its_blank_line_only() {
    for text in [
        "data: a",
        "data: a\n",
        "data: a\n\ndata: b\n",
        "data: a\n\n:",
    ] {
        let (events, end) = whole(text);
        assert_eq!(events.len(), usize::from(text.contains("\n\n")), "{text:?}");
        assert_eq!(end, Err(Violation::Cut), "{text:?}");
    }
}

#[test]
fn tr_606_lines_and_events_are_bounded() {
    let limits = SseLimits {
        line_bytes: 10,
        event_bytes: 9,
    };
    for (text, expect) in [
        ("data: 1234\n\n", Ok(())),
        ("data: 12345\n\n", Err(Violation::LineTooLong(10))),
        (":234567890", Err(Violation::Cut)),
        (":2345678901", Err(Violation::LineTooLong(10))),
        ("data:1234\ndata:1234\n\n", Ok(())),
        (
            "data:1234\ndata:12345\n\n",
            Err(Violation::EventTooLarge(9)),
        ),
        (
            "data:\ndata:\ndata:1234567",
            Err(Violation::LineTooLong(10)),
        ),
    ] {
        assert_eq!(read(&[text.as_bytes()], limits).1, expect, "{text:?}");
        let bytes: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        assert_eq!(read(&bytes, limits).1, expect, "{text:?}, byte by byte");
    }
}

proptest! {
    /// Characters of several bytes and CRLFs included.
    #[test]
    fn tr_606_any_split_of_the_bytes_gives_the_same_events(
        text in "(data|:|event: x|data: caf\u{e9}|\u{feff}|\r\n|\n|\r|[a: \u{1f600}]){0,24}",
        cuts in proptest::collection::vec(0_usize..120, 0..6),
    ) {
        let bytes = text.as_bytes();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
        let (events, end) = whole(&text);
        let split = read(&pieces, SseLimits::default());
        prop_assert_eq!(&split.0, &events);
        // A CR at the very end may or may not be followed by an LF: both are ends.
        prop_assert_eq!(split.1, end);
    }
}
