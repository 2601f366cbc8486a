//! The configuration of a scripted model, as plain data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use sapwood_proto::code::Code;
use serde::Deserialize;

use crate::adapters::AdapterInfo;
use crate::recommended::RecommendedSampling;

/// A scripted model.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The name under which it is served.
    pub name: String,
    /// Where its output comes from.
    pub script: Script,
    /// The text of script `text`.
    pub text: String,
    /// The rules of script `steps`.
    pub rules: Vec<ScriptRule>,
    /// Number of tokens of script `tokens` if the request gives no `max_tokens`.
    pub count: u32,
    /// Tokens per second of one sequence; 0 is without delay.
    pub tokens_per_s: f64,
    /// Milliseconds before the first token.
    pub ttft_ms: u64,
    /// Varies the output of script `tokens`.
    pub seed: u64,
    /// How text becomes tokens; by default `words` for the scripts `words` and `tokens`, else `bytes`.
    pub tokenizer: Option<ScriptedTokenizer>,
    /// Tokens of the vocabulary of tokenizer `words`; at least 1,024.
    pub vocab: u32,
    /// Nats between the token of the script and every other; 40 is certainty, with 0 sampling varies widely.
    pub gap: f32,
    /// It has a chat template.
    pub chat: bool,
    /// It has tokens for fill in the middle.
    pub infill: bool,
    /// A sequence can be truncated, as with a transformer and unlike a recurrent model.
    pub truncates: bool,
    /// Tokens of a sliding window: a slot that has gone on has lost those before it. 0: every token attends to all.
    pub window_tokens: u32,
    /// Tokens of a sequence, prompt and output together.
    pub context_tokens: u32,
    /// Sequences in one batch.
    pub parallel: u32,
    /// Slots in addition to `parallel`, for cached prefixes.
    pub kept_prefixes: u32,
    /// Slots can be saved, and all share one cache that is scanned for every token.
    pub saves: bool,
    /// Tokens of one batch.
    pub batch_tokens: u32,
    /// KV cells; by default enough for every slot.
    pub cells: Option<u32>,
    /// Tokens reported together, 1 or more. Pauses and ends do not wait for them.
    pub tokens_per_chunk: u32,
    /// The controls that requests may use, and the name of the request parameter of each (TR-1103). The engine plays
    /// scripts; the face that parsed the parameters applies the controls.
    pub controls: BTreeMap<String, String>,
    /// The message of requested failures.
    pub fail_message: String,
    /// LoRA adapters. Those that compute change the log-probabilities of every token, and where [`Config::gap`] is small
    /// the output too. Set outside, as those of other models are.
    #[serde(skip)]
    pub adapters: Vec<AdapterInfo>,
    /// Recommended sampling parameters, as a model file contains them.
    pub sampling: RecommendedSampling,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            name: "scripted".to_owned(),
            script: Script::Echo,
            text: String::new(),
            rules: Vec::new(),
            count: 128,
            tokens_per_s: 0.0,
            ttft_ms: 0,
            seed: 0,
            tokenizer: None,
            vocab: 32_000,
            gap: 40.0,
            chat: true,
            infill: false,
            truncates: true,
            window_tokens: 0,
            context_tokens: 4096,
            parallel: 64,
            kept_prefixes: 16,
            saves: false,
            batch_tokens: 2048,
            cells: None,
            tokens_per_chunk: 1,
            controls: BTreeMap::new(),
            fail_message: "mock failure".to_owned(),
            adapters: Vec::new(),
            sampling: RecommendedSampling::default(),
        }
    }
}

/// Where a scripted model's output comes from (TR-1104).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Script {
    /// The prompt; of a conversation, the last message that is not from the assistant.
    Echo,
    /// The same, one word per token if the vocabulary has the word.
    Words,
    /// A fixed text.
    Text,
    /// Pseudo-random words, as many as requested.
    Tokens,
    /// The steps of the first rule that matches.
    Steps,
}

impl Script {
    /// Returns its name in a configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Words => "words",
            Self::Text => "text",
            Self::Tokens => "tokens",
            Self::Steps => "steps",
        }
    }
}

/// The tokenizer (TR-1106), by its name in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub enum ScriptedTokenizer {
    /// Each byte is a token; 256 begins a turn, 257 ends it.
    Bytes,
    /// The same, and words with their leading space. Unknown words are spelled in bytes.
    Words,
    /// Any other name is the path of a `tokenizer.json`, which no scripted model reads: [`InvalidScript::Tokenizer`].
    File(PathBuf),
}

impl From<String> for ScriptedTokenizer {
    fn from(name: String) -> Self {
        match name.as_str() {
            "bytes" => Self::Bytes,
            "words" => Self::Words,
            _ => Self::File(name.into()),
        }
    }
}

/// One rule of script `steps`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptRule {
    /// A regular expression that the prompt's text must match somewhere; by default any prompt.
    #[serde(default, rename = "match")]
    pub pattern: Option<String>,
    /// The steps of a prompt that matches.
    pub steps: Vec<ScriptStep>,
}

/// One step of a script (TR-1105).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScriptStep {
    /// Emits this text, token by token.
    Text(String),
    /// Emits this text at once: one event, however many tokens it has.
    Chunk(String),
    /// Emits this many pseudo-random words.
    Tokens(u32),
    /// Waits this many milliseconds.
    SleepMs(u64),
    /// Emits a tool call in the markup `<tool_call>` (D-10).
    ToolCall(ToolCall),
    /// Emits reasoning in the markup `<think>` (D-10).
    Reasoning(String),
    /// Ends the output.
    Finish(ScriptFinish),
    /// Fails the request.
    Error(ScriptedFailure),
    /// Waits until cancelled.
    Hang(bool),
    /// Cuts the transport.
    Cut(TransportCut),
    /// Panics inside the model.
    Panic(bool),
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// Its arguments.
    #[serde(default)]
    pub arguments: serde_json::Value,
}

/// How a script ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScriptFinish {
    /// With the EOG token.
    Stop,
    /// As if the maximum length was reached.
    Length,
    /// With the EOG token, after tool calls.
    ToolCalls,
}

/// How a script fails.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedFailure {
    /// The kebab-case name of a code.
    pub code: String,
    /// The message.
    #[serde(default)]
    pub message: String,
}

/// How a script cuts the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportCut {
    /// Closes it cleanly.
    Close,
    /// Resets it.
    Reset,
}

/// Why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum InvalidScript {
    /// A rule's pattern is not a valid regular expression.
    #[error("the pattern {pattern:?} of a rule does not parse: {cause}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The error of the parser.
        cause: regex::Error,
    },
    /// A step names an error code that does not exist.
    #[error("{0:?} is not an error code; an example is {example:?}", example = Code::Internal.name())]
    Code(String),
    /// A tokenizer file, which is not supported.
    #[error(
        "tokenizer {}: tokenizer files are not supported; \"bytes\" and \"words\" are built in, and a model from a GGUF \
         file (backend = \"embedded\") brings its own",
        .0.display()
    )]
    Tokenizer(PathBuf),
    /// A number is out of range.
    #[error("{field} must be {range}")]
    Range {
        /// The member.
        field: &'static str,
        /// The valid range.
        range: &'static str,
    },
}
