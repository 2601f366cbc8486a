"""The Triton face with PyPI aiperf, endpoint type `template`: TR-501, TR-601, TR-606.

Short runs over `/generate_stream` and `/generate`; checks the reports that aiperf writes, but not the speed.

    python tests/foreign/triton_aiperf/check.py --server 127.0.0.1:8000

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

# No downloads: the server's tokenizer is put into a Hugging Face cache.
os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks
import tokenizer

TIMEOUT_S = 120
# It repeats its prompt, one token for each byte.
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
        """Runs aiperf; returns its summary and its records of requests."""
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
    """Checks that every request succeeded with the requested number of tokens."""
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


def single_responses_are_profiled(world):
    counted(*world.profile("generate"))


CHECKS = [streams_are_profiled, single_responses_are_profiled]

if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
