//! `sapwood chat`: a conversation at a terminal, or line by line from a pipe.
//!
//! ```text
//!   line ─► command (/help …) │ question ─► GENERATE over the nodes of all turns ─► answer, shown as it streams
//!                                              └─ interrupt: the answer is cancelled, what came of it is kept
//! ```

mod conversation;
mod history;
mod lines;

use std::time::Instant;

use clap::Args;
use futures::StreamExt;
use sapwood_kernel::{Error, Node, Reason};
use sapwood_proto::code::Code;

use super::{Common, PlaceFlags};
use crate::client::{self, Place, told};
use crate::failure::{Exit, Failure};
use crate::output;
use conversation::Conversation;
use lines::{Line, Lines};

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
    /// Which of the server's models to talk to
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Neither read nor keep the questions of earlier chats
    #[arg(long)]
    no_history: bool,
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
        let ended = self.talk(&place).await;
        place.close().await;
        ended
    }

    /// Answers line after line until there are no more.
    async fn talk(&self, place: &Place) -> Result<Exit, Failure> {
        let mut lines = Lines::open(!self.no_history)?;
        lines.greet(&place.description);
        let mut conversation = Conversation::new(self.system.clone());
        let mut exit = Exit::Ok;
        loop {
            let question = match lines.next().await? {
                Line::End => break,
                Line::Interrupted => {
                    output::whisper("/quit or Ctrl-D leaves.");
                    continue;
                }
                Line::Text(line) => line,
            };
            match question.trim() {
                "" => {}
                "/quit" | "/exit" => break,
                "/help" => output::say(HELP),
                "/new" => {
                    conversation.clear();
                    output::whisper("A new conversation.");
                }
                command if command.starts_with("/system") => {
                    conversation.set_system(command.trim_start_matches("/system").trim());
                    output::whisper("The system message is set.");
                }
                command if command.starts_with('/') => {
                    output::say(format!("There is no {command}.\n{HELP}"))
                }
                question => {
                    if let Err(failure) = self.answer(place, &mut conversation, question).await? {
                        output::complain(&failure);
                        exit = Exit::Failure;
                    }
                }
            }
        }
        Ok(exit)
    }

    /// Asks until the conversation fits, leaving out the oldest turns. The outer error ends the chat, the inner one
    /// this answer only.
    async fn answer(
        &self,
        place: &Place,
        conversation: &mut Conversation,
        question: &str,
    ) -> Result<Result<(), Failure>, Failure> {
        let question = conversation::said("USER", question);
        loop {
            let answer = place
                .kernel
                .node("GENERATE", self.inputs(conversation.prompt(&question)));
            let mut text = String::new();
            match self.show(&answer, &mut text).await? {
                Ended::Whole => conversation.add(question, answer),
                Ended::Full => {
                    conversation.add(question, answer);
                    if conversation.forget_oldest() {
                        output::whisper(
                            "The context is full: the oldest turn is left out from now on.",
                        );
                    }
                }
                Ended::Cancelled => {
                    // Letting go of the node is what cancels; what was said stays part of the conversation.
                    drop(answer);
                    conversation.add(question, conversation::said("ASSISTANT", &text));
                    output::whisper("cancelled");
                }
                Ended::TooLong if conversation.forget_oldest() => {
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
        let mut config = serde_json::Map::new();
        config.extend(
            self.temperature
                .map(|value| ("temperature".to_owned(), value.into())),
        );
        config.extend(
            self.max_tokens
                .map(|value| ("max_tokens".to_owned(), value.into())),
        );
        config.extend(self.seed.map(|value| ("seed".to_owned(), value.into())));
        if !config.is_empty() {
            inputs.push(("config", Node::from(serde_json::Value::Object(config))));
        }
        inputs.extend(
            self.target
                .as_deref()
                .map(|target| ("target", Node::from(target))),
        );
        inputs
    }

    /// Writes the answer as it streams, and what it cost.
    async fn show(&self, answer: &Node, text: &mut String) -> Result<Ended, Failure> {
        let mut interrupts = client::interrupts()?;
        let mut run = answer.run::<String>();
        let asked = Instant::now();
        let ended = loop {
            // Both may be cancelled: the interrupt is what we wait for, a piece not taken is not lost.
            let next = tokio::select! {
                next = run.next() => next,
                _ = interrupts.recv() => break Ended::Cancelled,
            };
            match next {
                Some(Ok(piece)) => {
                    text.push_str(&piece);
                    output::data(&piece)?;
                }
                Some(Err(error)) if too_long(&error) => return Ok(Ended::TooLong),
                Some(Err(error)) => break Ended::Failed(told(&error)),
                None => break Ended::Whole,
            }
        };
        if !text.ends_with('\n') {
            output::data("\n")?;
        }
        let meta = run.meta();
        if matches!(ended, Ended::Whole) {
            output::whisper(cost(meta.usage, asked.elapsed()));
        }
        let cut = meta.finish.values().any(|reason| *reason == Reason::Length);
        Ok(
            if matches!(ended, Ended::Whole) && cut && self.max_tokens.is_none() {
                Ended::Full
            } else {
                ended
            },
        )
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

const HELP: &str = "\
/new            forget the conversation
/system TEXT    set the system message; without TEXT, none
/quit           leave; so does Ctrl-D
Ctrl-C          stop an answer";
