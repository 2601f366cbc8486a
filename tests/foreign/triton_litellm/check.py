"""The Triton face as PyPI litellm uses it through its provider `triton/`: TR-307, TR-405, TR-501, TR-601, TR-801.

Owns: completions over `/generate`, `/generate_stream` and `/infer`, one and many at a time, and what a refusal becomes.
Refuses to know: anything of the Rust code.

    python tests/foreign/triton_litellm/check.py --server 127.0.0.1:8000

Ends with the plain line `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import asyncio
import os
import pathlib
import sys

# Prices of models stand in the package; nothing is fetched from anywhere.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LITELLM_TELEMETRY"] = "False"
os.environ["HF_HUB_OFFLINE"] = "1"

import litellm

litellm.suppress_debug_info = True

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks

TIMEOUT_S = 30
# It says its prompt again, one token for each byte.
MODEL = "bytes"
TEXT = "Grüße, 世界!"


class World:
    def __init__(self, options):
        self.server = options.server
        # What the model is asked is what the user says; without this the client looks for a template at a hub.
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
        """What each event of a stream adds, and how the stream ends."""
        chunks = list(litellm.completion(**self.words("generate", *words, stream=True, **more)))
        return told(chunks)


def told(chunks):
    texts = [chunk.choices[0].delta.content for chunk in chunks]
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert ends[-1] and not any(ends[:-1]), ends
    return [text for text in texts if text], ends[-1]


def a_completion_is_what_the_model_says(world):
    assert world.said("generate") == TEXT


def an_inference_is_the_same(world):
    assert world.said("infer", max_tokens=100) == TEXT
    # Its own default is 20 tokens.
    assert world.said("infer", "a" * 30) == "a" * 20


def limits_are_kept(world):
    for name in ("max_tokens", "max_completion_tokens"):
        assert world.said("generate", "abcdef", **{name: 3}) == "abc", name
    # Whatever else it is told goes along as a parameter.
    assert world.said("generate", "abcdef", stop_words=["d"]) == "abc"
    assert world.said("generate", "abcdef", temperature=0.0, allowed_openai_params=["temperature"]) == "abcdef"


def a_stream_comes_in_pieces(world):
    pieces, end = world.events()
    assert "".join(pieces) == TEXT and len(pieces) > 1 and end == "stop", (pieces, end)
    pieces, _ = world.events("abcdef", max_tokens=3)
    assert "".join(pieces) == "abc", pieces


def many_at_once(world):
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


def what_is_wrong_is_told(world):
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
        # A stream that cannot begin is refused as a whole.
        error = refused(world.events, **more)
        assert error.status_code == 400 and text in str(error), (more, error)


CHECKS = [
    a_completion_is_what_the_model_says,
    an_inference_is_the_same,
    limits_are_kept,
    a_stream_comes_in_pieces,
    many_at_once,
    what_is_wrong_is_told,
]

if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
