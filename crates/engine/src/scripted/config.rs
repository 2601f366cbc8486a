//! The configuration of a scripted model, as plain data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use sapwood_proto::code::Code;
use serde::Deserialize;

use crate::recommended::RecommendedSampling;

/// A scripted model.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The name under which it is served.
    pub name: String,
    /// What it says.
    pub script: Script,
    /// The text of script `text`.
    pub text: String,
    /// The rules of script `steps`.
    pub rules: Vec<ScriptRule>,
    /// Tokens of script `tokens` when the request gives no `max_tokens`.
    pub count: u32,
    /// Tokens per second of one sequence; 0 is as fast as the reader takes them.
    pub tokens_per_s: f64,
    /// Milliseconds before the first token.
    pub ttft_ms: u64,
    /// Varies what script `tokens` says.
    pub seed: u64,
    /// How text becomes tokens; not given: `words` for the scripts `words` and `tokens`, else `bytes`.
    pub tokenizer: Option<ScriptedTokenizer>,
    /// Tokens of the vocabulary of tokenizer `words`; at least 1,024.
    pub vocab: u32,
    /// Nats between the token of the script and every other; 40 is certainty, 0 lets sampling wander.
    pub gap: f32,
    /// It has a chat template.
    pub chat: bool,
    /// A sequence can be cut back, as a transformer's and unlike a recurrent model's.
    pub truncates: bool,
    /// Tokens of a sequence, prompt and output together.
    pub context_tokens: u32,
    /// Sequences in one batch.
    pub parallel: u32,
    /// Slots beside those, for prefixes of finished sequences.
    pub kept_prefixes: u32,
    /// Tokens of one batch.
    pub batch_tokens: u32,
    /// Cells of the cache; not given: enough for every slot.
    pub cells: Option<u32>,
    /// Tokens reported together, 1 or more. Pauses and ends do not wait for them.
    pub tokens_per_chunk: u32,
    /// What requests may ask of the model, and the name of the parameter that asks for it (TR-1103). The engine plays
    /// scripts; what is asked beside them is done by the face that read the parameters.
    pub controls: BTreeMap<String, String>,
    /// What the model says when it is asked to fail.
    pub fail_message: String,
    /// What it recommends for sampling, as a file does.
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
            truncates: true,
            context_tokens: 4096,
            parallel: 64,
            kept_prefixes: 16,
            batch_tokens: 2048,
            cells: None,
            tokens_per_chunk: 1,
            controls: BTreeMap::new(),
            fail_message: "mock failure".to_owned(),
            sampling: RecommendedSampling::default(),
        }
    }
}

/// What a scripted model says (TR-1104).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Script {
    /// The prompt; of a conversation, its last message that is not the assistant's.
    Echo,
    /// The same, a word at a time where the vocabulary knows the word.
    Words,
    /// A fixed text.
    Text,
    /// Pseudo-random words, as many as asked for.
    Tokens,
    /// The steps of the first rule that matches.
    Steps,
}

impl Script {
    /// Its name in a configuration.
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

/// How text becomes tokens (TR-1106), by its name in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub enum ScriptedTokenizer {
    /// Each byte is a token; 256 begins a turn, 257 ends it.
    Bytes,
    /// The same, and after them words with their leading space. Unknown words are spelled in bytes.
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

/// One case of script `steps`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptRule {
    /// A regular expression that the prompt's text must contain a match of; not given: any prompt.
    #[serde(default, rename = "match")]
    pub pattern: Option<String>,
    /// What happens then.
    pub steps: Vec<ScriptStep>,
}

/// One thing that a script does (TR-1105).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScriptStep {
    /// Says this, by its tokens.
    Text(String),
    /// Says this at once: one response, however many tokens it has.
    Chunk(String),
    /// Says that many pseudo-random words.
    Tokens(u32),
    /// Waits so many milliseconds.
    SleepMs(u64),
    /// Says a call in the markup `<tool_call>` (D-10).
    ToolCall(ToolCall),
    /// Says a thought in the markup `<think>` (D-10).
    Reasoning(String),
    /// Ends.
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
    /// With the end-of-sequence token.
    Stop,
    /// As if the length were reached.
    Length,
    /// With the end-of-sequence token, after calls.
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
    /// In order.
    Close,
    /// By a reset.
    Reset,
}

/// Why a configuration makes no scripted model.
#[derive(Debug, thiserror::Error)]
pub enum InvalidScript {
    /// A rule's pattern is no regular expression.
    #[error("the pattern {pattern:?} of a rule does not parse: {cause}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What the parser says.
        cause: regex::Error,
    },
    /// A step names an error code that does not exist.
    #[error("{0:?} is no error code; one is {example:?}", example = Code::Internal.name())]
    Code(String),
    /// A tokenizer of a file.
    #[error(
        "tokenizer {}: files of tokenizers are not read; \"bytes\" and \"words\" are built in, and a model from a GGUF \
         file (backend = \"embedded\") brings its own",
        .0.display()
    )]
    Tokenizer(PathBuf),
    /// A number is out of range.
    #[error("{field} must be {range}")]
    Range {
        /// The member.
        field: &'static str,
        /// What it must be.
        range: &'static str,
    },
}
