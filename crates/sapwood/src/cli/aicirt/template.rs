//! `sapwood controller-template`: the process that a runtime clones for each controller (AI-702).

use std::ffi::OsString;
use std::path::PathBuf;

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

impl ControllerTemplate {
    /// The command that a runtime starts.
    pub(super) fn command_of(runtime: &AicirtCommand) -> Result<Vec<OsString>, CliError> {
        let program = std::env::current_exe()
            .map_err(|error| CliError::new(format!("cannot find this program: {error}")))?;
        // With `=`, because a name may begin with a dash.
        let flag = |name: &str, value: &std::ffi::OsStr| {
            let mut flag = OsString::from(name);
            flag.push("=");
            flag.push(value);
            flag
        };
        let mut command = vec![
            program.into(),
            TEMPLATE_NAME.into(),
            flag("--tokenizer", runtime.tokenizer.as_ref()),
            flag("--tokenizer-dir", runtime.tokenizer_dir.as_ref()),
        ];
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
