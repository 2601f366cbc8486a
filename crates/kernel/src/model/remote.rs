//! The prompt for a model of another server that takes text and returns text (D-5).

use futures::future::try_join;
use serde_json::Value;

use super::config::{GenerateConfig, PromptMode};
use super::{
    PromptInput, PromptRoom, SamplingDefaults, SuffixReader, prompt, read_json, read_tools,
    typed_config, written_config,
};
use crate::Result;
use crate::call::Call;
use crate::error::Error;
use crate::name::Port;
use crate::want::RequestedPorts;

/// The inputs of a call, decoded.
pub(crate) struct RemoteCall {
    pub(crate) config: GenerateConfig,
    pub(crate) prompt: RemotePrompt,
    /// The text behind the place that the model fills in after the prompt, if there is one.
    pub(crate) suffix: Option<String>,
    /// Definitions of tools; null or empty for none.
    pub(crate) tools: Value,
}

/// The prompt that the server gets.
pub(crate) enum RemotePrompt {
    /// Plain text, without a chat template.
    Text(String),
    /// A conversation in OpenAI's format, for a server that has the chat template.
    Messages(Value),
}

impl RemoteCall {
    /// Reads the inputs. `takes_suffix` refuses a suffix.
    ///
    /// # Errors
    /// `Unimplemented` for token ids, log-probabilities, scoring, several choices; `Argument` for inputs that no model
    /// takes; those of `takes_suffix`.
    pub(crate) async fn read(
        call: &Call,
        takes_suffix: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let config = match typed_config(call).await? {
            Some(config) => config,
            None => written_config(call).await?,
        };
        let config = config.settled(&SamplingDefaults::default())?;
        refuse(call, &config)?;
        let tools = read_tools(call).await?;
        let input = PromptInput::of(call)?;
        let room = PromptRoom::new();
        let read = async {
            Ok(match input {
                PromptInput::Prompt => {
                    let read = prompt::read("prompt", call.read("prompt")?, &room).await?;
                    RemotePrompt::Text(read.text(|| Error::Unimplemented {
                        what: "a prompt of token ids for a model that takes text".into(),
                    })?)
                }
                PromptInput::Messages => {
                    let messages = read_json(call, "messages").await?;
                    RemotePrompt::Messages(messages.unwrap_or(Value::Null))
                }
            })
        };
        let suffix = SuffixReader {
            call,
            config: &config,
            tools: &tools,
            room: &room,
        };
        // Together: both may come from one bounded source, and reading them in turn would deadlock (KE-137).
        let (suffix, prompt) = try_join(suffix.read(takes_suffix), read).await?;
        // The template is at the other server, and these servers apply it to `messages` only.
        if config.prompt_mode == PromptMode::Chat && matches!(prompt, RemotePrompt::Text(_)) {
            return Err(unimplemented("prompt_mode \"chat\" with input prompt"));
        }
        Ok(Self {
            config,
            prompt,
            suffix,
            tools,
        })
    }
}

fn refuse(call: &Call, config: &GenerateConfig) -> Result<()> {
    let named = |port: &Port| matches!(&call.want.ports, RequestedPorts::Only(ports) if ports.contains(port));
    // A caller that reads everything gets what there is; only what was named, or configured, must not be missing
    // silently.
    let all = call.want.ports == RequestedPorts::All || call.want.inner;
    let what = if named(&Port::TOKENS) {
        "token ids of the output"
    } else if named(&Port::LOGPROBS) || (all && config.params.top_logprobs.is_some()) {
        "log-probabilities"
    } else if config.scored.is_some() || config.prompt_logprobs {
        "scoring"
    } else if config.params.n.is_some_and(|n| n > 1) {
        "more than one choice"
    } else if config.controller.is_some() {
        "a controller"
    } else if config.constraint.is_some() {
        "response_format"
    } else if config.watched {
        "watching the steps of a controller"
    } else if config.template_args.is_some() {
        "template_args"
    } else {
        return Ok(());
    };
    Err(unimplemented(what))
}

/// The error that `what` is not available from a text-only model of another server.
pub(crate) fn unimplemented(what: &str) -> Error {
    let what = format!("{what} (the server of this model takes and returns text only)");
    Error::Unimplemented { what }
}
