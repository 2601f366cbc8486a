//! Outputs that would cost memory or time: each limit, and work that is linear in the text.

use super::*;

/// `tool_call_bytes`, `tool_calls_max`, `tool_name_bytes`: at the limit and one past it.
#[test]
fn calls_are_bounded() {
    let hermes = bare(ToolParser::Hermes);
    let long = |bytes: usize| {
        let head = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"";
        format!("{head}{}\"}}}}", "x".repeat(bytes - head.len() - 3))
    };
    let kinds = |text: &str| -> String {
        let found = events(&hermes, &[text]);
        found.iter().map(|(kind, _)| *kind).collect()
    };
    assert_eq!(kinds(&long(limits::TOOL_CALL_BYTES)), "cae");
    assert_eq!(kinds(&long(limits::TOOL_CALL_BYTES + 1)), "cabt");
    let many = |calls: usize| "<tool_call>{\"name\": \"f\"}</tool_call>".repeat(calls);
    assert_eq!(
        kinds(&many(limits::TOOL_CALLS_MAX)),
        "cae".repeat(limits::TOOL_CALLS_MAX)
    );
    assert_eq!(
        kinds(&many(limits::TOOL_CALLS_MAX + 1)),
        "cae".repeat(limits::TOOL_CALLS_MAX) + "t"
    );
    let name = |bytes: usize| format!("[TOOL_CALLS]{}[ARGS]{{}}", "n".repeat(bytes));
    let mistral = bare(ToolParser::Mistral);
    assert_eq!(events(&mistral, &[&name(limits::TOOL_NAME_BYTES)]).len(), 3);
    assert_eq!(
        events(&mistral, &[&name(limits::TOOL_NAME_BYTES + 1)]).len(),
        1
    );
    let named = |name: &str| format!("<tool_call>{{\"name\": \"{name}\"}}");
    let channel = |name: &str| format!("<|channel|>commentary to={name}<|message|>{{}}");
    let longest = "n".repeat(limits::TOOL_NAME_BYTES);
    for (parser, text) in [
        (ToolParser::Hermes, &named as &dyn Fn(&str) -> String),
        (ToolParser::Harmony, &channel),
    ] {
        let kinds = |name: &str| events(&bare(parser), &[&text(name)])[0].0;
        assert_eq!(kinds(&longest), 'c', "{parser:?}");
        assert_eq!(kinds(&format!("{longest}n")), 't', "{parser:?}");
        assert_eq!(kinds("a\"b"), 't', "{parser:?}");
    }
}

/// An envelope that is not closed, nesting without an end, and many calls, as each form of calls writes them: the beginning
/// of a call up to a text, the end of one, nesting, and a whole call.
const HOSTILE: &[(ToolParser, &str, &str, [&str; 2])] = &[
    (
        ToolParser::Gemma,
        "<|tool_call>call:note{text:<|\"|>",
        "<|tool_call>call:note{tags:",
        ["<|tool_call>", "call:add{a:1}<tool_call|>"],
    ),
    (
        ToolParser::Lfm2,
        "<|tool_call_start|>[note(text='",
        "<|tool_call_start|>[note(tags=",
        ["<|tool_call_start|>[", "add(a=1), "],
    ),
    (
        ToolParser::DeepseekV32,
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"note\"><｜DSML｜parameter name=\"text\" string=\"true\">",
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"note\"><｜DSML｜parameter name=\"tags\" string=\"false\">",
        [
            "<｜DSML｜function_calls>",
            "<｜DSML｜invoke name=\"add\"></｜DSML｜invoke>",
        ],
    ),
    (
        ToolParser::Nemotron,
        "<TOOLCALL>[{\"name\": \"note\", \"arguments\": {\"text\": \"",
        "<TOOLCALL>[{\"name\": \"note\", \"arguments\": {\"tags\": ",
        ["<TOOLCALL>[", "{\"name\": \"add\"}, "],
    ),
    (
        ToolParser::Cohere,
        "<|START_ACTION|>[{\"tool_name\": \"note\", \"parameters\": {\"text\": \"",
        "<|START_ACTION|>[{\"tool_name\": \"note\", \"parameters\": {\"tags\": ",
        ["<|START_ACTION|>[", "{\"tool_name\": \"add\"}, "],
    ),
    (
        ToolParser::MinimaxM2,
        "<minimax:tool_call><invoke name=\"note\"><parameter name=\"text\">",
        "<minimax:tool_call><invoke name=\"note\"><parameter name=\"tags\">",
        ["<minimax:tool_call>", "<invoke name=\"add\"></invoke>"],
    ),
    (
        ToolParser::KimiK3,
        "<|open|>tools<|sep|><|open|>call tool=\"note\" index=\"1\"<|sep|><|open|>argument key=\"text\" type=\"string\"<|sep|>",
        "<|open|>tools<|sep|><|open|>call tool=\"note\" index=\"1\"<|sep|><|open|>argument key=\"tags\" type=\"array\"<|sep|>",
        [
            "<|open|>tools<|sep|>",
            "<|open|>call tool=\"add\"<|sep|><|close|>call<|sep|>",
        ],
    ),
    (
        ToolParser::Jamba,
        "<tool_calls>[{\"name\": \"note\", \"arguments\": {\"text\": \"",
        "<tool_calls>[{\"name\": \"note\", \"arguments\": {\"tags\": ",
        ["<tool_calls>[", "{\"name\": \"add\"}, "],
    ),
    (
        ToolParser::HyV3,
        "<tool_calls:opensource><tool_call:opensource>note<tool_sep:opensource><arg_key:opensource>text</arg_key:opensource><arg_value:opensource>",
        "<tool_calls:opensource><tool_call:opensource>note<tool_sep:opensource><arg_key:opensource>tags</arg_key:opensource><arg_value:opensource>",
        [
            "<tool_calls:opensource>",
            "<tool_call:opensource>add<tool_sep:opensource></tool_call:opensource>",
        ],
    ),
    (
        ToolParser::Apertus,
        "<|tools_prefix|>[{\"note\": {\"text\": \"",
        "<|tools_prefix|>[{\"note\": {\"tags\": ",
        ["<|tools_prefix|>[", "{\"add\": {}}, "],
    ),
    (
        ToolParser::Minicpm5,
        "<function name=\"note\"><param name=\"text\"><![CDATA[",
        "<function name=\"note\"><param name=\"tags\">",
        ["<function name=\"", "add\"></function>"],
    ),
    (
        ToolParser::Gigachat3,
        "function call<|role_sep|>{\"name\": \"note\", \"arguments\": {\"text\": \"",
        "function call<|role_sep|>{\"name\": \"note\", \"arguments\": {\"tags\": ",
        ["function call<|role_sep|>", "{\"name\": \"add\"}"],
    ),
    (
        ToolParser::SolarOpen,
        "<|tool_call:begin|>0<|tool_call:name|>note<|tool_call:args|>{\"text\": \"",
        "<|tool_call:begin|>0<|tool_call:name|>note<|tool_call:args|>{\"tags\": ",
        [
            "<|tool_calls|>",
            "<|tool_call:begin|>0<|tool_call:name|>add<|tool_call:args|>{}<|tool_call:end|>",
        ],
    ),
    (
        ToolParser::MinimaxM3,
        "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"note\">]<]minimax[>[<text>",
        "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"note\">]<]minimax[>[<tags>",
        [
            "]<]minimax[>[<tool_call>",
            "]<]minimax[>[<invoke name=\"add\">]<]minimax[>[</invoke>",
        ],
    ),
];

/// One family for each machine, whose calls are tried up to the limit of their bytes.
const TO_THE_LIMIT: [ToolParser; 5] = [
    ToolParser::Gemma,
    ToolParser::DeepseekV32,
    ToolParser::Nemotron,
    ToolParser::SolarOpen,
    ToolParser::MinimaxM3,
];

/// `tool_call_bytes`, `tool_calls_max` and the nesting of JSON hold in all forms of calls, and their work is linear.
#[test]
fn hostile_outputs_are_bounded() {
    for &(parser, text, nested, [open, call]) in HOSTILE {
        let settings = bare(parser);
        let kinds = |output: &str| -> String {
            work::COUNT.set(0);
            let found = events(&settings, &[output]);
            assert!(
                work::COUNT.get() <= 8 * output.len(),
                "{parser:?}: {} of {}",
                work::COUNT.get(),
                output.len()
            );
            found.iter().map(|(kind, _)| *kind).collect()
        };
        if TO_THE_LIMIT.contains(&parser) {
            let unclosed = text.to_owned() + &"x".repeat(limits::TOOL_CALL_BYTES);
            let broken = kinds(&unclosed);
            assert!(["cabt", "cbt"].contains(&&*broken), "{parser:?}: {broken}");
        }
        let deep = nested.to_owned() + &"[".repeat(32 << 10);
        let broken = kinds(&deep);
        assert!(
            ["cabt", "cab", "cbt", "cb", "t"].contains(&&*broken),
            "{parser:?}: {broken}"
        );
        for between in ["", open] {
            let many = open.to_owned() + &format!("{call}{between}").repeat(1_000);
            let found = kinds(&many);
            let calls = found.matches('e').count();
            assert!(
                calls <= limits::TOOL_CALLS_MAX && found.ends_with('t'),
                "{parser:?}: {found}"
            );
            if between == open {
                assert_eq!(calls, limits::TOOL_CALLS_MAX, "{parser:?}");
            }
        }
    }
}

/// Markers that break off at once, nested and in one piece: each byte is looked at a bounded number of times.
#[test]
fn work_is_linear_in_the_text() {
    let deep = "<tool_call>f\n<arg_key>k</arg_key><arg_value>";
    for (parser, unit) in [
        (ToolParser::Hermes, "<tool_call>"),
        (ToolParser::Hermes, "<think></think>a"),
        (ToolParser::Hermes, "<tool_call>{\"name\":\"f\"}x"),
        (ToolParser::Hermes, "<tool_call>{\"name\":\"f\"}</tool_cal"),
        (ToolParser::Glm, deep),
        (ToolParser::Harmony, "<|start|>"),
        (ToolParser::Harmony, "<|channel|>final<|message|>a<|end|>"),
        (ToolParser::Kimi, "<|tool_call_begin|>"),
    ] {
        let text = unit.repeat((64 << 10) / unit.len());
        for pieces in [vec![&*text], text.split_inclusive(unit).collect()] {
            work::COUNT.set(0);
            assert!(!events(&bare(parser), &pieces).is_empty());
            let work = work::COUNT.get();
            let most = 8 * text.len();
            assert!(
                work <= most,
                "{parser:?} {unit}: {work} of {} bytes",
                text.len()
            );
        }
    }
    let hermes = bare(ToolParser::Hermes);
    let feeds = "\n".repeat(64 << 10);
    let feeds: Vec<&str> = std::iter::once("<think>a")
        .chain(feeds.split_inclusive('\n'))
        .collect();
    work::COUNT.set(0);
    assert_eq!(events(&hermes, &feeds), [('r', "a".to_owned())]);
    assert!(work::COUNT.get() <= 8 * feeds.len());
}

/// White space before a call without a marker is held back up to a limit.
#[test]
fn white_space_before_an_unmarked_call_is_bounded() {
    let llama = bare(ToolParser::Llama3);
    let call = "{\"name\": \"add\", \"parameters\": {}}";
    let after = |blank: usize| parse(&llama, &(" ".repeat(blank) + call));
    assert_eq!(after(BLANK_BYTES_MAX), ["c:add{}"]);
    let text = format!("t:{}{call}", " ".repeat(BLANK_BYTES_MAX + 1));
    assert_eq!(after(BLANK_BYTES_MAX + 1), [text]);
    let mut parser = OutputParser::new(llama);
    let mut shown = 0;
    for _ in 0..1_000 {
        parser.push(Text::from_static(" "), &mut |part| {
            shown += usize::from(matches!(part, OutputPart::Text(_)))
        });
    }
    assert!(shown > 900, "it is not held until the end: {shown}");
}
