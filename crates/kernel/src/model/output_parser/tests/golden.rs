//! Golden outputs of each family, written from the formats that their templates and model cards describe.

use super::*;

/// The parser, an output, and its events.
pub(super) const GOLDEN: &[(ToolParser, &str, &[&str])] = &[
    // Hermes, Qwen 2.5, Qwen 3.
    (
        ToolParser::Hermes,
        "<think>\nTwo sums.\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 3}}\n</tool_call>",
        &[
            "r:Two sums.",
            "t:Let me see.\n",
            "c:add{\"a\":1,\"b\":2}",
            "c:add{\"a\":3}",
        ],
    ),
    // The last bracket is missing.
    (
        ToolParser::Hermes,
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}\n</tool_call>\n<tool_call>{\"name\": \"add\", \"arguments\": {}</tool_call>Done",
        &["c:add{\"a\":1}", "c:add{}", "t:Done"],
    ),
    // Llama 3.1: JSON alone, or after the tag; several with a semicolon.
    (
        ToolParser::Llama3,
        "{\"name\": \"add\", \"parameters\": {\"a\": 1}}",
        &["c:add{\"a\":1}"],
    ),
    (
        ToolParser::Llama3,
        "<|python_tag|>{\"name\": \"add\", \"parameters\": {\"a\": 1}}; {\"name\": \"note\", \"parameters\": {\"text\": \"; {\"}}",
        &["c:add{\"a\":1}", "c:note{\"text\":\"; {\"}"],
    ),
    (
        ToolParser::Llama3,
        "\n{\"type\": \"function\", \"name\": \"add\", \"parameters\": {}}",
        &["c:add{}"],
    ),
    // An answer in JSON is no call.
    (
        ToolParser::Llama3,
        "{\"name\": \"Ada\", \"parameters\": {}}",
        &["t:{\"name\": \"Ada\", \"parameters\": {}}"],
    ),
    (
        ToolParser::Llama3,
        "{\"name\": \"add\"} is a tool",
        &["t:{\"name\": \"add\"} is a tool"],
    ),
    (
        ToolParser::Llama3,
        "Use {\"name\": \"add\", \"parameters\": {}}",
        &["t:Use {\"name\": \"add\", \"parameters\": {}}"],
    ),
    // Mistral: a list, then a marker for each call, then ids.
    (
        ToolParser::Mistral,
        "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {\"a\": 1}, \"id\": \"VvvODy9mT\"}, {\"name\": \"note\", \"arguments\": {\"text\": \"]\"}}]",
        &["c:add{\"a\":1}", "c:note{\"text\":\"]\"}"],
    ),
    (
        ToolParser::Mistral,
        "[THINK]hm[/THINK]Adding.[TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]note[CALL_ID]123456789[ARGS]{\"text\": \"[ARGS]\"}",
        &[
            "r:hm",
            "t:Adding.",
            "c:add{\"a\":1}",
            "c:note#123456789{\"text\":\"[ARGS]\"}",
        ],
    ),
    (
        ToolParser::Mistral,
        "[TOOL_CALLS]add{\"a\": 1}",
        &["c:add{\"a\":1}"],
    ),
    (
        ToolParser::Mistral,
        "[TOOL_CALLS] {\"name\": \"add\", \"arguments\": {\"a\": 1}}",
        &["c:add{\"a\":1}"],
    ),
    (
        ToolParser::Mistral,
        "[TOOL_CALLS] is a marker",
        &["t:[TOOL_CALLS] is a marker"],
    ),
    // Harmony.
    (
        ToolParser::Harmony,
        "<|channel|>analysis<|message|>Need a sum.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        &["r:Need a sum.", "t:I add.", "c:add{\"a\":1}"],
    ),
    (
        ToolParser::Harmony,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{\"a\": 1}",
        &["r:hm", "c:add{\"a\":1}"],
    ),
    (
        ToolParser::Harmony,
        "<|channel|>final<|message|>It is 3.\n<|return|>",
        &["t:It is 3.\n"],
    ),
    (
        ToolParser::Harmony,
        "<|channel|>commentary to=functions.add<|message|>add(1)<|end|>",
        &["t:<|channel|>commentary to=functions.add<|message|>add(1)"],
    ),
    // Not in the format at all.
    (ToolParser::Harmony, "Hello <b>", &["t:Hello <b>"]),
    // DeepSeek R1 and V3: the arguments are fenced.
    (
        ToolParser::Deepseek,
        "<think>\nhm\n</think>\n\nAdding.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n{\"text\": \"```\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &[
            "r:hm",
            "t:Adding.",
            "c:add{\"a\":1}",
            "c:note{\"text\":\"```\"}",
        ],
    ),
    // V3.1: they are not.
    (
        ToolParser::Deepseek,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &["c:add{\"a\":1}", "c:add{}"],
    ),
    (
        ToolParser::Deepseek,
        "<｜tool▁calls▁begin｜>none",
        &["t:<｜tool▁calls▁begin｜>none"],
    ),
    // Kimi K2: the name is the id.
    (
        ToolParser::Kimi,
        "Adding.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|tool_call_begin|>functions.note:1<|tool_call_argument_begin|>{\"text\": \"<|tool_call_end|>\"}<|tool_call_end|><|tool_calls_section_end|>",
        &[
            "t:Adding.",
            "c:add#functions.add:0{\"a\":1}",
            "c:note#functions.note:1{\"text\":\"<|tool_call_end|>\"}",
        ],
    ),
    (
        ToolParser::Kimi,
        "<|tool_call_begin|> functions.add:0 <|tool_call_argument_begin|> {\"a\": 1} <|tool_call_end|>",
        &["c:add#functions.add:0{\"a\":1}"],
    ),
    // GLM 4.5: values without quotes, typed by the schema.
    (
        ToolParser::Glm,
        "<think>hm</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>note\n<arg_key>tags</arg_key>\n<arg_value>[\"x\"]</arg_value>\n<arg_key>text</arg_key>\n<arg_value>12 </arg_value>\n</tool_call>",
        &[
            "r:hm",
            "c:add{\"a\":1,\"b\":2}",
            "c:note{\"tags\":[\"x\"],\"text\":\"12 \"}",
        ],
    ),
    (
        ToolParser::Glm,
        "<tool_call>add</tool_call><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        &["c:add{}", "c:add{\"a\":1}"],
    ),
    (
        ToolParser::Glm,
        "the <tool_call> tag",
        &["t:the <tool_call> tag"],
    ),
    // The first call lacks its end.
    (
        ToolParser::Glm,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<tool_call>add\n<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        &["c:add{\"a\":1}", "c:add{}", "c:note{\"text\":\"x\"}"],
    ),
    (
        ToolParser::Glm,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<tool_call>sum of",
        &["c:add{\"a\":1}", "t:<tool_call>sum of"],
    ),
    // A name alone is no call, and does not hide the next one.
    (
        ToolParser::Glm,
        "the <tool_call><tool_call>add<tool_call>add</tool_call>",
        &["t:the <tool_call><tool_call>add", "c:add{}"],
    ),
    // Qwen3-Coder, also without the outer tag.
    (
        ToolParser::Qwen3Coder,
        "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=note>\n<parameter=text>\n1 < 2\n\"a\"\n</parameter>\n</function>\n</tool_call>",
        &[
            "t:I add.\n",
            "c:add{\"a\":1,\"b\":2}",
            "c:note{\"text\":\"1 < 2\\n\\\"a\\\"\"}",
        ],
    ),
    (
        ToolParser::Qwen3Coder,
        "<function=add>\n<parameter=a>1</parameter>\n</function>",
        &["c:add{\"a\":1}"],
    ),
    (
        ToolParser::Qwen3Coder,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</tool_call>\n<tool_call>\n<function=add>\n<function=note>\n</function>\n</tool_call>\nDone",
        &[
            "c:add{\"a\":1}",
            "c:add{\"a\":2}",
            "c:add{}",
            "c:note{}",
            "t:Done",
        ],
    ),
    // Granite 3.
    (
        ToolParser::Granite,
        "<think>hm</think><|tool_call|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"add\", \"arguments\": {}}]",
        &["r:hm", "c:add{\"a\":1}", "c:add{}"],
    ),
    (
        ToolParser::Granite,
        "<tool_call>[{\"name\": \"add\", \"arguments\": {}}]\nDone",
        &["c:add{}", "t:Done"],
    ),
    // Phi-4-mini, and Phi's older form.
    (
        ToolParser::Phi4,
        "<|tool_call|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}]<|/tool_call|>",
        &["c:add{\"a\":1}"],
    ),
    (
        ToolParser::Phi4,
        "functools[{\"name\": \"add\", \"arguments\": {\"a\": 1}}]",
        &["c:add{\"a\":1}"],
    ),
    (
        ToolParser::Phi4,
        "functools[0] is no call",
        &["t:functools[0] is no call"],
    ),
    // Gemma 4: texts between markers, and everything else as it is.
    (
        ToolParser::Gemma,
        "<|channel>thought\nTwo notes.\n<channel|>Noting.<|tool_call>call:note{tags:[<|\"|>a<|\"|>,<|\"|>b, c<|\"|>],text:<|\"|>It's {\"x\": 1}\n\"<tool_call|>\"<|\"|>}<tool_call|><|tool_call>call:add{a:1,b:-2}<tool_call|>",
        &[
            "r:Two notes.",
            "t:Noting.",
            "c:note{\"tags\":[\"a\",\"b, c\"],\"text\":\"It's {\\\"x\\\": 1}\\n\\\"<tool_call|>\\\"\"}",
            "c:add{\"a\":1,\"b\":-2}",
        ],
    ),
    (
        ToolParser::Gemma,
        "<|tool_call>call:note{text:None,tags:{lat:67.28,deep:[true,[]]}}\nDone",
        &[
            "c:note{\"text\":null,\"tags\":{\"lat\":67.28,\"deep\":[true,[]]}}",
            "t:Done",
        ],
    ),
    (
        ToolParser::Gemma,
        "<|tool_call>call:add{a:<|\"|>1",
        &["b:<|tool_call>call:add{a:<|\"|>1"],
    ),
    (
        ToolParser::Gemma,
        "the <|tool_call> marker",
        &["t:the <|tool_call> marker"],
    ),
    // FunctionGemma.
    (
        ToolParser::Gemma,
        "<start_function_call>call:note{text:<escape>a \"b\"<escape>}<end_function_call><start_function_call>call:add{}<end_function_call>",
        &["c:note{\"text\":\"a \\\"b\\\"\"}", "c:add{}"],
    ),
    // LFM2: calls of Python, or objects where a prompt asks for them.
    (
        ToolParser::Lfm2,
        "<|tool_call_start|>[add(a=1, b=-2), note(text='it\\'s \"x\"\\n', tags=[\"a\", 'b)', True, None])]<|tool_call_end|>Done.",
        &[
            "c:add{\"a\":1,\"b\":-2}",
            "c:note{\"text\":\"it's \\\"x\\\"\\n\",\"tags\":[\"a\",\"b)\",true,null]}",
            "t:Done.",
        ],
    ),
    (
        ToolParser::Lfm2,
        "<think>hm</think>Adding.<|tool_call_start|>[add()]",
        &["r:hm", "t:Adding.", "c:add{}"],
    ),
    (
        ToolParser::Lfm2,
        "<|tool_call_start|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}]<|tool_call_end|>",
        &["c:add{\"a\":1}"],
    ),
    (
        ToolParser::Lfm2,
        "<|tool_call_start|>note(text='it's so')<|tool_call_end|>",
        &["c:note{\"text\":\"it's so\"}"],
    ),
    (
        ToolParser::Lfm2,
        "<|tool_call_start|>[add(a=1), and so on",
        &["c:add{\"a\":1}", "t:, and so on"],
    ),
    (
        ToolParser::Lfm2,
        "<|tool_call_start|>[add(a=b)]",
        &["b:<|tool_call_start|>[add(a=b", "t:)]"],
    ),
    (
        ToolParser::Lfm2,
        "<|tool_call_start|>[add(a=1_000), note(text=\"\"\"two\nlines \\U0001F600\"\"\")]<|tool_call_end|>",
        &["c:add{\"a\":1000}", "c:note{\"text\":\"two\\nlines 😀\"}"],
    ),
    // DeepSeek V3.2 and V4: the type of a value is written beside its key.
    (
        ToolParser::DeepseekV32,
        "hm\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"note\">\n<｜DSML｜parameter name=\"text\" string=\"true\">12</｜DSML｜parameter>\n<｜DSML｜parameter name=\"tags\" string=\"false\">[\"a\"]</｜DSML｜parameter>\n<｜DSML｜parameter name=\"new\" string=\"true\">\n{}\n</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"add\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        &[
            "t:hm\n\n",
            "c:note{\"text\":\"12\",\"tags\":[\"a\"],\"new\":\"\\n{}\\n\"}",
            "c:add{}",
        ],
    ),
    (
        ToolParser::DeepseekV32,
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"add\">\n<｜DSML｜parameter name=\"a\" string=\"false\">1</｜DSML｜parameter>\n<｜DSML｜parameter name=\"b\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        &["c:add{\"a\":1,\"b\":2}"],
    ),
    (
        ToolParser::DeepseekV32,
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"add\">\n<｜DSML｜parameter name=\"a\" string=\"false\">1",
        &[
            "b:<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"add\">\n<｜DSML｜parameter name=\"a\" string=\"false\">1",
        ],
    ),
    (
        ToolParser::DeepseekV32,
        "<｜DSML｜function_calls>none",
        &["t:<｜DSML｜function_calls>none"],
    ),
    // Nemotron Nano 2.
    (
        ToolParser::Nemotron,
        "<think>hm</think>\n<TOOLCALL>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"add\", \"arguments\": {}}]</TOOLCALL>",
        &["r:hm", "c:add{\"a\":1}", "c:add{}"],
    ),
    (
        ToolParser::Nemotron,
        "the <TOOLCALL> tag",
        &["t:the <TOOLCALL> tag"],
    ),
    // Command A and R7B.
    (
        ToolParser::Cohere,
        "<|START_THINKING|>I add.<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"add\", \"parameters\": {\"a\": 1}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"add\", \"parameters\": {}}\n]<|END_ACTION|>",
        &["r:I add.", "c:add{\"a\":1}", "c:add{}"],
    ),
    // Command R.
    (
        ToolParser::Cohere,
        "Adding.\nAction:\n```json\n[\n    {\n        \"tool_name\": \"add\",\n        \"parameters\": {\"a\": 1}\n    }\n]```\nDone",
        &["t:Adding.\n", "c:add{\"a\":1}", "t:Done"],
    ),
    (
        ToolParser::Cohere,
        "Action: ```json [{\"tool_name\": \"add\"}]```",
        &["c:add{}"],
    ),
    (ToolParser::Cohere, "Action: none", &["t:Action: none"]),
    // MiniMax M2.
    (
        ToolParser::MinimaxM2,
        "<think>\nhm\n</think>\n\n<minimax:tool_call>\n<invoke name=\"note\">\n<parameter name=\"text\">12 < 13</parameter>\n<parameter name=\"tags\">[\"a\"]</parameter>\n</invoke>\n<invoke name=\"add\">\n</invoke>\n</minimax:tool_call>\nDone",
        &[
            "r:hm",
            "c:note{\"text\":\"12 < 13\",\"tags\":[\"a\"]}",
            "c:add{}",
            "t:Done",
        ],
    ),
    (
        ToolParser::MinimaxM2,
        "<minimax:tool_call>\n<invoke name=\"a b\">",
        &["t:<minimax:tool_call>\n<invoke name=\"a b\">"],
    ),
    // Kimi K3: tags of three tokens, around the answer too.
    (
        ToolParser::KimiK3,
        "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Noting.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"note\" index=\"1\"<|sep|><|open|>argument key=\"text\" type=\"string\"<|sep|>12<|close|>argument<|sep|><|open|>argument key=\"a &amp; &quot;b&quot;\" type=\"array\"<|sep|>[1, true]<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool=\"add\" index=\"2\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        &[
            "r:hm",
            "t:Noting.",
            "c:note{\"text\":\"12\",\"a & \\\"b\\\"\":[1,true]}",
            "c:add{}",
        ],
    ),
    // Its arguments may be one object.
    (
        ToolParser::KimiK3,
        "<|open|>tools<|sep|><|open|>call tool=\"note\" index=\"1\"<|sep|><|open|>json type=\"object\"<|sep|>\n{\"text\": \"a }\", \"tags\": [{}]}\n<|close|>json<|sep|><|close|>call<|sep|><|open|>call tool=\"add\" index=\"2\"<|sep|><|open|>argument key=\"a\" type=\"number\"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        &["c:note{\"text\":\"a }\",\"tags\":[{}]}", "c:add{\"a\":1}"],
    ),
    (
        ToolParser::KimiK3,
        "<|open|>tools<|sep|><|open|>call tool=\"add\" index=\"1\"<|sep|><|open|>json type=\"object\"<|sep|>{}<|close|>json<|sep|>x",
        &[
            "b:<|open|>tools<|sep|><|open|>call tool=\"add\" index=\"1\"<|sep|><|open|>json type=\"object\"<|sep|>{}<|close|>json<|sep|>",
            "t:x",
        ],
    ),
    (
        ToolParser::KimiK3,
        "<|open|>tools<|sep|><|open|>call tool=\"add\" index=\"1\"<|sep|><|open|>json type=\"object\"<|sep|>[1]",
        &[
            "b:<|open|>tools<|sep|><|open|>call tool=\"add\" index=\"1\"<|sep|><|open|>json type=\"object\"<|sep|>",
            "t:[1]",
        ],
    ),
    // The end of the reasoning is missing.
    (
        ToolParser::KimiK3,
        "<|open|>think<|sep|>hm<|open|>response<|sep|>Noting.<|close|>response<|sep|><|close|>message<|sep|>",
        &["r:hm", "t:Noting."],
    ),
    (
        ToolParser::KimiK3,
        "<|open|>response<|sep|>No <|open|> tag.",
        &["t:No <|open|> tag."],
    ),
    // Jamba and Apriel: a list; MiniMax M1: an object on each line.
    (
        ToolParser::Jamba,
        "Adding.\n<tool_calls>[{\"name\": \"add\", \"arguments\": {\"a\": 1}, \"id\": \"abc\"}, {\"name\": \"add\", \"arguments\": {}}]</tool_calls>",
        &["t:Adding.\n", "c:add{\"a\":1}", "c:add{}"],
    ),
    (
        ToolParser::Jamba,
        "<think>hm</think><tool_calls>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n{\"name\": \"add\", \"arguments\": {}}\n</tool_calls>",
        &["r:hm", "c:add{\"a\":1}", "c:add{}"],
    ),
    // Hy3.
    (
        ToolParser::HyV3,
        "<think:opensource>hm</think:opensource>Noting.<tool_calls:opensource>\n<tool_call:opensource>note<tool_sep:opensource>\n<arg_key:opensource>text</arg_key:opensource>\n<arg_value:opensource>12</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>add<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        &["r:hm", "t:Noting.", "c:note{\"text\":\"12\"}", "c:add{}"],
    ),
    // Apertus: the key of the arguments is the name.
    (
        ToolParser::Apertus,
        "Adding.<|tools_prefix|>[{\"add\": {\"a\": 1}}, {\"add\": {}}]<|tools_suffix|>",
        &["t:Adding.", "c:add{\"a\":1}", "c:add{}"],
    ),
    (
        ToolParser::Apertus,
        "<|tools_prefix|>[{\"add\": {}, \"note\": {}}]",
        &["b:<|tools_prefix|>[{\"add\": {}, \"note\": ", "t:{}}]"],
    ),
    (
        ToolParser::Apertus,
        "<|tools_prefix|>[{\"name of none\": {}}]",
        &["t:<|tools_prefix|>[{\"name of none\": {}}]"],
    ),
    // MiniCPM 5: some values are quoted as in XML.
    (
        ToolParser::Minicpm5,
        "<function name=\"note\"><param name=\"text\"><![CDATA[a < b\n\"</param>\"]]></param><param name=\"tags\">[\"a\"]</param></function>\n<function name=\"add\"></function>",
        &[
            "c:note{\"text\":\"a < b\\n\\\"</param>\\\"\",\"tags\":[\"a\"]}",
            "c:add{}",
        ],
    ),
    (
        ToolParser::Minicpm5,
        "<function name=\"note\"><param name=\"text\">\n<![CDATA[a \"</param>\"]]>\n</param><param name=\"tags\">[]</param>\n<function name=\"add\"></function>",
        &[
            "c:note{\"text\":\"a \\\"</param>\\\"\",\"tags\":[]}",
            "c:add{}",
        ],
    ),
    (
        ToolParser::Minicpm5,
        "the <function name=\"add\"> tag",
        &["t:the ", "b:<function name=\"add\"> ", "t:tag"],
    ),
    // GigaChat 3: a call is a message of a role of its own.
    (
        ToolParser::Gigachat3,
        "function call<|role_sep|>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}<|message_sep|>\n\n",
        &["c:add{\"a\":1}"],
    ),
    (
        ToolParser::Gigachat3,
        "Adding.<|function_call|>{\"name\": \"add\", \"arguments\": {\"a\": 1}}<|message_sep|>",
        &["t:Adding.", "c:add{\"a\":1}"],
    ),
    (
        ToolParser::Gigachat3,
        "A function call is an expression.",
        &["t:A function call is an expression."],
    ),
    // Solar Open: an id before each name, and messages as those of gpt-oss.
    (
        ToolParser::SolarOpen,
        "<|think|>hm<|end|><|begin|>assistant<|content|>Adding.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>b462b4f8<|tool_call:name|>add<|tool_call:args|>{\"a\": 1}<|tool_call:end|><|tool_call:begin|>b462b4f9<|tool_call:name|>add<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        &["r:hm", "t:Adding.", "c:add{\"a\":1}", "c:add{}"],
    ),
    (
        ToolParser::SolarOpen,
        "<|content|>Done.<|flush|>",
        &["t:Done."],
    ),
    // MiniMax M3: values of values are tags again.
    (
        ToolParser::MinimaxM3,
        "<mm:think>hm</mm:think>Noting.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"note\">]<]minimax[>[<text>12 < 13 </b>]<]minimax[>[</text>]<]minimax[>[<tags>]<]minimax[>[<item>a]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<lat>1.5]<]minimax[>[</lat>]<]minimax[>[<far>true]<]minimax[>[</far>]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name=\"add\">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        &[
            "r:hm",
            "t:Noting.",
            "c:note{\"text\":\"12 < 13 </b>\",\"tags\":[\"a\",{\"lat\":1.5,\"far\":true}]}",
            "c:add{}",
        ],
    ),
    // The ends of both calls are missing.
    (
        ToolParser::MinimaxM3,
        "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"add\">]<]minimax[>[<a>1]<]minimax[>[</a>\n]<]minimax[>[<invoke name=\"add\">]<]minimax[>[</tool_call>Done",
        &["c:add{\"a\":1}", "c:add{}", "t:Done"],
    ),
    (
        ToolParser::MinimaxM3,
        "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"add\">]<]minimax[>[<a>1]<]minimax[>[</b>",
        &[
            "b:]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"add\">]<]minimax[>[<a>1]<]minimax[>[</b",
            "t:>",
        ],
    ),
];

#[test]
fn d_10_each_family_is_read() {
    for (parser, text, expect) in GOLDEN {
        assert_eq!(parse(&bare(*parser), text), *expect, "{parser:?} {text}");
    }
}

/// The same outputs with every marker as a control token.
#[test]
fn d_10_each_family_is_read_from_control_tokens() {
    for (parser, text, expect) in GOLDEN {
        let format = bare(*parser).format.unwrap();
        let vocabulary = ControlNames {
            names: format.texts.names().filter(fuzz::is_token).collect(),
            template: None,
        };
        let parsers = OutputParsers {
            tools: *parser,
            reasoning: reasoning_beside(*parser),
        };
        let marked = settings(parsers, &vocabulary);
        let mut written = (*text).to_owned();
        let mut shown: Vec<String> = expect.iter().map(|line| (*line).to_owned()).collect();
        for name in vocabulary.names {
            // An EOG token is not written, and those within arguments are ordinary text.
            if name != "<|call|>" {
                written = mark_outside_strings(&written, name);
            } else {
                written = written.replace(name, "");
            }
            for line in &mut shown {
                // Calls have such names in their arguments alone.
                if !line.starts_with("c:") {
                    *line = line.replace(name, "");
                }
            }
        }
        assert_eq!(parse(&marked, &written), shown, "{parser:?} {written}");
    }
}

/// Puts marks around a marker, unless it stands between quotes.
fn mark_outside_strings(text: &str, marker: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(marker) {
        out.push_str(&rest[..at]);
        let quoted = rest[..at].ends_with('"') && rest[at + marker.len()..].starts_with('"');
        let is_marked = rest[..at].ends_with(MARK_OPEN);
        if quoted || is_marked {
            out.push_str(marker);
        } else {
            out.push_str(&format!("{MARK_OPEN}{marker}{MARK_CLOSE}"));
        }
        rest = &rest[at + marker.len()..];
    }
    out + rest
}
