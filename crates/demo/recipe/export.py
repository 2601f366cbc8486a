"""Writes the GGUF file: Q8_0 matrices, F32 norms, the tokenizer and the chat template, for the architecture "llama"."""

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

import storage
import vocabulary
from chat import END, SPECIALS, TEMPLATE, TEXT_END

NAME = "sapwood-demo"
SAMPLING = (0.7, 0.95, 0.05)  # recommended temperature, top_p, min_p


def tensors(weights, shape):
    """(GGUF name, array) of every tensor; matrices are turned to [outputs, inputs], as llama.cpp has them."""
    yield "token_embd.weight", np.asarray(weights["embedding"], np.float32)
    yield "output_norm.weight", np.asarray(weights["final_norm"], np.float32)
    for index in range(shape.layers):
        for ours, theirs in storage.LAYER_TENSORS.items():
            value = np.asarray(weights[ours][index], np.float32)
            yield f"blk.{index}.{theirs}.weight", np.ascontiguousarray(value.T)


def write_about(writer, shape):
    writer.add_name(NAME)
    writer.add_basename(NAME)
    writer.add_author("The Sapwood authors")
    writer.add_description("The very small demo model of Sapwood, for tests and first steps")
    writer.add_license("MIT OR Apache-2.0")
    writer.add_languages(["en"])
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocabulary)
    temperature, top_p, min_p = SAMPLING
    writer.add_float32("general.sampling.temp", temperature)
    writer.add_float32("general.sampling.top_p", top_p)
    writer.add_float32("general.sampling.min_p", min_p)


def write_tokenizer(writer, path):
    """Tokens, kinds, merges and the special ids, as llama.cpp's "gpt2" tokenizer wants them."""
    tokenizer = vocabulary.load(path)
    merges = json.loads(path.read_text(encoding="utf-8"))["model"]["merges"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIALS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.token_to_id(TEXT_END))
    writer.add_eos_token_id(tokenizer.token_to_id(END))
    writer.add_pad_token_id(tokenizer.token_to_id(TEXT_END))
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def write(weights, shape, tokenizer_path, out):
    writer = GGUFWriter(out, "llama")
    write_about(writer, shape)
    write_tokenizer(writer, tokenizer_path)
    for name, value in tensors(weights, shape):
        if value.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder with weights.npz and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="the GGUF file to write")
    options = parser.parse_args()
    weights, shape, _ = storage.load(options.work / "weights.npz")
    write(weights, shape, options.work / "tokenizer.json", options.out)
    print(f"export: {options.out}, {options.out.stat().st_size} bytes, SHA-256 {digest(options.out)}")


if __name__ == "__main__":
    main()
