//! The commands and their flags.

#[cfg(target_os = "linux")]
mod aicirt;
mod chat;
pub(crate) mod compile_controller;
mod completions;
mod config;
mod controller;
mod doctor;
mod draft_flags;
mod embedding_flags;
mod engine_flags;
mod key;
mod llama_flags;
mod llama_names;
mod lmtp;
mod mock;
mod models;
mod reasoning;
mod run;
mod sampling_flags;
mod serve;
#[cfg(feature = "embedded")]
mod try_model;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, Parser, Subcommand};
use figment::value::{Dict, Value};
use sapwood_proto::secret::{Secret, SecretUrl, masked};

use crate::client::HERE;
use crate::config::layers::{Flags, Layers, list};
use crate::config::{Config, DEMO};
use crate::failure::{CliError, Exit};
use crate::hub::ModelSource;
use draft_flags::DraftFlags;
use embedding_flags::EmbeddingFlags;
use llama_flags::LlamaFlags;

/// One server, runtime and library for streaming generative AI.
#[derive(Debug, Parser)]
#[command(
    name = "sapwood",
    version,
    max_term_width = 100,
    arg_required_else_help = true
)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Args)]
struct Common {
    /// Read this configuration file instead of ./sapwood.toml
    #[arg(long, global = true, env = "SAPWOOD_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// What to log: a level (error, warn, info, debug, trace) or TARGET=LEVEL,...
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<String>,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Run the server
    Serve(serve::ServeCommand),
    /// Serve LMTP over standard input and output, one message per line
    Lmtp(lmtp::LmtpCommand),
    /// Chat with a model; reads one question per line if standard input is no terminal
    Chat(chat::ChatArgs),
    /// Call a function and print its output as it arrives
    Run(run::RunArgs),
    /// List the models and functions that can be called; download, list and remove models
    Models(models::ModelsCommand),
    /// Check this machine and report what would keep Sapwood from working
    Doctor(doctor::DoctorCommand),
    /// Show or check the configuration
    Config(config::ConfigCommand),
    /// Write, upload and run controllers, which steer decoding token by token
    Controller(controller::ControllerCommand),
    /// Make API keys
    Key(key::KeyCommand),
    /// Check files of scripted models
    Mock(mock::MockCommand),
    /// Serve controllers to an engine over shared memory, in place of the reference AICI runtime
    #[cfg(target_os = "linux")]
    Aicirt(Box<aicirt::AicirtCommand>),
    /// Print a completion script for a shell
    Completions(completions::Completions),
    /// Compile a controller, for another process
    #[command(hide = true)]
    CompileController(compile_controller::CompileController),
    /// Be cloned for each controller, for a runtime that gives each a process
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    ControllerTemplate(aicirt::ControllerTemplate),
    /// Load a file and compute a few tokens, for a server that is about to load it
    #[cfg(feature = "embedded")]
    #[command(hide = true)]
    TryModel(try_model::TryModel),
}

/// Which models, and how they run.
#[derive(Debug, Default, Args)]
struct ModelFlags {
    /// Serve this GGUF file, under its file name or under NAME: a path, hf:OWNER/REPO[:QUANTISATION or FILE] of the
    /// Hugging Face hub, or a URL, which are downloaded once; may be repeated
    #[arg(long, short, value_name = "[NAME=]PATH|hf:OWNER/REPO|URL")]
    model: Vec<String>,
    /// The model for calls that name none
    #[arg(long, value_name = "NAME")]
    default_model: Option<String>,
    /// Context size of a sequence in tokens; 0 is the model's training context, at most 8192
    #[arg(long, short, alias = "ctx-size", value_name = "TOKENS")]
    ctx: Option<u32>,
    /// Compute threads; 0 is as many as are fastest
    #[arg(long, short, value_name = "N")]
    threads: Option<u32>,
    /// Compute threads for prompts; 0 is as --threads (-tb)
    #[arg(long, value_name = "N")]
    threads_batch: Option<u32>,
    /// Sequences that are decoded together (slots) (-np)
    #[arg(long, value_name = "N")]
    parallel: Option<u32>,
    // In a box: it is the largest part of every command, and most commands are given none of it.
    #[command(flatten)]
    llama: Box<LlamaFlags>,
    #[command(flatten)]
    draft: Box<DraftFlags>,
    #[command(flatten)]
    embedding: Box<EmbeddingFlags>,
}

impl ModelFlags {
    /// The first of these flags that was given.
    fn named(&self) -> Option<&'static str> {
        [
            ("--model", !self.model.is_empty()),
            ("--default-model", self.default_model.is_some()),
            ("--ctx", self.ctx.is_some()),
            ("--threads", self.threads.is_some()),
            ("--threads-batch", self.threads_batch.is_some()),
            ("--parallel", self.parallel.is_some()),
        ]
        .into_iter()
        .find_map(|(flag, given)| given.then_some(flag))
        .or_else(|| self.llama.named())
        .or_else(|| self.draft.named())
        .or_else(|| self.embedding.named())
    }

    fn set(&self, flags: &mut Flags) -> Result<(), CliError> {
        let mut keys = self.draft.of_model(self.model.len())?;
        keys.extend(self.embedding.of_model(self.model.len())?);
        let lora = self.llama.adapters(self.model.len())?;
        keys.push(("lora".to_owned(), list(lora)));
        if !self.model.is_empty() {
            let models = self
                .model
                .iter()
                .map(|given| model_entry(given, &keys))
                .collect::<Result<Vec<_>, _>>()?;
            flags.set("models", "--model", Some(list(models)));
        }
        flags.set(
            "default_model",
            "--default-model",
            self.default_model.clone(),
        );
        flags.set("engine.ctx", "--ctx", self.ctx);
        flags.set("engine.threads", "--threads", self.threads);
        flags.set(
            "engine.threads_batch",
            "--threads-batch",
            self.threads_batch,
        );
        self.llama.set(flags);
        self.draft.set(flags);
        flags.set("engine.parallel", "--parallel", self.parallel);
        Ok(())
    }
}

/// `NAME=PATH`, or `PATH` under its default name; `demo` is the demo model. With other keys of the model.
fn model_entry(given: &str, keys: &[(String, Value)]) -> Result<Value, CliError> {
    let mut entry = Dict::from_iter(keys.iter().cloned());
    // Before the path: a file of this name can still be given as `./demo`.
    if given == DEMO {
        entry.insert("name".into(), Value::from(DEMO));
        return Ok(Value::from(entry));
    }
    // A URL without a name may have an equals sign in its query.
    let named = given
        .split_once('=')
        .filter(|_| !ModelSource::has_scheme(given));
    let (name, path) = named.map_or((None, given), |(name, path)| (Some(name), path));
    let shown = masked(path);
    let source = ModelSource::read(Path::new(path));
    let source = source.map_err(|why| CliError::usage(format!("--model {shown}: {why}")))?;
    let name = name.map_or_else(|| source.default_name(), str::to_owned);
    if name.is_empty() || path.is_empty() {
        return Err(CliError::usage(format!(
            "--model {}: write --model PATH or --model NAME=PATH; in place of a path also hf:OWNER/REPO or a URL",
            masked(given)
        )));
    }
    entry.insert("name".into(), Value::from(name));
    entry.insert("path".into(), Value::from(path));
    Ok(Value::from(entry))
}

/// Which server to talk to.
#[derive(Debug, Default, Args)]
struct ClientFlags {
    /// The server to talk to; `here` runs the model in this process [env: SAPWOOD_SERVER]
    #[arg(long, value_name = "URL")]
    server: Option<SecretUrl>,
    /// The key to present [env: SAPWOOD_CLIENT_KEY]
    #[arg(long, value_name = "KEY")]
    api_key: Option<Secret>,
    /// Trust the authorities of this file too (PEM)
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

impl ClientFlags {
    fn set(&self, flags: &mut Flags) {
        let server = self.server.as_ref().map(SecretUrl::expose);
        flags.set("client.server", "--server", server);
        let key = self.api_key.as_ref().map(Secret::expose);
        flags.set("client.key", "--api-key", key);
        let ca = self
            .ca
            .as_ref()
            .map(|path| path.to_string_lossy().into_owned());
        flags.set("client.ca", "--ca", ca);
    }
}

/// Where to call: a server, or models in this process.
#[derive(Debug, Default, Args)]
struct TargetFlags {
    #[command(flatten)]
    models: ModelFlags,
    #[command(flatten)]
    client: ClientFlags,
}

impl TargetFlags {
    fn set(&self, flags: &mut Flags) -> Result<(), CliError> {
        self.models.set(flags)?;
        self.client.set(flags);
        Ok(())
    }

    /// The configuration and the logs of a command that calls. Logs are quiet unless a level is given. Flags that name
    /// an engine select one in this process, even if a server is running (D-52).
    fn begin(&self, common: &Common) -> Result<Config, CliError> {
        let mut flags = Flags::default();
        self.set(&mut flags)?;
        if let Some(engine) = self.models.named() {
            match &self.client.server {
                Some(url) if url.expose() != HERE => {
                    return Err(CliError::usage(format!(
                        "{engine} is for a model in this process, but --server {url} names a server: remove one of them"
                    )));
                }
                // As if it were a flag, so that it wins over a server of the file or the environment. `config show`
                // names this flag.
                _ => flags.set("client.server", engine, Some(HERE)),
            }
        }
        let layers = common.layers(flags)?;
        let config = layers.config()?;
        crate::logs::Logs::start(log_filter(&config, common.log.as_deref()))?;
        layers.warn_unknown_keys();
        Ok(config)
    }
}

fn log_filter<'a>(config: &'a Config, given: Option<&'a str>) -> &'a str {
    match given {
        Some(filter) => filter,
        // A command that answers a person is quiet, unless the configuration asks for more. Downloads may take long, and
        // show their progress.
        None if config.log == Config::default().log => {
            "warn,sapwood::progress=info,sapwood::hub=info"
        }
        None => &config.log,
    }
}

impl Common {
    /// The configuration with these flags.
    fn layers(&self, mut flags: Flags) -> Result<Layers, CliError> {
        flags.set("log", "--log", self.log.clone());
        Layers::read(self.config.as_deref(), flags)
    }

    fn config(&self, flags: Flags) -> Result<Config, CliError> {
        self.layers(flags)?.config()
    }
}

/// Runs the command that the arguments name.
pub(crate) fn main() -> Result<Exit, CliError> {
    let arguments = arguments(std::env::args_os());
    llama_names::check(&arguments)?;
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version go to standard output and are no error.
            let _ = error.print();
            return Ok(if error.use_stderr() {
                Exit::Usage
            } else {
                Exit::Ok
            });
        }
    };
    match cli.command {
        CliCommand::Serve(command) => wait(command.run(cli.common)),
        CliCommand::Lmtp(command) => wait(command.run(&cli.common)),
        CliCommand::Chat(command) => wait(command.run(&cli.common)),
        CliCommand::Run(command) => wait(command.run(&cli.common)),
        CliCommand::Models(command) => wait(command.run(&cli.common)),
        CliCommand::Doctor(command) => command.run(&cli.common),
        CliCommand::Config(command) => command.run(&cli.common),
        CliCommand::Controller(command) => wait(command.run(&cli.common)),
        CliCommand::Key(command) => command.run(),
        CliCommand::Mock(command) => command.run(),
        #[cfg(target_os = "linux")]
        CliCommand::Aicirt(command) => command.run(&cli.common),
        CliCommand::Completions(command) => command.run(&mut Cli::command()),
        CliCommand::CompileController(command) => command.run(),
        #[cfg(target_os = "linux")]
        CliCommand::ControllerTemplate(command) => command.run(),
        #[cfg(feature = "embedded")]
        CliCommand::TryModel(command) => command.run(),
    }
}

/// Under a file name that ends in `aicirt`, the binary is that command: engines start the runtime by its path (AI-102).
fn arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<_> = given.collect();
    let name = arguments.first().map(Path::new).and_then(Path::file_name);
    // Its compiler and the template of its controllers are children of the same name.
    let is_child = arguments
        .get(1)
        .is_some_and(|first| CHILDREN.iter().any(|child| first == child));
    if !is_child && name.is_some_and(|name| name.as_encoded_bytes().ends_with(b"aicirt")) {
        arguments.insert(1, "aicirt".into());
    }
    // Its flags are those of the reference runtime, and not of models.
    if arguments.get(1).is_none_or(|first| first != "aicirt") {
        llama_names::expand(&mut arguments);
    }
    arguments
}

/// Commands that only other processes of this program start.
const CHILDREN: &[&str] = &[
    compile_controller::NAME,
    #[cfg(target_os = "linux")]
    aicirt::TEMPLATE_NAME,
];

/// Runs a command that uses sockets, models or a terminal.
// Not for every command: the others must not fail on a machine that gives no more threads.
fn wait(command: impl Future<Output = Result<Exit, CliError>>) -> Result<Exit, CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| CliError::new(format!("cannot start: {error}")))?;
    let ended = runtime.block_on(command);
    // A thread that still reads standard input must not keep the process alive.
    runtime.shutdown_background();
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_102_under_its_own_name_the_binary_is_the_runtime() {
        let seen = |given: &[&str]| {
            let given = given.iter().map(OsString::from);
            arguments(given).join(" ".as_ref()).into_string().unwrap()
        };
        assert_eq!(
            seen(&["/opt/aicirt", "--server"]),
            "/opt/aicirt aicirt --server"
        );
        assert_eq!(seen(&["bin/my-aicirt"]), "bin/my-aicirt aicirt");
        assert_eq!(
            seen(&["bin/my-aicirt", "compile-controller"]),
            "bin/my-aicirt compile-controller"
        );
        #[cfg(target_os = "linux")]
        assert_eq!(
            seen(&["bin/my-aicirt", "controller-template"]),
            "bin/my-aicirt controller-template"
        );
        assert_eq!(seen(&["sapwood", "aicirt"]), "sapwood aicirt");
        assert_eq!(seen(&["/aicirt/sapwood", "serve"]), "/aicirt/sapwood serve");
    }

    /// Every flag of llama.cpp, and the value of its key.
    const LLAMA: &[(&[&str], &str, &str)] = &[
        (&["-ngl", "all"], "gpu_layers", r#""all""#),
        (&["--n-gpu-layers", "7"], "gpu_layers", "7"),
        (&["-sm", "row"], "split_mode", r#""row""#),
        (&["-ts", "3,1.5"], "tensor_split", "[3.0,1.5]"),
        (&["-mg", "1"], "main_gpu", "1"),
        (
            &["-ot", "a=CPU,b=CPU", "-ot", "c=CPU"],
            "override_tensor",
            r#"["a=CPU","b=CPU","c=CPU"]"#,
        ),
        (&["--no-mmap"], "mmap", "false"),
        (&["--mmap"], "mmap", "true"),
        (&["--no-mmap", "--mmap"], "mmap", "true"),
        (&["--mlock"], "mlock", "true"),
        (&["--no-mlock"], "mlock", "false"),
        (&["--no-mlock", "--mlock"], "mlock", "true"),
        (&["--numa", "isolate"], "numa", r#""isolate""#),
        (&["-ctk", "q8_0"], "cache_type_k", r#""q8_0""#),
        (&["-ctv", "iq4_nl"], "cache_type_v", r#""iq4_nl""#),
        (&["--swa-full"], "swa_full", "true"),
        (&["--swa-full=false"], "swa_full", "false"),
        (&["-fa", "on"], "flash_attn", r#""on""#),
        (&["-b", "64"], "batch_tokens", "64"),
        (&["-ub", "32"], "ubatch_tokens", "32"),
        (&["--rope-scaling", "yarn"], "rope_scaling", r#""yarn""#),
        (&["--rope-scale", "2"], "rope_scale", "2.0"),
        (&["--rope-freq-base", "10000"], "rope_freq_base", "10000.0"),
        (&["--rope-freq-scale", "0.5"], "rope_freq_scale", "0.5"),
        (&["--yarn-orig-ctx", "512"], "yarn_orig_ctx", "512"),
        (&["--yarn-ext-factor", "1"], "yarn_ext_factor", "1.0"),
        // Refused later, with the key.
        (&["--yarn-ext-factor", "-1.0"], "yarn_ext_factor", "-1.0"),
        (&["--yarn-attn-factor", "2"], "yarn_attn_factor", "2.0"),
        (&["--yarn-beta-fast", "3"], "yarn_beta_fast", "3.0"),
        (&["--yarn-beta-slow", "4"], "yarn_beta_slow", "4.0"),
        (
            &["--override-kv", "a=int:1"],
            "override_kv",
            r#"["a=int:1"]"#,
        ),
        (&["--spm-infill"], "spm_infill", "true"),
        (&["--spm-infill", "--no-spm-infill"], "spm_infill", "false"),
    ];

    #[test]
    fn the_flags_of_llama_server_set_their_keys() {
        let mut keys = std::collections::BTreeSet::new();
        for (given, key, value) in LLAMA {
            let mut flags = Flags::default();
            let parsed = ModelsOnly::try_parse_from(arguments(
                ["sapwood"].iter().chain(*given).map(OsString::from),
            ));
            let models = parsed.unwrap().models;
            assert_eq!(models.named(), Some(models.llama.named().unwrap()));
            models.set(&mut flags).unwrap();
            let llama = figment::Figment::from(flags)
                .extract_inner::<sapwood_engine::llama_options::LlamaOptions>("engine.llama")
                .unwrap();
            let read = serde_json::to_value(&llama).unwrap();
            assert_eq!(read[key].to_string(), *value, "{given:?}");
            keys.insert(*key);
        }
        let all = serde_json::to_value(sapwood_engine::llama_options::LlamaOptions::default());
        assert_eq!(keys.len(), all.unwrap().as_object().unwrap().len());
        // Also a value that its key refuses, with the choices.
        let given = ["sapwood", "-ngl", "-1"].map(OsString::from);
        let parsed = ModelsOnly::try_parse_from(arguments(given.into_iter()));
        assert_eq!(parsed.unwrap().models.named(), Some("--gpu-layers"));
    }

    #[test]
    fn adapters_are_those_of_the_only_model() {
        let set = |given: &[&str]| {
            let given = ["sapwood"].iter().chain(given).map(OsString::from);
            let models = ModelsOnly::try_parse_from(arguments(given)).unwrap().models;
            let mut flags = Flags::default();
            models.set(&mut flags)?;
            let read = figment::Figment::from(flags);
            let models: Vec<crate::config::ServedModelConfig> =
                read.extract_inner("models").unwrap();
            Ok::<_, CliError>(models[0].lora.clone())
        };
        let given = [
            "-m",
            "a.gguf",
            "--lora",
            "x=y.gguf,z.gguf=0.5",
            "--lora-scaled",
            "w:2",
        ];
        let lora = set(&given).unwrap();
        let lora = lora.iter().map(|it| (it.path.to_str().unwrap(), it.scale));
        let expected = [("x=y.gguf", 1.0), ("z.gguf", 0.5), ("w", 2.0)];
        assert_eq!(lora.collect::<Vec<_>>(), expected);
        assert_eq!(set(&["-m", "a.gguf"]).unwrap(), []);
        for (flags, applied) in [(&[][..], true), (&["--lora-init-without-apply"], false)] {
            let given = [&["-m", "a.gguf", "--lora", "x"], flags].concat();
            assert_eq!(set(&given).unwrap()[0].apply, applied);
        }
        for given in [
            &["--lora", "x"][..],
            &["-m", "a.gguf", "-m", "b.gguf", "--lora", "x"],
        ] {
            let why = set(given).unwrap_err().to_string();
            assert!(why.contains("one --model"), "{why}");
        }
    }

    #[test]
    fn a_draft_model_is_that_of_the_only_model() {
        let set = |given: &[&str]| {
            let given = ["sapwood"].iter().chain(given).map(OsString::from);
            let models = ModelsOnly::try_parse_from(arguments(given)).unwrap().models;
            let mut flags = Flags::default();
            models.set(&mut flags)?;
            Ok::<_, CliError>(figment::Figment::from(flags))
        };
        for given in [
            "-m a.gguf -md b.gguf -ngld all -cd 512 --draft-max 8 --draft-p-min 0.5",
            "-m a.gguf --model-draft b.gguf --gpu-layers-draft all --ctx-size-draft 512 --draft 8 --draft-p-min 0.5",
        ] {
            let read = set(&given.split(' ').collect::<Vec<_>>()).unwrap();
            let models: Vec<crate::config::ServedModelConfig> =
                read.extract_inner("models").unwrap();
            let path = models[0].draft_model.as_deref();
            assert_eq!(path, Some(Path::new("b.gguf")));
            assert_eq!(models[0].draft_ctx, Some(512));
            assert_eq!(
                serde_json::to_value(models[0].draft_gpu_layers).unwrap(),
                "all"
            );
            let most: u32 = read.extract_inner("engine.draft_tokens_max").unwrap();
            let p_min: f32 = read.extract_inner("engine.draft_p_min").unwrap();
            assert_eq!((most, p_min), (8, 0.5));
        }
        for given in [&["-md", "b"][..], &["-m", "a", "-m", "c", "-cd", "5"]] {
            let why = set(given).unwrap_err().to_string();
            assert!(why.contains("one --model"), "{why}");
        }
    }

    #[test]
    fn the_only_model_embeds_if_it_is_said_to() {
        use crate::config::PoolingConfig;
        let set = |given: &str| {
            let given = given.split(' ').map(OsString::from);
            let models = ModelsOnly::try_parse_from(arguments(given)).unwrap().models;
            let mut flags = Flags::default();
            models.set(&mut flags)?;
            let read = figment::Figment::from(flags);
            let read: Vec<crate::config::ServedModelConfig> = read.extract_inner("models").unwrap();
            Ok::<_, CliError>((read[0].embedding, read[0].pooling))
        };
        assert_eq!(set("sapwood -m a.gguf").unwrap(), (None, None));
        let given = "sapwood -m a.gguf --embeddings --pooling cls";
        assert_eq!(set(given).unwrap(), (Some(true), Some(PoolingConfig::Cls)));
        for given in ["sapwood --embeddings", "sapwood -m a -m b --pooling mean"] {
            let why = set(given).unwrap_err().to_string();
            assert!(why.contains("one --model"), "{why}");
        }
    }

    #[derive(Debug, Parser)]
    struct ModelsOnly {
        #[command(flatten)]
        models: ModelFlags,
    }

    #[test]
    fn the_command_definitions_are_valid() {
        Cli::command().debug_assert();
    }
}
