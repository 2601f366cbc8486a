//! `sapwood controller-template`: the process that a runtime clones for each controller (AI-702).

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::Args;
use sapwood_control::host::serve_as_template;

use super::{AicirtCommand, vocabulary};
use crate::failure::{CliError, Exit};

/// The name of the command.
pub(in crate::cli) const TEMPLATE_NAME: &str = "controller-template";

/// The flags of the runtime that the vocabulary depends on: it is loaded here too, because controllers read it.
#[derive(Debug, Args)]
pub(in crate::cli) struct ControllerTemplate {
    #[arg(long)]
    tokenizer: String,
    #[arg(long)]
    tokenizer_dir: PathBuf,
    #[arg(long)]
    logits_size: Option<usize>,
}

/// The command that starts a template for the vocabulary that these flags of a runtime name.
///
/// # Errors
/// This program cannot be found.
pub(in crate::cli) fn template_command(
    tokenizer: &OsStr,
    tokenizer_dir: &Path,
) -> Result<Vec<OsString>, CliError> {
    let program = std::env::current_exe()
        .map_err(|error| CliError::new(format!("cannot find this program: {error}")))?;
    Ok(vec![
        program.into(),
        TEMPLATE_NAME.into(),
        flag("--tokenizer", tokenizer),
        flag("--tokenizer-dir", tokenizer_dir.as_ref()),
    ])
}

/// With `=`, because a value may begin with a dash.
fn flag(name: &str, value: &OsStr) -> OsString {
    let mut flag = OsString::from(name);
    flag.push("=");
    flag.push(value);
    flag
}

impl ControllerTemplate {
    /// The command that a runtime starts.
    pub(super) fn command_of(runtime: &AicirtCommand) -> Result<Vec<OsString>, CliError> {
        let mut command = template_command(runtime.tokenizer.as_ref(), &runtime.tokenizer_dir)?;
        if let Some(size) = runtime.logits_size {
            command.push(flag("--logits-size", size.to_string().as_ref()));
        }
        Ok(command)
    }

    pub(in crate::cli) fn run(&self) -> Result<Exit, CliError> {
        crate::logs::Logs::start("warn")?;
        let (tokenizer, folder) = (&self.tokenizer, &self.tokenizer_dir);
        let Ok(model) = vocabulary::load_to_be_cloned(tokenizer, folder, self.logits_size) else {
            // The runtime loads the same file, and says what is wrong with it.
            return Ok(Exit::Usage);
        };
        serve_as_template(model)
            .map_err(|error| CliError::new(format!("the template of controllers: {error}")))?;
        Ok(Exit::Ok)
    }
}
