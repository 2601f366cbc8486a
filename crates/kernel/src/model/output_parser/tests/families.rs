//! Which parser a template chooses, and what single families have of their own.

use super::*;

/// A prompt of harmony ends within the header of the first message.
#[test]
fn a_message_of_harmony_may_begin_in_the_prompt() {
    for (tail, text, expect) in [
        (
            "<|start|>assistant",
            "<|channel|>final<|message|>Hi",
            "t:Hi",
        ),
        ("<|start|>assistant", "Hi, assistant", "t:Hi, assistant"),
        (
            "<|start|>assistant",
            " to=functions.add<|channel|>commentary<|message|>{}",
            "c:add{}",
        ),
        (
            "<|end|><|start|>assistant<|channel|>analysis<|message|>",
            "hm",
            "r:hm",
        ),
        (
            "<|start|>assistant<|channel|>final<|message|>So ",
            "far",
            "t:far",
        ),
        ("nothing known", "far", "t:far"),
    ] {
        let mut settings = bare(ToolParser::Harmony);
        settings.continue_prompt(tail);
        assert_eq!(parse(&settings, text), [expect], "{tail}");
    }
}

#[test]
fn reasoning_between_markers_of_other_families() {
    for (parser, open, close) in [
        (
            ReasoningParser::Cohere,
            "<|START_THINKING|>",
            "<|END_THINKING|>",
        ),
        (ReasoningParser::Seed, "<seed:think>", "</seed:think>"),
        (
            ReasoningParser::Apriel,
            "Here are my reasoning steps:",
            "[BEGIN FINAL RESPONSE]",
        ),
        (ReasoningParser::Minimax, "<mm:think>", "</mm:think>"),
    ] {
        let parsers = OutputParsers {
            tools: ToolParser::Hermes,
            reasoning: parser,
        };
        let mut settings = settings(parsers, &ControlNames::default());
        let answer = format!("{open}hm{close}Hi");
        assert_eq!(parse(&settings, &answer), ["r:hm", "t:Hi"]);
        settings.continue_prompt(&format!("assistant {open}"));
        let answer = format!("hm{close}Hi");
        assert_eq!(parse(&settings, &answer), ["r:hm", "t:Hi"]);
    }
}

/// The words before Apriel's reasoning are such words only where an output begins.
#[test]
fn the_words_before_reasoning_may_be_those_of_an_answer() {
    let parsers = OutputParsers {
        tools: ToolParser::Jamba,
        reasoning: ReasoningParser::Apriel,
    };
    let bare = settings(parsers, &ControlNames::default());
    let open = "Here are my reasoning steps:";
    let close = "[BEGIN FINAL RESPONSE]";
    for (text, expect) in [
        (
            format!("{open}\nhm{close}Hi"),
            vec!["r:hm".to_owned(), "t:Hi".to_owned()],
        ),
        (
            format!("\n {open}hm"),
            vec!["t:\n ".to_owned(), "r:hm".to_owned()],
        ),
        (
            format!("Sure. {open}\n1. {open}"),
            vec![format!("t:Sure. {open}\n1. {open}")],
        ),
        (
            format!("{open}hm{close}{open}\n1."),
            vec!["r:hm".to_owned(), format!("t:{open}\n1.")],
        ),
    ] {
        assert_eq!(parse(&bare, &text), expect, "{text}");
    }
    let mut begun = bare.clone();
    begun.continue_prompt(&format!("assistant {open}\n"));
    let text = format!("hm{close}\n{open} none");
    assert_eq!(
        parse(&begun, &text),
        ["r:hm".to_owned(), format!("t:{open} none")]
    );
    let chat = |content: String| ChatRequest {
        messages: vec![ChatMessage {
            role: "assistant".to_owned(),
            content,
            ..ChatMessage::default()
        }],
        continue_last: true,
        ..ChatRequest::default()
    };
    let format = bare.format.expect("it parses");
    for (content, expect) in [
        (format!("{open}\n1."), "r:a"),
        (format!("Well. {open}\n1."), "t:a"),
        (format!("{open}\n1.{close}"), "t:a"),
    ] {
        let settings = OutputSettings::of_chat(Arc::clone(&format), None, &chat(content.clone()));
        assert_eq!(parse(&settings, "a"), [expect], "{content}");
    }
}

/// Templates, and the parsers that they choose.
const CHOSEN: &[(&str, ToolParser, ReasoningParser)] = {
    use ReasoningParser::{
        Apriel, Cohere, Gemma, Harmony, HyV3, KimiK3, Minimax, Mistral, Seed, SolarOpen, Think,
    };
    &[
        ("", ToolParser::Hermes, Think),
        ("<|im_start|>{{ m }}<tool_call>", ToolParser::Hermes, Think),
        (
            "<|start_header_id|>{{ m }}\"parameters\"",
            ToolParser::Llama3,
            Think,
        ),
        ("[INST][TOOL_CALLS][/INST]", ToolParser::Mistral, Think),
        ("[INST][TOOL_CALLS][THINK]", ToolParser::Mistral, Mistral),
        (
            "<|start|>assistant<|channel|>analysis",
            ToolParser::Harmony,
            Harmony,
        ),
        ("<｜tool▁calls▁begin｜>", ToolParser::Deepseek, Think),
        (
            "<|im_system|><|tool_calls_section_begin|>",
            ToolParser::Kimi,
            Think,
        ),
        ("<tool_call><arg_key>", ToolParser::Glm, Think),
        ("<tool_call><function=x>", ToolParser::Qwen3Coder, Think),
        ("<|start_of_role|><|tool_call|>", ToolParser::Granite, Think),
        (
            "<|tool_call|>{{ c }}<|/tool_call|>",
            ToolParser::Phi4,
            Think,
        ),
        ("<|start_header_id|><tool_call>", ToolParser::Hermes, Think),
        ("<|header_start|>{{ m }}", ToolParser::Llama3, Think),
        (
            "<|START_THINKING|>{{ m }}<think>",
            ToolParser::Hermes,
            Cohere,
        ),
        ("<seed:think><function=x>", ToolParser::Qwen3Coder, Seed),
        ("<mm:think>", ToolParser::Hermes, Minimax),
        (
            "<|channel>thought{{ r }}<channel|><|tool_call>call:",
            ToolParser::Gemma,
            Gemma,
        ),
        ("<start_function_call>call:", ToolParser::Gemma, Think),
        ("<|tool_call_start|>[", ToolParser::Lfm2, Think),
        ("<|tool_list_start|>", ToolParser::Lfm2, Think),
        (
            "<|im_start|>{{ 'List of tools: [' }}",
            ToolParser::Lfm2,
            Think,
        ),
        ("{% set t = '｜DSML｜' %}", ToolParser::DeepseekV32, Think),
        (
            "<TOOLCALL>[{{ c }}]</TOOLCALL>",
            ToolParser::Nemotron,
            Think,
        ),
        (
            "<|START_THINKING|>{{ m }}<|START_ACTION|>",
            ToolParser::Cohere,
            Cohere,
        ),
        ("'Action:\\n```json\\n['", ToolParser::Cohere, Think),
        ("<minimax:tool_call>{{ c }}", ToolParser::MinimaxM2, Think),
        (
            "{{ '<|open|>' + tag }}<|sep|>{{ open_tag('think') }}",
            ToolParser::KimiK3,
            KimiK3,
        ),
        (
            "<tool_calls>[{{ c }}]</tool_calls>",
            ToolParser::Jamba,
            Think,
        ),
        (
            "<tool_calls>[{{ c }}]{{ 'Here are my reasoning steps:' }}",
            ToolParser::Jamba,
            Apriel,
        ),
        (
            "'<tool_calls{}>'.format(':opensource')",
            ToolParser::HyV3,
            HyV3,
        ),
        ("<|tools_prefix|>[{{ c }}]", ToolParser::Apertus, Think),
        (
            "{{ '<function name=\"' ~ name }}",
            ToolParser::Minicpm5,
            Think,
        ),
        ("{{ role + '<|role_sep|>' }}", ToolParser::Gigachat3, Think),
        (
            "<|think|>{{ r }}<|tool_call:begin|>{{ c }}",
            ToolParser::SolarOpen,
            SolarOpen,
        ),
        (
            "{% set ns = ']<]minimax[>[' %}<mm:think>",
            ToolParser::MinimaxM3,
            Minimax,
        ),
    ]
};

/// D-10: the template tells the family.
#[test]
fn d_10_the_family_is_chosen_by_the_template() {
    for &(template, tools, reasoning) in CHOSEN {
        let chosen = OutputParsers::default().for_template(template);
        assert_eq!(
            (chosen.tools, chosen.reasoning),
            (tools, reasoning),
            "{template}"
        );
        let fixed = OutputParsers {
            tools: ToolParser::None,
            reasoning: ReasoningParser::None,
        };
        assert_eq!(fixed.for_template(template), fixed);
    }
}

/// The names that are printed are those that are read.
#[test]
fn parsers_are_read_by_their_names() {
    let read = |name: &str| serde_json::from_value::<ToolParser>(name.into()).unwrap();
    for parser in TOOL_PARSERS.into_iter().chain([ToolParser::Auto]) {
        assert_eq!(read(parser.name()), parser);
    }
    use ReasoningParser::{
        Apriel, Auto, Cohere, Gemma, Harmony, HyV3, KimiK3, Minimax, Mistral, None, Seed,
        SolarOpen, Think,
    };
    for parser in [
        Auto, None, Think, SolarOpen, HyV3, Apriel, KimiK3, Mistral, Harmony, Cohere, Seed,
        Minimax, Gemma,
    ] {
        let read = serde_json::from_value::<ReasoningParser>(parser.name().into());
        assert_eq!(read.unwrap(), parser);
    }
    assert_eq!(read("kimi_k2"), ToolParser::Kimi);
}

/// The words between control tokens are parts of markers, whether calls and reasoning are looked for or not.
#[test]
fn the_words_of_markers_are_hidden_from_every_reader() {
    let kimi = &["<|open|>", "<|close|>", "<|sep|>"][..];
    let solar = &["<|think|>", "<|end|>", "<|begin|>", "<|content|>"];
    let kimi_output = "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>";
    let solar_output = "<|think|>hm<|end|><|begin|>assistant<|content|>Hi<|end|>";
    let both = &["r:hm", "t:Hi"][..];
    for (tools, reasoning, names, output, expect) in [
        (
            ToolParser::KimiK3,
            ReasoningParser::KimiK3,
            kimi,
            kimi_output,
            both,
        ),
        (
            ToolParser::None,
            ReasoningParser::KimiK3,
            kimi,
            kimi_output,
            both,
        ),
        (
            ToolParser::KimiK3,
            ReasoningParser::None,
            kimi,
            kimi_output,
            &["t:hmHi"],
        ),
        (
            ToolParser::None,
            ReasoningParser::SolarOpen,
            solar,
            solar_output,
            both,
        ),
    ] {
        let vocabulary = ControlNames {
            names: names.to_vec(),
            template: None,
        };
        let settings = settings(OutputParsers { tools, reasoning }, &vocabulary);
        let mark = |text: String, name: &&str| {
            text.replace(name, &format!("{MARK_OPEN}{name}{MARK_CLOSE}"))
        };
        let output = names.iter().fold(output.to_owned(), mark);
        assert_eq!(parse(&settings, &output), expect, "{tools:?} {reasoning:?}");
    }
}

/// Kimi K3 writes arguments as tags or as one object, and not as both.
#[test]
fn arguments_of_kimi_are_tags_or_one_object() {
    let kimi = bare(ToolParser::KimiK3);
    let tag = "<|open|>argument key=\"a\" type=\"number\"<|sep|>1<|close|>argument<|sep|>";
    let object = "<|open|>json type=\"object\"<|sep|>{\"b\": 2}<|close|>json<|sep|>";
    let none = String::new();
    let kinds = |arguments: [&str; 2]| -> String {
        let call = format!(
            "<|open|>call tool=\"add\"<|sep|>{}<|close|>call<|sep|>",
            arguments.concat()
        );
        let found = events(&kimi, &[&call]);
        found.iter().map(|(kind, _)| *kind).collect()
    };
    assert_eq!(kinds([tag, tag]), "cae");
    assert_eq!(kinds([object, &none]), "cae");
    for both in [[tag, object], [object, tag], [object, object]] {
        assert_eq!(kinds(both), "cabt", "{both:?}");
    }
}

/// Gemma's reasoning begins with the name of its channel, which is no part of it.
#[test]
fn the_label_of_a_channel_is_no_reasoning() {
    let gemma = bare(ToolParser::Gemma);
    for (text, expect) in [
        ("<|channel>thought\nhm\n<channel|>Hi", &["r:hm", "t:Hi"][..]),
        ("<|channel>thought\n<channel|>Hi", &["t:Hi"]),
        (
            "<|channel>thought\nthought\nhm<channel|>",
            &["r:thought\nhm"],
        ),
        ("<|channel>thoughtful<channel|>", &["r:thoughtful"]),
        ("<|channel>hm<channel|>Hi", &["r:hm", "t:Hi"]),
        ("<|channel>though", &[]),
    ] {
        assert_eq!(parse(&gemma, text), expect, "{text}");
    }
    for tail in ["<|turn>model\n<|channel>thought\n", "model\n<|channel>"] {
        let mut settings = gemma.clone();
        settings.continue_prompt(tail);
        let text = tail.rsplit_once("<|channel>").expect("it is there").1;
        let rest = if text.is_empty() { "thought\nhm" } else { "hm" };
        let answer = format!("{rest}<channel|>Hi");
        assert_eq!(parse(&settings, &answer), ["r:hm", "t:Hi"], "{tail}");
    }
}

/// Granite puts what follows its reasoning between tags.
#[test]
fn tags_around_a_response_of_granite_are_no_text() {
    let vocabulary = ControlNames {
        names: Vec::new(),
        template: Some("<|tool_call|> <think> <response>".to_owned()),
    };
    let settings = settings(OutputParsers::default(), &vocabulary);
    for (text, expect) in [
        (
            "<think>hm</think><response>So.</response>",
            &["r:hm", "t:So."][..],
        ),
        (
            "<think>hm</think>\n<response>So.</response>\n",
            &["r:hm", "t:So."],
        ),
        // Everywhere else they are what the model wrote.
        (
            "<think>hm</think><response>a</response>b</response>",
            &["r:hm", "t:a</response>b"],
        ),
        (
            "<think>hm</think>The <response> tag</response>",
            &["r:hm", "t:The <response> tag</response>"],
        ),
        ("<response>x</response>", &["t:<response>x</response>"]),
        ("<think>hm</think><respons", &["r:hm", "t:<respons"]),
    ] {
        assert_eq!(parse(&settings, text), expect, "{text}");
    }
}

/// The words of a header that `max_tokens` cuts off are no answer.
#[test]
fn a_header_of_harmony_that_is_cut_off_is_no_text() {
    let harmony = bare(ToolParser::Harmony);
    for text in [
        "<|channel|>final",
        "<|channel|>commentary to=functions.add",
        "<|channel|>analysis<|mess",
        "<|start|>assistant<|channel|>fi",
    ] {
        assert!(parse(&harmony, text).is_empty(), "{text}");
    }
    let mut settings = harmony;
    settings.continue_prompt("<|start|>assistant");
    assert_eq!(
        parse(&settings, "to"),
        ["t:to"],
        "without a marker it is none"
    );
}

/// The built-in tools of gpt-oss are called on the channel of its reasoning; only a call of a function is a call there.
#[test]
fn calls_of_tools_that_harmony_has_built_in_are_reasoning() {
    let harmony = bare(ToolParser::Harmony);
    for (header, content, expect) in [
        ("analysis to=python code", "print(1)", "r:print(1)"),
        (
            "analysis to=browser.search",
            "{\"query\": \"a\"}",
            "r:{\"query\": \"a\"}",
        ),
        ("analysis to=functions.add", "{}", "c:add{}"),
        ("analysis to=add", "{}", "c:add{}"),
        ("commentary to=add", "{}", "c:add{}"),
        ("final to=user", "Hi", "t:Hi"),
    ] {
        let text = format!("<|channel|>{header}<|message|>{content}<|end|>");
        assert_eq!(parse(&harmony, &text), [expect], "{header}");
    }
}

/// An answer in JSON comes as soon as it can be no call.
#[test]
fn an_answer_of_llama_in_json_is_not_held_back() {
    let shown = |text: &str| {
        let mut parser = OutputParser::new(bare(ToolParser::Llama3));
        let mut shown = String::new();
        parser.push(Text::from(text), &mut |part| match part {
            OutputPart::Text(text) => shown.push_str(&text),
            part => panic!("{part:?}"),
        });
        shown
    };
    for text in [
        "{\"answer\": 42",
        "{\"an",
        "{\"name\": \"Ada",
        "{\"name\": 5",
        "{\"name\": {\"first\"",
        "{\"type\": \"object\", \"pro",
        "{\"parameters\": {}, \"x",
    ] {
        assert_eq!(shown(text), text);
    }
    let long = format!("{{\"type\": \"{}", "x".repeat(2_000));
    assert_eq!(shown(&long), long);
    for text in [
        "{\"",
        "{\"n",
        "{\"name\": \"ad",
        "{\"type\": \"function\", \"id\": \"1\", \"name\": \"add\", \"title\": 1",
    ] {
        assert_eq!(shown(text), "", "{text} may be a call");
    }
    // What follows the name of a declared tool is as free as it was.
    let text = "{\"name\": \"add\", \"why\": 1, \"parameters\": {}}";
    assert_eq!(parse(&bare(ToolParser::Llama3), text), ["c:add{}"]);
}

/// The words of the templates that vLLM has for Llama 3.2 and 4, whose calls are lists of Python without a marker.
/// Llama 4's own template writes earlier calls so.
#[test]
fn nothing_between_the_marks_of_python_is_no_call_and_json_follows() {
    let vocabulary = ControlNames {
        names: vec!["<|python_start|>", "<|python_end|>"],
        template: Some("<|header_start|>{\"name\": function name, \"parameters\": {}}".to_owned()),
    };
    // The engine writes no names of tokens that are no markers, so the output begins with the call.
    let format = OutputFormat::new(OutputParsers::default(), &vocabulary);
    assert!(format.tokens().is_empty());
    let json = "{\"name\": \"add\", \"parameters\": {\"a\": 1}}";
    let settings = settings(OutputParsers::default(), &vocabulary);
    assert_eq!(parse(&settings, json), ["c:add{\"a\":1}"]);
}

#[test]
fn llama_writes_python_where_its_template_asks_for_it() {
    let python = |begin: &str| {
        let vocabulary = ControlNames {
            names: vec!["<|python_start|>", "<|python_end|>"],
            template: Some(format!(
                "{begin}Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)] "
            )),
        };
        settings(OutputParsers::default(), &vocabulary)
    };
    let token = |name: &str| format!("{MARK_OPEN}{name}{MARK_CLOSE}");
    let (start, end) = (token("<|python_start|>"), token("<|python_end|>"));
    for begin in ["<|start_header_id|>", "<|header_start|>"] {
        for (text, expect) in [
            (
                "[add(a=1, b=-2), note(text=\"it's\", tags=['x', True])]".to_owned(),
                vec![
                    "c:add{\"a\":1,\"b\":-2}",
                    "c:note{\"text\":\"it's\",\"tags\":[\"x\",true]}",
                ],
            ),
            ("\n[ add() ]\n".to_owned(), vec!["c:add{}"]),
            (format!("{start}[add(a=1)]{end}"), vec!["c:add{\"a\":1}"]),
            (
                "[add(a=1)]\nDone.".to_owned(),
                vec!["c:add{\"a\":1}", "t:Done."],
            ),
            (
                "{\"name\": \"add\", \"parameters\": {}}".to_owned(),
                vec!["c:add{}"],
            ),
            // Answers that are lists, and other functions.
            ("[1, 2]".to_owned(), vec!["t:[1, 2]"]),
            ("[]".to_owned(), vec!["t:[]"]),
            (
                "[{\"name\": \"add\", \"parameters\": {}}]".to_owned(),
                vec!["t:[{\"name\": \"add\", \"parameters\": {}}]"],
            ),
            ("[sum(a=1)]".to_owned(), vec!["t:[sum(a=1)]"]),
            ("[ad(a=1)]".to_owned(), vec!["t:[ad(a=1)]"]),
            ("[add] is it".to_owned(), vec!["t:[add] is it"]),
            ("So: [add(a=1)]".to_owned(), vec!["t:So: [add(a=1)]"]),
        ] {
            assert_eq!(parse(&python(begin), &text), expect, "{text}");
        }
    }
    let text = "[add(a=1)]";
    assert_eq!(
        parse(&bare(ToolParser::Llama3), text),
        [format!("t:{text}")]
    );
    let mut parser = OutputParser::new(python("<|header_start|>"));
    let mut shown = String::new();
    parser.push(Text::from_static("[ax"), &mut |part| match part {
        OutputPart::Text(text) => shown.push_str(&text),
        part => panic!("{part:?}"),
    });
    assert_eq!(shown, "[ax", "it can be no call");
}

/// MiniMax M3 writes the items of a list as it writes a member of this name; the schema tells which it is.
#[test]
fn an_object_with_a_member_named_item_is_no_list() {
    let mut minimax = bare(ToolParser::MinimaxM3);
    let parameters = serde_json::json!({"properties": {
        "order": {"type": "object", "properties": {"item": {"type": "string"}}},
        "orders": {"type": "array", "items": {"type": "object", "properties": {"item": {"type": "string"}}}},
        "any": {},
    }});
    let tools = serde_json::json!([{"function": {"name": "buy", "parameters": parameters}}]);
    minimax.tools = Some(Arc::new(DeclaredTools::of(&tools)));
    let tag = |key: &str, value: &str| format!("]<]minimax[>[<{key}>{value}]<]minimax[>[</{key}>");
    let item = tag("item", "5");
    for (arguments, expect) in [
        (tag("order", &item), "{\"order\":{\"item\":\"5\"}}"),
        (
            tag("orders", &tag("item", &item)),
            "{\"orders\":[{\"item\":\"5\"}]}",
        ),
        (tag("any", &item), "{\"any\":[5]}"),
        (tag("other", &item), "{\"other\":[5]}"),
        (tag("order", ""), "{\"order\":{}}"),
        (tag("orders", ""), "{\"orders\":[]}"),
    ] {
        let begin = "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"buy\">";
        let text = format!("{begin}{arguments}]<]minimax[>[</invoke>]<]minimax[>[</tool_call>");
        assert_eq!(parse(&minimax, &text), [format!("c:buy{expect}")], "{text}");
    }
}
