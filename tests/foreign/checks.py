"""How the checks of a foreign client are run and told.

Owns: the flags, one line per check, the plain last line, the exit code. Refuses to know: the client.
"""

import argparse
import pathlib
import traceback

PROTO = pathlib.Path(__file__).resolve().parents[2] / "crates/proto/proto"


def main(description, world, checks):
    """Runs each of `checks` with what `world` makes of the flags; gives the exit code."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--server", default="127.0.0.1:8000", help="host:port")
    parser.add_argument("--key", default="", help="bearer key, if the server wants one")
    parser.add_argument("--proto", default=str(PROTO), help="our .proto files")
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
