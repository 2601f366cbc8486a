//! `sapwood controller`: writes, uploads, lists and runs controllers, over a server's REST routes.

mod build;
mod isolation;
mod module_test;
mod project;
mod run;
mod sdk;
mod step_times;

use std::path::PathBuf;

use bytes::Bytes;
use clap::{Args, Subcommand};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use sapwood_net::rest::{RestBody, RestClient};
use sapwood_net::rest::{RestError, RestMethod};
use serde_json::{Value, json};

use super::{ClientFlags, Common};
use crate::config::Config;
use crate::config::layers::Flags;
use crate::failure::{CliError, Exit};
use crate::{client, output};

#[derive(Debug, Args)]
pub(super) struct ControllerCommand {
    #[command(flatten)]
    client: ClientFlags,
    #[command(subcommand)]
    command: ControllerSubcommand,
}

#[derive(Debug, Subcommand)]
enum ControllerSubcommand {
    /// Make a folder with a controller in Rust that builds
    New {
        /// The folder, and the name of its crate: letters, digits, `-` and `_`
        name: String,
    },
    /// Compile a controller in Rust; prints the path of its module
    Build(build::BuildControllerArgs),
    /// Run a module against a scripted model and compare what it writes, without a server
    Test(module_test::TestControllerArgs),
    /// Upload a module, and let tags name it; prints its id
    Upload {
        /// The Wasm module
        file: PathBuf,
        /// Let this tag name it; may be repeated. Without scope admin it must begin with the name of your key and a dot
        #[arg(long, short, value_name = "TAG")]
        tag: Vec<String>,
    },
    /// Let tags name an uploaded module
    Tag {
        /// The id that `upload` printed
        id: String,
        /// The tags
        #[arg(required = true, value_name = "TAG")]
        tags: Vec<String>,
    },
    /// List the tags
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run a controller and print what it lets the model write
    Run(run::RunControllerArgs),
    /// Remove a tag, or a module that no tag names
    Rm {
        /// The tag, or the module's id
        name: String,
    },
}

impl ControllerCommand {
    pub(super) async fn run(self, common: &Common) -> Result<Exit, CliError> {
        match &self.command {
            ControllerSubcommand::New { name } => return project::create(name),
            ControllerSubcommand::Build(args) => return args.run(),
            _ => {}
        }
        let mut flags = Flags::default();
        self.client.set(&mut flags);
        let layers = common.layers(flags)?;
        let config = layers.config()?;
        crate::logs::Logs::start(super::log_filter(&config, common.log.as_deref()))?;
        layers.warn_unknown_keys();
        if let ControllerSubcommand::Test(args) = &self.command {
            return args.run(&config).await;
        }
        let server = Server::of(&config)?;
        match self.command {
            // Handled above; they need no server.
            ControllerSubcommand::New { .. }
            | ControllerSubcommand::Build(_)
            | ControllerSubcommand::Test(_) => Ok(Exit::Ok),
            ControllerSubcommand::Upload { file, tag } => server.upload(&file, &tag).await,
            ControllerSubcommand::Tag { id, tags } => {
                server.tag(&id, &tags).await?;
                Ok(Exit::Ok)
            }
            ControllerSubcommand::List { json } => server.list(json).await,
            ControllerSubcommand::Run(args) => args.run(&server).await,
            ControllerSubcommand::Rm { name } => server.remove(&name).await,
        }
    }
}

/// The server of these commands.
struct Server {
    url: String,
    rest: RestClient,
}

impl Server {
    fn of(config: &Config) -> Result<Self, CliError> {
        let address = client::rest_address(config)?;
        let url = sapwood_proto::secret::masked(&address.url);
        let rest = RestClient::new(address)
            .map_err(|why| CliError::usage(format!("--server {url}: {why}")))?;
        Ok(Self { url, rest })
    }

    async fn upload(&self, file: &std::path::Path, tags: &[String]) -> Result<Exit, CliError> {
        let module = std::fs::read(file)
            .map_err(|why| CliError::usage(format!("{}: {why}", file.display())))?;
        // Before the transfer, with the remedy: a source file given by mistake is the usual case.
        if !module.starts_with(b"\0asm") {
            return Err(CliError::usage(format!(
                "{}: it is no Wasm module; build one first (sapwood controller build) and give the .wasm file",
                file.display()
            )));
        }
        let body = RestBody {
            content_type: "application/wasm",
            bytes: Bytes::from(module),
        };
        let answer = self.rest.json(RestMethod::Post, CONTROLLERS, Some(body));
        let answer = answer.await.map_err(|error| self.failure(&error))?;
        let id = text(&answer, "module_id")?;
        // Printed before the tags are set: if a tag is refused, the upload is not lost.
        output::foreign(&format!("{id}\n"))?;
        if !tags.is_empty() {
            self.tag(id, tags).await?;
        }
        Ok(Exit::Ok)
    }

    async fn tag(&self, id: &str, tags: &[String]) -> Result<(), CliError> {
        let body = RestBody::json(&json!({"module_id": id, "tags": tags}));
        let answer = self.rest.json(RestMethod::Post, TAGS, Some(body)).await;
        answer.map_err(|error| self.failure(&error))?;
        output::whisper(format!("{} now names {id}", tags.join(", ")));
        Ok(())
    }

    async fn list(&self, json: bool) -> Result<Exit, CliError> {
        let answer = self.rest.json(RestMethod::Get, TAGS, None).await;
        let answer = answer.map_err(|error| self.failure(&error))?;
        let tags = answer.get("tags").cloned().unwrap_or_default();
        if json {
            output::json(&tags)?;
            return Ok(Exit::Ok);
        }
        let tags = tags.as_array().map_or(&[][..], Vec::as_slice);
        output::whisper(format!("At {}:", self.url));
        if tags.is_empty() {
            output::whisper("no tags yet; `sapwood controller upload FILE --tag NAME` sets one");
        }
        let width = tags
            .iter()
            .filter_map(|tag| tag.get("tag")?.as_str())
            .map(str::len)
            .max()
            // A tag has 50 bytes at most, and formatting panics at a width that a hostile server could ask for.
            .map(|width| width.min(50));
        let lines = tags.iter().map(|tag| line(tag, width.unwrap_or(0)));
        output::foreign(&lines.collect::<String>())?;
        Ok(Exit::Ok)
    }

    async fn remove(&self, name: &str) -> Result<Exit, CliError> {
        // An id has 64 hex digits and a tag at most 50 characters (AI-312), so they cannot be mistaken for each other.
        let below = if name.len() == 64 { CONTROLLERS } else { TAGS };
        let path = format!("{below}/{}", utf8_percent_encode(name, NON_ALPHANUMERIC));
        let answer = self.rest.json(RestMethod::Delete, &path, None).await;
        answer.map_err(|error| self.failure(&error))?;
        Ok(Exit::Ok)
    }

    fn failure(&self, error: &RestError) -> CliError {
        let url = &self.url;
        match error {
            RestError::Unreachable => CliError::exit(
                Exit::Unreachable,
                format!(
                    "{url}: no server answers there; start one with `sapwood serve`, or name another with --server"
                ),
            ),
            RestError::Refused {
                status: 401,
                message,
            } => CliError::new(format!(
                "{url} refused access: {message}; give a key with --api-key or SAPWOOD_CLIENT_KEY"
            )),
            error => CliError::new(format!("{url}: {error}")),
        }
    }
}

fn line(tag: &Value, width: usize) -> String {
    let text = |name: &str| tag.get(name).and_then(Value::as_str).unwrap_or_default();
    let size = tag.get("wasm_size").and_then(Value::as_u64).unwrap_or(0);
    let id: String = text("module_id").chars().take(12).collect();
    format!(
        "{:<width$}  {id}  {size:>9} bytes  by {}\n",
        text("tag"),
        text("updated_by")
    )
}

fn text<'a>(answer: &'a Value, name: &str) -> Result<&'a str, CliError> {
    let text = answer.get(name).and_then(Value::as_str);
    text.ok_or_else(|| CliError::new(format!("the server's answer has no {name}")))
}

const CONTROLLERS: &str = "/v1/controllers";
const TAGS: &str = "/v1/controllers/tags";
