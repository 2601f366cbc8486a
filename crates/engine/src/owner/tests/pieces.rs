//! Models that simulate servers with larger fragments: which tokens are reported together, and that none waits too
//! long.

use super::harness::{Bench, request_for};
use crate::api::{EventKind, GenerationRequest};
use crate::scripted::{
    Config as Script, Script as Kind2, ScriptStep, ScriptedFailure, ScriptedTokenizer,
};

/// Returns the texts of a request's token events, and how it ends.
fn pieces(script: Script, request: GenerationRequest) -> (Vec<String>, &'static str) {
    let mut bench = Bench::new(script);
    let mut handle = bench.submit(request);
    bench.settle();
    let (mut received, mut end) = (Vec::new(), "nothing");
    while let Some(event) = handle.try_next() {
        match event.kind {
            EventKind::Tokens(tokens) if tokens.text.is_empty() => {}
            EventKind::Tokens(tokens) => received.push(tokens.text.to_string()),
            EventKind::Finish(_) | EventKind::Report(_) => {}
            EventKind::Usage(_) => end = "usage",
            EventKind::Failed(_) | EventKind::Error(_) => end = "fault",
        }
    }
    (received, end)
}

fn text(text: &str, tokens_per_chunk: u32) -> Script {
    Script {
        script: Kind2::Text,
        text: text.into(),
        tokenizer: Some(ScriptedTokenizer::Bytes),
        tokens_per_chunk,
        ..Script::default()
    }
}

fn steps(steps: Vec<ScriptStep>, tokens_per_chunk: u32) -> Script {
    Script {
        script: Kind2::Steps,
        rules: vec![crate::scripted::ScriptRule {
            pattern: None,
            steps,
        }],
        ..text("", tokens_per_chunk)
    }
}

#[test]
fn tr_1104_tokens_per_chunk_are_reported_in_one_event() {
    let short = |max_tokens| {
        let mut request = request_for("x");
        request.params.max_tokens = Some(max_tokens);
        request
    };
    for (script, request, expect) in [
        (
            text("abcdefg", 1),
            request_for("x"),
            &["a", "b", "c", "d", "e", "f", "g"][..],
        ),
        (text("abcdefg", 3), request_for("x"), &["abc", "def", "g"]),
        (text("abcdefg", 100), request_for("x"), &["abcdefg"]),
        // Tokens of an output that ends early are reported.
        (text("abcdefg", 3), short(5), &["abc", "de"]),
        (text("abcdefg", 100), short(5), &["abcde"]),
    ] {
        assert_eq!(
            pieces(script, request),
            (expect.iter().map(ToString::to_string).collect(), "usage")
        );
    }
}

/// A chunk is one event, and so are the tokens before a pause or an error.
#[test]
fn tr_1105_a_chunk_is_one_event() {
    let text_part = |text: &str| ScriptStep::Text(text.into());
    let chunk = |text: &str| ScriptStep::Chunk(text.into());
    let error = ScriptStep::Error(ScriptedFailure {
        code: "internal".into(),
        message: String::new(),
    });
    for (script, expect, end) in [
        (
            steps(
                vec![chunk("one two"), text_part("ab"), chunk("\u{fc}\u{1f375}")],
                1,
            ),
            &["one two", "a", "b", "\u{fc}\u{1f375}"][..],
            "usage",
        ),
        (
            steps(
                vec![text_part("abc"), ScriptStep::SleepMs(20), text_part("de")],
                2,
            ),
            &["ab", "c", "de"],
            "usage",
        ),
        (
            steps(vec![text_part("abc"), error.clone()], 2),
            &["ab", "c"],
            "fault",
        ),
        (steps(vec![chunk("abc"), error], 1), &["abc"], "fault"),
    ] {
        assert_eq!(
            pieces(script, request_for("x")),
            (expect.iter().map(ToString::to_string).collect(), end)
        );
    }
}

/// A request that fails while it has unreported tokens: they are reported first.
#[test]
fn unreported_tokens_are_sent_before_an_error() {
    let mut bench = Bench::new(text("abcdefg", 100));
    let request = GenerationRequest {
        timeout: Some(std::time::Duration::from_millis(4)),
        ..request_for("x")
    };
    let mut handle = bench.submit(request);
    bench.settle();
    let mut received = String::new();
    let mut faults = 0;
    while let Some(event) = handle.try_next() {
        match event.kind {
            EventKind::Tokens(tokens) => received.push_str(&tokens.text),
            EventKind::Error(_) => faults += 1,
            _ => {}
        }
    }
    assert_eq!(faults, 1);
    assert!(
        "abcdefg".starts_with(&received) && !received.is_empty(),
        "{received}"
    );
}
