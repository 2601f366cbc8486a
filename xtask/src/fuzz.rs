//! The lane `fuzz`: 60 seconds of every fuzz target, where a nightly toolchain and cargo-fuzz can be had.
//!
//! Owns: finding the targets and running them. Refuses to know: what they fuzz. The committed corpus is replayed by
//! ordinary tests in any case.

use anyhow::Result;

use crate::ci::Outcome;
use crate::process;

/// Seconds for each target.
const SECONDS: u32 = 60;

/// Fuzzes every target for a while.
pub(crate) fn run() -> Result<Outcome> {
    if !process::succeeds(&mut process::program("cargo", &["+nightly", "--version"])) {
        return Ok(Outcome::Skipped(
            "no nightly toolchain; the corpus was replayed by the tests".to_owned(),
        ));
    }
    if !process::succeeds(&mut process::program("cargo", &["fuzz", "--version"]))
        && process::run(&mut process::cargo(&[
            "install",
            "--locked",
            "--quiet",
            "cargo-fuzz",
        ]))
        .is_err()
    {
        return Ok(Outcome::Skipped(
            "cargo-fuzz cannot be installed here; the corpus was replayed by the tests".to_owned(),
        ));
    }
    let targets = process::output(&mut process::program(
        "cargo",
        &["+nightly", "fuzz", "list"],
    ))?;
    for target in targets.lines() {
        let time = format!("-max_total_time={SECONDS}");
        process::run(&mut process::program(
            "cargo",
            &[
                "+nightly",
                "fuzz",
                "run",
                target,
                "--",
                &time,
                // The same walk every time, as far as time allows; whoever hunts starts `cargo fuzz` with his own seed.
                "-seed=1",
                "-rss_limit_mb=4096",
                "-timeout=10",
            ],
        ))?;
    }
    Ok(Outcome::Passed)
}
