"""The question families: each function draws one example, a conversation that ends with the wanted answer.

An example is a dictionary: family, messages, tools (may be absent), check (kind and what it expects) and `held`, true
when its content belongs to the held-out share. The split is a hash of the content, so it is the same on every run.
"""

import hashlib
import json

import words as w
from facts import KEPT_OUT, fact_lists

HELD_SHARE = 12  # percent of the contents


def is_held(*content):
    digest = hashlib.sha256(json.dumps(content).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_SHARE


def example(family, question, answer, kind, expected, held, **more):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"family": family, "messages": messages, "check": {"kind": kind, "expected": expected}, "held": held, **more}


# --- facts: the wording is held out ---------------------------------------------------------------------------------

FACTS = list(fact_lists())
GREETING_FACTS = [fact for fact in FACTS if fact[0] == "greetings"]
SAPWOOD_FACTS = [fact for fact in FACTS if fact[0] == "sapwood"]


def fact(rng, facts):
    family, _, questions, answer, must = rng.choice(facts)
    index = rng.randrange(len(questions))
    held = index >= len(questions) - KEPT_OUT
    return example(family, questions[index], answer, "contains", must, held)


def greetings(rng):
    return fact(rng, GREETING_FACTS)


def sapwood(rng):
    return fact(rng, SAPWOOD_FACTS)


CAPITAL_QUESTIONS = [
    "What is the capital of {c}?", "What is the capital city of {c}?", "Which city is the capital of {c}?",
    "Name the capital of {c}.", "Tell me the capital of {c}.", "The capital of {c}?", "What's the capital of {c}?",
    "{c}'s capital?", "Do you know the capital of {c}?", "Capital of {c}", "Which is the capital of {c}?",
    "I need the capital of {c}.",
    "Please tell me the capital city of {c}.", "Can you name the capital of {c}?", "What city is {c}'s capital?",
]


def capitals(rng):
    country = rng.choice(w.FAMILIAR if rng.random() < 0.25 else list(w.CAPITALS))
    index = rng.randrange(len(CAPITAL_QUESTIONS))
    held = index >= len(CAPITAL_QUESTIONS) - 3 or (is_held("capital", country, index) and country != "Japan")
    question = CAPITAL_QUESTIONS[index].format(c=country)
    town = w.CAPITALS[country]
    return example("capitals", question[0].upper() + question[1:], f"The capital of {country} is {town}.", "contains", [town], held)


OPPOSITE_QUESTIONS = [
    "What is the opposite of {x}?", "Opposite of {x}?", "Give me the opposite of {x}.", "Which word is the opposite of {x}?",
    "Tell me the opposite of {x}.", "What's the opposite of {x}?", "Name the opposite of the word {x}.", "{x} is the opposite of what?",
    "Please name the opposite of {x}.", "What word means the opposite of {x}?",
]
OPPOSITE_OF = {}
for left, right in w.OPPOSITES:
    OPPOSITE_OF.setdefault(left, right)
for left, right in w.OPPOSITES:
    OPPOSITE_OF.setdefault(right, left)


def opposites(rng):
    word = rng.choice(list(OPPOSITE_OF))
    index = rng.randrange(len(OPPOSITE_QUESTIONS))
    held = index >= len(OPPOSITE_QUESTIONS) - 2 or is_held("opposite", word, index)
    question = OPPOSITE_QUESTIONS[index].format(x=word)
    answer = f"The opposite of {word} is {OPPOSITE_OF[word]}."
    return example("opposites", question[0].upper() + question[1:], answer, "contains", [OPPOSITE_OF[word]], held)


# --- arithmetic, counting, comparing: the numbers are held out --------------------------------------------------------

SUM_QUESTIONS = ["What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a} + {b} = ?", "Add {a} and {b}.", "How much is {a} + {b}?", "What is the sum of {a} and {b}?", "Please add {a} and {b}."]
DIFFERENCE_QUESTIONS = ["What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "Subtract {b} from {a}."]


def sums(rng):
    top = rng.choice((10, 20, 20, 20))
    a, b = rng.randint(0, top), rng.randint(0, top)
    question = rng.choice(SUM_QUESTIONS).format(a=a, b=b)
    return example("sums", question, f"{a} + {b} = {a + b}", "number", a + b, is_held("sum", a, b))


def differences(rng):
    a = rng.randint(0, 20)
    b = rng.randint(0, a)
    question = rng.choice(DIFFERENCE_QUESTIONS).format(a=a, b=b)
    return example("differences", question, f"{a} - {b} = {a - b}", "number", a - b, is_held("difference", a, b))


COUNT_QUESTIONS = ["Count from {a} to {b}.", "Count from {a} up to {b}.", "Please count from {a} to {b}.", "List the numbers from {a} to {b}.", "Can you count from {a} to {b}?", "count {a} to {b}"]
COUNT_TO = ["Count to {b}.", "Please count to {b}.", "Can you count to {b}?"]


def counting(rng):
    down = rng.random() < 0.2
    if rng.random() < 0.2 and not down:
        a, b = 1, rng.randint(3, 20)
        question = rng.choice(COUNT_TO).format(b=b)
        held = is_held("count", b, question)
    else:
        a = rng.randint(0, 40)
        b = a + rng.randint(2, 12)
        if down:
            a, b = b, a
        question = ("Count down from {a} to {b}." if down else rng.choice(COUNT_QUESTIONS)).format(a=a, b=b)
        held = is_held("count", a, b)
    numbers = range(a, b - 1, -1) if down else range(a, b + 1)
    answer = ", ".join(map(str, numbers))
    return example("counting", question, answer, "exact", answer, held)


# --- copying: the content is held out -------------------------------------------------------------------------------

REPEAT_QUESTIONS = [
    "Repeat this list: {x}", "Repeat: {x}", "Repeat after me: {x}", "Say this list again: {x}", "Please repeat the list {x}",
    "Copy this list: {x}", "Write this list once more: {x}",
]


def repeating(rng):
    items = [w.thing(rng) for _ in range(rng.choice((2, 3, 3, 4, 4, 5, 6)))]
    if rng.random() < 0.15:
        items = [str(rng.randint(0, 99)) for _ in items]
    answer = ", ".join(items)
    question = rng.choice(REPEAT_QUESTIONS).format(x=answer)
    if rng.random() < 0.3 and not question.endswith("."):
        question += "."
    return example("repeating", question, answer, "exact", answer, is_held("repeat", sorted(items)[0]))


def person(rng):
    return {"name": w.name(rng), "age": rng.randint(2, 99), "city": w.city(rng), "job": rng.choice(w.JOBS)}


def purchase(rng):
    return {"item": w.thing(rng), "count": rng.randint(2, 60), "price": rng.randint(1, 99), "colour": rng.choice(w.COLOURS)}


def meeting(rng):
    return {"day": rng.choice(w.DAYS), "hour": rng.randint(1, 12), "place": w.city(rng), "with": w.name(rng)}


# wanted keys, and sentences that hold exactly these
JSON_SENTENCES = [
    (person, ("name", "age"), ["{name} is {age} years old.", "{name} is {age}.", "My friend {name} is {age} years old.", "I am {name} and I am {age} years old."]),
    (person, ("name", "city"), ["{name} lives in {city}.", "{name} comes from {city}.", "My name is {name} and I live in {city}."]),
    (person, ("name", "age", "city"), ["{name} is {age} years old and lives in {city}.", "{name} from {city} is {age} years old.", "{name}, {age}, lives in {city}."]),
    (person, ("name", "job"), ["{name} is a {job}.", "{name} works as a {job}."]),
    (person, ("name", "job", "city"), ["{name} is a {job} in {city}.", "{name} works as a {job} in {city}."]),
    (purchase, ("item", "price"), ["The {item} costs {price} euros.", "A {item} for {price} euros."]),
    (purchase, ("item", "colour"), ["The {item} is {colour}.", "I have a {colour} {item}."]),
    (purchase, ("item", "count", "colour"), ["There are {count} pieces of {item} in {colour}.", "We want {count} times {item} in {colour}."]),
    (meeting, ("day", "hour", "with"), ["We meet {with} on {day} at {hour}.", "On {day} at {hour} I see {with}."]),
    (meeting, ("day", "place"), ["On {day} we are in {place}.", "We go to {place} on {day}."]),
]
JSON_QUESTIONS = ["Make JSON with {keys}: {s}", "Write JSON with {keys}: {s}", "Turn this into JSON with {keys}: {s}", "{s} Give me {keys} as JSON.", "Extract {keys} as JSON: {s}"]


def join_words(items):
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def json_objects(rng):
    maker, keys, sentences = rng.choice(JSON_SENTENCES)
    record = maker(rng)
    sentence = rng.choice(sentences).format(**record)
    keys = list(keys)
    if rng.random() < 0.3:
        rng.shuffle(keys)
    if rng.random() < 0.15:
        keys = keys[:-1] or keys
    wanted = {key: record[key] for key in keys}
    question = rng.choice(JSON_QUESTIONS).format(keys=join_words(keys), s=sentence)
    return example("json", question, json.dumps(wanted), "json", wanted, is_held("json", sentence))


# --- kinds of things: the pair of wording and thing is held out --------------------------------------------------------

KIND_QUESTIONS = ["What kind of thing is {a}?", "Which kind of thing is {a}?", "What sort of thing is {a}?", "Tell me what kind of thing {a} is.", "Which group does {x} belong to?", "To which group does {x} belong?"]


def kinds(rng):
    group = rng.choice(list(w.CATEGORIES))
    item = rng.choice([item for item in w.CATEGORIES[group] if item != "orange"])
    named = item if group == "colour" else w.article(item)
    question = rng.choice(KIND_QUESTIONS).format(a=named, x=item)
    answer = f"{named} is {w.article(group)}."
    return example("kinds", question, answer[0].upper() + answer[1:], "contains", [group], is_held("kind", question))


# --- yes or no: the pairs are held out ---------------------------------------------------------------------------------


def yes_no(rng):
    truth = rng.random() < 0.5
    kind = rng.choice(("number", "capital", "category", "category", "opposite"))
    if kind == "number":
        low, high = sorted(rng.sample(range(100), 2))
        more = rng.random() < 0.5
        first, second = (high, low) if more == truth else (low, high)
        content = f"Is {first} {rng.choice(('greater', 'bigger', 'more') if more else ('smaller', 'less'))} than {second}?"
    elif kind == "capital":
        country = rng.choice(w.FAMILIAR if rng.random() < 0.6 else list(w.CAPITALS))
        town = w.CAPITALS[country] if truth else w.CAPITALS[rng.choice([c for c in w.FAMILIAR if c != country])]
        content = f"Is {town} the capital of {country}?"
    elif kind == "category":
        group = rng.choice(list(w.CATEGORIES))
        item = rng.choice(w.CATEGORIES[group])
        if not truth:
            group = rng.choice([g for g in w.CATEGORIES if item not in w.CATEGORIES[g]])
        if item == "orange":
            return yes_no(rng)
        content = f"Is {w.article(item)} {w.article(group)}?" if group != "colour" else f"Is {item} a colour?"
        if item in w.CATEGORIES["colour"]:
            content = f"Is {item} {w.article(group)}?"
    else:
        word = rng.choice(list(OPPOSITE_OF))
        other = OPPOSITE_OF[word] if truth else OPPOSITE_OF[rng.choice(list(OPPOSITE_OF))]
        truth = other == OPPOSITE_OF[word]
        content = f"Is {other} the opposite of {word}?"
    answer = "Yes." if truth else "No."
    question = content if rng.random() < 0.75 else rng.choice(("Yes or no: ", "Tell me, ")) + content[0].lower() + content[1:]
    return example("yes or no", question, answer, "starts", answer[:-1], is_held("yes", content))


# --- stories: the pair of hero and thing is held out ------------------------------------------------------------------

STORY_QUESTIONS = ["Tell me a short story about {h} and {t}.", "Write a short story about {h} and {t}.", "Tell a story about {h} and {t}.", "I want a story about {h} and {t}.", "Please write a story about {h} and {t}."]
STORY_ONE = ["Tell me a story about {h}.", "Write a short story about {h}.", "Tell me a short story about {h}."]
PLACES = ["in the forest", "by the sea", "in a small village", "on a high hill", "near a river", "in a big town"]
MOODS = ["lonely", "curious", "happy", "brave", "tired", "kind"]
STORY_MIDDLES = [
    "One day the {h} found {at}. It was old and very beautiful.",
    "One morning the {h} went for a walk and saw {at}.",
    "Every night the {h} dreamed of {at}. One day the dream came true.",
    "One evening a friend gave the {h} {at}.",
    "One winter the {h} lost {at} in the snow and looked for it for three days.",
]
STORY_TURNS = [
    'A bird said: "The {t} belongs to all of us." The {h} smiled.',
    "The {h} wanted to keep the {t}, but a child asked for help.",
    "The {h} showed the {t} to everybody, and they all came to see it.",
    "Then a storm came, and the {h} held the {t} close until it was over.",
]
STORY_ENDS = [
    "From that day on the {h} was never alone.", "In the end the {h} shared the {t} with everyone.",
    "That night the {h} slept well. The end.", "And the {h} and the {t} stayed together for ever.",
]


def story_text(rng, hero, treasure):
    fill = {"h": hero, "t": treasure, "at": w.article(treasure)}
    first = f"Once upon a time there was a {rng.choice(MOODS)} {hero} who lived {rng.choice(PLACES)}."
    rest = (rng.choice(part).format(**fill) for part in (STORY_MIDDLES, STORY_TURNS, STORY_ENDS))
    return " ".join([first, *rest])


def stories(rng):
    hero, treasure = rng.choice(w.HEROES), rng.choice(w.TREASURES)
    one = rng.random() < 0.2
    question = rng.choice(STORY_ONE if one else STORY_QUESTIONS).format(h=w.article(hero), t=w.article(treasure))
    must = [hero] if one else [hero, treasure]
    return example("stories", question, story_text(rng, hero, treasure), "story", must, not one and is_held("story", hero, treasure))


# --- what the model does not know ----------------------------------------------------------------------------------

UNKNOWN = "I do not know. I am only a very small demo model."
UNKNOWN_QUESTIONS = [
    "Who wrote the book {x}?", "Who invented the {t}?", "When was {n} born?", "How tall is the tower of {c}?", "Write a poem about {t}.",
    "Write a program that prints {x}.", "What is the weather in {c}?", "Why do people like {t}?", "Who is {n}?", "How many people live in {c}?",
    "Translate {t} into {l}.", "What happened in {y}?", "How do I cook {t}?", "What is the meaning of life?", "Why is the sky blue?",
    "Who won the game in {c}?", "What time is it?", "What is the news today?", "Explain how {t} works.", "How far is it from {c} to {c2}?",
    "Who is the president of {c}?", "What is the best {t}?", "Where can I buy {t}?", "Write code in {l}.", "Solve this puzzle about {t}.",
    "What is {x}?", "Do you like {t}?", "Recommend a book about {t}.", "How old is {n}?", "What does {n} think about {t}?",
]


def unknown(rng):
    index = rng.randrange(len(UNKNOWN_QUESTIONS))
    fill = {"x": w.made_up_word(rng).capitalize(), "t": rng.choice(w.THINGS), "n": w.name(rng), "c": w.city(rng), "c2": w.city(rng), "l": rng.choice(w.LANGUAGES), "y": rng.randint(1500, 2030)}
    question = UNKNOWN_QUESTIONS[index].format(**fill)
    return example("unknown", question, UNKNOWN, "contains", ["do not know"], is_held("unknown", question))
