"""Training: Muon for the matrices, AdamW for embedding and norms, warm-up and cosine, loss on the assistant's tokens.

The schedule ends at --steps or --minutes, whichever comes first, so a busy machine gives a shorter run, not a later one.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import induction
import model
import packing
import vocabulary
from progress import Progress

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
MATRIX_RATE, EMBEDDING_RATE, OTHER_RATE, DECAY, WARM_UP = 0.02, 0.02, 0.005, 0.02, 0.02
# Five steps of a quintic iteration towards the nearest orthogonal matrix.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix, steps=5):
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def muon_update(momentum, gradient):
    momentum = 0.95 * momentum + gradient
    ahead = gradient + 0.95 * momentum
    turned = jnp.stack([orthogonalise(ahead[i]) for i in range(ahead.shape[0])])
    scale = max(1.0, gradient.shape[2] / gradient.shape[1]) ** 0.5
    return momentum, turned * scale


def adam_update(first, second, gradient, step):
    first = 0.9 * first + 0.1 * gradient
    second = 0.98 * second + 0.02 * gradient**2
    return first, second, first / (1 - 0.9**step) / (jnp.sqrt(second / (1 - 0.98**step)) + 1e-9)


def empty_state(weights):
    first = {name: jnp.zeros_like(value) for name, value in weights.items()}
    return {"first": first, "second": {name: jnp.zeros_like(weights[name]) for name in weights if name not in MATRICES}}


@partial(jax.jit, static_argnames="shape")
def loss_and_gradients(weights, batch, shape):
    return jax.value_and_grad(model.mean_loss)(weights, batch, shape)


@partial(jax.jit, donate_argnums=(0, 1))
def update(weights, state, gradients, rate, step):
    """One step of the optimisers; `rate` is the schedule's factor between 0 and 1."""
    new, first, second = {}, {}, {}
    for name, value in weights.items():
        if name in MATRICES:
            first[name], change = muon_update(state["first"][name], gradients[name])
            new[name] = value * (1 - DECAY * MATRIX_RATE * rate) - MATRIX_RATE * rate * change
        else:
            first[name], second[name], change = adam_update(state["first"][name], state["second"][name], gradients[name], step)
            new[name] = value - (EMBEDDING_RATE if name == "embedding" else OTHER_RATE) * rate * change
    return new, {"first": first, "second": second}


def compile_all(encoded, shape, seed):
    """Compile every batch shape before the schedule's clock starts."""
    weights = model.initial_weights(jax.random.key(seed), shape)
    seen = set()
    for length, rows in packing.batches(encoded, 0):
        if length not in seen:
            seen.add(length)
            _, gradients = loss_and_gradients(weights, packing.batch_of(rows, length), shape)
    jax.block_until_ready(update(weights, empty_state(weights), gradients, 0.1, 1.0))


def schedule(share):
    """Linear warm-up, then a cosine down to a fiftieth."""
    if share < WARM_UP:
        return (share + 1e-3) / WARM_UP
    return 0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * min(1.0, (share - WARM_UP) / (1 - WARM_UP))))


def save(path, weights, shape, log):
    np.savez(path, **{name: np.asarray(value) for name, value in weights.items()})
    path.with_suffix(".json").write_text(json.dumps({"shape": shape.as_dict(), "log": log}, indent=1))


def load(path):
    about = json.loads(path.with_suffix(".json").read_text())
    with np.load(path) as stored:
        weights = {name: jnp.asarray(stored[name]) for name in stored.files}
    return weights, model.Shape(**about["shape"]), about["log"]


def endless(encoded):
    seed = 0
    while True:
        yield from packing.batches(encoded, seed)
        seed += 1


@dataclass(frozen=True)
class Plan:
    """When a run ends, how large its steps are, and how much mere copying it mixes in at first."""

    steps: int
    minutes: float
    seed: int
    rate: float
    copying: float
    copying_until: float

    def copy_share(self, share):
        """How many of the batches are mere copying: many at first, then a few."""
        if share < self.copying_until:
            return self.copying
        return min(self.copying, max(0.04, self.copying - 4 * (share - self.copying_until)))


class Log:
    """Mean losses of the conversations and of the copying batches, every few steps."""

    def __init__(self):
        self.points, self.tokens, self.recent = [], 0, {"loss": [], "copying": []}

    def add(self, step, minutes, kind, loss, batch):
        self.recent[kind].append(float(loss))
        self.tokens += int((batch["segments"] > 0).sum())
        if step % 20 == 0:
            means = {kind: round(float(np.mean(losses)), 4) for kind, losses in self.recent.items() if losses}
            self.points.append({"step": step, "tokens": self.tokens, "minutes": round(minutes, 2), **means})
            self.recent = {kind: [] for kind in self.recent}


def run(encoded, weights, shape, plan, out):
    """Train and save; a copy of the weights is saved every five minutes."""
    state, chance, log = empty_state(weights), np.random.default_rng(plan.seed), Log()
    conversations = endless(encoded)
    progress, started, saved, step = Progress("train", 1.0), time.monotonic(), 0.0, 0
    while True:
        elapsed = (time.monotonic() - started) / 60
        share = max(step / plan.steps, elapsed / plan.minutes)
        if share >= 1:
            break
        step += 1
        copying = chance.random() < plan.copy_share(share)
        batch = packing.copy_batch(chance, shape.vocabulary) if copying else packing.batch_of(*reversed(next(conversations)))
        loss, gradients = loss_and_gradients(weights, batch, shape)
        weights, state = update(weights, state, gradients, plan.rate * float(schedule(share)), float(step))
        log.add(step, elapsed, "copying" if copying else "loss", loss, batch)
        if log.points:
            progress.show(share, f"{log.points[-1]}, {log.tokens / (60 * elapsed):.0f} tokens/s")
        if elapsed - saved > 5:
            saved = elapsed
            save(out, weights, shape, {"points": log.points})
    progress.close()
    figures = {"points": log.points, "steps": step, "tokens": log.tokens, "minutes": round(elapsed, 1), "seed": plan.seed, "parameters": model.parameter_count(weights)}
    save(out, weights, shape, figures)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder with train.jsonl; takes tokenizer.json and weights.npz")
    parser.add_argument("--steps", type=int, default=3535)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate", type=float, default=0.5, help="factor on the learning rates (default: 0.5)")
    parser.add_argument("--copying", type=float, default=0.12, help="share of mere copying batches at first (default: 0.12)")
    parser.add_argument("--copying-until", type=float, default=0.1, help="share of the schedule after which they become few (default: 0.1)")
    parser.add_argument("--start", type=Path, help="go on from these weights (npz) instead of random ones")
    options = parser.parse_args()
    conversations = packing.load_conversations(options.work / "train.jsonl")
    tokenizer = vocabulary.train(conversations[:30000], options.work / "tokenizer.json")
    encoded = packing.encode_all(tokenizer, conversations)
    sizes = np.array([len(ids) for ids, _ in encoded])
    wanted = sum(sum(w) for _, w in encoded)
    print(f"train: {len(sizes)} conversations, {sizes.sum()} tokens (longest {sizes.max()}), {wanted} of them wanted", flush=True)
    shape = model.Shape(vocabulary=tokenizer.get_vocab_size())
    compile_all(encoded, shape, options.seed)
    weights = model.initial_weights(jax.random.key(options.seed), shape)
    weights = {name: jnp.asarray(value) for name, value in induction.prepare(weights, shape, options.seed).items()}
    if options.start:
        weights, shape, _ = load(options.start)
    plan = Plan(options.steps, options.minutes, options.seed, options.rate, options.copying, options.copying_until)
    log = run(encoded, weights, shape, plan, options.work / "weights.npz")
    print(f"train: {log['parameters']} parameters, {log['steps']} steps, {log['tokens']} tokens, {log['minutes']} min, last loss {log['points'][-1] if log['points'] else '-'}")


if __name__ == "__main__":
    main()
