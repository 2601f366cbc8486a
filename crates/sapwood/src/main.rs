//! The command `sapwood`: the composition root.
//!
//! Owns: the process (arguments, configuration, logs, exit codes). Refuses to know: anything that a crate below
//! already knows.

mod allocator;
mod cli;
mod client;
mod config;
mod failure;
mod listening;
mod log_queue;
mod logs;
mod models;
mod output;
mod plain;
mod progress;
mod repository;
mod sampling;
mod serving;
mod telling;
mod trial;
mod upstreams;

fn main() -> std::process::ExitCode {
    allocator::give_back_at_once();
    let exit = cli::main().unwrap_or_else(|failure| {
        output::complain(&failure);
        failure.exit
    });
    logs::flush();
    std::process::ExitCode::from(exit as u8)
}
