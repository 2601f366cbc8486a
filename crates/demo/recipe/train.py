"""Training: Muon for the matrices, AdamW for embedding and norms, warm-up and cosine, loss on the assistant's tokens.

The schedule ends at --steps or --minutes, whichever comes first, so a busy machine gives a shorter run, not a later one.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import model
import packing
import vocabulary
from progress import Progress

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
MATRIX_RATE, OTHER_RATE, DECAY, WARM_UP = 0.02, 0.004, 0.02, 0.03
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
            new[name] = value - OTHER_RATE * rate * change
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


def run(encoded, shape, steps, minutes, seed, out):
    """Train and save; the log holds the loss every few steps."""
    compile_all(encoded, shape, seed)
    weights = model.initial_weights(jax.random.key(seed), shape)
    state = empty_state(weights)
    progress, started, tokens, recent, points = Progress("train", 1.0), time.monotonic(), 0, [], []
    saved = started
    for step, (length, rows) in enumerate(endless(encoded), 1):
        elapsed = time.monotonic() - started
        share = max((step - 1) / steps, elapsed / (60 * minutes))
        if share >= 1:
            break
        batch = packing.batch_of(rows, length)
        loss, gradients = loss_and_gradients(weights, batch, shape)
        weights, state = update(weights, state, gradients, float(schedule(share)), float(step))
        recent.append(float(loss))
        tokens += int((batch["segments"] > 0).sum())
        if step % 20 == 0:
            points.append({"step": step, "tokens": tokens, "minutes": round(elapsed / 60, 2), "loss": round(float(np.mean(recent)), 4)})
            recent = []
            progress.show(share, f"step {step}, loss {points[-1]['loss']:.3f}, {tokens / (elapsed + 1e-9):.0f} tokens/s")
        if time.monotonic() - saved > 300:
            saved = time.monotonic()
            save(out, weights, shape, {"points": points})
    progress.close()
    log = {"points": points, "steps": step - 1, "tokens": tokens, "minutes": round((time.monotonic() - started) / 60, 1), "seed": seed, "parameters": model.parameter_count(weights)}
    save(out, weights, shape, log)
    return log


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder with train.jsonl; takes tokenizer.json and weights.npz")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    conversations = packing.load_conversations(options.work / "train.jsonl")
    tokenizer = vocabulary.train(conversations[:30000], options.work / "tokenizer.json")
    encoded = packing.encode_all(tokenizer, conversations)
    sizes = np.array([len(ids) for ids, _ in encoded])
    wanted = sum(sum(w) for _, w in encoded)
    print(f"train: {len(sizes)} conversations, {sizes.sum()} tokens (longest {sizes.max()}), {wanted} of them wanted", flush=True)
    shape = model.Shape(vocabulary=tokenizer.get_vocab_size())
    log = run(encoded, shape, options.steps, options.minutes, options.seed, options.work / "weights.npz")
    print(f"train: {log['parameters']} parameters, {log['steps']} steps, {log['tokens']} tokens, {log['minutes']} min, last loss {log['points'][-1]['loss'] if log['points'] else '-'}")


if __name__ == "__main__":
    main()
