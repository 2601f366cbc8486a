//! Tests of the output parser: golden outputs of each family, and properties of all.

use std::sync::Arc;

use proptest::prelude::*;
use sapwood_engine::api::{ChatMessage, ChatRequest, MARK_CLOSE, MARK_OPEN};
use sapwood_proto::steer::ConstraintKind;

use super::fuzz::{ControlNames, TOOL_PARSERS, events, reasoning_beside, settings, tools};
use super::*;

mod bounds;
mod families;
mod golden;
mod published;
mod reasoning;
mod rendered;

/// Settings of a family whose vocabulary has its markers as ordinary text.
fn bare(tools: ToolParser) -> OutputSettings {
    // One that finds no calls finds reasoning.
    let reasoning = match tools {
        ToolParser::None => ReasoningParser::Think,
        tools => reasoning_beside(tools),
    };
    let parsers = OutputParsers { tools, reasoning };
    settings(parsers, &ControlNames::default())
}

/// The events as lines: `t:` text, `r:` reasoning, `c:` the name of a call with its arguments, `b:` a broken call.
fn parse(settings: &OutputSettings, text: &str) -> Vec<String> {
    let whole = events(settings, &[text]);
    let letters: Vec<String> = text.chars().map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    assert_eq!(events(settings, &letters), whole, "cut into letters");
    let mut lines = Vec::new();
    let mut open = String::new();
    for (kind, text) in whole {
        match kind {
            'c' => open = text,
            'a' => {}
            'e' => lines.push(format!("c:{open}{text}")),
            _ => lines.push(format!("{kind}:{text}")),
        }
    }
    lines
}

#[test]
fn reasoning_and_calls_are_found_and_the_rest_is_text() {
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let twice = format!("{call}\n{call}done");
    let cases: [(&str, &[&str]); 12] = [
        ("plain", &["t:plain"]),
        ("<think>\nhm\n</think>\n\nyes", &["r:hm", "t:yes"]),
        ("<think>a\n\nb</think>", &["r:a\n\nb"]),
        (&twice, &["c:add{\"a\":1}", "c:add{\"a\":1}", "t:done"]),
        ("1 < 2 <th <", &["t:1 < 2 <th <"]),
        ("<think>never ends\n", &["r:never ends"]),
        (
            "<tool_call>{\"name\": 1}</tool_call>x",
            &["t:<tool_call>{\"name\": 1}</tool_call>x"],
        ),
        ("<tool_call>{\"name\"", &["t:<tool_call>{\"name\""]),
        ("<tool_call>{\"name\": \"f\"}</tool_call>", &["c:f{}"]),
        ("a</think>b", &["t:a</think>b"]),
        (
            "see <tool_call> and <tool_call>{\"name\":\"f\"}</tool_call>",
            &["t:see <tool_call> and ", "c:f{}"],
        ),
        ("<tool_call>{\"name\":\"f\"}\n\nrest", &["c:f{}", "t:rest"]),
    ];
    for (text, expect) in cases {
        assert_eq!(parse(&bare(ToolParser::Hermes), text), expect, "{text}");
    }
    let none = settings(
        OutputParsers {
            tools: ToolParser::Hermes,
            reasoning: ReasoningParser::None,
        },
        &ControlNames::default(),
    );
    assert_eq!(parse(&none, "<think>x</think>"), ["t:<think>x</think>"]);
    let without = OutputSettings {
        tools: None,
        ..bare(ToolParser::Hermes)
    };
    assert_eq!(parse(&without, call), [format!("t:{call}")]);
    assert_eq!(parse(&bare(ToolParser::None), call), [format!("t:{call}")]);
    assert_eq!(parse(&OutputSettings::plain(), call), [format!("t:{call}")]);
}

#[test]
fn text_without_a_marker_is_passed_on_uncopied_and_at_once() {
    let mut parser = OutputParser::new(bare(ToolParser::Hermes));
    let text = Text::from_static("as it is");
    let mut seen = Vec::new();
    parser.push(text.clone(), &mut |part| seen.push(part));
    let [OutputPart::Text(same)] = &seen[..] else {
        panic!("{seen:?}");
    };
    assert_eq!(same.as_bytes().as_ptr(), text.as_bytes().as_ptr());
    let mut seen = Vec::new();
    parser.push(Text::from("a <tool_c"), &mut |part| seen.push(part));
    assert_eq!(
        seen,
        [OutputPart::Text("a ".into())],
        "only what may begin a marker is held back"
    );
}

/// KE-306: the name comes as soon as it is known, and then the arguments as they come.
#[test]
fn ke_306_a_call_is_emitted_while_it_is_written() {
    let mut parser = OutputParser::new(bare(ToolParser::Hermes));
    let mut push = |text: &str| {
        let mut seen = Vec::new();
        parser.push(Text::from(text), &mut |part| seen.push(part));
        seen
    };
    let arguments = |json: &str| OutputPart::CallArguments(json.to_owned());
    assert_eq!(push("<tool_call>{\"name\": \"no"), []);
    assert_eq!(push("te\", \"arguments\": "), []);
    let begin = OutputPart::CallBegin {
        name: "note".to_owned(),
        id: None,
    };
    assert_eq!(push("{\"te"), [begin, arguments("{\"te")]);
    assert_eq!(push("xt\": \"a}"), [arguments("xt\": \"a}")]);
    assert_eq!(push("\"}"), [arguments("\"}")]);
    let end = OutputPart::CallEnd {
        arguments: serde_json::json!({"text": "a}"}).into(),
    };
    assert_eq!(push("}"), [end]);
    assert_eq!(push("</tool_call>"), []);
}

#[test]
fn a_broken_call_is_given_back_as_it_was_written() {
    let cases = [
        // Nothing was emitted of it, so it is text.
        ("<tool_call>{'name': 'add'}", "t:<tool_call>{'name': 'add'}"),
        ("<tool_call>[]</tool_call>", "t:<tool_call>[]</tool_call>"),
        (
            "<tool_call>{\"name\": \"f\", \"name\": \"g\"}",
            "t:<tool_call>{\"name\": \"f\", \"name\": \"g\"}",
        ),
        (
            "<tool_call>{\"arguments\": {}}",
            "t:<tool_call>{\"arguments\": {}}",
        ),
        // It had begun.
        (
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"cut",
            "b:<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"cut",
        ),
    ];
    for (text, expect) in cases {
        assert_eq!(parse(&bare(ToolParser::Hermes), text), [expect], "{text}");
    }
    let text = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": oops}}</tool_call>";
    let expect = [
        "b:<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ",
        "t:oops}}</tool_call>",
    ];
    assert_eq!(parse(&bare(ToolParser::Hermes), text), expect);
    // Half a surrogate pair is JSON to a grammar and not to a reader.
    let text = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"\\ud800\"}}";
    let (last, rest) = text.split_at(text.len() - 1);
    let expect = [format!("b:{last}"), format!("t:{rest}")];
    assert_eq!(parse(&bare(ToolParser::Hermes), text), expect);
}

#[test]
fn arguments_come_in_many_forms() {
    let call = |members: &str| {
        parse(
            &bare(ToolParser::Hermes),
            &format!("<tool_call>{{{members}}}"),
        )
    };
    for (members, expect) in [
        (r#""name": "f", "parameters": {"a": 1}"#, r#"c:f{"a":1}"#),
        (r#""parameters": {"a": 1}, "name": "f""#, r#"c:f{"a":1}"#),
        (r#""name": "f", "arguments": "{\"a\": 1}""#, r#"c:f{"a":1}"#),
        (r#""name": "f", "arguments": "text""#, r#"c:f"text""#),
        (r#""name": "f", "arguments": null"#, "c:f{}"),
        (r#""name": "f", "arguments": [1]"#, "c:f[1]"),
        (r#""id": "abc", "name": "f", "arguments": {}"#, "c:f#abc{}"),
        (
            r#""name": "f", "arguments": {"a": {"b": ["}", "\"]", "</tool_call>"]}}"#,
            r#"c:f{"a":{"b":["}","\"]","</tool_call>"]}}"#,
        ),
    ] {
        assert_eq!(call(members), [expect], "{members}");
    }
}

/// Control tokens are markers, the same letters are text, and no reader sees a control token.
#[test]
fn control_tokens_are_markers_and_their_names_are_not() {
    let vocabulary = ControlNames {
        names: vec!["<tool_call>", "</tool_call>", "<think>", "<|im_end|>"],
        template: None,
    };
    let parsers = OutputParsers::default();
    let marked = settings(parsers, &vocabulary);
    assert_eq!(marked.marked()[..], [0, 1, 2], "and no other token");
    let token = |name: &str| format!("{MARK_OPEN}{name}{MARK_CLOSE}");
    let (call, end, think) = (
        token("<tool_call>"),
        token("</tool_call>"),
        token("<think>"),
    );
    let whole = r#"{"name": "f"}"#;
    for (text, expect) in [
        (
            format!("<tool_call>{whole}</tool_call>"),
            vec![format!("t:<tool_call>{whole}</tool_call>")],
        ),
        (
            format!("{call}{whole}{end}\nx"),
            vec!["c:f{}".to_owned(), "t:x".to_owned()],
        ),
        (format!("a{end}b{call}c"), vec!["t:abc".to_owned()]),
        (
            format!("{think}a{call}b</think>c"),
            vec!["r:ab".to_owned(), "t:c".to_owned()],
        ),
        (
            format!("{call}{{\"name\": {end}"),
            vec!["t:{\"name\": ".to_owned()],
        ),
        (
            format!("a{MARK_OPEN}b{MARK_CLOSE}"),
            vec![format!("t:a{MARK_OPEN}b{MARK_CLOSE}")],
        ),
    ] {
        assert_eq!(parse(&marked, &text), expect, "{text}");
    }
    let without = OutputSettings {
        tools: None,
        ..marked
    };
    assert_eq!(
        parse(&without, &format!("{call}{whole}{end}")),
        [format!("t:{whole}")]
    );
}

/// A constraint gives the form of the whole output, which is no reasoning although the template opens that.
#[test]
fn a_constrained_output_begins_with_the_answer() {
    for parser in [ToolParser::Hermes, ToolParser::Harmony] {
        let format = bare(parser).format.unwrap();
        let mut settings = OutputSettings::of_chat(format, None, &ChatRequest::default());
        for (kind, pattern) in [
            (ConstraintKind::JsonSchema, r#"{"type": "object"}"#),
            (
                ConstraintKind::JsonSchema,
                r#"{"description": "no <think></think> tags, no <|message|>"}"#,
            ),
            (ConstraintKind::Options, r#"["a</think>", "<|message|>b"]"#),
            (ConstraintKind::Substring, "a</think> <|message|>"),
            (ConstraintKind::Regex, "[a-z]+"),
        ] {
            assert!(!settings.ends_reasoning(kind, pattern), "{pattern}");
        }
        settings.begin_with_answer();
        let answer = r#"{"city": "Paris"}"#;
        assert_eq!(
            parse(&settings, answer),
            [format!("t:{answer}")],
            "{parser:?}"
        );
    }
    // A pattern that writes the reasoning too.
    let format = bare(ToolParser::Hermes).format.unwrap();
    for (kind, pattern) in [
        (ConstraintKind::Regex, r"[^<]*</think>[0-9]+"),
        (ConstraintKind::Regex, r"[^<]*<\/think>[0-9]+"),
        (
            ConstraintKind::Lark,
            r#"start: /[^<]*/ "</think>" /[0-9]+/"#,
        ),
        (ConstraintKind::Gbnf, r#"root ::= [^<]* "</think>" [0-9]+"#),
    ] {
        let mut settings =
            OutputSettings::of_chat(Arc::clone(&format), None, &ChatRequest::default());
        assert!(settings.ends_reasoning(kind, pattern), "{pattern}");
        settings.continue_prompt("assistant\n<think>\n");
        assert_eq!(
            parse(&settings, "hm</think>42"),
            ["r:hm", "t:42"],
            "{pattern}"
        );
    }
}

#[test]
fn templates_that_open_the_reasoning_themselves_are_recognised() {
    let format = bare(ToolParser::Hermes).format.unwrap();
    let chat = |content: &str| ChatRequest {
        messages: vec![ChatMessage {
            role: "assistant".to_owned(),
            content: content.to_owned(),
            ..ChatMessage::default()
        }],
        continue_last: true,
        ..ChatRequest::default()
    };
    let begun = |chat: &ChatRequest, tail: &str| {
        let mut settings = OutputSettings::of_chat(Arc::clone(&format), None, chat);
        settings.continue_prompt(tail);
        parse(&settings, "\nhm\n</think>\n\nyes")
    };
    let inside = ["r:hm", "t:yes"];
    let outside = ["t:\nhm\n</think>\n\nyes"];
    let open = ChatRequest::default();
    for (chat, tail, expect) in [
        (&open, "assistant\n<think>\n", &inside[..]),
        (&open, "assistant\n<think>", &inside),
        (&open, "assistant\n<think>\n\n</think>\n\n", &outside),
        (&open, "assistant\n", &outside),
        (&chat("<think>I see"), "I see", &inside),
        (&chat("<think>a</think>b"), "b", &outside),
        (&chat("plain"), "plain", &outside),
        (&chat("The <think> tag"), "tag", &outside),
        (&chat("<think>a</think>The <think> tag"), "tag", &outside),
    ] {
        assert_eq!(begun(chat, tail), expect, "{tail:?}");
    }
    // What a user wrote is not what the template wrote.
    let asked = |content: &str| ChatRequest {
        continue_last: false,
        ..chat(content)
    };
    let long = "x ".repeat(40) + "<think>";
    for (content, tail, expect) in [
        ("Say <think>", "User: Say <think>\n", &outside[..]),
        (&long, "x x x <think>", &outside),
        // It follows a control token, so the template wrote it.
        ("Say <think>", "<think>\n", &inside),
        ("Say <think>", "Say <think>\nAssistant: <think>\n", &inside),
        ("<think>", "<think>", &inside),
    ] {
        assert_eq!(begun(&asked(content), tail), expect, "{content:?} {tail:?}");
    }
    // A message that is not continued says nothing about the output.
    assert_eq!(begun(&asked("<think>"), "<think>x\n"), outside);
}

/// A control token within a call ends it: it is no part of a name, a key or a value.
#[test]
fn control_tokens_are_no_part_of_a_call() {
    let token = |name: &str| format!("{MARK_OPEN}{name}{MARK_CLOSE}");
    for (parser, names, text, expect) in [
        (
            ToolParser::Hermes,
            vec!["<tool_call>", "</tool_call>"],
            format!(
                "{}{{\"name\": \"f\", \"arguments\": {{\"a\": \"x{}y",
                token("<tool_call>"),
                token("</tool_call>")
            ),
            vec!["b:{\"name\": \"f\", \"arguments\": {\"a\": \"x", "t:y"],
        ),
        (
            ToolParser::Hermes,
            vec!["<tool_call>", "</tool_call>"],
            format!(
                "{}{{\"name\": \"f{}\"",
                token("<tool_call>"),
                token("</tool_call>")
            ),
            vec!["t:{\"name\": \"f\""],
        ),
        (
            ToolParser::Glm,
            vec!["<tool_call>", "</arg_value>"],
            format!(
                "{0}f\n<arg_key>k</arg_key><arg_value>v{0}g</tool_call>",
                token("<tool_call>")
            ),
            vec!["b:f\n<arg_key>k</arg_key><arg_value>v", "c:g{}"],
        ),
        (
            ToolParser::Mistral,
            vec!["[TOOL_CALLS]", "[ARGS]"],
            format!("{0}f{0}g{1}{{}}", token("[TOOL_CALLS]"), token("[ARGS]")),
            vec!["t:f", "c:g{}"],
        ),
    ] {
        let vocabulary = ControlNames {
            names,
            template: None,
        };
        let parsers = OutputParsers {
            tools: parser,
            reasoning: ReasoningParser::None,
        };
        assert_eq!(
            parse(&settings(parsers, &vocabulary), &text),
            expect,
            "{text}"
        );
    }
}

/// A refused piece that follows a complete call keeps the line feeds behind it.
#[test]
fn line_feeds_behind_a_refused_piece_are_text() {
    let text = "<tool_call>[{\"name\": \"f\"}, {\"name\": 1}\n\nrest";
    let expect = ["c:f{}", "t:, {\"name\": 1}\n\nrest"];
    assert_eq!(parse(&bare(ToolParser::Granite), text), expect);
    let text = "<think>a\n\n<";
    assert_eq!(parse(&bare(ToolParser::Granite), text), ["r:a\n\n<"]);
}

/// Ids that were copied from the conversation, or that its template would refuse, are replaced.
#[test]
fn ids_of_the_conversation_are_not_used_again() {
    let chat = ChatRequest {
        messages: vec![ChatMessage {
            tool_calls: serde_json::json!([{"id": "abcdefgh1"}, {"id": "functions.add:0"}]),
            tool_call_id: Some("abcdefgh2".to_owned()),
            ..ChatMessage::default()
        }],
        ..ChatRequest::default()
    };
    let takes = |parser: ToolParser, id: &str| {
        let format = bare(parser).format.unwrap();
        OutputSettings::of_chat(format, None, &chat).takes_id(id)
    };
    for (parser, id, expect) in [
        (ToolParser::Mistral, "abcdefgh3", true),
        (ToolParser::Mistral, "abcdefgh1", false),
        (ToolParser::Mistral, "abcdefgh2", false),
        (ToolParser::Mistral, "abcdefgh", false),
        (ToolParser::Mistral, "abcdefgh-", false),
        (ToolParser::Kimi, "functions.add:1", true),
        (ToolParser::Kimi, "functions.add:0", false),
        (ToolParser::Kimi, "call_1_0_0", false),
        (ToolParser::Hermes, "abcdefgh3", false),
    ] {
        assert_eq!(takes(parser, id), expect, "{parser:?} {id}");
    }
}

/// Of several markers at one place the first is found, so none may begin with an earlier one.
#[test]
fn no_marker_begins_with_an_earlier_one() {
    for tools in TOOL_PARSERS {
        let reasoning = reasoning_beside(tools);
        let parsers = OutputParsers { tools, reasoning };
        let bare = OutputFormat::new(parsers, &ControlNames::default());
        let controls = ControlNames {
            names: bare.texts.names().filter(fuzz::is_token).collect(),
            template: None,
        };
        for format in [OutputFormat::new(parsers, &controls), bare] {
            let in_text = format.in_text(true, true).iter();
            let in_text: Vec<Marker> = in_text.map(|(marker, _)| *marker).collect();
            let in_reasoning = [false, true].map(|calls| format.in_reasoning(calls));
            for markers in [&*in_text, in_reasoning[0], in_reasoning[1]] {
                let texts = markers.iter().map(|marker| format.texts.text(marker));
                let texts: Vec<&str> = texts.collect();
                for (at, one) in texts.iter().enumerate() {
                    let later = texts[at + 1..].iter().find(|later| later.starts_with(one));
                    assert_eq!(later, None, "{tools:?}: it begins with {one}");
                }
            }
        }
    }
}

#[test]
fn the_corpus_is_replayed() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fuzz/corpus/model_output"
    );
    let files = std::fs::read_dir(folder).expect("a committed corpus");
    let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    assert!(!files.is_empty());
    for file in files {
        fuzz::output(&std::fs::read(file).unwrap());
    }
}

proptest! {
    // Each case is an output of some fifty formats.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn ke_111_cuts_change_nothing(
        pieces in prop::collection::vec(
            prop_oneof![any::<u8>().prop_map(|byte| vec![byte]), any::<u8>().prop_map(|byte| vec![63, byte])],
            0..60,
        ),
    ) {
        fuzz::output(&pieces.concat());
    }
}

proptest! {
    /// A golden output of which a part is missing, and in which one of its markers stands where it does not belong; also in
    /// reasoning.
    #[test]
    fn ke_111_broken_outputs_may_be_cut_anywhere(
        family in 0..golden::GOLDEN.len(),
        missing in any::<[prop::sample::Index; 2]>(),
        marker in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        cut in any::<prop::sample::Index>(),
        reasons in any::<bool>(),
    ) {
        let (parser, text, _) = golden::GOLDEN[family];
        let settings = bare(parser);
        let border = |text: &str, at: prop::sample::Index| text.floor_char_boundary(at.index(text.len() + 1));
        let [one, other] = missing.map(|at| border(text, at));
        let mut text = text[..one.min(other)].to_owned() + &text[one.max(other)..];
        let format = settings.format.as_ref().expect("it has one");
        let markers: Vec<Marker> = format.texts.names().collect();
        if !markers.is_empty() {
            text.insert_str(border(&text, at), markers[marker.index(markers.len())]);
        }
        if let Some((open, _)) = format.think().filter(|_| reasons) {
            text.insert_str(0, &format!("{open}hm\n"));
        }
        let (begin, rest) = text.split_at(border(&text, cut));
        fuzz::check_cuts(&settings, &[begin.to_owned(), rest.to_owned()]);
    }

    /// Whatever is cut off a golden output, its parts are those of any other cut, and text comes out once.
    #[test]
    fn ke_111_golden_outputs_may_be_cut_anywhere(
        family in 0..golden::GOLDEN.len(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        end in any::<prop::sample::Index>(),
    ) {
        let (parser, text, _) = golden::GOLDEN[family];
        let text = &text[..text.floor_char_boundary(end.index(text.len() + 1))];
        let mut at: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
        at.extend([0, text.len()]);
        at.sort_unstable();
        let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(events(&bare(parser), &pieces), events(&bare(parser), &[text]));
    }
}

#[test]
fn the_tools_of_the_tests_are_declared() {
    let tools = DeclaredTools::of(&tools());
    assert!(tools.has("add") && tools.has("note"));
}
