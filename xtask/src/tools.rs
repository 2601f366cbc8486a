//! Tools that the lanes of CI need and that a machine may lack: how to detect and install them.
//!
//! Everything is installed before the first lane, so that a tool that cannot be installed is reported first.

use std::process::Command;

use anyhow::{Result, bail};

use crate::process;
use crate::toolchain::{self, Machine};

/// A tool.
pub(crate) struct Tool {
    /// Its name for people.
    pub(crate) name: &'static str,
    /// The command that installs it.
    pub(crate) by_hand: &'static str,
    /// Whether it is there.
    pub(crate) present: fn() -> bool,
    /// Installs it.
    pub(crate) install: fn() -> Result<()>,
}

impl Tool {
    /// Installs the tool if it is missing.
    ///
    /// # Errors
    /// It is missing and cannot be installed; the message has the command to run.
    pub(crate) fn ensure(&self) -> Result<()> {
        if (self.present)() {
            return Ok(());
        }
        process::print_line(&format!("installing {}", self.name));
        match (self.install)() {
            Ok(()) if (self.present)() => Ok(()),
            Ok(()) => bail!(
                "it was installed and is still not found; try `{}`",
                self.by_hand
            ),
            Err(error) => bail!("{error:#}; try `{}`", self.by_hand),
        }
    }
}

pub(crate) const NEXTEST: Tool = Tool {
    name: "cargo-nextest",
    by_hand: "cargo install --locked cargo-nextest",
    present: || cargo_has("nextest"),
    install: || cargo_install("cargo-nextest"),
};

pub(crate) const DENY: Tool = Tool {
    name: "cargo-deny",
    by_hand: "cargo install --locked cargo-deny",
    present: || cargo_has("deny"),
    install: || cargo_install("cargo-deny"),
};

/// A target without an operating system.
pub(crate) const WASM_TARGET: &str = "wasm32-unknown-unknown";

pub(crate) const WASM: Tool = Tool {
    name: "the standard library for wasm32-unknown-unknown",
    by_hand: "rustup target add wasm32-unknown-unknown",
    present: wasm_present,
    install: || {
        if rustup_present() {
            rustup(&["target", "add", WASM_TARGET])
        } else {
            // Debian's Rust has its targets in packages.
            toolchain::install(&Machine::this(), &["libstd-rust-dev-wasm32"])
        }
    },
};

/// The compilers of llama.cpp and of the fuzzer's own C++.
pub(crate) const COMPILERS: Tool = Tool {
    name: "cmake, a C++ compiler and libclang",
    by_hand: "apt-get install -y cmake make g++ libclang-dev",
    present: || toolchain::is_complete(&Machine::this()),
    install: || toolchain::ensure(&Machine::this()),
};

pub(crate) const PYTHON: Tool = Tool {
    name: "python3 with venv",
    by_hand: "apt-get install -y python3-venv",
    present: || {
        process::succeeds(&mut process::program(
            "python3",
            &["-c", "import venv, ensurepip"],
        ))
    },
    install: || toolchain::install(&Machine::this(), &["python3-venv"]),
};

pub(crate) const NODE: Tool = Tool {
    name: "node with npm",
    by_hand: "apt-get install -y nodejs npm",
    present: || answers("node") && answers("npm"),
    install: || toolchain::install(&Machine::this(), &["nodejs", "npm"]),
};

/// Whether a program starts and has a version.
pub(crate) fn answers(name: &str) -> bool {
    process::succeeds(Command::new(name).arg("--version"))
}

fn cargo_has(subcommand: &str) -> bool {
    process::succeeds(&mut process::cargo(&[subcommand, "--version"]))
}

/// Unoptimised: these are small programs that wait for others, and building them is the larger cost.
fn cargo_install(package: &str) -> Result<()> {
    process::run(&mut process::cargo(&[
        "install", "--locked", "--quiet", "--debug", package,
    ]))
}

fn rustup_present() -> bool {
    answers("rustup")
}

fn rustup(arguments: &[&str]) -> Result<()> {
    if !rustup_present() {
        bail!("this Rust does not come from rustup");
    }
    process::run(&mut process::program("rustup", arguments))
}

/// Whether the workspace's compiler has the target.
pub(crate) fn wasm_present() -> bool {
    let folder = process::output(&mut process::program(
        "rustc",
        &["--print", "target-libdir", "--target", WASM_TARGET],
    ));
    folder.is_ok_and(|folder| std::path::Path::new(folder.trim()).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error for a missing tool with this installer.
    fn failure_of(install: fn() -> Result<()>) -> String {
        let tool = Tool {
            name: "a tool",
            by_hand: "get tool",
            present: || false,
            install,
        };
        tool.ensure().unwrap_err().to_string()
    }

    #[test]
    fn tools_that_cannot_be_installed_have_instructions() {
        assert_eq!(
            failure_of(|| bail!("no network")),
            "no network; try `get tool`"
        );
        assert!(failure_of(|| Ok(())).ends_with("try `get tool`"));
    }
}
