"""LMTP with LMQL's own client, its library and its LangChain class.

Every call has a time limit, because LMQL waits forever for messages that it does not understand.
"""

import asyncio
import os
import pathlib
import sys
import tempfile

# No downloads, and LMQL's caches are in a temporary folder.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HOME"] = tempfile.mkdtemp(prefix="lmql-")

import aiohttp
import lmql
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import PromptTemplate
from lmql.models.lmtp.errors import LMTPStreamError
from lmql.models.lmtp.lmtp_client import LMTPWebSocketClient
from lmql.models.lmtp.lmtp_langchain import LMTP, LangchainLMTPStreamError

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks
import tokenizer
from tokenizer import END

TIMEOUT_S = 30
MODEL = "bytes"


class World:
    def __init__(self, options):
        self.server = options.server
        self.tokenizer = tokenizer.folder(options.server, MODEL)

    def talk(self, conversation, model=MODEL, path="/"):
        """Runs `conversation` with an LMQL client and a time limit."""

        async def connected():
            async with aiohttp.ClientSession() as session:
                async with session.ws_connect(f"http://{self.server}{path}") as socket:
                    client = LMTPWebSocketClient(model, socket)
                    client.connect()
                    return await asyncio.wait_for(conversation(client), TIMEOUT_S)

        return asyncio.run(connected())


async def said(stream):
    return [item async for item in stream]


def models_are_described(world):
    async def conversation(client):
        answer = await client.request("MODEL_INFO", {"model": MODEL})
        info = answer["model_info"]
        assert info["model"] == MODEL and info["vocab_size"] == 258 and info["eos"] == [END], info
        assert "<unavailable>" not in str(info)

    world.talk(conversation)


def tokens_are_generated(world):
    async def conversation(client):
        prompt = list(b"Hello")
        items = await said(
            client.generate(
                prompt,
                max_tokens=16,
                temperature=0.0,
                top_logprobs=4,
                top_p=1.0,
                top_k=0,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                length_penalty=1.0,
            )
        )
        assert [item["token"] for item in items] == [*prompt, END], items
        assert [item["finish_reason"] for item in items] == [None] * 5 + ["stop"]
        assert all(len(item["top_logprobs"]) == 4 for item in items)
        forced = await said(client.generate(prompt, max_tokens=3, logit_bias={END: 100, 300: 100}))
        assert [item["token"] for item in forced] == [END] and forced[0]["logprob"] == 0.0

    for path in ("/", "/lmtp"):
        world.talk(conversation, path=path)


def tokens_are_scored(world):
    async def conversation(client):
        items = await said(client.score(list(b"Hi"), list(b"Hi!")))
        assert [item["token"] for item in items] == list(b"Hi!")
        assert [item["finish_reason"] for item in items] == [None, None, "stop"]
        assert all("top_logprobs" not in item for item in items)

    world.talk(conversation)


def streams_share_a_connection(world):
    async def conversation(client):
        wanted = range(1, 9)
        streams = [said(client.generate(list(b"0123456789"), max_tokens=count)) for count in wanted]
        for count, items in zip(wanted, await asyncio.gather(*streams)):
            assert len(items) == count and items[-1]["finish_reason"] == "length", items

    world.talk(conversation)


def errors_are_raised(world):
    async def refused(client, **members):
        try:
            await said(client.generate([1], **members))
        except LMTPStreamError as error:
            return str(error)
        raise AssertionError("accepted")

    async def wrong(client):
        assert "max_tokens" in await refused(client, max_tokens=0)
        # The connection is still usable.
        assert await said(client.generate([1], max_tokens=1))

    async def unknown(client):
        assert "not loaded" in await refused(client)

    world.talk(wrong)
    world.talk(unknown, model="nobody")


def the_library_generates_and_scores(world):
    async def asked():
        model = lmql.model(MODEL, endpoint=world.server, tokenizer=world.tokenizer)
        text = await asyncio.wait_for(model.generate("Hello", max_tokens=4), TIMEOUT_S)
        assert text == "Hell", text
        scored = await asyncio.wait_for(model.score("Hello", ["Hello", "World"]), TIMEOUT_S)
        assert scored.scores()[0] > scored.scores()[1], scored.scores()

    asyncio.run(asked())


def queries_of_every_kind_run(world):
    model = lmql.model(MODEL, endpoint=world.server, tokenizer=world.tokenizer)

    @lmql.query(model=model)
    async def best():
        """lmql
        argmax
            "abc[X]" where len(TOKENS(X)) < 4
            return X
        """

    @lmql.query(model=model)
    async def samples():
        """lmql
        sample(n=3, temperature=0.8, max_len=32)
            "abc[X]" where len(TOKENS(X)) < 4
            return X
        """

    @lmql.query(model=model)
    async def beams():
        """lmql
        beam(n=2, max_len=32)
            "ab[X]" where len(TOKENS(X)) < 3
            return X
        """

    @lmql.query(model=model)
    async def one_of():
        """lmql
        argmax
            "pick[X]" where X in ["pick", "other"]
            return X
        """

    @lmql.query(model=model)
    async def integers():
        """lmql
        argmax
            "12[X]" where INT(X) and len(TOKENS(X)) < 3
            return X
        """

    @lmql.query(model=model)
    async def distributions():
        """lmql
        argmax
            "good[X]"
        distribution
            X in [" good", " bad"]
        """

    async def asked():
        async def run(query):
            return await asyncio.wait_for(query(), TIMEOUT_S)

        assert await run(best) == "abc"
        assert len(await run(samples)) == 3
        assert (await run(beams))[0] == "ab"
        assert await run(one_of) == "pick"
        assert str(await run(integers)).isdigit()
        (result,) = await run(distributions)
        assert result.distribution_values == [" good", " bad"], result

    asyncio.run(asked())


def the_langchain_class_answers(world):
    library = lmql.model(MODEL, endpoint=world.server, tokenizer=world.tokenizer)

    def model(name=MODEL, **more):
        return LMTP(model=name, endpoint=world.server, tokenizer=library.get_tokenizer(), **more)

    class Heard(BaseCallbackHandler):
        pieces = []

        def on_llm_new_token(self, token, **_):
            self.pieces.append(token)

    async def within(answer):
        return await asyncio.wait_for(answer, TIMEOUT_S)

    few = model(max_length=4)
    assert few.invoke("Hello", config={"callbacks": [Heard()]}) == "Hell"
    assert "".join(Heard.pieces) == "Hell" and len(Heard.pieces) == 4, Heard.pieces
    assert asyncio.run(within(few.ainvoke("World"))) == "Worl"
    assert few.batch(["Hello", "World"]) == ["Hell", "Worl"]
    assert model(max_length=12).invoke("one, two", stop=[","]) == "one"
    chain = PromptTemplate.from_template("{word}!") | model(max_length=3)
    assert chain.invoke({"word": "so"}) == "so!"
    assert len(model(max_length=5, temperature=1.5).invoke("Hello")) > 0
    try:
        asyncio.run(within(model("nobody").ainvoke("Hello")))
        raise AssertionError("accepted")
    except LangchainLMTPStreamError as error:
        assert "not loaded" in str(error), error


CHECKS = [
    models_are_described,
    tokens_are_generated,
    tokens_are_scored,
    streams_share_a_connection,
    errors_are_raised,
    the_library_generates_and_scores,
    queries_of_every_kind_run,
    the_langchain_class_answers,
]

if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
