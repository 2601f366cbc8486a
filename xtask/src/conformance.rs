//! The tables in `docs/faces/*.md` that list which test proves which rule.
//!
//! Finds the tests that carry the id of a rule, and fills the last column of those tables. People write the first two
//! columns (rule, and its content in short); a rule without a test must have `n/a` or `deferred` with the reason.
//!
//! A test carries a rule if its name starts with the id (`ev_206_…`) or a comment above it names it (`EV-206`).

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::tidy::{Finding, Tree};

const BEGIN: &str =
    "<!-- conformance: begin; the last column is written by `cargo xtask tidy --write` -->";
const END: &str = "<!-- conformance: end -->";
const PREFIXES: &[&str] = &["EV", "KE", "OA", "LM", "TR", "AI"];

/// Rule id -> names of the tests that carry it.
type Proofs = BTreeMap<String, BTreeSet<String>>;

/// Findings: a table that is out of date, a rule without a test.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let proofs = proofs(tree);
    let mut findings = Vec::new();
    for (path, text) in pages(tree) {
        if fill(text, &proofs) != text {
            findings.push(Finding::new(
                path,
                "is out of date: run `cargo xtask tidy --write`",
            ));
        }
        for row in rows(text).filter(|row| !row.excused && !proofs.contains_key(row.rule)) {
            findings.push(Finding::new(
                path,
                format!("{} has no test and no word why", row.rule),
            ));
        }
    }
    findings
}

/// Rewrites the last column of every table.
///
/// # Errors
/// If a page cannot be written.
pub(crate) fn write(tree: &Tree) -> Result<()> {
    let proofs = proofs(tree);
    for (path, text) in pages(tree) {
        let filled = fill(text, &proofs);
        if filled != text {
            std::fs::write(crate::root().join(path), filled)?;
        }
    }
    Ok(())
}

fn pages(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    tree.files()
        .filter(|file| file.path.starts_with("docs/") && file.path.ends_with(".md"))
        .filter_map(|file| Some((file.path.as_str(), file.text.as_deref()?)))
        .filter(|(_, text)| text.contains(BEGIN))
}

struct Row<'a> {
    rule: &'a str,
    summary: &'a str,
    /// Whether the text gives a reason for having no test.
    excused: bool,
}

/// Parses a line `| EV-101 | what | tests |` as a row; `None` for any other line.
fn row(line: &str) -> Option<Row<'_>> {
    let mut cells = line.strip_prefix("| ")?.split(" |");
    let rule = cells.next()?.trim();
    let summary = cells.next()?.trim();
    is_rule(rule).then(|| Row {
        rule,
        summary,
        excused: summary.contains("n/a") || summary.contains("deferred"),
    })
}

fn rows(text: &str) -> impl Iterator<Item = Row<'_>> {
    text.lines().filter_map(row)
}

fn fill(text: &str, proofs: &Proofs) -> String {
    let mut inside = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        inside = (inside || line == BEGIN) && line != END;
        match row(line).filter(|_| inside) {
            Some(row) => {
                let tests = proofs.get(row.rule).map_or_else(String::new, shown);
                lines.push(format!("| {} | {} | {tests} |", row.rule, row.summary));
            }
            None => lines.push(line.to_owned()),
        }
    }
    lines.join("\n") + "\n"
}

/// Up to three names, and the number of the others.
fn shown(names: &BTreeSet<String>) -> String {
    let mut cell = names
        .iter()
        .take(3)
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > 3 {
        cell += &format!(" and {} more", names.len() - 3);
    }
    cell
}

fn proofs(tree: &Tree) -> Proofs {
    let mut proofs = Proofs::new();
    for (_, text) in tree.rust() {
        let mut above: Vec<String> = Vec::new();
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            if line.starts_with("//") {
                above.extend(ids(line));
            } else if line.starts_with("#[") {
                is_test |= line.contains("test]") || line.contains("test(");
            } else if let Some(name) = function_name(line).filter(|_| is_test) {
                above.extend(ids(&name.to_uppercase().replace('_', "-")));
                for id in above.drain(..) {
                    proofs.entry(id).or_default().insert(name.to_owned());
                }
                is_test = false;
            } else {
                above.clear();
                is_test = false;
            }
        }
    }
    for file in tree
        .files()
        .filter(|file| file.path.starts_with("tests/foreign/"))
    {
        let name = file.path.rsplit('/').next().unwrap_or(&file.path);
        for id in file.text.iter().flat_map(|text| ids(text)) {
            proofs.entry(id).or_default().insert(name.to_owned());
        }
    }
    proofs
}

fn function_name(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub ").unwrap_or(line);
    let rest = rest
        .strip_prefix("async ")
        .unwrap_or(rest)
        .strip_prefix("fn ")?;
    rest.split(['(', '<']).next()
}

/// Every rule id in a text, in order: a prefix directly followed by a number.
fn ids(text: &str) -> Vec<String> {
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let pairs = words
        .windows(2)
        .map(|pair| format!("{}-{}", pair[0], pair[1]));
    pairs.filter(|id| is_rule(id)).collect()
}

fn is_rule(word: &str) -> bool {
    word.split_once('-').is_some_and(|(prefix, number)| {
        let digits = number
            .strip_prefix(|c: char| c.is_ascii_uppercase())
            .unwrap_or(number);
        PREFIXES.contains(&prefix)
            && !digits.is_empty()
            && digits.chars().all(|c| c.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found_in_names_and_comments() {
        assert_eq!(ids("/// EV-206, KE-R10; not XX-1"), ["EV-206", "KE-R10"]);
        assert_eq!(ids("EV-206-EV-207-A-FRAGMENT"), ["EV-206", "EV-207"]);
    }

    #[test]
    fn the_last_column_is_filled() {
        let page = format!("{BEGIN}\n| EV-101 | one call | old |\n{END}\n");
        let proofs = Proofs::from([("EV-101".into(), BTreeSet::from(["ev_101_one".into()]))]);
        assert!(fill(&page, &proofs).contains("| EV-101 | one call | `ev_101_one` |"));
    }
}
