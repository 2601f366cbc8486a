//! The forms of an argument, and the errors of wrong ones.

use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use super::super::ConstraintConfig;
use super::driver::{config, open, output, refusal, source, source_of};
use super::vocabulary::small;

#[track_caller]
fn check(controller: &str, arg: &str, message: &str) {
    let refusal = refusal(&source(), controller, arg);
    assert_eq!(refusal.code, Code::InvalidRequest);
    assert_eq!(refusal.reason, ErrorReason::INVALID_GRAMMAR);
    assert!(
        refusal.message.starts_with("invalid grammar: ") && refusal.message.contains(message),
        "{arg}: {}",
        refusal.message
    );
}

#[test]
fn ai_840_both_forms_mean_the_same_and_compile_once() {
    let source = source();
    for (controller, plain, object) in [
        ("sapwood:regex", "ab", r#"{"value":"ab"}"#),
        ("sapwood:options", r#"["ab"]"#, r#"{"value":["ab"]}"#),
        ("sapwood:options", r#"["ab"]"#, r#"{"value":"[\"ab\"]"}"#),
        (
            "sapwood:json-schema",
            r#"{"const":"ab"}"#,
            r#"{"value":{"const":"ab"}}"#,
        ),
        (
            "sapwood:json-schema",
            r#" {"const":"ab"} "#,
            r#"{"value":"{\"const\":\"ab\"}"}"#,
        ),
        (
            "sapwood:substring",
            "a",
            r#"{"value":"a","max_tokens":null,"prefix":null}"#,
        ),
    ] {
        assert_eq!(
            output(&source, controller, plain, 1),
            output(&source, controller, object, 1)
        );
    }
    assert_eq!(source.cache.len(), 4);
}

/// What is not an object with `value` is the pattern itself.
#[test]
fn ai_840_a_pattern_is_taken_as_it_is() {
    let source = source();
    assert_eq!(output(&source, "sapwood:regex", "\"a\"", 1), "\"a\"");
    let text = r#"{"value":1,"other":2}"#;
    let piece = output(&source, "sapwood:substring", text, 1);
    assert!(text.contains(&piece));
    let schema = r#"{"value":"x","type":"null"}"#;
    assert_eq!(output(&source, "sapwood:json-schema", schema, 1), "null");
}

#[test]
fn ai_841_errors_have_a_position() {
    check("sapwood:regex", "ab(c", "at character 3: unclosed group");
    check(
        "sapwood:regex",
        "[b-a]",
        "at character 2: invalid character class range",
    );
    check("sapwood:regex", "a\\", "incomplete escape sequence");
    check("sapwood:json-schema", "{\"type\":\n 7,}", "line 2 column 4");
    check("sapwood:json-schema", r#"{"type":"strin"}"#, "strin");
    check(
        "sapwood:lark",
        "start: \"a\"\nb: (\"c\"\n",
        "at line 2, column 8: ",
    );
    check("sapwood:lark", "start: missing", "at line 1, column");
    check("sapwood:lark", "start: \"a\" %%", "at line 1, column 13: ");
    check(
        "sapwood:gbnf",
        "root ::= \"a\n",
        "at line 1, column 12: the closing",
    );
    check(
        "sapwood:gbnf",
        "root ::= a\nb ::= \"c\"",
        "at line 1, column 10: the rule `a` is not defined",
    );
    check("sapwood:gbnf", "a ::= \"b\"", "there is no rule `root`");
    check("sapwood:options", "[\"a\",1]", "at option 1: ");
    check("sapwood:options", "[]", "at option 0: there are no options");
    check("sapwood:options", "yes", "line 1 column 1");
}

#[test]
fn ai_840_members_are_checked() {
    check(
        "sapwood:regex",
        r#"{"value":"a","stpo":"b"}"#,
        "unknown member `stpo`",
    );
    check(
        "sapwood:regex",
        r#"{"value":["a"]}"#,
        "`value` must be a string",
    );
    check(
        "sapwood:regex",
        r#"{"value":"a","max_tokens":0}"#,
        "`max_tokens` must be",
    );
    check(
        "sapwood:regex",
        r#"{"value":"a","max_tokens":1.5}"#,
        "`max_tokens` must be",
    );
    check(
        "sapwood:regex",
        r#"{"value":"a","stop":""}"#,
        "`stop` is empty",
    );
    check(
        "sapwood:regex",
        r#"{"value":"a","prefix":1}"#,
        "`prefix` must be a string",
    );
    check(
        "sapwood:regex",
        r#"{"value":"a","store_var":""}"#,
        "`store_var` must have 1 to 256",
    );
    let long = format!(r#"{{"value":"a","store_var":"{}"}}"#, "v".repeat(257));
    check("sapwood:regex", &long, "`store_var` must have 1 to 256");
    let fits = format!(r#"{{"value":"a","store_var":"{}"}}"#, "v".repeat(256));
    assert!(open(&source(), "sapwood:regex", &fits).is_ok());
    check("sapwood:json-schema", "[1]", "a schema is a JSON object");
}

/// Nothing of the library's own diagnostics reaches a client.
#[test]
fn ai_841_errors_are_short_and_show_no_internals() {
    let long = format!("start: /{}(/", "x".repeat(5000));
    let refusal = refusal(&source(), "sapwood:lark", &long);
    assert!(refusal.message.len() < 600, "{}", refusal.message);
    for internal in ["backtrace", "non-verbose", "panicked", "src/"] {
        assert!(!refusal.message.contains(internal), "{}", refusal.message);
    }
}

/// Checking a long text takes milliseconds. That is part of what a caller has a share of, and no work of the thread that asks.
#[test]
fn ai_841_a_text_is_checked_when_it_may_be_compiled() {
    let config = ConstraintConfig {
        compile_threads: 1,
        compile_time: Duration::from_millis(50),
        ..config()
    };
    let source = source_of(small(), config);
    let patterns: serde_json::Map<String, serde_json::Value> = (0..65)
        .map(|name| (format!("^a{name}$"), true.into()))
        .collect();
    let schema = serde_json::json!({ "patternProperties": patterns }).to_string();
    for (controller, arg) in [
        ("sapwood:lark", "start: a::b"),
        ("sapwood:gbnf", "root ::= ("),
        ("sapwood:json-schema", &*schema),
        ("sapwood:regex", "("),
    ] {
        let permit = source.compiler.permit(None, Duration::MAX).unwrap();
        let code = || refusal(&source, controller, arg).code;
        assert_eq!(code(), Code::Overloaded, "{controller}");
        drop(permit);
        assert_eq!(code(), Code::InvalidRequest, "{controller}");
    }
}
