//! Prints the results of a bench, and checks its goals.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::Value;

/// The flags of every bench with goals.
#[derive(Args, Clone, Copy, Debug)]
pub struct Report {
    /// Write JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    gate: bool,
}

impl Report {
    /// Writes the figures, for people or for programs.
    ///
    /// # Errors
    /// Those of standard output.
    pub fn print(self, text: &str, json: &Value) -> std::io::Result<()> {
        let mut out = std::io::stdout();
        if self.json {
            writeln!(out, "{json}")
        } else {
            writeln!(out, "{text}")
        }
    }

    /// The exit code of the bench.
    #[must_use]
    pub fn exit(self, passed: bool) -> ExitCode {
        if self.gate && !passed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }
}
