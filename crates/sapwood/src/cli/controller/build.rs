//! `sapwood controller build`: compiles a project to a module, with the Rust that is installed.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Args;
use serde_json::Value;

use crate::failure::{CliError, Exit};
use crate::output;

#[derive(Debug, Args)]
pub(super) struct BuildControllerArgs {
    /// The project's folder
    #[arg(default_value = ".")]
    folder: PathBuf,
    /// Features of the project, separated by commas
    #[arg(long, value_name = "NAMES")]
    features: Option<String>,
}

impl BuildControllerArgs {
    /// Prints the path of each module that the project makes. What the compiler says goes to standard error.
    pub(super) fn run(&self) -> Result<Exit, CliError> {
        let mut cargo = Command::new("cargo");
        cargo
            .args(["build", "--release", "--target", TARGET])
            .arg("--message-format=json-render-diagnostics")
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if let Some(features) = &self.features {
            cargo.args(["--features", features]);
        }
        let failed = |why| CliError::new(format!("cargo, in {}: {why}", self.folder.display()));
        let mut child = cargo.spawn().map_err(|why| match why.kind() {
            std::io::ErrorKind::NotFound if self.folder.is_dir() => CliError::new(
                "there is no `cargo` here: install Rust (https://rustup.rs), or build the module with your own compiler",
            ),
            _ => failed(why),
        })?;
        let mut modules = Vec::new();
        if let Some(messages) = child.stdout.take() {
            for line in BufReader::new(messages).lines() {
                modules.extend(modules_of(&line.map_err(failed)?));
            }
        }
        if !child.wait().map_err(failed)?.success() {
            return Err(CliError::new(format!(
                "the project does not build; if its target is missing: rustup target add {TARGET}"
            )));
        }
        if modules.is_empty() {
            return Err(CliError::new(
                "the project makes no module: its Cargo.toml needs `crate-type = [\"cdylib\"]` under [lib]",
            ));
        }
        modules
            .iter()
            .try_for_each(|module| output::foreign(&format!("{module}\n")))?;
        Ok(Exit::Ok)
    }
}

/// The modules that a line of cargo's messages names.
fn modules_of(line: &str) -> Vec<String> {
    let message: Value = serde_json::from_str(line).unwrap_or_default();
    let artifact = message.get("reason").and_then(Value::as_str) == Some("compiler-artifact");
    let files = message.get("filenames").and_then(Value::as_array);
    let files = files.filter(|_| artifact).into_iter().flatten();
    let files = files.filter_map(|file| file.as_str().map(str::to_owned));
    files.filter(|file| file.ends_with(".wasm")).collect()
}

/// What modules are compiled for.
const TARGET: &str = "wasm32-unknown-unknown";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_1017_modules_are_found_in_what_cargo_says() {
        let artifact = r#"{"reason":"compiler-artifact","filenames":["/t/libx.rlib","/t/x.wasm"]}"#;
        assert_eq!(modules_of(artifact), ["/t/x.wasm"]);
        for other in [
            r#"{"reason":"build-finished","success":true}"#,
            r#"{"reason":"compiler-message","filenames":["/t/x.wasm"]}"#,
            "no JSON",
        ] {
            assert_eq!(modules_of(other), Vec::<String>::new(), "{other}");
        }
    }
}
