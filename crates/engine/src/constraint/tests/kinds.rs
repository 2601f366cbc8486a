//! Each kind of constraint: what comes out fits it, whatever the sampler.

use regex::Regex;
use serde_json::Value;
use serde_json::value::RawValue;

use super::driver::{Random, Sequence, Step, config, open, output, refusal, source, source_of};
use super::vocabulary::{Beginning, CONTROL, END, END_OF_TURN, vocabulary};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

/// AI-842
#[test]
fn ai_840_a_regex_matches_the_whole_output() {
    let source = source();
    for pattern in [
        "[0-9]{3}-(ab|abc)c?",
        "é+x|日本",
        "(?s:.){0,5}",
        "a/b\\d\\.",
        "",
    ] {
        let checker = Regex::new(&format!("^(?:{pattern})$")).unwrap();
        for seed in 0..20 {
            let text = output(&source, "sapwood:regex", pattern, seed);
            assert!(checker.is_match(&text), "{pattern}: {text:?}");
        }
    }
}

#[test]
fn ai_840_a_json_schema_gives_json_that_fits_it() {
    let source = source();
    let schema = r#"{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"},
        "tags":{"type":"array","items":{"enum":["a","b"]}}},"required":["name","age"],
        "additionalProperties":false}"#;
    for seed in 0..20 {
        let text = output(&source, "sapwood:json-schema", schema, seed);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!(
            value["name"].is_string() && value["age"].as_f64().is_some(),
            "{text}"
        );
        let tags = value
            .get("tags")
            .map_or(&[][..], |tags| tags.as_array().unwrap());
        assert!(tags.iter().all(|tag| tag == "a" || tag == "b"), "{text}");
    }
}

/// A JSON object is the schema `{"type":"object"}`; whitespace is bounded.
#[test]
fn ai_840_any_object_is_json() {
    let source = source();
    for (schema, begins) in [
        (r#"{"type":"object"}"#, "{"),
        (r#"{"type":"array","items":{"type":"boolean"}}"#, "["),
        ("true", ""),
    ] {
        for seed in 0..10 {
            let text = output(&source, "sapwood:json-schema", schema, seed);
            // The syntax alone: a number may be larger than any that can be read.
            let json: &RawValue = serde_json::from_str(&text).unwrap();
            assert!(json.get().starts_with(begins), "{schema}: {text}");
        }
    }
}

#[test]
fn ai_840_a_lark_grammar_is_followed() {
    let source = source();
    let grammar = "start: greeting \" \" NAME\ngreeting: \"hello\" | \"hi\"\nNAME: /[a-c]{1,4}/\n";
    let checker = Regex::new("^(hello|hi) [a-c]{1,4}$").unwrap();
    for seed in 0..20 {
        let text = output(&source, "sapwood:lark", grammar, seed);
        assert!(checker.is_match(&text), "{text:?}");
    }
}

/// Recursive: each opening parenthesis has its closing one, also where a lexer would take the longest match.
#[test]
fn ai_840_a_gbnf_grammar_is_followed() {
    let source = source();
    let recursive = "root ::= \"(\" inner \")\"\ninner ::= root | [a-z]{0,3} \"z\" # comment\n";
    let checker = Regex::new(r"^(\(+)[a-z]{0,3}z(\)+)$").unwrap();
    for seed in 0..20 {
        let text = output(&source, "sapwood:gbnf", recursive, seed);
        let parts = checker.captures(&text).unwrap();
        assert_eq!(parts[1].len(), parts[2].len(), "{text}");
    }
    let regular =
        "root ::= word (\", \" word)* \".\"?\nword ::= [a-c]+ \"c\" | \"é\" [^\\x00-\\x7f]\n";
    let checker =
        Regex::new(r"^(?:[a-c]+c|é[^\x00-\x7f])(?:, (?:[a-c]+c|é[^\x00-\x7f]))*\.?$").unwrap();
    for seed in 0..20 {
        let text = output(&source, "sapwood:gbnf", regular, seed);
        assert!(checker.is_match(&text), "{text:?}");
    }
}

#[test]
fn ai_840_a_substring_is_a_piece_of_the_text() {
    let source = source();
    let text = "bananas \"and\" 日本\n";
    for seed in 0..30 {
        let piece = output(&source, "sapwood:substring", text, seed);
        assert!(!piece.is_empty() && text.contains(&piece), "{piece:?}");
    }
    let empty = refusal(&source, "sapwood:substring", "");
    assert_eq!(empty.message, "invalid grammar: the text is empty");
}

#[test]
fn ai_840_options_give_one_of_a_list() {
    let source = source();
    let options = ["yes", "no", "not \"now\"", "né\n", "ab", "abc"];
    let list = serde_json::to_string(&options).unwrap();
    let mut seen = std::collections::HashSet::new();
    for seed in 0..200 {
        let text = output(&source, "sapwood:options", &list, seed);
        assert!(options.contains(&text.as_str()), "{text:?}");
        seen.insert(text);
    }
    assert_eq!(
        seen.len(),
        options.len(),
        "every option can be chosen: {seen:?}"
    );
}

#[test]
fn ai_840_an_unknown_name_is_refused() {
    for name in [
        "sapwood:xml",
        "sapwood:",
        "regex",
        "upper-latest",
        "sapwood:Regex",
    ] {
        let refusal = refusal(&source(), name, "a");
        assert_eq!(refusal.code, Code::NotFound, "{name}");
        assert_eq!(refusal.reason, ErrorReason::UNKNOWN_CONTROLLER);
    }
}

/// All EOG tokens are allowed where the constraint is complete, alone if nothing else is, and nowhere else.
#[test]
fn ai_842_eog_tokens_are_allowed_when_the_constraint_is_complete() {
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", "(xy)?x").unwrap());
    let mut allowed = Vec::new();
    while !sequence.ended {
        // Prefers the longer way.
        let mask = sequence.step(|tokens| {
            allowed.push(tokens.to_vec());
            tokens[0]
        });
        assert!(mask.is_some_and(|mask| !mask.allows(CONTROL)));
    }
    let x = u32::from(b'x');
    let y = u32::from(b'y');
    assert_eq!(allowed.first(), Some(&vec![y, END, END_OF_TURN]));
    assert_eq!(allowed.last(), Some(&vec![END, END_OF_TURN]));
    assert_eq!(sequence.tokens, [x, y, x, END]);
    assert!(sequence.steer.ends_at_eos() && !sequence.steer.may_backtrack());
}

/// Without an EOG token the constraint ends the sequence itself.
#[test]
fn ai_842_a_complete_constraint_stops_without_eog_tokens() {
    let vocabulary = vocabulary(Beginning::Plain, false);
    let source = source_of(vocabulary.clone(), config());
    for (pattern, whole) in [("hello", "hello"), ("(a|b)c", "ac")] {
        let steer = open(&source, "sapwood:regex", pattern).unwrap();
        let mut sequence = Sequence::with_vocabulary(steer, vocabulary.clone());
        while sequence.step(|allowed| allowed[0]).is_some() {}
        assert_eq!(sequence.text(), whole);
    }
}

#[test]
fn ai_842_a_constraint_that_leaves_nothing_fails() {
    let mut sequence = Sequence::new(
        open(&source(), "sapwood:lark", "start: /a/ & /b/").map_or_else(
            // The compiler may find out first.
            |refusal| {
                assert_eq!(refusal.reason, ErrorReason::INVALID_GRAMMAR);
                open(&source(), "sapwood:lark", "start: A\nA: \"a\" & \"ab\"").unwrap()
            },
            |steer| steer,
        ),
    );
    sequence.pre();
    let failure = sequence.mid().unwrap_err();
    assert_eq!(failure.reason, ErrorReason::CONSTRAINT_FAILED);
}

/// A token that the constraint does not allow, forced by another steerer, fails the sequence.
#[test]
fn ai_842_a_token_that_is_not_allowed_fails() {
    for wrong in [u32::from(b'z'), END, CONTROL, 100_000] {
        let mut sequence = Sequence::new(open(&source(), "sapwood:regex", "[ab]{2}").unwrap());
        let failure = sequence.append(0, &[wrong], None).unwrap_err();
        assert_eq!(
            failure.reason,
            ErrorReason::CONSTRAINT_FAILED,
            "{wrong}: {}",
            failure.message
        );
    }
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", "a+").unwrap());
    let a = u32::from(b'a');
    sequence.append(0, &[a, END], None).unwrap();
    assert_eq!(sequence.mid(), Ok(Step::Stop));
    assert!(
        sequence.append(0, &[a], None).is_err(),
        "nothing follows an EOG token"
    );
}

/// A tokenizer that puts a space before a text forces the tokens of the text alone.
#[test]
fn ai_841_forced_text_is_spelled_exactly() {
    let vocabulary = vocabulary(Beginning::Spaced, true);
    let source = source_of(vocabulary.clone(), config());
    let steer = open(&source, "sapwood:regex", "hello world(né|日本)!").unwrap();
    let mut sequence = Sequence::with_vocabulary(steer, vocabulary);
    sequence.run(&mut Random::new(5));
    let text = sequence.text();
    assert!(
        text == "hello worldné!" || text == "hello world日本!",
        "{text:?}"
    );
}
