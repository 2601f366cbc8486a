"""The Triton face under the load of PyPI aiperf, endpoint type `template`: TR-501, TR-601, TR-606.

Owns: short runs over `/generate_stream` and `/generate`, and what aiperf's files say of them. Refuses to know: how fast it
was, and anything of the Rust code.

    python tests/foreign/triton_aiperf/check.py --server 127.0.0.1:8000

Ends with the plain line `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

# Nothing is fetched from elsewhere: the tokenizer of the server is found where a hub's would be kept.
os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks
import tokenizer

TIMEOUT_S = 120
# It says its prompt again, one token for each byte.
MODEL = "bytes"
TOKENIZER = "sapwood/bytes"
REQUESTS = 12
PROMPT_TOKENS = 40
OUTPUT_TOKENS = 16
PAYLOAD = """{
  "text_input": {{ text|tojson }},
  "stream": {{ stream|tojson }},
  "max_tokens": {{ max_tokens|tojson }}
}"""


class World:
    def __init__(self, options):
        self.server = options.server
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.scratch.name)
        self.environment = os.environ | {"HF_HUB_CACHE": tokenizer.hub(options.server, MODEL, TOKENIZER)}
        self.payload = self.folder / "payload.jinja"
        self.payload.write_text(PAYLOAD)

    def profile(self, method, *flags):
        """Runs it; the summary, and a line for each request."""
        said = self.folder / method
        command = [
            str(pathlib.Path(sys.executable).parent / "aiperf"),
            "profile",
            *("--model", MODEL),
            *("--url", f"http://{self.server}/v2/models/{MODEL}/{method}"),
            *("--endpoint-type", "template"),
            *("--extra-inputs", f"payload_template:{self.payload}"),
            *("--extra-inputs", "response_field:text_output"),
            *("--tokenizer", TOKENIZER),
            *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
            *("--synthetic-input-tokens-stddev", "0"),
            *("--output-tokens-mean", str(OUTPUT_TOKENS)),
            *("--output-tokens-stddev", "0"),
            *("--request-count", str(REQUESTS)),
            *("--concurrency", "4"),
            *("--random-seed", "7"),
            *("--output-artifact-dir", str(said)),
            *("--ui", "none"),
            *flags,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=self.folder, env=self.environment
        )
        assert done.returncode == 0, f"exit {done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        summary = json.loads((said / "profile_export_aiperf.json").read_text())
        lines = (said / "profile_export.jsonl").read_text().splitlines()
        return summary, [json.loads(line) for line in lines]


def counted(summary, records):
    """Every request succeeded, and its tokens are those that the model was asked for."""
    assert summary["request_count"]["avg"] == REQUESTS, summary["request_count"]
    assert not summary.get("error_request_count") and not summary.get("error_summary"), summary
    assert len(records) == REQUESTS, len(records)
    for record in records:
        assert not record.get("error"), record
        metrics = record["metrics"]
        assert metrics["output_sequence_length"]["value"] == OUTPUT_TOKENS, metrics


def streams_are_profiled(world):
    summary, records = world.profile("generate_stream", "--streaming")
    counted(summary, records)
    assert summary["time_to_first_token"]["avg"] > 0 and summary["inter_token_latency"]["avg"] >= 0


def whole_answers_are_profiled(world):
    counted(*world.profile("generate"))


CHECKS = [streams_are_profiled, whole_answers_are_profiled]

if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
