use super::*;

/// Whether a constraint allows each byte of a text, and whether the text may end there.
fn check<C: Constraint>(constraint: &C, text: &str) -> Option<bool> {
    let end = text.bytes().try_fold(constraint.start(), |state, byte| {
        constraint.next(&state, byte)
    });
    end.map(|state| constraint.is_complete(&state))
}

#[test]
fn patterns_allow_their_texts() {
    let age = Pattern::new()
        .text("Age: ")
        .some_of(ByteClass::DIGIT, 1..=3)
        .text(".");
    for (text, expected) in [
        ("", Some(false)),
        ("Age: ", Some(false)),
        ("Age: 1", Some(false)),
        ("Age: 123", Some(false)),
        ("Age: 123.", Some(true)),
        ("Age: 7.", Some(true)),
        ("Age: .", None),
        ("Age: 1234", None),
        ("Age: 7..", None),
        ("age", None),
    ] {
        assert_eq!(check(&age, text), expected, "{text}");
    }
}

#[test]
fn choices_take_the_longest_text() {
    let choice = Pattern::new()
        .one_of(["no", "none", "yes"])
        .some_of(ByteClass::of(b"!"), ..);
    for (text, expected) in [
        ("n", Some(false)),
        ("no", Some(true)),
        ("non", Some(false)),
        ("none", Some(true)),
        ("no!", Some(true)),
        ("yes!!!", Some(true)),
        ("non!", None),
        ("yesn", None),
    ] {
        assert_eq!(check(&choice, text), expected, "{text}");
    }
}

#[test]
fn empty_parts_take_nothing() {
    assert_eq!(check(&Pattern::new(), ""), Some(true));
    assert_eq!(check(&Pattern::new(), "a"), None);
    let empty = Pattern::new()
        .text("")
        .some_of(ByteClass::UPPER, 0..=0)
        .some_of(ByteClass::UPPER, 0..1);
    assert_eq!(check(&empty, ""), Some(true));
    assert_eq!(check(&empty, "A"), None);
}

#[test]
#[should_panic = "a choice has 1 to 64 texts"]
fn choices_have_a_limit() {
    let texts = |count: u32| (0..count).map(|index| index.to_string());
    assert_eq!(check(&Pattern::new().one_of(texts(64)), "63"), Some(true));
    let _ = Pattern::new().one_of(texts(65));
}

#[test]
fn substrings_are_the_pieces_of_the_text() {
    let text = "a banana and a bandana";
    let quote = Substring::new(text, 2);
    for start in 0..text.len() {
        for end in start..=text.len() {
            assert_eq!(check(&quote, &text[start..end]), Some(end - start >= 2));
        }
    }
    for other in ["bananas", "A", "dana ", "aa"] {
        assert_eq!(check(&quote, other), None, "{other}");
    }
    assert_eq!(check(&Substring::new("", 1), ""), Some(false));
}

#[test]
fn byte_classes_are_sets() {
    let class = ByteClass::UPPER
        .with(ByteClass::of(b" -"))
        .without(ByteClass::of(b"Q"));
    let members: Vec<u8> = (0..=255).filter(|&byte| class.contains(byte)).collect();
    assert_eq!(members, b" -ABCDEFGHIJKLMNOPRSTUVWXYZ");
    assert!(ByteClass::range(0..=255).contains(255));
    assert!(!ByteClass::JSON_TEXT.contains(b'"') && ByteClass::JSON_TEXT.contains(b'~'));
}
