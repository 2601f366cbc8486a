"""Renders published chat templates with Jinja, as Transformers sets it up, for a comparison with Sapwood's rendering.

    reference.py FOLDER OUTPUT

FOLDER has archives of packages that have templates. OUTPUT becomes a file of JSON lines, one for each template, with
conversations, and the text or the error of either form of the arguments of calls.
"""

import datetime
import json
import pathlib
import sys
import tarfile
import zipfile

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, with which templates mark what is trained on; it prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Raised(Exception):
    """The template rejects the conversation itself."""


def raise_exception(message):
    raise Raised(message)


# The clock of the comparison: 3 February 2025, 04:05:06.
NOW = datetime.datetime.fromtimestamp(1_738_555_506, datetime.timezone.utc)


def compiled(source):
    # That of Transformers is immutable: a template that appends to a list, as one of Kimi K2 does, fails there.
    environment = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = NOW.strftime
    return environment.from_string(source)


ARGUMENTS = {
    "city": 'Bodø "N" <&>',
    "days": 3,
    "share": 0.5,
    "rain": True,
    "wind": None,
    "at": {"lat": 67.28, "tags": ["a", "b"]},
    "none": [],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.\nOf a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city's name", "enum": ["Bodø", "Bergen"]},
                    "days": {"type": "integer", "default": 1},
                    "share": {"type": "number"},
                    "rain": {"type": "boolean", "description": "Rain too"},
                    "at": {
                        "type": "object",
                        "properties": {"lat": {"type": "number"}, "tags": {"type": "array", "items": {"type": "string"}}},
                        "required": ["lat"],
                    },
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "clock", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}},
    },
]
CLOCK = TOOLS[1:]


def call(name, arguments, identifier):
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def reasoned(content, reasoning, **more):
    # Under the names that Sapwood uses; `thinking` only where it is not beside both content and calls.
    thinking = {} if content and more.get("tool_calls") else {"thinking": reasoning}
    return message("assistant", content, reasoning_content=reasoning, reasoning=reasoning, **thinking, **more)


SYSTEM = message("system", " Be brief.\n")
USER = message("user", "Weather? ")
ASSISTANT = message("assistant", "It is\n\nsunny.")
CALL = message("assistant", "", tool_calls=[call("weather", ARGUMENTS, "abc123def")])
RESULT = message("tool", '{"sky": "clear"}', name="weather", tool_call_id="abc123def")
AGAIN = message("user", "And now?")


def cases():
    """The conversations: name, messages, tools, arguments of the template."""
    two = [call("weather", {"city": "Bergen"}, "abc123def"), call("clock", {}, "abc123deg")]
    second = message("tool", "12:00", name="clock", tool_call_id="abc123deg")
    thought = reasoned("Sunny.", "I looked.\nOutside.")
    full = [
        SYSTEM,
        USER,
        reasoned("", "I call.", tool_calls=[call("weather", ARGUMENTS, "abc123def")]),
        RESULT,
        thought,
        AGAIN,
    ]
    yield "user", [USER], None, {}
    yield "user without prompt", [USER], None, {"add_generation_prompt": False}
    yield "system", [SYSTEM, USER], None, {}
    yield "talk", [SYSTEM, USER, ASSISTANT, AGAIN], None, {}
    yield "no prompt", [SYSTEM, USER, ASSISTANT], None, {"add_generation_prompt": False}
    yield "tools", [USER], TOOLS, {}
    yield "tools without prompt", [USER], TOOLS, {"add_generation_prompt": False}
    yield "tools and system", [SYSTEM, USER], TOOLS, {}
    yield "call", [USER, CALL, RESULT], TOOLS, {}
    yield "call without result", [USER, CALL], TOOLS, {"add_generation_prompt": False}
    yield "call with content", [USER, {**CALL, "content": "Let me see."}, RESULT], TOOLS, {}
    yield "two calls", [USER, {**CALL, "tool_calls": two}, RESULT, second], TOOLS, {}
    yield "two calls without result", [USER, {**CALL, "tool_calls": two}], TOOLS, {"add_generation_prompt": False}
    yield "two turns", [USER, CALL, RESULT, CALL, RESULT, ASSISTANT, AGAIN], TOOLS, {}
    yield "reasoning", [USER, thought, AGAIN], None, {}
    yield "reasoning last", [USER, thought], None, {"add_generation_prompt": False}
    yield "reasoning in content", [USER, message("assistant", "<think>\nHm.\n</think>\n\nSunny."), AGAIN], None, {}
    yield "full", full, TOOLS, {}
    yield "full without tools", full, None, {}
    yield "full without prompt", full, TOOLS, {"add_generation_prompt": False}
    yield "reasoning and call", full[:4], TOOLS, {}
    for value in (True, False):
        switches = {"enable_thinking": value, "thinking": value}
        yield f"thinking {value}", full, TOOLS, switches
        yield f"thinking {value} to a user", [USER], None, switches
    yield "effort", full, TOOLS, {"reasoning_effort": "high"}
    yield "many", [SYSTEM, *[USER, ASSISTANT] * 3, USER], None, {}
    yield "nothing", [], None, {}
    # Nothing that a template would have to know of schemas.
    yield "clock", [USER], CLOCK, {}
    ask = message("assistant", "", tool_calls=[call("clock", {}, "abc123deg")])
    yield "clock called", [SYSTEM, USER, ask, second], CLOCK, {}


def rendered(template, messages, tools, arguments):
    """What a template prints, or its error."""
    given = {"add_generation_prompt": True, **arguments}
    try:
        text = template.render(
            messages=messages, tools=tools, documents=None, bos_token="[BOS]", eos_token="[EOS]", **given
        )
    except Raised as error:
        return {"rejected": str(error)}
    except Exception as error:
        return {"failed": repr(error)}
    return {"text": text}


def as_texts(messages):
    messages = json.loads(json.dumps(messages))
    for each in messages:
        for called in each.get("tool_calls", []):
            function = called["function"]
            # As serde writes it.
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False, separators=(",", ":"))
    return messages


def templates(folder):
    """The names and sources of the templates in archives, each source once."""
    seen = set()
    for archive in sorted(folder.iterdir()):
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as opened:
                found = {name: opened.read(name) for name in opened.namelist() if name.endswith(".jinja")}
        else:
            with tarfile.open(archive) as opened:
                members = (member for member in opened if member.isfile() and member.name.endswith(".jinja"))
                found = {member.name: opened.extractfile(member).read() for member in members}
        for name, source in sorted(found.items()):
            path = pathlib.PurePosixPath(name)
            if "templates" in path.parent.name and source not in seen:
                seen.add(source)
                yield f"{archive.name.split('-')[0]}/{path.stem}", source.decode()


def compared(name, source):
    line = {"template": name, "source": source, "cases": []}
    template = compiled(source)
    for case, messages, tools, arguments in cases():
        objects = rendered(template, messages, tools, arguments)
        has_calls = any("tool_calls" in each for each in messages)
        line["cases"].append(
            {
                "name": case,
                "messages": messages,
                "tools": tools,
                "template_args": arguments,
                "objects": objects,
                "texts": rendered(template, as_texts(messages), tools, arguments) if has_calls else objects,
            }
        )
    return line


def main():
    folder, output = map(pathlib.Path, sys.argv[1:])
    with output.open("w", encoding="utf-8") as out:
        for name, source in templates(folder):
            out.write(json.dumps(compared(name, source), ensure_ascii=False) + "\n")


main()
