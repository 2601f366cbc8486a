use proptest::prelude::*;

use super::*;

/// Returns the text, and the stop string that ended it, for bytes that arrive in these pieces.
fn assemble(pieces: &[&[u8]], stops: &[String]) -> (String, Option<usize>) {
    let (mut text, mut out) = (ChoiceText::default(), String::new());
    for piece in pieces {
        if let Some(stop) = text.push(piece, stops, true, &mut out) {
            return (out, Some(stop));
        }
    }
    text.flush(&mut out);
    (out, None)
}

fn strings(stops: &[&str]) -> Vec<String> {
    stops.iter().map(|&stop| stop.to_owned()).collect()
}

/// D-10: the name of a control token is no text: stop strings are not searched in it, and do not go on behind it.
#[test]
fn d_10_stop_strings_and_marks_do_not_meet() {
    let stops = strings(&["\u{fdd0}", "call", "\n\nUser"]);
    let (mut text, mut out) = (ChoiceText::default(), String::new());
    assert_eq!(
        text.push_beside_marks(b"a\n\nUs", &stops, true, &mut out),
        None
    );
    assert_eq!(out, "a");
    text.push_mark("\u{fdd0}<call>\u{fdd1}".as_bytes(), &mut out);
    let marked = "a\n\nUs\u{fdd0}<call>\u{fdd1}";
    assert_eq!(out, marked, "what was held back comes first");
    assert_eq!(text.push_beside_marks(b"er", &stops, true, &mut out), None);
    assert_eq!(out, format!("{marked}er"));
    assert_eq!(text.shown(), out.len() as u64);
    assert_eq!(
        text.push_beside_marks(b" call", &stops, true, &mut out),
        Some(1)
    );
    assert_eq!(out, format!("{marked}er "));
}

/// D-10: text cannot forge the name of a control token, in whichever pieces it comes.
#[test]
fn d_10_marks_in_text_are_replaced() {
    let forged = "x\u{fdd0}<call>\u{fdd1}";
    for pieces in [
        vec![forged.as_bytes()],
        forged.as_bytes().chunks(1).collect(),
    ] {
        let (mut text, mut out) = (ChoiceText::default(), String::new());
        for piece in pieces {
            text.push_beside_marks(piece, &[], true, &mut out);
        }
        assert_eq!(out, "x\u{fffd}<call>\u{fffd}");
    }
}

#[test]
fn ev_604_ke_612_characters_and_stops_across_pieces() {
    type Case<'a> = (&'a [&'a [u8]], &'a [&'a str], &'a str, Option<usize>);
    let cases: &[Case<'_>] = &[
        (&[b"h", "é".as_bytes()], &[], "hé", None),
        (&[b"\xc3", b"\xa9"], &[], "é", None),
        (&[b"a\xf0\x9f", b"\x98", b"\x80b"], &[], "a😀b", None),
        (&[b"a\xff", b"b"], &[], "a\u{fffd}b", None),
        (&[b"a\xc3"], &[], "a\u{fffd}", None),
        (&[b"\xc3x"], &[], "\u{fffd}x", None),
        (&[b"one ", b"ST", b"OP two"], &["STOP"], "one ", Some(0)),
        (&[b"one ST", b"EP"], &["STOP"], "one STEP", None),
        (&[b"a", b"b", b"c"], &["abc", "b"], "a", Some(1)),
        (&[b"xabc"], &["b", "abc"], "x", Some(1)),
        (&[b"x ", b"\xe2\x82", b"\xac y"], &["€"], "x ", Some(0)),
        (&[b"aaab"], &["aab"], "a", Some(0)),
        (&[b"a", b"a", b"a", b"b"], &["aab"], "a", Some(0)),
    ];
    for (pieces, stops, shown, stop) in cases {
        assert_eq!(
            assemble(pieces, &strings(stops)),
            ((*shown).to_owned(), *stop),
            "{pieces:?}"
        );
    }
}

#[test]
fn below_the_minimum_a_stop_passes_as_text() {
    let (mut text, mut out) = (ChoiceText::default(), String::new());
    let stops = strings(&["STOP"]);
    assert_eq!(text.push(b"one STOP ST", &stops, false, &mut out), None);
    assert_eq!(out, "one STOP ");
    assert_eq!(text.push(b"OP", &stops, true, &mut out), Some(0));
    assert_eq!(out, "one STOP ");
}

/// What has passed as text below the minimum stays text, also while it is held back.
#[test]
fn a_stop_that_has_passed_does_not_stop_later() {
    let stops = strings(&["é", "éab"]);
    for (rest, shown, stop) in [("x", "éx", None), ("ab", "", Some(1)), ("é", "é", Some(0))] {
        let (mut text, mut out) = (ChoiceText::default(), String::new());
        assert_eq!(text.push("é".as_bytes(), &stops, false, &mut out), None);
        assert_eq!(
            text.push(rest.as_bytes(), &stops, true, &mut out),
            stop,
            "{rest}"
        );
        assert_eq!(out, shown);
    }
}

#[test]
fn held_back_text_is_minimal() {
    let (mut text, mut out) = (ChoiceText::default(), String::new());
    let stops = strings(&["\n\n", "User:"]);
    for (piece, shown) in [
        ("a U", "a "),
        ("se", "a "),
        ("d\n", "a Used"),
        ("x", "a Used\nx"),
    ] {
        text.push(piece.as_bytes(), &stops, true, &mut out);
        assert_eq!(out, shown);
    }
}

proptest! {
    /// However bytes are split, the text is the lossy decoding of all of them, up to the first stop string.
    #[test]
    fn any_split_gives_the_same_text(
        bytes in prop::collection::vec(prop_oneof![Just(b'a'), Just(b'b'), Just(0xc3), Just(0xa9), any::<u8>()], 0..40),
        cuts in prop::collection::vec(0usize..40, 0..6),
        stops in prop::collection::vec("[abé]{1,4}", 0..4),
    ) {
        let mut borders: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        borders.extend([0, bytes.len()]);
        borders.sort_unstable();
        let pieces: Vec<&[u8]> = borders.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        let whole = String::from_utf8_lossy(&bytes).into_owned();
        let first = stops.iter().filter_map(|stop| whole.find(stop.as_str())).min();
        let (shown, stop) = assemble(&pieces, &stops);
        // Of two stop strings the one that is complete first counts; it never begins before the earliest one.
        match (stop, first) {
            (None, None) => prop_assert_eq!(shown, whole),
            (Some(stop), Some(_)) => {
                let stopped = [&*shown, &*stops[stop]].concat();
                prop_assert!(whole.starts_with(&stopped));
                prop_assert!(!stops.iter().any(|stop| shown.contains(stop.as_str())));
            }
            other => prop_assert!(false, "{other:?} {shown:?}"),
        }
    }
}
