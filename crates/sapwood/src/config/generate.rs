//! The keys of `[generate]`, and those of a model's table that concern this face.

use std::collections::BTreeMap;
use std::time::Duration;

use sapwood_proto::generate::{
    Datatype, InputRole, InputTensor, OutputRole, OutputTensor, RequestLimits, Signature,
};
use sapwood_proto::secret::Secret;
use sapwood_server::faces::generate::{self, Category, ForwardedHeaders, Restriction};
use serde::{Deserialize, Serialize};

use super::limits::check_message_bytes;
use super::served_model::ServedModelConfig;
use crate::failure::CliError;

/// Limits of the Triton face, and its compatibility with the reference server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct GenerateFaceConfig {
    /// Bytes of a body, and of all its tensors together.
    pub(crate) http_max_input_size: usize,
    /// Maximum of new tokens per request; 0: the context is the only limit.
    pub(crate) new_tokens: u32,
    /// Bytes of one message of a gRPC client.
    pub(crate) grpc_message_size: usize,
    /// Requests that may run at once on one gRPC stream.
    pub(crate) grpc_requests_per_stream: usize,
    /// Replay buffer of a resumable stream in bytes.
    pub(crate) resume_bytes: usize,
    /// The HTTP status for an unknown model.
    pub(crate) unknown_model_status: u16,
    /// Whether the face behaves exactly as the reference server where that is stricter.
    pub(crate) compat: Compat,
    /// The server name in the metadata.
    pub(crate) metadata_name: String,
    /// Whether requests may load and unload models.
    pub(crate) model_control: ModelControl,
    /// How long running requests may take when their model is unloaded.
    #[serde(with = "humantime_serde")]
    pub(crate) unload_timeout: Duration,
    /// Headers whose names match this regular expression become parameters.
    pub(crate) header_forward_pattern: Option<String>,
    /// Parts of the protocol that require an additional header, by the part's name.
    pub(crate) restricted: BTreeMap<String, Restricted>,
}

/// The header that a part of the protocol requires.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Restricted {
    pub(crate) header: String,
    pub(crate) value: Secret,
}

/// Whether requests may load and unload models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModelControl {
    /// No: the configured models are loaded at the start.
    #[default]
    None,
    /// Yes.
    Explicit,
}

/// The behaviour of the face.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Compat {
    /// With Sapwood's extensions.
    #[default]
    Sapwood,
    /// Exactly that of the reference server.
    Triton,
}

/// The clients that a model is compatible with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModelCompat {
    /// All that this face knows, as far as they agree.
    #[default]
    Sapwood,
    /// Those of a TensorRT-LLM ensemble.
    #[serde(rename = "tensorrt_llm")]
    TensorRtLlm,
}

impl Default for GenerateFaceConfig {
    fn default() -> Self {
        let limits = RequestLimits::default();
        let face = generate::Config::default();
        Self {
            http_max_input_size: limits.input_bytes,
            new_tokens: limits.new_tokens,
            grpc_message_size: face.grpc_message_size,
            grpc_requests_per_stream: face.grpc_requests_per_stream,
            resume_bytes: face.resume_bytes,
            unknown_model_status: face.unknown_model_status,
            compat: Compat::Sapwood,
            metadata_name: face.metadata_name,
            model_control: ModelControl::None,
            unload_timeout: Duration::from_secs(30),
            header_forward_pattern: None,
            restricted: BTreeMap::new(),
        }
    }
}

impl GenerateFaceConfig {
    /// Checks the constraints that the types cannot express.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the key.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        if self.grpc_requests_per_stream == 0 {
            return Err(CliError::usage(
                "generate.grpc_requests_per_stream: must be 1 or more",
            ));
        }
        if self.resume_bytes == 0 {
            return Err(CliError::usage("generate.resume_bytes: must be 1 or more"));
        }
        check_message_bytes("generate.grpc_message_size", self.grpc_message_size)?;
        if !matches!(self.unknown_model_status, 400 | 404) {
            return Err(CliError::usage(
                "generate.unknown_model_status: must be 400 or 404",
            ));
        }
        // Built once here and thrown away, so that a mistake is found by `config check`.
        self.forwarded()?;
        self.restricted().map(|_| ())
    }

    fn forwarded(&self) -> Result<Option<ForwardedHeaders>, CliError> {
        let pattern = self.header_forward_pattern.as_deref();
        let forwarded = pattern.map(ForwardedHeaders::new).transpose();
        forwarded.map_err(|why| CliError::usage(format!("generate.header_forward_pattern: {why}")))
    }

    fn restricted(&self) -> Result<BTreeMap<Category, Restriction>, CliError> {
        let each = self.restricted.iter().map(|(name, sent)| {
            let wrong = |what: String| CliError::usage(format!("generate.restricted.{name}{what}"));
            let category = Category::from_name(name).ok_or_else(|| {
                let known = Category::ALL.map(|(known, _)| known).join(", ");
                wrong(format!(": there are: {known}"))
            })?;
            if sent.value.expose().is_empty() {
                return Err(wrong(".value: must not be empty".into()));
            }
            let restriction = Restriction::new(&sent.header, sent.value.expose());
            let restriction =
                restriction.ok_or_else(|| wrong(".header: not a valid header name".into()))?;
            Ok((category, restriction))
        });
        each.collect()
    }

    /// The settings of the face, with those of single models.
    ///
    /// # Errors
    /// As [`GenerateFaceConfig::check`].
    pub(crate) fn face(
        &self,
        models: BTreeMap<String, generate::ModelOptions>,
    ) -> Result<generate::Config, CliError> {
        Ok(generate::Config {
            limits: RequestLimits {
                input_bytes: self.http_max_input_size,
                new_tokens: self.new_tokens,
                ..RequestLimits::default()
            },
            grpc_message_size: self.grpc_message_size,
            grpc_requests_per_stream: self.grpc_requests_per_stream,
            resume_bytes: self.resume_bytes,
            unknown_model_status: self.unknown_model_status,
            compat: self.compat == Compat::Triton,
            metadata_name: self.metadata_name.clone(),
            forwarded: self.forwarded()?,
            restricted: self.restricted()?,
            models,
            ..generate::Config::default()
        })
    }
}

/// A tensor of a model's signature (TR-101).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorConfig {
    pub(crate) name: String,
    pub(crate) datatype: String,
    pub(crate) shape: Vec<i64>,
    #[serde(default)]
    pub(crate) optional: bool,
    #[serde(default)]
    pub(crate) role: Option<String>,
    #[serde(default)]
    pub(crate) accepts_json: bool,
}

impl TensorConfig {
    fn datatype(&self, model: &str) -> Result<Datatype, CliError> {
        let known = Datatype::from_name(&self.datatype);
        known.ok_or_else(|| {
            let what = format!(
                "tensor `{}`: there is no datatype `{}`",
                self.name, self.datatype
            );
            wrong(model, &what)
        })
    }

    fn no_role(&self, model: &str) -> CliError {
        let role = self.role.as_deref().unwrap_or_default();
        wrong(
            model,
            &format!("tensor `{}`: there is no role `{role}`", self.name),
        )
    }

    fn input(&self, model: &str) -> Result<InputTensor, CliError> {
        let role = match &self.role {
            None => Some(InputRole::Ignore),
            Some(name) => InputRole::from_name(name),
        };
        Ok(InputTensor {
            name: self.name.clone(),
            datatype: self.datatype(model)?,
            shape: self.shape.clone(),
            optional: self.optional,
            role: role.ok_or_else(|| self.no_role(model))?,
            accepts_json: self.accepts_json,
        })
    }

    fn output(&self, model: &str) -> Result<OutputTensor, CliError> {
        let role = match &self.role {
            None => Some(OutputRole::Nothing),
            Some(name) => OutputRole::from_name(name),
        };
        Ok(OutputTensor {
            name: self.name.clone(),
            datatype: self.datatype(model)?,
            shape: self.shape.clone(),
            role: role.ok_or_else(|| self.no_role(model))?,
        })
    }
}

fn wrong(model: &str, what: &str) -> CliError {
    CliError::usage(format!("models `{model}`: {what}"))
}

impl ServedModelConfig {
    /// The configured signature, if there is one (TR-103, TR-105).
    ///
    /// # Errors
    /// [`CliError::usage`], naming model and tensor.
    pub(crate) fn signature(&self) -> Result<Option<Signature>, CliError> {
        let name = self.name.as_str();
        let changed = self.decoupled.is_some() || self.max_batch_size.is_some();
        let is_own = !self.inputs.is_empty() || !self.outputs.is_empty();
        let is_tensorrt_llm = self.compat == ModelCompat::TensorRtLlm;
        let mut signature = if is_own && is_tensorrt_llm {
            let what = "compat = \"tensorrt_llm\" defines its inputs and outputs: remove its own";
            return Err(wrong(name, what));
        } else if is_own {
            let inputs: Result<_, _> = self.inputs.iter().map(|it| it.input(name)).collect();
            let outputs: Result<_, _> = self.outputs.iter().map(|it| it.output(name)).collect();
            Signature {
                inputs: inputs?,
                outputs: outputs?,
                max_batch_size: 0,
                decoupled: true,
                lenient: false,
                tensorrt_llm: false,
            }
        } else if is_tensorrt_llm {
            Signature::tensorrt_llm()
        } else if changed {
            Signature::union()
        } else {
            return Ok(None);
        };
        // Decoupled by default, as every text model is that streams its tokens.
        signature.decoupled = self.decoupled.unwrap_or(true);
        signature.max_batch_size = self.max_batch_size.unwrap_or(signature.max_batch_size);
        signature
            .check()
            .map_err(|invalid| wrong(name, &invalid.to_string()))?;
        Ok(Some(signature))
    }

    /// Checks the keys of a model that concern this face.
    ///
    /// # Errors
    /// [`CliError::usage`], naming model and key.
    pub(crate) fn check_served(&self) -> Result<(), CliError> {
        let versions = self.versions.as_deref().unwrap_or(&[1]);
        let least = versions.iter().all(|version| *version >= 1);
        if versions.is_empty() || !least {
            return Err(wrong(&self.name, "versions must be integers of 1 and more"));
        }
        self.signature().map(|_| ())
    }
}
