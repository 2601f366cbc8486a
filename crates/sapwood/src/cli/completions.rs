//! `sapwood completions SHELL`.

use clap::Args;
use clap_complete::Shell;

use crate::failure::{CliError, Exit};
use crate::output;

#[derive(Debug, Args)]
pub(super) struct Completions {
    /// bash, zsh, fish, elvish or powershell
    shell: Shell,
}

impl Completions {
    pub(super) fn run(&self, tree: &mut clap::Command) -> Result<Exit, CliError> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, tree, "sapwood", &mut script);
        output::data(script)?;
        Ok(Exit::Ok)
    }
}
