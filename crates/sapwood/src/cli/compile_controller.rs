//! `sapwood compile-controller`: compiles one module, in a child process of a server to which it is uploaded (AI-732).

use clap::Args;

use crate::controllers;
use crate::failure::{CliError, Exit};

#[derive(Debug, Args)]
pub(super) struct CompileController {
    /// Bytes of memory that an instance may have; artefacts depend on it
    memory_bytes: u64,
}

impl CompileController {
    /// The result goes to standard output, an invalid module included.
    pub(super) fn run(&self) -> Result<Exit, CliError> {
        controllers::compile(self.memory_bytes)
            .map_err(|why| CliError::new(format!("cannot compile: {why}")))?;
        Ok(Exit::Ok)
    }
}
