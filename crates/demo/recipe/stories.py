"""Stories: a hero, a thing, a friend, and one of a few plots that hold together from the first sentence to the last."""

import re

import words as w
from families import example, is_held

STORY_QUESTIONS = ["Tell me a short story about {h} and {t}.", "Write a short story about {h} and {t}.", "Tell a story about {h} and {t}.", "I want a story about {h} and {t}.", "Please write a story about {h} and {t}.", "Tell me a story about {h} and {t}."]
STORY_ONE = ["Tell me a story about {h}.", "Write a short story about {h}.", "Tell me a short story about {h}.", "Tell a story about {h}.", "Write a story about {h}.", "tell me a story about {h}", "Can you tell me a story about {h}?", "A story about {h}, please."]
STORY_ANY = [
    "Tell me a story.", "Tell me a story", "tell me a story", "Tell a story.", "Tell me a short story.", "Tell me another story.", "Write a story.", "Write a short story.", "Write me a story.", "Can you tell me a story?",
    "A story, please.", "story", "Story!", "I want to hear a story.", "Please tell me a story.", "Do you know a story?", "Tell me a bedtime story.", "Read me a story.", "Make up a story.", "Tell me a fairy tale.", "tell a story", "Tell us a story.",
    "Write a short story", "Tell me a long story.", "Tell me a funny story.", "Give me a story.", "Once upon a time", "Once upon a time,",
]
PLACES = ["in the forest", "by the sea", "in a small village", "on a high hill", "near a river", "in a big town"]
MOODS = ["little", "curious", "happy", "brave", "clever", "kind"]
OPENINGS = ["Once upon a time there was {am} {h} who lived {p}.", "Once there was {am} {h} who lived {p}."]
# An arc each: h is the hero, t a thing, f a friend. Whoever is named is named again by the same words.
PLOTS = [
    "One day the {h} lost the {t} in the high grass and could not find it. Then {af} came by and helped to look for it. Together they found the {t} under an old tree. Since that day the {h} and the {f} are best friends.",
    "One morning the {h} found {at} by the road. Nobody knew whose {t} it was. At last an old {f} smiled and said: \"The {t} is mine.\" The {h} gave it back at once. The {f} was so glad that they had a big cake together.",
    "The {h} had {at} and loved it very much. One night a storm came and carried the {t} away. But {af} had seen where it fell. In the morning they walked there together and found the {t}. They danced all the way home.",
    "Every night the {h} dreamed of {at}. One morning the {h} packed some bread and went out to find one. On the way the {h} met {af}, and they went on together. Behind the last hill they saw the {t}, bright in the sun. The dream had come true.",
    "The {h} wanted to make {at}. But each time the {t} broke. Then {af} said: \"Try again, I will help you.\" So they worked together until the {t} was done. It was the most beautiful {t} of all.",
    "One winter day the {h} met {af} who was cold and hungry. The {h} had only some soup and {at}, but shared the soup. In spring the {f} came back with a gift. It was a second {t}, even better than the first. Now they drink tea together every Sunday.",
]


def story_text(rng, hero, treasure, friend=None):
    friend = friend or rng.choice([other for other in w.HEROES[:12] if other != hero])
    fill = {
        "h": hero, "t": treasure, "at": w.article(treasure), "f": friend, "af": w.article(friend), "am": w.article(rng.choice(MOODS)), "p": rng.choice(PLACES),
    }
    return " ".join(rng.choice(part).format(**fill) for part in (OPENINGS, PLOTS))


def stories(rng):
    hero, treasure = rng.choice(w.HEROES), rng.choice(w.TREASURES)
    roll = rng.random()
    if roll < 0.4:
        return example("stories", rng.choice(STORY_ANY), story_text(rng, hero, treasure), "story", [], False)
    if roll < 0.65:
        hero = rng.choice((hero, hero, rng.choice(w.CATEGORIES["animal"])))
        named = rng.choice((w.article(hero), w.article(hero), w.article(hero), "the " + hero))
        return example("stories", rng.choice(STORY_ONE).format(h=named), story_text(rng, hero, treasure), "story", [hero], False)
    if roll < 0.75:
        friend = rng.choice([other for other in w.HEROES + w.CATEGORIES["animal"] if other != hero])
        question = rng.choice(STORY_QUESTIONS).format(h=w.article(hero), t=w.article(friend))
        return example("stories", question, story_text(rng, hero, treasure, friend), "story", [hero, friend], is_held("story", hero, friend))
    question = rng.choice(STORY_QUESTIONS).format(h=w.article(hero), t=w.article(treasure))
    return example("stories", question, story_text(rng, hero, treasure), "story", [hero, treasure], is_held("story", hero, treasure))


def whole_pattern():
    """What the grammar can write: names may be any, but whoever is named must be named alike from beginning to end."""
    seen = set()

    def slot(found):
        name = found[1]
        if name in ("am", "p"):
            return "(?:" + "|".join(map(re.escape, (map(w.article, MOODS) if name == "am" else PLACES))) + ")"
        article, name = ("an? " if len(name) == 2 else ""), name[-1]
        if name in seen:
            return f"{article}(?P={name})"
        seen.add(name)
        return f"{article}(?P<{name}>\\w+)"

    for opening in OPENINGS:
        for plot in PLOTS:
            seen.clear()
            yield re.compile(re.sub(r"\\?\{(\w+)\\?\}", slot, re.escape(opening + " " + plot).replace("\\ ", " ")))


WHOLE = list(whole_pattern())


def is_whole(text):
    return any(pattern.fullmatch(text.strip()) for pattern in WHOLE)
