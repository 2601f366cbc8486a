//! `cargo xtask bench-engine`: our server beside llama.cpp's, each as its users start it, with a real model.

use std::path::PathBuf;

use anyhow::Result;

use crate::model::PackagedModel;
use crate::toolchain::{self, Machine};
use crate::{process, serve};

/// Options of `cargo xtask bench-engine`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// llama.cpp's server, built for the processor of this machine as ours is (`GGML_NATIVE`, its default).
    /// The bench `speculation` does not need it.
    #[arg(long, value_name = "PROGRAM", required_if_eq_any = [("bench", "defaults"), ("bench", "prefixes")])]
    llama_server: Option<PathBuf>,
    /// The model of both; SmolLM2-135M-Instruct if not given.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// What is measured: `defaults`, tokens per second and gaps; `prefixes`, what the prefix caches save; or `speculation`, what drafts
    /// save, which asks our server alone.
    #[arg(long, value_name = "NAME", default_value = "defaults", value_parser = ["defaults", "prefixes", "speculation"])]
    bench: String,
    /// Arguments of the bench, e.g. `--words 60,700,4000 --clients 1,8,32 --busy 1`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds both sides and the bench, installs the model, and runs.
///
/// # Errors
/// If something cannot be built or installed, or the bench fails.
pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = Machine::this();
    toolchain::ensure(&machine)?;
    process::run(&mut serve::command(&machine, "release", serve::FEATURES)?)?;
    let model = match &options.model {
        Some(model) => model.clone(),
        None => PackagedModel::SmolLm2.file()?,
    };
    // The load takes little of the processor, so it is not worth a second build of everything.
    let arguments = ["run", "--quiet", "--package", "sapwood-benches", "--bin"];
    let mut bench = process::cargo(&arguments);
    bench.arg(format!("engine_{}", options.bench));
    bench.args(["--", "--sapwood"]);
    bench.arg(process::target_folder()?.join("release/sapwood"));
    if let Some(program) = &options.llama_server {
        bench.arg("--llama-server").arg(program);
    }
    bench.arg("--model").arg(model).args(&options.arguments);
    process::run(&mut bench)
}
