"""Tool calling: tools, the requests that need them, and the calls that answer them.

Half of the tools are written by hand, half are put together from a verb and a noun, so that the model must read the
list instead of knowing it. Verb and noun pairs of the held-out share never occur in training.
"""

import json

import words as w
from families import example, is_held

# name, description, parameters (name: kind), requests
WRITTEN = [
    ("get_weather", "Get the weather of a city", {"city": "city"}, ["What is the weather in {city}?", "How is the weather in {city} today?", "Is it raining in {city}?", "Tell me the weather in {city}."]),
    ("get_time", "Get the local time of a city", {"city": "city"}, ["What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"]),
    ("add_numbers", "Add two numbers", {"a": "number", "b": "number"}, ["Add {a} and {b} with the tool.", "Use the tool to add {a} and {b}.", "What is {a} plus {b}? Use the tool."]),
    ("send_message", "Send a message to a person", {"to": "name", "text": "thing"}, ["Send {to} the message {text}.", "Write {text} to {to}.", "Tell {to}: {text}"]),
    ("search_web", "Search the web", {"query": "thing"}, ["Search the web for {query}.", "Look up {query} on the web.", "Find pages about {query}."]),
    ("translate_text", "Translate a text", {"text": "thing", "language": "language"}, ["Translate {text} into {language}.", "What is {text} in {language}?"]),
    ("set_timer", "Set a timer", {"minutes": "number"}, ["Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a timer of {minutes} minutes."]),
    ("play_music", "Play a song", {"song": "thing"}, ["Play the song {song}.", "I want to hear {song}.", "Play {song}."]),
    ("read_file", "Read a file", {"path": "file"}, ["Read the file {path}.", "Show me {path}.", "What is in the file {path}?"]),
    ("create_event", "Put an event into the calendar", {"title": "thing", "day": "day"}, ["Put {title} into my calendar on {day}.", "Create an event {title} for {day}."]),
    ("book_table", "Book a table at a restaurant", {"city": "city", "people": "number"}, ["Book a table for {people} people in {city}.", "I need a table in {city} for {people}."]),
    ("get_price", "Get the price of an item", {"item": "thing"}, ["What is the price of {item}?", "How much does {item} cost?"]),
    ("turn_on_light", "Turn on the light in a room", {"room": "room"}, ["Turn on the light in the {room}.", "Light in the {room}, please."]),
    ("find_person", "Find a person in the address book", {"name": "name"}, ["Find {name} in the address book.", "Who is {name}? Look in the address book."]),
]
VERBS = "paint buy sell clean count draw fetch find fix hide lift load lock move open order pack print rent show sort store wash weigh wrap".split()
NOUNS = "book box car chair clock coat cup door engine flower garden hat house key lamp letter map orange pen picture pillow plate ring robot shoe stamp table tent tree window".split()
# a parameter, its kind, and how a request words it
ADDITIONS = [("city", "city", "in {}"), ("person", "name", "for {}"), ("day", "day", "on {}"), ("colour", "colour", "in {}"), ("count", "number", "{} times"), ("hour", "number", "at {}")]
ROOMS = "kitchen bedroom garden hall office bathroom garage".split()
MAKERS = {
    "city": w.city, "name": w.name, "thing": w.thing, "day": lambda rng: rng.choice(w.DAYS), "colour": lambda rng: rng.choice(w.COLOURS),
    "number": lambda rng: rng.randint(1, 99), "language": lambda rng: rng.choice(w.LANGUAGES), "room": lambda rng: rng.choice(ROOMS),
    "file": lambda rng: w.thing(rng) + rng.choice((".txt", ".md", ".json")),
}
TYPES = {"number": "integer"}
FILLER_NAMES = {"time": ("noon", "now", "eight o'clock"), "weather": ("sunny", "rainy", "cloudy", "cold", "warm", "windy")}


def made_tool(rng, held):
    """A tool put together from a verb and a noun, of the wanted share of the split."""
    while True:
        verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
        if is_held("tool", verb, noun) == held:
            break
    chosen = rng.sample(ADDITIONS, rng.choice((1, 1, 2)))
    if len(chosen) == 2 and {chosen[0][0], chosen[1][0]} == {"city", "colour"}:
        chosen = chosen[:1]
    request = " ".join([f"{verb} {rng.choice(('a', 'the'))} {noun}"] + [phrase.format("{" + key + "}") for key, _, phrase in chosen])
    requests = [request[0].upper() + request[1:] + ".", "Please " + request + ".", "Can you " + request + "?"]
    return f"{verb}_{noun}", f"{verb.capitalize()} a {noun}", {key: kind for key, kind, _ in chosen}, requests


def schema(rng, tool):
    """The tool as an OpenAI client describes it."""
    name, description, parameters, _ = tool
    properties = {key: {"type": TYPES.get(kind, "string")} for key, kind in parameters.items()}
    if rng.random() < 0.15:
        for key, value in properties.items():
            value["description"] = "The " + key
    function = {"name": name, "description": description, "parameters": {"type": "object", "properties": properties, "required": list(properties)}}
    if rng.random() < 0.1:
        del function["description"]
    return {"type": "function", "function": function}


def draw_tools(rng, held):
    """A few different tools; the first is the one that is asked for."""
    count = rng.choice((1, 2, 2, 3))
    tools, names = [], set()
    while len(tools) < count:
        first = not tools
        tool = made_tool(rng, held if first else False) if rng.random() < 0.5 or (held and first) else rng.choice(WRITTEN)
        if tool[0] not in names:
            names.add(tool[0])
            tools.append(tool)
    return tools


def tool_calls(rng, held=False):
    """A request that one of the listed tools answers."""
    tools = draw_tools(rng, held)
    name, _, parameters, requests = tools[0]
    arguments = {key: MAKERS[kind](rng) for key, kind in parameters.items()}
    rng.shuffle(tools)
    question = rng.choice(requests).format(**arguments)
    call = {"name": name, "arguments": arguments}
    answer = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    kept = held or is_held("call", name, sorted(map(str, arguments.values())))
    return example("tool calls", question, answer, "tool call", call, kept, tools=[schema(rng, tool) for tool in tools])


def tool_results(rng):
    """A conversation that goes on after the call: the tool's result becomes an answer."""
    kind = rng.choice(("weather", "time", "sum"))
    if kind == "sum":
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        tool, arguments, result, question = WRITTEN[2], {"a": a, "b": b}, str(a + b), f"Add {a} and {b} with the tool."
        answer = f"The result is {result}."
    else:
        town = w.city(rng)
        result = rng.choice(FILLER_NAMES[kind])
        tool = WRITTEN[0] if kind == "weather" else WRITTEN[1]
        arguments, question = {"city": town}, rng.choice(tool[3]).format(city=town)
        answer = f"The {kind} in {town}: {result}."
    call = f"<tool_call>\n{json.dumps({'name': tool[0], 'arguments': arguments})}\n</tool_call>"
    messages = [
        {"role": "user", "content": question}, {"role": "assistant", "content": call},
        {"role": "tool", "content": result}, {"role": "assistant", "content": answer},
    ]
    check = {"kind": "contains", "expected": [result]}
    return {"family": "tool results", "messages": messages, "tools": [schema(rng, tool)], "check": check, "held": is_held("result", arguments)}
