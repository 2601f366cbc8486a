//! How a bench says what it found, and what becomes of a goal that was missed.
//!
//! Owns: the flags for it. Refuses to know: what was measured.

use std::process::ExitCode;

use clap::Args;

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
    /// How the bench ends.
    #[must_use]
    pub fn exit(self, passed: bool) -> ExitCode {
        if self.gate && !passed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }
}
