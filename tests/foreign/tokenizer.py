"""A tokenizer of bytes, as a folder that libraries load, and as what a hub's client keeps of what it fetched.

Owns: ids that are those of the scripted models whose tokens are bytes. Refuses to know: who loads it.
"""

import pathlib
import shutil
import tempfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 257
REVISION = "0" * 40


def folder():
    """Where it stands."""
    shown = pre_tokenizers.ByteLevel.alphabet()
    # The usual order: printable bytes stand for themselves, others for the characters behind 255.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain}
    characters.update({byte: chr(256 + index) for index, byte in enumerate(moved)})
    assert set(shown) == set(characters.values())
    vocabulary = {characters[byte]: byte for byte in range(256)}
    vocabulary.update({"<s>": 256, "</s>": END})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made = tempfile.mkdtemp(prefix="bytes-")
    fast.save_pretrained(made)
    return made


def hub(name):
    """A hub's cache that holds it under this name: what HF_HUB_CACHE is to be."""
    cache = tempfile.mkdtemp(prefix="hub-")
    model = pathlib.Path(cache, "models--" + name.replace("/", "--"))
    shutil.copytree(folder(), model / "snapshots" / REVISION)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(REVISION)
    return cache
