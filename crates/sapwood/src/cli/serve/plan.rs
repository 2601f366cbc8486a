//! [`ServePlan`]: the checked configuration of a server, and the faces that it asks for.

use std::sync::Arc;

use sapwood_kernel::Kernel;
use sapwood_net::references::ReferenceResolver;
use sapwood_proto::evergreen::SessionLimits;
use sapwood_proto::steer::ControllerStore;
use sapwood_server::faces::controllers;
use sapwood_server::faces::evergreen;
use sapwood_server::faces::generate;
use sapwood_server::faces::generate::ExplicitRepository;
use sapwood_server::faces::lmtp::LmtpService;
use sapwood_server::listener::tls::Tls;
use sapwood_server::ops::call_metrics::CallMetricsLayer;
use sapwood_server::ops::metrics::FaceLabel;
use sapwood_server::{Builder, ServerContext};

use super::load_tls;
use crate::config::Config;
use crate::config::generate::ModelControl;
use crate::controllers::ProcessControllers;
use crate::failure::CliError;
use crate::models::{self, PlannedModel};
use crate::repository::ServedModels;

/// Everything that the configuration of a server says, after all of it that can be wrong was checked.
pub(super) struct ServePlan {
    pub(super) config: Config,
    pub(super) models: Vec<PlannedModel>,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) steering: ProcessControllers,
    /// Where uploaded controllers are stored, if they are.
    store: Option<Arc<dyn ControllerStore>>,
    references: Arc<ReferenceResolver>,
}

impl ServePlan {
    /// # Errors
    /// What is wrong in the configuration, but for the keys.
    pub(super) fn new(config: Config) -> Result<Self, CliError> {
        let models = models::plan(&config)?;
        let tls = load_tls(&config)?;
        let references = config.references.clients()?;
        let steering = ProcessControllers::new(&config.controllers)?;
        let store = steering.store()?;
        Ok(Self {
            config,
            models,
            tls,
            steering,
            store,
            references,
        })
    }

    /// Returns the face of LMTP, which serves connections of a socket of its own too.
    pub(super) fn lmtp(&self, kernel: &Kernel, shared: &ServerContext) -> LmtpService {
        let kernel = counted(kernel, shared, FaceLabel::Lmtp);
        let default_model = self.config.default_model.clone();
        let settings = self.config.lmtp.face(default_model, &self.config.limits);
        LmtpService::new(shared.clone(), kernel, settings)
    }

    /// Adds all faces over the functions of `kernel` to a server.
    ///
    /// # Errors
    /// If the configuration of a model does not fit a face.
    pub(super) fn add_faces(
        &self,
        builder: Builder,
        lmtp: &LmtpService,
        loading: &ServedModels,
        kernel: &Kernel,
    ) -> Result<Builder, CliError> {
        let shared = loading.shared();
        let counting = |face| counted(kernel, &shared, face);
        let settings = self.evergreen();
        let evergreen = evergreen::face(shared.clone(), counting(FaceLabel::Evergreen), settings);
        let settings = self.generate(loading)?;
        let generate = generate::face(shared.clone(), counting(FaceLabel::Generate), settings);
        let settings = self.controllers();
        let steered = controllers::face(shared.clone(), counting(FaceLabel::Controllers), settings);
        let faces = [evergreen, lmtp.face(), generate, steered];
        Ok(faces.into_iter().fold(builder, Builder::face))
    }

    fn controllers(&self) -> controllers::Config {
        controllers::Config {
            store: self.store.clone(),
            ..controllers::Config::default()
        }
    }

    fn evergreen(&self) -> evergreen::Config {
        let limits = &self.config.limits;
        // The only model is the default one.
        let only = || (self.models.len() == 1).then(|| self.models[0].name.clone());
        evergreen::Config {
            sessions: limits.sessions,
            sessions_each: limits.sessions_each,
            retained_bytes: limits.server_retained_bytes,
            retained_bytes_each: limits.retained_bytes_each,
            default_target: self.config.default_model.clone().or_else(only),
            resumable_sessions: limits.resumable_sessions,
            resumable_sessions_each: limits.resumable_sessions_each,
            limits: Arc::new(SessionLimits {
                max_message_bytes: limits.max_message_bytes,
                resume_grace: limits.resume_grace,
                reverse_timeout: limits.reverse_timeout,
                ..SessionLimits::default()
            }),
            references: Some(self.references.clone()),
            ..evergreen::Config::default()
        }
    }

    fn generate(&self, loading: &ServedModels) -> Result<generate::Config, CliError> {
        let Config {
            generate, limits, ..
        } = &self.config;
        let models = self
            .models
            .iter()
            .map(|model| Ok((model.name.clone(), model.served(&self.config)?)));
        let models: Result<_, CliError> = models.collect();
        let explicit = generate.model_control == ModelControl::Explicit;
        Ok(generate::Config {
            metrics: self.config.metrics.triton,
            resumable_streams: limits.resumable_sessions,
            resumable_streams_each: limits.resumable_sessions_each,
            resume_grace: limits.resume_grace,
            repository: explicit.then(|| ExplicitRepository(Arc::new(loading.clone()))),
            ..generate.face(models?)?
        })
    }
}

/// The kernel for calls that come through `face`, which are counted for it.
fn counted(kernel: &Kernel, shared: &ServerContext, face: FaceLabel) -> Kernel {
    let kernel = kernel.scope();
    kernel.layer(CallMetricsLayer::new(&shared.metrics, face));
    kernel
}
