"""A start that can copy: initial weights whose first two layers already hold an induction circuit.

Copying (a name, a list, a tool's argument) is what a small model learns last, and most questions here need it. So the
attention of layers 0 and 1 does not start at random. The residual stream is laid out as

    [ one constant | the token's code | room for the code of the token before ]

Layer 0 attends one position back and writes that token's code into the room. Layer 1 looks for a position whose
earlier neighbour is the present token and adds the code of what stands there, which the tied output then reads.
Everything is trained further; nothing is held fixed.
"""

import numpy as np

CONSTANT = 4.0  # value of the constant entry of every embedding
BACK_SHARPNESS = 4.0  # how much better "one back" scores than its neighbours
MATCH_SHARPNESS = 14.0  # score of a matching token
WRITE = 2.0  # size of the earlier token's code beside the token's own
COPY = 3.0  # size of the copied code
FINAL_GAIN = 0.15  # keeps the first logits mild
LOW_PAIRS = 8  # slowly turning RoPE pairs that the match uses, so that distance matters little


def prepare(weights, shape, seed):
    """Overwrite embedding, the attention of layers 0 and 1, and the final gain; clear what layers write at first."""
    weights = {name: np.array(value, np.float32) for name, value in weights.items()}
    chance = np.random.default_rng(seed)
    code = (shape.width - 1) // 2
    weights["o"][:] = 0
    weights["down"][:] = 0
    weights["final_norm"][:] = FINAL_GAIN
    weights["embedding"] = embeddings(chance, shape, code)
    for name in ("q", "k", "v"):
        weights[name][:2] = 0
    look_back(weights, shape, code)
    look_for_match(weights, shape, code, chance)
    return weights


def embeddings(chance, shape, code):
    table = np.zeros((shape.vocabulary, shape.width), np.float32)
    table[:, 0] = CONSTANT
    table[:, 1 : 1 + code] = chance.normal(size=(shape.vocabulary, code))
    table[:, 1 + code : 1 + 2 * code] = 0.1 * chance.normal(size=(shape.vocabulary, code))
    return table


def spread(shape, code, extra):
    """Root mean square of the residual stream, which the norm divides by."""
    return np.sqrt((CONSTANT**2 + code * 1.01 + extra) / shape.width)


def columns(shape, code, head):
    """The part of the code that key-value head `head` carries."""
    width = shape.head_width
    return np.arange(1 + head * width, min(1 + (head + 1) * width, 1 + code))


def look_back(weights, shape, code):
    """Layer 0: constant queries and keys, turned so that RoPE makes the position one back score best."""
    width, group = shape.head_width, shape.heads // shape.kv_heads
    turn = shape.rope_base ** (-np.arange(width // 2) * 2.0 / width)
    strength = np.zeros(width // 2)
    strength[:4] = (1.5, 1.2, 1.0, 1.0)
    strength *= BACK_SHARPNESS * np.sqrt(width) / (strength * (1 - np.cos(turn))).sum()
    rms = spread(shape, code, 0.0)
    query, key = np.zeros(width), np.zeros(width)
    query[0::2], query[1::2] = np.sqrt(strength) * np.cos(turn), -np.sqrt(strength) * np.sin(turn)
    key[0::2] = np.sqrt(strength)
    weights["q"][0][0] = np.tile(query, shape.heads) * rms / CONSTANT
    weights["k"][0][0] = np.tile(key, shape.kv_heads) * rms / CONSTANT
    for kv in range(shape.kv_heads):
        part = columns(shape, code, kv)
        lanes = np.arange(len(part))
        weights["v"][0][part, kv * width + lanes] = 1
        for head in range(kv * group, (kv + 1) * group):
            weights["o"][0][head * width + lanes, part + code] = WRITE * rms / group


def look_for_match(weights, shape, code, chance):
    """Layer 1: queries from the token's code, keys from the room, values from the token's code."""
    width, group = shape.head_width, shape.heads // shape.kv_heads
    low = np.arange(width // 2 - LOW_PAIRS, width // 2)
    lanes = np.concatenate([2 * low, 2 * low + 1])
    rms = spread(shape, code, code * WRITE**2)
    size = np.sqrt(MATCH_SHARPNESS * np.sqrt(width) / len(lanes)) * rms
    for kv in range(shape.kv_heads):
        projection = chance.normal(size=(code, len(lanes))) / np.sqrt(code) * size
        weights["k"][1][1 + code : 1 + 2 * code, kv * width + lanes] = projection / WRITE
        part = columns(shape, code, kv)
        carried = np.arange(len(part))
        weights["v"][1][part, kv * width + carried] = rms
        for head in range(kv * group, (kv + 1) * group):
            weights["q"][1][1 : 1 + code, head * width + lanes] = projection
            weights["o"][1][head * width + carried, part] = COPY / group
