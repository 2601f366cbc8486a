//! `sapwood compile-controller`: compiles one module from standard input to standard output, for a process that must not
//! depend on the compiler's behaviour (AI-732).

use clap::Args;
use sapwood_control::compiler::{ChildLimits, compile_stdin_to_stdout};
use sapwood_control::host::{self, HostConfig};

use crate::failure::{CliError, Exit};

/// The name of the command.
pub(crate) const NAME: &str = "compile-controller";

#[derive(Debug, Args)]
pub(super) struct CompileController {}

impl CompileController {
    pub(super) fn run(&self) -> Result<Exit, CliError> {
        let config = HostConfig::default();
        compile_stdin_to_stdout(ChildLimits::default(), |module| {
            host::compile(&config, module)
        })
        .map_err(|error| CliError::new(format!("cannot compile: {error}")))?;
        Ok(Exit::Ok)
    }
}
