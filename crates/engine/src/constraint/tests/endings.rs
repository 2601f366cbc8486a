//! `prefix`, `max_tokens`, `stop` and `store_var`.

use sapwood_proto::steer::VariableWrite;

use super::super::ConstraintConfig;
use super::driver::{Random, Sequence, config, open, source, source_of};
use super::vocabulary::{END, small};

fn stored(sequence: &mut Sequence) -> Option<String> {
    let report = sequence.steer.take_report()?;
    let [write] = <[VariableWrite; 1]>::try_from(report.storage).unwrap();
    assert_eq!(
        (write.name.as_str(), write.append, write.when_version_is),
        ("v", false, None)
    );
    assert!(
        sequence.steer.take_report().is_none(),
        "it is reported once"
    );
    Some(String::from_utf8(write.value).unwrap())
}

fn both() -> [super::super::ConstraintSource; 2] {
    let slow = ConstraintConfig {
        fast_forward: false,
        ..config()
    };
    [source(), source_of(small(), slow)]
}

#[test]
fn ai_840_a_prefix_comes_first_and_is_not_stored() {
    for source in both() {
        for (controller, value) in [
            ("sapwood:regex", "\"[ab]{4}\""),
            ("sapwood:options", "[\"abab\",\"bbbb\"]"),
            ("sapwood:substring", "\"abab\""),
            ("sapwood:gbnf", "\"root ::= [ab] root | [ab]\""),
            ("sapwood:lark", "\"start: /[ab]{4}/\""),
            ("sapwood:json-schema", "{\"enum\":[\"ab\",1]}"),
        ] {
            let arg = format!(r#"{{"value":{value},"prefix":"né \"ab","store_var":"v"}}"#);
            let mut sequence = Sequence::new(open(&source, controller, &arg).unwrap());
            sequence.run(&mut Random::new(2));
            let text = sequence.text();
            let matched = text.strip_prefix("né \"ab").unwrap();
            assert!(!matched.is_empty(), "{controller}");
            assert_eq!(
                stored(&mut sequence).as_deref(),
                Some(matched),
                "{controller}"
            );
        }
    }
}

/// The tokens are those of the joined text: `ab` before `c` is the token `abc`.
#[test]
fn ai_841_a_prefix_is_tokenised_with_what_follows() {
    let arg = r#"{"value":"c(x|y)","prefix":"ab"}"#;
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", arg).unwrap());
    let forced = sequence.pre();
    assert_eq!(
        forced,
        crate::api::Vocabulary::tokenize(&*small(), "abc", false)
    );
    assert_eq!(forced.len(), 1);
}

#[test]
fn ai_840_max_tokens_ends_the_sequence() {
    for source in both() {
        for max in [1, 2, 7] {
            let arg = format!(
                r#"{{"value":"hello(x| world)*","prefix":"name","max_tokens":{max},"store_var":"v"}}"#
            );
            let mut sequence = Sequence::new(open(&source, "sapwood:regex", &arg).unwrap());
            while !sequence.ended {
                sequence.step(|allowed| *allowed.iter().find(|&&token| token != END).unwrap());
            }
            assert_eq!(sequence.tokens.len(), 1 + max, "the prefix is one token");
            let matched = sequence.text().strip_prefix("name").unwrap().to_owned();
            assert_eq!(stored(&mut sequence), Some(matched));
        }
    }
}

#[test]
fn ai_840_a_stop_string_ends_the_sequence() {
    for source in both() {
        // Also across tokens, and within forced text; the one in the prefix does not count.
        let arg = r#"{"value":"(x|y)hello world!","prefix":"o w","stop":"o w","store_var":"v"}"#;
        let mut sequence = Sequence::new(open(&source, "sapwood:regex", arg).unwrap());
        sequence.run(&mut Random::new(1));
        let text = sequence.text();
        assert!(
            text == "o wxhello world" || text == "o wyhello world",
            "{text}"
        );
        assert_eq!(stored(&mut sequence).unwrap()[1..], *"hell");
    }
}

/// A rollback takes back the end too.
#[test]
fn ai_843_an_end_can_be_taken_back() {
    let arg = r#"{"value":"[abc]+","stop":"c","store_var":"v"}"#;
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", arg).unwrap());
    let [a, c] = [b'a', b'c'].map(u32::from);
    sequence.append(0, &[a, c], None).unwrap();
    assert!(sequence.ended);
    sequence.append(1, &[a], None).unwrap();
    assert!(!sequence.ended);
    assert_eq!(stored(&mut sequence), None);
    sequence.append(0, &[END], Some(END)).unwrap();
    assert_eq!(stored(&mut sequence).as_deref(), Some("aa"));
}

#[test]
fn ai_840_nothing_is_stored_without_a_name() {
    let mut sequence = Sequence::new(open(&source(), "sapwood:regex", "a").unwrap());
    sequence.run(&mut Random::new(1));
    assert!(sequence.steer.take_report().is_none());
}
