"""Holds the finished file against llama.cpp: the same tokens for every held-out conversation, the same prompt from the
template, the same greedy answers. Needs `pip install llama-cpp-python`, which the recipe itself does not."""

import argparse
import json
from pathlib import Path

from llama_cpp import Llama
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

import evaluate
import vocabulary
from chat import END, TEXT_END, render

ODD_TEXT = "Grüße, naïve 12345 ☃ don't\n\n  x  \t y's 日本 a_b{\"k\": [1,2]}  "


def llama_tokens(llama, text):
    return llama.tokenize(text.encode(), add_bos=False, special=True)


def compare_tokens(llama, tokenizer, conversations):
    texts = [render(c["messages"], c.get("tools")) for c in conversations] + [ODD_TEXT]
    differing = [text for text in texts if llama_tokens(llama, text) != tokenizer.encode(text).ids]
    print(f"tokens: {len(texts) - len(differing)} of {len(texts)} texts agree", *differing[:3], sep="\n  ")


def compare_answers(llama, results):
    """Greedy answers, llama.cpp's against ours over the same weights; near ties may differ."""
    formatter = Jinja2ChatFormatter(llama.metadata["tokenizer.chat_template"], eos_token=END, bos_token=TEXT_END)
    same = right = 0
    for conversation, ours, _ in results:
        prompt = render(conversation["messages"][:-1], conversation.get("tools"), answer_next=True)
        theirs = formatter(messages=conversation["messages"][:-1], tools=conversation.get("tools")).prompt
        if theirs != prompt:
            print(f"the template differs:\n  {theirs!r}\n  {prompt!r}")
        choice = llama.create_completion(llama_tokens(llama, prompt), max_tokens=120, temperature=0)["choices"][0]
        answer = choice["text"] if choice["finish_reason"] == "stop" else None
        same += answer == ours
        right += evaluate.is_right(conversation["check"], answer)
        if answer != ours:
            print(f"answers differ: {conversation['messages'][-2]['content']!r}\n  llama.cpp {answer!r}\n  ours      {ours!r}")
    print(f"answers: {same} of {len(results)} the same; {right} right by llama.cpp, {sum(r for _, _, r in results)} by ours")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder with weights.npz and tokenizer.json")
    parser.add_argument("--every", type=int, default=9, help="ask only every n-th question")
    options = parser.parse_args()
    held_out = Path(__file__).parent / "heldout.jsonl"
    llama = Llama(str(options.gguf), n_ctx=2048, verbose=False)
    conversations = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    compare_tokens(llama, vocabulary.load(options.work / "tokenizer.json"), conversations)
    compare_answers(llama, evaluate.evaluate(options.gguf, options.work, held_out, options.every))


if __name__ == "__main__":
    main()
