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
