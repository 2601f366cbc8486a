//! Which crate may depend on which: compares a table with `cargo metadata`.

use anyhow::{Context, Result};
use serde_json::Value;

use super::Finding;
use crate::process;

/// Every workspace crate with the workspace crates that it may depend on. Dependencies point downwards only.
const ALLOWED: &[(&str, &[&str])] = &[
    ("sapwood-proto", &[]),
    ("sapwood-demo", &[]),
    ("sapwood-session", &["sapwood-proto"]),
    ("sapwood-net", &["sapwood-proto", "sapwood-session"]),
    ("sapwood-guest", &[]),
    ("sapwood-control", &["sapwood-proto"]),
    ("sapwood-engine", &["sapwood-proto"]),
    (
        "sapwood-kernel",
        &[
            "sapwood-proto",
            "sapwood-session",
            "sapwood-engine",
            "sapwood-net",
        ],
    ),
    (
        "sapwood-server",
        &[
            "sapwood-proto",
            "sapwood-session",
            "sapwood-engine",
            "sapwood-kernel",
            "sapwood-net",
        ],
    ),
    (
        "sapwood",
        &[
            "sapwood-proto",
            "sapwood-session",
            "sapwood-engine",
            "sapwood-control",
            "sapwood-kernel",
            "sapwood-net",
            "sapwood-server",
            "sapwood-demo",
        ],
    ),
    ("xtask", &[]),
    ("codegen", &[]),
];

/// Crates outside the layers, which may use all of them.
const OUTSIDE: &[&str] = &["sapwood-tests", "sapwood-benches"];

/// Crates that `sapwood-proto` must never depend on, because it is pure.
const IMPURE: &[&str] = &[
    "tokio", "tonic", "axum", "hyper", "rand", "tracing", "mio", "socket2",
];

/// Checks every edge between workspace crates. Development dependencies may point anywhere below the crate's tests.
pub(super) fn check() -> Result<Vec<Finding>> {
    let metadata = process::output(&mut process::cargo(&[
        "metadata",
        "--format-version",
        "1",
        "--no-deps",
        "--offline",
    ]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata is not JSON")?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    Ok(packages.iter().flat_map(findings_of).collect())
}

fn findings_of(package: &Value) -> Vec<Finding> {
    let name = package["name"].as_str().unwrap_or_default();
    if OUTSIDE.contains(&name) {
        return Vec::new();
    }
    let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == name) else {
        return vec![Finding::new(
            name,
            "a new crate needs a row in the table of edges and a promise",
        )];
    };
    let mut findings = Vec::new();
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let target = dependency["name"].as_str().unwrap_or_default();
        let ours = target == "sapwood" || target.starts_with("sapwood-");
        if ours && dependency["kind"].is_null() && !allowed.contains(&target) {
            findings.push(Finding::new(name, format!("must not depend on {target}")));
        }
        if name == "sapwood-proto" && dependency["kind"].is_null() && IMPURE.contains(&target) {
            findings.push(Finding::new(
                name,
                format!("is pure and must not depend on {target}"),
            ));
        }
    }
    findings
}
