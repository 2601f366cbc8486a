"""The Triton face with its official client over gRPC, plain and with asyncio: TR-701, TR-702, TR-703, TR-704, TR-705, TR-707,
TR-708, TR-709, TR-901, TR-902, TR-903, TR-904, TR-905, TR-906, TR-907.

Checks metadata, single responses, many requests on one stream, failures and cancelling.

    python tests/foreign/triton_grpc/check.py --server 127.0.0.1:8000 [--key SECRET]

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import asyncio
import pathlib
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as asynchronous
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 30


class World:
    def __init__(self, options):
        self.server = options.server
        self.headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
        self.client = triton.InferenceServerClient(self.server)

    def infer(self, model, inputs, **more):
        return self.client.infer(model, inputs, headers=self.headers, client_timeout=TIMEOUT_S, **more)

    def stream(self, requests):
        """All responses of a stream with these requests, in order, until each request has ended."""
        told = queue.Queue()
        client = triton.InferenceServerClient(self.server)
        client.start_stream(lambda result, error: told.put((result, error)), headers=self.headers)
        try:
            for request in requests:
                client.async_stream_infer(**request)
            answers, ended = [], 0
            while ended < len(requests):
                result, error = told.get(timeout=TIMEOUT_S)
                answers.append((result, error))
                ended += error is not None or is_last(result)
            return answers
        finally:
            client.stop_stream()

    def refused(self, call):
        try:
            call()
        except InferenceServerException as error:
            return error
        raise AssertionError("it was not refused")


def is_last(result):
    return result.get_response().parameters["triton_final_response"].bool_param


def tensor(name, value, datatype="BYTES", shape=(1,)):
    made = triton.InferInput(name, list(shape), datatype)
    kinds = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32}
    value = value.encode() if isinstance(value, str) else value
    made.set_data_from_numpy(np.full(shape, value, dtype=kinds[datatype]))
    return made


def prompt(text, stream=True):
    return [tensor("text_input", text), tensor("stream", stream, "BOOL")]


def said(result):
    output = result.as_numpy("text_output")
    return "" if output is None else output[0].decode()


def health_and_readiness(world):
    assert world.client.is_server_live(headers=world.headers)
    assert world.client.is_server_ready(headers=world.headers)
    assert world.client.is_model_ready("scripted", headers=world.headers)
    error = world.refused(lambda: world.client.is_model_ready("nobody", headers=world.headers))
    assert "Request for unknown model: 'nobody' is not found" in error.message(), error


def metadata_and_configuration(world):
    server = world.client.get_server_metadata(headers=world.headers)
    assert server.name == "sapwood" and "statistics" in server.extensions, server
    model = world.client.get_model_metadata("parrot", headers=world.headers)
    assert list(model.versions) == ["1"], model
    inputs = [(it.name, it.datatype, list(it.shape)) for it in model.inputs]
    assert inputs == [("QUESTION", "BYTES", [1, 1]), ("LIVE", "BOOL", [1, 1]), ("hints", "INT32", [1, -1])], inputs
    config = world.client.get_model_config("parrot", headers=world.headers, as_json=True)["config"]
    assert config["model_transaction_policy"]["decoupled"] is True, config
    assert config["input"][2]["optional"] is True and config["input"][2]["data_type"] == "TYPE_INT32", config


def repository_and_settings(world):
    index = world.client.get_model_repository_index(headers=world.headers)
    assert {"scripted", "parrot", "load"} <= {it.name for it in index.models if it.state == "READY"}, index
    error = world.refused(lambda: world.client.load_model("scripted", headers=world.headers))
    assert error.status() == "StatusCode.UNAVAILABLE", error
    assert "not allowed if polling is enabled" in error.message(), error
    trace = world.client.get_trace_settings(headers=world.headers, as_json=True)["settings"]
    assert trace["trace_level"]["value"] == ["OFF"], trace
    logs = world.client.get_log_settings(headers=world.headers, as_json=True)["settings"]
    assert logs["log_info"]["bool_param"] is True, logs
    assert not world.client.get_system_shared_memory_status(headers=world.headers).regions
    assert not world.client.get_cuda_shared_memory_status(headers=world.headers).regions
    world.client.unregister_system_shared_memory(headers=world.headers)
    register = lambda: world.client.register_system_shared_memory("a", "/a", 1, headers=world.headers)
    assert world.refused(register).status() == "StatusCode.UNIMPLEMENTED"


def one_response(world):
    inputs = [tensor("text_input", "one two three"), tensor("max_tokens", 2, "INT32")]
    outputs = [triton.InferRequestedOutput("text_output")]
    answer = world.infer("scripted", inputs, outputs=outputs, request_id="7")
    assert said(answer).split() == ["one", "two"], said(answer)
    response = answer.get_response()
    assert (response.id, response.model_name, response.model_version) == ("7", "scripted", "1"), response
    temperature = world.infer("scripted", [tensor("text_input", "one")], parameters={"temperature": 0.5})
    assert said(temperature) == "one"
    packed = world.infer("scripted", [tensor("text_input", "one " * 1000)], compression_algorithm="gzip")
    assert said(packed).split()[0] == "one"


def statistics_are_counted(world):
    def count():
        stats = world.client.get_inference_statistics("scripted", headers=world.headers).model_stats[0]
        return stats.inference_count, stats.inference_stats.fail.count

    good, bad = count()
    world.infer("scripted", [tensor("text_input", "one")])
    world.refused(lambda: world.infer("scripted", [tensor("text_input", "one"), tensor("max_tokens", -1, "INT32")]))
    assert count() == (good + 1, bad + 1), (good, bad, count())


def errors_have_their_texts(world):
    for model, inputs, status, text in [
        ("nobody", prompt("x"), "INVALID_ARGUMENT", "Request for unknown model: 'nobody' is not found"),
        ("scripted", prompt("x"), "UNIMPLEMENTED", "doesn't support models with decoupled transaction policy"),
        ("scripted", [tensor("stream", False, "BOOL")], "INVALID_ARGUMENT", "missing required input(s) ['text_input']"),
        ("scripted", [tensor("text_input", 1, "INT32")], "INVALID_ARGUMENT", "data-type is 'INT32'"),
    ]:
        error = world.refused(lambda: world.infer(model, inputs))
        assert error.status() == f"StatusCode.{status}" and text in error.message(), error


def a_stream_of_many_requests(world):
    requests = [
        {"model_name": "scripted", "inputs": prompt(f"one two {index}"), "request_id": str(index)} for index in range(50)
    ]
    texts = {str(index): "" for index in range(50)}
    for result, error in world.stream(requests):
        assert error is None, error
        texts[result.get_response().id] += said(result)
    assert texts == {str(index): f"one two {index}" for index in range(50)}, texts


def an_empty_final_response_is_sent_on_request(world):
    for times in range(4):
        request = {
            "model_name": "parrot",
            "inputs": [tensor("QUESTION", "hello", shape=(1, 1)), tensor("LIVE", True, "BOOL", (1, 1))],
            "request_id": "p",
            "parameters": {"TIMES": times},
            "enable_empty_final_response": True,
        }
        answers = [result for result, error in world.stream([request]) if error is None]
        assert [is_last(it) for it in answers] == [False] * (len(answers) - 1) + [True], answers
        texts = [it.as_numpy("ANSWER") for it in answers]
        assert [it.flatten()[0] for it in texts if it is not None] == [b"hello"] * times, texts


def a_failed_request_does_not_end_the_stream(world):
    requests = [
        {"model_name": "nobody", "inputs": prompt("x"), "request_id": "a"},
        {"model_name": "scripted", "inputs": prompt("one"), "request_id": "b"},
    ]
    answers = world.stream(requests)
    errors = [error.message() for _, error in answers if error is not None]
    assert len(errors) == 1 and "Request for unknown model: 'nobody' is not found" in errors[0], errors
    assert "".join(said(result) for result, error in answers if error is None) == "one"


def a_stream_can_be_cancelled(world):
    told = queue.Queue()
    client = triton.InferenceServerClient(world.server)
    client.start_stream(lambda result, error: told.put((result, error)), headers=world.headers)
    for index in range(20):
        inputs = [*prompt("x"), tensor("max_tokens", 4000, "INT32")]
        client.async_stream_infer("load", inputs, request_id=str(index))
    result, error = told.get(timeout=TIMEOUT_S)
    assert error is None and not is_last(result), error
    client.stop_stream(cancel_requests=True)
    assert world.client.is_server_ready(headers=world.headers)


def with_asyncio(world):
    async def talk():
        async with asynchronous.InferenceServerClient(world.server) as client:
            one = await client.infer("scripted", [tensor("text_input", "one two")], headers=world.headers)
            assert said(one) == "one two", said(one)

            async def requests():
                for index in range(3):
                    yield {"model_name": "scripted", "inputs": prompt(f"one {index}"), "request_id": str(index)}

            texts = {}
            async for result, error in client.stream_infer(requests(), headers=world.headers):
                assert error is None, error
                key = result.get_response().id
                texts[key] = texts.get(key, "") + said(result)
            assert texts == {str(index): f"one {index}" for index in range(3)}, texts

    asyncio.run(asyncio.wait_for(talk(), TIMEOUT_S))


CHECKS = [
    health_and_readiness,
    metadata_and_configuration,
    repository_and_settings,
    one_response,
    statistics_are_counted,
    errors_have_their_texts,
    a_stream_of_many_requests,
    an_empty_final_response_is_sent_on_request,
    a_failed_request_does_not_end_the_stream,
    a_stream_can_be_cancelled,
    with_asyncio,
]


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    import checks

    sys.exit(checks.main(__doc__, World, CHECKS))
