//! Section 3 of the Evergreen page: nodes and fragments.

use super::harness::*;
use crate::evergreen::{Fragment, Reason};

/// Feeds `list` in every order and expects the same outcome in each.
fn in_every_order(list: &[Fragment], expect: Result<(), Reason>) {
    for order in orders(list) {
        assert_eq!(feed(&mut server(), order.clone()), expect, "{order:?}");
    }
}

#[test]
fn ev_201_ids_are_1_to_256_bytes_of_utf_8() {
    let most = "é".repeat(128);
    for (id, expect) in [
        ("", Err(Reason::BadId)),
        ("a", Ok(())),
        (most.as_str(), Ok(())),
        (&format!("{most}a"), Err(Reason::BadId)),
    ] {
        assert_eq!(
            feed(&mut server(), [leaf(id, 0, "x")]),
            expect,
            "{} bytes",
            id.len()
        );
        assert_eq!(
            feed(&mut server(), [tree("t", 0, &[id])]),
            expect,
            "as a child"
        );
        let bound = crate::evergreen::Param::new("in", id);
        let mut call = action("f", "", "out=o");
        call.inputs.push(bound);
        assert_eq!(act(&mut server(), call), expect, "as an input");
    }
}

#[test]
fn ev_204_the_second_fragment_of_a_seq_is_ignored_before_anything_else_is_checked() {
    let first = [more("p", 0, "a"), leaf("p", 1, "b")];
    let seconds = [
        leaf("p", 0, "other"),
        tree("p", 0, &["q"]),
        chunk("p", 0, None, Some("no metadata")),
        Fragment {
            last: false,
            ..leaf("p", 1, "b")
        },
        leaf("p", 1, "b"),
        chunk("p", 1, of("image/png", "USER"), Some("c")),
    ];
    for second in seconds {
        let mut session = server();
        feed(&mut session, first.clone()).unwrap();
        assert_eq!(feed(&mut session, [second.clone()]), Ok(()), "{second:?}");
        assert_eq!(texts(&mut session, "p"), ["ab"], "the first wins");
        assert_eq!(session.stats().duplicates, 1);
    }
}

#[test]
fn ev_206_a_fragment_past_the_final_aborts_in_any_order() {
    let past = Err(Reason::SeqPastFinal);
    in_every_order(&[leaf("p", 0, "a"), leaf("p", 1, "b")], past);
    in_every_order(
        &[more("p", 0, "a"), leaf("p", 1, "b"), more("p", 2, "c")],
        past,
    );
    in_every_order(&[empty("p", 3, true), empty("p", 9, false)], past);
    in_every_order(
        &[more("p", 0, "a"), more("p", 1, "b"), leaf("p", 2, "c")],
        Ok(()),
    );
}
