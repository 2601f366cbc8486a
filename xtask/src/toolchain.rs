//! What a build of the real model needs from the machine: cmake, libclang, a C++ compiler.
//!
//! Owns: looking for them, saying what is missing, installing it where that is possible.
//! Refuses to know: what is built with them.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::process;

/// Something that must be on the machine, and the Debian package that brings it.
struct Need {
    name: &'static str,
    package: &'static str,
    present: fn() -> bool,
}

const NEEDS: [Need; 3] = [
    Need {
        name: "cmake",
        package: "cmake",
        present: || process::succeeds(Command::new("cmake").arg("--version")),
    },
    Need {
        name: "a C++ compiler",
        package: "g++",
        present: || {
            ["c++", "g++", "clang++"]
                .iter()
                .any(|name| process::succeeds(Command::new(name).arg("--version")))
        },
    },
    Need {
        name: "libclang",
        package: "libclang-dev",
        present: libclang_present,
    },
];

/// Makes sure that what a build with a real model needs is there; installs it with apt-get if it may.
///
/// # Errors
/// If something is missing that cannot be installed from here; the message has the exact command.
pub(crate) fn ensure() -> Result<()> {
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !(need.present)()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing
        .iter()
        .map(|need| need.name)
        .collect::<Vec<_>>()
        .join(", ");
    let packages: Vec<&str> = missing.iter().map(|need| need.package).collect();
    process::say(&format!("missing for the build of llama.cpp: {names}"));
    install(&packages)?;
    match NEEDS.iter().find(|need| !(need.present)()) {
        None => Ok(()),
        Some(need) => bail!(
            "{} is still not found after installing {}",
            need.name,
            need.package
        ),
    }
}

/// Installs Debian packages as root or through sudo.
///
/// # Errors
/// If there is no apt-get, or no right to use it; the message has the command to run by hand.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    let by_hand = format!("apt-get install -y {}", packages.join(" "));
    if !process::succeeds(Command::new("apt-get").arg("--version")) {
        bail!(
            "install them with your package manager (on Debian: `{by_hand}`), then run this again"
        );
    }
    let prefix: &[&str] = if is_root() {
        &[]
    } else if process::succeeds(Command::new("sudo").args(["-n", "true"])) {
        &["sudo", "-n"]
    } else {
        bail!("run `sudo {by_hand}`, then run this again");
    };
    let apt = |arguments: &[&str]| {
        let words: Vec<&str> = prefix
            .iter()
            .chain(&["apt-get"])
            .chain(arguments)
            .copied()
            .collect();
        let mut command = process::program(words[0], &words[1..]);
        command.env("DEBIAN_FRONTEND", "noninteractive");
        process::run(&mut command)
    };
    // An old list may still be good enough, so that a failing update is not yet a failure.
    let _ = apt(&["update", "-q"]);
    let arguments: Vec<&str> = ["install", "-y", "-q", "--no-install-recommends"]
        .iter()
        .chain(packages)
        .copied()
        .collect();
    apt(&arguments)
}

fn is_root() -> bool {
    process::output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

/// libclang has no program to ask: look where Debian, Fedora, Arch and Homebrew put the library.
fn libclang_present() -> bool {
    let folders = [
        "/usr/lib",
        "/usr/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/local/lib",
        "/opt/homebrew/opt/llvm/lib",
        "/usr/local/opt/llvm/lib",
    ];
    let versioned = (11..=25).map(|version| format!("/usr/lib/llvm-{version}/lib"));
    folders
        .into_iter()
        .map(String::from)
        .chain(versioned)
        .any(|folder| holds_libclang(Path::new(&folder)))
}

fn holds_libclang(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libclang.so")
                || name.starts_with("libclang-") && name.contains(".so")
                || name == "libclang.dylib"
        })
    })
}
