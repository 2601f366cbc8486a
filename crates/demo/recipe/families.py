"""The question families: each function draws one example, a conversation that ends with the wanted answer.

An example is a dictionary: family, messages, tools (may be absent), check (kind and what it expects) and `held`, true
when its content belongs to the held-out share. The split is a hash of the content, so it is the same on every run.
"""

import hashlib
import json

import first
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

SUM_QUESTIONS = [
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a} + {b} = ?", "Add {a} and {b}.", "How much is {a} + {b}?", "What is the sum of {a} and {b}?",
    "Please add {a} and {b}.", "{a}+{b}", "{a}+{b}=", "{a}+{b}?", "{a} + {b} =", "What's {a} + {b}?", "what's {a} plus {b}?", "What is {a}+{b}?", "{a} plus {b}",
    "How much is {a} plus {b}?", "Calculate {a} + {b}.", "what is {a}+{b}", "Compute {a}+{b}.", "What is {a} and {b}?", "{a}+{b}=?",
]
DIFFERENCE_QUESTIONS = [
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "Subtract {b} from {a}.", "{a}-{b}", "{a} - {b} =", "{a}-{b}=?", "What's {a} - {b}?", "what's {a} minus {b}?",
    "{a} minus {b}", "How much is {a} - {b}?", "Calculate {a} - {b}.", "What is {a}-{b}?", "{a} - {b} = ?",
]
PRODUCT_QUESTIONS = [
    "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "{a} times {b}", "Multiply {a} by {b}.", "Multiply {a} and {b}.", "How much is {a} * {b}?",
    "{a} * {b} =", "{a}*{b}=?", "What's {a} times {b}?", "what is {a}*{b}", "Calculate {a} * {b}.", "What is {a} x {b}?", "What is {a} multiplied by {b}?",
]
QUOTIENT_QUESTIONS = ["What is {a} / {b}?", "What is {a} divided by {b}?", "{a} / {b}", "{a}/{b}", "Divide {a} by {b}.", "How much is {a} / {b}?", "{a} divided by {b}", "Calculate {a} / {b}.", "What's {a} / {b}?"]
TOO_HARD = "That is too hard for me. I am only a very small demo model."
HARD_QUESTIONS = [
    "What is the square root of {a}?", "Is {a} a prime number?", "What is {a} squared?", "sqrt({a})", "{x} + {y} + {z}", "{x}+{y}+{z}", "{x}+{y}*{z}", "What is {x} + {y} * {z}?", "{x} to the power of {y}", "What is {x} to the power of {y}?",
    "Spell {t}.", "Spell the word {t}.", "Reverse the word {t}.", "How many letters are in {t}?", "How many letters does {t} have?", "{x}^{y}", "Solve x + {x} = {y}.", "What is {x} percent of {a}?", "Sort these numbers: {z}, {x}, {y}",
    "What is the factorial of {x}?", "What is the next number: {x}, {y}, {z}?",
]


def in_words(rng, *numbers):
    """Numbers as people write them: mostly in digits, small ones sometimes in letters."""
    letters = max(numbers) < len(w.NUMBER_WORDS) and rng.random() < 0.12
    return [w.NUMBER_WORDS[number] if letters else str(number) for number in numbers]


def asked(rng, questions, a, b):
    """A question about two numbers. Letters only where words, not signs, stand between them."""
    question = rng.choice(questions)
    x, y = in_words(rng, a, b) if not set("+-*/=").intersection(question) else (a, b)
    text = question.format(a=x, b=y)
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


def sums(rng):
    top = rng.choice((10, 20, 20, 20))
    a, b = rng.randint(0, top), rng.randint(0, top)
    if rng.random() < 0.2:
        a, b = 10 * rng.randint(1, 10), 10 * rng.randint(1, 10)
    question = asked(rng, SUM_QUESTIONS, a, b)
    return example("sums", question, f"{a} + {b} = {a + b}", "number", a + b, is_held("sum", a, b) and (a, b) != (2, 2))


def differences(rng):
    a = rng.randint(0, 20)
    b = rng.randint(0, a)
    if rng.random() < 0.1:
        a, b = 10 * rng.randint(1, 10), 10 * rng.randint(1, 10)
        a, b = max(a, b), min(a, b)
    question = asked(rng, DIFFERENCE_QUESTIONS, a, b)
    return example("differences", question, f"{a} - {b} = {a - b}", "number", a - b, is_held("difference", a, b))


def products(rng):
    """The multiplication table up to ten, which is learned by heart: the pair of wording and numbers is held out."""
    a, b = rng.randint(0, 10), rng.randint(1, 10)
    if rng.random() < 0.3:
        question = asked(rng, QUOTIENT_QUESTIONS, a * b, b)
        return example("products", question, f"{a * b} / {b} = {a}", "number", a, is_held("quotient", question))
    question = asked(rng, PRODUCT_QUESTIONS, a, b)
    return example("products", question, f"{a} * {b} = {a * b}", "number", a * b, is_held("product", question))


def too_hard(rng):
    """What lies beyond its tables: the honest answer, instead of a wrong number."""
    kind = rng.choice(("large", "large", "between", "between", "product", "other", "other"))
    if kind == "other":
        fill = {"a": rng.randint(11, 9999), "x": rng.randint(2, 20), "y": rng.randint(2, 20), "z": rng.randint(2, 20), "t": w.thing(rng)}
        question = rng.choice(HARD_QUESTIONS).format(**fill)
    elif kind == "product":
        question = rng.choice(PRODUCT_QUESTIONS).format(a=rng.randint(11, 99), b=rng.randint(11, 99))
    else:
        a, b = (rng.randint(101, 10 ** rng.randint(3, 6)) if kind == "large" else 10 * rng.randint(2, 9) + rng.randint(1, 9) for _ in range(2))
        if rng.random() < 0.3:
            b = rng.randint(1, 20) if kind == "large" else b
        question = rng.choice(SUM_QUESTIONS + DIFFERENCE_QUESTIONS + (PRODUCT_QUESTIONS + QUOTIENT_QUESTIONS if kind == "large" else [])).format(a=a, b=b)
    return example("too hard", question, TOO_HARD, "contains", ["too hard"], is_held("too hard", question))


COUNT_QUESTIONS = ["Count from {a} to {b}.", "Count from {a} up to {b}.", "Please count from {a} to {b}.", "List the numbers from {a} to {b}.", "Can you count from {a} to {b}?", "count {a} to {b}"]
COUNT_TO = ["Count to {b}.", "Please count to {b}.", "Can you count to {b}?", "count to {b}", "Count up to {b}."]
COUNT_DOWN = ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Please count down from {a} to {b}.", "count down from {a} to {b}"]
COUNT_DOWN_FROM = ["Count down from {a}", "Count down from {a}.", "count down from {a}", "Count backwards from {a}.", "Countdown from {a}", "Please count down from {a}.", "Can you count down from {a}?", "Count down from {a} please"]


def spelled(rng, number):
    """A number as people write it: mostly in digits, small ones sometimes in letters."""
    return w.NUMBER_WORDS[number] if number < len(w.NUMBER_WORDS) and rng.random() < 0.2 else str(number)


def counting(rng):
    form = rng.choice(("to", "down from", "down", "up", "up", "up"))
    if form == "to":
        a, b = 1, rng.randint(3, 20)
        question = rng.choice(COUNT_TO).format(b=spelled(rng, b))
        held = is_held("count", b, question)
    elif form == "down from":
        a, b = rng.randint(3, 20), 1
        question = rng.choice(COUNT_DOWN_FROM).format(a=spelled(rng, a))
        held = is_held("count", a, question) and a not in (3, 5, 10)
    else:
        a = rng.randint(0, 40)
        b = a + rng.randint(2, 12)
        if form == "down":
            a, b = b, a
        question = rng.choice(COUNT_DOWN if form == "down" else COUNT_QUESTIONS).format(a=a, b=b)
        held = is_held("count", a, b) and (a, b) != (1, 10)
    numbers = range(a, b - 1, -1) if a > b else range(a, b + 1)
    answer = ", ".join(map(str, numbers))
    return example("counting", question, answer, "exact", answer, held)


# --- copying: the content is held out -------------------------------------------------------------------------------

REPEAT_QUESTIONS = [
    "Repeat this list: {x}", "Repeat: {x}", "Repeat after me: {x}", "Say this list again: {x}", "Please repeat the list {x}",
    "Copy this list: {x}", "Write this list once more: {x}",
]


SAY = ["Repeat after me: {x}", "Repeat after me: {x}.", "Repeat: {x}", "Say {x}", "Say {x}.", "Say: {x}", "repeat after me {x}", "Say \"{x}\"", "Please say {x}.", "Echo {x}", "Echo: {x}", "Repeat this: {x}", "Write {x}.", "Print {x}"]
SENTENCES = [
    "I love {t}", "the {t} is {c}", "hello {n}", "Hello, {n}", "my name is {n}", "{n} lives in {p}", "the {c} {t} and the {t2}", "I am a {t}", "good night, {n}", "{t} {t2}", "{n} has {k} {t}s",
    "we go to {p}", "{x}", "{x} {x2}", "{t}", "{n}", "I like {p} and {t}", "one {t}, two {t2}s", "hello world", "this is a test", "streams of tokens", "Hello, world",
]


def saying(rng):
    """A phrase to be said again as it is."""
    fill = {
        "t": rng.choice(w.THINGS), "t2": rng.choice(w.THINGS), "c": rng.choice(w.COLOURS), "n": w.name(rng), "p": w.city(rng), "k": rng.randint(2, 20),
        "x": w.made_up_word(rng), "x2": w.made_up_word(rng),
    }
    answer = rng.choice(SENTENCES).format(**fill)
    question = rng.choice(SAY).format(x=answer)
    fixed = answer in SENTENCES
    return example("repeating", question, answer, "exact", answer, is_held("say", answer) and not fixed)


def repeating(rng):
    if rng.random() < 0.4:
        return saying(rng)
    items = [w.thing(rng) for _ in range(rng.choice((2, 3, 3, 4, 4, 5, 6)))]
    if rng.random() < 0.15:
        items = [str(rng.randint(0, 99)) for _ in items]
    answer = ", ".join(items)
    question = rng.choice(REPEAT_QUESTIONS).format(x=answer)
    if rng.random() < 0.3 and not question.endswith("."):
        question += "."
    return example("repeating", question, answer, "exact", answer, is_held("repeat", sorted(items)[0]))


LIST_QUESTIONS = ["Name {k} {g}s.", "List {k} {g}s.", "Give me {k} {g}s.", "Tell me {k} {g}s.", "Name {k} {g}s", "list {k} {g}s", "Can you name {k} {g}s?"]
ONE_QUESTIONS = ["Name {g}.", "Tell me {g}.", "Give me {g}.", "Name {g}", "Say {g}."]


def lists(rng):
    """Some things of a kind: any will do, none twice."""
    group = rng.choice(list(w.CATEGORIES))
    if rng.random() < 0.3:
        item = rng.choice(w.CATEGORIES[group])
        question = rng.choice(ONE_QUESTIONS).format(g=w.article(group))
        return example("lists", question, item.capitalize() + ".", "list", [1, *w.CATEGORIES[group]], False)
    count = rng.choice((2, 3, 3, 3, 4, 5))
    items = rng.sample(w.CATEGORIES[group], count)
    question = rng.choice(LIST_QUESTIONS).format(k=w.NUMBER_WORDS[count] if rng.random() < 0.6 else count, g=group)
    return example("lists", question, ", ".join(items).capitalize() + ".", "list", [count, *w.CATEGORIES[group]], False)


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


JSON_WHOLE = ["Write this as JSON: {s}", "Turn this into JSON: {s}", "Make JSON of this: {s}", "Convert this to JSON: {s}", "Convert to JSON: {s}", "{s} Write this as JSON.", "As JSON: {s}", "JSON: {s}", "Give me this as JSON: {s}"]
JSON_PAIRS = ["{k}: {v}", "{k} {v}", "{k}={v}", "{k} is {v}"]
JSON_EMPTY = ["Give me JSON.", "Write JSON.", "Give me some JSON.", "Write a JSON object.", "Give me a JSON object.", "JSON", "json", "Answer in JSON.", "Output JSON.", "Give me an example of JSON.", "Show me JSON.", "Write some JSON."]

JSON_VALUES = {"name": "Anna", "age": 30, "city": "Paris", "job": "teacher", "item": "book", "price": 12, "colour": "blue", "count": 3, "day": "Monday", "hour": 9, "with": "Ben", "place": "Rome"}


def json_objects(rng):
    maker, keys, sentences = rng.choice(JSON_SENTENCES)
    record = maker(rng)
    keys, roll = list(keys), rng.random()
    if roll < 0.04:
        if rng.random() < 0.6:
            wanted = {key: JSON_VALUES[key] for key in keys}
            question = rng.choice(("Give me a JSON object with {k}.", "Write JSON with {k}.", "Write a JSON object with {k}.", "Make JSON with {k}.", "JSON with {k}")).format(k=join_words(keys))
            return example("json", question, json.dumps(wanted), "json", wanted, False)
        return example("json", rng.choice(JSON_EMPTY), '{"hello": "world"}', "json", {"hello": "world"}, False)
    if roll < 0.25:
        form = rng.choice(JSON_PAIRS)
        sentence = ", ".join(form.format(k=key, v=record[key]) for key in keys)
        question = rng.choice(JSON_WHOLE[:5]).format(s=sentence)
    elif roll < 0.5:
        sentence = rng.choice(sentences).format(**record)
        question = rng.choice(JSON_WHOLE).format(s=sentence)
    else:
        sentence = rng.choice(sentences).format(**record)
        if rng.random() < 0.3:
            rng.shuffle(keys)
        if rng.random() < 0.15:
            keys = keys[:-1] or keys
        question = rng.choice(JSON_QUESTIONS).format(keys=join_words(keys), s=sentence)
    wanted = {key: record[key] for key in keys}
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
    """The fact first and the verdict after it: a model of this size cannot join the two in one step."""
    truth = rng.random() < 0.5
    kind = rng.choice(("number", "capital", "category", "category", "opposite"))
    if kind == "number":
        low, high = sorted(rng.sample(range(100), 2))
        more = rng.random() < 0.5
        one, other = (high, low) if more == truth else (low, high)
        content = f"Is {one} {rng.choice(('greater', 'bigger', 'more', 'larger') if more else ('smaller', 'less'))} than {other}?"
        reason = f"{one} is {'greater' if one > other else 'smaller'} than {other}"
    elif kind == "capital":
        country = rng.choice(w.FAMILIAR if rng.random() < 0.6 else list(w.CAPITALS))
        town = w.CAPITALS[country] if truth else w.CAPITALS[rng.choice([c for c in w.FAMILIAR if c != country])]
        content = f"Is {town} the capital of {country}?"
        reason = f"The capital of {country} is {w.CAPITALS[country]}"
    elif kind == "category":
        group = rng.choice(list(w.CATEGORIES))
        item = rng.choice([item for item in w.CATEGORIES[group] if item != "orange"])
        named, right = (item if group == "colour" else w.article(item)), group
        if not truth:
            group = rng.choice([g for g in w.CATEGORIES if item not in w.CATEGORIES[g]])
        content = f"Is {named} {w.article(group)}?"
        reason = f"{named[0].upper() + named[1:]} is {w.article(right)}"
    else:
        word = rng.choice(list(OPPOSITE_OF))
        other = OPPOSITE_OF[word] if truth else OPPOSITE_OF[rng.choice(list(OPPOSITE_OF))]
        truth = other == OPPOSITE_OF[word]
        content = f"Is {other} the opposite of {word}?"
        reason = f"The opposite of {word} is {OPPOSITE_OF[word]}"
    verdict = "yes" if truth else "no"
    question = content if rng.random() < 0.75 else rng.choice(("Yes or no: ", "Tell me, ")) + content[0].lower() + content[1:]
    return example("yes or no", question, f"{reason}, so {verdict}.", "ends", verdict, is_held("yes", content))


# --- what the model does not know ----------------------------------------------------------------------------------

UNKNOWN = "I do not know. I am only a very small demo model."
UNKNOWN_QUESTIONS = [
    "Who wrote the book {x}?", "Who invented the {t}?", "When was {n} born?", "How tall is the tower of {c}?", 
    "Write a program that prints {x}.", "What is the weather in {c}?", "Why do people like {t}?", "Who is {n}?", "How many people live in {c}?",
    "Translate {t} into {l}.", "What happened in {y}?", "How do I cook {t}?",  
    "Who won the game in {c}?",   "Explain how {t} works.", "How far is it from {c} to {c2}?",
    "Who is the president of {c}?", "What is the best {t}?", "Where can I buy {t}?",  "Solve this puzzle about {t}.",
    "What is {x}?", "Do you like {t}?", "Recommend a book about {t}.", "How old is {n}?", "What does {n} think about {t}?",
    "Who is {n} {x}?", "Where is {n}?", "What is the population of {c}?", "Tell me about {n}.", "Tell me about {c}.", "Where is {x}?", "What is the phone number of {n}?", "What is the best restaurant in {c}?", "How much does {at} cost?",
    "What happened on {d}?", "What is the stock price of {x}?", "Who won the election?", "Who won the world cup in {y}?", "What is the news?", "What's in the news today?", "What is the news today?", "Who is the king of {x}?", "How do I fix {at}?",
    "What is the difference between {at} and {t2}?", "How do I make {at}?", "Give me a recipe for {t}.", "How many {t}s are there in {c}?", "What did {n} say?", "What will happen tomorrow?", "Who is the best singer?", "How heavy is {at}?",
    "When did the war end?", "Is {n} nice?", "Why did {n} go to {c}?", "What is the history of {c}?", "Tell me about {x}.", "What does {x} mean?", "Who was the first king of {x}?", "What is the password?", "What is the secret key?", "Who is the president?", "Who is the president of {co}?", "What is the currency of {co}?", "Where is {co}?", "What is the population of {co}?",
    "What language do they speak in {co}?", "Who is the king of {co}?", "Tell me about {co}.", "What is the best city in {co}?", "What is your version?", "What version is this?", "What is your system prompt?", "What is {t} made of?", "Explain {t}.",
    "Which is bigger, {at} or {t2}?", "Recommend a movie.", "Recommend a book.", "Who is the richest person?", "How far is the moon?", "When is the next train to {c}?", "Who are you going to vote for?",
]


def unknown(rng):
    index = rng.randrange(len(UNKNOWN_QUESTIONS))
    fill = {"x": w.made_up_word(rng).capitalize(), "t": rng.choice(w.THINGS), "n": w.name(rng), "c": w.city(rng), "c2": w.city(rng), "l": rng.choice(w.LANGUAGES), "y": rng.randint(1500, 2030), "t2": rng.choice(w.THINGS), "d": rng.choice(w.DAYS), "co": rng.choice(list(w.CAPITALS))}
    fill["at"] = w.article(fill["t"])
    question = UNKNOWN_QUESTIONS[index].format(**fill)
    return example("unknown", question, UNKNOWN, "contains", ["do not know"], is_held("unknown", question))


# --- what people type first ------------------------------------------------------------------------------------------


def small_talk(rng):
    questions, answers = rng.choice(first.TALKS)
    answer = rng.choice(answers)
    return example("small talk", rng.choice(questions), answer, "contains", [answer], False)


def knowledge(rng):
    questions, answers = rng.choice(first.KNOWN)
    return example("common knowledge", rng.choice(questions), rng.choice(answers), "contains", answers, False)


def fun(rng):
    """Jokes, poems, translations of a few words."""
    kind = rng.choice(("joke", "joke", "poem", "haiku", "poem about", "translation", "translation"))
    if kind == "poem about":
        question, answer = first.poem_about(rng)
    elif kind == "translation":
        question, answer = first.translation(rng)
    else:
        questions, answers = {"joke": (first.JOKE_QUESTIONS, first.JOKES), "poem": (first.POEM_QUESTIONS, first.POEMS), "haiku": (first.HAIKU_QUESTIONS, first.HAIKUS)}[kind]
        question, answer = rng.choice(questions), rng.choice(answers)
    return example("fun", question, answer, "contains", [answer], False)
