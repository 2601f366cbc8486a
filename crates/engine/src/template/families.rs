//! Templates of the published shape of each family that calls tools, short and written for these tests: what they get of
//! tools, calls, results and reasoning. [`super::published`] has the published ones.

use std::time::UNIX_EPOCH;

use serde_json::json;

use super::*;

/// Renders a conversation with a call, its result and reasoning. The arguments are texts, as on the wire.
fn rendered(source: &str) -> String {
    let template = Template::new(source, &SpecialTexts::default(), || UNIX_EPOCH).unwrap();
    let message = |role: &str, content: &str| ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..ChatMessage::default()
    };
    let function = json!({"name": "add", "arguments": "{\"a\": 1, \"b\": \"two\"}"});
    let chat = ChatRequest {
        messages: vec![
            message("user", "Sum?"),
            ChatMessage {
                tool_calls: json!([{"id": "abc123def", "type": "function", "function": function}]),
                reasoning: Some("I add.".to_owned()),
                ..message("assistant", "")
            },
            ChatMessage {
                name: Some("add".to_owned()),
                tool_call_id: Some("abc123def".to_owned()),
                ..message("tool", "3")
            },
        ],
        tools: json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]),
        ..ChatRequest::default()
    };
    let pieces = template.render(&chat).unwrap();
    let text = pieces.iter();
    text.map(|(TemplatePiece::Template(text) | TemplatePiece::Plain(text))| text.as_str())
        .collect()
}

/// Whether each of these occurs, in this order.
fn check(source: &str, parts: &[&str]) {
    let text = rendered(source);
    let mut rest = &text[..];
    for part in parts {
        let Some(at) = rest.find(part) else {
            panic!("{part:?} is missing, or too early, in {text:?}");
        };
        rest = &rest[at + part.len()..];
    }
}

/// ChatML with Hermes' calls, and Qwen 3's reasoning.
#[test]
fn hermes() {
    let source = "{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '</tools>' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content is string %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{% if call.function %}{% set call = call.function %}{% endif %}
{{- '<tool_call>\\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}
{%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}";
    check(
        source,
        &[
            "<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"add\"",
            "<think>\nI add.\n</think>\n\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": \"two\"}}\n</tool_call>",
            "<|im_start|>tool\n3<|im_end|>",
        ],
    );
}

#[test]
fn llama_3() {
    let source = "{%- for m in messages %}{% if 'tool_calls' in m %}
{%- if not m.tool_calls | length == 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{{ '<|eot|>{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}
{%- elif m.role == 'tool' %}{{ '<|ipython|>' + (m.content | tojson if m.content is mapping else m.content) }}
{%- else %}{{ m.content | trim }}{% endif %}{% endfor %}";
    let expect = "{\"name\": \"add\", \"parameters\": {\"a\": 1, \"b\": \"two\"}}";
    check(source, &["Sum?", expect, "<|ipython|>3"]);
}

/// It prints the whole call, and checks the id.
#[test]
fn mistral() {
    let source = "{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- for m in messages %}{% if m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}
{%- if call.id is undefined or call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{{ ']' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]{\"content\": ' + (m.content | string) + ', \"call_id\": \"' + m.tool_call_id + '\"}' }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}";
    check(
        source,
        &[
            "[AVAILABLE_TOOLS][{",
            "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": \"two\"}, \"id\": \"abc123def\"}]",
            "[TOOL_RESULTS]{\"content\": 3, \"call_id\": \"abc123def\"}",
        ],
    );
}

/// It has a name of its own for reasoning.
#[test]
fn harmony() {
    let source = "{%- for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('one of the two') }}{% endif %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{%- set call = m.tool_calls[0] %}{% if call.function %}{% set call = call.function %}{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}{{ call.arguments | tojson }}{{ '<|call|>' }}
{%- set called = call.name %}{% elif m.role == 'tool' %}{{ '<|start|>functions.' + m.name + ' to=assistant<|message|>' }}{{ m.content | tojson }}{{ '<|end|>' }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}{{ '<|start|>assistant' }}";
    check(
        source,
        &[
            "<|channel|>analysis<|message|>I add.<|end|>",
            "to=functions.add<|channel|>commentary json<|message|>{\"a\": 1, \"b\": \"two\"}<|call|>",
            "<|start|>functions.add to=assistant<|message|>\"3\"<|end|><|start|>assistant",
        ],
    );
}

/// It refuses a message with content, calls and `thinking`; the answers of Sapwood may have all three.
#[test]
fn harmony_with_content_and_reasoning() {
    let source = "{%- for m in messages %}{% if 'tool_calls' in m and m.content and m.thinking %}{{ raise_exception('one of the two') }}{% endif %}
{{- m.thinking or m.content }}|{% endfor %}";
    let template = Template::new(source, &SpecialTexts::default(), || UNIX_EPOCH).unwrap();
    let function = json!({"name": "add", "arguments": "{}"});
    let calls = json!([{"id": "abc123def", "type": "function", "function": function}]);
    let render = |content: &str, tool_calls: &serde_json::Value| {
        let message = ChatMessage {
            role: "assistant".to_owned(),
            content: content.to_owned(),
            reasoning: Some("I add.".to_owned()),
            tool_calls: tool_calls.clone(),
            ..ChatMessage::default()
        };
        let chat = ChatRequest {
            messages: vec![message],
            ..ChatRequest::default()
        };
        let pieces = template.render(&chat).unwrap();
        let text = pieces.iter();
        text.map(|(TemplatePiece::Template(text) | TemplatePiece::Plain(text))| text.as_str())
            .collect::<String>()
    };
    assert_eq!(render("Let me see.", &calls), "Let me see.|");
    assert_eq!(render("", &calls), "I add.|");
    assert_eq!(render("Three.", &serde_json::Value::Null), "I add.|");
}

/// A caller that left while the form of arguments was found out leaves nothing behind.
#[test]
fn an_abandoned_trial_decides_nothing() {
    let source = "{%- for m in messages %}{% for call in m.tool_calls or [] %}{{ '<' + call.function.arguments + '>' }}{% endfor %}{% endfor %}";
    let template = Template::new(source, &SpecialTexts::default(), || UNIX_EPOCH).unwrap();
    let stopped = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let found = stop::with(&stopped, || template.arguments());
    assert_eq!(found, Err(TemplateError::TooLong));
    assert_eq!(template.arguments(), Ok(CallArguments::Texts));
}

/// It appends the arguments to a text, so they have to be one.
#[test]
fn deepseek() {
    let source = "{%- for m in messages %}{% if m.role == 'assistant' and m['tool_calls'] is defined %}
{%- for call in m['tool_calls'] %}{{ '<calls><call>' + call['type'] + '<sep>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```<end>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<output>' + m['content'] }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}";
    let expect = "<call>function<sep>add\n```json\n{\"a\": 1, \"b\": \"two\"}\n```<end>";
    check(source, &[expect, "<output>3"]);
}

/// Printed without a filter, an object would be Python's.
#[test]
fn a_template_that_prints_arguments_as_they_are() {
    let calls = "{%- for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}<{{ call.function.arguments }}>{% endfor %}{% endfor %}";
    check(calls, &["<{\"a\": 1, \"b\": \"two\"}>", "3"]);
    // The schema of a tool has the names of arguments as well.
    let tools = "{{ tools | tojson }}";
    check(
        &format!("{tools}{calls}"),
        &["<{\"a\": 1, \"b\": \"two\"}>", "3"],
    );
}

/// It prints the members of arguments in a syntax of its own, and takes a text as it is.
#[test]
fn gemma_4() {
    let source = "{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{%- for m in messages %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<call:{{ call.function.name }}{
{%- if call.function.arguments is mapping %}{% for k, v in call.function.arguments | dictsort %}{{ k }}:{{ v }};{% endfor %}{% else %}{{ call.function.arguments }}{% endif %}}>{% endfor %}{% endfor %}";
    check(source, &["<call:add{a:1;b:two;}>", "3"]);
}

#[test]
fn kimi() {
    let source = "{%- for m in messages %}{% if m.role == 'assistant' and m.get('tool_calls') %}<|tool_calls_section_begin|>
{%- for call in m['tool_calls'] %}{% set args = call['function']['arguments'] %}<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{%- if args is string %}{{ args }}{% else %}{{ args | tojson }}{% endif %}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m['content'] }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}";
    check(
        source,
        &[
            "<|tool_call_begin|>abc123def<|tool_call_argument_begin|>{\"a\": 1, \"b\": \"two\"}<|tool_call_end|>",
            "## Return of abc123def\n3",
        ],
    );
}

/// Both iterate over the arguments.
#[test]
fn glm_and_qwen_coder() {
    let glm = "{%- for m in messages %}{% if m.reasoning_content is string %}<think>{{ m.reasoning_content.strip() }}</think>{% endif %}
{%- for call in m.tool_calls or [] %}{% set call = call.function %}{{ '\\n<tool_call>' + call.name }}
{%- for k, v in call.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endfor %}";
    check(
        glm,
        &[
            "<think>I add.</think>\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>two</arg_value></tool_call>",
        ],
    );
    let qwen = "{%- for m in messages %}{% for call in m.tool_calls or [] %}{% set call = call.function %}<function={{ call.name }}>
{%- if call.arguments is defined %}{% for name, value in call.arguments | items %}<parameter={{ name }}>{{ value | tojson | safe if value is mapping else value | string }}</parameter>{% endfor %}{% endif %}</function>{% endfor %}{% endfor %}";
    check(
        qwen,
        &["<function=add><parameter=a>1</parameter><parameter=b>two</parameter></function>"],
    );
}

/// They print the list of calls, or each call, with `tojson`.
#[test]
fn granite_and_phi() {
    let granite = "{%- for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}
{%- if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}{{ m.content }}{% endfor %}";
    check(
        granite,
        &[
            "<|tool_call|>[{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": \"two\"}}]",
            "tool<|end_of_role|>3",
        ],
    );
    let phi = "{{- '<|tool|>' + (tools | tojson) + '<|/tool|>' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}
{%- if m.tool_calls %}{{ '<|tool_call|>' + (m.tool_calls | tojson) + '<|/tool_call|>' }}{% endif %}{% endfor %}";
    check(
        phi,
        &[
            "<|tool|>[{",
            "\"arguments\": {\"a\": 1, \"b\": \"two\"}",
            "<|/tool_call|>",
            "<|tool|>3",
        ],
    );
}
