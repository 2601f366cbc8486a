"""The programs of the README, and the gRPC and Rust programs of the Evergreen page, run as they are printed there.

    python tests/foreign/readme/check.py --server 127.0.0.1:8000

The last line is `N passed, N failed`; the exit code is 0 if nothing failed.
"""

import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks
import pages

README = "README.md"
EXAMPLE = "crates/sapwood/examples/evergreen.rs"
BUILD_TIMEOUT_S = 900
# The features of the lane `test`, which has built the example too.
TESTED = "sapwood/cli,sapwood/stores,sapwood/tower"


class World:
    def __init__(self, options):
        self.server = options.server
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = self.scratch.name
        command = pages.block(README, "console", "grpc_tools.protoc").replace("$ python", sys.executable)
        command = command.replace("_out=.", f"_out={self.folder}")
        subprocess.run(command, shell=True, check=True, cwd=pages.ROOT)


# The scripted model repeats the words of its prompt.


def the_python_client_of_the_readme(world):
    said = pages.python(README, "import grpc", world.server, world.folder)
    assert "the capital of Japan" in said, said


def tools_at_the_client(world):
    said = pages.python(pages.EVERGREEN, "OFFER_ACTIONS", world.server, world.folder)
    assert "wet in Bergen" in said, said


def the_rust_client_of_the_page(world):
    program = pages.block(pages.EVERGREEN, "rust,no_run", "std::env::args()")
    assert program == (pages.ROOT / EXAMPLE).read_text(), f"{EXAMPLE} differs from the page"
    command = ["cargo", "build", "--workspace", "--features", TESTED, "--example", "evergreen"]
    subprocess.run(command, check=True, cwd=pages.ROOT, timeout=BUILD_TIMEOUT_S)
    said = pages.printed(["target/debug/examples/evergreen", f"http://{world.server}"])
    assert "the sky blue" in said, said


def the_rust_programs_of_the_readme_compile(world):
    """Each program of the README compiles in a crate with only the dependencies named there."""
    named = pages.block(README, "toml", "[dependencies]")
    here = f'path = "{pages.ROOT / "crates/sapwood"}"'
    named = named.replace('git = "https://github.com/sapwood/sapwood"', here)
    assert here in named, named
    crate = pathlib.Path(world.folder) / "copied"
    (crate / "src/bin").mkdir(parents=True)
    package = '[package]\nname = "copied"\nedition = "2024"\n\n[workspace]\n\n'
    (crate / "Cargo.toml").write_text(package + named)
    # The locked versions of the workspace.
    (crate / "Cargo.lock").write_text((pages.ROOT / "Cargo.lock").read_text())
    for kind, part, name in [
        ("rust,no_run", "import(&session)", "client"),
        ("rust", "to_uppercase", "function"),
        ("rust,no_run", "Serve::new", "serve"),
    ]:
        (crate / f"src/bin/{name}.rs").write_text(pages.block(README, kind, part))
    command = ["cargo", "check", "--offline", "--target-dir", str(pages.ROOT / "target/readme")]
    subprocess.run(command, check=True, cwd=crate, timeout=BUILD_TIMEOUT_S)


CHECKS = [
    the_python_client_of_the_readme,
    tools_at_the_client,
    the_rust_client_of_the_page,
    the_rust_programs_of_the_readme_compile,
]


if __name__ == "__main__":
    sys.exit(checks.main(__doc__, World, CHECKS))
