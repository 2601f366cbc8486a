//! The command `sapwood`: the composition root.
//!
//! Owns: the process (arguments, configuration, logs, exit codes). Refuses to know: anything that a crate below
//! already knows.

mod cli;
mod client;
mod config;
mod failure;
mod listening;
mod logs;
mod models;
mod output;
mod progress;
mod serving;
mod telling;
mod upstreams;

fn main() -> std::process::ExitCode {
    let exit = cli::main().unwrap_or_else(|failure| {
        output::complain(&failure);
        failure.exit
    });
    std::process::ExitCode::from(exit as u8)
}
