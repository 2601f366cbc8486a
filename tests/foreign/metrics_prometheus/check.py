"""`/metrics` with the parsers of PyPI prometheus-client: OA-801, OA-802, TR-1001, TR-1002.

Checks both formats, that they agree, and that metrics under other names have the same values.

    python tests/foreign/metrics_prometheus/check.py --server 127.0.0.1:8000 [--key SECRET]

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import base64
import json
import pathlib
import sys
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_text
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

TIMEOUT_S = 30
OPEN = "application/openmetrics-text"
# The Accept header of Prometheus.
PROMETHEUS = f"{OPEN};version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"

PAIRS = {
    "sapwood_requests_running": "vllm:num_requests_running",
    "sapwood_requests_waiting": "vllm:num_requests_waiting",
    "sapwood_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "sapwood_prompt_tokens_total": "vllm:prompt_tokens_total",
    "sapwood_generation_tokens_total": "vllm:generation_tokens_total",
    "sapwood_preemptions_total": "vllm:num_preemptions_total",
    "sapwood_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "sapwood_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "sapwood_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "sapwood_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "sapwood_time_to_first_token_seconds_bucket": "vllm:time_to_first_token_seconds_bucket",
    "sapwood_inter_token_seconds_bucket": "vllm:inter_token_latency_seconds_bucket",
    "sapwood_request_seconds_bucket": "vllm:e2e_request_latency_seconds_bucket",
    "sapwood_queue_seconds_sum": "vllm:request_queue_time_seconds_sum",
    "sapwood_step_tokens_count": "vllm:iteration_tokens_total_count",
}
# These change between two scrapes without any request.
RESTLESS = ("process_", "sapwood_connections_open", "sapwood_poll_seconds")


class World:
    def __init__(self, options):
        self.server = options.server
        self.headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        self.generate()

    def generate(self):
        """Calls a model, so that the counters are not zero."""
        text = base64.b64encode(b"hello").decode()
        fragment = {"id": "p", "chunkFragment": {"metadata": {"mimetype": "text/plain"}, "data": text}}
        generate = {
            "name": "GENERATE",
            "inputs": [{"name": "prompt", "id": "p"}],
            "outputs": [{"name": "response", "id": "r"}],
        }
        message = {"nodeFragments": [fragment], "actions": [generate, {"name": "FINISH"}]}
        url = f"ws://{self.server}/evergreen"
        with connect(url, subprotocols=["evergreen.v2.json"], additional_headers=self.headers) as socket:
            socket.send(json.dumps(message))
            try:
                while True:
                    socket.recv(timeout=TIMEOUT_S)
            except ConnectionClosed as closed:
                assert closed.rcvd.code == 1000, closed

    def scrape(self, accept=None):
        headers = self.headers | ({"Accept": accept} if accept else {})
        request = urllib.request.Request(f"http://{self.server}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.headers["Content-Type"], answer.read().decode()


def samples(families):
    """Name and labels of every sample, with its value; each must be unique."""
    found = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def the_text_format_is_the_default(world):
    kind, text = world.scrape()
    assert kind == "text/plain; version=0.0.4; charset=utf-8", kind
    families = {family.name: family for family in read_text(text)}
    assert families["sapwood_requests"].type == "counter"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert families["sapwood_draining"].samples[0].value == 0


def openmetrics_is_returned_if_preferred(world):
    for accept in (OPEN, PROMETHEUS):
        kind, text = world.scrape(accept)
        assert kind.startswith(OPEN + "; version=1.0.0"), kind
        # This parser is strict: order, endings of names, bounds of buckets, the end mark.
        families = {family.name: family for family in read_open(text)}
        assert families["vllm:generation_tokens"].type == "counter"
        assert families["sapwood_build_info"].samples[0].labels["version"]


def both_formats_have_the_same_samples(world):
    plain = samples(read_text(world.scrape()[1]))
    # OpenMetrics does not allow counters of such names.
    plain = {key: value for key, value in plain.items() if not key[0].startswith("nv_")}
    opened = samples(read_open(world.scrape(OPEN)[1]))
    assert plain.keys() == opened.keys(), plain.keys() ^ opened.keys()
    for key, value in plain.items():
        assert opened[key] == value or key[0].startswith(RESTLESS), (key, value, opened[key])


def metrics_have_the_same_value_under_both_names(world):
    found = samples(read_text(world.scrape()[1]))
    for ours, theirs in PAIRS.items():
        compared = 0
        for (name, labels), value in found.items():
            if name != ours:
                continue
            labels = dict(labels)
            labels["model_name"] = labels.pop("model")
            labels["engine"] = "0"
            assert found[(theirs, tuple(sorted(labels.items())))] == value, (ours, labels)
            compared += 1
        assert compared, ours
    ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)
    for (name, labels), value in found.items():
        if name == "vllm:request_success_total":
            ended[dict(labels)["finished_reason"]] += value
    assert set(ended) == {"stop", "length", "abort", "error"} and sum(ended.values()) >= 1, ended


def calls_are_counted_under_tritons_names(world):
    found = samples(read_text(world.scrape()[1]))
    # This parser adds the suffix to counters that Triton's names do not have.
    told = {dict(labels)["model"]: value for (name, labels), value in found.items() if name == "nv_inference_request_success_total"}
    ours = dict.fromkeys(told, 0)
    for (name, labels), value in found.items():
        labels = dict(labels)
        if name == "sapwood_requests_total" and labels["code"] == "ok":
            ours[labels["model"]] += value
    assert told == ours and sum(told.values()) >= 1, (told, ours)
    reasons = {dict(labels)["reason"] for (name, labels), _ in found.items() if name == "nv_inference_request_failure_total"}
    assert reasons == {"REJECTED", "CANCELED", "BACKEND", "OTHER"}, reasons


def labels_come_from_closed_sets(world):
    found = samples(read_text(world.scrape()[1]))
    for (name, labels), _ in found.items():
        labels = dict(labels)
        if name == "sapwood_requests_total":
            assert labels["model"] in ("scripted", "bytes", "unknown"), labels
            assert labels["face"] in ("evergreen", "lmtp", "generate", "http"), labels
        if name == "sapwood_rejected_total":
            assert labels["reason"] in ("queue", "tokens", "key", "drain", "share", "body", "malformed"), labels


CHECKS = [
    the_text_format_is_the_default,
    openmetrics_is_returned_if_preferred,
    both_formats_have_the_same_samples,
    metrics_have_the_same_value_under_both_names,
    calls_are_counted_under_tritons_names,
    labels_come_from_closed_sets,
]


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    import checks

    sys.exit(checks.main(__doc__, World, CHECKS))
