//! The lane `foreign`: clients of other languages against a running server.
//!
//! Owns: one environment per client (their pins conflict), the server they talk to, and starting them. Refuses to know:
//! what they check.
//!
//! A client is a folder `tests/foreign/NAME` with `requirements.txt` and `check.py`, or with `package.json` and
//! `check.mjs`. The script is called with `--server HOST:PORT` from the root of the checkout and ends with a line
//! `N passed, N failed`. The server runs with `tests/foreign/sapwood.toml`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

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
    let server = Server::start(&folder.join("sapwood.toml"))?;
    let mut skipped = Vec::new();
    for client in clients(&folder)? {
        let name = client
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let place = root().join("target/foreign").join(&name);
        let prepared = if client.join("check.py").exists() {
            python(&client, &place)
        } else {
            node(&client, &place)
        };
        let Ok((program, script)) = prepared else {
            skipped.push(name);
            continue;
        };
        process::run(&mut process::program(
            &program,
            &[&script, "--server", &server.address],
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

fn clients(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut clients: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("check.py").exists() || path.join("check.mjs").exists())
        .collect();
    clients.sort();
    Ok(clients)
}

/// A virtual environment with what the client needs: its interpreter, and the script.
fn python(client: &Path, venv: &Path) -> Result<(String, String)> {
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
    ))?;
    Ok((python, client.join("check.py").display().to_string()))
}

/// The same for Node, which finds packages beside the script: a copy of it, and of what all scripts share, stands among
/// them.
fn node(client: &Path, place: &Path) -> Result<(String, String)> {
    std::fs::create_dir_all(place)?;
    for name in ["package.json", "check.mjs", "../checks.mjs"] {
        let copy = name.trim_start_matches("../");
        std::fs::copy(client.join(name), place.join(copy))?;
    }
    let folder = place.display().to_string();
    process::run(&mut process::program(
        "npm",
        &[
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--prefix",
            &folder,
        ],
    ))?;
    Ok((
        "node".to_owned(),
        place.join("check.mjs").display().to_string(),
    ))
}

/// A server of the build under test, ended when it is dropped.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts it on a free port and waits for the log line that names the address.
    fn start(config: &Path) -> Result<Self> {
        let binary = root().join("target/debug/sapwood").display().to_string();
        let config = config.display().to_string();
        let mut child = process::program(
            &binary,
            &["serve", "--config", &config, "--listen", "127.0.0.1:0"],
        )
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start the server")?;
        let log = BufReader::new(child.stderr.take().context("the server has no log")?);
        let mut lines = log.lines().map_while(Result::ok);
        let address = lines.find_map(|line| {
            let (_, rest) = line.split_once("http://")?;
            Some(
                rest.chars()
                    .take_while(|c| !matches!(c, '"' | ' ' | '/'))
                    .collect::<String>(),
            )
        });
        let Some(address) = address else {
            let status = child.wait()?;
            anyhow::bail!("the server ended before it listened ({status})");
        };
        // The rest of the log is read so that the server never waits for us.
        std::thread::spawn(move || lines.for_each(drop));
        Ok(Self { child, address })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
