//! `sapwood chat`: a conversation on a terminal, or line by line from a pipe.
//!
//! ```text
//!   line ─► command (/help …) │ question ─► GENERATE over the nodes of all turns ─► answer, shown as it streams
//!                                              └─ interrupt: the answer is cancelled, the text so far stays
//! ```
//!
//! Reasoning is shown and forgotten: a turn is the answer alone, because chat templates leave out earlier reasoning.

mod answer;
mod command;
mod conversation;
mod echo;
mod history;
mod lines;
mod pace;

use std::io::{IsTerminal, stdout};
use std::time::Instant;

use clap::Args;
use futures::StreamExt;
use sapwood_kernel::{ChoiceFinish, Error, Node};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use serde_json::{Map, Value};

use super::reasoning::ReasoningView;
use super::sampling_flags::SamplingFlags;
use super::{Common, TargetFlags};
use crate::client::{self, ClientTarget, to_cli_error};
use crate::failure::{CliError, Exit};
use crate::{output, sampling_defaults};
use answer::{AnswerPiece, AnswerReader};
use command::{ChatCommand, HELP};
use conversation::{ChatHistory, ChatTurn, message_node};
use echo::EchoOff;
use lines::{InputLine, LineSource};
use pace::ReadingPace;

#[derive(Debug, Args)]
pub(super) struct ChatArgs {
    /// The system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// The model to use, if there are several
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Neither read nor write the history of questions
    #[arg(long)]
    no_history: bool,
    /// Show the demo model's answers as fast as they come; on a terminal they come at a reading pace
    #[arg(long)]
    full_speed: bool,
    /// Do not show what the model thinks before it answers
    #[arg(long)]
    hide_reasoning: bool,
    /// Variables of the chat template; `{"enable_thinking":false}` stops many models from thinking
    #[arg(long, value_name = "JSON", value_parser = template_args)]
    template_args: Option<Value>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    server: TargetFlags,
}

/// How an answer ended.
enum AnswerEnd {
    /// Complete.
    Whole,
    /// Interrupted by the user.
    Cancelled,
    /// The context is full: no further turn fits after this conversation.
    Full,
    /// The conversation did not fit even before this question.
    TooLong,
    Failed(CliError),
}

impl ChatArgs {
    pub(super) async fn run(self, common: &Common) -> Result<Exit, CliError> {
        let config = self.server.begin(common)?;
        let target = client::open(
            &config,
            self.target.as_deref().or(config.default_model.as_deref()),
        )
        .await?;
        let mut lines = LineSource::open(!self.no_history)?;
        let ended = ChatSession::new(&self, &target).run(&mut lines).await;
        // Also after an error: a session that is only dropped is aborted at the server.
        target.close().await;
        ended
    }
}

/// The parameter that a command changes.
const TEMPERATURE: &str = "temperature";
/// The parameter that tells a full context from an answer as long as wanted.
const MAX_TOKENS: &str = "max_tokens";

/// A running chat.
struct ChatSession<'a> {
    chat: &'a ChatArgs,
    server: &'a ClientTarget,
    conversation: ChatHistory,
    /// The target of the next question.
    target: Option<String>,
    /// The parameters that the user has set.
    sampling: Map<String, Value>,
    exit: Exit,
}

impl<'a> ChatSession<'a> {
    fn new(chat: &'a ChatArgs, target: &'a ClientTarget) -> Self {
        Self {
            chat,
            server: target,
            conversation: ChatHistory::new(chat.system.clone()),
            target: chat.target.clone(),
            sampling: chat.sampling.params(),
            exit: Exit::Ok,
        }
    }

    /// Answers line after line until the input ends.
    async fn run(mut self, lines: &mut LineSource) -> Result<Exit, CliError> {
        lines.greet(&self.server.greeting(self.target.as_deref()));
        loop {
            let line = match lines.next().await? {
                InputLine::End => return Ok(self.exit),
                InputLine::Interrupted => return Ok(Exit::Interrupted),
                InputLine::Text(line) => line,
            };
            match ChatCommand::read(&line) {
                ChatCommand::Quit => return Ok(self.exit),
                ChatCommand::Ask(question) => self.ask(question).await?,
                // The turn is removed, so that the model does not see the answer that the user did not want.
                ChatCommand::Retry => match self.conversation.take_back() {
                    Some(question) => self.ask(&question).await?,
                    None => output::whisper("Nothing has been asked yet."),
                },
                other => self.settle(&other),
            }
        }
    }

    /// Handles a command, which needs no answer of the model.
    fn settle(&mut self, command: &ChatCommand<'_>) {
        match *command {
            ChatCommand::Help => output::message(HELP),
            ChatCommand::New => {
                self.conversation.clear();
                output::whisper("A new conversation.");
            }
            ChatCommand::System("") => match self.conversation.system() {
                Some(text) => output::message(text),
                None => output::whisper("There is no system message."),
            },
            ChatCommand::System(text) => {
                self.conversation
                    .set_system(if text == "-" { "" } else { text });
                output::whisper("The system message is set.");
            }
            ChatCommand::Model(name) => self.choose(name),
            ChatCommand::Temperature(given) => self.set_temperature(given),
            ChatCommand::Save(path) => self.save(path),
            ChatCommand::Unknown(name) => output::message(format!("There is no {name}.\n{HELP}")),
            ChatCommand::Nothing | ChatCommand::Ask(_) | ChatCommand::Retry | ChatCommand::Quit => {
            }
        }
    }

    /// Changes the model for further questions.
    fn choose(&mut self, name: &str) {
        let models = self.server.models();
        if models.iter().any(|model| model == name) {
            self.target = Some(name.to_owned());
            return output::whisper(self.server.greeting(Some(name)));
        }
        if !name.is_empty() {
            output::message(format!("There is no model {name}; there are:"));
        }
        let now = self.server.model(self.target.as_deref());
        for model in models {
            let mark = if now.as_ref() == Some(&model) {
                "*"
            } else {
                " "
            };
            output::message(format!("{mark} {model}"));
        }
    }

    fn set_temperature(&mut self, given: &str) {
        match (given, given.parse::<f64>()) {
            ("", _) => {}
            ("-", _) => drop(self.sampling.remove(TEMPERATURE)),
            (_, Ok(value)) if (0.0..=100.0).contains(&value) => {
                self.sampling.insert(TEMPERATURE.to_owned(), value.into());
            }
            _ => return output::message("Write a number from 0 to 100, such as /temperature 0.7"),
        }
        let config = self.config();
        let temperature = config.get(TEMPERATURE);
        let temperature = temperature.map_or_else(|| "the model's own".into(), Value::to_string);
        output::whisper(format!("The temperature is {temperature}."));
    }

    fn save(&self, path: &str) {
        if path.is_empty() {
            return output::message("Write /save FILE");
        }
        let is_json = std::path::Path::new(path)
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        match std::fs::write(path, self.conversation.written(is_json)) {
            Ok(()) => output::whisper(format!("Written to {path}.")),
            Err(error) => output::message(format!("cannot write {path}: {error}")),
        }
    }

    /// Answers a question; a failed answer does not end the chat.
    async fn ask(&mut self, question: &str) -> Result<(), CliError> {
        if let Err(failure) = self.answer(question).await? {
            output::complain(&failure);
            self.exit = Exit::Failure;
        }
        Ok(())
    }

    /// Asks until the conversation fits, dropping the oldest turns. The outer error ends the chat, the inner one this
    /// answer only.
    async fn answer(&mut self, asked: &str) -> Result<Result<(), CliError>, CliError> {
        let question = message_node("USER", asked);
        loop {
            // The nodes of earlier turns are referenced: a server that has them already is not sent them again.
            let inputs = self.inputs(self.conversation.prompt(&question));
            let answer = self.server.kernel.node("GENERATE", inputs);
            let mut text = String::new();
            let ended = self.show(&answer, &mut text).await?;
            let turn = |text: String, answer| ChatTurn {
                question: (asked.to_owned(), question.clone()),
                answer: (text, answer),
            };
            match ended {
                AnswerEnd::Whole => self.conversation.add(turn(text, answer)),
                AnswerEnd::Full => {
                    self.conversation.add(turn(text, answer));
                    if self.conversation.drop_oldest() {
                        output::whisper(
                            "The context is full: the oldest turn is left out from now on.",
                        );
                    }
                }
                AnswerEnd::Cancelled => {
                    // Dropping the node cancels the call; the text so far stays part of the conversation.
                    drop(answer);
                    let answer = message_node("ASSISTANT", &text);
                    self.conversation.add(turn(text, answer));
                    output::whisper("cancelled");
                }
                AnswerEnd::TooLong if self.conversation.drop_oldest() => {
                    output::whisper("The context is full: the oldest turn is left out.");
                    continue;
                }
                AnswerEnd::TooLong => {
                    let message =
                        "this question alone is longer than the model's context; ask a shorter one";
                    return Ok(Err(CliError::new(message)));
                }
                AnswerEnd::Failed(failure) => return Ok(Err(failure)),
            }
            return Ok(Ok(()));
        }
    }

    fn inputs(&self, prompt: Node) -> Vec<(&'static str, Node)> {
        let mut inputs = vec![("prompt", prompt)];
        inputs.push(("config", Node::from(Value::Object(self.config()))));
        inputs.extend(
            self.target
                .as_deref()
                .map(|target| ("target", Node::from(target))),
        );
        inputs
    }

    fn config(&self) -> Map<String, Value> {
        let mut config = self.sampling.clone();
        let template_args = self.chat.template_args.clone();
        config.extend(template_args.map(|args| ("template_args".to_owned(), args)));
        sampling_defaults::fill(&mut config, self.server.recommended(self.target.as_deref()));
        config
    }

    /// Writes the answer as it streams, and its cost.
    async fn show(&self, answer: &Node, text: &mut String) -> Result<AnswerEnd, CliError> {
        let mut interrupts = client::interrupts()?;
        // After the listener for Ctrl-C, which stays a signal while the echo is off.
        let _quiet = EchoOff::begin();
        let mut run = AnswerReader::new(answer, !self.chat.hide_reasoning);
        let mut reasoning = ReasoningView::default();
        let asked = Instant::now();
        let slow = !self.chat.full_speed
            && stdout().is_terminal()
            && self.server.is_demo(self.target.as_deref());
        let mut pace = ReadingPace::new(slow);
        // How and when the stream ended; text received before is still being shown.
        let mut over = None;
        let (ended, took) = loop {
            // All arms are cancel safe: a piece that was not received is not lost, and neither is one that is not due.
            tokio::select! {
                next = run.next(), if over.is_none() => match next {
                    Some(Ok(piece)) => pace.push(piece),
                    // Comes before any text (D-23), so nothing has been shown.
                    Some(Err(error)) if too_long(&error) => return Ok(AnswerEnd::TooLong),
                    Some(Err(error)) => over = Some((AnswerEnd::Failed(to_cli_error(&error)), asked.elapsed())),
                    None => over = Some((AnswerEnd::Whole, asked.elapsed())),
                },
                Some(piece) = pace.next() => show_piece(&piece, text, &mut reasoning)?,
                _ = interrupts.recv() => break (AnswerEnd::Cancelled, asked.elapsed()),
            }
            // The end is shown after the text before it, which may still be waiting for its time.
            if pace.is_empty()
                && let Some(over) = over.take()
            {
                break over;
            }
        };
        reasoning.close(false);
        if !text.ends_with('\n') {
            output::data("\n")?;
        }
        let meta = run.meta();
        if !matches!(ended, AnswerEnd::Whole) {
            return Ok(ended);
        }
        let cut = meta
            .finish
            .values()
            .any(|reason| *reason == ChoiceFinish::Length);
        if cut && reasoning.seen && text.is_empty() {
            output::whisper("The tokens of this answer ran out while the model was thinking.");
        }
        output::whisper(cost(meta.usage, took));
        // With `--max-tokens` the length is the user's wish, or it is a default of the model; without, only the context can
        // have ended the answer.
        Ok(if cut && !self.config().contains_key(MAX_TOKENS) {
            AnswerEnd::Full
        } else {
            AnswerEnd::Whole
        })
    }
}

/// Writes a piece of an answer; `text` becomes the answer without its reasoning.
fn show_piece(
    piece: &AnswerPiece,
    text: &mut String,
    reasoning: &mut ReasoningView,
) -> Result<(), CliError> {
    match piece {
        AnswerPiece::Reasoning(piece) => reasoning.show(piece),
        // An empty text is no answer yet.
        AnswerPiece::Text(piece) if piece.is_empty() => {}
        AnswerPiece::Text(piece) => {
            reasoning.close(true);
            text.push_str(piece);
            output::foreign(piece)?;
        }
        AnswerPiece::Call(line) => {
            reasoning.close(false);
            output::whisper(line);
        }
    }
    Ok(())
}

/// Tokens, the time from the question to the end, and the share of the prompt that was read from the cache. Short
/// answers come in one burst, so a rate from their first token to their last has no meaning.
#[expect(clippy::cast_precision_loss, reason = "exact below 2^53 tokens")]
fn cost(usage: sapwood_kernel::RunUsage, took: std::time::Duration) -> String {
    let seconds = took.as_secs_f64();
    let tokens = usage.completion_tokens;
    let rate = tokens as f64 / seconds.max(f64::EPSILON);
    format!(
        "{tokens} tokens in {seconds:.2} s ({rate:.0} tokens/s); {} of {} prompt tokens cached",
        usage.cached_tokens, usage.prompt_tokens
    )
}

fn template_args(given: &str) -> Result<Value, String> {
    match serde_json::from_str(given) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err("it is no JSON object".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn too_long(error: &Error) -> bool {
    error.code() == Code::InvalidRequest && error.known_reason() == ErrorReason::PROMPT_TOO_LONG
}
