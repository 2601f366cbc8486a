//! `sapwood try-model`: loads a file and computes a few tokens, in a child process of a server that is about to load
//! it (see `trial`).

use std::path::PathBuf;

use clap::Args;

use crate::failure::{CliError, Exit};
use crate::models::ModelSize;
use crate::{models, output, trial};

#[derive(Debug, Args)]
pub(super) struct TryModel {
    /// How much of it runs at a time, as JSON
    #[arg(long, value_parser = size)]
    size: ModelSize,
    /// The GGUF file; without one, the demo model
    file: Option<PathBuf>,
}

fn size(given: &str) -> Result<ModelSize, serde_json::Error> {
    serde_json::from_str(given)
}

impl TryModel {
    /// The reason that a file cannot be used goes to standard output, so that output of llama.cpp does not mix with it.
    pub(super) fn run(self) -> Result<Exit, CliError> {
        trial::be_expendable();
        match models::try_out(self.file, &self.size) {
            Ok(()) => Ok(Exit::Ok),
            Err(why) => {
                // Errors are ignored: without a reader the reason is not needed.
                let _ = output::data(why);
                Ok(Exit::Model)
            }
        }
    }
}
