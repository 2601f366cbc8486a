"""The Python clients of the README and of the face's page over gRPC, run as they stand there.

Owns: taking the command and the programs out of the pages and running them. Refuses to know: what they do.
Called with `--server HOST:PORT`; ends with the plain line `N passed, N failed`.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
README = "README.md"

# Page, what marks the program, what it prints: the scripted model says the words of its prompt again.
PROGRAMS = [
    (README, "import grpc", "the capital of Japan"),
    ("docs/faces/evergreen.md", "OFFER_ACTIONS", "wet in Bergen"),
]


def block(page, language, mark):
    """The first fenced block of this language that holds `mark`."""
    text = (ROOT / page).read_text()
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return next(text for text in blocks if mark in text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="host:port")
    server = parser.parse_args().server
    command = block(README, "console", "grpc_tools.protoc").replace("$ python", sys.executable)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        command = command.replace("_out=.", f"_out={folder}")
        subprocess.run(command, shell=True, check=True, cwd=ROOT)
        for page, mark, expected in PROGRAMS:
            path = pathlib.Path(folder, "client.py")
            path.write_text(block(page, "python", mark).replace("127.0.0.1:8000", server))
            done = subprocess.run([sys.executable, path], stdout=subprocess.PIPE, text=True, timeout=60)
            right = done.returncode == 0 and expected in done.stdout
            failed += not right
            told = "ok" if right else f"FAILED: exit {done.returncode}, printed {done.stdout!r}"
            print(f"{page}: {told}")
    print(f"{len(PROGRAMS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
