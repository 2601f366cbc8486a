"""Evergreen over gRPC with PyPI grpcio, and stubs generated from our .proto files.

Checks the conversations of the protocol document in every metadata mode and in both orders of arrival, the status details that
grpcio-status reads, functions offered by the client, health and reflection. Uses nothing of the Rust code but the .proto files.

Needs a running server with a scripted model as its default target and `test_functions = true`:

    python tests/foreign/evergreen_grpcio/check.py --server 127.0.0.1:8000 [--key SECRET]

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import importlib
import json
import pathlib
import queue
import sys
import tempfile

import grpc
from google.protobuf import any_pb2, struct_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from grpc_tools import protoc

SERVICE = "evergreen.v2.EvergreenService"
TIMEOUT_S = 30
STATUS = "application/x-protobuf; type=google.rpc.Status"


def make_stubs(root):
    """Generates stubs into a scratch folder and imports them."""
    out = tempfile.mkdtemp(prefix="evergreen-stubs-")
    files = [
        "evergreen/v2/evergreen.proto",
        "evergreen/v2/evergreen_service.proto",
        "sapwood/v1/config.proto",
    ]
    import grpc_tools

    well_known = str(pathlib.Path(grpc_tools.__file__).parent / "_proto")
    code = protoc.main(
        ["protoc", f"-I{root}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}", *files]
    )
    if code != 0:
        raise SystemExit("the .proto files do not compile")
    sys.path.insert(0, out)
    names = ["evergreen.v2.evergreen_pb2", "evergreen.v2.evergreen_service_pb2"]
    names += ["evergreen.v2.evergreen_service_pb2_grpc", "sapwood.v1.config_pb2"]
    return [importlib.import_module(name) for name in names]


class Session:
    """One StartSession call: a queue of messages out, nodes assembled from the responses."""

    def __init__(self, world, metadata=(), timeout=TIMEOUT_S):
        self.pb, self.spb = world.pb, world.spb
        self.outgoing = queue.Queue(maxsize=256)
        self.nodes, self.kids, self.final, self.kinds = {}, {}, set(), {}
        self.asked = []
        self.call = world.stub.StartSession(
            iter(self.outgoing.get, None), metadata=[*world.metadata, *metadata], timeout=timeout
        )

    def send(self, *parts):
        message = self.spb.SessionMessage()
        for part in parts:
            if isinstance(part, self.pb.Action):
                message.actions.append(part)
            else:
                message.node_fragments.append(part)
        self.outgoing.put(message)

    def half_close(self):
        self.outgoing.put(None)

    def read(self, *wanted):
        """Receives until every wanted node is complete."""
        while not all(self.complete(node) for node in wanted):
            self.take(next(self.call))
        return [self.flat(node) for node in wanted]

    def asked_next(self):
        """The next action that the server sends."""
        while not self.asked:
            self.take(next(self.call))
        return self.asked.pop(0)

    def take(self, message):
        self.asked.extend(message.actions)
        for fragment in message.node_fragments:
            node = self.nodes.setdefault(fragment.id, {})
            assert fragment.seq not in node, f"{fragment.id}@{fragment.seq} came twice"
            metadata = fragment.chunk_fragment.HasField("metadata")
            assert not (metadata and fragment.seq > 0), "metadata belongs to seq 0 (EV-404)"
            if fragment.seq == 0 and not fragment.child_ids:
                self.kinds[fragment.id] = fragment.chunk_fragment.metadata
            node[fragment.seq] = fragment.chunk_fragment.data
            self.kids.setdefault(fragment.id, []).extend(fragment.child_ids)
            if not fragment.continued:
                assert fragment.id not in self.final, f"{fragment.id} was closed twice"
                self.final.add(fragment.id)

    def complete(self, node):
        return node in self.final and all(self.complete(kid) for kid in self.kids.get(node, []))

    def flat(self, node):
        kids = self.kids.get(node, [])
        if kids:
            return b"".join(self.flat(kid) for kid in kids)
        fragments = self.nodes[node]
        return b"".join(fragments[seq] for seq in sorted(fragments))

    def end(self):
        """Half-closes and reads to the end, which must be OK."""
        self.half_close()
        for message in self.call:
            self.take(message)
        assert self.call.code() == grpc.StatusCode.OK, self.call.code()

    def failure(self):
        """Reads to the error: its code, its reason and the reason's metadata."""
        try:
            for message in self.call:
                self.take(message)
        except grpc.RpcError as error:
            self.half_close()
            status = rpc_status.from_call(error)
            assert status is not None, "no grpc-status-details-bin"
            info = error_details_pb2.ErrorInfo()
            found = [detail for detail in status.details if detail.Unpack(info)]
            assert len(found) == 1, "exactly one ErrorInfo (EV-902)"
            assert info.domain == "evergreen.sapwood", info.domain
            return error.code(), info.reason, dict(info.metadata)
        raise AssertionError("the session ended without an error")


class World:
    """What every check needs: stubs, channel, message builders."""

    def __init__(self, options):
        self.pb, self.spb, grpc_pb, self.config = make_stubs(options.proto)
        self.metadata = [("authorization", f"Bearer {options.key}")] if options.key else []
        self.channel = grpc.insecure_channel(options.server)
        self.stub = grpc_pb.EvergreenServiceStub(self.channel)

    def action(self, name, inputs, outputs, configs=(), target=None):
        action = self.pb.Action(name=name)
        for param, node in inputs.items():
            action.inputs.add(name=param, id=node)
        for param, node in outputs.items():
            action.outputs.add(name=param, id=node)
        for config in configs:
            action.configs.append(config)
        if target is not None:
            action.target_spec.id = target
        return action

    def leaf(self, node, data=None, seq=0, more=False, mime=None, role="", ref=None):
        fragment = self.pb.NodeFragment(id=node, seq=seq, continued=more)
        if mime is not None:
            fragment.chunk_fragment.metadata.mimetype = mime
            fragment.chunk_fragment.metadata.role = role
        if data is not None:
            fragment.chunk_fragment.data = data
        if ref is not None:
            fragment.chunk_fragment.ref = ref
        return fragment

    def tree(self, node, *kids, seq=0, more=False):
        return self.pb.NodeFragment(id=node, seq=seq, continued=more, child_ids=kids)

    def generate_config(self, **fields):
        packed = any_pb2.Any()
        packed.Pack(self.config.GenerateConfig(**fields))
        return packed


def orders(parts):
    """The parts as written, backwards, and each in a message of its own both ways."""
    yield [parts]
    yield [list(reversed(parts))]
    yield [[part] for part in parts]
    yield [[part] for part in reversed(parts)]


MODES = ("strict", "lenient")


def seed_conversation(world):
    """The first conversation of the protocol document, with its video replaced by text in two data: references."""
    for mode in MODES:
        for order in (0, 1, 2, 3):
            # The second fragment repeats its metadata, as in the document; only the lenient mode accepts that.
            again = "text/plain" if mode == "lenient" else None
            first = [
                world.action("GENERATE", {"prompt": "prompt_1"}, {"response": "response_1"}),
                world.tree("prompt_1", "question_1", "video_1"),
                world.leaf("question_1", b"Write a summary of this video: ", mime="text/plain"),
                world.leaf("video_1", mime="text/plain", ref="data:text/plain,part1", more=True),
                world.leaf("video_1", seq=1, mime=again, ref="data:;base64,IHBhcnQy"),
            ]
            second = [
                world.action("GENERATE", {"prompt": "prompt_2"}, {"response": "response_2"}),
                world.tree("prompt_2", "prompt_1", "response_1", "question_2"),
                world.leaf("question_2", b"Who's winning?", mime="text/plain"),
            ]
            session = Session(world, [("evergreen-metadata", mode)])
            for message in list(orders(first))[order]:
                session.send(*message)
            (answer,) = session.read("response_1")
            assert answer, "an empty first answer"
            assert session.kinds["response_1"].mimetype.startswith("text/plain")
            assert session.kinds["response_1"].role == "ASSISTANT", session.kinds["response_1"].role
            for message in list(orders(second))[order]:
                session.send(*message)
            session.read("response_2")
            session.end()


def seed_file_references(world):
    """The file: references of the document are refused unless the operator allows them."""
    session = Session(world)
    session.send(
        world.action("GENERATE", {"prompt": "p"}, {"response": "r"}),
        world.leaf("p", mime="text/plain", ref="file://path/to/file/part1"),
    )
    _, reason, _ = session.failure()
    assert reason in ("REF_SCHEME", "REF_DENIED"), reason


def seed_repeated_metadata_in_strict_mode(world):
    for backwards in (False, True):
        parts = [
            world.leaf("v", b"part1", mime="video/mp4", more=True),
            world.leaf("v", b"part2", seq=1, mime="video/mp4"),
        ]
        session = Session(world, [("evergreen-metadata", "strict")])
        session.send(*(reversed(parts) if backwards else parts))
        code, reason, where = session.failure()
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "METADATA_REPEATED"), (code, reason)
        assert where.get("node") == "v", where


def seed_config_and_end_of_turn(world):
    """The third and fourth conversations of the document: ports `text`, a config, EndOfTurn, a streamed prompt tree."""
    for mode in MODES:
        for streamed in (False, True):
            for order in (0, 1, 2, 3):
                config = world.generate_config(max_tokens=8, temperature=0.0, seed=7)
                parts = [world.action("GENERATE", {"text": "prompt_1"}, {"text": "response_1"}, [config])]
                if streamed:
                    parts.append(world.tree("prompt_1", "prompt_1_text", more=True))
                    parts.append(world.tree("prompt_1", "prompt_1_eot", seq=1))
                else:
                    parts.append(world.tree("prompt_1", "prompt_1_text", "prompt_1_eot"))
                novel = b"Write a heroic novel about a half-eaten jam doughnut."
                parts.append(world.leaf("prompt_1_text", novel, mime="text/plain"))
                parts.append(world.leaf("prompt_1_eot", mime="application/x-protobuf; type=EndOfTurn"))
                session = Session(world, [("evergreen-metadata", mode)])
                for message in list(orders(parts))[order]:
                    session.send(*message)
                session.read("response_1")
                session.end()


def struct_in_place_of_a_config(world):
    """EV-509: a Struct with the config's JSON field names, so that clients need not compile our messages."""
    answers = []
    struct = struct_pb2.Struct()
    struct.update({"max_tokens": 6, "temperature": 0, "seed": 11})
    packed = any_pb2.Any()
    packed.Pack(struct)
    for config in (packed, world.generate_config(max_tokens=6, temperature=0.0, seed=11)):
        session = Session(world)
        session.send(
            world.action("GENERATE", {"prompt": "p"}, {"response": "r", "meta": "m"}, [config]),
            world.leaf("p", b"Tell me a story.", mime="text/plain", role="USER"),
        )
        answers.append(session.read("r", "m")[0])
        session.end()
    assert answers[0] == answers[1], answers


def pipelined_turns(world):
    """EV-612: the second turn is sent before the first answer exists."""
    session = Session(world)
    session.send(
        world.action("GENERATE", {"prompt": "p1"}, {"response": "r1"}),
        world.action("GENERATE", {"prompt": "p2"}, {"response": "r2", "meta": "m2"}),
        world.tree("p1", "q1"),
        world.leaf("q1", b"Name a river.", mime="text/plain", role="USER"),
        world.tree("p2", "p1", "r1", "q2", more=True),
        world.tree("p2", "eot", seq=1),
        world.leaf("eot", mime="application/x-protobuf; type=EndOfTurn"),
        world.leaf("q2", b"How long is it?", mime="text/plain", role="USER"),
    )
    _, _, meta = session.read("r1", "r2", "m2")
    assert b"finish_reason" in meta, meta
    session.end()


def echo_copies_every_chunk(world):
    session = Session(world)
    session.send(
        world.action("echo", {"text": "in"}, {"response": "out"}),
        world.tree("in", "a", "b"),
        world.leaf("b", b"\x00\x01", mime="image/png"),
        world.leaf("a", "äö".encode(), mime="text/plain"),
    )
    (both,) = session.read("out")
    assert both == "äö".encode() + b"\x00\x01", both
    session.end()


def fragments_may_arrive_in_any_order(world):
    parts = [
        world.action("concat", {"a": "x", "b": "y"}, {"response": "z"}),
        world.leaf("x", b"one ", mime="text/plain", more=True),
        world.leaf("x", b"two ", seq=1, more=True),
        world.leaf("x", seq=2),
        world.leaf("y", b"three", mime="text/plain"),
    ]
    for messages in orders(parts):
        session = Session(world)
        for message in messages:
            session.send(*message)
        (joined,) = session.read("z")
        assert joined == b"one two three", joined
        session.end()


def errors_carry_their_details(world):
    """EV-902: the code in the trailers, one ErrorInfo with reason, node and seq."""
    past = [world.leaf("n", b"a", mime="text/plain"), world.leaf("n", b"b", seq=7)]
    cases = [
        (past, "INVALID_ARGUMENT", "SEQ_PAST_FINAL", {"node": "n", "seq": "7"}),
        (list(reversed(past)), "INVALID_ARGUMENT", "SEQ_PAST_FINAL", {"node": "n"}),
        ([world.leaf("", b"a", mime="text/plain")], "INVALID_ARGUMENT", "BAD_ID", {}),
        ([world.leaf("n", b"a", mime="text/plain", seq=-1)], "INVALID_ARGUMENT", "BAD_SEQ", {"node": "n"}),
        ([world.tree("t", "t")], "INVALID_ARGUMENT", "CYCLE", {}),
        ([world.leaf("n", b"a")], "INVALID_ARGUMENT", "METADATA_MISSING", {"node": "n"}),
        ([world.action("no_such", {}, {"response": "r"})], "NOT_FOUND", "UNKNOWN_ACTION", {}),
        ([world.action("echo", {}, {"response": "r"})], "INVALID_ARGUMENT", "MISSING_INPUT", {}),
        ([world.action("echo", {"what": "p"}, {"response": "r"})], "INVALID_ARGUMENT", "UNKNOWN_PARAM", {}),
        ([world.action("GENERATE", {"prompt": "p"}, {"response": "r"}, target="nobody")],
         "NOT_FOUND", "UNKNOWN_TARGET", {}),
        ([world.action("GENERATE", {"prompt": "p"}, {"response": "r"},
                       [world.generate_config(temperature=7.0)]),
          world.leaf("p", b"hi", mime="text/plain")], "INVALID_ARGUMENT", "BAD_CONFIG", {}),
        ([world.action("fail", {}, {"response": "r"})], "INTERNAL", "FUNCTION", {}),
    ]
    for parts, code, reason, where in cases:
        session = Session(world)
        session.send(*parts)
        found = session.failure()
        assert found[0].name == code and found[1] == reason, (found, reason)
        for key, value in where.items():
            assert found[2].get(key) == value, (reason, found[2])


def half_close_fails_an_action_with_a_missing_input(world):
    session = Session(world)
    session.send(world.action("echo", {"text": "never"}, {"response": "r"}))
    session.half_close()
    code, reason, _ = session.failure()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INCOMPLETE_INPUT"), (code, reason)


def partial_failure_keeps_the_session(world):
    """EV-930, EV-931: the failed output ends with a Status chunk and the next action works."""
    session = Session(world, [("evergreen-partial-failure", "1")])
    session.send(world.action("no_such", {}, {"response": "r"}))
    session.read("r")
    assert session.kinds["r"].mimetype == "application/x-protobuf; type=google.rpc.Status", session.kinds["r"]
    session.send(
        world.action("echo", {"text": "in"}, {"response": "out"}),
        world.leaf("in", b"still here", mime="text/plain"),
    )
    assert session.read("out") == [b"still here"]
    session.end()


def cancel_ends_one_action(world):
    """EV-913: CANCEL ends the action and not the session."""
    session = Session(world)
    session.send(world.action("slow", {}, {"response": "r"}))
    session.send(world.action("CANCEL", {"action": "r"}, {"result": "c"}))
    result, _ = session.read("c", "r")
    assert b"true" in result, result
    session.end()


def options_and_headers(world):
    """Section 2: extensions in the initial metadata, a malformed option refused."""
    session = Session(world)
    initial = dict(session.call.initial_metadata())
    assert "cancel" in initial.get("evergreen-extensions", ""), initial
    session.end()
    refused = Session(world, [("evergreen-metadata", "sloppy")])
    try:
        next(refused.call)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.code()
    else:
        raise AssertionError("a malformed option was accepted")
    refused.half_close()


def deadline_ends_the_session(world):
    session = Session(world, [("evergreen-timeout-ms", "50")])
    session.send(world.action("slow", {}, {"response": "r"}))
    code, reason, _ = session.failure()
    assert (code, reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE"), (code, reason)


def gzip_is_accepted(world):
    text = b"compress me " * 1000
    messages = [
        world.spb.SessionMessage(
            actions=[world.action("echo", {"text": "in"}, {"response": "out"})],
            node_fragments=[world.leaf("in", text, mime="text/plain")],
        )
    ]
    call = world.stub.StartSession(
        iter(messages), metadata=world.metadata, compression=grpc.Compression.Gzip, timeout=TIMEOUT_S
    )
    data = b"".join(f.chunk_fragment.data for m in call for f in m.node_fragments if f.id == "out")
    assert data == text


def list_actions(world):
    session = Session(world)
    session.send(world.action("LIST_ACTIONS", {}, {"actions": "l"}))
    session.send(world.action("SESSION_INFO", {}, {"info": "i"}))
    actions, info = session.read("l", "i")
    assert b"GENERATE" in actions and b"grpc" in info.lower(), (actions, info)
    session.end()


def offer(world, session, actions):
    """Offers actions to the server and waits for the result."""
    session.send(
        world.action("OFFER_ACTIONS", {"actions": "offer"}, {"result": "offered"}),
        world.leaf("offer", json.dumps({"actions": actions}).encode(), mime="application/json"),
    )
    (result,) = session.read("offered")
    return json.loads(result)


WEATHER = {"name": "weather", "inputs": [{"name": "city"}], "outputs": [{"name": "report"}]}


def the_server_calls_an_offered_function(world):
    """EV-810 to EV-812: a function of this client, called through the server, answers in two fragments."""
    session = Session(world)
    assert offer(world, session, [WEATHER]) == {"offered": 1}
    for at in range(3):
        city, report = f"city{at}", f"report{at}"
        session.send(
            world.action("weather", {"city": city}, {"report": report}),
            world.leaf(city, b"Bergen", mime="text/plain"),
        )
        asked = session.asked_next()
        (given,), (wanted,) = asked.inputs, asked.outputs
        assert (asked.name, given.name, wanted.name) == ("weather", "city", "report"), asked
        assert given.id.startswith("~") and wanted.id.startswith("~"), asked
        assert session.read(given.id) == [b"Bergen"]
        session.send(world.leaf(wanted.id, b"wet ", mime="text/plain", more=True))
        session.send(world.leaf(wanted.id, b"indeed", seq=1))
        assert session.read(report) == [b"wet indeed"]
    session.end()


def the_status_of_an_offered_function_reaches_its_caller(world):
    """EV-931 at the client: the calling action fails with the client's code."""
    session = Session(world, [("evergreen-partial-failure", "1")])
    offer(world, session, [WEATHER])
    session.send(
        world.action("weather", {"city": "c"}, {"report": "r", "__status__": "s"}),
        world.leaf("c", b"Atlantis", mime="text/plain"),
    )
    wanted = session.asked_next().outputs[0].id
    status = status_pb2.Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="no such city")
    session.send(world.leaf(wanted, status.SerializeToString(), mime=STATUS))
    (told,) = session.read("s")
    told = status_pb2.Status.FromString(told)
    assert (told.code, "no such city" in told.message) == (5, True), told
    session.end()


def a_client_without_an_offer_gets_no_actions(world):
    session = Session(world)
    session.send(
        world.action("weather", {"city": "c"}, {"report": "r"}),
        world.leaf("c", b"Bergen", mime="text/plain"),
    )
    code, reason, _ = session.failure()
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ACTION"), (code, reason)
    assert not session.asked, session.asked


def health(world):
    stub = health_pb2_grpc.HealthStub(world.channel)
    for service in ("", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, (service, answer.status)


def reflection(world):
    database = ProtoReflectionDescriptorDatabase(world.channel)
    assert SERVICE in database.get_services(), list(database.get_services())
    assert database.FindFileContainingSymbol(SERVICE) is not None


CHECKS = [
    seed_conversation,
    seed_file_references,
    seed_repeated_metadata_in_strict_mode,
    seed_config_and_end_of_turn,
    struct_in_place_of_a_config,
    pipelined_turns,
    echo_copies_every_chunk,
    fragments_may_arrive_in_any_order,
    errors_carry_their_details,
    half_close_fails_an_action_with_a_missing_input,
    partial_failure_keeps_the_session,
    cancel_ends_one_action,
    options_and_headers,
    deadline_ends_the_session,
    gzip_is_accepted,
    list_actions,
    the_server_calls_an_offered_function,
    the_status_of_an_offered_function_reaches_its_caller,
    a_client_without_an_offer_gets_no_actions,
    health,
    reflection,
]


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    import checks

    sys.exit(checks.main(__doc__, World, CHECKS))
