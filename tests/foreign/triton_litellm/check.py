"""The Triton face with PyPI litellm and its provider `triton/`: TR-307, TR-405, TR-501, TR-601, TR-801.

Checks completions over `/generate`, `/generate_stream` and `/infer`, single and concurrent, and the exceptions for errors.

    python tests/foreign/triton_litellm/check.py --server 127.0.0.1:8000

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import asyncio
import os
import pathlib
import sys

# No downloads: the prices of models are in the package.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LITELLM_TELEMETRY"] = "False"
os.environ["HF_HUB_OFFLINE"] = "1"

import litellm

litellm.suppress_debug_info = True

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks

TIMEOUT_S = 30
# It repeats its prompt, one token for each byte.
MODEL = "bytes"
TEXT = "Grüße, 世界!"


class World:
    def __init__(self, options):
        self.server = options.server
        # The prompt is the text of the user; without this the client would download a template.
        litellm.register_prompt_template(model=MODEL, roles={})

    def words(self, method, text=TEXT, model=MODEL, **more):
        return {
            "model": f"triton/{model}",
            "api_base": f"http://{self.server}/v2/models/{model}/{method}",
            "messages": [{"role": "user", "content": text}],
            "timeout": TIMEOUT_S,
            "num_retries": 0,
            **more,
        }

    def said(self, method, *words, **more):
        answer = litellm.completion(**self.words(method, *words, **more))
        return answer.choices[0].message.content

    def events(self, *words, **more):
        """The text of each chunk of a stream, and the finish reason."""
        chunks = list(litellm.completion(**self.words("generate", *words, stream=True, **more)))
        return told(chunks)


def told(chunks):
    texts = [chunk.choices[0].delta.content for chunk in chunks]
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert ends[-1] and not any(ends[:-1]), ends
    return [text for text in texts if text], ends[-1]


def a_completion_has_the_text_of_the_model(world):
    assert world.said("generate") == TEXT


def infer_gives_the_same_text(world):
    assert world.said("infer", max_tokens=100) == TEXT
    # The default of the client is 20 tokens.
    assert world.said("infer", "a" * 30) == "a" * 20


def max_tokens_is_respected(world):
    for name in ("max_tokens", "max_completion_tokens"):
        assert world.said("generate", "abcdef", **{name: 3}) == "abc", name
    # Other arguments are sent as parameters.
    assert world.said("generate", "abcdef", stop_words=["d"]) == "abc"
    assert world.said("generate", "abcdef", temperature=0.0, allowed_openai_params=["temperature"]) == "abcdef"


def a_stream_has_several_chunks(world):
    pieces, end = world.events()
    assert "".join(pieces) == TEXT and len(pieces) > 1 and end == "stop", (pieces, end)
    pieces, _ = world.events("abcdef", max_tokens=3)
    assert "".join(pieces) == "abc", pieces


def concurrent_completions(world):
    async def streamed(text):
        chunks = await litellm.acompletion(**world.words("generate", text, stream=True))
        return "".join(told([chunk async for chunk in chunks])[0])

    async def whole(text):
        answer = await litellm.acompletion(**world.words("generate", text))
        return answer.choices[0].message.content

    async def asked():
        texts = [f"number {index}" for index in range(16)]
        for ask in (streamed, whole):
            assert await asyncio.gather(*map(ask, texts)) == texts

    asyncio.run(asyncio.wait_for(asked(), TIMEOUT_S))


def errors_are_raised(world):
    def refused(ask, **more):
        try:
            ask(**more)
        except Exception as error:
            return error
        raise AssertionError(f"{more} was not refused")

    for more, text in (({"model": "nobody"}, "nobody"), ({"max_tokens": -1}, "max_tokens")):
        for method in ("generate", "infer"):
            error = refused(world.said, method=method, **more)
            assert error.status_code == 400 and text in str(error), (method, more, error)
        # A stream that fails before its first chunk is an error response.
        error = refused(world.events, **more)
        assert error.status_code == 400 and text in str(error), (more, error)


CHECKS = [
    a_completion_has_the_text_of_the_model,
    infer_gives_the_same_text,
    max_tokens_is_respected,
    a_stream_has_several_chunks,
    concurrent_completions,
    errors_are_raised,
]

if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
