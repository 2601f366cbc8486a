"""The data: draws conversations of every family, keeps the held-out questions apart, writes training and held-out files.

Everything is generated from our own lists and templates with a fixed seed. A training conversation that holds a
held-out question, compared without case and punctuation, is dropped.
"""

import argparse
import json
import random
import re
from pathlib import Path

import families as f
import first
import stories as st
import tools as t
import words as w
from progress import Progress

SEED = 20261121
HERE = Path(__file__).parent

# family function and its weight among single examples
MIX = [
    (f.greetings, 5), (f.sapwood, 14), (f.capitals, 11), (f.opposites, 8), (f.sums, 16), (f.differences, 12), (f.products, 7), (f.too_hard, 4), (f.counting, 8),
    (f.repeating, 13), (f.lists, 3), (f.json_objects, 12), (f.kinds, 4), (f.yes_no, 12), (st.stories, 9), (f.unknown, 6), (f.small_talk, 14), (f.knowledge, 10), (f.fun, 8),
    (t.tool_calls, 8), (t.tool_results, 2),
]
# Families whose questions may lose capitals and marks without another meaning.
ROUGH = ("capitals", "opposites", "sapwood", "greetings", "sums", "differences", "products", "yes or no", "small talk", "common knowledge", "fun", "stories", "counting", "lists", "unknown", "too hard")
SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "Be polite.", "You are a helpful, honest assistant.",
    "Answer the questions of the user.", "You are the demo model of Sapwood.", "Be kind and brief.", "Help the user.",
]


def draw(rng):
    makers, weights = zip(*MIX)
    return rng.choices(makers, weights)[0](rng)


# --- conversations over several turns ------------------------------------------------------------------------------


def introductions(rng):
    """Things a user says about himself, the reply, the later question and its answer."""
    name, place, colour = w.name(rng), w.city(rng), rng.choice(w.COLOURS)
    pet, animal = w.name(rng), rng.choice(("dog", "cat", "horse", "bird"))
    age = rng.randint(5, 95)
    return rng.choice([
        (rng.choice([f"My name is {name}.", f"Hello, I am {name}.", f"Hi, my name is {name}.", f"I am {name}.", f"Call me {name}."]), f"Hello, {name}!",
         rng.choice(["What is my name?", "Who am I?", "Do you remember my name?", "What's my name?", "Tell me my name."]), f"Your name is {name}.", name),
        (f"I live in {place}.", f"{place} is a nice place.", rng.choice(["Where do I live?", "In which city do I live?", "Which city do I live in?"]), f"You live in {place}.", place),
        (f"My favourite colour is {colour}.", f"I will remember {colour}.", rng.choice(["What is my favourite colour?", "Which colour do I like?"]), f"Your favourite colour is {colour}.", colour),
        (f"My {animal} is called {pet}.", f"{pet} is a nice name.", rng.choice([f"What is my {animal} called?", f"What is the name of my {animal}?"]), f"Your {animal} is called {pet}.", pet),
        (f"I am {age} years old.", f"{age} is a good age.", "How old am I?", f"You are {age} years old.", str(age)),
    ])


def turn(role, content):
    return {"role": role, "content": content}


def plain(rng):
    """A single example without tools, of the training share."""
    while True:
        drawn = draw(rng)
        if not drawn["held"] and "tools" not in drawn:
            return drawn


def remembered(rng, between):
    """The user says something, asks `between` other things, and comes back to it."""
    said, reply, question, answer, key = introductions(rng)
    messages = [turn("user", said), turn("assistant", reply)]
    for _ in range(between):
        messages += plain(rng)["messages"]
    messages += [turn("user", question), turn("assistant", answer)]
    return _several(messages, [key], f.is_held("memory", said))


def _several(messages, must, held):
    return {"family": "several turns", "messages": messages, "check": {"kind": "contains", "expected": must}, "held": held}


def followed_up(rng):
    """A later question leans on the one before: another country, another sum, the list once more."""
    kind = rng.choice(("capital", "opposite", "list", "sum"))
    if kind == "capital":
        first, second = rng.sample(list(w.CAPITALS), 2)
        opening = [turn("user", f"What is the capital of {first}?")]
        town = w.CAPITALS[second]
        messages = opening + [turn("assistant", f"The capital of {first} is {w.CAPITALS[first]}."), turn("user", rng.choice((f"And of {second}?", f"And {second}?", f"What about {second}?"))), turn("assistant", f"The capital of {second} is {town}.")]
        return _several(messages, [town], f.is_held("follow", first, second))
    if kind == "opposite":
        first, second = rng.sample(list(f.OPPOSITE_OF), 2)
        messages = [turn("user", f"What is the opposite of {first}?"), turn("assistant", f"The opposite of {first} is {f.OPPOSITE_OF[first]}."), turn("user", rng.choice((f"And of {second}?", f"What about {second}?"))), turn("assistant", f"The opposite of {second} is {f.OPPOSITE_OF[second]}.")]
        return _several(messages, [f.OPPOSITE_OF[second]], f.is_held("follow", first, second))
    if kind == "sum":
        a, b, c = rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 9)
        messages = [turn("user", f"What is {a} + {b}?"), turn("assistant", f"{a} + {b} = {a + b}"), turn("user", rng.choice((f"Now add {c}.", f"And plus {c}?"))), turn("assistant", f"{a + b} + {c} = {a + b + c}")]
        held = f.is_held("sum", a, b) or f.is_held("sum", a + b, c)
        return _several(messages, [f"= {a + b + c}"], held)
    messages = f.repeating(rng)["messages"]
    answer = messages[1]["content"]
    messages = messages + [turn("user", rng.choice(("Once more.", "Again, please.", "Say it again."))), turn("assistant", answer)]
    return _several(messages, [answer], f.is_held("follow", answer))


def named_by_system(rng):
    """The system prompt names the assistant or the user."""
    name = w.name(rng)
    if rng.random() < 0.5:
        system, question, answer = f"Your name is {name}.", rng.choice(("What is your name?", "Who are you?")), f"My name is {name}."
    else:
        system, question, answer = f"The user is called {name}.", rng.choice(("What is my name?", "Who am I?")), f"Your name is {name}."
    return _several([turn("system", system), turn("user", question), turn("assistant", answer)], [name], f.is_held("system", system))


def after_small_talk(rng):
    """The second thing that people type: one more joke or story, a word of thanks, a doubt."""
    kind = rng.choice(("joke", "joke", "story", "hello", "thanks", "doubt"))
    if kind == "joke":
        jokes = rng.sample(first.JOKES, rng.choice((2, 2, 3)))
        messages = [turn("user", rng.choice(first.JOKE_QUESTIONS)), turn("assistant", jokes[0])]
        for joke in jokes[1:]:
            messages += [turn("user", rng.choice(first.ANOTHER + first.JOKE_QUESTIONS)), turn("assistant", joke)]
    elif kind == "story":
        again = st.story_text(rng, rng.choice(w.HEROES), rng.choice(w.TREASURES))
        messages = st.stories(rng)["messages"] + [turn("user", rng.choice(first.ANOTHER)), turn("assistant", again)]
    elif kind == "hello":
        language, word = rng.choice(list(first.HELLO_IN.items()))
        second = rng.choice((f"And in {language}?", f"In {language}?", f"Say it in {language}."))
        messages = [turn("user", rng.choice(("Hello!", "Hello", "Hi"))), turn("assistant", "Hello! How can I help you?"), turn("user", second), turn("assistant", word)]
    else:
        sure = (rng.choice(("Are you sure?", "Really?")), "I think so, but I am only a very small demo model.")
        thanks = (rng.choice(("Thanks", "Thank you!", "Thanks!")), "You are welcome!")
        second, answer = sure if kind == "doubt" else thanks
        messages = plain(rng)["messages"] + [turn("user", second), turn("assistant", answer)]
    return _several(messages, [messages[-1]["content"]], False)


def long_talk(rng):
    """A conversation of many turns, so that distant positions are exercised."""
    return remembered(rng, rng.randint(8, 36))


def several_turns(rng):
    maker = rng.choice((lambda: remembered(rng, rng.choice((0, 0, 1, 1, 2, 3))), lambda: followed_up(rng), lambda: named_by_system(rng), lambda: after_small_talk(rng)))
    return maker()


# --- rough edges, the split, the files ------------------------------------------------------------------------------


def roughen(rng, drawn):
    """Users write without capitals, without a full stop, with a system prompt, or start with 'Please'."""
    messages = [dict(message) for message in drawn["messages"]]
    first = next(m for m in messages if m["role"] == "user")
    text = first["content"]
    if len(messages) == 2 and drawn["family"] in ROUGH:
        if rng.random() < 0.15:
            text = text.lower()
        if rng.random() < 0.2:
            text = text.rstrip("?.!")
    first["content"] = text or first["content"]
    if messages[0]["role"] != "system" and rng.random() < 0.12:
        messages.insert(0, turn("system", rng.choice(SYSTEM_PROMPTS)))
    return {**drawn, "messages": messages}


def normal(text):
    return " ".join(re.sub(r"[^\w+-]+", " ", text.lower()).split())


def question_of(drawn):
    """What must not occur in training: the last question, or the whole talk where earlier turns matter."""
    users = [m["content"] for m in drawn["messages"] if m["role"] != "assistant"]
    return normal(" / ".join(users) if drawn["family"] in ("several turns", "tool results") else users[-1])


def held_out(rng, per_family):
    """Up to `per_family` different held-out examples of every family, and tools that training never shows."""
    makers = [maker for maker, _ in MIX] + [several_turns, lambda r: {**t.tool_calls(r, held=True), "family": "unseen tools"}]
    chosen = {}
    for maker in makers:
        seen = set()
        for _ in range(40000):
            drawn = maker(rng)
            key = question_of(drawn)
            if drawn["held"] and key not in seen:
                seen.add(key)
                chosen[(drawn["family"], key)] = drawn
            if len(seen) == per_family:
                break
    return list(chosen.values())


def pick(rng):
    roll = rng.random()
    if roll < 0.006:
        return long_talk(rng)
    if roll < 0.11:
        return several_turns(rng)
    return draw(rng)


def training(rng, count, forbidden):
    """Training conversations, none of which holds a held-out question."""
    progress, kept = Progress("generate", count), 0
    while kept < count:
        drawn = pick(rng)
        users = {normal(m["content"]) for m in drawn["messages"] if m["role"] == "user"}
        if drawn["held"] or question_of(drawn) in forbidden or users & forbidden:
            continue
        kept += 1
        progress.show(kept)
        yield roughen(rng, drawn)
    progress.close()


def write_lines(path, rows):
    with open(path, "w", encoding="utf-8") as out:
        for row in rows:
            row = {key: row[key] for key in ("family", "messages", "tools", "check") if key in row}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl")
    parser.add_argument("--held-out", type=Path, default=HERE / "heldout.jsonl", help="file for the held-out questions")
    parser.add_argument("--examples", type=int, default=200_000, help="training conversations")
    parser.add_argument("--per-family", type=int, default=60, help="held-out questions per family, at most")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    held = held_out(random.Random(SEED + 1), options.per_family)
    write_lines(options.held_out, held)
    forbidden = {question_of(drawn) for drawn in held}
    write_lines(options.out / "train.jsonl", training(random.Random(SEED), options.examples, forbidden))
    print(f"generate: {options.examples} training conversations, {len(held)} held-out questions")


if __name__ == "__main__":
    main()
