//! The lane `foreign`: clients of other languages against a running server.
//!
//! Owns: one virtual environment per client (their pins conflict), and starting them. Refuses to know: what they check.
//!
//! A client is a folder `tests/foreign/NAME` with `requirements.txt` and `check.py`. The script gets the path of the
//! `sapwood` binary, starts the server itself, and ends with a line `N passed, N failed`.

use std::path::Path;

use anyhow::{Context, Result};

use crate::ci::Outcome;
use crate::{process, root};

/// Runs every foreign client.
pub(crate) fn run() -> Result<Outcome> {
    process::run(&mut process::cargo(&[
        "build",
        "--package",
        "sapwood",
        "--features",
        "cli",
    ]))?;
    let folder = root().join("tests/foreign");
    let mut skipped = Vec::new();
    let mut clients: Vec<_> = std::fs::read_dir(&folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("check.py").exists())
        .collect();
    clients.sort();
    for client in clients {
        let name = client
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let venv = root().join("target/foreign").join(&name);
        if prepare(&client, &venv).is_err() {
            skipped.push(name);
            continue;
        }
        let script = client.join("check.py").display().to_string();
        let binary = root().join("target/debug/sapwood").display().to_string();
        let python = venv.join("bin/python").display().to_string();
        process::run(&mut process::program(
            &python,
            &[&script, "--sapwood", &binary],
        ))?;
    }
    if skipped.is_empty() {
        return Ok(Outcome::Passed);
    }
    Ok(Outcome::Skipped(format!(
        "packages could not be installed for: {}",
        skipped.join(", ")
    )))
}

fn prepare(client: &Path, venv: &Path) -> Result<()> {
    let python = venv.join("bin/python").display().to_string();
    if !Path::new(&python).exists() {
        let folder = venv.display().to_string();
        process::run(&mut process::program("python3", &["-m", "venv", &folder]))?;
    }
    let requirements = client.join("requirements.txt").display().to_string();
    process::run(&mut process::program(
        &python,
        &[
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-r",
            &requirements,
        ],
    ))
}
