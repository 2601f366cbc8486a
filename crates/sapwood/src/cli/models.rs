//! `sapwood models`: lists the functions of a server or of this process; downloads, lists and removes models.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use sapwood_kernel::Spec;
use serde_json::json;

use super::{Common, TargetFlags, log_filter};
use crate::client::{self, ClientTarget};
use crate::config::layers::Flags;
use crate::failure::{CliError, Exit};
use crate::hub::{CachedModel, ModelCache, ModelSource, shown_bytes};
use crate::output;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub(super) struct ModelsCommand {
    #[command(subcommand)]
    command: Option<ModelsSubcommand>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: TargetFlags,
}

const EXAMPLES: &str = "\
Examples:
  sapwood models                                    what can be called, on a server or here
  sapwood models pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF
  sapwood models pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
  sapwood models list
  sapwood models rm hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
  sapwood chat --model hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF     downloads it too, if it is not there";

#[derive(Debug, Subcommand)]
enum ModelsSubcommand {
    /// Download models, or newer versions of them, and print where they are
    #[command(after_help = FORMS)]
    Pull {
        /// hf:OWNER/REPO[@REVISION][:QUANTISATION or FILE], or the URL of a GGUF file
        #[arg(required = true, value_name = "MODEL")]
        models: Vec<String>,
        #[command(flatten)]
        folder: FolderFlags,
    },
    /// List the downloaded models: name, size, when each was last used, and path
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        folder: FolderFlags,
    },
    /// Remove downloaded models, if no process has them loaded
    Rm {
        /// The name as `models list` prints it; hf:OWNER/REPO is everything of that repository
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        #[command(flatten)]
        folder: FolderFlags,
    },
}

const FORMS: &str = "\
Examples:
  hf:OWNER/REPO               the usual quantisation of a repository: Q4_K_M, else Q8_0, else its first GGUF file
  hf:OWNER/REPO:Q6_K          the file with this quantisation in its name
  hf:OWNER/REPO:FILE.gguf     this file; of a split file any part names all
  hf:OWNER/REPO@v1.0:Q6_K     at a branch, tag or commit
  https://HOST/PATH.gguf      any GGUF file on the web

HF_TOKEN is sent to the hub for private and gated repositories; HF_ENDPOINT names a mirror.";

#[derive(Debug, Args)]
struct FolderFlags {
    /// The folder of downloaded models [env: SAPWOOD_HUB__DIR]
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
}

impl FolderFlags {
    /// The models of the configuration with these flags. Logs show the progress of downloads.
    fn open(&self, common: &Common) -> Result<ModelCache, CliError> {
        let mut flags = Flags::default();
        let dir = self
            .dir
            .as_ref()
            .map(|dir| dir.to_string_lossy().into_owned());
        flags.set("hub.dir", "--dir", dir);
        let layers = common.layers(flags)?;
        let config = layers.config()?;
        crate::logs::Logs::start(log_filter(&config, common.log.as_deref()))?;
        layers.warn_unknown_keys();
        Ok(ModelCache::new(&config.hub))
    }
}

impl ModelsCommand {
    pub(super) async fn run(self, common: &Common) -> Result<Exit, CliError> {
        match self.command {
            Some(ModelsSubcommand::Pull { models, folder }) => {
                pull(&folder.open(common)?, &models).await
            }
            Some(ModelsSubcommand::List { json, folder }) => {
                list(folder.open(common)?.models()?, json)
            }
            Some(ModelsSubcommand::Rm { names, folder }) => remove(&folder.open(common)?, &names),
            None => self.functions(common).await,
        }
    }

    async fn functions(&self, common: &Common) -> Result<Exit, CliError> {
        let config = self.target.begin(common)?;
        let target = client::look(&config).await?;
        let ended = self.show(&target);
        target.close().await;
        ended
    }

    fn show(&self, target: &ClientTarget) -> Result<Exit, CliError> {
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

/// Downloads each, and prints the path of its first file.
async fn pull(cache: &ModelCache, models: &[String]) -> Result<Exit, CliError> {
    let sources = models.iter().map(|given| {
        let source = ModelSource::read(Path::new(given)).map_err(CliError::usage)?;
        match source {
            ModelSource::File(_) => Err(CliError::usage(format!(
                "{given} is a path: pull takes hf:OWNER/REPO[:QUANTISATION or FILE] or a URL"
            ))),
            source => Ok(source),
        }
    });
    // All are read before the first is downloaded.
    let sources = sources.collect::<Result<Vec<_>, _>>()?;
    for source in sources {
        let (files, is_new) = cache.pull(&source).await?;
        output::whisper(if is_new {
            format!("{source} is downloaded.")
        } else {
            format!("{source} is up to date.")
        });
        if let Some(first) = files.first() {
            output::foreign(&format!("{}\n", first.display()))?;
        }
    }
    Ok(Exit::Ok)
}

fn list(models: Vec<CachedModel>, as_json: bool) -> Result<Exit, CliError> {
    if as_json {
        let entry = |model: &CachedModel| {
            json!({
                "name": model.name,
                "bytes": model.bytes,
                "complete": model.is_complete,
                "used": seconds(model.used),
                "path": model.path.to_string_lossy(),
            })
        };
        output::json(&models.iter().map(entry).collect::<Vec<_>>())?;
        return Ok(Exit::Ok);
    }
    if models.is_empty() {
        output::whisper("No model is downloaded. `sapwood models pull --help` shows how to.");
        return Ok(Exit::Ok);
    }
    let width = models.iter().map(|model| model.name.chars().count()).max();
    let width = width.unwrap_or_default();
    let rows = models.iter().map(|model| {
        let state = if model.is_complete {
            ""
        } else {
            "  (incomplete)"
        };
        format!(
            "{:<width$}  {:>10}  {:>14}  {}{state}\n",
            model.name,
            shown_bytes(model.bytes),
            shown_age(model.used),
            model.path.display()
        )
    });
    output::foreign(&rows.collect::<String>())?;
    Ok(Exit::Ok)
}

fn remove(cache: &ModelCache, names: &[String]) -> Result<Exit, CliError> {
    for name in names {
        let bytes = cache.remove(name)?;
        output::whisper(format!(
            "{name} is removed: {} are free.",
            shown_bytes(bytes)
        ));
    }
    Ok(Exit::Ok)
}

/// Seconds since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// How long ago a time is, for people.
fn shown_age(time: SystemTime) -> String {
    let age = time.elapsed().unwrap_or_default();
    match age {
        age if age < Duration::from_secs(60) => "now".into(),
        age => format!("{} ago", indicatif::HumanDuration(age)),
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
