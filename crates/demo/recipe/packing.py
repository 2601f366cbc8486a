"""Turns conversations into training batches: rows of several whole conversations, in three row lengths."""

import json
import random

import numpy as np
import torch

import vocabulary
from chat import render

ROW_LENGTHS = (128, 384, 1024)
BATCH_TOKENS = 2304


def load_conversations(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def encode_all(tokenizer, conversations, seed=1):
    """(ids, wanted) of every conversation; some with tightly written JSON, as other template engines write it."""
    rng = random.Random(seed)
    texts = [render(c["messages"], c.get("tools"), tight=rng.random() < 0.3) for c in conversations]
    encoded = tokenizer.encode_batch(texts)
    return [(e.ids, vocabulary.mark_wanted(tokenizer, e.ids)) for e in encoded]


def fill_rows(encoded, length):
    """First fit over a few open rows; a conversation is never cut."""
    rows, opened = [], []
    for item in encoded:
        size = len(item[0])
        place = next((row for row in opened if row[0] + size <= length), None)
        if place is None:
            place = [0, []]
            opened.append(place)
            if len(opened) > 12:
                fullest = max(range(len(opened)), key=lambda i: opened[i][0])
                rows.append(opened.pop(fullest)[1])
        place[0] += size
        place[1].append(item)
    return rows + [row[1] for row in opened]


def batch_of(rows, length):
    """Tensors for one training step. A token weighs less in a longer answer, so that a "Yes." counts beside a story."""
    shape = (len(rows), length)
    tokens, segments, positions = (np.zeros(shape, np.int64) for _ in range(3))
    picked, targets, weight = [], [], []
    for r, row in enumerate(rows):
        at = 0
        for s, (ids, wanted) in enumerate(row, 1):
            end, share = at + len(ids), max(1, sum(wanted)) ** -0.5
            tokens[r, at:end], segments[r, at:end], positions[r, at:end] = ids, s, np.arange(len(ids))
            for i in range(1, len(ids)):
                if wanted[i]:
                    picked.append(r * length + at + i - 1)
                    targets.append(ids[i])
                    weight.append(share)
            at = end
    return {
        "tokens": torch.from_numpy(tokens), "segments": torch.from_numpy(segments), "positions": torch.from_numpy(positions),
        "picked": torch.tensor(picked), "targets": torch.tensor(targets), "weight": torch.tensor(weight),
    }


def batches(encoded, seed):
    """All batches of one pass, in random order."""
    rng = random.Random(seed)
    encoded = list(encoded)
    rng.shuffle(encoded)
    result, low = [], 0
    for length in ROW_LENGTHS:
        rows = fill_rows([item for item in encoded if low < len(item[0]) <= length], length)
        rng.shuffle(rows)
        count = max(1, BATCH_TOKENS // length)
        result += [(length, rows[i : i + count]) for i in range(0, len(rows) - count + 1, count)]
        low = length
    rng.shuffle(result)
    return result


def copy_batch(rng, vocabulary_size, length=ROW_LENGTHS[0]):
    """Random tokens, a gap, and the same tokens again; loss on the second time. Teaches copying, nothing else.

    Half of the phrases are lists: the same one or two tokens stand between all items, so that what comes next depends
    on more than the token before it.
    """
    rows = []
    for _ in range(BATCH_TOKENS // length):
        row, room = [], length
        while room > 6:
            size = min(int(rng.integers(2, 13)), (room - 2) // 2)
            gap = int(rng.integers(0, min(8, room - 2 * size) + 1))
            phrase = rng.integers(3, vocabulary_size, size)
            if rng.random() < 0.5:
                every = int(rng.integers(2, 4))
                separator = rng.integers(3, vocabulary_size, every - 1)
                for place in range(1, every):
                    phrase[place::every] = separator[place - 1]
            between = rng.integers(3, vocabulary_size, gap).tolist()
            row.append((phrase.tolist() + between + phrase.tolist(), [False] * (size + gap + 1) + [True] * (size - 1)))
            room -= 2 * size + gap
        rows.append(row)
    return batch_of(rows, length)
