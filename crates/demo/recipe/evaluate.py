"""Asks the held-out questions, greedily, over the weights as the GGUF file holds them, and counts right answers.

A right answer also ends by itself: one that runs into the length limit is wrong.
"""

import argparse
import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import export
import model
import train
import vocabulary
from chat import END, render
from progress import Progress

ROOMS = ((96, 30), (512, 20), (1900, 4))
ANSWER_ROOM = 120


# --- answering -----------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="shape")
def read_prompts(weights, cache, tokens, lengths, shape):
    states, cache = model.forward_cached(weights, cache, tokens, jnp.zeros(tokens.shape[0], jnp.int32), shape)
    last = jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return jnp.argmax(model.logits_of(weights, last), axis=-1), cache


@partial(jax.jit, static_argnames="shape", donate_argnums=1)
def next_tokens(weights, cache, token, offsets, shape):
    states, cache = model.forward_cached(weights, cache, token[:, None], offsets, shape)
    return jnp.argmax(model.logits_of(weights, states[:, 0]), axis=-1), cache


def answer_batch(weights, shape, prompts, room, end):
    """Greedy continuations of prompts (lists of ids), each up to the end token; None where it never came."""
    length, batch = room
    rows = prompts + [[0]] * (batch - len(prompts))
    tokens = np.zeros((batch, length), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    offsets = np.array([len(row) for row in rows], np.int32)
    token, cache = read_prompts(weights, model.empty_cache(batch, length + ANSWER_ROOM, shape), tokens, offsets, shape)
    written, done = [[] for _ in rows], [len(row) == 1 for row in rows]
    for _ in range(ANSWER_ROOM):
        for i, t in enumerate(np.asarray(token)):
            done[i] = done[i] or t == end
            if not done[i]:
                written[i].append(int(t))
        if all(done):
            break
        token, cache = next_tokens(weights, cache, token, offsets, shape)
        offsets = offsets + 1
    return [w if d else None for w, d in zip(written, done)][: len(prompts)]


def answer_all(weights, shape, tokenizer, conversations):
    """The text of every answer, None for one that does not end."""
    prompts = [tokenizer.encode(render(c["messages"][:-1], c.get("tools"), answer_next=True)).ids for c in conversations]
    # Neighbours share a prompt's length and a family, hence about an answer's length.
    order = sorted(range(len(prompts)), key=lambda i: (room_for(prompts[i]), conversations[i]["family"]))
    answers, progress, finished = [None] * len(prompts), Progress("evaluate", len(prompts)), 0
    end = tokenizer.token_to_id(END)
    while finished < len(order):
        room = room_for(prompts[order[finished]])
        group = [i for i in order[finished : finished + room[1]] if room_for(prompts[i]) == room]
        for i, ids in zip(group, answer_batch(weights, shape, [prompts[i] for i in group], room, end)):
            answers[i] = None if ids is None else tokenizer.decode(ids, skip_special_tokens=False)
        finished += len(group)
        progress.show(finished)
    progress.close()
    return answers


def room_for(prompt):
    """The smallest room, (prompt tokens, prompts at once), that holds a prompt."""
    return next(room for room in ROOMS if len(prompt) <= room[0])


# --- judging -------------------------------------------------------------------------------------------------------


def parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def tool_call_in(text):
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text.strip(), re.DOTALL)
    return parsed(found[1]) if found else None


def is_story(text, expected):
    sentences = re.findall(r"[.!?]", text)
    return len(sentences) >= 3 and text.rstrip()[-1:] in '.!?"' and all(word in text for word in expected)


CHECKS = {
    "contains": lambda text, expected: all(word.lower() in text.lower() for word in expected),
    "exact": lambda text, expected: text.strip().rstrip(".") == expected,
    "starts": lambda text, expected: text.strip().startswith(expected),
    "number": lambda text, expected: [int(n) for n in re.findall(r"\d+", text)][-1:] == [expected],
    "json": lambda text, expected: parsed(text) == expected,
    "tool call": lambda text, expected: tool_call_in(text) == expected,
    "story": is_story,
}


def is_right(check, answer):
    return answer is not None and bool(CHECKS[check["kind"]](answer, check["expected"]))


def evaluate(gguf, work, held_out, every=1):
    """(conversation, answer, right) for every held-out question."""
    _, shape, _ = train.load(work / "weights.npz")
    weights = {name: jnp.asarray(value) for name, value in export.read_weights(gguf, shape).items()}
    tokenizer = vocabulary.load(work / "tokenizer.json")
    conversations = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()[::every]]
    answers = answer_all(weights, shape, tokenizer, conversations)
    return [(c, a, is_right(c["check"], a)) for c, a in zip(conversations, answers)]


def table(results):
    """Markdown: accuracy per family."""
    lines = ["| family | held-out questions | right | accuracy |", "|---|---|---|---|"]
    for family in dict.fromkeys(c["family"] for c, _, _ in results):
        marks = [right for c, _, right in results if c["family"] == family]
        lines.append(f"| {family} | {len(marks)} | {sum(marks)} | {sum(marks) / len(marks):.0%} |")
    return "\n".join(lines)


def figures(gguf, work):
    """Markdown: sizes, training figures and the file's digest."""
    _, shape, log = train.load(work / "weights.npz")
    points = log["points"]
    steps = sorted({min(len(points) - 1, round(i * (len(points) - 1) / 9)) for i in range(10)}) if points else []
    curve = [f"| {points[i]['step']} | {points[i]['tokens']:,} | {points[i]['minutes']:.1f} | {points[i].get('loss', '-')} | {points[i].get('copying', '-')} |" for i in steps]
    return "\n".join([
        f"- {log['parameters']:,} parameters: {shape.layers} layers of width {shape.width}, {shape.heads} heads over {shape.kv_heads} key-value heads, hidden width {shape.hidden}, vocabulary {shape.vocabulary}, context {shape.context}",
        f"- file: {gguf.stat().st_size:,} bytes, SHA-256 `{export.digest(gguf)}`",
        f"- training: {log['steps']:,} steps, {log['tokens']:,} tokens, {log['minutes']} minutes, seed {log['seed']}",
        "", "| step | tokens seen | minutes | loss on conversations | loss on mere copying |", "|---|---|---|---|---|", *curve,
    ])


def print_mistakes(results, count):
    for conversation, answer, right in results:
        if not right and count > 0:
            count -= 1
            question = conversation["messages"][-2]["content"]
            print(f"[{conversation['family']}] {question!r}\n   got {answer!r}, expected {conversation['check']['expected']!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder with weights.npz and tokenizer.json")
    parser.add_argument("--held-out", type=Path, default=Path(__file__).parent / "heldout.jsonl")
    parser.add_argument("--mistakes", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--every", type=int, default=1, help="ask only every n-th question")
    options = parser.parse_args()
    results = evaluate(options.gguf, options.work, options.held_out, options.every)
    print_mistakes(results, options.mistakes)
    text = table(results)
    (options.work / "table.md").write_text(text + "\n")
    (options.work / "figures.md").write_text(figures(options.gguf, options.work) + "\n")
    print(text)
    total = sum(right for _, _, right in results)
    print(f"evaluate: {total} of {len(results)} right")


if __name__ == "__main__":
    main()
