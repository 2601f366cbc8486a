"""Makes the demo model from nothing: a virtual environment, the data, the training, the GGUF file, the evaluation and
the model card's table. Needs Python 3.11 or newer with venv, and a network for the first installation only."""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CRATE = HERE.parent
ROOT = CRATE.parent.parent
CARD = CRATE / "README.md"
NAME = "sapwood-demo.gguf"


def call(title, *command):
    """Run one stage; a stage that fails ends everything with its name."""
    print(f"== {title}", flush=True)
    started = time.monotonic()
    result = subprocess.run([str(part) for part in command], cwd=HERE)
    if result.returncode != 0:
        sys.exit(f"error: the stage '{title}' failed with status {result.returncode}; see its messages above")
    print(f"== {title}: {(time.monotonic() - started) / 60:.1f} min", flush=True)


def environment(work):
    """The virtual environment's Python, with exactly the pinned packages."""
    python = work / "venv" / "bin" / "python"
    pins = (HERE / "requirements.txt").read_text()
    stamp = work / "venv" / "installed.txt"
    if stamp.exists() and stamp.read_text() == pins:
        return python
    call("make the virtual environment", sys.executable, "-m", "venv", work / "venv")
    call("install the pinned packages", python, "-m", "pip", "install", "--quiet", "--requirement", HERE / "requirements.txt")
    stamp.write_text(pins)
    return python


def fill(text, mark, content):
    """Replace what stands between the card's two marks."""
    pattern = re.compile(f"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)", re.DOTALL)
    if not pattern.search(text):
        sys.exit(f"error: {CARD} has no place marked '{mark}'")
    return pattern.sub(lambda found: found[1] + content.rstrip() + "\n" + found[2], text)


def write_card(work):
    """Put the measured table and the file's digest into the model card."""
    text = fill(CARD.read_text(encoding="utf-8"), "table", (work / "table.md").read_text())
    text = fill(text, "figures", (work / "figures.md").read_text())
    text = fill(text, "first", (work / "first.md").read_text())
    CARD.write_text(text, encoding="utf-8")


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run of about a minute: tiny data and training, nothing in the crate changes")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "demo-model", help="folder for everything in between (default: target/demo-model)")
    parser.add_argument("--steps", type=int, default=3000, help="length of the training (default: 3000)")
    parser.add_argument("--decay", type=int, default=1000, help="last steps, in which the rate falls (default: 1000)")
    parser.add_argument("--examples", type=int, default=170_000, help="training conversations (default: 170000)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the initial weights and of the copying batches (default: 7)")
    parser.add_argument("--start", type=Path, help="go on from this GGUF file's weights, with its tokenizer, instead of from nothing")
    parser.add_argument("--seeds", type=int, default=5, help="how often the first questions are asked with sampling (default: 5)")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = options_of(arguments)
    if sys.version_info < (3, 11):
        sys.exit("error: Python 3.11 or newer is needed")
    work = (options.work / "quick" if options.quick else options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    python = environment(options.work.resolve())
    steps, examples, seeds = (12, 3000, 0) if options.quick else (options.steps, options.examples, options.seeds)
    gguf = work / NAME if options.quick else CRATE / NAME
    held = work / "heldout.jsonl" if options.quick else HERE / "heldout.jsonl"
    # Going on from trained weights needs a milder rate and no lessons in copying.
    going_on = ["--start", options.start.resolve(), "--rate", 0.35, "--copying", 0.04, "--warm-up", 30] if options.start else []
    call("generate the data", python, "generate.py", "--out", work, "--held-out", held, "--examples", examples, "--per-family", 2 if options.quick else 60)
    call("train", python, "train.py", "--work", work, "--steps", steps, "--decay", options.decay, "--seed", options.seed, *going_on)
    call("export", python, "export.py", "--work", work, "--out", gguf)
    call("evaluate", python, "evaluate.py", "--work", work, "--gguf", gguf, "--held-out", held, "--seeds", seeds)
    if options.quick:
        print(f"quick run done; its model, of no use beyond this check, is {gguf}")
        return
    write_card(work)
    print(f"done: {gguf} and the card {CARD}")


if __name__ == "__main__":
    main()
