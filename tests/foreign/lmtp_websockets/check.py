"""LMTP over bare transports: PyPI `websockets`, and curl for `POST /lmtp`."""

import json
import pathlib
import shutil
import subprocess
import sys

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks

TIMEOUT_S = 30
ECHO = 'GENERATE {"model":"bytes","prompt":[72,105],"stream_id":1,"top_logprobs":0}'


class World:
    def __init__(self, options):
        self.server = options.server
        self.headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}

    def open(self, path="/lmtp", subprotocol=None):
        return connect(
            f"ws://{self.server}{path}",
            subprotocols=[subprotocol] if subprotocol else None,
            additional_headers=self.headers,
            open_timeout=TIMEOUT_S,
        )

    def post(self, body, *headers):
        """The response body, from curl."""
        command = ["curl", "-sN", "--max-time", str(TIMEOUT_S), "--data-binary", "@-"]
        given = [*headers, *(f"{name}: {value}" for name, value in self.headers.items())]
        for header in given:
            command += ["-H", header]
        command.append(f"http://{self.server}/lmtp")
        return subprocess.run(command, input=body.encode(), capture_output=True, check=True).stdout.decode()


def parsed(text):
    word, payload = text.split(" ", 1)
    items = json.loads(payload)
    assert isinstance(items, list) and items, text
    return word, items


def stream(socket):
    items = []
    while not items or (items[-1].get("finish_reason") is None and "error" not in items[-1]):
        items += parsed(socket.recv(timeout=TIMEOUT_S))[1]
    return items


def a_stream_is_echoed(world):
    for path in ("/", "/lmtp", "/?x=1"):
        with world.open(path) as socket:
            socket.send(ECHO)
            assert [item["token"] for item in stream(socket)] == [72, 105, 257]


def subprotocols_are_selected(world):
    for path, name in (("/", "lmtp"), ("/lmtp", "lmtp"), ("/lmtp", "lmtp.v2")):
        with world.open(path, name) as socket:
            assert socket.subprotocol == name
            socket.send(ECHO)
            assert stream(socket)[-1]["finish_reason"] == "stop"


def fragments_binary_and_pings(world):
    with world.open() as socket:
        socket.send(b"\x00\x01")
        socket.send(ECHO[at : at + 7] for at in range(0, len(ECHO), 7))
        assert [item["token"] for item in stream(socket)] == [72, 105, 257]
        assert socket.ping().wait(TIMEOUT_S)


def malformed_messages_get_errors_and_then_a_close(world):
    with world.open() as socket:
        for _ in range(16):
            socket.send("nonsense")
        said = 0
        try:
            while True:
                word, items = parsed(socket.recv(timeout=TIMEOUT_S))
                assert word == "MSG" and items[0]["code"] == "malformed"
                said += 1
        except ConnectionClosed as closed:
            assert (said, closed.rcvd.code) == (16, 1008), closed


def messages_of_16_mib_are_the_limit(world):
    for size, code in ((16 << 20, None), ((16 << 20) + 1, 1009)):
        with world.open() as socket:
            socket.send(ECHO.ljust(size))
            try:
                assert stream(socket)[-1]["finish_reason"] == "stop" and code is None
            except ConnectionClosed as closed:
                assert closed.rcvd.code == code, closed


def curl_posts_lines_arrays_and_reads_events(world):
    if shutil.which("curl") is None:
        print("        no curl here")
        return
    array = json.dumps([["GENERATE", json.loads(ECHO.split(" ", 1)[1])]])
    for answer in (
        world.post(ECHO, "content-type: text/plain").splitlines(),
        world.post(array, "content-type: application/json").splitlines(),
    ):
        items = [item for line in answer for item in parsed(line)[1]]
        assert [item["token"] for item in items] == [72, 105, 257], answer
    events = world.post(ECHO, "content-type: text/plain", "accept: text/event-stream").strip().split("\n\n")
    assert events[-1] == "event: done\ndata: {}", events
    items = [item for event in events[:-1] for item in parsed(event.removeprefix("data: "))[1]]
    assert [item["token"] for item in items] == [72, 105, 257], events


CHECKS = [
    a_stream_is_echoed,
    subprotocols_are_selected,
    fragments_binary_and_pings,
    malformed_messages_get_errors_and_then_a_close,
    messages_of_16_mib_are_the_limit,
    curl_posts_lines_arrays_and_reads_events,
]

if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
