//! `sapwood config show` and `sapwood config check`.

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use super::serve::load_tls;
use super::{Common, TargetFlags};
use crate::config::layers::{Flags, Layers};
use crate::config::{dotted, keys};
use crate::failure::{CliError, Exit};
use crate::output::{self, TextStyle};

#[derive(Debug, Args)]
pub(super) struct ConfigCommand {
    #[command(subcommand)]
    command: ConfigSubcommand,
}

#[derive(Debug, Subcommand)]
enum ConfigSubcommand {
    /// Print every value and where it came from; secrets are masked
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        target: TargetFlags,
    },
    /// Exit 0 if the configuration is sound, 2 if not
    Check,
}

impl ConfigCommand {
    pub(super) fn run(&self, common: &Common) -> Result<Exit, CliError> {
        match &self.command {
            ConfigSubcommand::Show { json, target } => {
                let mut flags = Flags::default();
                target.set(&mut flags)?;
                show(&common.layers(flags)?, *json)
            }
            ConfigSubcommand::Check => {
                let layers = common.layers(Flags::default())?;
                let config = layers.config()?;
                warn_of_strangers(&layers);
                // The same calls as `serve` makes before it opens a port.
                keys::load(&config.auth)?;
                load_tls(&config)?;
                config.trace.collector()?;
                config.references.clients()?;
                output::message("The configuration is sound.");
                Ok(Exit::Ok)
            }
        }
    }
}

fn warn_of_strangers(layers: &Layers) {
    for stranger in layers.strangers() {
        output::message(format!(
            "{} {stranger}",
            output::paint(TextStyle::Yellow, "warning:")
        ));
    }
}

fn show(layers: &Layers, as_json: bool) -> Result<Exit, CliError> {
    let config = layers.config()?;
    // Written and not logged: these commands have no log.
    warn_of_strangers(layers);
    let tree = serde_json::to_value(&config).map_err(|error| CliError::new(error.to_string()))?;
    let values = dotted(tree).into_iter();
    let rows = values
        .filter(|(_, value)| !value.is_object())
        .map(|(key, value)| {
            let origin = layers.origin(&key);
            (value, origin.to_string(), key)
        });
    if as_json {
        let all: Map<String, Value> = rows
            .map(|(value, origin, key)| (key, json!({"value": value, "origin": origin})))
            .collect();
        output::json(&all)?;
    } else {
        let text: String = rows
            .map(|(value, origin, key)| format!("{key} = {value}  # {origin}\n"))
            .collect();
        output::data(text)?;
    }
    Ok(Exit::Ok)
}
