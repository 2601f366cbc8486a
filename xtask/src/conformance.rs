//! `cargo xtask conformance`: which test proves which rule of the specification.
//!
//! `rules.tsv` has every rule with its content in short. A test carries a rule if its name starts with the id (`ev_206_…`), or
//! a comment above it names the id (`EV-206`); so does a check of a foreign client whose text names it. A rule that no test
//! carries has its reason in `docs/left-out.md`, or [`check`] finds it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};

use crate::process;
use crate::tidy::{Finding, Tree};

const RULES: &str = include_str!("../rules.tsv");
const LEFT_OUT: &str = "docs/left-out.md";
const PREFIXES: &[&str] = &["EV", "KE", "OA", "LM", "TR", "AI", "D"];
/// Decisions about the whole, which code cites; most are no behaviour that one test could show.
const DECISIONS: &str = "D-";

/// Options of `cargo xtask conformance`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Print these rules only: ids (EV-206) or prefixes (EV).
    rules: Vec<String>,
    /// Print the rules that no test names only.
    #[arg(long)]
    untested: bool,
}

/// Rule id -> names of the tests that carry it.
type Proofs = BTreeMap<String, BTreeSet<String>>;

/// Prints the rules with their tests.
///
/// # Errors
/// If the checkout cannot be read, or there is no such rule.
pub(crate) fn run(options: &Options) -> Result<()> {
    let proofs = proofs(&Tree::read()?);
    let asked = |rule: &str| {
        let is = |asked: &String| {
            let asked = asked.to_ascii_uppercase();
            rule == asked
                || rule
                    .split_once('-')
                    .is_some_and(|(prefix, _)| prefix == asked)
        };
        options.rules.is_empty() || options.rules.iter().any(is)
    };
    let asked: Vec<_> = rules().filter(|(rule, _)| asked(rule)).collect();
    if asked.is_empty() {
        bail!("there is no rule {}", options.rules.join(", "));
    }
    for (rule, summary) in asked {
        let tests = proofs.get(rule);
        if options.untested && tests.is_some() {
            continue;
        }
        process::print_line(&format!("{rule:<8} {summary}"));
        for test in tests.into_iter().flatten() {
            process::print_line(&format!("         {test}"));
        }
    }
    Ok(())
}

/// Findings: a rule that has neither a test nor a reason for having none, and an id in the code that no rule has.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let proofs = proofs(tree);
    let excused: BTreeSet<String> = tree.text(LEFT_OUT).into_iter().flat_map(ids).collect();
    let untested = rules()
        .filter(|(rule, _)| !rule.starts_with(DECISIONS))
        .filter(|(rule, _)| !proofs.contains_key(*rule) && !excused.contains(*rule))
        .map(|(rule, _)| {
            let advice = format!("{rule} has no test, and {LEFT_OUT} has no reason for that");
            Finding::new("xtask/rules.tsv", advice)
        });
    let known: BTreeSet<&str> = rules().map(|(rule, _)| rule).collect();
    let unknown = tree.rust().flat_map(|(path, text)| {
        let comments = text.lines().map(str::trim_start);
        let comments = comments.filter(|line| line.starts_with("//"));
        let cited: BTreeSet<String> = comments.flat_map(ids).collect();
        let known = &known;
        let unknown = cited
            .into_iter()
            .filter(move |id| !known.contains(id.as_str()));
        unknown.map(move |id| {
            let advice = format!("{id} is cited, and xtask/rules.tsv does not say what it is");
            Finding::new(path, advice)
        })
    });
    untested.chain(unknown).collect()
}

/// Every rule, with its content in short.
fn rules() -> impl Iterator<Item = (&'static str, &'static str)> {
    RULES.lines().filter_map(|line| line.split_once('\t'))
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
    fn rules_are_listed_once_and_in_order() {
        let all: Vec<&str> = rules().map(|(rule, _)| rule).collect();
        assert_eq!(all.len(), RULES.lines().count());
        let once: BTreeSet<&str> = all.iter().copied().collect();
        assert_eq!(once.len(), all.len());
        assert!(all.iter().all(|rule| is_rule(rule)));
    }
}
