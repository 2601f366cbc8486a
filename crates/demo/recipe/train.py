"""Training: Muon for the matrices, AdamW for embedding and norms, loss on the assistant's tokens.

The rate rises, stays, and falls during the last `--decay` steps; nothing depends on the clock. Several workers, one
thread each, compute the gradients of different batches and average them, so a step needs one meeting instead of one for
each product. The weights are those of the same number of workers and steps on any machine, but for rounding.
"""

import argparse
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import induction
import model
import packing
import storage
import vocabulary
from progress import Progress

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
MATRIX_RATE, EMBEDDING_RATE, OTHER_RATE, WEIGHT_DECAY = 0.02, 0.02, 0.005, 0.02
# Products are computed in half precision only where the processor does so itself: elsewhere it costs more than twice as much.
PRODUCTS = torch.bfloat16 if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported() else torch.float32
# Five steps of a quintic iteration towards the nearest orthogonal matrix.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack, steps=5):
    """The nearest orthogonal matrix, about, of every matrix of a stack. Half precision would be enough for a direction."""
    a, b, c = QUINTIC
    tall = stack.shape[1] > stack.shape[2]
    x = (stack.mT if tall else stack).to(PRODUCTS)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


def muon_update(momentum, gradient):
    momentum.mul_(0.95).add_(gradient)
    turned = orthogonalise(gradient + 0.95 * momentum)
    return turned * max(1.0, gradient.shape[2] / gradient.shape[1]) ** 0.5


def adam_update(first, second, gradient, step):
    first.mul_(0.9).add_(gradient, alpha=0.1)
    second.mul_(0.98).addcmul_(gradient, gradient, value=0.02)
    return first / (1 - 0.9**step) / ((second / (1 - 0.98**step)).sqrt() + 1e-9)


def empty_state(weights):
    first = {name: torch.zeros_like(value) for name, value in weights.items()}
    return {"first": first, "second": {name: torch.zeros_like(weights[name]) for name in weights if name not in MATRICES}}


def update(weights, state, gradients, rate, step):
    """One step of the optimisers; `rate` is the schedule's factor between 0 and 1."""
    for name, value in weights.items():
        first, gradient = state["first"][name], gradients[name]
        if name in MATRICES:
            value.mul_(1 - WEIGHT_DECAY * MATRIX_RATE * rate).sub_(muon_update(first, gradient), alpha=MATRIX_RATE * rate)
        else:
            change = adam_update(first, state["second"][name], gradient, step)
            value.sub_(change, alpha=(EMBEDDING_RATE if name == "embedding" else OTHER_RATE) * rate)


def halved(name, value):
    """What is multiplied may be rounded to half precision; the norms' gains are not."""
    return value if "norm" in name else value.to(PRODUCTS)


def loss_and_gradients(weights, batch, shape):
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    loss = model.mean_loss({name: halved(name, value) for name, value in leaves.items()}, batch, shape)
    loss.backward()
    return loss.item(), {name: value.grad for name, value in leaves.items()}


def averaged(gradients, workers):
    """The mean of all workers' gradients, in one exchange."""
    flat = torch.cat([value.flatten() for value in gradients.values()])
    if workers > 1:
        dist.all_reduce(flat)
        flat /= workers
    parts = flat.split([value.numel() for value in gradients.values()])
    return {name: part.view_as(value) for (name, value), part in zip(gradients.items(), parts)}


@dataclass(frozen=True)
class Plan:
    """When a run ends, how large its steps are, and how much mere copying it mixes in at first."""

    steps: int
    warm_up: int
    decay: int
    seed: int
    rate: float
    copying: float
    copying_until: int
    workers: int

    def rate_at(self, step):
        return self.rate * min(1.0, step / self.warm_up, (self.steps + 1 - step) / self.decay)

    def is_copying(self, step):
        """Whether a step's batches are mere copying: many at first, then a few."""
        share = self.copying if step < self.copying_until else min(self.copying, 0.04)
        return np.random.default_rng((self.seed, step)).random() < share


class Log:
    """Mean losses of the conversations and of the copying batches, every few steps."""

    def __init__(self, points=(), tokens=0):
        self.points, self.tokens, self.recent = list(points), tokens, {"loss": [], "copying": []}

    def add(self, step, minutes, kind, loss, tokens):
        self.recent[kind].append(loss)
        self.tokens += tokens
        if step % 20 == 0:
            means = {kind: round(float(np.mean(losses)), 4) for kind, losses in self.recent.items() if losses}
            self.points.append({"step": step, "tokens": self.tokens, "minutes": round(minutes, 2), **means})
            self.recent = {kind: [] for kind in self.recent}


def conversation_batches(encoded, plan):
    """Without end: for each step, one batch for every worker."""
    seed = 0
    while True:
        drawn = packing.batches(encoded, seed)
        whole = len(drawn) - len(drawn) % plan.workers
        for at in range(0, whole, plan.workers):
            yield drawn[at : at + plan.workers]
        seed += 1


def worker(rank, encoded, weights, shape, plan, out, meeting, resume):
    """One worker's whole run; the first of them reports and saves."""
    torch.set_num_threads(1)
    if plan.workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=plan.workers)
    state, log, first_step, spent = empty_state(weights), Log(), 1, 0.0
    if resume:
        kept = torch.load(out.with_suffix(".state"))
        weights, state, first_step, spent = kept["weights"], kept["state"], kept["step"] + 1, kept["minutes"]
        log = Log(kept["points"], kept["tokens"])
    conversations = conversation_batches(encoded, plan)
    for _ in islice(conversations, sum(not plan.is_copying(step) for step in range(1, first_step))):
        pass
    progress, started = Progress("train", plan.steps), time.monotonic()
    minutes = spent
    for step in range(first_step, plan.steps + 1):
        copying = plan.is_copying(step)
        if copying:
            batch = packing.copy_batch(np.random.default_rng((plan.seed, step, rank)), shape.vocabulary)
        else:
            batch = packing.batch_of(*reversed(next(conversations)[rank]))
        loss, gradients = loss_and_gradients(weights, batch, shape)
        update(weights, state, averaged(gradients, plan.workers), plan.rate_at(step), step)
        minutes = spent + (time.monotonic() - started) / 60
        if rank > 0:
            continue
        log.add(step, minutes, "copying" if copying else "loss", loss, plan.workers * int((batch["segments"] > 0).sum()))
        if log.points:
            progress.show(step, f"{log.points[-1]}")
        if step % 200 == 0 or step == plan.steps:
            kept = {"weights": weights, "state": state, "step": step, "minutes": minutes, "points": log.points, "tokens": log.tokens}
            torch.save(kept, out.with_suffix(".state"))
            figures = {
                "points": log.points, "steps": step, "tokens": log.tokens, "minutes": round(minutes, 1), "seed": plan.seed,
                "workers": plan.workers, "parameters": model.parameter_count(weights),
            }
            storage.save(out, weights, shape, figures)
    progress.close()


def run(encoded, weights, shape, plan, out, resume):
    """Start the workers, wait for them, and return the figures of the run."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (encoded, weights, shape, plan, out, Path(folder) / "meeting", resume)
        workers = [context.Process(target=worker, args=(rank, *arguments)) for rank in range(plan.workers)]
        for process in workers:
            process.start()
        for process in workers:
            process.join()
    if any(process.exitcode for process in workers):
        raise SystemExit("error: a training worker failed; see its messages above")
    return storage.load(out)[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder with train.jsonl; takes tokenizer.json and weights.npz")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--warm-up", type=int, default=60, help="steps in which the rate rises (default: 60)")
    parser.add_argument("--decay", type=int, default=1000, help="last steps, in which the rate falls (default: 1000)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate", type=float, default=0.5, help="factor on the learning rates (default: 0.5)")
    parser.add_argument("--copying", type=float, default=0.12, help="share of mere copying batches at first (default: 0.12)")
    parser.add_argument("--copying-until", type=int, default=300, help="step after which they become few (default: 300)")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--start", type=Path, help="go on from the weights and the tokenizer of this GGUF file instead of from nothing")
    parser.add_argument("--resume", action="store_true", help="go on from weights.state, which is written every 200 steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    conversations = packing.load_conversations(options.work / "train.jsonl")
    if options.start:
        tokenizer = storage.read_tokenizer(options.start, options.work / "tokenizer.json")
    else:
        tokenizer = vocabulary.train(conversations[:30000], options.work / "tokenizer.json")
    encoded = packing.encode_all(tokenizer, conversations)
    sizes = np.array([len(ids) for ids, _ in encoded])
    wanted = sum(sum(w) for _, w in encoded)
    print(f"train: {len(sizes)} conversations, {sizes.sum()} tokens (longest {sizes.max()}), {wanted} of them wanted", flush=True)
    if options.start:
        weights, shape = storage.read_gguf(options.start)
    else:
        shape = model.Shape(vocabulary=tokenizer.get_vocab_size())
        weights = induction.prepare(model.initial_weights(options.seed, shape), shape, options.seed)
        weights = {name: torch.from_numpy(value) for name, value in weights.items()}
    plan = Plan(
        options.steps, options.warm_up, min(options.decay, options.steps), options.seed, options.rate, options.copying,
        options.copying_until, options.workers,
    )
    log = run(encoded, weights, shape, plan, options.work / "weights.npz", options.resume)
    print(f"train: {log['parameters']} parameters, {log['steps']} steps, {log['tokens']} tokens, {log['minutes']} min, last loss {log['points'][-1] if log['points'] else '-'}")


if __name__ == "__main__":
    main()
