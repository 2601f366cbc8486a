//! Checks that documentation and code name the same things: error codes and metrics.

use sapwood_proto::code::Code;

use super::{Finding, Tree};

/// Every error code has its page, and every page its code.
pub(super) fn error_codes(tree: &Tree) -> Vec<Finding> {
    let page = |code: &Code| format!("docs/errors/{code}.md");
    let missing = Code::ALL
        .iter()
        .filter(|code| tree.text(&page(code)).is_none())
        .map(|code| Finding::new(page(code), "an error code has no page"));
    let stray = tree
        .files()
        .filter_map(|file| file.path.strip_prefix("docs/errors/")?.strip_suffix(".md"))
        .filter(|name| *name != "README" && Code::from_name(name).is_none())
        .map(|name| Finding::new(format!("docs/errors/{name}.md"), "a page has no error code"));
    missing.chain(stray).collect()
}

/// Every metric that the server names stands in the page for operators.
pub(super) fn metrics(tree: &Tree) -> Vec<Finding> {
    let Some(source) = tree.text("crates/server/src/metrics/names.rs") else {
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
