"""The model itself: a Llama-shaped transformer in PyTorch (RMSNorm, RoPE, grouped-query attention, SwiGLU).

Owns the shape, the initial weights, the forward pass over packed rows (training) and the forward pass with a cache
(evaluation). Weights are a flat dictionary of tensors. RoPE turns neighbouring pairs (0,1), (2,3), ... as llama.cpp does
for the architecture "llama", so the export needs no permutation.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Shape:
    """Every number that fixes the model's size. Widths are multiples of 32, as Q8_0 blocks demand."""

    vocabulary: int = 2048
    width: int = 192
    layers: int = 5
    heads: int = 6
    kv_heads: int = 3
    hidden: int = 512
    context: int = 2048
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head_width(self):
        return self.width // self.heads

    def as_dict(self):
        return asdict(self)


def initial_weights(seed, shape):
    """Weights as a flat dictionary; the matrices of all layers are stacked along their first axis."""
    d, kv, f, n = shape.width, shape.kv_heads * shape.head_width, shape.hidden, shape.layers
    chance = torch.Generator().manual_seed(seed)

    def matrix(rows, columns, scale=1.0):
        return torch.randn(n, rows, columns, generator=chance) * (scale * rows**-0.5)

    return {
        "embedding": torch.randn(shape.vocabulary, d, generator=chance) * d**-0.5,
        "attention_norm": torch.ones(n, d),
        "q": matrix(d, d),
        "k": matrix(d, kv),
        "v": matrix(d, kv),
        "o": matrix(d, d, (2 * n) ** -0.5),
        "mlp_norm": torch.ones(n, d),
        "gate": matrix(d, f),
        "up": matrix(d, f),
        "down": matrix(f, d, (2 * n) ** -0.5),
        "final_norm": torch.ones(d),
    }


def parameter_count(weights):
    return sum(value.numel() for value in weights.values())


def rms_norm(x, gain, epsilon):
    return F.rms_norm(x, gain.shape, gain, epsilon)


def rope_turns(positions, shape):
    """Complex numbers of length one, [..., 1, head_width / 2], that turn the pairs of a head at integer positions."""
    half = shape.head_width // 2
    frequency = shape.rope_base ** (-torch.arange(half) * 2.0 / shape.head_width)
    angle = positions[..., None, None] * frequency
    return torch.polar(torch.ones_like(angle), angle)


def turn_pairs(x, turns):
    """Rotate neighbouring pairs of the last axis; x is [batch, time, heads, head_width]."""
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns).flatten(-2)


def times(x, matrix):
    """x times a matrix, computed in the matrix's type."""
    return x.to(matrix.dtype) @ matrix


def project(x, layer, turns, shape):
    """Queries, keys and values of one layer as [batch, heads, time, width], the first two turned by their positions."""
    batch, time, _ = x.shape
    x = x.to(layer["q"].dtype)
    q = (x @ layer["q"]).view(batch, time, shape.heads, shape.head_width)
    k = (x @ layer["k"]).view(batch, time, shape.kv_heads, shape.head_width)
    v = (x @ layer["v"]).view(batch, time, shape.kv_heads, shape.head_width)
    turned = (turn_pairs(q, turns).to(x.dtype), turn_pairs(k, turns).to(x.dtype), v)
    return tuple(part.transpose(1, 2) for part in turned)


def bias_of(allowed, kind):
    """What is added to the scores, for [batch, time of q, time of k]."""
    return torch.zeros(allowed.shape, dtype=kind).masked_fill_(~allowed, -torch.inf)[:, None]


def attend(q, k, v, bias, shape):
    """Grouped-query attention; bias is [batch, 1, time of q, time of k], minus infinity where a token may not look."""
    group = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    share = torch.softmax(q @ k.mT * shape.head_width**-0.5 + bias, dim=-1)
    return (share @ v).transpose(1, 2).flatten(2)


def mlp(x, layer):
    x = x.to(layer["gate"].dtype)
    return (F.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


LAYER_NAMES = ("attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


def layer_of(weights, index):
    return {name: weights[name][index] for name in LAYER_NAMES}


def hidden_states(weights, tokens, segments, positions, shape):
    """Final normalised states for packed rows: a token sees earlier tokens of its own segment only."""
    time = tokens.shape[1]
    causal = torch.ones(time, time, dtype=torch.bool).tril()
    allowed = causal & (segments[:, :, None] == segments[:, None, :])
    bias = bias_of(allowed, weights["q"].dtype)
    turns = rope_turns(positions, shape)
    x = F.embedding(tokens, weights["embedding"]).float()
    for index in range(shape.layers):
        layer = layer_of(weights, index)
        q, k, v = project(rms_norm(x, layer["attention_norm"], shape.epsilon), layer, turns, shape)
        x = x + times(attend(q, k, v, bias, shape), layer["o"])
        x = x + mlp(rms_norm(x, layer["mlp_norm"], shape.epsilon), layer)
    return rms_norm(x, weights["final_norm"], shape.epsilon)


def mean_loss(weights, batch, shape):
    """Mean negative log-likelihood of the wanted tokens, which `picked` names by their flat positions."""
    states = hidden_states(weights, batch["tokens"], batch["segments"], batch["positions"], shape)
    logits = logits_of(weights, states.flatten(0, 1)[batch["picked"]]).float()
    losses = F.cross_entropy(logits, batch["targets"], reduction="none")
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def empty_cache(batch, length, shape):
    size = (shape.layers, batch, shape.kv_heads, length, shape.head_width)
    return {"k": torch.zeros(size), "v": torch.zeros(size)}


def forward_cached(weights, cache, tokens, offsets, shape):
    """Run new tokens [batch, time] at offsets [batch] through the model, filling the cache; returns final states."""
    length = cache["k"].shape[3]
    positions = offsets[:, None] + torch.arange(tokens.shape[1])[None]
    bias = bias_of(torch.arange(length)[None, None] <= positions[:, :, None], weights["q"].dtype)
    turns = rope_turns(positions, shape)
    row = torch.arange(tokens.shape[0])[:, None]
    x = weights["embedding"][tokens]
    for index in range(shape.layers):
        layer = layer_of(weights, index)
        q, k, v = project(rms_norm(x, layer["attention_norm"], shape.epsilon), layer, turns, shape)
        cache["k"][index][row, :, positions] = k.transpose(1, 2)
        cache["v"][index][row, :, positions] = v.transpose(1, 2)
        x = x + attend(q, cache["k"][index], cache["v"][index], bias, shape) @ layer["o"]
        x = x + mlp(rms_norm(x, layer["mlp_norm"], shape.epsilon), layer)
    return rms_norm(x, weights["final_norm"], shape.epsilon)


def logits_of(weights, states):
    return times(states, weights["embedding"].T)
