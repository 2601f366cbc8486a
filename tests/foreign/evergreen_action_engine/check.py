"""Evergreen in the dialect of Action Engine, with its own client: PyPI action-engine 0.4.0, unmodified.

Checks calls with default and custom node ids, long and large streams, statuses, failures, cancelling, an abort during a read, both
half-closes, and the program of the Evergreen page. The bytes are checked by the tests of the codec.

Needs a running server with a scripted model as its default target and `test_functions = true`:

    python tests/foreign/evergreen_action_engine/check.py --server 127.0.0.1:8000

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import traceback

from actionengine import actions, data, node_map, session, websockets
from actionengine._C.data import Port, PortList

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import pages

TIMEOUT_S = 120


def schema(name, inputs, outputs):
    return actions.ActionSchema(
        name=name, inputs=[(port, "*/*") for port in inputs], outputs=[(port, "*/*") for port in outputs]
    )


SCHEMAS = [
    schema("echo_async", ["text"], ["response"]),
    schema("GENERATE", ["prompt", "config"], ["response", "meta"]),
    schema("fail", [], ["response"]),
    schema("slow", [], ["response"]),
    schema("nobody_has_this", [], ["response"]),
    schema("__ping__", [], []),
]


class Client:
    """A connection, and the objects that the library needs for it."""

    def __init__(self, world, target="/"):
        self.registry = actions.ActionRegistry()
        for one in SCHEMAS:
            self.registry.register(one.name, one)
        self.nodes = node_map.NodeMap()
        self.stream = websockets.make_websocket_stream(world.host, target, world.port)
        self.stream.start()
        self.session = session.Session(self.nodes, self.registry)
        self.session.dispatch_from(self.stream)

    def action(self, name):
        return self.registry.make_action(name, node_map=self.nodes, stream=self.stream, session=self.session)

    def finish(self):
        self.stream.half_close()


def wait(action):
    """The library's own wait, without its event loop."""
    super(actions.Action, action).wait_until_complete()


def refused(call, *words):
    """The message with which `call` fails."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the library has no type of its own for a status
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError("no failure")


def echo_with_both_statuses(world):
    for target in ("/", "/evergreen", "/evergreen?evergreen-metadata=per-chunk"):
        client = Client(world, target)
        echo = client.action("echo_async")
        echo.call_and_wait_for_dispatch_status_sync()
        for word in ("hello", " ", "world"):
            echo["text"].put_sync(word)
        echo["text"].finalize()
        assert list(echo["response"]) == ["hello", " ", "world"]
        wait(echo)
        client.finish()


def two_actions_on_one_connection(world):
    client = Client(world)
    pair = [client.action("echo_async") for _ in range(2)]
    for index, echo in enumerate(pair):
        echo.call_sync()
        echo["text"].put_sync(f"number {index}", final=True)
    assert [list(echo["response"]) for echo in pair] == [["number 0"], ["number 1"]]
    for echo in pair:
        wait(echo)
    client.finish()


def long_streams_keep_their_order(world):
    # Beyond 128 and 32,768, where msgpack changes the encoding of integers.
    count, batch = 33_000, 1_000
    client = Client(world)
    echo = client.action("echo_async")
    echo.call_sync()
    node = f"{echo.get_id()}#text"
    for start in range(0, count, batch):
        message = data.WireMessage()
        for seq in range(start, start + batch):
            chunk = data.Chunk(metadata=data.ChunkMetadata(mimetype="text/plain"), data=str(seq).encode())
            message.node_fragments.append(
                data.NodeFragment(id=node, chunk=chunk, seq=seq, continued=seq + 1 < count)
            )
        client.stream.send(message)
    assert list(echo["response"]) == [str(seq) for seq in range(count)]
    wait(echo)
    client.finish()


def chunks_of_64_kib(world):
    client = Client(world)
    echo = client.action("echo_async")
    echo.call_sync()
    blocks = [bytes([index]) * 65_536 for index in range(4)]
    for block in blocks:
        echo["text"].put_sync(block)
    echo["text"].finalize()
    assert list(echo["response"]) == blocks
    wait(echo)
    client.finish()


def custom_node_ids(world):
    client = Client(world)
    message = data.WireMessage()
    call = data.ActionMessage(
        name="echo_async",
        inputs=PortList([Port(name="text", id="in-of-mine")]),
        outputs=PortList([Port(name="response", id="out-of-mine")]),
    )
    message.actions.append(call)
    chunk = data.Chunk(metadata=data.ChunkMetadata(mimetype="text/plain"), data=b"mine")
    message.node_fragments.append(data.NodeFragment(id="in-of-mine", chunk=chunk, seq=0, continued=False))
    client.stream.send(message)
    assert list(client.nodes.get("out-of-mine")) == ["mine"]
    client.finish()


def generate_streams_an_answer(world):
    client = Client(world)
    generate = client.action("GENERATE")
    generate.call_and_wait_for_dispatch_status_sync()
    generate["prompt"].put_sync("Say something.", final=True)
    metadata = data.ChunkMetadata(mimetype="application/json")
    generate["config"].put_sync(data.Chunk(metadata=metadata, data=b'{"max_tokens": 8}'), final=True)
    assert "".join(generate["response"]).strip()
    wait(generate)
    client.finish()


def an_unknown_action_does_not_end_the_session(world):
    client = Client(world)
    unknown = client.action("nobody_has_this")
    refused(unknown.call_and_wait_for_dispatch_status_sync, "Action not found in registry: nobody_has_this.")
    refused(lambda: wait(unknown), "Action not found in registry: nobody_has_this.")
    after(client)
    client.finish()


def a_failing_action_does_not_end_the_session(world):
    client = Client(world)
    failing = client.action("fail")
    failing.call_sync()
    refused(lambda: list(failing["response"]))
    refused(lambda: wait(failing))
    after(client)
    client.finish()


def cancel_takes_the_id_of_the_action(world):
    client = Client(world)
    slow = client.action("slow")
    slow.call_and_wait_for_dispatch_status_sync()
    message = data.WireMessage()
    call = data.ActionMessage(
        name="CANCEL", inputs=PortList([Port(name="action", id=slow.get_id())]), outputs=PortList()
    )
    message.actions.append(call)
    client.stream.send(message)
    assert list(slow["response"]) == []
    wait(slow)
    client.finish()


def ping(world):
    client = Client(world)
    ping = client.action("__ping__")
    ping.call_and_wait_for_dispatch_status_sync()
    wait(ping)
    client.finish()


def an_abort_wakes_a_waiting_reader(world):
    client = Client(world)
    slow = client.action("slow")
    slow.call_and_wait_for_dispatch_status_sync()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reading = pool.submit(lambda: list(slow["response"]))
        message = data.WireMessage()
        chunk = data.Chunk(metadata=data.ChunkMetadata(mimetype="text/plain"), data=b"not yours")
        node = f"{slow.get_id()}#response"
        message.node_fragments.append(data.NodeFragment(id=node, chunk=chunk, seq=0, continued=False))
        client.stream.send(message)
        refused(lambda: reading.result(timeout=TIMEOUT_S))
    refused(lambda: wait(slow))


def the_program_of_the_page(world):
    # The scripted model repeats the words of its prompt.
    said = pages.python(pages.EVERGREEN, "make_websocket_stream", f"{world.host}:{world.port}")
    assert "the sky blue" in said, said


def after(client):
    """Checks that the session still works."""
    echo = client.action("echo_async")
    echo.call_sync()
    echo["text"].put_sync("still here", final=True)
    assert list(echo["response"]) == ["still here"]
    wait(echo)


CHECKS = [
    echo_with_both_statuses,
    two_actions_on_one_connection,
    custom_node_ids,
    long_streams_keep_their_order,
    chunks_of_64_kib,
    generate_streams_an_answer,
    an_unknown_action_does_not_end_the_session,
    a_failing_action_does_not_end_the_session,
    cancel_takes_the_id_of_the_action,
    ping,
    an_abort_wakes_a_waiting_reader,
    the_program_of_the_page,
]


class World:
    def __init__(self, server):
        host, port = server.rsplit(":", 1)
        self.host, self.port = host, int(port)


def one(world, name):
    """Runs a check in this process."""
    check = next(check for check in CHECKS if check.__name__ == name)
    code = 0
    try:
        check(world)
    except (Exception, AssertionError):  # noqa: BLE001 - every failure is reported
        code = 1
        traceback.print_exc(limit=4)
    sys.stderr.flush()
    # Not sys.exit, which would wait for threads of the library.
    os._exit(code)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="127.0.0.1:8000", help="host:port")
    parser.add_argument("--only", default="", help="the name of one check")
    options = parser.parse_args()
    if options.only:
        one(World(options.server), options.only)
    # The library waits without a timeout and ignores signals, so each check has a process of its own.
    failed = 0
    for check in CHECKS:
        command = [sys.executable, __file__, "--server", options.server, "--only", check.__name__]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            told = "" if ran.returncode == 0 else ran.stderr[-2_000:]
        except subprocess.TimeoutExpired:
            told = f"hangs: not finished in {TIMEOUT_S} s"
        failed += bool(told)
        print(f"FAILED  {check.__name__}\n{told}" if told else f"ok      {check.__name__}", flush=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
