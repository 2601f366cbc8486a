//! The command `sapwood`: the composition root.

mod allocator;
mod cli;
mod client;
mod config;
mod controllers;
mod failure;
mod hub;
mod listening;
mod loaded_model;
mod log_queue;
mod logs;
mod model_loading;
mod models;
mod output;
mod plain;
mod progress;
mod repository;
mod sampling_defaults;
mod span_export;
mod trial;
mod upstreams;

fn main() -> std::process::ExitCode {
    // Before anything else: the option is read without synchronisation, and here no other thread exists yet.
    allocator::give_back_at_once();
    let exit = cli::main().unwrap_or_else(|failure| {
        output::complain(&failure);
        failure.exit
    });
    // Last, because the line above goes through the queue too where a server has started.
    logs::flush();
    std::process::ExitCode::from(exit as u8)
}
