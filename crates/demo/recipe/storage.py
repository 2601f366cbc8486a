"""Weights in files: our own archive between the stages, and the GGUF file read back."""

import json

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import model
from chat import SPECIALS

LAYER_TENSORS = {
    "attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}


def save(path, weights, shape, log):
    np.savez(path, **{name: value.numpy() for name, value in weights.items()})
    path.with_suffix(".json").write_text(json.dumps({"shape": shape.as_dict(), "log": log}, indent=1))


def load(path):
    about = json.loads(path.with_suffix(".json").read_text())
    with np.load(path) as stored:
        weights = {name: torch.from_numpy(stored[name]) for name in stored.files}
    return weights, model.Shape(**about["shape"]), about["log"]


def shape_in(reader):
    """The model's shape, from the GGUF file's header."""
    def number(key):
        return reader.fields[f"llama.{key}"].contents()

    return model.Shape(
        number("vocab_size"), number("embedding_length"), number("block_count"), number("attention.head_count"), number("attention.head_count_kv"),
        number("feed_forward_length"), number("context_length"), number("rope.freq_base"), round(number("attention.layer_norm_rms_epsilon"), 8),
    )


def read_gguf(path):
    """The weights as the file holds them, dequantised, in the layout of model.py, and their shape."""
    reader = GGUFReader(path)
    shape = shape_in(reader)
    stored = {t.name: np.array(dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}
    weights = {"embedding": stored["token_embd.weight"], "final_norm": stored["output_norm.weight"]}
    for ours, theirs in LAYER_TENSORS.items():
        weights[ours] = np.stack([stored[f"blk.{i}.{theirs}.weight"].T for i in range(shape.layers)])
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in weights.items()}, shape


def read_tokenizer(path, out):
    """The tokenizer of a GGUF file, saved as tokenizer.json."""
    reader = GGUFReader(path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(out))
    return tokenizer
