"""The tokenizer: byte-level BPE, trained on our own texts, with GPT-2's pre-tokenizer (llama.cpp's "gpt-2").

Digits never merge: a number is read and written digit by digit. Neither does a space with the word after it: a word has
the same tokens after a space, after a quote and at the start of an answer, so that copying it is copying.
"""

import re
from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chat import END, SPECIALS, START, render

SIZE = 2048


def train(conversations, path, size=SIZE):
    """Learn the merges from the text of conversations and save the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    apart = pre_tokenizers.Split(Regex(r" (?=\p{L})"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIALS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    strip = re.compile("[0-9]|" + "|".join(map(re.escape, SPECIALS)))
    texts = (strip.sub("\n", render(c["messages"], c.get("tools"))) for c in conversations)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pieces
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(path))
    return tokenizer


@lru_cache(maxsize=None)
def load(path):
    return Tokenizer.from_file(str(path))


def encode_wanted(tokenizer, conversation, tight=False):
    """Token ids of a conversation, and for each id whether the model shall learn to write it (the assistant's words)."""
    text = render(conversation["messages"], conversation.get("tools"), tight=tight)
    return mark_wanted(tokenizer, tokenizer.encode(text).ids)


def mark_wanted(tokenizer, ids):
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    opening = tokenizer.encode("assistant\n").ids
    wanted, inside, skip = [], False, 0
    for index, token in enumerate(ids):
        if token == start and ids[index + 1 : index + 1 + len(opening)] == opening:
            inside, skip = True, len(opening) + 1
        wanted.append(inside and skip <= 0)
        skip -= 1
        if token == end:
            inside = False
    return wanted
