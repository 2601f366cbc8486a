"""The model itself: a Llama-shaped transformer in JAX (RMSNorm, RoPE, grouped-query attention, SwiGLU).

Owns the shape, the initial weights, the forward pass over packed rows (training) and the forward pass with a cache
(evaluation). RoPE turns neighbouring pairs (0,1), (2,3), ... as llama.cpp does for the architecture "llama", so the
export needs no permutation.
"""

from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp


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


def initial_weights(key, shape):
    """Weights as a flat dictionary; the matrices of all layers are stacked along their first axis."""
    d, kv, f, n = shape.width, shape.kv_heads * shape.head_width, shape.hidden, shape.layers
    keys = iter(jax.random.split(key, 8))

    def matrix(rows, columns, scale=1.0):
        return jax.random.normal(next(keys), (n, rows, columns)) * (scale * rows**-0.5)

    return {
        "embedding": jax.random.normal(next(keys), (shape.vocabulary, d)) * d**-0.5,
        "attention_norm": jnp.ones((n, d)),
        "q": matrix(d, d),
        "k": matrix(d, kv),
        "v": matrix(d, kv),
        "o": matrix(d, d, (2 * n) ** -0.5),
        "mlp_norm": jnp.ones((n, d)),
        "gate": matrix(d, f),
        "up": matrix(d, f),
        "down": matrix(f, d, (2 * n) ** -0.5),
        "final_norm": jnp.ones((d,)),
    }


def parameter_count(weights):
    return sum(int(value.size) for value in weights.values())


def rms_norm(x, gain, epsilon):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * gain


def rope_angles(positions, shape):
    """Cosine and sine, [..., head_width / 2], for integer positions of any shape."""
    half = shape.head_width // 2
    frequency = shape.rope_base ** (-jnp.arange(half) * 2.0 / shape.head_width)
    angle = positions[..., None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def turn_pairs(x, cosine, sine):
    """Rotate neighbouring pairs of the last axis; x is [batch, time, heads, head_width]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    turned = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
    return turned.reshape(x.shape)


def project(x, layer, angles, shape):
    """Queries, keys and values of one layer, the first two turned by their positions."""
    batch, time, _ = x.shape
    q = (x @ layer["q"]).reshape(batch, time, shape.heads, shape.head_width)
    k = (x @ layer["k"]).reshape(batch, time, shape.kv_heads, shape.head_width)
    v = (x @ layer["v"]).reshape(batch, time, shape.kv_heads, shape.head_width)
    return turn_pairs(q, *angles), turn_pairs(k, *angles), v


def attend(q, k, v, allowed, shape):
    """Grouped-query attention; allowed is [batch, time of q, time of k]."""
    batch, time = q.shape[:2]
    group = shape.heads // shape.kv_heads
    q = q.reshape(batch, time, shape.kv_heads, group, shape.head_width)
    score = jnp.einsum("btkgd,bskd->bkgts", q, k) * shape.head_width**-0.5
    score = jnp.where(allowed[:, None, None], score, -1e30)
    share = jax.nn.softmax(score, axis=-1)
    mixed = jnp.einsum("bkgts,bskd->btkgd", share, v)
    return mixed.reshape(batch, time, shape.width)


def mlp(x, layer):
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


LAYER_NAMES = ("attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


def layers_of(weights):
    return {name: weights[name] for name in LAYER_NAMES}


def hidden_states(weights, tokens, segments, positions, shape):
    """Final normalised states for packed rows: a token sees earlier tokens of its own segment only."""
    time = tokens.shape[1]
    causal = jnp.tril(jnp.ones((time, time), bool))
    allowed = causal[None] & (segments[:, :, None] == segments[:, None, :])
    angles = rope_angles(positions, shape)
    x = weights["embedding"][tokens]
    for index in range(shape.layers):
        layer = {name: weights[name][index] for name in LAYER_NAMES}
        q, k, v = project(rms_norm(x, layer["attention_norm"], shape.epsilon), layer, angles, shape)
        x = x + attend(q, k, v, allowed, shape) @ layer["o"]
        x = x + mlp(rms_norm(x, layer["mlp_norm"], shape.epsilon), layer)
    return rms_norm(x, weights["final_norm"], shape.epsilon)


def mean_loss(weights, batch, shape):
    """Mean negative log-likelihood of the wanted tokens, which `picked` names by their flat positions."""
    states = hidden_states(weights, batch["tokens"], batch["segments"], batch["positions"], shape)
    logits = logits_of(weights, states.reshape(-1, shape.width)[batch["picked"]])
    spread = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, batch["targets"][:, None], axis=-1)[:, 0]
    weight = batch["weight"]
    return jnp.sum((spread - chosen) * weight) / jnp.maximum(jnp.sum(weight), 1.0)


def empty_cache(batch, length, shape):
    size = (shape.layers, batch, length, shape.kv_heads, shape.head_width)
    return {"k": jnp.zeros(size), "v": jnp.zeros(size)}


def forward_cached(weights, cache, tokens, offsets, shape):
    """Run new tokens [batch, time] at offsets [batch] through the model; returns final states and the filled cache."""
    batch, time = tokens.shape
    length = cache["k"].shape[2]
    positions = offsets[:, None] + jnp.arange(time)[None]
    allowed = jnp.arange(length)[None, None] <= positions[:, :, None]
    angles = rope_angles(positions, shape)
    row = jnp.arange(batch)[:, None]

    def block(x, carried):
        layer, old_k, old_v = carried
        q, k, v = project(rms_norm(x, layer["attention_norm"], shape.epsilon), layer, angles, shape)
        k = old_k.at[row, positions].set(k, mode="drop")
        v = old_v.at[row, positions].set(v, mode="drop")
        x = x + attend(q, k, v, allowed, shape) @ layer["o"]
        return x + mlp(rms_norm(x, layer["mlp_norm"], shape.epsilon), layer), (k, v)

    x, (k, v) = jax.lax.scan(block, weights["embedding"][tokens], (layers_of(weights), cache["k"], cache["v"]))
    return rms_norm(x, weights["final_norm"], shape.epsilon), {"k": k, "v": v}


def logits_of(weights, states):
    return states @ weights["embedding"].T
