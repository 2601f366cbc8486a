//! `sapwood models`: lists the functions of a server or of this process.

use clap::Args;
use sapwood_kernel::Spec;
use serde_json::json;

use super::{Common, TargetFlags};
use crate::client::{self, ClientTarget};
use crate::failure::{CliError, Exit};
use crate::output;

#[derive(Debug, Args)]
pub(super) struct ModelsCommand {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: TargetFlags,
}

impl ModelsCommand {
    pub(super) async fn run(self, common: &Common) -> Result<Exit, CliError> {
        let config = self.target.begin(common)?;
        let target = client::look(&config).await?;
        let ended = self.list(&target);
        target.close().await;
        ended
    }

    fn list(&self, target: &ClientTarget) -> Result<Exit, CliError> {
        let specs = target.kernel.specs();
        let (models, functions): (Vec<_>, Vec<_>) = specs.iter().partition(|spec| spec.model);
        if self.json {
            output::json(&json!({
                "models": models.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>(),
                "functions": functions.iter().map(|spec| function(spec)).collect::<Vec<_>>(),
            }))?;
            return Ok(Exit::Ok);
        }
        let target = match &target.url {
            Some(url) => format!("At {url}:"),
            None => "In this process:".to_owned(),
        };
        // On standard error, so that a pipe gets the list alone.
        output::whisper(target);
        let models = models
            .iter()
            .map(|spec| format!("model     {}\n", spec.name));
        let functions = functions.iter().map(|spec| {
            format!(
                "function  {:<16} {}\n",
                spec.name.as_str(),
                spec.description
            )
        });
        output::foreign(&models.chain(functions).collect::<String>())?;
        Ok(Exit::Ok)
    }
}

fn function(spec: &Spec) -> serde_json::Value {
    json!({
        "name": spec.name.as_str(),
        "description": &*spec.description,
        "inputs": spec.inputs.iter().map(|input| input.name.as_str()).collect::<Vec<_>>(),
        "outputs": spec.outputs.iter().map(|output| output.wire.as_str()).collect::<Vec<_>>(),
    })
}
