//! Standard output for data, standard error for messages.

use std::io::{IsTerminal, Write, stderr, stdout};

use serde::Serialize;

use crate::config::environment::no_colour;
use crate::failure::CliError;
use crate::logs::Stderr;
use crate::plain::plain;

/// Writes data, unbuffered.
///
/// # Errors
/// If standard output is closed: a quiet [`CliError`] with exit code 0.
pub(crate) fn data(bytes: impl AsRef<[u8]>) -> Result<(), CliError> {
    let mut out = stdout().lock();
    out.write_all(bytes.as_ref())?;
    // Flushed at once: a reader at the other end of a pipe sees each piece of an answer as it arrives.
    Ok(out.flush()?)
}

/// Writes untrusted text, unbuffered: on a terminal without control sequences.
///
/// # Errors
/// As [`data`].
pub(crate) fn foreign(text: &str) -> Result<(), CliError> {
    if stdout().is_terminal() {
        data(plain(text).as_bytes())
    } else {
        data(text)
    }
}

/// Writes one value as a line of JSON, indented on a terminal.
///
/// # Errors
/// As [`data`].
pub(crate) fn json(value: &impl Serialize) -> Result<(), CliError> {
    let text = if stdout().is_terminal() {
        serde_json::to_string_pretty(value)
    } else {
        serde_json::to_string(value)
    };
    let text = text.map_err(|error| CliError::new(format!("cannot write JSON: {error}")))?;
    data(text + "\n")
}

/// Writes a message to the user on standard error.
pub(crate) fn message(line: impl AsRef<str>) {
    // Errors are ignored: there is no other place to report to.
    let _ = Stderr.write_all(format!("{}\n", line.as_ref()).as_bytes());
}

/// Writes a message of little importance, dimmed on a terminal.
pub(crate) fn whisper(line: impl AsRef<str>) {
    message(paint(TextStyle::Dim, &plain(line.as_ref())));
}

/// Writes untrusted text that is no data on standard error, unbuffered; dimmed on a terminal.
pub(crate) fn aside(text: &str) {
    if text.is_empty() {
        return;
    }
    // The style ends with each piece, so that an interrupt leaves the terminal as it was. Errors as in `message`.
    let _ = Stderr.write_all(paint(TextStyle::Dim, &plain(text)).as_bytes());
}

/// Whether text on standard error is set apart by its style.
pub(crate) fn dims() -> bool {
    stderr().is_terminal() && !no_colour()
}

/// Writes the last line of a command that failed.
pub(crate) fn complain(failure: &CliError) {
    if !failure.message.is_empty() {
        let failure = failure.to_string();
        // The message may quote a server or a file.
        let reported = if stderr().is_terminal() {
            plain(&failure)
        } else {
            failure.as_str().into()
        };
        message(format!("{} {reported}", paint(TextStyle::Red, "sapwood:")));
    }
}

/// The style of text on standard error, on a terminal.
#[derive(Clone, Copy)]
pub(crate) enum TextStyle {
    Dim,
    Red,
    Green,
    Yellow,
}

/// `text` in a style, if standard error is a terminal that supports colours.
pub(crate) fn paint(style: TextStyle, text: &str) -> String {
    if !dims() {
        return text.into();
    }
    let code = match style {
        TextStyle::Dim => 2,
        TextStyle::Red => 31,
        TextStyle::Green => 32,
        TextStyle::Yellow => 33,
    };
    format!("\u{1b}[{code}m{text}\u{1b}[0m")
}
