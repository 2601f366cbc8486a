"""The tokenizer of a served model: as a folder for `transformers`, and as a Hugging Face cache."""

import pathlib
import shutil
import tempfile
import urllib.request

from transformers import PreTrainedTokenizerFast

END = 257
REVISION = "0" * 40


def folder(server, model):
    """Downloads the tokenizer into a new folder and returns its path."""
    made = tempfile.mkdtemp(prefix=f"{model}-")
    file = pathlib.Path(made, "tokenizer.json")
    with urllib.request.urlopen(f"http://{server}/lmtp/tokenizer/{model}", timeout=30) as answer:
        file.write_bytes(answer.read())
    fast = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(made)
    return made


def hub(server, model, name):
    """A cache with the tokenizer under this name; returns the value for HF_HUB_CACHE."""
    cache = tempfile.mkdtemp(prefix="hub-")
    kept = pathlib.Path(cache, "models--" + name.replace("/", "--"))
    shutil.copytree(folder(server, model), kept / "snapshots" / REVISION)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text(REVISION)
    return cache
