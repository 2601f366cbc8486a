//! `sapwood controller run`: one generation with a controller, over `POST /v1/run` (AI-911 to AI-916).

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use futures::StreamExt;
use sapwood_net::rest::RestBody;
use serde_json::{Map, Value, json};

use super::Server;
use crate::client;
use crate::failure::{CliError, Exit};
use crate::output;
use crate::plain::plain;

#[derive(Debug, Args)]
pub(super) struct RunControllerArgs {
    /// A tag, a module's id, or a constraint: sapwood:regex, json-schema, lark, gbnf, substring, options
    controller: String,
    /// The controller's argument
    #[arg(long, value_name = "TEXT", conflicts_with = "arg_file")]
    arg: Option<String>,
    /// Read the argument from this file
    #[arg(long, value_name = "FILE")]
    arg_file: Option<PathBuf>,
    /// The text before the output
    #[arg(long, value_name = "TEXT", default_value = "")]
    prompt: String,
    /// The model; needed only with several
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Maximum of tokens
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// 0 takes the most likely token
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Print what the controller logs and which variables it writes, on standard error
    #[arg(long)]
    logs: bool,
    /// Print the server's events, one JSON object per line
    #[arg(long)]
    json: bool,
}

impl RunControllerArgs {
    pub(super) async fn run(self, server: &Server) -> Result<Exit, CliError> {
        let body = self.body()?;
        let mut interrupts = client::interrupts()?;
        let events = server.rest.events("/v1/run", RestBody::json(&body)).await;
        let mut events = events.map_err(|error| server.failure(&error))?;
        let mut shown = Shown::new(self.json, self.logs);
        loop {
            // Both arms may be cancelled: an interrupt ends everything, and an event that was not received is not lost.
            let event = tokio::select! {
                event = events.next() => event,
                _ = interrupts.recv() => return Err(CliError::exit(Exit::Interrupted, "cancelled")),
            };
            match event {
                Some(Ok(data)) if &*data == b"[DONE]" => return shown.end(),
                Some(Ok(data)) => {
                    let event: Value = serde_json::from_slice(&data)
                        .map_err(|_| CliError::new("the server's event is not JSON"))?;
                    shown.show(&event)?;
                }
                Some(Err(error)) => return Err(server.failure(&error)),
                None => return Err(CliError::new("the answer was cut off")),
            }
        }
    }

    fn body(&self) -> Result<Value, CliError> {
        let arg = match (&self.arg, &self.arg_file) {
            (Some(arg), _) => arg.clone(),
            (None, Some(path)) => std::fs::read_to_string(path)
                .map_err(|why| CliError::usage(format!("--arg-file {}: {why}", path.display())))?,
            (None, None) => String::new(),
        };
        let mut body = Map::new();
        body.insert("controller".into(), json!(self.controller));
        body.insert("controller_arg".into(), json!(arg));
        body.insert("prompt".into(), json!(self.prompt));
        // What is not given is left to the server.
        let given = [
            ("model", self.model.as_ref().map(|name| json!(name))),
            ("max_tokens", self.max_tokens.map(|tokens| json!(tokens))),
            ("temperature", self.temperature.map(|value| json!(value))),
        ];
        body.extend(
            given
                .into_iter()
                .filter_map(|(name, value)| Some((name.to_owned(), value?))),
        );
        Ok(Value::Object(body))
    }
}

/// Prints a run: the first sequence as it comes, its forks when all have ended.
struct Shown {
    json: bool,
    logs: bool,
    forks: BTreeMap<u64, String>,
    failed: Option<String>,
}

impl Shown {
    fn new(json: bool, logs: bool) -> Self {
        Self {
            json,
            logs,
            forks: BTreeMap::new(),
            failed: None,
        }
    }

    fn show(&mut self, event: &Value) -> Result<(), CliError> {
        if self.json {
            output::data(format!("{event}\n"))?;
        }
        let forks = event.get("forks").and_then(Value::as_array);
        for fork in forks.into_iter().flatten() {
            self.fork(fork)?;
        }
        Ok(())
    }

    fn fork(&mut self, fork: &Value) -> Result<(), CliError> {
        let text = |name: &str| fork.get(name).and_then(Value::as_str).unwrap_or_default();
        let index = fork.get("index").and_then(Value::as_u64).unwrap_or(0);
        if self.logs && !text("logs").is_empty() {
            for line in text("logs").lines() {
                output::whisper(format!("[{index}] {line}"));
            }
        }
        let storage = fork.get("storage").and_then(Value::as_array);
        for write in storage.into_iter().flatten().filter(|_| self.logs) {
            output::whisper(format!("[{index}] {write}"));
        }
        if !text("error").is_empty() {
            self.failed = Some(text("error").to_owned());
        }
        if self.json {
            return Ok(());
        }
        if index == 0 {
            return output::foreign(text("text"));
        }
        // Further sequences would be mixed into the first.
        self.forks.entry(index).or_default().push_str(text("text"));
        Ok(())
    }

    fn end(self) -> Result<Exit, CliError> {
        if !self.json {
            output::data("\n")?;
            for (index, text) in &self.forks {
                output::whisper(format!("fork {index}:"));
                output::foreign(text)?;
                output::data("\n")?;
            }
        }
        match self.failed {
            Some(error) => Err(CliError::new(format!(
                "the controller failed: {}",
                plain(error.trim_end())
            ))),
            None => Ok(Exit::Ok),
        }
    }
}
