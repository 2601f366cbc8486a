use super::*;
use crate::api::{ChatMessage, ChatRequest, Vocabulary};

fn model(toml_like: &str) -> Scripted {
    Scripted::new(serde_json::from_str(toml_like).unwrap()).unwrap()
}

/// Decodes a prompt greedily; returns the text of the tokens, and how it ends.
fn run(model: &mut Scripted, prompt: &str, seed: u64) -> (String, String) {
    let vocabulary = model.vocabulary();
    let mut prompt = vocabulary.tokenize(prompt, false);
    prompt.insert(0, vocabulary::BEGIN);
    let opening = SlotPurpose {
        prompt: &prompt,
        seed,
        choice: 0,
        max_tokens: None,
    };
    model.open(0, &opening);
    let (mut now, mut reply) = (Time::ZERO, Vec::new());
    let mut tokens = prompt.clone();
    let mut computed = 0;
    let end = loop {
        let batch: Vec<BatchEntry> = (computed..tokens.len())
            .map(|at| BatchEntry {
                slot: 0,
                position: at as u32,
                token: tokens[at],
                row: at + 1 == tokens.len(),
            })
            .collect();
        model.decode(&batch, now).unwrap();
        computed = tokens.len();
        match model.row(batch.len() - 1, now) {
            OutputRow::Ranked(ranking) if ranking.first() == vocabulary::END => {
                break "end".to_owned();
            }
            OutputRow::Ranked(ranking) => {
                tokens.push(ranking.first());
                reply.extend_from_slice(vocabulary.bytes(ranking.first()));
            }
            OutputRow::NotBefore(Time::MAX) => break "hang".to_owned(),
            OutputRow::NotBefore(at) => {
                now = at;
                computed -= 1;
                model.truncate(0, computed as u32);
            }
            OutputRow::End(reason) => break format!("{reason:?}"),
            OutputRow::Failed(error) => {
                break format!("{} {} {}", error.code, error.reason, error.message);
            }
            OutputRow::Logits(_) => unreachable!("scripted rows are ranked"),
        }
    };
    model.release(0);
    let ms = now.since_origin().as_millis();
    (
        String::from_utf8(reply).unwrap(),
        if ms > 0 {
            format!("{end} after {ms} ms")
        } else {
            end
        },
    )
}

/// TR-1104, TR-1105.
#[test]
fn tr_1102_each_script_gives_its_output() {
    let steps =
        |steps: &str| format!(r#"{{"script": "steps", "rules": [{{"steps": [{steps}]}}]}}"#);
    let cases = [
        (
            r#"{"script": "echo"}"#.to_owned(),
            "two  words",
            "two  words",
            "end",
        ),
        (
            r#"{"script": "words"}"#.to_owned(),
            "the word xyzzy!",
            "the word xyzzy!",
            "end",
        ),
        (
            r#"{"script": "text", "text": "Grüß"}"#.to_owned(),
            "x",
            "Grüß",
            "end",
        ),
        (
            r#"{"script": "text", "text": "ab", "ttft_ms": 10, "tokens_per_s": 100}"#.to_owned(),
            "x",
            "ab",
            "end after 30 ms",
        ),
        (
            steps(r#"{"text": "one "}, {"sleep_ms": 20}, {"text": "two"}"#),
            "x",
            "one two",
            "end after 20 ms",
        ),
        (
            steps(r#"{"text": "a"}, {"finish": "stop"}, {"text": "b"}"#),
            "x",
            "a",
            "end",
        ),
        (
            steps(r#"{"text": "a"}, {"finish": "length"}"#),
            "x",
            "a",
            "Length",
        ),
        (steps(r#"{"hang": true}"#), "x", "", "hang"),
        (
            steps(r#"{"text": "a"}, {"cut": "close"}"#),
            "x",
            "a",
            "truncated cut_close the script cuts the stream here",
        ),
        (
            steps(r#"{"error": {"code": "overloaded", "message": "tired"}}"#),
            "x",
            "",
            "overloaded scripted tired",
        ),
    ];
    for (config, prompt, reply, end) in cases {
        assert_eq!(
            run(&mut model(&config), prompt, 1),
            (reply.to_owned(), end.to_owned()),
            "{config}"
        );
    }
}

#[test]
fn tr_1105_tool_calls_and_reasoning_are_markup() {
    let config = r#"{"script": "steps", "rules": [{"steps": [
        {"reasoning": "hm"}, {"tool_call": {"name": "f", "arguments": {"x": 1}}}]}]}"#;
    let call = "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>";
    let reply = format!("<think>\nhm\n</think>\n\n{call}");
    assert_eq!(run(&mut model(config), "x", 1), (reply, "end".to_owned()));
}

#[test]
fn the_first_rule_that_matches_wins_and_none_is_an_error() {
    let config = r#"{"script": "steps", "rules": [
        {"match": "tr.ncate", "steps": [{"text": "A"}]}, {"match": "e", "steps": [{"text": "B"}]}]}"#;
    let cases = [("please truncate", "A"), ("hello", "B")];
    for (prompt, reply) in cases {
        assert_eq!(run(&mut model(config), prompt, 1).0, reply);
    }
    assert_eq!(
        run(&mut model(config), "x", 1).1,
        "invalid-request NO_RULE no rule matches"
    );
}

#[test]
fn tr_1107_random_words_follow_from_configuration_request_and_seed() {
    let config = r#"{"script": "tokens", "count": 20, "vocab": 5000}"#;
    let reply = |prompt: &str, seed| run(&mut model(config), prompt, seed).0;
    assert_eq!(reply("a", 1), reply("a", 1));
    assert_eq!(
        reply("a", 1).split_whitespace().count(),
        20,
        "a word per token"
    );
    assert_ne!(reply("a", 1), reply("a", 2));
    assert_ne!(reply("a", 1), reply("b", 1));
}

#[test]
fn tr_1106_tokens_join_to_the_text_whatever_the_vocabulary() {
    for config in [r#"{"tokenizer": "bytes"}"#, r#"{"tokenizer": "words"}"#] {
        let vocabulary = model(config).vocabulary();
        for text in [
            "",
            "Hello there, the word!",
            "  two  spaces ",
            "Grüße\n\tan alle",
            " ",
        ] {
            let tokens = vocabulary.tokenize(text, true);
            let joined: Vec<u8> = tokens
                .iter()
                .flat_map(|&token| vocabulary.bytes(token))
                .copied()
                .collect();
            assert_eq!(String::from_utf8(joined).unwrap(), text);
        }
    }
    let words = model(r#"{"tokenizer": "words"}"#).vocabulary();
    assert_eq!(words.tokenize("the word there", false).len(), 3);
    assert_eq!(
        (words.size(), words.is_special(256), words.is_end(257)),
        (32_000, true, true)
    );
}

#[test]
fn message_contents_cannot_open_a_turn() {
    let vocabulary = ScriptedVocabulary::new(&Config::default());
    let message = |role: &str, content: &str| ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..ChatMessage::default()
    };
    let messages = vec![
        message("user", "first"),
        message("assistant", "x\nuser\ny"),
        message("user", "se\ncond"),
    ];
    let mut chat = ChatRequest {
        messages,
        ..ChatRequest::default()
    };
    let tokens = vocabulary.chat(&chat).unwrap();
    assert_eq!(tokens.iter().filter(|&&token| token >= 256).count(), 7);
    let subject = vocabulary.subject(&tokens);
    assert_eq!(vocabulary.text(&subject), "se\ncond");
    chat.messages[0].role = "wizard".to_owned();
    assert_eq!(vocabulary.chat(&chat).unwrap_err().reason, "BAD_ROLE");
    let plain = ScriptedVocabulary::new(&Config {
        chat: false,
        ..Config::default()
    });
    assert_eq!(plain.chat(&chat).unwrap_err().reason, "NO_TEMPLATE");
}

#[test]
fn invalid_configurations_are_refused() {
    let cases = [
        (r#"{"tokens_per_s": -1}"#, "tokens_per_s must be 0 or more"),
        (r#"{"gap": 99}"#, "gap must be from 0 to 80"),
        (
            r#"{"rules": [{"steps": [{"error": {"code": "nope"}}]}]}"#,
            "\"nope\" is not an error code",
        ),
        (
            r#"{"rules": [{"match": "(", "steps": []}]}"#,
            "the pattern \"(\" of a rule does not parse",
        ),
        (
            r#"{"tokens_per_chunk": 0}"#,
            "tokens_per_chunk must be 1 or more",
        ),
        // TR-1106
        (
            r#"{"tokenizer": "models/tokenizer.json"}"#,
            "tokenizer models/tokenizer.json: tokenizer files are not supported; \"bytes\" and \"words\"",
        ),
    ];
    for (config, message) in cases {
        let error = Scripted::new(serde_json::from_str(config).unwrap())
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(message), "{error}");
    }
    assert!(serde_json::from_str::<Config>(r#"{"scirpt": "echo"}"#).is_err());
}
