"""Evergreen from the command line: grpcurl, which knows nothing but what server reflection tells it.

Owns: the commands of the face's page, run as they stand there, and how an abort looks. Refuses to know: our .proto files.

    python tests/foreign/evergreen_grpcurl/check.py --server 127.0.0.1:8000

Ends with the plain line `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import base64
import json
import pathlib
import shlex
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks
import pages

GRPCURL = str(pathlib.Path(sys.executable).with_name("grpcurl"))
SESSION = "evergreen.v2.EvergreenService/StartSession"


class World:
    """The commands of the page, each with the server of the check in it, by what they end with."""

    def __init__(self, options):
        self.server = options.server
        text = pages.addressed(pages.block(pages.EVERGREEN, "console", "$ grpcurl"), self.server)
        commands = text.replace("\\\n", " ").strip().split("$ grpcurl ")[1:]
        self.commands = {words[-1]: words for words in map(shlex.split, commands)}

    def run(self, last):
        """What the page's command prints whose last word this is."""
        return pages.printed([GRPCURL, *self.commands.pop(last)])


def messages(text):
    """The JSON objects that stand one behind the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        message, at = decoder.raw_decode(text, at)
        found.append(message)
    return found


def services_are_listed(world):
    listed = world.run("list").split()
    for service in ("evergreen.v2.EvergreenService", "grpc.health.v1.Health"):
        assert service in listed, listed


def messages_are_described(world):
    assert "repeated .evergreen.v2.NamedParameter inputs = 3;" in world.run("evergreen.v2.Action")


def health_is_told(world):
    assert json.loads(world.run("grpc.health.v1.Health/Check")) == {"status": "SERVING"}


def generate_answers(world):
    fragments = [one for message in messages(world.run(SESSION)) for one in message["nodeFragments"]]
    # The end may come in a fragment of its own, which has no chunk.
    chunks = [one.get("chunkFragment", {}) for one in fragments]
    answer = b"".join(base64.b64decode(chunk.get("data", "")) for chunk in chunks)
    # The scripted model says the words of its prompt again.
    assert b"the sky blue" in answer, answer


def the_page_has_no_further_commands(world):
    assert not world.commands, world.commands


def an_abort_has_its_code_and_details(world):
    """EV-902"""
    twice = [{"id": "n", "chunkFragment": {"metadata": {"mimetype": "a/b"}}}, {"id": "n", "seq": 7}]
    command = [GRPCURL, "-plaintext", "-d", json.dumps({"nodeFragments": twice}), world.server, SESSION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=pages.TIMEOUT_S)
    assert done.returncode != 0
    for word in ("InvalidArgument", "SEQ_PAST_FINAL", "google.rpc.ErrorInfo"):
        assert word in done.stderr, done.stderr


CHECKS = [
    services_are_listed,
    messages_are_described,
    health_is_told,
    generate_answers,
    the_page_has_no_further_commands,
    an_abort_has_its_code_and_details,
]


if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
