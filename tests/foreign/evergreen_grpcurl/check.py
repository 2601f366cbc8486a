"""Evergreen from the command line with grpcurl, which uses server reflection.

Runs the commands of the Evergreen page as they are printed there, and checks the form of an abort.

    python tests/foreign/evergreen_grpcurl/check.py --server 127.0.0.1:8000

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
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
    """The commands of the page with the address of this server, by their last words."""

    def __init__(self, options):
        self.server = options.server
        text = pages.addressed(pages.block(pages.EVERGREEN, "console", "$ grpcurl"), self.server)
        commands = text.replace("\\\n", " ").strip().split("$ grpcurl ")[1:]
        self.commands = {words[-1]: words for words in map(shlex.split, commands)}

    def run(self, last):
        """The output of the page's command with this last word."""
        return pages.printed([GRPCURL, *self.commands.pop(last)])


def messages(text):
    """The JSON objects in a sequence."""
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


def health_is_serving(world):
    assert json.loads(world.run("grpc.health.v1.Health/Check")) == {"status": "SERVING"}


def generate_streams_an_answer(world):
    fragments = [one for message in messages(world.run(SESSION)) for one in message["nodeFragments"]]
    # The final fragment may have no chunk.
    chunks = [one.get("chunkFragment", {}) for one in fragments]
    answer = b"".join(base64.b64decode(chunk.get("data", "")) for chunk in chunks)
    # The scripted model repeats the words of its prompt.
    assert b"the sky blue" in answer, answer


def the_page_has_no_other_commands(world):
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
    health_is_serving,
    generate_streams_an_answer,
    the_page_has_no_other_commands,
    an_abort_has_its_code_and_details,
]


if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
