//! What a build with llama.cpp needs from the machine: cmake, make, a working C++ compiler, libclang with its headers.
//!
//! Each need is checked by doing what the build will do with it: a name on the `PATH` or a file with a matching name is
//! no proof. Missing packages are installed with apt-get where that is allowed; otherwise the last line names the
//! packages to install.

pub(crate) mod gpu;
mod libclang;
mod machine;
pub(crate) mod processor;

use anyhow::{Result, bail};

use crate::process;
pub(crate) use machine::Machine;

/// A requirement of the build, and the Debian package that has it.
struct Need {
    name: &'static str,
    package: &'static str,
    present: fn(&Machine) -> bool,
}

const NEEDS: [Need; 5] = [
    Need {
        name: "cmake",
        package: "cmake",
        present: |machine| machine.answers("cmake"),
    },
    Need {
        name: "make",
        package: "make",
        // cmake's default generator; a user who sets another one in the environment has that.
        present: |machine| machine.variable("CMAKE_GENERATOR").is_some() || machine.answers("make"),
    },
    Need {
        name: "a C++ compiler with its standard library",
        package: "g++",
        present: compiles_cpp,
    },
    Need {
        name: "libclang",
        package: "libclang-dev",
        present: |machine| libclang::library(machine).is_some(),
    },
    Need {
        name: "clang's own headers (stddef.h, stdbool.h)",
        package: "libclang-dev",
        present: libclang::headers_present,
    },
];

/// A program that uses the library's headers, must be linked with it, and needs a standard that llama.cpp needs.
const CPP_PROGRAM: &str = "#include <string>\n#include <string_view>\n#include <thread>\n\
    int main() { std::string_view v = \"a\"; std::string s(v); std::thread([&] { s += 'b'; }).join(); return s.size() == 2 ? 0 : 1; }\n";

/// Checks the requirements of a build with llama.cpp; installs missing ones with apt-get if it may.
///
/// # Errors
/// If something is missing that cannot be installed; the message ends with the exact command.
pub(crate) fn ensure(machine: &Machine) -> Result<()> {
    let missing = missing(machine);
    if missing.is_empty() {
        return Ok(());
    }
    process::print_line(&format!(
        "missing for the build of llama.cpp: {}",
        names(&missing)
    ));
    install(machine, &packages(&missing))?;
    let missing = self::missing(machine);
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "still missing after `apt-get install {}`: {}{}",
        packages(&missing).join(" "),
        names(&missing),
        libclang::path_hint(machine)
    );
}

/// Whether no requirement is missing.
pub(crate) fn is_complete(machine: &Machine) -> bool {
    missing(machine).is_empty()
}

fn missing(machine: &Machine) -> Vec<&'static Need> {
    NEEDS
        .iter()
        .filter(|need| !(need.present)(machine))
        .collect()
}

fn names(needs: &[&Need]) -> String {
    let names: Vec<_> = needs.iter().map(|need| need.name).collect();
    names.join(", ")
}

/// The packages that have them, each once.
fn packages(needs: &[&Need]) -> Vec<&'static str> {
    let mut packages: Vec<_> = needs.iter().map(|need| need.package).collect();
    packages.dedup();
    packages
}

fn compiles_cpp(machine: &Machine) -> bool {
    compiles_with(machine, CPP_PROGRAM, &[])
}

/// Whether a C++ program compiles and is linked with these libraries.
fn compiles_with(machine: &Machine, source: &str, libraries: &[&str]) -> bool {
    // The build uses `CXX`, else `c++`.
    let compiler = machine.variable("CXX").unwrap_or_else(|| "c++".into());
    let mut words = compiler.to_str().unwrap_or("c++").split_whitespace();
    let Some(program) = words.next() else {
        return false;
    };
    let output = machine.scratch("cxx-check");
    let mut command = machine.command(program);
    command
        .args(words)
        .args(["-x", "c++", "-std=c++17", "-pthread", "-o"]);
    command.arg(&output).arg("-").args(libraries);
    let compiled = process::succeeds_with_input(&mut command, source);
    // It does not exist if nothing was compiled.
    let _ = std::fs::remove_file(output);
    compiled
}

/// Installs Debian packages as root or through sudo.
///
/// # Errors
/// If there is no apt-get, or no right to use it; the message has the command to run.
pub(crate) fn install(machine: &Machine, packages: &[&str]) -> Result<()> {
    let by_hand = format!("apt-get install -y {}", packages.join(" "));
    if !machine.answers("apt-get") {
        bail!(
            "install them with your package manager (on Debian: `{by_hand}`, on Fedora: `dnf install cmake make gcc-c++ \
             clang-devel`, on macOS: `brew install cmake llvm`), then run this again"
        );
    }
    let prefix: &[&str] = if is_root(machine) {
        &[]
    } else if process::succeeds(machine.command("sudo").args(["-n", "true"])) {
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
        let mut command = machine.command(words[0]);
        command
            .args(&words[1..])
            .env("DEBIAN_FRONTEND", "noninteractive");
        process::run(&mut command)
    };
    // An outdated package list may suffice, so a failing update is no error yet.
    let _ = apt(&["update", "-q"]);
    // Packages that conflict with others are refused: a developer's compiler must not go for the sake of a check.
    let arguments: Vec<&str> = [
        "install",
        "-y",
        "-q",
        "--no-install-recommends",
        "--no-remove",
    ]
    .iter()
    .chain(packages)
    .copied()
    .collect();
    if let Err(error) = apt(&arguments) {
        bail!("{error}; run `{by_hand}` by hand to see why, then run this again");
    }
    Ok(())
}

fn is_root(machine: &Machine) -> bool {
    process::output(machine.command("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

#[cfg(test)]
mod tests;
