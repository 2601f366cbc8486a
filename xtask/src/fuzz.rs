//! The lane `fuzz`: runs every fuzz target for a while, as many at a time as there are processors.
//!
//! The targets are built by cargo itself, with the flags that `cargo fuzz` would pass, so that neither that program nor
//! a nightly compiler is needed. Inputs that the fuzzer finds useful stay in `fuzz/target/corpus` from run to run; an
//! input that breaks something is written to `fuzz/artifacts`, and belongs in `fuzz/corpus`, whose files ordinary tests
//! replay.
//!
//! What no target explores is built without the fuzzer's flags, which cost half of a crate's compile time. Cargo has flags
//! for all crates or for none, so this program stands between it and the compiler ([`as_compiler`]).

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use crate::ci::{Outcome, Settings};
use crate::{process, root};

/// Bytes of the largest input.
const INPUT_BYTES_MAX: u32 = 1 << 20;
/// Maximum memory of the process at its peak, whatever the input.
const MEMORY_MIB_MAX: u32 = 512;
/// Maximum seconds for one input.
const INPUT_SECONDS_MAX: u32 = 20;

/// Compiler flags of all crates: as in debug builds, everything is checked.
const FLAGS: &[&str] = &[FUZZING, "-Cdebug-assertions"];
const FUZZING: &str = "--cfg=fuzzing";

/// Compiler flags of crates that are explored, as `cargo fuzz --sanitizer none` sets them: report taken branches and
/// compared values to the fuzzer. Our code is safe Rust, so an address sanitizer would find little, and its memory use
/// would hide ours.
const COVERAGE: &[&str] = &[
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// The beginnings of the names of crates that are not explored: the Wasm compiler and its runtime, which run nothing here,
/// and what servers and clients of sockets consist of.
const UNEXPLORED: &[&str] = &[
    "axum",
    "cranelift",
    "gimli",
    "h2",
    "hyper",
    "object",
    "opentelemetry",
    "pulley",
    "regalloc2",
    "ring",
    "rustls",
    "tokio",
    "tonic",
    "tower",
    "wasmtime",
];

/// If cargo has started this program in place of the compiler, whose path and arguments are `arguments`: runs the compiler,
/// with the flags of the crate.
pub(crate) fn as_compiler(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let compiler = PathBuf::from(arguments.next()?);
    // The first argument of every other use is the name of a task.
    if compiler.file_stem()? != "rustc" {
        return None;
    }
    let arguments: Vec<OsString> = arguments.collect();
    let mut command = Command::new(compiler);
    command.args(&arguments);
    if is_explored(&arguments) {
        command.args(COVERAGE);
    }
    let status = command.status();
    Some(match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Whether these arguments compile a crate that is explored. Those of build scripts and macros have no flags of ours.
fn is_explored(arguments: &[OsString]) -> bool {
    let name = arguments.iter().skip_while(|it| *it != "--crate-name");
    let name = name.map(|it| it.to_string_lossy()).nth(1);
    let is_unexplored = |name: &str| UNEXPLORED.iter().any(|it| name.starts_with(it));
    arguments.iter().any(|it| it == FUZZING) && name.is_some_and(|name| !is_unexplored(&name))
}

/// Fuzzes every target for a while.
pub(crate) fn run(settings: &Settings) -> Result<Outcome> {
    let targets = targets()?;
    let folder = build()?;
    let seed = settings.seed.unwrap_or_else(new_seed);
    process::print_line(&format!(
        "{} targets, {} s each; `--lane fuzz --seed {seed}` repeats this run",
        targets.len(),
        settings.seconds
    ));
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let waiting = Mutex::new(targets);
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(target) = next(&waiting) {
                    if let Err(error) = fuzz(&folder, &target, seed, settings.seconds) {
                        process::print_line(&format!("{error:#}"));
                        if let Ok(mut failed) = failed.lock() {
                            failed.push(target);
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if !failed.is_empty() {
        bail!("found something: {}", failed.join(", "));
    }
    Ok(Outcome::Passed)
}

fn next(waiting: &Mutex<Vec<String>>) -> Option<String> {
    waiting.lock().ok()?.pop()
}

/// A seed that differs from run to run.
fn new_seed() -> u32 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    // With seed zero, the fuzzer would choose one and not print it.
    now.map_or(1, |now| now.subsec_nanos().max(1))
}

/// The names of the targets: the files in `fuzz_targets`.
fn targets() -> Result<Vec<String>> {
    let folder = root().join("fuzz/fuzz_targets");
    let entries =
        std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut targets: Vec<_> = entries
        .flatten()
        .filter_map(|entry| Some(entry.path().file_stem()?.to_string_lossy().into_owned()))
        .collect();
    // Popped from the end.
    targets.sort_by(|a, b| b.cmp(a));
    Ok(targets)
}

/// Builds all targets; returns their folder.
fn build() -> Result<PathBuf> {
    let host = process::host()?;
    let mut command = process::cargo(&[
        "build",
        "--release",
        "--manifest-path",
        "fuzz/Cargo.toml",
        // With an explicit target, build scripts and macros are built without the flags.
        "--target",
        &host,
    ]);
    let this = std::env::current_exe().context("this program has no path")?;
    command
        .env("RUSTFLAGS", FLAGS.join(" "))
        .env("RUSTC_WRAPPER", this);
    process::run(&mut command)?;
    Ok(root().join("fuzz/target").join(&host).join("release"))
}

/// Runs one target; shows its output if it found something.
fn fuzz(folder: &Path, target: &str, seed: u32, seconds: u32) -> Result<()> {
    let retained = root().join("fuzz/target/corpus").join(target);
    let committed = root().join("fuzz/corpus").join(target);
    let artifacts = root().join("fuzz/artifacts").join(target);
    for folder in [&retained, &artifacts] {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let mut command = Command::new(folder.join(target));
    command
        .arg(format!("-seed={seed}"))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={INPUT_BYTES_MAX}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg("-print_final_stats=1")
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(&retained);
    if committed.is_dir() {
        command.arg(committed);
    }
    let output = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .with_context(|| format!("cannot start the target {target}"))?;
    let log = String::from_utf8_lossy(&output.stderr);
    let value = |name: &str| {
        let line = log.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.split_whitespace().last());
        value.unwrap_or("?").to_owned()
    };
    if !output.status.success() {
        let end: Vec<_> = log.lines().rev().take(60).collect();
        let end: Vec<_> = end.into_iter().rev().collect();
        bail!("{}\n{target} failed with -seed={seed}", end.join("\n"));
    }
    process::print_line(&format!(
        "{target:20} {:>9} inputs, {:>3} MiB at its peak",
        value("stat::number_of_executed_units:"),
        value("stat::peak_rss_mb:")
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_explored_reports_to_the_fuzzer() {
        let explored = |line: &str| {
            let arguments: Vec<_> = line.split(' ').map(OsString::from).collect();
            is_explored(&arguments)
        };
        assert!(explored(
            "--crate-name sapwood_control --edition=2024 --cfg=fuzzing"
        ));
        assert!(!explored(
            "--crate-name wasmtime_environ --edition=2024 --cfg=fuzzing"
        ));
        assert!(!explored(
            "--crate-name serde_derive --crate-type proc-macro"
        ));
        assert!(!explored("-vV"));
    }

    #[test]
    fn the_name_of_a_task_is_no_compiler() {
        let arguments = ["ci", "--lane", "fuzz"].map(OsString::from);
        assert!(as_compiler(arguments.into_iter()).is_none());
        assert!(as_compiler(std::iter::empty()).is_none());
    }
}
