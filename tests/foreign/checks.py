"""Runs the checks of a Python client: command-line flags, one line for each check, a summary line, the exit code."""

import argparse
import pathlib
import traceback

PROTO = pathlib.Path(__file__).resolve().parents[2] / "crates/proto/proto"


def main(description, world, checks):
    """Calls `world` with the flags and runs each of `checks` with its result; returns the exit code."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--server", default="127.0.0.1:8000", help="host:port")
    parser.add_argument("--key", default="", help="bearer key, if the server requires one")
    parser.add_argument("--proto", default=str(PROTO), help="our .proto files")
    parser.add_argument("--sapwood", default="target/debug/sapwood", help="the binary under test")
    made = world(parser.parse_args())
    failed = 0
    for check in checks:
        try:
            check(made)
            print(f"ok      {check.__name__}")
        except (Exception, AssertionError):  # noqa: BLE001 - every failure is reported and counted
            failed += 1
            print(f"FAILED  {check.__name__}")
            traceback.print_exc(limit=3)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0
