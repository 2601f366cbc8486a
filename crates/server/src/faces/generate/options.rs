//! The configuration of this face.

use std::collections::BTreeMap;
use std::time::Duration;

use sapwood_engine::adapters::AdapterInfo;
use sapwood_proto::generate::{RequestLimits, Signature};

use super::model_control::ExplicitRepository;
use super::request_options::ForwardedHeaders;
use super::restricted::{Category, Restriction};

/// The settings of this face.
#[derive(Clone, Debug)]
pub struct Config {
    /// The limits of one request.
    pub limits: RequestLimits,
    /// Pieces of a chunked body (TR-316).
    pub http_chunks: usize,
    /// Bytes of one message of a gRPC client, unpacked (TR-907).
    pub grpc_message_size: usize,
    /// Requests that may run at once on one gRPC stream (TR-904).
    pub grpc_requests_per_stream: usize,
    /// Streams that can be resumed (TR-1303).
    pub resumable_streams: usize,
    /// How many of them one key may have, or one address where no key is needed.
    pub resumable_streams_each: usize,
    /// How long each of them waits for its client.
    pub resume_grace: Duration,
    /// Size of each one's replay buffer, in bytes.
    pub resume_bytes: usize,
    /// The status for an unknown model: 400, or 404 (TR-204).
    pub unknown_model_status: u16,
    /// Refuse what the reference refuses, where the rules accept it otherwise (`compat = "triton"`).
    pub compat: bool,
    /// Its models are counted under Triton's names as well (TR-1002).
    pub metrics: bool,
    /// The server's name in its metadata.
    pub metadata_name: String,
    /// The server's version in its metadata.
    pub metadata_version: String,
    /// Parts of the protocol that need a header of their own (TR-210).
    pub restricted: BTreeMap<Category, Restriction>,
    /// Loads and unloads models on request; without it both are refused (TR-706).
    pub repository: Option<ExplicitRepository>,
    /// Headers of requests whose names match become parameters (TR-1309).
    pub forwarded: Option<ForwardedHeaders>,
    /// Options of single models, by name; the others have the defaults.
    pub models: BTreeMap<String, ModelOptions>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            limits: RequestLimits::default(),
            http_chunks: 65_536,
            grpc_message_size: 64 << 20,
            grpc_requests_per_stream: 1_024,
            resumable_streams: 1_000,
            resumable_streams_each: 250,
            resume_grace: Duration::from_secs(60),
            resume_bytes: 4 << 20,
            unknown_model_status: 400,
            compat: false,
            metrics: true,
            metadata_name: "sapwood".into(),
            metadata_version: crate::VERSION.into(),
            restricted: BTreeMap::new(),
            repository: None,
            forwarded: None,
            models: BTreeMap::new(),
        }
    }
}

/// Takes the options of a model that was loaded.
pub type OnModelLoaded = Box<dyn FnOnce(ModelOptions) + Send>;

/// The options of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelOptions {
    /// Its versions, each 1 or more.
    pub versions: Vec<u64>,
    /// The backend's name, for its metadata.
    pub platform: String,
    /// Its tensors; without them a text model has the union signature.
    pub signature: Option<Signature>,
    /// Unknown parameters are refused (TR-307).
    pub strict_parameters: bool,
    /// The prompt stands before the output unless a request says otherwise (TR-405).
    pub prepend_prompt_default: bool,
    /// A bare prompt is one turn of a conversation (D-24).
    pub template_raw_prompts: bool,
    /// The controls of a scripted model, with the parameter for each (TR-1103).
    pub controls: BTreeMap<ScriptControl, String>,
    /// The message of a scripted model that is asked to fail.
    pub fail_message: String,
    /// The LoRA adapters that requests may choose, for its configuration.
    pub adapters: Vec<AdapterInfo>,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            versions: vec![1],
            platform: "sapwood".into(),
            signature: None,
            strict_parameters: false,
            prepend_prompt_default: false,
            template_raw_prompts: false,
            controls: BTreeMap::new(),
            fail_message: "mock failure".into(),
            adapters: Vec::new(),
        }
    }
}

impl ModelOptions {
    /// Its highest version.
    pub(super) fn latest(&self) -> u64 {
        self.versions.iter().copied().max().unwrap_or(1)
    }
}

/// What a request may ask a scripted model to do (TR-1103).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScriptControl {
    /// That many equal responses.
    Repeat,
    /// So many seconds before each response.
    DelayS,
    /// An error in place of the end.
    FailLast,
    /// A text output without elements.
    EmptyOutput,
    /// An error before any response.
    FailFirst,
    /// The code of those errors.
    Code,
}

impl ScriptControl {
    /// All of them, with their names.
    pub const ALL: [(&'static str, Self); 6] = [
        ("repeat", Self::Repeat),
        ("delay_s", Self::DelayS),
        ("fail_last", Self::FailLast),
        ("empty_output", Self::EmptyOutput),
        ("fail_first", Self::FailFirst),
        ("code", Self::Code),
    ];

    /// The control of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, control)| *control)
    }
}
