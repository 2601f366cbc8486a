//! Where the questions come from: an editor that remembers on a terminal, plain lines otherwise.
//!
//! Owns: reading a line. Refuses to know: what it means.

use std::io::IsTerminal;

use rustyline::error::ReadlineError;
use tokio::io::{AsyncBufReadExt, BufReader, Stdin};

use super::history::{self, History};
use crate::client;
use crate::failure::Failure;
use crate::output;

/// The source of lines.
pub(super) enum Lines {
    /// `None` while a line is being edited.
    Terminal(Option<Box<History>>),
    Pipe(tokio::io::Lines<BufReader<Stdin>>),
}

/// What was read.
pub(super) enum Line {
    Text(String),
    Interrupted,
    End,
}

impl Lines {
    /// The source that this process has; `remember`: what is asked on a terminal is there again the next time.
    pub(super) fn open(remember: bool) -> Result<Self, Failure> {
        if std::io::stdin().is_terminal() {
            let file = if remember { history::file() } else { None };
            let editor = History::open(file).map_err(|error| broken(&error))?;
            return Ok(Self::Terminal(Some(Box::new(editor))));
        }
        Ok(Self::Pipe(BufReader::new(tokio::io::stdin()).lines()))
    }

    /// Tells a person where they are.
    pub(super) fn greet(&self, place: &str) {
        if matches!(self, Self::Terminal(_)) {
            output::whisper(format!("{place} /help tells what there is."));
        }
    }

    pub(super) async fn next(&mut self) -> Result<Line, Failure> {
        match self {
            Self::Pipe(lines) => {
                let mut interrupts = client::interrupts()?;
                // Both may be cancelled: an interrupt ends the chat, and a line half read is then nobody's.
                let line = tokio::select! {
                    line = lines.next_line() => line,
                    _ = interrupts.recv() => return Ok(Line::Interrupted),
                };
                let line =
                    line.map_err(|error| Failure::new(format!("cannot read the input: {error}")))?;
                Ok(line.map_or(Line::End, Line::Text))
            }
            Self::Terminal(place) => {
                let Some(mut editor) = place.take() else {
                    return Ok(Line::End);
                };
                let mut interrupts = client::interrupts()?;
                // Editing blocks, so it has a thread of its own while a session's keep-alive goes on beside it.
                let edited = tokio::task::spawn_blocking(move || {
                    let read = editor.ask();
                    (editor, read)
                });
                // A terminal that cannot be edited on tells Ctrl-C as a signal. The thread that reads is left behind: the chat ends.
                let edited = tokio::select! {
                    edited = edited => edited,
                    _ = interrupts.recv() => return Ok(Line::Interrupted),
                };
                let (editor, read) = edited.map_err(|error| Failure::new(error.to_string()))?;
                *place = Some(editor);
                match read {
                    Ok(line) => Ok(Line::Text(line)),
                    Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                    Err(ReadlineError::Eof) => Ok(Line::End),
                    Err(error) => Err(broken(&error)),
                }
            }
        }
    }
}

fn broken(error: &ReadlineError) -> Failure {
    Failure::new(format!("cannot read from the terminal: {error}"))
}
