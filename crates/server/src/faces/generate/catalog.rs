//! The models of this face: which kernel functions they are, with their versions and states (TR-101 to TR-103, TR-204,
//! TR-1308).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use http::StatusCode;
use sapwood_kernel::{Kernel, Name, Spec};
use sapwood_proto::code::Code;
use sapwood_proto::generate::Signature;

use super::detached::Streams;
use super::options::{Config, ModelOptions, OnModelLoaded};
use super::path::Target;
use super::request_error::RequestError;
use super::running::RunningRequests;
use super::stats::InferenceStats;
use super::{embedding, function};
use crate::auth::caller::Caller;
use crate::context::ServerContext;
use crate::ops::health;

/// The prefix under which a function is found even where a model bears its name (D-17).
const FUNCTION: &str = "fn.";

/// Everything that can be called here.
pub(super) struct ModelCatalog {
    pub(super) shared: ServerContext,
    pub(super) kernel: Kernel,
    pub(super) config: Config,
    pub(super) stats: InferenceStats,
    pub(super) running: Arc<RunningRequests>,
    pub(super) streams: Streams,
    /// The signature of text models without one of their own.
    union: Arc<Signature>,
    /// The options of models without their own.
    usual: Arc<ModelOptions>,
    /// A lock, because a model that is loaded on request brings new options.
    models: Arc<RwLock<BTreeMap<String, Arc<ModelOptions>>>>,
}

/// A model that a request is for.
#[derive(Clone, Debug)]
pub(super) struct FoundModel {
    /// Its name, as it was asked for.
    pub(super) name: Arc<str>,
    pub(super) version: u64,
    /// The function behind it.
    pub(super) function: Name,
    pub(super) signature: Arc<Signature>,
    pub(super) model: Arc<ModelOptions>,
    /// It generates text; else it embeds, or is a plain function.
    pub(super) text: bool,
    /// It embeds texts or scores documents.
    pub(super) embeds: bool,
    /// Whether equal requests give equal tokens whatever else runs, if that is known (D-21).
    pub(super) deterministic: Option<bool>,
}

/// Whether a model can be asked now (TR-101).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    Loading,
    Unloading,
    Unavailable,
    /// Its upstream does not answer. Requests are passed on and fail with the upstream's error, or succeed if it is
    /// back.
    Away,
}

impl Readiness {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ready => "READY",
            Self::Loading => "LOADING",
            Self::Unloading => "UNLOADING",
            Self::Unavailable | Self::Away => "UNAVAILABLE",
        }
    }
}

impl ModelCatalog {
    pub(super) fn new(shared: ServerContext, kernel: Kernel, mut config: Config) -> Self {
        let models = std::mem::take(&mut config.models).into_iter();
        Self {
            stats: InferenceStats::new(&shared),
            streams: Streams::new(&config, shared.drain.clone()),
            shared,
            kernel,
            config,
            running: Arc::default(),
            union: Arc::new(Signature::union()),
            usual: Arc::new(ModelOptions::default()),
            models: Arc::new(RwLock::new(
                models
                    .map(|(name, model)| (name, Arc::new(model)))
                    .collect(),
            )),
        }
    }

    /// Every model that `caller` may use: its name, its options, its state.
    pub(super) fn all(&self, caller: &Caller) -> Vec<(Name, Arc<ModelOptions>, Readiness)> {
        let specs = self.kernel.specs();
        let names = specs
            .iter()
            .filter(|spec| spec.model)
            .map(|spec| &spec.name);
        let names = names.filter(|name| caller.may_use(name));
        names
            .map(|name| (name.clone(), self.options_of(name), self.state(name)))
            .collect()
    }

    /// The options of a model.
    fn options_of(&self, name: &str) -> Arc<ModelOptions> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(models.get(name).unwrap_or(&self.usual))
    }

    /// Replaces the options of a model, when it is loaded. Requests that were checked before keep the old ones.
    pub(super) fn on_loaded(&self, name: &str) -> OnModelLoaded {
        let (models, name) = (Arc::clone(&self.models), name.to_owned());
        Box::new(move |model| {
            let mut models = models.write().unwrap_or_else(PoisonError::into_inner);
            models.insert(name, Arc::new(model));
        })
    }

    pub(super) fn state(&self, name: &str) -> Readiness {
        match self.shared.health.state(name) {
            // Functions are in no list of health: they are ready as long as they are registered.
            // A request for a model that is loaded on demand waits until it is.
            None | Some(health::HealthState::Ok | health::HealthState::OnDemand) => {
                Readiness::Ready
            }
            Some(health::HealthState::Away) => Readiness::Away,
            Some(health::HealthState::Loading) => Readiness::Loading,
            Some(health::HealthState::Unloading) => Readiness::Unloading,
            Some(
                health::HealthState::Stuck
                | health::HealthState::Failed
                | health::HealthState::Unloaded,
            ) => Readiness::Unavailable,
        }
    }

    /// The model of a request, in a version that is ready (TR-204).
    pub(super) fn find(
        &self,
        caller: &Caller,
        target: &Target,
    ) -> Result<FoundModel, RequestError> {
        // TR-203: the syntax of the version, then the model, then the version itself. The texts are those of TR-204.
        let version = target.version.as_deref().map(version).transpose()?;
        let found = self.known(caller, &target.model)?;
        let name = &target.model;
        // All versions are one model here, and so are in one state.
        let ready = matches!(
            self.state(&found.function),
            Readiness::Ready | Readiness::Away
        );
        let versions = &found.model.versions;
        match version {
            Some(version) if !versions.contains(&version) => Err(missing(format!(
                "Request for unknown model: '{name}' version {version} is not found"
            ))),
            Some(version) if !ready => Err(RequestError::new(
                Code::Unavailable,
                format!(
                    "Request for unknown model: '{name}' version {version} is not at ready state"
                ),
            )),
            Some(version) => Ok(FoundModel { version, ..found }),
            None if !ready => Err(missing(format!(
                "Request for unknown model: '{name}' has no available versions"
            ))),
            None => Ok(found),
        }
    }

    /// The model of this name, in its highest version, whether it is ready or not. A key for some models learns nothing
    /// of others, not even whether they are there.
    pub(super) fn known(&self, caller: &Caller, name: &str) -> Result<FoundModel, RequestError> {
        // The whole name first: a model may have a name that starts with `fn.`, and one without it may be a function
        // (D-17).
        let bare = name.strip_prefix(FUNCTION);
        let spec = |name: &str| self.kernel.get(name).ok();
        let function = match (spec(name), bare.and_then(spec)) {
            (Some(function), _) => function,
            // Never a model: the prefix is for functions alone.
            (None, Some(function)) if !function.spec().model => function,
            // Before `unknown`: a key for some models must not learn by the answer which others exist.
            _ if !caller.may_use(&Name::shared(name)) => return Err(foreign()),
            _ => return Err(self.unknown(name)),
        };
        let spec = function.spec();
        // A key lists models. Functions are open to every caller of the face.
        if spec.model && !caller.may_use(&spec.name) {
            return Err(foreign());
        }
        let model = self.options_of(&spec.name);
        let signature = match &model.signature {
            Some(signature) => Arc::new(signature.clone()),
            None if spec.generates() => Arc::clone(&self.union),
            None if spec.embedding.is_some() => Arc::new(embedding::signature(spec)),
            // Derived at each request: functions may be registered and replaced while the server runs.
            None => Arc::new(derived(spec).ok_or_else(|| self.unknown(name))?),
        };
        Ok(FoundModel {
            name: name.into(),
            version: model.latest(),
            function: spec.name.clone(),
            signature,
            text: spec.generates(),
            embeds: spec.embedding.is_some(),
            deterministic: spec.facts.as_ref().and_then(|it| it.info.deterministic),
            model,
        })
    }

    fn unknown(&self, name: &str) -> RequestError {
        let text = format!("Request for unknown model: '{name}' is not found");
        // 400 unless it is configured otherwise, because deployed clients expect it (TR-204).
        let status = StatusCode::from_u16(self.config.unknown_model_status);
        RequestError::new(Code::NotFound, text)
            .with_status(status.unwrap_or(StatusCode::BAD_REQUEST))
    }
}

/// The signature of a function, if it has a legal one.
fn derived(spec: &Spec) -> Option<Signature> {
    let signature = function::signature(spec);
    signature.check().ok().map(|()| signature)
}

/// A version's digits as a number.
pub(super) fn version(text: &str) -> Result<u64, RequestError> {
    // By way of a signed number, because the reference parses one (`stol`): what does not fit it is refused there too.
    let number = text
        .parse::<i64>()
        .ok()
        .and_then(|number| u64::try_from(number).ok());
    number.ok_or_else(|| {
        // Clipped: the text is the client's, of any length (D-47).
        let shown: String = text.chars().take(64).collect();
        let message = format!(
            "failed to get model version from specified version string '{shown}' (details: stol), version should be an \
             integral value > 0"
        );
        RequestError::new(Code::InvalidRequest, message)
    })
}

/// The error for a model that the caller's key does not list (OA-905).
pub(super) fn foreign() -> RequestError {
    let message = "insufficient_scope: this key may not use this model";
    RequestError::new(Code::PermissionDenied, message)
}

fn missing(text: String) -> RequestError {
    RequestError::new(Code::NotFound, text)
}
