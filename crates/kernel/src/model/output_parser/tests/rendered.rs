//! Calls as templates render them: the parser that a template chooses finds the same calls again. The templates print
//! calls as the published ones of their families do, and nothing else; [`super::published`] has those themselves.

use std::time::UNIX_EPOCH;

use sapwood_engine::template::{SpecialTexts, Template, TemplatePiece};
use serde_json::{Value, json};

use super::*;

/// The parser that a template chooses, its literals, and how it prints the calls of a message.
const TEMPLATES: &[(ToolParser, &str, &str)] = &[
    (
        ToolParser::Gemma,
        GEMMA,
        r#"{% for call in calls %}{{ '<|tool_call>call:' + call.name }}{{ literal(call.arguments, '<|"|>') }}{{ '<tool_call|>' }}{% endfor %}"#,
    ),
    (
        ToolParser::Gemma,
        GEMMA,
        r#"{% for call in calls %}{{ '<start_function_call>call:' + call.name }}{{ literal(call.arguments, '<escape>') }}{{ '<end_function_call>' }}{% endfor %}"#,
    ),
    (
        ToolParser::Lfm2,
        LFM2,
        r#"{{ '<|tool_call_start|>[' }}{% for call in calls %}{{ call.name + '(' }}{% for key, value in call.arguments.items() %}{{ key + '=' }}{{ literal(value) }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ')' }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ']<|tool_call_end|>' }}"#,
    ),
    (
        ToolParser::DeepseekV32,
        "",
        r#"{{ '<｜DSML｜function_calls>' }}{% for call in calls %}{{ '\n<｜DSML｜invoke name="' + call.name + '">\n' }}{% for key, value in call.arguments.items() %}{{ '<｜DSML｜parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}{{ value if value is string else value | tojson }}{{ '</｜DSML｜parameter>\n' }}{% endfor %}{{ '</｜DSML｜invoke>' }}{% endfor %}{{ '\n</｜DSML｜function_calls>' }}"#,
    ),
    (
        ToolParser::DeepseekV32,
        "",
        r#"{{ '<｜DSML｜tool_calls>' }}{% for call in calls %}{{ '\n<｜DSML｜invoke name="' + call.name + '">\n' }}{% for key, value in call.arguments.items() %}{{ '<｜DSML｜parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}{{ value if value is string else value | tojson }}{{ '</｜DSML｜parameter>\n' }}{% endfor %}{{ '</｜DSML｜invoke>' }}{% endfor %}{{ '\n</｜DSML｜tool_calls>' }}"#,
    ),
    (
        ToolParser::Nemotron,
        "",
        r#"{{ '<TOOLCALL>[' }}{% for call in calls %}{{ '{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}' }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ']</TOOLCALL>' }}"#,
    ),
    (
        ToolParser::Cohere,
        "",
        r#"{{ '<|START_ACTION|>[' }}{% for call in calls %}{{ '\n    {"tool_call_id": "0", "tool_name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}{{ '' if loop.last else ',' }}{% endfor %}{{ '\n]<|END_ACTION|>' }}"#,
    ),
    (
        ToolParser::Cohere,
        "",
        r#"{{ 'Action:\n```json\n[' }}{% for call in calls %}{{ '\n    {\n        "tool_name": "' + call.name + '",\n        "parameters": ' }}{{ call.arguments | tojson(indent=4) | indent(8) }}{{ '\n    }' }}{{ '' if loop.last else ',' }}{% endfor %}{{ '\n]```\n' }}"#,
    ),
    (
        ToolParser::MinimaxM2,
        "",
        r#"{{ '<minimax:tool_call>\n' }}{% for call in calls %}{{ '<invoke name="' + call.name + '">\n' }}{% for key, value in call.arguments.items() %}{{ '<parameter name="' + key + '">' }}{{ value if value is string else value | tojson }}{{ '</parameter>\n' }}{% endfor %}{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}"#,
    ),
    (
        ToolParser::KimiK3,
        "",
        r#"{{ '<|open|>tools<|sep|>' }}{% for call in calls %}{{ '<|open|>call tool="' + call.name + '" index="1"<|sep|>' }}{% for key, value in call.arguments.items() %}{{ '<|open|>argument key="' + key + '" type="' + ('string' if value is string else 'object') + '"<|sep|>' }}{{ value if value is string else value | tojson }}{{ '<|close|>argument<|sep|>' }}{% endfor %}{{ '<|close|>call<|sep|>' }}{% endfor %}{{ '<|close|>tools<|sep|>' }}"#,
    ),
    (
        ToolParser::Jamba,
        "",
        r#"{{ '<tool_calls>[' }}{% for call in calls %}{{ '{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}' }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ']</tool_calls>' }}"#,
    ),
    (
        ToolParser::HyV3,
        "",
        r#"{{ '<tool_calls:opensource>\n' }}{% for call in calls %}{{ '<tool_call:opensource>' + call.name + '<tool_sep:opensource>\n' }}{% for key, value in call.arguments.items() %}{{ '<arg_key:opensource>' + key + '</arg_key:opensource>\n<arg_value:opensource>' }}{{ value if value is string else value | tojson }}{{ '</arg_value:opensource>\n' }}{% endfor %}{{ '</tool_call:opensource>\n' }}{% endfor %}{{ '</tool_calls:opensource>' }}"#,
    ),
    (
        ToolParser::Apertus,
        "",
        r#"{{ '<|tools_prefix|>[' }}{% for call in calls %}{{ '{"' + call.name + '": ' }}{{ call.arguments | tojson }}{{ '}' }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ']<|tools_suffix|>' }}"#,
    ),
    (
        ToolParser::Minicpm5,
        "",
        r#"{% for call in calls %}{{ '<function name="' + call.name + '">' }}{% for key, value in call.arguments.items() %}{{ '<param name="' + key + '">' }}{% if value is string %}{{ '<![CDATA[' + value + ']]>' }}{% else %}{{ value | tojson }}{% endif %}{{ '</param>' }}{% endfor %}{{ '</function>\n' }}{% endfor %}"#,
    ),
    (
        ToolParser::Gigachat3,
        "",
        r#"{% for call in calls %}{{ 'function call<|role_sep|>\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}<|message_sep|>\n\n' }}{% endfor %}"#,
    ),
    (
        ToolParser::SolarOpen,
        "",
        r#"{{ '<|tool_calls|>' }}{% for call in calls %}{{ '<|tool_call:begin|>abc<|tool_call:name|>' + call.name + '<|tool_call:args|>' }}{{ call.arguments | tojson }}{{ '<|tool_call:end|>' }}{% endfor %}{{ '<|calls|>' }}"#,
    ),
];

/// Objects with keys as they are, and texts between markers.
const GEMMA: &str = r#"{% macro literal(it, quote) %}
{%- if it is string %}{{ quote + it + quote }}
{%- elif it is boolean %}{{ 'true' if it else 'false' }}
{%- elif it is mapping %}{{ '{' }}{% for key, value in it | dictsort %}{{ key + ':' }}{{ literal(value, quote) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}
{%- elif it is sequence %}{{ '[' }}{% for value in it %}{{ literal(value, quote) }}{{ '' if loop.last else ',' }}{% endfor %}{{ ']' }}
{%- else %}{{ it }}{% endif %}{% endmacro %}"#;

/// Literals of Python, but for objects and lists.
const LFM2: &str = r#"{% macro literal(it) %}
{%- if it is string %}{{ "'" + (it | replace('\\', '\\\\') | replace("'", "\\'") | replace('\n', '\\n')) + "'" }}
{%- elif it is mapping or it is iterable %}{{ it | tojson }}
{%- else %}{{ it | string }}{% endif %}{% endmacro %}"#;

/// The arguments of one call, and of another one.
fn arguments() -> [Value; 2] {
    let text = "Bodø \"N\" <&>\n it's \\";
    [
        json!({"city": text, "days": 3, "share": 0.5, "rain": true, "wind": null,
            "at": {"lat": 67.28, "tags": ["a", "b"]}, "none": []}),
        json!({}),
    ]
}

#[test]
fn d_10_rendered_calls_are_found_again() {
    let calls = arguments().map(|arguments| {
        let function = json!({"name": "weather", "arguments": arguments.to_string()});
        json!({"id": "abc123def", "type": "function", "function": function})
    });
    let chat = ChatRequest {
        messages: vec![ChatMessage {
            role: "assistant".to_owned(),
            tool_calls: calls.into_iter().collect(),
            ..ChatMessage::default()
        }],
        ..ChatRequest::default()
    };
    let [full, empty] = arguments().map(|arguments| arguments.to_string());
    let expect = [format!("c:weather{full}"), format!("c:weather{empty}")];
    for (parser, literals, printed) in TEMPLATES {
        let source = format!(
            "{literals}{{%- for m in messages %}}{{% set calls = m.tool_calls | map(attribute='function') | list %}}{printed}{{% endfor %}}"
        );
        let template = Template::new(&source, &SpecialTexts::default(), || UNIX_EPOCH).unwrap();
        let pieces = template.render(&chat).unwrap();
        let text = pieces.iter();
        let text: String = text
            .map(|(TemplatePiece::Template(text) | TemplatePiece::Plain(text))| text.as_str())
            .collect();
        let chosen = OutputParsers::default().for_template(&source);
        assert_eq!(chosen.tools, *parser, "{source}");
        let vocabulary = ControlNames {
            template: Some(source),
            ..ControlNames::default()
        };
        let mut settings = settings(OutputParsers::default(), &vocabulary);
        settings.tools = Some(Arc::new(DeclaredTools::of(&json!([{"function": {
            "name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]))));
        let sorted = |line: &String| {
            let json = line.strip_prefix("c:weather")?;
            let read: Value = serde_json::from_str(json).ok()?;
            Some(read)
        };
        let found = parse(&settings, &text);
        let found: Vec<_> = found.iter().map(sorted).collect();
        let expect: Vec<_> = expect.iter().map(sorted).collect();
        assert_eq!(found, expect, "{text}");
    }
}
