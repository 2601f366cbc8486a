"""Programs and commands of our pages, run as they are printed there, with the address of the tested server."""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
EVERGREEN = "docs/faces/evergreen.md"
TIMEOUT_S = 60


def block(page, language, mark):
    """The first fenced block of this language that holds `mark`."""
    text = (ROOT / page).read_text()
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return next(text for text in blocks if mark in text)


def addressed(text, server):
    """The text with this server instead of the default one."""
    host, port = server.rsplit(":", 1)
    return text.replace("127.0.0.1", host).replace("8000", port)


def printed(command, folder=ROOT):
    """The output of a command, which must succeed; a failure shows its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def python(page, mark, server, folder=None):
    """The output of a Python program of a page; `folder` has modules that it imports beside the installed ones."""
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(folder or scratch, "program.py")
        path.write_text(addressed(block(page, "python", mark), server))
        return printed([sys.executable, path])
