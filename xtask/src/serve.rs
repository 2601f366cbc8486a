//! `cargo xtask serve`: from a fresh clone to a running server.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::toolchain::{self, Machine, processor};
use crate::{advice, process, root};

/// Features of the binary that people run.
pub(crate) const FEATURES: &str = "cli,embedded,demo-model,stores";

/// The profile of binaries that run elsewhere.
const SHIPPED: &str = "dist";

/// Options of `cargo xtask serve`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// `release` builds faster and for the processor of this machine; `dist` is what is shipped, for any with AVX2.
    #[arg(long, value_name = "NAME", default_value = "release", value_parser = ["release", SHIPPED])]
    profile: String,
    /// Build only; do not start the server.
    #[arg(long)]
    build_only: bool,
    /// Additional cargo features of the binary, e.g. `cuda`, `metal` or `vulkan` for a GPU.
    #[arg(long, value_name = "LIST")]
    features: Option<String>,
    /// Arguments for `sapwood serve`, e.g. `--model path.gguf`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Prepares, builds, serves.
///
/// # Errors
/// If a tool is missing and cannot be installed, the build fails, or the server ends with an error.
pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = Machine::this();
    // First: nothing is installed for a build that cannot succeed.
    toolchain::gpu::ensure(&machine, options.features.as_deref().unwrap_or_default())?;
    toolchain::ensure(&machine)?;
    let folder = process::target_folder()?.join(&options.profile);
    let binary = folder.join("sapwood");
    build(&machine, options, binary.exists())?;
    if options.build_only {
        process::print_line(&format!("built {}", shown(&binary)));
        return Ok(());
    }
    process::print_line(&format!(
        "put {} on your PATH to call `sapwood chat` from anywhere",
        shown(&folder)
    ));
    let status = Command::new(&binary)
        .arg("serve")
        .args(&options.arguments)
        .status()
        .with_context(|| format!("cannot start {}", binary.display()))?;
    if !status.success() {
        bail!("sapwood serve ended with {status}");
    }
    Ok(())
}

/// A path, relative to the checkout if it is in there.
fn shown(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .display()
        .to_string()
}

/// Returns the command that builds the binary with these features.
///
/// # Errors
/// If what was built for another processor cannot be removed.
pub(crate) fn command(machine: &Machine, profile: &str, features: &str) -> Result<Command> {
    let arguments = ["build", "--profile", profile, "--package", "sapwood"];
    let mut command = process::cargo(&arguments);
    command.args(["--features", features]);
    if profile != SHIPPED {
        processor::apply(&mut command, profile, &processor::switches(machine))?;
    }
    Ok(command)
}

fn build(machine: &Machine, options: &Options, again: bool) -> Result<()> {
    if !again {
        process::print_line(
            "building sapwood; the first time takes some minutes, about half of them for llama.cpp",
        );
    }
    let features = match &options.features {
        Some(more) => format!("{FEATURES},{more}"),
        None => FEATURES.to_owned(),
    };
    let start = Instant::now();
    let mut command = command(machine, &options.profile, &features)?;
    let (status, output) = process::run_and_keep(&mut command)?;
    if !status.success() {
        bail!("{}", advice::after_failed_build(&output));
    }
    if !again {
        process::print_line(&format!("built in {} s", start.elapsed().as_secs()));
    }
    Ok(())
}
