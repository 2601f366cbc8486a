//! Tests of the markup parser.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// All events, with adjacent ones of one kind joined: where text is split carries no meaning.
fn parse(pieces: &[&str], reasoning: bool, tools: bool) -> Vec<String> {
    let mut markup = Markup::new(reasoning, tools);
    let mut found: Vec<(char, String)> = Vec::new();
    let mut out = |piece: MarkupPiece| {
        let (kind, text) = match piece {
            MarkupPiece::Text(text) => ('t', text.to_string()),
            MarkupPiece::Reasoning(text) => ('r', text.to_string()),
            MarkupPiece::Call { name, arguments } => ('c', format!("{name}{arguments}")),
        };
        match found.last_mut() {
            Some((last, joined)) if *last == kind && kind != 'c' => joined.push_str(&text),
            _ => found.push((kind, text)),
        }
    };
    for piece in pieces {
        markup.push(Text::from(*piece), &mut out);
    }
    markup.end(&mut out);
    found
        .into_iter()
        .map(|(kind, text)| format!("{kind}:{text}"))
        .collect()
}

#[test]
fn reasoning_and_calls_are_found_and_the_rest_is_text() {
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let twice = format!("{call}\n{call}done");
    let cases: [(&str, &[&str]); 9] = [
        ("plain", &["t:plain"]),
        ("<think>\nhm\n</think>\n\nyes", &["r:hm", "t:yes"]),
        (&twice, &["c:add{\"a\":1}", "c:add{\"a\":1}", "t:done"]),
        ("1 < 2 <th <", &["t:1 < 2 <th <"]),
        ("<think>never ends", &["r:never ends"]),
        (
            "<tool_call>{\"name\": 1}</tool_call>x",
            &["t:<tool_call>{\"name\": 1}</tool_call>x"],
        ),
        ("<tool_call>{\"name\"", &["t:<tool_call>{\"name\""]),
        ("<tool_call>{\"name\": \"f\"}</tool_call>", &["c:f{}"]),
        ("a</think>b", &["t:a</think>b"]),
    ];
    for (text, expect) in cases {
        assert_eq!(parse(&[text], true, true), expect, "{text}");
    }
    assert_eq!(
        parse(&["<think>x</think>"], false, true),
        ["t:<think>x</think>"]
    );
    assert_eq!(parse(&[call], true, false), [format!("t:{call}")]);
}

#[test]
fn text_without_a_marker_is_passed_on_uncopied_and_at_once() {
    let mut markup = Markup::new(true, true);
    let text = Text::from_static("as it is");
    let mut seen = Vec::new();
    markup.push(text.clone(), &mut |piece| seen.push(piece));
    let [MarkupPiece::Text(same)] = &seen[..] else {
        panic!("{seen:?}");
    };
    assert_eq!(same.as_bytes().as_ptr(), text.as_bytes().as_ptr());
    let mut seen = Vec::new();
    markup.push(Text::from("a <thin"), &mut |piece| seen.push(piece));
    assert_eq!(
        seen,
        [MarkupPiece::Text("a ".into())],
        "only what may begin a marker is held back"
    );
}

proptest! {
    #[test]
    fn ke_111_cuts_change_nothing(cuts in prop::collection::vec(any::<usize>(), 0..10), choose in 0_usize..4) {
        let text = [
            "a<think>\nb\n\nc\n</think>\n\nd<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":\"</think>\"}}</tool_call>\ne",
            "<<<think>x</think></think>\u{e9}<tool_call>\u{1f600}</tool_call>",
            "<tool_call><tool_call>{}</tool_call>",
            "\n<think>\n\n</think>\n",
        ][choose];
        let mut positions: Vec<usize> = cuts.iter().map(|at| text.floor_char_boundary(at % (text.len() + 1))).collect();
        positions.extend([0, text.len()]);
        positions.sort_unstable();
        let pieces: Vec<&str> = positions.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(parse(&pieces, true, true), parse(&[text], true, true));
    }
}

#[test]
fn arguments_may_be_called_parameters() {
    let call = parse_call("{\"name\": \"f\", \"parameters\": {\"a\": 1}}");
    assert_eq!(
        call,
        Some(MarkupPiece::Call {
            name: "f".into(),
            arguments: json!({"a": 1})
        })
    );
}
