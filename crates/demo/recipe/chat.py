"""The chat template: ChatML, in Jinja, as the GGUF carries it, and its rendering for training and evaluation."""

import json

from jinja2 import Environment

TEMPLATE = r"""{%- set ns = namespace(system='', rest=messages) -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set ns.system = messages[0].content -%}
{%- set ns.rest = messages[1:] -%}
{%- endif -%}
{%- if tools or ns.system -%}
{{- '<|im_start|>system\n' -}}
{{- ns.system -}}
{%- if tools -%}
{%- if ns.system -%}{{- '\n' -}}{%- endif -%}
{{- 'Tools:\n' -}}
{%- for tool in tools -%}
{%- set f = tool.function if tool.function else tool -%}
{%- set p = f.parameters.properties if f.parameters and f.parameters.properties else {} -%}
{{- '{"name": "' + f.name + '", ' -}}
{%- if f.description -%}{{- '"description": ' -}}{{- f.description | tojson -}}{{- ', ' -}}{%- endif -%}
{{- '"parameters": ' -}}{{- p | tojson -}}{{- '}\n' -}}
{%- endfor -%}
{{- 'To call a tool, answer with <tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in ns.rest -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- endif -%}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set c = call.function if call.function else call -%}
{%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + c.name + '", "arguments": ' -}}
{%- if c.arguments is string -%}{{- c.arguments -}}{%- else -%}{{- c.arguments | tojson -}}{%- endif -%}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIALS = [TEXT_END, START, END]


def _compiled(dump):
    environment = Environment(keep_trailing_newline=True)
    environment.filters["tojson"] = dump
    return environment.from_string(TEMPLATE)


SPACED = _compiled(lambda value: json.dumps(value, ensure_ascii=False))
TIGHT = _compiled(lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def render(messages, tools=None, answer_next=False, tight=False):
    """The conversation as text. `tight` writes JSON without spaces, as some template engines do."""
    template = TIGHT if tight else SPACED
    return template.render(messages=messages, tools=tools, add_generation_prompt=answer_next)
