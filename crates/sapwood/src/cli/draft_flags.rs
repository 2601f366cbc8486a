//! Flags of speculative decoding, by the names of `llama-server`'s.

use clap::Args;
use figment::value::Value;

use crate::config::layers::Flags;
use crate::failure::CliError;

/// How tokens are drafted. The keys of the configuration say more.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(super) struct DraftFlags {
    /// What drafts tokens: nothing, prompt lookup, or prompt lookup and a draft model
    #[arg(long, value_parser = ["off", "lookup", "draft"])]
    speculation: Option<String>,
    /// Draft with this small model of the same vocabulary, named as --model is (-md)
    #[arg(long, alias = "model-draft", value_name = "PATH|hf:OWNER/REPO|URL")]
    draft_model: Option<String>,
    /// Layers of the draft model that a GPU computes (-ngld)
    #[arg(
        long,
        aliases = ["gpu-layers-draft", "n-gpu-layers-draft"],
        value_name = "N|auto|all",
        allow_negative_numbers = true
    )]
    draft_gpu_layers: Option<String>,
    /// Context of the draft model; 0 is that of the model (-cd)
    #[arg(long, alias = "ctx-size-draft", value_name = "TOKENS")]
    draft_ctx: Option<u32>,
    /// Tokens of a draft at most
    #[arg(long, aliases = ["draft-max", "draft-n", "draft"], value_name = "N")]
    draft_tokens_max: Option<u32>,
    /// A draft ends before a token to which the draft model gives less than this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    draft_p_min: Option<f32>,
}

impl DraftFlags {
    /// The keys of the only model, of so many.
    ///
    /// # Errors
    /// [`CliError::usage`] if there is no model, or more than one.
    pub(super) fn of_model(&self, models: usize) -> Result<Vec<(String, Value)>, CliError> {
        let keys = [
            ("draft_model", self.draft_model.clone().map(Value::from)),
            (
                "draft_gpu_layers",
                self.draft_gpu_layers.clone().map(Value::from),
            ),
            ("draft_ctx", self.draft_ctx.map(Value::from)),
        ];
        let given = keys.into_iter();
        let given = given.filter_map(|(key, value)| Some((key.to_owned(), value?)));
        let given: Vec<_> = given.collect();
        if !given.is_empty() && models != 1 {
            return Err(CliError::usage(
                "--draft-model is for one --model: name the model too, and of several models each one's as `draft_model` of its \
                 [[models]]",
            ));
        }
        Ok(given)
    }

    /// The first of these flags that was given.
    pub(super) fn named(&self) -> Option<&'static str> {
        [
            ("--speculation", self.speculation.is_some()),
            ("--draft-model", self.draft_model.is_some()),
            ("--draft-gpu-layers", self.draft_gpu_layers.is_some()),
            ("--draft-ctx", self.draft_ctx.is_some()),
            ("--draft-tokens-max", self.draft_tokens_max.is_some()),
            ("--draft-p-min", self.draft_p_min.is_some()),
        ]
        .into_iter()
        .find_map(|(flag, given)| given.then_some(flag))
    }

    pub(super) fn set(&self, flags: &mut Flags) {
        flags.set(
            "engine.speculation",
            "--speculation",
            self.speculation.clone(),
        );
        flags.set(
            "engine.draft_tokens_max",
            "--draft-tokens-max",
            self.draft_tokens_max,
        );
        flags.set("engine.draft_p_min", "--draft-p-min", self.draft_p_min);
    }
}
