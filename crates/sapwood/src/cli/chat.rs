//! `sapwood chat`: a conversation at a terminal, or line by line from a pipe.
//!
//! ```text
//!   line ─► command (/help …) │ question ─► GENERATE over the nodes of all turns ─► answer, shown as it streams
//!                                              └─ interrupt: the answer is cancelled, what came of it is kept
//! ```

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
use sapwood_kernel::{Error, Node, Reason};
use sapwood_proto::code::Code;
use serde_json::{Map, Value};

use super::{Common, PlaceFlags};
use crate::client::{self, Place, told};
use crate::failure::{Exit, Failure};
use crate::{output, sampling};
use command::{Command, HELP};
use conversation::{Conversation, Turn, said};
use echo::Quiet;
use lines::{Line, Lines};
use pace::Pace;

#[derive(Debug, Args)]
pub(super) struct Chat {
    /// The system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// 0 always takes the likeliest token; higher varies more
    #[arg(long, value_name = "0..2")]
    temperature: Option<f64>,
    /// At most this many tokens per answer
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// The same seed and conversation give the same answers
    #[arg(long)]
    seed: Option<u64>,
    /// Which model to talk to, where there are several
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Neither read nor keep the questions of earlier chats
    #[arg(long)]
    no_history: bool,
    /// Show the demo model's answers as fast as they come; on a terminal they come at a reading pace
    #[arg(long)]
    full_speed: bool,
    #[command(flatten)]
    place: PlaceFlags,
}

/// How an answer ended.
enum Ended {
    /// By itself.
    Whole,
    /// By the user.
    Cancelled,
    /// The context is full: nothing more fits behind this conversation.
    Full,
    /// The conversation did not even fit before it.
    TooLong,
    Failed(Failure),
}

impl Chat {
    pub(super) async fn run(self, common: &Common) -> Result<Exit, Failure> {
        let config = self.place.begin(common)?;
        let place = client::open(&config).await?;
        let mut lines = Lines::open(!self.no_history)?;
        let ended = Talk::new(&self, &place).run(&mut lines).await;
        place.close().await;
        ended
    }
}

/// A chat that goes on.
struct Talk<'a> {
    chat: &'a Chat,
    place: &'a Place,
    conversation: Conversation,
    /// As asked for at last.
    target: Option<String>,
    temperature: Option<f64>,
    exit: Exit,
}

impl<'a> Talk<'a> {
    fn new(chat: &'a Chat, place: &'a Place) -> Self {
        Self {
            chat,
            place,
            conversation: Conversation::new(chat.system.clone()),
            target: chat.target.clone(),
            temperature: chat.temperature,
            exit: Exit::Ok,
        }
    }

    /// Answers line after line until there are no more.
    async fn run(mut self, lines: &mut Lines) -> Result<Exit, Failure> {
        lines.greet(&self.place.greeting(self.target.as_deref()));
        loop {
            let line = match lines.next().await? {
                Line::End => return Ok(self.exit),
                Line::Interrupted => return Ok(Exit::Interrupted),
                Line::Text(line) => line,
            };
            match Command::read(&line) {
                Command::Quit => return Ok(self.exit),
                Command::Ask(question) => self.ask(question).await?,
                Command::Retry => match self.conversation.take_back() {
                    Some(question) => self.ask(&question).await?,
                    None => output::whisper("Nothing has been asked yet."),
                },
                other => self.settle(&other),
            }
        }
    }

    /// Does what needs no answer.
    fn settle(&mut self, command: &Command<'_>) {
        match *command {
            Command::Help => output::say(HELP),
            Command::New => {
                self.conversation.clear();
                output::whisper("A new conversation.");
            }
            Command::System("") => match self.conversation.system() {
                Some(text) => output::say(text),
                None => output::whisper("There is no system message."),
            },
            Command::System(text) => {
                self.conversation
                    .set_system(if text == "-" { "" } else { text });
                output::whisper("The system message is set.");
            }
            Command::Model(name) => self.choose(name),
            Command::Temperature(given) => self.heat(given),
            Command::Save(path) => self.save(path),
            Command::Unknown(name) => output::say(format!("There is no {name}.\n{HELP}")),
            Command::Nothing | Command::Ask(_) | Command::Retry | Command::Quit => {}
        }
    }

    /// Talks to another model from now on.
    fn choose(&mut self, name: &str) {
        let models = self.place.models();
        if models.iter().any(|model| model == name) {
            self.target = Some(name.to_owned());
            return output::whisper(self.place.greeting(Some(name)));
        }
        if !name.is_empty() {
            output::say(format!("There is no model {name}; there are:"));
        }
        let now = self.place.model(self.target.as_deref());
        for model in models {
            let mark = if now.as_ref() == Some(&model) {
                "*"
            } else {
                " "
            };
            output::say(format!("{mark} {model}"));
        }
    }

    fn heat(&mut self, given: &str) {
        match (given, given.parse::<f64>()) {
            ("", _) => {}
            ("-", _) => self.temperature = None,
            (_, Ok(value)) if (0.0..=100.0).contains(&value) => self.temperature = Some(value),
            _ => return output::say("Write a number from 0 to 100, such as /temperature 0.7"),
        }
        let config = self.config();
        let temperature = config.get("temperature");
        let temperature = temperature.map_or_else(|| "the model's own".into(), Value::to_string);
        output::whisper(format!("The temperature is {temperature}."));
    }

    fn save(&self, path: &str) {
        if path.is_empty() {
            return output::say("Write /save FILE");
        }
        let is_json = std::path::Path::new(path)
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        match std::fs::write(path, self.conversation.written(is_json)) {
            Ok(()) => output::whisper(format!("Written to {path}.")),
            Err(error) => output::say(format!("cannot write {path}: {error}")),
        }
    }

    /// Answers a question; one that fails ends nothing but itself.
    async fn ask(&mut self, question: &str) -> Result<(), Failure> {
        if let Err(failure) = self.answer(question).await? {
            output::complain(&failure);
            self.exit = Exit::Failure;
        }
        Ok(())
    }

    /// Asks until the conversation fits, leaving out the oldest turns. The outer error ends the chat, the inner one
    /// this answer only.
    async fn answer(&mut self, asked: &str) -> Result<Result<(), Failure>, Failure> {
        let question = said("USER", asked);
        loop {
            let inputs = self.inputs(self.conversation.prompt(&question));
            let answer = self.place.kernel.node("GENERATE", inputs);
            let mut text = String::new();
            let ended = self.show(&answer, &mut text).await?;
            let turn = |text: String, answer| Turn {
                question: (asked.to_owned(), question.clone()),
                answer: (text, answer),
            };
            match ended {
                Ended::Whole => self.conversation.add(turn(text, answer)),
                Ended::Full => {
                    self.conversation.add(turn(text, answer));
                    if self.conversation.forget_oldest() {
                        output::whisper(
                            "The context is full: the oldest turn is left out from now on.",
                        );
                    }
                }
                Ended::Cancelled => {
                    // Letting go of the node is what cancels; what was said stays part of the conversation.
                    drop(answer);
                    let answer = said("ASSISTANT", &text);
                    self.conversation.add(turn(text, answer));
                    output::whisper("cancelled");
                }
                Ended::TooLong if self.conversation.forget_oldest() => {
                    output::whisper("The context is full: the oldest turn is left out.");
                    continue;
                }
                Ended::TooLong => {
                    let message =
                        "this question alone is longer than the model's context; ask a shorter one";
                    return Ok(Err(Failure::new(message)));
                }
                Ended::Failed(failure) => return Ok(Err(failure)),
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
        let given = [
            ("temperature", self.temperature.map(Value::from)),
            ("max_tokens", self.chat.max_tokens.map(Value::from)),
            ("seed", self.chat.seed.map(Value::from)),
        ];
        let given = given
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let mut config: Map<String, Value> = given.collect();
        sampling::fill(&mut config, self.place.recommended(self.target.as_deref()));
        config
    }

    /// Writes the answer as it streams, and what it cost.
    async fn show(&self, answer: &Node, text: &mut String) -> Result<Ended, Failure> {
        let mut interrupts = client::interrupts()?;
        let _quiet = Quiet::begin();
        let mut run = answer.run::<String>();
        let asked = Instant::now();
        let slow = !self.chat.full_speed
            && stdout().is_terminal()
            && self.place.is_demo(self.target.as_deref());
        let mut pace = Pace::new(slow);
        // How the stream ended, and when; what came before is still being shown.
        let mut over = None;
        let (ended, took) = loop {
            // All may be cancelled: a piece that was not taken is not lost, and neither is one that is not due.
            tokio::select! {
                next = run.next(), if over.is_none() => match next {
                    Some(Ok(piece)) => pace.push(piece),
                    Some(Err(error)) if too_long(&error) => return Ok(Ended::TooLong),
                    Some(Err(error)) => over = Some((Ended::Failed(told(&error)), asked.elapsed())),
                    None => over = Some((Ended::Whole, asked.elapsed())),
                },
                Some(piece) = pace.next() => {
                    text.push_str(&piece);
                    output::foreign(&piece)?;
                }
                _ = interrupts.recv() => break (Ended::Cancelled, asked.elapsed()),
            }
            if pace.is_empty()
                && let Some(over) = over.take()
            {
                break over;
            }
        };
        if !text.ends_with('\n') {
            output::data("\n")?;
        }
        let meta = run.meta();
        if !matches!(ended, Ended::Whole) {
            return Ok(ended);
        }
        output::whisper(cost(meta.usage, took));
        let cut = meta.finish.values().any(|reason| *reason == Reason::Length);
        Ok(if cut && self.chat.max_tokens.is_none() {
            Ended::Full
        } else {
            Ended::Whole
        })
    }
}

/// Tokens, how long they took from the question to the end, and how much of the prompt did not have to be computed again.
/// Short answers come in one burst, so a rate from their first token to their last says nothing.
#[expect(clippy::cast_precision_loss, reason = "exact below 2^53 tokens")]
fn cost(usage: sapwood_kernel::Usage, took: std::time::Duration) -> String {
    let seconds = took.as_secs_f64();
    let tokens = usage.completion_tokens;
    let rate = tokens as f64 / seconds.max(f64::EPSILON);
    format!(
        "{tokens} tokens in {seconds:.2} s ({rate:.0} tokens/s); {} of {} prompt tokens cached",
        usage.cached_tokens, usage.prompt_tokens
    )
}

fn too_long(error: &Error) -> bool {
    error.code() == Code::InvalidRequest && error.reason() == "PROMPT_TOO_LONG"
}
