//! `cargo xtask tidy`: checks what the compiler cannot.
//!
//! Each check is a function from the tree to its findings.

mod edges;
mod files;
mod names;
mod pages;

use anyhow::{Result, bail};

use crate::{conformance, process};

/// One violation: where it is, and the remedy.
pub(crate) struct Finding {
    location: String,
    advice: String,
}

impl Finding {
    pub(crate) fn new(location: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            location: location.into(),
            advice: advice.into(),
        }
    }
}

/// Every file of the checkout that git tracks or would add, with its text if it has one.
pub(crate) struct Tree {
    files: Vec<File>,
}

/// One file of the checkout.
pub(crate) struct File {
    /// Path from the root, with `/`.
    pub(crate) path: String,
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// The text, if it is UTF-8.
    pub(crate) text: Option<String>,
}

impl Tree {
    /// Reads the checkout.
    pub(crate) fn read() -> Result<Self> {
        let root = crate::root();
        let listed = process::output(&mut process::program(
            "git",
            &["ls-files", "--cached", "--others", "--exclude-standard"],
        ))?;
        let mut files = Vec::new();
        for path in listed.lines() {
            // A file that is deleted but not yet staged is still listed.
            let Ok(content) = std::fs::read(root.join(path)) else {
                continue;
            };
            files.push(File {
                path: path.to_owned(),
                bytes: content.len() as u64,
                text: String::from_utf8(content).ok(),
            });
        }
        Ok(Self { files })
    }

    /// Every file.
    pub(crate) fn files(&self) -> impl Iterator<Item = &File> {
        self.files.iter()
    }

    /// The Rust files that people write, with their text.
    pub(crate) fn rust(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files
            .iter()
            .filter(|file| file.path.ends_with(".rs") && !file.path.contains("/generated/"))
            .filter_map(|file| Some((file.path.as_str(), file.text.as_deref()?)))
    }

    /// The text of one file.
    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.files
            .iter()
            .find(|file| file.path == path)?
            .text
            .as_deref()
    }
}

/// Runs every check.
///
/// # Errors
/// If there is a finding, or the checkout cannot be read.
pub(crate) fn run() -> Result<()> {
    let findings = findings()?;
    for finding in &findings {
        process::print_line(&format!("{}: {}", finding.location, finding.advice));
    }
    match findings.len() {
        0 => Ok(()),
        count => bail!("tidy has {count} finding(s)"),
    }
}

fn findings() -> Result<Vec<Finding>> {
    let tree = Tree::read()?;
    let mut findings = edges::check()?;
    let checks = [
        files::sizes,
        files::names,
        files::opening_comments,
        names::unique_types,
        names::retired_words,
        names::pure_cores,
        files::unsafe_code,
        files::ignored_tests,
        files::tests_tried_twice,
        files::forbidden_words,
        files::faces_apart,
        files::serialisable_types,
        pages::error_codes,
        pages::error_reasons,
        pages::metrics,
        conformance::check,
    ];
    findings.extend(checks.iter().flat_map(|check| check(&tree)));
    Ok(findings)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tree_is_tidy() {
        let findings = super::findings().expect("the checkout can be read");
        let shown: Vec<String> = findings
            .iter()
            .map(|finding| format!("{}: {}", finding.location, finding.advice))
            .collect();
        assert!(shown.is_empty(), "{}", shown.join("\n"));
    }
}
