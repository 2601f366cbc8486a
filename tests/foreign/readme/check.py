"""The Python client of the README, run as it stands there.

Owns: taking the command and the program out of README.md and running both. Refuses to know: what they do.
Called with `--server HOST:PORT`; ends with the plain line `N passed, N failed`.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]


def block(language, mark):
    """The first fenced block of this language that holds `mark`."""
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(rf"^```{language}\n(.*?)^```", readme, re.M | re.S)
    return next(text for text in blocks if mark in text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="host:port")
    server = parser.parse_args().server
    command = block("console", "grpc_tools.protoc").replace("$ python", sys.executable)
    program = block("python", "import grpc").replace("127.0.0.1:8000", server)
    with tempfile.TemporaryDirectory() as folder:
        command = command.replace("_out=.", f"_out={folder}")
        subprocess.run(command, shell=True, check=True, cwd=ROOT)
        path = pathlib.Path(folder, "client.py")
        path.write_text(program)
        done = subprocess.run([sys.executable, path], stdout=subprocess.PIPE, text=True, timeout=60)
    # The scripted model says the words of its prompt again.
    right = done.returncode == 0 and "the capital of Japan" in done.stdout
    print("ok" if right else f"FAILED: exit {done.returncode}, printed {done.stdout!r}")
    print(f"{int(right)} passed, {int(not right)} failed")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
