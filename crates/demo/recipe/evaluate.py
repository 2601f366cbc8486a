"""Asks questions over the weights as the GGUF file holds them, greedily or sampled, and counts right answers.

A right answer also ends by itself: one that runs into the length limit is wrong.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

import export
import model
import storage
import stories
import vocabulary
from chat import END, render
from progress import Progress

AT_ONCE = 64
ANSWER_ROOM = 160


# --- answering -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: the temperature first, then both limits on the changed probabilities, as Sapwood does."""

    temperature: float = 0.0
    top_p: float = 0.95
    min_p: float = 0.05

    def pick(self, logits, chance):
        if self.temperature == 0:
            return logits.argmax(-1)
        share = torch.softmax(logits / self.temperature, -1)
        ordered, order = share.sort(-1, descending=True)
        kept = (ordered.cumsum(-1) - ordered < self.top_p) & (ordered >= self.min_p * ordered[:, :1])
        drawn = torch.multinomial(ordered * kept, 1, generator=chance)
        return order.gather(-1, drawn)[:, 0]


def answer_batch(weights, shape, prompts, end, sampling, chance):
    """Continuations of prompts (lists of ids), each up to the end token; None where it never came."""
    offsets = torch.tensor([len(row) for row in prompts])
    length = int(offsets.max())
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in prompts])
    cache = model.empty_cache(len(prompts), length + ANSWER_ROOM, shape)
    states = model.forward_cached(weights, cache, tokens, torch.zeros_like(offsets), shape)
    states = states[torch.arange(len(prompts)), offsets - 1]
    written, done, rows = [[] for _ in prompts], [False] * len(prompts), list(range(len(prompts)))
    for _ in range(ANSWER_ROOM):
        token = sampling.pick(model.logits_of(weights, states), chance)
        for i, t in zip(rows, token.tolist()):
            done[i] = done[i] or t == end
            if not done[i]:
                written[i].append(t)
        left = [at for at, i in enumerate(rows) if not done[i]]
        if not left:
            break
        if len(left) < 0.7 * len(rows):
            rows, token, offsets = [rows[at] for at in left], token[left], offsets[left]
            cache = {name: value[:, left] for name, value in cache.items()}
        states = model.forward_cached(weights, cache, token[:, None], offsets, shape)[:, 0]
        offsets = offsets + 1
    return [w if d else None for w, d in zip(written, done)]


def answer_all(weights, shape, tokenizer, conversations, sampling=Sampling(), seed=0):
    """The text of every answer, None for one that does not end."""
    prompts = [tokenizer.encode(render(c["messages"][:-1], c.get("tools"), answer_next=True)).ids for c in conversations]
    # Neighbours share a family or a kind of check, hence about an answer's length.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]) > 96, conversations[i]["family"], conversations[i]["check"]["kind"], len(prompts[i])))
    answers, progress = [None] * len(prompts), Progress("evaluate", len(prompts))
    end, chance = tokenizer.token_to_id(END), torch.Generator().manual_seed(seed)
    for at in range(0, len(order), AT_ONCE):
        group = order[at : at + AT_ONCE]
        for i, ids in zip(group, answer_batch(weights, shape, [prompts[i] for i in group], end, sampling, chance)):
            answers[i] = None if ids is None else tokenizer.decode(ids, skip_special_tokens=False)
        progress.show(at + len(group))
    progress.close()
    return answers


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


def is_list(text, expected):
    """As many different things as are wanted, each of them from the list."""
    count, *known = expected
    items = text.strip().rstrip(".").lower().split(", ")
    return len(items) == len(set(items)) == count and set(items) <= set(known)


CHECKS = {
    "contains": lambda text, expected: all(word.lower() in text.lower() for word in expected),
    "exact": lambda text, expected: text.strip().rstrip(".") == expected,
    "any": lambda text, expected: any(word.lower() in text.lower() for word in expected),
    "starts": lambda text, expected: text.strip().startswith(expected),
    "ends": lambda text, expected: text.strip().rstrip(".").endswith(expected),
    "number": lambda text, expected: [int(n) for n in re.findall(r"\d+", text)][-1:] == [expected],
    "json": lambda text, expected: parsed(text) == expected,
    "tool call": lambda text, expected: tool_call_in(text) == expected,
    "story": is_story,
    "plot": lambda text, expected: stories.is_whole(text) and is_story(text, expected),
    "list": is_list,
}


def is_right(check, answer):
    return answer is not None and bool(CHECKS[check["kind"]](answer, check["expected"]))


def questions_of(path, every=1):
    """The conversations of a file; a list of first questions holds bare questions."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[::every]]
    for row in rows:
        if "question" in row:
            row["messages"] = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": ""}]
        row.setdefault("family", "first questions")
    return rows


def opened(gguf, work):
    """Weights as the file holds them, the shape and the tokenizer."""
    return *storage.read_gguf(gguf), vocabulary.load(work / "tokenizer.json")


def evaluate(gguf, work, path, every=1, sampling=Sampling(), seed=0):
    """(conversation, answer, right) for every question of a file."""
    conversations = questions_of(path, every)
    with torch.inference_mode():
        answers = answer_all(*opened(gguf, work), conversations, sampling, seed)
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
    _, shape, log = storage.load(work / "weights.npz")
    points = log["points"]
    steps = sorted({min(len(points) - 1, round(i * (len(points) - 1) / 9)) for i in range(10)}) if points else []
    curve = [f"| {points[i]['step']} | {points[i]['tokens']:,} | {points[i]['minutes']:.1f} | {points[i].get('loss', '-')} | {points[i].get('copying', '-')} |" for i in steps]
    return "\n".join([
        f"- {log['parameters']:,} parameters: {shape.layers} layers of width {shape.width}, {shape.heads} heads over {shape.kv_heads} key-value heads, hidden width {shape.hidden}, vocabulary {shape.vocabulary}, context {shape.context}",
        f"- file: {gguf.stat().st_size:,} bytes, SHA-256 `{export.digest(gguf)}`",
        f"- training: {log['steps']:,} steps, {log['tokens']:,} tokens, {log['minutes']} minutes of {log['workers']} workers on a busy machine, seed {log['seed']}",
        "", "| step | tokens seen | minutes | loss on conversations | loss on mere copying |", "|---|---|---|---|---|", *curve,
    ])


def print_mistakes(results, count):
    for conversation, answer, right in results:
        if not right and count > 0:
            count -= 1
            question = conversation["messages"][-2]["content"]
            print(f"[{conversation['family']}] {question!r}\n   got {answer!r}, expected {conversation['check']['expected']!r}")


def first_questions(gguf, work, path, seeds):
    """Markdown: how many of the first questions are right, greedily and at the recommended sampling."""
    results = evaluate(gguf, work, path)
    print_mistakes(results, len(results))
    greedy, count = sum(right for _, _, right in results), len(results)
    lines = ["| first questions | asked | right | share |", "|---|---|---|---|", f"| greedy | {count} | {greedy} | {greedy / count:.1%} |"]
    marks = []
    for seed in range(1, seeds + 1):
        sampled = evaluate(gguf, work, path, sampling=Sampling(*export.SAMPLING), seed=seed)
        print_mistakes(sampled, len(sampled))
        marks += [right for _, _, right in sampled]
    if marks:
        settings = "temperature {}, top_p {}, min_p {}".format(*export.SAMPLING)
        lines.append(f"| {settings}, {seeds} seeds | {len(marks)} | {sum(marks)} | {sum(marks) / len(marks):.1%} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder with weights.npz and tokenizer.json")
    parser.add_argument("--held-out", type=Path, default=Path(__file__).parent / "heldout.jsonl")
    parser.add_argument("--first", type=Path, default=Path(__file__).parent / "first_questions.jsonl")
    parser.add_argument("--seeds", type=int, default=5, help="how often the first questions are asked with sampling (default: 5)")
    parser.add_argument("--mistakes", type=int, default=0, help="print this many wrong answers to held-out questions")
    parser.add_argument("--every", type=int, default=1, help="ask only every n-th held-out question")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = first_questions(options.gguf, options.work, options.first, options.seeds)
    (options.work / "first.md").write_text(first + "\n")
    print(first, flush=True)
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
