//! Running other programs. Owns: how a command is shown, run and judged. Refuses to know: which ones.

use std::io::{IsTerminal, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Prints one line for people, on standard error.
pub(crate) fn say(line: &str) {
    // Nothing sensible is left to do when standard error is gone.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints a heading, bold on a terminal.
pub(crate) fn heading(line: &str) {
    if std::io::stderr().is_terminal() {
        say(&format!("\n\u{1b}[1m== {line}\u{1b}[0m"));
    } else {
        say(&format!("\n== {line}"));
    }
}

/// A cargo command, run from the root of the checkout.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments).current_dir(crate::root());
    command
}

/// Another program, run from the root of the checkout.
pub(crate) fn program(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(name);
    command.args(arguments).current_dir(crate::root());
    command
}

/// Runs a command with its output shown; an error unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    say(&format!("$ {shown}"));
    let status = command
        .status()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs a command quietly; its standard output, or an error with what it said.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!(
            "`{shown}` failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a command starts and succeeds, without showing anything.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn show(command: &Command) -> String {
    let name = command.get_program().to_string_lossy();
    let name = name.rsplit('/').next().unwrap_or(&name).to_owned();
    std::iter::once(name)
        .chain(
            command
                .get_args()
                .map(|argument| argument.to_string_lossy().into_owned()),
        )
        .collect::<Vec<_>>()
        .join(" ")
}
