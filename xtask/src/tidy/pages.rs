//! Checks that documentation and code name the same things: error codes and metrics.

use std::collections::BTreeSet;

use super::{Finding, Tree};

/// Every error code has its page, and every page its code. The table is read as text: a dependency on the crate would
/// build it twice for `cargo xtask serve`.
pub(super) fn error_codes(tree: &Tree) -> Vec<Finding> {
    let source = tree.text(CODES).unwrap_or_default();
    let rows = source.split("\ncodes! {").nth(1).unwrap_or_default();
    let rows = rows.split("\n}").next().unwrap_or_default();
    let names: BTreeSet<_> = rows
        .lines()
        .filter_map(|row| row.split('"').nth(1))
        .collect();
    if names.is_empty() {
        return vec![Finding::new(
            CODES,
            "no table of error codes is found in it",
        )];
    }
    let page = |name: &str| format!("docs/errors/{name}.md");
    let missing = names
        .iter()
        .filter(|name| tree.text(&page(name)).is_none())
        .map(|name| Finding::new(page(name), "an error code has no page"));
    let stray = tree
        .files()
        .filter_map(|file| file.path.strip_prefix("docs/errors/")?.strip_suffix(".md"))
        .filter(|name| *name != "README" && !names.contains(name))
        .map(|name| Finding::new(page(name), "a page has no error code"));
    missing.chain(stray).collect()
}

const CODES: &str = "crates/proto/src/code.rs";

/// The tables of reasons; each row is `Variant = "name", Code …`.
const REASONS: [&str; 3] = [
    "crates/proto/src/error_reason.rs",
    "crates/proto/src/evergreen/reason.rs",
    "crates/proto/src/lmtp/reason.rs",
];

/// Checks that the page of an error code lists every reason that is sent with it.
pub(super) fn error_reasons(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for path in REASONS {
        let source = tree.text(path).unwrap_or_default();
        let rows = source.split("\nreasons! {").nth(1).unwrap_or_default();
        let rows = rows.split("\n}").next().unwrap_or_default();
        let before = findings.len();
        let mut seen = 0;
        for row in rows.lines() {
            let mut parts = row.trim().trim_end_matches(';').splitn(3, '"').skip(1);
            let (Some(name), Some(rest)) = (parts.next(), parts.next()) else {
                continue;
            };
            seen += 1;
            for code in rest.split(", ").filter_map(as_code) {
                let page = format!("docs/errors/{code}.md");
                let text = tree.text(&page).unwrap_or_default();
                if !text.contains(&format!("`{name}`")) {
                    findings.push(Finding::new(page, format!("does not explain `{name}`")));
                }
            }
        }
        if seen == 0 && findings.len() == before {
            findings.push(Finding::new(path, "no table of reasons is found in it"));
        }
    }
    findings
}

/// `InvalidRequest` as `invalid-request`; `None` for a column that is no code.
fn as_code(column: &str) -> Option<String> {
    let is_code = column.starts_with(|c: char| c.is_ascii_uppercase());
    // Evergreen's table has the scope of an error in a column of its own.
    if !is_code || ["Action", "Session", "Connection"].contains(&column) {
        return None;
    }
    let mut name = String::new();
    for c in column.chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.push(c.to_ascii_lowercase());
    }
    Some(name)
}

/// Checks that the page for operators lists every metric of the server.
pub(super) fn metrics(tree: &Tree) -> Vec<Finding> {
    let Some(source) = tree.text("crates/server/src/ops/metrics/names.rs") else {
        return Vec::new();
    };
    let page = tree.text("docs/operating.md").unwrap_or_default();
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    code.split('"')
        .skip(1)
        .step_by(2)
        .filter(|name| name.starts_with("sapwood_") && !page.contains(&format!("`{name}")))
        .map(|name| {
            Finding::new(
                "docs/operating.md",
                format!("does not explain the metric `{name}`"),
            )
        })
        .collect()
}
