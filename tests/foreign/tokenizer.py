"""The tokenizer of a served model, as a folder that libraries load, and as what a hub's client keeps of what it fetched.

Owns: the file that the server gives, saved as those want it. Refuses to know: who loads it.
"""

import pathlib
import shutil
import tempfile
import urllib.request

from transformers import PreTrainedTokenizerFast

END = 257
REVISION = "0" * 40


def folder(server, model):
    """Where it stands."""
    made = tempfile.mkdtemp(prefix=f"{model}-")
    file = pathlib.Path(made, "tokenizer.json")
    with urllib.request.urlopen(f"http://{server}/lmtp/tokenizer/{model}", timeout=30) as answer:
        file.write_bytes(answer.read())
    fast = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(made)
    return made


def hub(server, model, name):
    """A hub's cache that holds it under this name: what HF_HUB_CACHE is to be."""
    cache = tempfile.mkdtemp(prefix="hub-")
    kept = pathlib.Path(cache, "models--" + name.replace("/", "--"))
    shutil.copytree(folder(server, model), kept / "snapshots" / REVISION)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text(REVISION)
    return cache
