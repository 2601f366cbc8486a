//! Flags of a model that embeds, by the names of `llama-server`'s.

use clap::Args;
use figment::value::Value;

use crate::failure::CliError;

/// What a model is for.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Embeddings")]
pub(super) struct EmbeddingFlags {
    /// Embed texts instead of generating, with a model whose file does not say so
    #[arg(long, alias = "embedding")]
    embeddings: bool,
    /// How the rows of a text's tokens become its embedding; rank: score documents. Default: as the file says
    #[arg(long, value_parser = ["mean", "cls", "last", "rank"])]
    pooling: Option<String>,
}

impl EmbeddingFlags {
    /// The keys of the only model, of so many.
    ///
    /// # Errors
    /// [`CliError::usage`] if there is no model, or more than one.
    pub(super) fn of_model(&self, models: usize) -> Result<Vec<(String, Value)>, CliError> {
        let embeddings = self.embeddings.then(|| Value::from(true));
        let pooling = self.pooling.clone().map(Value::from);
        let keys = [("embedding", embeddings), ("pooling", pooling)];
        let given = keys.into_iter();
        let given = given.filter_map(|(key, value)| Some((key.to_owned(), value?)));
        let given: Vec<_> = given.collect();
        match self.named() {
            Some(flag) if models != 1 => Err(CliError::usage(format!(
                "{flag} is for one --model: name the model too, and of several models each one's as `embedding` and \
                 `pooling` of its [[models]]"
            ))),
            _ => Ok(given),
        }
    }

    /// The first of these flags that was given.
    pub(super) fn named(&self) -> Option<&'static str> {
        let pooling = self.pooling.as_ref().map(|_| "--pooling");
        self.embeddings.then_some("--embeddings").or(pooling)
    }
}
