//! Where reasoning begins and ends: markers that are words of an answer, and calls in reasoning that has no end.

use super::*;

const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";

/// A marker that is no control token opens reasoning where nothing but white space stands before it.
#[test]
fn the_marker_of_reasoning_may_be_a_word_of_an_answer() {
    let hermes = bare(ToolParser::Hermes);
    for (text, expect) in [
        ("\n <think>hm</think>Hi", &["t:\n ", "r:hm", "t:Hi"][..]),
        ("The <think> tag\nopens.", &["t:The <think> tag\nopens."]),
        (
            "<think>hm</think>The <think> tag.",
            &["r:hm", "t:The <think> tag."],
        ),
        ("<think>a</think>\n<think>b</think>c", &["r:ab", "t:c"]),
        (
            "<tool_call>{\"name\": \"f\"}</tool_call><think>",
            &["c:f{}", "t:<think>"],
        ),
    ] {
        assert_eq!(parse(&hermes, text), expect, "{text}");
    }
    let vocabulary = ControlNames {
        names: vec!["<think>", "</think>"],
        template: None,
    };
    let marked = settings(OutputParsers::default(), &vocabulary);
    let token = |name: &str| format!("{MARK_OPEN}{name}{MARK_CLOSE}");
    let text = format!("So. {}hm{}Hi", token("<think>"), token("</think>"));
    assert_eq!(parse(&marked, &text), ["t:So. ", "r:hm", "t:Hi"]);
}

/// Markers that are ordinary text: calls that end the output are calls, what anything follows was a draft.
#[test]
fn calls_that_end_reasoning_without_an_end_are_found() {
    let other = CALL.replace('1', "2");
    for (text, expect) in [
        (
            format!("<think>hm\n\n{CALL}\n"),
            vec!["r:hm".to_owned(), "c:add{\"a\":1}".to_owned()],
        ),
        (
            format!("<think>\n{CALL}\n{other}"),
            vec!["c:add{\"a\":1}".to_owned(), "c:add{\"a\":2}".to_owned()],
        ),
        (
            format!("<think>Thus:\n{CALL}\n</think>\n\n{other}"),
            vec![format!("r:Thus:\n{CALL}"), "c:add{\"a\":2}".to_owned()],
        ),
        (
            format!("<think>Thus:\n{CALL}\nOr so."),
            vec![format!("r:Thus:\n{CALL}\nOr so.")],
        ),
        (
            format!("<think>Thus: {CALL}"),
            vec![format!("r:Thus: {CALL}")],
        ),
        (
            format!("<think>hm\n{}", CALL.replace("add", "sum")),
            vec![format!("r:hm\n{}", CALL.replace("add", "sum"))],
        ),
        (
            "<think>hm\n<tool_call>\n{\"name\": \"add\", \"argu".to_owned(),
            vec!["r:hm\n<tool_call>\n{\"name\": \"add\", \"argu".to_owned()],
        ),
        (
            "<think>hm\n<tool_call>{\"name\": \"</think>So.".to_owned(),
            vec![
                "r:hm\n<tool_call>{\"name\": \"".to_owned(),
                "t:So.".to_owned(),
            ],
        ),
        (
            format!("<think>\n<tool_call> is a tag\n  {CALL}"),
            vec![
                "r:<tool_call> is a tag\n  ".to_owned(),
                "c:add{\"a\":1}".to_owned(),
            ],
        ),
        (
            format!("<think>\n{CALL}<think>\n{CALL}"),
            vec![format!("r:{CALL}<think>"), "c:add{\"a\":1}".to_owned()],
        ),
        // Of two, the last is cut off.
        (
            format!("<think>hm\n{CALL}\n<tool_call>{{\"name\": \"note\", \"arguments\": {{\"te"),
            vec![
                "r:hm".to_owned(),
                "c:add{\"a\":1}".to_owned(),
                "b:".to_owned(),
                "r:\n<tool_call>{\"name\": \"note\", \"arguments\": {\"te".to_owned(),
            ],
        ),
    ] {
        assert_eq!(parse(&bare(ToolParser::Hermes), &text), expect, "{text}");
    }
    let mut begun = bare(ToolParser::Qwen3Coder);
    begun.continue_prompt("assistant\n<think>\n");
    let text =
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(parse(&begun, text), ["c:add{\"a\":1}"]);
    // Nobody asked for calls.
    begun.tools = None;
    assert_eq!(parse(&begun, text), [format!("r:{text}")]);
}

/// A limit, a stop string or the caller ended the output: the model might have gone on, so its draft is none of its calls.
#[test]
fn a_draft_at_which_the_output_is_cut_is_reasoning() {
    let hermes = bare(ToolParser::Hermes);
    let cut = |settings: &OutputSettings, text: &str| {
        fuzz::events_until(settings, &[text], OutputEnd::Cut)
    };
    for draft in [
        format!("hm\n\n{CALL}"),
        format!("hm\n{CALL}\n{CALL}\n"),
        format!("hm\n{CALL}\n<tool_call>{{\"name\": \"note\", \"arguments\": {{\"te"),
        format!("hm\n{CALL}\n</thi"),
        format!("hm\n{}", &CALL[..CALL.len() - 1]),
        "hm\n<tool_call>\n{\"name\": \"add\", \"argu".to_owned(),
    ] {
        let expect = [('r', draft.trim_end_matches('\n').to_owned())];
        assert_eq!(cut(&hermes, &format!("<think>{draft}")), expect, "{draft}");
    }
    // Behind the reasoning they are calls: the model wrote them as its answer.
    let answer = cut(&hermes, &format!("<think>hm</think>{CALL}"));
    let kinds: String = answer.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, "rcae");
}

/// What a draft broke off on may be the next call.
#[test]
fn the_call_behind_a_broken_draft_is_found() {
    for broken in [
        "<tool_call>\n",
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \n",
    ] {
        let text = format!("<think>hm\n{broken}{CALL}");
        let expect = [
            format!("r:hm\n{}", broken.trim_end_matches('\n')),
            "c:add{\"a\":1}".to_owned(),
        ];
        assert_eq!(parse(&bare(ToolParser::Hermes), &text), expect, "{text}");
    }
}

/// Markers that no model writes without meaning it: calls come as they are written, and the reasoning goes on behind them.
#[test]
fn unmistakable_calls_in_reasoning_are_calls_at_once() {
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>";
    let section = "<|tool_calls_section_begin|>";
    let open = "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{\"a\": ";
    let deepseek = "<｜tool▁calls▁begin｜>";
    for (parser, text, expect) in [
        (
            ToolParser::Kimi,
            format!("<think>hm{kimi}"),
            vec![
                "r:hm".to_owned(),
                "c:add#functions.add:0{\"a\":1}".to_owned(),
            ],
        ),
        (
            ToolParser::Kimi,
            format!("<think>hm\n{kimi}\nmore\n</think>\nSo."),
            vec![
                "r:hm".to_owned(),
                "c:add#functions.add:0{\"a\":1}".to_owned(),
                "r:\nmore".to_owned(),
                "t:So.".to_owned(),
            ],
        ),
        (
            ToolParser::Kimi,
            format!("<think>hm\n{section}none\n</think>\nSo."),
            vec![format!("r:hm\n{section}none"), "t:So.".to_owned()],
        ),
        (
            ToolParser::Kimi,
            format!("<think>hm{open}x</think>So."),
            vec![
                "r:hm".to_owned(),
                "b:".to_owned(),
                format!("r:{open}x"),
                "t:So.".to_owned(),
            ],
        ),
        (
            ToolParser::Kimi,
            format!("<think>hm{open}"),
            vec!["r:hm".to_owned(), "b:".to_owned(), format!("r:{open}")],
        ),
        (
            ToolParser::Deepseek,
            format!("<think>hm{deepseek}</think>So."),
            vec![format!("r:hm{deepseek}"), "t:So.".to_owned()],
        ),
        (
            ToolParser::Gemma,
            "<|channel>thought\nhm\n<|tool_call>call:add{a:1}<tool_call|>".to_owned(),
            vec!["r:hm".to_owned(), "c:add{\"a\":1}".to_owned()],
        ),
    ] {
        assert_eq!(parse(&bare(parser), &text), expect, "{text}");
    }
    let mut parser = OutputParser::new(bare(ToolParser::Kimi));
    let mut seen = Vec::new();
    parser.push(Text::from(&*format!("<think>{open}1")), &mut |part| {
        seen.push(part);
    });
    assert!(
        matches!(seen.last(), Some(OutputPart::CallArguments(json)) if json == "{\"a\": 1"),
        "{seen:?}"
    );
}

/// The same with control tokens, which end whatever they do not belong to.
#[test]
fn control_tokens_open_calls_anywhere_in_reasoning() {
    let vocabulary = ControlNames {
        names: vec!["<tool_call>", "</tool_call>"],
        template: None,
    };
    let marked = settings(OutputParsers::default(), &vocabulary);
    let [call, end] =
        ["<tool_call>", "</tool_call>"].map(|name| format!("{MARK_OPEN}{name}{MARK_CLOSE}"));
    let json = "{\"name\": \"add\", \"arguments\": {}}";
    for (text, expect) in [
        (
            format!("<think>Thus: {call}{json}{end}"),
            &["r:Thus: ", "c:add{}"][..],
        ),
        (
            format!("<think>a{call}b{call}{json}{end}</think>c"),
            &["r:ab", "c:add{}", "t:c"],
        ),
        (
            format!("<think>a{call}{{\"name\": \"{end}</think>c"),
            &["r:a{\"name\": \"", "t:c"],
        ),
        (
            "<think>a\n<tool_call>".to_owned() + json,
            &["r:a\n<tool_call>{\"name\": \"add\", \"arguments\": {}}"],
        ),
    ] {
        assert_eq!(parse(&marked, &text), expect, "{text}");
    }
}

/// The end of the reasoning alone may be a control token.
#[test]
fn a_control_token_behind_a_draft_ends_the_reasoning() {
    let vocabulary = ControlNames {
        names: vec!["<think>", "</think>"],
        template: None,
    };
    let marked = settings(OutputParsers::default(), &vocabulary);
    let [think, end] = ["<think>", "</think>"].map(|name| format!("{MARK_OPEN}{name}{MARK_CLOSE}"));
    for (text, expect) in [
        (
            format!("{think}\n{CALL}\n{end}\n{CALL}"),
            vec![format!("r:{CALL}"), "c:add{\"a\":1}".to_owned()],
        ),
        (format!("{think}\n{CALL}\n{end}"), vec![format!("r:{CALL}")]),
        (
            format!("{think}\n{CALL}\n{think}\n{CALL}"),
            vec![format!("r:{CALL}"), "c:add{\"a\":1}".to_owned()],
        ),
    ] {
        assert_eq!(parse(&marked, &text), expect, "{text}");
    }
}

/// What may be a call is held back up to a limit, and read twice at most.
#[test]
fn drafts_are_bounded() {
    let hermes = bare(ToolParser::Hermes);
    let head = "<tool_call>{\"name\": \"note\", \"arguments\": {\"text\": \"";
    let long = |bytes: usize| {
        let text = "x".repeat(bytes - head.len() - 3);
        let found = events(&hermes, &[&format!("<think>\n{head}{text}\"}}}}")]);
        found.iter().map(|(kind, _)| *kind).collect::<String>()
    };
    assert_eq!(long(limits::TOOL_CALL_BYTES), "cae");
    assert_eq!(long(limits::TOOL_CALL_BYTES + 1), "r");
    let many = "<tool_call>{\"name\": \"add\"}</tool_call>\n";
    for (calls, expect) in [
        (limits::TOOL_CALLS_MAX, "cae".repeat(limits::TOOL_CALLS_MAX)),
        (limits::TOOL_CALLS_MAX + 1, "r".to_owned()),
    ] {
        let text = format!("<think>\n{}", many.repeat(calls));
        let found = events(&hermes, &[&text]);
        let kinds: String = found.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, expect);
    }
    for (parser, unit) in [
        (ToolParser::Hermes, "\n<tool_call>"),
        (ToolParser::Hermes, "\n<tool_call>{\"name\":\"add\"}"),
        (ToolParser::Hermes, "\n<tool_call>{\"name\":\"add\"}x"),
        (
            ToolParser::Hermes,
            "\n<tool_call>{\"name\":\"add\"}\n</think>",
        ),
        (
            ToolParser::Glm,
            "\n<tool_call>add\n<arg_key>a</arg_key><arg_value>",
        ),
        (ToolParser::Kimi, "<|tool_call_begin|>"),
    ] {
        let text = "<think>".to_owned() + &unit.repeat((64 << 10) / unit.len());
        for pieces in [vec![&*text], text.split_inclusive(unit).collect()] {
            work::COUNT.set(0);
            assert!(!events(&bare(parser), &pieces).is_empty());
            let work = work::COUNT.get();
            assert!(work <= 8 * text.len(), "{parser:?} {unit}: {work}");
        }
    }
}
