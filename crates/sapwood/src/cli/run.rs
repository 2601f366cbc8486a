//! `sapwood run NAME`: calls a function and prints its output as it arrives.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use futures::{StreamExt, stream};
use sapwood_kernel::{Chunk, Kernel, Mime, Node, Port, RequestedPorts, Want};
use serde_json::{Map, json};
use tokio::io::AsyncReadExt;

use super::reasoning::ReasoningView;
use super::sampling_flags::SamplingFlags;
use super::{Common, TargetFlags};
use crate::client::{self, ClientTarget, to_cli_error};
use crate::config::Config;
use crate::failure::{CliError, Exit};
use crate::plain::PrintableBytes;
use crate::{output, sampling_defaults};

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The function, as `sapwood models` and LIST_ACTIONS name it
    name: String,
    /// An input: NAME=TEXT, NAME=@FILE, or NAME=- for standard input; may be repeated
    #[arg(long, short, value_name = "NAME=VALUE")]
    input: Vec<String>,
    /// The model that answers, for functions with an input `target`, such as GENERATE
    #[arg(long, value_name = "MODEL")]
    target: Option<String>,
    /// The output to print; the main one if not given
    #[arg(long, value_name = "NAME")]
    port: Option<String>,
    /// Write to this file instead of standard output
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write one JSON object per piece, and one with the totals at the end
    #[arg(long)]
    json: bool,
    /// Do not show what a model thinks before it answers
    #[arg(long)]
    hide_reasoning: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    server: TargetFlags,
}

impl RunArgs {
    pub(super) async fn run(self, common: &Common) -> Result<Exit, CliError> {
        let config = self.server.begin(common)?;
        let mut inputs = self
            .input
            .iter()
            .map(|given| input(given))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(target) = &self.target {
            // Two targets would be an error of the server; here the message can name the flag.
            if inputs.iter().any(|(name, _)| name == TARGET) {
                return Err(CliError::usage(
                    "--target: the inputs name a target already",
                ));
            }
            inputs.push((TARGET.to_owned(), GivenInput::Text(target.clone())));
        }
        // After the inputs are read: a missing file is reported before a model is loaded.
        let place = client::open(&config, self.wanted(&config, &inputs)).await?;
        let ended = match self.sampled(&place, inputs) {
            Ok(inputs) => self.call(&place, inputs).await,
            Err(failure) => Err(failure),
        };
        place.close().await;
        ended
    }

    /// The model that is called, if that is known before the call.
    fn wanted<'a>(
        &'a self,
        config: &'a Config,
        inputs: &'a [(String, GivenInput)],
    ) -> Option<&'a str> {
        if self.name != GENERATE {
            return Some(&self.name);
        }
        match inputs.iter().find(|(name, _)| name == TARGET) {
            Some((_, given)) => given.text(),
            None => config.default_model.as_deref(),
        }
    }

    /// The inputs, with the sampling parameters of flags, and the defaults where the user sets none (D-53): in calls of
    /// GENERATE and of models, unless their config comes from a source that cannot be read in advance.
    ///
    /// # Errors
    /// A flag in a call that has no such parameter, or whose config sets it already or cannot be read.
    fn sampled(
        &self,
        place: &ClientTarget,
        mut inputs: Vec<(String, GivenInput)>,
    ) -> Result<Vec<(String, Node)>, CliError> {
        let text = |inputs: &[(String, GivenInput)], wanted: &str| {
            let given = inputs.iter().find(|(name, _)| name == wanted);
            given.map(|(_, given)| given.text().map(str::to_owned))
        };
        let target = match text(&inputs, TARGET) {
            None if self.name == GENERATE => Some(place.model(None)),
            Some(Some(target)) if self.name == GENERATE => Some(Some(target)),
            _ if place.models().contains(&self.name) => Some(Some(self.name.clone())),
            _ => None,
        };
        let config = match text(&inputs, CONFIG) {
            // Without a config, all values are the defaults.
            None => Some(Map::new()),
            Some(text) => text.and_then(|text| serde_json::from_str(&text).ok()),
        };
        let wrong = |why: &str| {
            let flag = self.sampling.named();
            flag.map_or(Ok(()), |flag| Err(CliError::usage(format!("{flag}{why}"))))
        };
        match (&target, &config) {
            (None, _) => wrong(" is for GENERATE and for models, and this function is none")?,
            (_, None) => wrong(": the input `config` can only be read by the call; set it there")?,
            _ => {}
        }
        if let (Some(model), Some(mut config)) = (target, config) {
            for (name, value) in self.sampling.params() {
                if sampling_defaults::is_set(&config, &name) {
                    let what = format!(
                        "the input `config` and a flag both set {name}: remove one of them"
                    );
                    return Err(CliError::usage(what));
                }
                config.insert(name, value);
            }
            sampling_defaults::fill(&mut config, place.recommended(model.as_deref()));
            inputs.retain(|(name, _)| name != CONFIG);
            let config = serde_json::Value::Object(config);
            inputs.push((CONFIG.to_owned(), GivenInput::Node(Node::from(config))));
        }
        let node = |(name, given): (String, GivenInput)| (name, given.into_node());
        Ok(inputs.into_iter().map(node).collect())
    }

    /// Calls the function and writes its output. Returning drops the run, which cancels it.
    async fn call(
        &self,
        target: &ClientTarget,
        inputs: Vec<(String, Node)>,
    ) -> Result<Exit, CliError> {
        // Before the call, so that nothing is computed for a file that cannot be written.
        let mut sink = Sink::open(self.output.as_deref())?;
        let port = self.port(&target.kernel)?;
        let mut interrupts = client::interrupts()?;
        let mut reasoning = ReasoningView::default();
        let run = target.kernel.run::<Chunk>(&self.name, inputs);
        let mut run = if self.shows_reasoning(&target.kernel) {
            let ports = vec![port, Port::REASONING];
            run.wanting(Want::from(RequestedPorts::Only(ports)))
        } else {
            run.port(port)
        };
        loop {
            // Both arms may be cancelled: an interrupt ends everything, and a piece that was not received is not lost.
            let next = tokio::select! {
                next = run.next() => next,
                _ = interrupts.recv() => {
                    reasoning.close(false);
                    return Err(CliError::exit(Exit::Interrupted, "cancelled"));
                }
            };
            match next {
                // This chunk carries metadata for the totals, and no data.
                Some(Ok(chunk)) if chunk.data.is_empty() => {}
                Some(Ok(chunk)) if self.json => sink.line(&piece(&chunk))?,
                // Further choices would be mixed into the first; `--json` separates them.
                Some(Ok(chunk)) if chunk.choice != 0 => {}
                Some(Ok(chunk)) if chunk.port == Port::REASONING => {
                    reasoning.show_bytes(&chunk.data)
                }
                Some(Ok(chunk)) => {
                    reasoning.close(true);
                    sink.write(&chunk.data)?;
                }
                Some(Err(error)) => {
                    reasoning.close(false);
                    return Err(to_cli_error(&error));
                }
                None => break,
            }
        }
        reasoning.close(false);
        if self.json {
            let meta = run.meta();
            let finish: Vec<_> = meta
                .finish
                .values()
                .map(|reason| reason.name().to_owned())
                .collect();
            let model = meta.model.as_ref().map(|model| model.as_str().to_owned());
            sink.line(
                &json!({"end": {"model": model, "finish": finish, "usage": meta.usage.to_json()}}),
            )?;
        } else {
            sink.end()?;
        }
        Ok(Exit::Ok)
    }
}

impl RunArgs {
    /// Whether reasoning is shown beside the answer: not with `--json` and `--port`, whose callers say what they read.
    fn shows_reasoning(&self, kernel: &Kernel) -> bool {
        let is_asked = !self.hide_reasoning && !self.json && self.port.is_none();
        let function = kernel.get(&self.name).ok().filter(|_| is_asked);
        function.is_some_and(|function| function.spec().output(&Port::REASONING).is_some())
    }

    /// The port for `--port`: users know the names on the wire.
    fn port(&self, kernel: &Kernel) -> Result<Port, CliError> {
        let Some(asked) = &self.port else {
            return Ok(Port::MAIN);
        };
        let function = kernel
            .get(&self.name)
            .map_err(|error| to_cli_error(&error))?;
        let spec = function.spec();
        // The name on the wire first: it is the one that LIST_ACTIONS and the documentation use.
        let found = spec.output_on_wire(asked).or_else(|| spec.output(asked));
        found.map(|output| output.port.clone()).ok_or_else(|| {
            let known: Vec<_> = spec
                .outputs
                .iter()
                .map(|output| output.wire.as_str())
                .collect();
            CliError::usage(format!(
                "--port {asked}: the outputs of {} are {}",
                self.name,
                known.join(", ")
            ))
        })
    }
}

fn piece(chunk: &Chunk) -> serde_json::Value {
    let mut line = json!({"mime": chunk.mime.as_str(), "choice": chunk.choice});
    match std::str::from_utf8(&chunk.data) {
        Ok(text) => line["text"] = text.into(),
        Err(_) => line["bytes"] = chunk.data.iter().copied().collect::<Vec<u8>>().into(),
    }
    line
}

/// The text of an input, if it can be read in advance.
enum GivenInput {
    Text(String),
    /// The text of a `.json` file.
    Json(String),
    Node(Node),
}

impl GivenInput {
    fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Json(text) => Some(text),
            Self::Node(_) => None,
        }
    }

    fn into_node(self) -> Node {
        match self {
            Self::Text(text) => Node::from(text),
            Self::Json(text) => Node::from(Chunk::text(text).with_mime(Mime::JSON)),
            Self::Node(node) => node,
        }
    }
}

fn input(given: &str) -> Result<(String, GivenInput), CliError> {
    let Some((name, value)) = given.split_once('=') else {
        return Err(CliError::usage(format!(
            "--input {given}: write NAME=TEXT, NAME=@FILE or NAME=-"
        )));
    };
    let node = match value.strip_prefix('@') {
        Some(path) => file(path)?,
        None if value == "-" => GivenInput::Node(standard_input()),
        None => GivenInput::Text(value.to_owned()),
    };
    Ok((name.to_owned(), node))
}

fn file(path: &str) -> Result<GivenInput, CliError> {
    let bytes = std::fs::read(path)
        .map_err(|error| CliError::usage(format!("--input: cannot read {path}: {error}")))?;
    let json = path.ends_with(".json");
    Ok(match String::from_utf8(bytes) {
        Ok(text) if json => GivenInput::Json(text),
        Ok(text) => GivenInput::Text(text),
        Err(error) => GivenInput::Node(Node::from(Chunk::bytes(error.into_bytes()))),
    })
}

/// Standard input as text, passed on as it is typed or piped.
fn standard_input() -> Node {
    let pieces = stream::unfold(tokio::io::stdin(), |mut stdin| async move {
        let mut buffer = vec![0; 8_192];
        match stdin.read(&mut buffer).await {
            Ok(0) => None,
            Ok(count) => {
                buffer.truncate(count);
                Some((Ok(Chunk::bytes(buffer).with_mime(Mime::TEXT)), stdin))
            }
            Err(error) => Some((Err(sapwood_kernel::Error::function(error)), stdin)),
        }
    });
    Node::new(pieces)
}

const GENERATE: &str = "GENERATE";
const CONFIG: &str = "config";
const TARGET: &str = "target";

/// The destination of the data.
enum Sink {
    /// On a terminal, untrusted text is shown without its control sequences.
    Standard {
        newline: bool,
        pieces: Option<PrintableBytes>,
    },
    File(File),
}

impl Sink {
    fn open(path: Option<&std::path::Path>) -> Result<Self, CliError> {
        let Some(path) = path else {
            return Ok(Self::Standard {
                newline: true,
                pieces: std::io::stdout()
                    .is_terminal()
                    .then(PrintableBytes::default),
            });
        };
        let file = File::create(path)
            .map_err(|error| CliError::new(format!("cannot write {}: {error}", path.display())))?;
        Ok(Self::File(file))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        match self {
            Self::Standard { newline, pieces } => {
                *newline = bytes.last().map_or(*newline, |last| *last == b'\n');
                match pieces {
                    Some(pieces) => output::data(pieces.next(bytes)),
                    None => output::data(bytes),
                }
            }
            Self::File(file) => Ok(file.write_all(bytes)?),
        }
    }

    fn line(&mut self, value: &serde_json::Value) -> Result<(), CliError> {
        self.write(format!("{value}\n").as_bytes())
    }

    /// On a terminal the next prompt belongs on a line of its own; files and pipes get only the bytes.
    fn end(self) -> Result<(), CliError> {
        match self {
            Self::Standard { newline: false, .. } if std::io::stdout().is_terminal() => {
                output::data("\n")
            }
            _ => Ok(()),
        }
    }
}
