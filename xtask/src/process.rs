//! Running other programs.

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// Prints one line for people, on standard error.
pub(crate) fn print_line(line: &str) {
    // Errors are ignored: if standard error is closed, there is no other place to report to.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints a heading, bold on a terminal.
pub(crate) fn heading(line: &str) {
    if std::io::stderr().is_terminal() {
        print_line(&format!("\n\u{1b}[1m== {line}\u{1b}[0m"));
    } else {
        print_line(&format!("\n== {line}"));
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

/// Runs a command and shows its output; an error unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    print_line(&format!("$ {shown}"));
    let status = command
        .status()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs a command and shows its output. Returns its exit status, and the end of its standard error.
///
/// # Errors
/// The command cannot be started.
pub(crate) fn run_and_keep(command: &mut Command) -> Result<(ExitStatus, String)> {
    let shown = show(command);
    print_line(&format!("$ {shown}"));
    if std::io::stderr().is_terminal() {
        // Cargo sees a pipe, although its output is shown on a terminal.
        command.env("CARGO_TERM_COLOR", "always");
        command.env("CARGO_TERM_PROGRESS_WHEN", "always");
        command.env("CARGO_TERM_PROGRESS_WIDTH", "80");
    }
    let mut child = command
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{shown}`"))?;
    let mut retained = Vec::new();
    if let Some(mut stderr) = child.stderr.take() {
        let mut piece = [0; 4096];
        while let Ok(read @ 1..) = stderr.read(&mut piece) {
            // Errors are ignored: if standard error is closed, there is no other place to report to.
            let _ = std::io::stderr().write_all(&piece[..read]);
            retained.extend_from_slice(&piece[..read]);
            // The buffer may grow to twice the size that is returned, so that a long build does not move it with every
            // piece.
            if retained.len() > 2 * RETAINED_BYTES {
                retained.drain(..retained.len() - RETAINED_BYTES);
            }
        }
    }
    let status = child.wait()?;
    Ok((status, String::from_utf8_lossy(&retained).into_owned()))
}

/// The part of a failed build's output that is searched for advice.
const RETAINED_BYTES: usize = 256 * 1024;

/// Runs a command without showing its output; returns its standard output, or an error with its output.
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

/// Returns where cargo puts what it builds: below the checkout unless its configuration or environment say otherwise.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let arguments = [
        "metadata",
        "--no-deps",
        "--offline",
        "--format-version",
        "1",
    ];
    let metadata = output(&mut cargo(&arguments))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let folder = metadata["target_directory"].as_str();
    Ok(folder.context("cargo does not say where it builds")?.into())
}

/// Returns the system that programs are built for, as rustc names it.
pub(crate) fn host() -> Result<String> {
    let version = output(&mut program("rustc", &["-vV"]))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc does not name its host")?.to_owned())
}

/// Whether a command starts and succeeds; shows nothing.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The same for a command that reads `input`.
pub(crate) fn succeeds_with_input(command: &mut Command, input: &str) -> bool {
    let child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = child else {
        return false;
    };
    if let Some(mut stdin) = child.stdin.take() {
        // A command that exits without reading its input has a status that says why.
        let _ = stdin.write_all(input.as_bytes());
    }
    child.wait().is_ok_and(|status| status.success())
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
