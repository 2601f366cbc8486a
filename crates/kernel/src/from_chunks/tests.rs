//! Tests of decoding chunks.

use bytes::Bytes;
use futures::StreamExt;
use futures::executor::block_on;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::chunk::Text;
use crate::error::Error;
use crate::limits;
use crate::name::Mime;
use crate::node::Node;
use crate::probe::{Count, played, whole};

/// `data` split at these positions, as chunks.
fn cut(data: &[u8], cuts: &[usize], mime: &'static str) -> Vec<Chunk> {
    let mut positions: Vec<usize> = cuts.iter().map(|at| at % (data.len() + 1)).collect();
    positions.extend([0, data.len()]);
    positions.sort_unstable();
    positions
        .windows(2)
        .map(|pair| Chunk::bytes(Bytes::copy_from_slice(&data[pair[0]..pair[1]])).with_mime(mime))
        .collect()
}

fn node(chunks: Vec<Chunk>) -> Node {
    Node::new(futures::stream::iter(chunks.into_iter().map(Ok)))
}

fn items<T: FromChunks>(chunks: Vec<Chunk>) -> (Vec<T>, Option<Error>) {
    let mut run = node(chunks).run::<T>();
    let mut out = Vec::new();
    while let Some(item) = block_on(run.next()) {
        match item {
            Ok(item) => out.push(item),
            Err(error) => return (out, Some(error)),
        }
    }
    (out, None)
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(any::<usize>(), 0..12)
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((".{0,3}", inner), 0..4)
                .prop_map(|pairs| pairs.into_iter().collect()),
        ]
    })
}

proptest! {
    /// KE-R3, KE-R4: the concatenation is the whole output, no item splits a character.
    #[test]
    fn ke_111_recut_text_is_the_same_text(text in "\\PC{0,40}", cuts in cuts()) {
        let chunks = || cut(text.as_bytes(), &cuts, "text/plain");
        let (strings, error) = items::<String>(chunks());
        prop_assert!(error.is_none() && strings.iter().all(|item| !item.is_empty()));
        prop_assert_eq!(strings.concat(), text.clone());
        let (texts, _) = items::<Text>(chunks());
        prop_assert_eq!(texts.iter().map(|text| &**text).collect::<String>(), text.clone());
        prop_assert_eq!(whole(node(chunks()).run::<String>()).unwrap(), text.clone());
        prop_assert_eq!(&*whole(node(chunks()).run::<Text>()).unwrap(), text.as_str());
        prop_assert_eq!(&whole(node(chunks()).run::<Bytes>()).unwrap()[..], text.as_bytes());
    }

    /// KE-203
    #[test]
    fn ke_111_recut_json_gives_the_same_values(values in prop::collection::vec(json_value(), 0..5), cuts in cuts()) {
        let data: String = values.iter().map(|value| format!("{value}\n")).collect();
        let chunks = || cut(data.as_bytes(), &cuts, "application/x-ndjson");
        let (seen, error) = items::<Json<Value>>(chunks());
        prop_assert!(error.is_none(), "{:?}", error);
        prop_assert_eq!(seen.into_iter().map(|json| json.0).collect::<Vec<_>>(), &values[..]);
        prop_assert_eq!(whole(node(chunks()).run::<Json<Value>>()).unwrap(), values);
    }

    #[test]
    fn ke_111_decoders_never_panic_and_err_once(data in prop::collection::vec(any::<u8>(), 0..64), cuts in cuts()) {
        let chunks = || cut(&data, &cuts, "application/json");
        let (_, error) = items::<String>(chunks());
        prop_assert_eq!(error.is_none(), std::str::from_utf8(&data).is_ok());
        let _any = items::<Text>(chunks());
        let _any = items::<Json<Value>>(chunks());
        let _any = items::<Json<Vec<u8>>>(chunks());
        let (bytes, error) = items::<Bytes>(chunks());
        prop_assert!(error.is_none());
        prop_assert_eq!(bytes.concat(), data);
    }

    /// Chunks of other ports and choices in between change nothing.
    #[test]
    fn ke_201_interleaving_changes_nothing(text in "\\PC{0,20}", cuts in cuts(), between in prop::collection::vec(0_u8..4, 0..24)) {
        let plain = cut(text.as_bytes(), &cuts, "text/plain");
        let mut mixed = Vec::new();
        let mut others = between.iter();
        for chunk in &plain {
            for kind in others.by_ref().take(2) {
                let other = Chunk::bytes(&b"\xff{"[..]).with_mime("text/plain");
                mixed.push(match kind {
                    0 => other.on("reasoning"),
                    1 => other.with_choice(1),
                    2 => other.on("tokens").with_choice(2),
                    _ => Chunk::text("").with_choice(3),
                });
            }
            mixed.push(chunk.clone());
        }
        prop_assert_eq!(items::<String>(mixed.clone()).0, items::<String>(plain).0);
        prop_assert_eq!(whole(node(mixed).run::<String>()).unwrap(), text);
    }
}

#[test]
fn ke_112_framed_values_survive_any_cut() {
    let (seen, error) = items::<Json<u32>>(cut(b"1\n2\n", &[1, 2, 3], "application/x-ndjson"));
    assert!(error.is_none());
    assert_eq!(seen, [Json(1), Json(2)]);
}

#[test]
fn ke_114_empty_data_is_an_item_for_chunks_only() {
    let chunks = || vec![Chunk::text(""), Chunk::text("a"), Chunk::text("")];
    assert_eq!(items::<Chunk>(chunks()).0.len(), 3);
    assert_eq!(items::<Bytes>(chunks()).0, ["a"]);
    assert_eq!(items::<String>(chunks()).0, ["a"]);
}

#[test]
fn ke_202_text_is_exact_or_an_error() {
    type Case<'a> = (&'a [&'a [u8]], &'a [&'a str], Option<&'a str>);
    let cases: [Case<'_>; 6] = [
        (&[b"\xf0\x9f", b"\x98", b"\x80!"], &["\u{1f600}!"], None),
        (&[b"a\xc3", b"\xa9b"], &["a", "\u{e9}b"], None),
        (&[b"ab\xff"], &[], Some("byte 2 is not UTF-8")),
        (&[b"ab", b"c\xc3("], &["ab"], Some("byte 3 is not UTF-8")),
        (
            &[b"a", b"\xe2\x82"],
            &["a"],
            Some("byte 1 is the beginning of a character"),
        ),
        (&[b"\xc3", b"", b"\xa9"], &["\u{e9}"], None),
    ];
    for (pieces, expect, wrong) in cases {
        let chunks = || {
            pieces
                .iter()
                .map(|piece| Chunk::bytes(piece.to_vec()).with_mime("text/plain"))
                .collect::<Vec<_>>()
        };
        let (strings, error) = items::<String>(chunks());
        assert_eq!(strings, expect);
        let reply = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(
            wrong.map_or(reply.is_empty(), |wrong| reply.contains(wrong)),
            "{reply}"
        );
        let folded = whole(node(chunks()).run::<String>());
        assert_eq!(folded.is_ok(), wrong.is_none());
    }
}

/// A character whose first bytes are held continues in the next part, whatever its type.
#[test]
fn ke_202_a_character_may_span_parts() {
    let chunks = vec![
        Chunk::bytes(&b"\xc3"[..]).with_mime("text/plain"),
        Chunk::bytes(&b"\xa9"[..])
            .with_mime("text/markdown")
            .with_part(1),
    ];
    assert_eq!(items::<String>(chunks).0, ["\u{e9}"]);
}

#[test]
fn ke_202_text_is_a_view_where_nothing_was_held_back() {
    let data = Bytes::from_static(b"shared text");
    let (texts, _) = items::<Text>(vec![Chunk::bytes(data.clone()).with_mime("text/plain")]);
    assert_eq!(texts[0].as_bytes().as_ptr(), data.as_ptr());
}

#[test]
fn ke_203_values_are_split_where_they_end() {
    type Case<'a> = (&'a str, &'a [Value], bool);
    let cases: [Case<'_>; 9] = [
        ("1 2", &[json!(1), json!(2)], true),
        (
            "{\"a\":\"}\\\"\"}[1]\"x\"",
            &[json!({"a": "}\""}), json!([1]), json!("x")],
            true,
        ),
        ("true", &[json!(true)], true),
        (" \n\t", &[], true),
        ("[1", &[], false),
        ("\"abc", &[], false),
        ("1\n{]", &[json!(1)], false),
        ("nul ", &[], false),
        ("]", &[], false),
    ];
    for (text, expect, ok) in cases {
        let (seen, error) = items::<Json<Value>>(vec![Chunk::text(text).with_mime(Mime::JSON)]);
        assert_eq!(
            seen.into_iter().map(|json| json.0).collect::<Vec<_>>(),
            expect,
            "{text}"
        );
        assert_eq!(error.is_none(), ok, "{text} {error:?}");
    }
    let (seen, error) = items::<Json<u8>>(vec![Chunk::text("1 \"x\" 2").with_mime(Mime::JSON)]);
    assert_eq!(seen, [Json(1)]);
    assert!(
        error.unwrap().to_string().contains("value 1"),
        "the second does not match"
    );
}

/// Limits: `json_value_bytes` and `json_depth`, at the limit and one past it.
#[test]
fn ke_203_a_value_has_limits() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let text = |text: String| vec![Chunk::text(text).with_mime(Mime::JSON)];
    assert_eq!(
        items::<Json<Value>>(text(nested(limits::JSON_DEPTH)))
            .0
            .len(),
        1
    );
    let (_, error) = items::<Json<Value>>(text(nested(limits::JSON_DEPTH + 1)));
    assert!(error.unwrap().to_string().contains("json_depth"));
    let long = |bytes: usize| {
        let data = format!("\"{}\"", "x".repeat(bytes - 2));
        data.as_bytes()
            .chunks(1 << 20)
            .map(|piece| Chunk::bytes(piece.to_vec()).with_mime(Mime::JSON))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        items::<Json<String>>(long(limits::JSON_VALUE_BYTES))
            .0
            .len(),
        1
    );
    let (_, error) = items::<Json<String>>(long(limits::JSON_VALUE_BYTES + 1));
    assert!(error.unwrap().to_string().contains("json_value_bytes"));
}

#[test]
fn ke_206_folding_appends_and_makes_no_items() {
    let mut state = PartialChar::default();
    let mut acc = String::with_capacity(64);
    let position = acc.as_ptr();
    for _ in 0..8 {
        String::push_fold(&mut state, &mut acc, Chunk::text("12345678")).unwrap();
    }
    assert_eq!(
        (acc.len(), acc.as_ptr()),
        (64, position),
        "appended in place"
    );
    let one = Bytes::from_static(b"one piece is not copied");
    let mut joined = Joined::default();
    Bytes::push_fold(&mut (), &mut joined, Chunk::bytes(one.clone())).unwrap();
    assert_eq!(Bytes::whole(joined).unwrap().as_ptr(), one.as_ptr());
}

/// One chunk with a valid and an invalid value: the valid one first, then the error, and the source is dropped.
#[test]
fn ke_209_a_decoding_error_is_last_and_stops_the_source() {
    let count = Count::new();
    let chunk = || Ok(Chunk::text("1 x ").with_mime(Mime::JSON));
    let node = Node::new(played(&count, [chunk(), chunk()]));
    let mut run = node.run::<Json<u8>>();
    drop(node);
    assert_eq!(block_on(run.next()).unwrap().unwrap(), Json(1));
    assert_eq!(count.dropped(), 1, "dropped when the error was found");
    assert!(matches!(
        block_on(run.next()),
        Some(Err(Error::Decode { .. }))
    ));
    assert!(block_on(run.next()).is_none() && block_on(run.next()).is_none());
    assert_eq!(count.given(), 1);
}
