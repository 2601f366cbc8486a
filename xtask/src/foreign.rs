//! The lane `foreign`: clients of other languages against a running server, and published chat templates ([`templates`]).
//!
//! A client is a folder `tests/foreign/NAME` with `requirements.txt` and `check.py`, or with `package.json` and
//! `check.mjs`. The script is called with `--server HOST:PORT` from the root of the checkout, one that starts the binary
//! itself also with `--sapwood PATH`, and ends with a line `N passed, N failed`. The server runs with
//! `tests/foreign/sapwood.toml`; a client that has a `sapwood.toml` of its own has a server of its own.

use std::path::{Path, PathBuf};
use std::sync::mpsc;

use anyhow::{Context, Result, bail};

use crate::ci::{self, Outcome};
use crate::server::Server;
use crate::{process, root, templates};

/// Runs every foreign client, and the tests on published templates.
pub(crate) fn run() -> Result<Outcome> {
    let folder = root().join("tests/foreign");
    let server = Server::start(&folder.join("sapwood.toml"))?;
    let binary = ci::build_server()?.display().to_string();
    let clients = clients(&folder)?;
    let (mut skipped, mut failed) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let (installed, ready) = mpsc::sync_channel(INSTALLED_MAX);
        // Installing waits for the network, and a check for the server: the next clients are installed meanwhile.
        scope.spawn(move || {
            for client in clients {
                if installed.send(Client::install(client)).is_err() {
                    break;
                }
            }
        });
        for client in ready {
            match client {
                // The clients are independent: a failure of one must not hide the failure of the next.
                Ok(client) => {
                    if let Err(error) = client.check(&server, &binary) {
                        process::print_line(&format!("{}: {error:#}", client.name));
                        failed.push(client.name);
                    }
                }
                Err(name) => skipped.push(name),
            }
        }
    });
    match templates::run() {
        Ok(true) => {}
        Ok(false) => skipped.push("chat templates".to_owned()),
        Err(error) => {
            process::print_line(&format!("chat templates: {error:#}"));
            failed.push("chat templates".to_owned());
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    if skipped.is_empty() {
        return Ok(Outcome::Passed);
    }
    Ok(Outcome::Skipped(format!(
        "packages could not be installed for: {}",
        skipped.join(", ")
    )))
}

/// Clients that are installed before they are checked.
const INSTALLED_MAX: usize = 8;

/// A client whose packages are installed.
struct Client {
    name: String,
    folder: PathBuf,
    /// What runs the script.
    program: String,
    script: String,
}

impl Client {
    /// Installs the packages of the client in this folder; its name if that is not possible.
    fn install(folder: PathBuf) -> Result<Self, String> {
        let name = folder.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let position = root().join("target/foreign").join(&name);
        let installed = if folder.join("check.py").exists() {
            python(&folder, &position)
        } else {
            node(&folder, &position)
        };
        match installed {
            Ok((program, script)) => Ok(Self {
                name,
                folder,
                program,
                script,
            }),
            Err(error) => {
                process::print_line(&format!("{name}: {error:#}"));
                Err(name)
            }
        }
    }

    /// Runs the script against `server`, or against a server of its own.
    ///
    /// # Errors
    /// It found something, or its own server does not start.
    fn check(&self, server: &Server, binary: &str) -> Result<()> {
        let own = self.folder.join("sapwood.toml");
        let own = own.exists().then(|| Server::start(&own)).transpose()?;
        let address = &own.as_ref().unwrap_or(server).address;
        let mut arguments = vec![self.script.as_str(), "--server", address];
        if STARTERS.contains(&self.name.as_str()) {
            arguments.extend(["--sapwood", binary]);
        }
        process::run(&mut process::program(&self.program, &arguments))
    }
}

/// The clients that start the binary themselves.
const STARTERS: &[&str] = &["aici_engine"];

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

/// A virtual environment with the client's packages: its interpreter, and the script.
fn python(client: &Path, venv: &Path) -> Result<(String, String)> {
    let python = venv.join("bin/python").display().to_string();
    if !Path::new(&python).exists() {
        let folder = venv.display().to_string();
        process::run(&mut process::program("python3", &["-m", "venv", &folder]))?;
    }
    let requirements = client.join("requirements.txt").display().to_string();
    let mut install = process::program(
        &python,
        &[
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            // Modules are compiled when they are imported, which is a small part of the packages.
            "--no-compile",
            "-r",
            &requirements,
        ],
    );
    // Packages without a wheel are built there, and may run what they have built: the folder for temporary files may
    // forbid that.
    process::run(install.env("TMPDIR", venv))?;
    Ok((python, client.join("check.py").display().to_string()))
}

/// The same for Node, which finds packages beside the script: copies of the script and of the shared modules are placed
/// among them.
fn node(client: &Path, position: &Path) -> Result<(String, String)> {
    std::fs::create_dir_all(position)?;
    for name in ["package.json", "check.mjs", "../checks.mjs"] {
        let copy = name.trim_start_matches("../");
        std::fs::copy(client.join(name), position.join(copy))?;
    }
    let folder = position.display().to_string();
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
        position.join("check.mjs").display().to_string(),
    ))
}
