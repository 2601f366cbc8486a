//! The source of questions: a line editor on a terminal, plain lines otherwise.

use std::io::IsTerminal;

use rustyline::error::ReadlineError;
use tokio::io::{AsyncBufReadExt, BufReader, Stdin};

use super::history::{self, LineHistory};
use crate::client;
use crate::failure::CliError;
use crate::output;

/// The source of lines.
pub(super) enum LineSource {
    /// `None` while a line is being edited.
    Terminal(Option<Box<LineHistory>>),
    Pipe(tokio::io::Lines<BufReader<Stdin>>),
}

/// A line, or the reason that there is none.
pub(super) enum InputLine {
    Text(String),
    Interrupted,
    End,
}

impl LineSource {
    /// The source for this process; `remember`: questions on a terminal are stored in the history.
    pub(super) fn open(remember: bool) -> Result<Self, CliError> {
        if std::io::stdin().is_terminal() {
            let file = if remember { history::file() } else { None };
            let editor = LineHistory::open(file).map_err(|error| broken(&error))?;
            return Ok(Self::Terminal(Some(Box::new(editor))));
        }
        Ok(Self::Pipe(BufReader::new(tokio::io::stdin()).lines()))
    }

    /// Prints the greeting with the model in use, on a terminal only.
    pub(super) fn greet(&self, target: &str) {
        if matches!(self, Self::Terminal(_)) {
            output::whisper(format!("{target} /help lists the commands."));
        }
    }

    pub(super) async fn next(&mut self) -> Result<InputLine, CliError> {
        match self {
            Self::Pipe(lines) => {
                let mut interrupts = client::interrupts()?;
                // Both arms may be cancelled: an interrupt ends the chat, and a half-read line is dropped.
                let line = tokio::select! {
                    line = lines.next_line() => line,
                    _ = interrupts.recv() => return Ok(InputLine::Interrupted),
                };
                let line =
                    line.map_err(|error| CliError::new(format!("cannot read the input: {error}")))?;
                Ok(line.map_or(InputLine::End, InputLine::Text))
            }
            Self::Terminal(target) => {
                // The editor was not returned by its thread: the chat is ending.
                let Some(mut editor) = target.take() else {
                    return Ok(InputLine::End);
                };
                let mut interrupts = client::interrupts()?;
                // Editing blocks, so it runs on a thread of its own while the session's keep-alive continues.
                let edited = tokio::task::spawn_blocking(move || {
                    let read = editor.ask();
                    (editor, read)
                });
                // A terminal that does not support editing delivers Ctrl-C as a signal. The reading thread is
                // abandoned, because the chat ends.
                let edited = tokio::select! {
                    edited = edited => edited,
                    _ = interrupts.recv() => return Ok(InputLine::Interrupted),
                };
                let (editor, read) = edited.map_err(|error| CliError::new(error.to_string()))?;
                *target = Some(editor);
                match read {
                    Ok(line) => Ok(InputLine::Text(line)),
                    Err(ReadlineError::Interrupted) => Ok(InputLine::Interrupted),
                    Err(ReadlineError::Eof) => Ok(InputLine::End),
                    Err(error) => Err(broken(&error)),
                }
            }
        }
    }
}

fn broken(error: &ReadlineError) -> CliError {
    CliError::new(format!("cannot read from the terminal: {error}"))
}
