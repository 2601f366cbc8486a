"""Evergreen over a plain WebSocket with PyPI websockets, in protobuf and JSON.

Checks both dialects against protobuf's own encoding and JSON mapping, detection of the dialect, half-close, the last message, small
frames, resuming with a token, and the program of the Evergreen page. Uses nothing of the Rust code but the .proto files.

    python tests/foreign/evergreen_websockets/check.py --server 127.0.0.1:8000 [--key SECRET]

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import importlib
import itertools
import json
import pathlib
import sys
import tempfile
from contextlib import ExitStack
from socket import SHUT_RDWR

import grpc_tools
from google.protobuf import json_format
from grpc_tools import protoc
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks
import pages

TIMEOUT_S = 30


def make_messages(root):
    """Generates the messages into a scratch folder and imports them."""
    out = tempfile.mkdtemp(prefix="evergreen-messages-")
    well_known = str(pathlib.Path(grpc_tools.__file__).parent / "_proto")
    files = ["evergreen/v2/evergreen.proto", "evergreen/v2/evergreen_service.proto", "sapwood/v1/config.proto"]
    if protoc.main(["protoc", f"-I{root}", f"-I{well_known}", f"--python_out={out}", *files]) != 0:
        raise SystemExit("the .proto files do not compile")
    sys.path.insert(0, out)
    # Importing it registers the type for protobuf's JSON mapping.
    importlib.import_module("sapwood.v1.config_pb2")
    return importlib.import_module("evergreen.v2.evergreen_service_pb2")


class World:
    def __init__(self, options):
        self.pb = make_messages(options.proto)
        self.server = options.server
        self.headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}

    def open(self, path="/evergreen", subprotocol=None, headers=()):
        return connect(
            f"ws://{self.server}{path}",
            subprotocols=[subprotocol] if subprotocol else None,
            additional_headers={**self.headers, **dict(headers)},
            open_timeout=TIMEOUT_S,
            max_size=None,
        )

    def message(self, actions=(), fragments=()):
        message = self.pb.SessionMessage()
        for name, inputs, outputs in actions:
            action = message.actions.add(name=name)
            for param, node in inputs.items():
                action.inputs.add(name=param, id=node)
            for param, node in outputs.items():
                action.outputs.add(name=param, id=node)
        for node, seq, data, continued in fragments:
            fragment = message.node_fragments.add(id=node, seq=seq, continued=continued)
            fragment.chunk_fragment.data = data
            if seq == 0:
                fragment.chunk_fragment.metadata.mimetype = "text/plain"
                fragment.chunk_fragment.metadata.role = "USER"
        return message

    def say(self, socket, message):
        """In the dialect of the socket's subprotocol."""
        text = socket.subprotocol == JSON
        socket.send(json_format.MessageToJson(message) if text else message.SerializeToString())

    def heard(self, socket):
        said = socket.recv(timeout=TIMEOUT_S)
        if socket.subprotocol == JSON:
            return json_format.Parse(said, self.pb.SessionMessage())
        return self.pb.SessionMessage.FromString(bytes(said))

    def rest(self, socket):
        """All messages until the Close frame, and its code and reason."""
        said = []
        while True:
            try:
                said.append(socket.recv(timeout=TIMEOUT_S))
            except ConnectionClosed as closed:
                return said, (closed.rcvd.code, closed.rcvd.reason)


FINISH = ("FINISH", {}, {})
JSON = "evergreen.v2.json"
PROTO = "evergreen.v2.proto"
TOKEN = "evergreen-session-token"


def content(messages, node):
    fragments = [f for message in messages for f in message.node_fragments if f.id == node]
    assert [f.seq for f in fragments] == list(range(len(fragments)))
    assert [f.continued for f in fragments] == [True] * (len(fragments) - 1) + [False]
    return b"".join(f.chunk_fragment.data for f in fragments)


def protobuf_echo(world):
    for path, subprotocol in (("/", None), ("/evergreen", None), ("/evergreen", "evergreen.v2.proto")):
        with world.open(path, subprotocol) as socket:
            assert socket.subprotocol == subprotocol
            echo = ("echo", {"text": "p"}, {"response": "r"})
            fragments = [("p", 0, b"hello ", True), ("p", 1, b"world", False)]
            socket.send(world.message([echo, FINISH], fragments).SerializeToString())
            said, close = world.rest(socket)
            answers = [world.pb.SessionMessage.FromString(bytes(one)) for one in said]
            assert content(answers, "r") == b"hello world" and close == (1000, ""), close


def json_echo_in_protobufs_own_mapping(world):
    for names in (False, True):
        with world.open("/evergreen", "evergreen.v2.json") as socket:
            echo = ("echo", {"text": "p"}, {"response": "r"})
            message = world.message([echo, FINISH], [("p", 0, "größe".encode(), False)])
            socket.send(json_format.MessageToJson(message, preserving_proto_field_name=names))
            said, close = world.rest(socket)
            assert all(isinstance(one, str) for one in said)
            answers = [json_format.Parse(one, world.pb.SessionMessage()) for one in said]
            assert content(answers, "r") == "größe".encode() and close == (1000, ""), close


def generate_in_json(world):
    with world.open("/") as socket:
        action = {
            "name": "GENERATE",
            "inputs": [{"name": "prompt", "id": "p"}],
            "outputs": [{"name": "response", "id": "r"}, {"name": "meta", "id": "m"}],
            "configs": [{"@type": "type.googleapis.com/sapwood.v1.GenerateConfig", "maxTokens": 8}],
        }
        chunk = {"metadata": {"mimetype": "text/plain", "role": "USER"}, "data": "SGkh"}
        socket.send(json.dumps({"actions": [action], "nodeFragments": [{"id": "p", "chunkFragment": chunk}]}))
        socket.send(json.dumps({"actions": [{"name": "FINISH"}]}))
        said, close = world.rest(socket)
        answers = [json_format.Parse(one, world.pb.SessionMessage()) for one in said]
        assert content(answers, "r").strip() and close == (1000, ""), close
        assert json.loads(content(answers, "m"))["usage"], said


def frames_of_16_bytes(world):
    with world.open() as socket:
        echo = ("echo", {"text": "p"}, {"response": "r"})
        data = world.message([echo, FINISH], [("p", 0, b"x" * 65_536, False)]).SerializeToString()
        socket.send(data[at : at + 16] for at in range(0, len(data), 16))
        said, close = world.rest(socket)
        answers = [world.pb.SessionMessage.FromString(bytes(one)) for one in said]
        assert content(answers, "r") == b"x" * 65_536 and close == (1000, ""), close


def a_malformed_message_gets_a_status_before_the_close(world):
    past = world.message(fragments=[("p", 0, b"x", False), ("p", 5, b"x", False)])
    with world.open() as socket:
        socket.send(past.SerializeToString())
        said, close = world.rest(socket)
        last = world.pb.SessionMessage.FromString(bytes(said[-1])).node_fragments[0]
        assert last.id == "__abort__" and not last.continued
        assert close == (1008, "INVALID_ARGUMENT: SEQ_PAST_FINAL"), close
    with world.open() as socket:
        socket.send(json_format.MessageToJson(past))
        said, close = world.rest(socket)
        assert json.loads(said[-1])["error"]["details"][0]["reason"] == "SEQ_PAST_FINAL"
        assert close == (1008, "INVALID_ARGUMENT: SEQ_PAST_FINAL"), close


def a_message_of_no_dialect_closes_the_connection(world):
    for text, code in (("[]", 1007), ("7", 1007)):
        with world.open("/") as socket:
            socket.send(text)
            assert world.rest(socket)[1][0] == code
    with world.open() as socket:
        socket.send(b"\x90")
        assert world.rest(socket)[1][0] == 1007


def options_are_checked_before_the_upgrade(world):
    try:
        world.open("/evergreen?evergreen-metadata=sloppy")
    except InvalidStatus as refused:
        assert refused.response.status_code == 400
    else:
        raise AssertionError("accepted")


def pings_are_answered(world):
    with world.open() as socket:
        assert socket.ping().wait(TIMEOUT_S)


def a_session_resumes_in_either_dialect(world):
    for before, after in itertools.product((PROTO, JSON), repeat=2):
        for cut in (True, False):
            with ExitStack() as sockets:
                comes_back(world, sockets, before, after, cut)


def comes_back(world, sockets, before, after, cut):
    first = sockets.enter_context(world.open(subprotocol=before, headers={"evergreen-resume": "1"}))
    token = first.response.headers[TOKEN]
    assert "resume" in first.response.headers["evergreen-extensions"]
    echo = ("echo", {"text": "p"}, {"response": "r"})
    world.say(first, world.message([echo], [("p", 0, b"hello ", True)]))
    had = []
    while not any(f.id == "r" for message in had for f in message.node_fragments):
        had.append(world.heard(first))
    if cut:
        # Without a Close frame, like a cut cable.
        first.socket.shutdown(SHUT_RDWR)
    second = sockets.enter_context(world.open(subprotocol=after, headers={TOKEN: token}))
    if not cut:
        assert world.rest(first)[1] == (1008, "ABORTED: SUPERSEDED")
    resume = world.message([("RESUME", {"have": "h"}, {"have": "theirs"})])
    have = resume.node_fragments.add(id="h")
    have.chunk_fragment.metadata.mimetype = "application/json"
    have.chunk_fragment.data = json.dumps({"nodes": {"r": 1}, "actions": 0}).encode()
    world.say(second, resume)
    more = []
    while not any(f.id == "theirs" and not f.continued for message in more for f in message.node_fragments):
        more.append(world.heard(second))
    theirs = json.loads(content(more, "theirs"))
    assert theirs["nodes"]["p"] == 1 and theirs["actions"] == 1, theirs
    world.say(second, world.message([FINISH], [("p", 1, b"world", False)]))
    said, close = world.rest(second)
    parse = (
        (lambda one: json_format.Parse(one, world.pb.SessionMessage()))
        if after == JSON
        else (lambda one: world.pb.SessionMessage.FromString(bytes(one)))
    )
    assert content([*had, *more, *map(parse, said)], "r") == b"hello world" and close == (1000, ""), close
    with world.open(subprotocol=after, headers={TOKEN: token}) as late:
        assert world.rest(late)[1] == (1008, "NOT_FOUND: NO_SESSION")


def the_program_of_the_page(world):
    # The scripted model repeats the words of its prompt.
    said = pages.python(pages.EVERGREEN, "evergreen.v2.json", world.server)
    assert "the sky blue" in said, said


CHECKS = [
    protobuf_echo,
    json_echo_in_protobufs_own_mapping,
    generate_in_json,
    frames_of_16_bytes,
    a_malformed_message_gets_a_status_before_the_close,
    a_message_of_no_dialect_closes_the_connection,
    options_are_checked_before_the_upgrade,
    pings_are_answered,
    a_session_resumes_in_either_dialect,
    the_program_of_the_page,
]


if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
