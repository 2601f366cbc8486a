//! `cargo xtask soak`, and the lane of that name: many clients of all kinds against a running server, for a long time.

use anyhow::Result;

use crate::ci::Outcome;
use crate::server::Server;
use crate::{process, root};

/// Options of `cargo xtask soak`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Duration in minutes; an hour before a release
    #[arg(long, default_value = "10")]
    minutes: f64,
    /// Number of concurrent clients
    #[arg(long, default_value = "16")]
    clients: u32,
    /// Seed of the clients' choices; default: the clock. It is printed
    #[arg(long)]
    seed: Option<u64>,
}

/// The lane: ten minutes.
pub(crate) fn lane() -> Result<Outcome> {
    run(&Options {
        minutes: 10.0,
        clients: 16,
        seed: None,
    })?;
    Ok(Outcome::Passed)
}

/// Starts the server and the clients.
///
/// # Errors
/// If received content was wrong, a resource stayed open, or memory grew.
pub(crate) fn run(options: &Options) -> Result<()> {
    let package = ["--package", "sapwood-tests", "--bin", "soak"];
    process::run(&mut process::cargo(&[&["build"], &package[..]].concat()))?;
    let server = Server::start(&root().join("tests/soak/sapwood.toml"))?;
    let mut arguments = vec![
        format!("--server={}", server.address),
        format!("--pid={}", server.id()),
        format!("--minutes={}", options.minutes),
        format!("--clients={}", options.clients),
    ];
    arguments.extend(options.seed.map(|seed| format!("--seed={seed}")));
    let program = root().join("target/debug/soak").display().to_string();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    process::run(&mut process::program(&program, &arguments))
}
