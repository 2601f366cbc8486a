"""The Triton face with its clients over HTTP: PyPI tritonclient, requests with sseclient-py: TR-103, TR-601, TR-701, TR-702, TR-703,
TR-704, TR-705, TR-707, TR-709, TR-801, TR-802, TR-804, TR-807, TR-1101, TR-1102.

Checks metadata, infer in JSON and in binary, compression both ways, streams and failures.

    python tests/foreign/triton_http/check.py --server 127.0.0.1:8000 [--key SECRET]

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import concurrent.futures
import json
import pathlib
import socket
import sys

import numpy as np
import requests
import sseclient
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 30


class World:
    def __init__(self, options):
        self.server = options.server
        self.key = options.key
        self.client = triton.InferenceServerClient(self.server, network_timeout=TIMEOUT_S)

    @property
    def headers(self):
        """A new dictionary each time, because the client modifies it."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def post(self, path, body, **more):
        data = body if isinstance(body, (str, bytes)) else json.dumps(body)
        url = f"http://{self.server}/v2/models/{path}"
        return requests.post(url, data=data, headers=self.headers, timeout=TIMEOUT_S, **more)

    def events(self, path, body):
        answer = self.post(path, body, stream=True)
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8", answer.headers
        return answer.status_code, [json.loads(event.data) for event in sseclient.SSEClient(answer).events()]

    def refused(self, call):
        try:
            call()
        except InferenceServerException as error:
            return error
        raise AssertionError("it was not refused")


def text(name, value, binary, shape=(1,)):
    tensor = triton.InferInput(name, list(shape), "BYTES")
    tensor.set_data_from_numpy(np.full(shape, value.encode(), dtype=np.object_), binary_data=binary)
    return tensor


def health_and_readiness(world):
    assert world.client.is_server_live(headers=world.headers)
    assert world.client.is_server_ready(headers=world.headers)
    assert world.client.is_model_ready("scripted", headers=world.headers)
    assert not world.client.is_model_ready("nobody", headers=world.headers)


def metadata_and_configuration(world):
    about = world.client.get_server_metadata(headers=world.headers)
    assert about["name"] == "sapwood" and "generate" in about["extensions"], about
    parrot = world.client.get_model_metadata("parrot", headers=world.headers)
    assert parrot["inputs"][0] == {"name": "QUESTION", "datatype": "BYTES", "shape": [1, 1]}, parrot
    config = world.client.get_model_config("parrot", headers=world.headers)
    assert config["model_transaction_policy"] == {"decoupled": True} and config["input"][2]["optional"], config
    error = world.refused(lambda: world.client.get_model_metadata("nobody", headers=world.headers))
    assert error.message() == "Request for unknown model: 'nobody' is not found", error


def repository_and_settings(world):
    index = world.client.get_model_repository_index(headers=world.headers)
    assert {entry["name"] for entry in index} == {"scripted", "embeds", "ranks", "parrot", "load", "faulty"}, index
    assert all(entry["state"] == "READY" for entry in index), index
    assert world.client.get_trace_settings(headers=world.headers)["trace_level"] == ["OFF"]
    assert world.client.get_log_settings(headers=world.headers)["log_info"] is True
    error = world.refused(lambda: world.client.load_model("scripted", headers=world.headers))
    assert "explicit model load" in error.message(), error


def infer_in_json_and_binary(world):
    for binary_in in (True, False):
        for binary_out in (True, False):
            tokens = triton.InferInput("max_tokens", [1], "INT32")
            tokens.set_data_from_numpy(np.array([2], dtype=np.int32), binary_data=binary_in)
            wanted = [triton.InferRequestedOutput("text_output", binary_data=binary_out)]
            inputs = [text("text_input", "one two three", binary_in), tokens]
            result = world.client.infer("scripted", inputs, outputs=wanted, request_id="7", headers=world.headers)
            said = result.as_numpy("text_output").tolist()
            assert [bytes(it) if isinstance(it, bytes) else it.encode() for it in said] == [b"one two"], said
            assert result.get_response()["id"] == "7"
    # Without a list of outputs this client asks for binary ones.
    result = world.client.infer("scripted", [text("text_input", "hello", True)], headers=world.headers)
    assert result.as_numpy("text_output").tolist() == [b"hello"]


def texts(name, values, shape, binary):
    tensor = triton.InferInput(name, list(shape), "BYTES")
    array = np.array([value.encode() for value in values], dtype=np.object_).reshape(shape)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def embeddings_in_json_and_binary(world):
    about = world.client.get_model_metadata("embeds", headers=world.headers)
    assert about["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, 8]}], about
    seen = []
    for shape in ((2,), (2, 1)):
        for binary in (True, False):
            wanted = [triton.InferRequestedOutput("embedding", binary_data=binary)]
            inputs = [texts("text_input", ["green tea", "a red car"], shape, binary)]
            result = world.client.infer("embeds", inputs, outputs=wanted, headers=world.headers)
            seen.append(result.as_numpy("embedding"))
    for rows in seen:
        assert rows.shape == (2, 8) and rows.dtype == np.float32, rows
        assert np.allclose(rows, seen[0]) and np.allclose(np.linalg.norm(rows, axis=1), 1), rows
    inputs = [texts("query", ["ab"], (1,), True), texts("documents", ["xyz", "ab", "b"], (3,), True)]
    scores = world.client.infer("ranks", inputs, headers=world.headers).as_numpy("score")
    assert scores.tolist() == [0.0, 1.0, 0.5], scores
    error = world.refused(lambda: world.client.infer("embeds", [], headers=world.headers))
    assert "no input 'text_input'" in error.message(), error


def infer_compressed_both_ways(world):
    prompt = "green tea " * 200
    for way in ("gzip", "deflate"):
        result = world.client.infer(
            "scripted",
            [text("text_input", prompt, True)],
            headers=world.headers,
            request_compression_algorithm=way,
            response_compression_algorithm=way,
        )
        assert result.as_numpy("text_output").tolist() == [prompt.encode()], way


def statistics_are_counted(world):
    def count():
        stats = world.client.get_inference_statistics("load", headers=world.headers)["model_stats"][0]
        return stats["inference_stats"]["success"]["count"]

    before = count()
    world.client.infer("load", [text("text_input", "x", False)], headers=world.headers)
    assert count() == before + 1


def errors_have_their_texts(world):
    for path, body, status, told in [
        ("nobody/generate", "{}", 400, "Request for unknown model: 'nobody' is not found"),
        ("scripted/versions/9/generate", "{}", 404, "Request for unknown model: 'scripted' version 9 is not found"),
        ("scripted/generate", "{", 400, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        ("parrot/generate", '{"LIVE":1}', 400, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        (
            "parrot/generate",
            '{"LIVE":true,"LIVE":true}',
            400,
            "[request id: <id_unknown>] input 'LIVE' already exists in request",
        ),
    ]:
        answer = world.post(path, body)
        assert answer.headers["Content-Type"] == "application/json", path
        assert (answer.status_code, answer.json()) == (status, {"error": told}), answer.text


def streams_are_events(world):
    body = {"text_input": "one two three", "stream": True, "id": "a"}
    status, events = world.events("scripted/generate_stream", body)
    assert status == 200 and len(events) > 1, events
    assert "".join(event["text_output"] for event in events) == "one two three", events
    assert all(event["id"] == "a" and event["model_version"] == "1" for event in events)
    whole = world.post("scripted/generate", {"text_input": ["one two three"], "max_tokens": "99"})
    assert whole.json()["text_output"] == "one two three", whole.text


def the_scripted_model_fails_on_request(world):
    ask = {"QUESTION": "x", "LIVE": True}
    assert world.post("parrot/generate", ask).json()["ANSWER"] == "x"
    status, events = world.events("parrot/generate_stream", ask | {"TIMES": 2, "BREAK": True})
    assert status == 200 and len(events) == 3 and events[2] == {"error": "the parrot is tired"}, events
    status, events = world.events("parrot/generate_stream", ask | {"TIMES": 0, "BREAK": True})
    assert (status, events) == (500, [{"error": "the parrot is tired"}])
    assert world.post("parrot/generate", ask | {"TIMES": 2}).status_code == 500
    assert world.post("parrot/generate", ask | {"HOLLOW": True}).json()["ANSWER"] == []


def a_cut_stream_raises_an_error(world):
    answer = world.post("faulty/generate_stream", {"text_input": "truncate", "stream": True}, stream=True)
    try:
        for _ in answer.iter_content(None):
            pass
    except requests.exceptions.ChunkedEncodingError:
        return
    raise AssertionError("the stream ended as if it were whole")


def a_body_of_85_megabytes_gets_a_response(world):
    answer = world.post("scripted/generate", b'{"text_input":"' + b"x" * 85_000_000 + b'"}')
    assert answer.status_code == 400, answer.status_code
    assert "exceeds the maximum allowed input size of 67108864 bytes" in answer.json()["error"], answer.text


def a_hundred_concurrent_threads(world):
    def ask(index):
        body = {"text_input": f"one two {index}", "stream": index % 2 == 0, "id": str(index)}
        if index % 2:
            return world.post("scripted/generate", body).json()["text_output"]
        return "".join(event["text_output"] for event in world.events("scripted/generate_stream", body)[1])

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        for index, said in enumerate(pool.map(ask, range(100))):
            assert said == f"one two {index}", (index, said)


def a_disconnect_during_a_stream_affects_no_other_client(world):
    host, port = world.server.rsplit(":", 1)
    body = json.dumps({"text_input": "x", "stream": True, "max_tokens": 4000})
    with socket.create_connection((host, int(port)), TIMEOUT_S) as gone:
        lines = ["POST /v2/models/load/generate_stream HTTP/1.1", f"Host: {world.server}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in world.headers.items()]
        gone.sendall(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
        assert gone.recv(100).startswith(b"HTTP/1.1 200")
    assert world.client.is_server_ready(headers=world.headers)


CHECKS = [
    health_and_readiness,
    metadata_and_configuration,
    repository_and_settings,
    infer_in_json_and_binary,
    embeddings_in_json_and_binary,
    infer_compressed_both_ways,
    statistics_are_counted,
    errors_have_their_texts,
    streams_are_events,
    the_scripted_model_fails_on_request,
    a_cut_stream_raises_an_error,
    a_body_of_85_megabytes_gets_a_response,
    a_hundred_concurrent_threads,
    a_disconnect_during_a_stream_affects_no_other_client,
]


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    import checks

    sys.exit(checks.main(__doc__, World, CHECKS))
