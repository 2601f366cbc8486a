//! `cargo xtask demo-model`: trains the demo model again.

use anyhow::Result;

use crate::process;

/// Options of `cargo xtask demo-model`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Arguments for the recipe; `--help` shows them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs the recipe.
///
/// # Errors
/// If Python is missing or the recipe fails.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut command = process::program("python3", &["crates/demo/recipe/run.py"]);
    command.args(&options.arguments);
    process::run(&mut command)
}
