//! `sapwood mock check`: checks a file of scripted models (TR-1108).

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sapwood_engine::scripted::Scripted;

use crate::config::layers::{Flags, Layers};
use crate::failure::{CliError, Exit};
use crate::{models, output};

#[derive(Debug, Args)]
pub(super) struct MockCommand {
    #[command(subcommand)]
    act: MockAction,
}

#[derive(Debug, Subcommand)]
enum MockAction {
    /// Read a configuration file and print the models it makes; exit code 2 if it makes none
    Check {
        /// The file
        file: PathBuf,
    },
}

impl MockCommand {
    pub(super) fn run(self) -> Result<Exit, CliError> {
        let MockAction::Check { file } = self.act;
        // With the environment, as `serve` would read it.
        let config = Layers::read(Some(&file), Flags::default())?.config()?;
        let mut text = String::new();
        for model in &config.models {
            let Some(script) = models::scripted(&config, model)? else {
                text.push_str(&format!("{}  not scripted\n", model.name));
                continue;
            };
            let named = script.script.name();
            Scripted::new(script)
                .map_err(|why| CliError::usage(format!("models `{}`: {why}", model.name)))?;
            let signature = model.signature()?;
            let names = |list: Vec<&String>| {
                let names: Vec<&str> = list.into_iter().map(String::as_str).collect();
                names.join(", ")
            };
            let tensors = signature.as_ref().map_or_else(
                || "union signature".to_owned(),
                |it| {
                    let inputs = names(it.inputs.iter().map(|input| &input.name).collect());
                    let outputs = names(it.outputs.iter().map(|output| &output.name).collect());
                    format!("{inputs} -> {outputs}")
                },
            );
            text.push_str(&format!("{}  {named}  {tensors}\n", model.name));
        }
        output::data(text)?;
        Ok(Exit::Ok)
    }
}
