//! `sapwood key new`: prints a new secret once, and the configuration entry for it.

use clap::{Args, Subcommand};

use crate::config::keys;
use crate::failure::{CliError, Exit};
use crate::output;

#[derive(Debug, Args)]
pub(super) struct KeyCommand {
    #[command(subcommand)]
    command: KeySubcommand,
}

#[derive(Debug, Subcommand)]
enum KeySubcommand {
    /// Make a key: its entry for the key file goes to standard output, the secret to standard error, once
    New {
        /// The name under which its use is logged
        name: String,
        /// The scopes of the key: infer, control, admin, metrics
        #[arg(
            long,
            value_name = "SCOPE",
            value_delimiter = ',',
            default_value = "infer"
        )]
        scopes: Vec<String>,
    },
}

impl KeyCommand {
    pub(super) fn run(&self) -> Result<Exit, CliError> {
        let KeySubcommand::New { name, scopes } = &self.command;
        let (secret, entry) = keys::new(name, scopes)?;
        output::data(entry)?;
        // On standard error, so that `>> keys.toml` adds the entry without the secret.
        output::message(format!("The key, shown this once: {secret}"));
        Ok(Exit::Ok)
    }
}
