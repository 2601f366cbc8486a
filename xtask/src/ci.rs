//! `cargo xtask ci`: every check and every test, in lanes.
//!
//! Owns: the lanes, their order, what happens when a tool is not there. Refuses to know: what a test tests.
//!
//! Only the lane `embedded` builds llama.cpp; every other lane runs on the scripted model. A lane whose tool cannot be
//! had here is skipped loudly, never silently. Long lanes run only where they are asked for by name.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::{foreign, fuzz, process, soak, tidy, toolchain};

/// Options of `cargo xtask ci`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only this lane; may be repeated.
    #[arg(long = "lane", value_name = "NAME")]
    lanes: Vec<String>,
    /// List the lanes and stop.
    #[arg(long)]
    list: bool,
    /// Run the remaining lanes after one has failed.
    #[arg(long)]
    keep_going: bool,
}

/// How a lane ended, short of failing.
pub(crate) enum Outcome {
    /// It ran and found nothing wrong.
    Passed,
    /// It could not run here; why.
    Skipped(String),
}

struct Lane {
    name: &'static str,
    about: &'static str,
    run: fn() -> Result<Outcome>,
}

const LANES: &[Lane] = &[
    Lane {
        name: "fmt",
        about: "formatting",
        run: fmt,
    },
    Lane {
        name: "tidy",
        about: "edges, sizes, names, pages",
        run: tidy_lane,
    },
    Lane {
        name: "clippy",
        about: "lints, warnings denied",
        run: clippy,
    },
    Lane {
        name: "codegen",
        about: "generated code is what the .proto files say",
        run: codegen,
    },
    Lane {
        name: "test",
        about: "tests, on the scripted model",
        run: test,
    },
    Lane {
        name: "doc",
        about: "documentation and its examples, warnings denied",
        run: doc,
    },
    Lane {
        name: "features",
        about: "feature sets build on their own",
        run: features,
    },
    Lane {
        name: "wasm",
        about: "the pure core builds without an operating system",
        run: wasm,
    },
    Lane {
        name: "deny",
        about: "licences, duplicates, sources",
        run: deny,
    },
    Lane {
        name: "foreign",
        about: "official clients of other languages",
        run: foreign::run,
    },
    Lane {
        name: "embedded",
        about: "llama.cpp and the demo model",
        run: embedded,
    },
    Lane {
        name: "fuzz",
        about: "60 s of each fuzz target",
        run: fuzz::run,
    },
];

/// Features of the workspace in every lane without llama.cpp.
const TESTED: &str = "sapwood/cli,sapwood/stores";

/// Lanes that take long and run only where they are asked for by name.
const LONG: &[Lane] = &[Lane {
    name: "soak",
    about: "ten minutes of many clients; only with --lane soak",
    run: soak::lane,
}];

/// Runs the lanes and prints what became of each.
///
/// # Errors
/// If a lane fails, or a lane is asked for that does not exist.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.list {
        for lane in LANES.iter().chain(LONG) {
            process::say(&format!("{:10} {}", lane.name, lane.about));
        }
        return Ok(());
    }
    if let Some(unknown) = options
        .lanes
        .iter()
        .find(|name| LANES.iter().chain(LONG).all(|lane| lane.name != **name))
    {
        bail!("there is no lane `{unknown}`; `cargo xtask ci --list` shows them");
    }
    let named = |lane: &&Lane| options.lanes.iter().any(|name| name == lane.name);
    let usual = LANES
        .iter()
        .filter(|lane| options.lanes.is_empty() || named(lane));
    let chosen = usual.chain(LONG.iter().filter(named));
    let mut report = Vec::new();
    for lane in chosen {
        process::heading(&format!("{}: {}", lane.name, lane.about));
        let start = Instant::now();
        let result = (lane.run)();
        let failed = result.is_err();
        report.push((lane.name, start.elapsed(), result));
        if failed && !options.keep_going {
            break;
        }
    }
    conclude(&report)
}

fn conclude(report: &[(&str, Duration, Result<Outcome>)]) -> Result<()> {
    process::heading("summary");
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, took, result) in report {
        let word = match result {
            Ok(Outcome::Passed) => {
                passed += 1;
                "ok".to_owned()
            }
            Ok(Outcome::Skipped(why)) => {
                skipped += 1;
                format!("SKIPPED: {why}")
            }
            Err(error) => {
                failed += 1;
                format!("FAILED: {error:#}")
            }
        };
        process::say(&format!("{name:10} {:>5} s  {word}", took.as_secs()));
    }
    process::say(&format!(
        "lanes: {passed} passed, {failed} failed, {skipped} skipped"
    ));
    if failed > 0 {
        bail!("{failed} lane(s) failed");
    }
    Ok(())
}

fn cargo(arguments: &[&str]) -> Result<Outcome> {
    process::run(&mut process::cargo(arguments))?;
    Ok(Outcome::Passed)
}

fn fmt() -> Result<Outcome> {
    cargo(&["fmt", "--all", "--check"])
}

fn tidy_lane() -> Result<Outcome> {
    tidy::run(&tidy::Options::default())?;
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

fn test() -> Result<Outcome> {
    nextest(&["--workspace", "--features", TESTED])?;
    cargo(&[
        "test",
        "--quiet",
        "--doc",
        "--workspace",
        "--features",
        TESTED,
    ])
}

/// Tests by nextest where it is installed, by cargo otherwise.
fn nextest(arguments: &[&str]) -> Result<Outcome> {
    let base: &[&str] = if process::succeeds(&mut process::cargo(&["nextest", "--version"])) {
        &["nextest", "run", "--no-fail-fast"]
    } else {
        process::say(
            "cargo-nextest is not installed (`cargo install cargo-nextest --locked`); using cargo test",
        );
        &["test", "--all-targets"]
    };
    cargo(&[base, arguments].concat())
}

fn doc() -> Result<Outcome> {
    let mut command = process::cargo(&["doc", "--workspace", "--no-deps", "--features", TESTED]);
    process::run(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Outcome::Passed)
}

/// The sets that people depend on; `embedded` has a lane of its own.
fn features() -> Result<Outcome> {
    for set in [
        &["--package", "sapwood"][..],
        &["--package", "sapwood", "--features", "cli"],
        &["--package", "sapwood", "--features", "stores"],
        &["--package", "sapwood-engine"],
        &["--package", "sapwood-kernel"],
        &["--package", "sapwood-kernel", "--features", "net"],
    ] {
        cargo(&[&["check", "--quiet"], set].concat())?;
    }
    Ok(Outcome::Passed)
}

fn wasm() -> Result<Outcome> {
    let target = "wasm32-unknown-unknown";
    let installed = process::output(&mut process::program(
        "rustc",
        &["--print", "target-libdir", "--target", target],
    ))?;
    if !std::path::Path::new(installed.trim()).exists() {
        return Ok(Outcome::Skipped(format!(
            "`rustup target add {target}` first; lints and the table of edges stand in"
        )));
    }
    cargo(&["check", "--package", "sapwood-proto", "--target", target])
}

fn deny() -> Result<Outcome> {
    if !process::succeeds(&mut process::cargo(&["deny", "--version"]))
        && process::run(&mut process::cargo(&[
            "install",
            "--locked",
            "--quiet",
            "cargo-deny",
        ]))
        .is_err()
    {
        return Ok(Outcome::Skipped(
            "cargo-deny cannot be installed here".to_owned(),
        ));
    }
    cargo(&["deny", "check", "bans", "licenses", "sources"])
}

fn embedded() -> Result<Outcome> {
    toolchain::ensure()?;
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
    nextest(&tested)?;
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
    cargo(&clippy.concat())
}
