//! `sapwood compile-controller`: compiles one module from standard input to standard output, for a process that must not
//! depend on the compiler's behaviour (AI-732).

use std::ffi::OsString;

use clap::Args;
use sapwood_control::compiler::{ChildLimits, compile_stdin_to_stdout};
use sapwood_control::host::{self, HostConfig};

use crate::failure::{CliError, Exit};

/// The name of the command.
pub(crate) const NAME: &str = "compile-controller";

/// The command for a host that counts instructions, or does not: its code is another one (AI-733).
pub(crate) fn command(program: OsString, fuel: bool) -> Vec<OsString> {
    let mut command = vec![program, NAME.into()];
    if fuel {
        command.push("--fuel".into());
    }
    command
}

#[derive(Debug, Args)]
pub(super) struct CompileController {
    /// The code counts its instructions
    #[arg(long)]
    fuel: bool,
}

impl CompileController {
    pub(super) fn run(&self) -> Result<Exit, CliError> {
        let config = HostConfig {
            // Whatever the number is, which only a host needs.
            fuel: self.fuel.then_some(1),
            ..HostConfig::default()
        };
        compile_stdin_to_stdout(ChildLimits::default(), |module| {
            host::compile(&config, module)
        })
        .map_err(|error| CliError::new(format!("cannot compile: {error}")))?;
        Ok(Exit::Ok)
    }
}
