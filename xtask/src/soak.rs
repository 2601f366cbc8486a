//! `cargo xtask soak`, and the lane of that name: many clients of all kinds against a running server, for a long time.

use std::path::Path;

use anyhow::Result;

use crate::ci::Outcome;
use crate::model::PackagedModel;
use crate::server::Server;
use crate::{process, root, serve};

/// Options of `cargo xtask soak`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Duration in minutes; an hour before a release
    #[arg(long, default_value = "10")]
    minutes: f64,
    /// Number of concurrent clients; default: 16, and 6 with --engine
    #[arg(long)]
    clients: Option<u32>,
    /// Instead of sessions: requests to a real model with few slots and little memory, whose answers are compared with those
    /// that each has alone
    #[arg(long)]
    engine: bool,
    /// Seed of the clients' choices; default: the clock. It is printed
    #[arg(long)]
    seed: Option<u64>,
}

/// The lane: ten minutes.
pub(crate) fn lane() -> Result<Outcome> {
    run(&Options {
        minutes: 10.0,
        clients: None,
        engine: false,
        seed: None,
    })?;
    Ok(Outcome::Passed)
}

/// Starts the server and the clients.
///
/// # Errors
/// If received content was wrong, a resource stayed open, or memory grew.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.engine {
        // As in the lane `embedded`, which has built it.
        process::run(
            process::cargo(&["build", "--package", "sapwood"])
                .args(["--features", serve::FEATURES]),
        )?;
        let model = PackagedModel::SmolLm2.file()?;
        return engine(options, &root().join("target/debug/sapwood"), &model);
    }
    let package = ["--package", "sapwood-tests", "--bin", "soak"];
    process::run(&mut process::cargo(&[&["build"], &package[..]].concat()))?;
    let server = Server::start(&root().join("tests/soak/sapwood.toml"))?;
    let mut arguments = vec![
        format!("--server={}", server.address),
        format!("--pid={}", server.id()),
        format!("--minutes={}", options.minutes),
        format!("--clients={}", options.clients.unwrap_or(16)),
    ];
    arguments.extend(options.seed.map(|seed| format!("--seed={seed}")));
    let program = root().join("target/debug/soak").display().to_string();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    process::run(&mut process::program(&program, &arguments))
}

/// Runs the soak of an engine.
fn engine(options: &Options, server: &Path, model: &Path) -> Result<()> {
    let arguments = ["run", "--quiet", "--package", "sapwood-benches", "--bin"];
    let mut soak = process::cargo(&arguments);
    soak.args(["engine_soak", "--", "--sapwood"]).arg(server);
    soak.arg("--model").arg(model);
    soak.arg(format!("--minutes={}", options.minutes));
    soak.args(
        options
            .clients
            .map(|clients| format!("--clients={clients}")),
    );
    soak.args(options.seed.map(|seed| format!("--seed={seed}")));
    process::run(&mut soak)
}
