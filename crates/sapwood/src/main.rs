//! The command `sapwood`: the composition root.
//!
//! Owns: the process (arguments, configuration, logs, exit codes). Refuses to know: anything that a crate below
//! already knows.

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
mod upstreams;

/// Keeps the memory of a large message for the next one; the C library's asks the system each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    let exit = cli::main().unwrap_or_else(|failure| {
        output::complain(&failure);
        failure.exit
    });
    logs::flush();
    std::process::ExitCode::from(exit as u8)
}
