//! `cargo xtask check`: formatting, lints, tidy and the tests of the crates that changed.
//!
//! For use between edits; `cargo xtask ci` is authoritative. Lints cover the whole workspace, because a change may
//! break the crates that depend on it, and type checks are fast. Tests are those of the changed crates only.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::ci::TESTED;
use crate::tools::NEXTEST;
use crate::{process, root, tidy};

/// Options of `cargo xtask check`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The revision to compare with, in addition to uncommitted changes [default: where this branch left its upstream or `main`]
    #[arg(long, value_name = "REVISION")]
    since: Option<String>,
}

/// Files whose change affects every package.
const EVERYWHERE: &[&str] = &[
    "Cargo.toml",
    "Cargo.lock",
    "clippy.toml",
    "rust-toolchain.toml",
    ".cargo/config.toml",
];
/// Files outside its folder that a package's tests read.
const READ_BY: &[(&str, &str)] = &[
    ("README.md", "sapwood"),
    ("config.example.toml", "sapwood"),
    ("docs/", "xtask"),
    ("ARCHITECTURE.md", "xtask"),
    ("testdata/", "sapwood-tests"),
    ("testdata/", "sapwood-proto"),
];

/// The packages whose tests are run.
#[derive(Debug, PartialEq, Eq)]
enum Scope {
    Workspace,
    Packages(Vec<String>),
}

/// Runs the checks, the fast ones first, and stops at the first failure.
///
/// # Errors
/// A check fails, or git or cargo cannot be run.
pub(crate) fn run(options: &Options) -> Result<()> {
    let base = base(options)?;
    let changed = changed(&base)?;
    let packages = packages()?;
    let scope = scope(&changed, &packages);
    let names = match &scope {
        Scope::Workspace => "every package".to_owned(),
        Scope::Packages(names) if names.is_empty() => "no package".to_owned(),
        Scope::Packages(names) => names.join(", "),
    };
    process::print_line(&format!(
        "{} changed files since {}, of {names}",
        changed.len(),
        base.get(..12).unwrap_or(&base)
    ));
    step("fmt", || cargo(&["fmt", "--all", "--check"]))?;
    step("tidy", tidy::run)?;
    if changed.iter().any(|path| concerns_lints(path)) {
        step("clippy", || {
            let lints = ["--workspace", "--all-targets", "--features", TESTED];
            cargo(&[&["clippy"], &lints[..], &["--", "-D", "warnings"]].concat())
        })?;
    }
    let arguments = test_arguments(&scope);
    if arguments.is_empty() {
        return Ok(());
    }
    NEXTEST.ensure()?;
    step("test", || {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        // A package may have no tests of its own.
        cargo(&[&["nextest", "run", "--no-tests", "pass"], &arguments[..]].concat())
    })
}

fn step(name: &str, run: impl FnOnce() -> Result<()>) -> Result<()> {
    process::heading(name);
    let start = Instant::now();
    run()?;
    process::print_line(&format!("{name} took {} s", start.elapsed().as_secs()));
    Ok(())
}

fn cargo(arguments: &[&str]) -> Result<()> {
    process::run(&mut process::cargo(arguments))
}

/// The commit that changes are compared with.
fn base(options: &Options) -> Result<String> {
    let commit = |arguments: &[&str]| {
        let found = process::output(&mut process::program("git", arguments));
        found.map(|text| text.trim().to_owned())
    };
    if let Some(since) = &options.since {
        return commit(&["rev-parse", "--verify", &format!("{since}^{{commit}}")])
            .with_context(|| format!("`--since {since}` names no commit"));
    }
    commit(&["merge-base", "HEAD", "@{upstream}"])
        .or_else(|_| commit(&["merge-base", "HEAD", "main"]))
        .or_else(|_| commit(&["rev-parse", "HEAD"]))
}

/// Paths that differ from the commit, committed or not, and untracked files.
fn changed(base: &str) -> Result<Vec<String>> {
    let git = |arguments: &[&str]| process::output(&mut process::program("git", arguments));
    let known = git(&["diff", "--name-only", base])?;
    let unknown = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(known
        .lines()
        .chain(unknown.lines())
        .map(ToOwned::to_owned)
        .collect())
}

/// Every package of the workspace: its folder relative to the root, and its name.
fn packages() -> Result<Vec<(String, String)>> {
    let metadata = process::output(&mut process::cargo(&[
        "metadata",
        "--no-deps",
        "--format-version",
        "1",
    ]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata is no JSON")?;
    let root = root();
    let package = |package: &Value| {
        let manifest = Path::new(package["manifest_path"].as_str()?);
        let folder = manifest.parent()?.strip_prefix(&root).ok()?;
        Some((
            folder.to_str()?.to_owned(),
            package["name"].as_str()?.to_owned(),
        ))
    };
    let listed = metadata["packages"].as_array().into_iter().flatten();
    Ok(listed.filter_map(package).collect())
}

/// Whether a change of this file may change the result of the lints.
fn concerns_lints(path: &str) -> bool {
    path.ends_with(".rs") || path.ends_with("Cargo.toml") || EVERYWHERE.contains(&path)
}

/// The packages that contain these files or whose tests read them.
fn scope(changed: &[String], packages: &[(String, String)]) -> Scope {
    let mut names = Vec::new();
    for path in changed {
        if EVERYWHERE.contains(&path.as_str()) {
            return Scope::Workspace;
        }
        // The longest matching folder: a package may be nested in another's folder, as xtask's code generator is.
        let owner = packages
            .iter()
            .filter(|(folder, _)| {
                path.strip_prefix(folder.as_str())
                    .is_some_and(|rest| rest.starts_with('/'))
            })
            .max_by_key(|(folder, _)| folder.len());
        names.extend(owner.map(|(_, name)| name.clone()));
        let readers = READ_BY.iter().filter(|(read, _)| path.starts_with(read));
        names.extend(readers.map(|(_, name)| (*name).to_owned()));
    }
    names.sort_unstable();
    names.dedup();
    Scope::Packages(names)
}

/// The arguments that select the tests; empty if there are none to run.
fn test_arguments(scope: &Scope) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    let has_program = match scope {
        Scope::Workspace => {
            arguments.push("--workspace".to_owned());
            true
        }
        Scope::Packages(names) => {
            for name in names {
                arguments.extend(["--package".to_owned(), name.clone()]);
            }
            names.iter().any(|name| name == "sapwood")
        }
    };
    if has_program {
        arguments.extend(["--features".to_owned(), TESTED.to_owned()]);
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(changed: &[&str]) -> Scope {
        let packages = [
            ("crates/proto", "sapwood-proto"),
            ("crates/sapwood", "sapwood"),
            ("xtask", "xtask"),
            ("xtask/codegen", "codegen"),
            ("tests", "sapwood-tests"),
        ];
        let packages = packages.map(|(folder, name)| (folder.to_owned(), name.to_owned()));
        let changed: Vec<String> = changed.iter().map(|path| (*path).to_owned()).collect();
        scope(&changed, &packages)
    }

    fn named(names: &[&str]) -> Scope {
        Scope::Packages(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn a_file_maps_to_the_innermost_package_and_to_those_that_read_it() {
        for (changed, expected) in [
            (&["crates/proto/src/time.rs"][..], &["sapwood-proto"][..]),
            (&["xtask/codegen/src/main.rs"], &["codegen"]),
            (&["xtask/src/main.rs", "xtask/src/ci.rs"], &["xtask"]),
            (&["README.md", "docs/cli.md"], &["sapwood", "xtask"]),
            (
                &["testdata/lmtp/one.txt"],
                &["sapwood-proto", "sapwood-tests"],
            ),
            (&["tests-of-others/a.rs", "LICENSE-MIT"], &[]),
        ] {
            assert_eq!(of(changed), named(expected), "{changed:?}");
        }
        assert_eq!(
            of(&["crates/proto/src/time.rs", "Cargo.lock"]),
            Scope::Workspace
        );
    }

    #[test]
    fn features_are_selected_only_with_the_package_that_has_them() {
        assert!(test_arguments(&named(&[])).is_empty());
        let arguments = test_arguments(&named(&["sapwood-proto"]));
        assert_eq!(arguments, ["--package", "sapwood-proto"]);
        let arguments = test_arguments(&named(&["sapwood", "xtask"]));
        assert_eq!(arguments.last().map(String::as_str), Some(TESTED));
        assert_eq!(test_arguments(&Scope::Workspace)[0], "--workspace");
    }
}
