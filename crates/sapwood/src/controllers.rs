//! What steers the models of this process: native constraints, and uploaded controllers.
//!
//! The only place where engine and control meet. A name that begins with `sapwood:` is a constraint, any other is a module
//! or a tag.

#[cfg(target_os = "linux")]
mod runtime;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use etcetera::BaseStrategy;
use sapwood_control::compiler::{CompilerOptions, CompilerPlace};
use sapwood_control::controllers::{Controllers, ControllersOptions};
use sapwood_control::host::{Capabilities, Host, HostConfig, HostError, Program};
use sapwood_control::module::{ModuleLimits, check};
#[cfg(target_os = "linux")]
use sapwood_control::remote::RemoteNumbers;
use sapwood_control::steer::{
    Ends, FindProgram, ModelControllers, OneEnd, RequestLimits, StepObserver,
};
use sapwood_control::store::StoreOptions;
use sapwood_control::trie::{HostModel, TokenEntry};
use sapwood_engine::api::SharedVocabulary;
use sapwood_engine::constraint::{ConstraintConfig, ConstraintSource, MaskWorkers, NAME_PREFIX};
use sapwood_engine::stats::SteeringTimes;
use sapwood_engine::{Engine, tokenize_continuation};
use sapwood_kernel::Steering;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    ControllerStore, Steer, SteerCall, SteerRefusal, SteerSource, SteerUser, Token,
};
use sapwood_server::ops::metrics::{ControllerNumbers, ReadControllers};

use crate::cli::compile_controller;
use crate::config::controllers::ControllersConfig;
#[cfg(target_os = "linux")]
use crate::config::controllers::IsolationSetting;
use crate::failure::CliError;
#[cfg(target_os = "linux")]
use crate::failure::Exit;
use crate::trial;

/// The controllers and constraints of this process. Clones share them.
#[derive(Clone)]
pub(crate) struct ProcessControllers(Arc<SharedControllers>);

struct SharedControllers {
    config: ControllersConfig,
    host: Host,
    /// Opened when first needed: a `chat` in this process leaves no folder behind.
    store: OnceLock<OpenedStore>,
    workers: Arc<MaskWorkers>,
    /// Of what runs in other processes.
    #[cfg(target_os = "linux")]
    remote: Arc<RemoteNumbers>,
}

/// The modules, or why none can be stored, for people. Constraints work without them.
type OpenedStore = Result<Arc<Controllers<Host>>, String>;

impl ProcessControllers {
    /// The controllers of a configuration.
    ///
    /// # Errors
    /// The Wasm engine does not run on this machine.
    pub(crate) fn new(config: &ControllersConfig) -> Result<Self, CliError> {
        Ok(Self(Arc::new(SharedControllers {
            config: config.clone(),
            host: host(config).map_err(|why| CliError::new(why.to_string()))?,
            store: OnceLock::new(),
            workers: Arc::new(MaskWorkers::new()),
            #[cfg(target_os = "linux")]
            remote: Arc::default(),
        })))
    }

    /// The uploaded modules, for the face that manages them; `None` where they cannot be stored. A folder in the user's
    /// state folder that cannot be used is only a warning, since most servers never run a controller.
    ///
    /// # Errors
    /// [`CliError::usage`] if a folder was configured and cannot be used.
    pub(crate) fn store(&self) -> Result<Option<Arc<dyn ControllerStore>>, CliError> {
        match self.0.opened() {
            Ok(store) => Ok(Some(Arc::clone(store) as Arc<dyn ControllerStore>)),
            Err(why) if self.0.config.dir.is_some() => {
                Err(CliError::usage(format!("controllers.dir: {why}")))
            }
            Err(why) => {
                tracing::warn!(%why, "controllers cannot be stored; set controllers.dir");
                Ok(None)
            }
        }
    }

    /// How the calls of a model are steered. May wait for a runtime in another process.
    ///
    /// # Errors
    /// The configured runtime cannot be used for this model.
    pub(crate) async fn steering(&self, engine: &Engine) -> Result<Steering, CliError> {
        let (controllers, engine) = (self.clone(), engine.clone());
        let steering = tokio::task::spawn_blocking(move || controllers.steering_here(&engine));
        let ended = |error: tokio::task::JoinError| CliError::new(error.to_string());
        steering.await.map_err(ended)?
    }

    fn steering_here(&self, engine: &Engine) -> Result<Steering, CliError> {
        let constraints = ConstraintConfig {
            fast_forward: self.0.config.ff_constraints,
            memory_bytes: usize::try_from(self.0.config.constraint_memory_bytes)
                .unwrap_or(usize::MAX),
            ..ConstraintConfig::default()
        };
        let vocabulary = engine.vocabulary();
        let times = &engine.stats().steering;
        let workers = Arc::clone(&self.0.workers);
        let constraints = ConstraintSource::new(Arc::clone(vocabulary), constraints, workers);
        let source = Arc::new(ModelSteering {
            shared: Arc::clone(&self.0),
            constraints: Arc::new(constraints.with_times(Arc::clone(times))),
            times: Arc::clone(times),
            truncates: engine.info().truncates,
            vocabulary: Arc::clone(vocabulary),
            modules: OnceLock::new(),
            ends: OnceLock::new(),
        });
        source.start_runtime()?;
        Ok(Steering {
            hold: self.0.config.hold.policy(),
            ..Steering::new(source)
        })
    }

    /// What the metrics say of all controllers, wherever they run.
    pub(crate) fn numbers(&self) -> ReadControllers {
        let host = self.0.host.clone();
        #[cfg(target_os = "linux")]
        let remote = Arc::clone(&self.0.remote);
        Arc::new(move || {
            let here = ControllerNumbers {
                live: host.live().into(),
                memory_bytes: host.memory_bytes() as u64,
                restarts: 0,
            };
            #[cfg(target_os = "linux")]
            let here = ControllerNumbers {
                live: here.live + remote.sequences(),
                memory_bytes: here.memory_bytes + remote.memory_bytes(),
                restarts: remote.restarts(),
            };
            here
        })
    }
}

/// A module that is stored nowhere, for `sapwood controller test`.
pub(crate) struct TestedModule {
    host: Host,
    program: Program,
    forks: u32,
}

impl TestedModule {
    /// Compiles a module for this host, under the limits of the configuration.
    ///
    /// # Errors
    /// For people: what is wrong with it.
    pub(crate) fn load(
        config: &ControllersConfig,
        host: Host,
        module: &[u8],
    ) -> Result<Self, String> {
        let limits = ModuleLimits {
            memory_bytes: config.memory_bytes,
            ..ModuleLimits::default()
        };
        let checked = check(module, &limits).map_err(|why| why.to_string())?;
        let compiled = host.compile(&checked).map_err(|why| why.to_string())?;
        let program = host
            .load(&checked, &compiled)
            .map_err(|why| why.to_string())?;
        Ok(Self {
            host,
            program,
            forks: config.forks,
        })
    }

    /// Steers a model by it, under any name.
    pub(crate) fn source(&self, engine: &Engine) -> ModelControllers {
        let program = self.program.clone();
        let find = move |_: SteerUser<'_>, _: &str| -> Result<Program, SteerRefusal> {
            Ok(program.clone())
        };
        let vocabulary = engine.vocabulary();
        // Modules may follow constraints of the host here as on a server (AI-1007).
        let constraints = ConstraintSource::new(
            Arc::clone(vocabulary),
            ConstraintConfig::default(),
            Arc::new(MaskWorkers::new()),
        );
        let model =
            host_model(vocabulary, ControlNames::Text).with_constraints(Arc::new(constraints));
        model_controllers(
            &self.host,
            Arc::new(find),
            Arc::new(model),
            engine.info().truncates,
            self.forks,
        )
    }
}

/// What a runtime in another process is started with for a model.
#[cfg(target_os = "linux")]
struct ModelParts {
    model: Arc<HostModel>,
    truncates: bool,
    step_observer: StepObserver,
}

impl SharedControllers {
    fn opened(&self) -> &OpenedStore {
        self.store
            .get_or_init(|| store(&self.config, &self.host).map(Arc::new))
    }
}

fn host(config: &ControllersConfig) -> Result<Host, HostError> {
    Host::new(host_config(config))
}

/// The limits of controllers.
pub(crate) fn host_config(config: &ControllersConfig) -> HostConfig {
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    HostConfig {
        memory_bytes: bytes(config.memory_bytes),
        memory_total_bytes: bytes(config.memory_bytes_total),
        init_time: Duration::from_millis(config.init_ms),
        step_time: Duration::from_millis(config.step_ms),
        random: config.random.of_host(),
        fuel: (config.fuel > 0).then_some(config.fuel),
        ..HostConfig::default()
    }
}

fn store(config: &ControllersConfig, host: &Host) -> Result<Controllers<Host>, String> {
    let folder = folder(config)?;
    // Compiled in a child: a compiler that crashes or never ends must not take the server with it (AI-732).
    let program = trial::program().map_err(|why| why.to_string())?;
    let child = compile_controller::command(program, config.fuel > 0);
    let mut store = StoreOptions::new(folder);
    store.bytes_max = config.store_bytes;
    let mut options =
        ControllersOptions::new(store, CompilerOptions::new(CompilerPlace::Child(child)));
    options.limits = ModuleLimits {
        memory_bytes: config.memory_bytes,
        ..ModuleLimits::default()
    };
    Controllers::open(host.clone(), options).map_err(|why| why.to_string())
}

/// The folder of modules and tags.
fn folder(config: &ControllersConfig) -> Result<PathBuf, String> {
    let configured = config.dir.clone().or_else(default_folder);
    configured.ok_or_else(|| "this user has no state folder".to_owned())
}

fn default_folder() -> Option<PathBuf> {
    let places = etcetera::choose_base_strategy().ok()?;
    Some(places.state_dir()?.join("sapwood").join("controllers"))
}

/// The two sources of one model.
struct ModelSteering {
    shared: Arc<SharedControllers>,
    constraints: Arc<ConstraintSource>,
    /// Where the steps of its controllers are counted.
    times: Arc<SteeringTimes>,
    truncates: bool,
    vocabulary: SharedVocabulary,
    /// Made for the first request with a controller: it holds a copy of every token's bytes.
    modules: OnceLock<Box<dyn SteerSource>>,
    /// Made with them.
    ends: OnceLock<Arc<Ends>>,
}

impl SteerSource for ModelSteering {
    fn open(&self, call: SteerCall<'_>) -> Result<Box<dyn Steer>, SteerRefusal> {
        if call.controller.starts_with(NAME_PREFIX) {
            return SteerSource::open(&*self.constraints, call);
        }
        let steer = self.modules.get_or_init(|| self.controllers()).open(call)?;
        if self.shared.config.runtime.is_some() {
            // It has a tokenizer of its own, which may know another end.
            return Ok(steer);
        }
        let ends = self.ends.get_or_init(|| Arc::new(ends(&self.vocabulary)));
        Ok(OneEnd::open(steer, Arc::clone(ends)))
    }
}

/// What finds modules where none can be stored.
fn nothing_stored() -> SteerRefusal {
    // The cause names a folder of this machine: it is in the log.
    SteerRefusal {
        code: Code::Unavailable,
        reason: ErrorReason::CONTROLLERS_UNAVAILABLE,
        message: "this server stores no controllers".to_owned(),
    }
}

impl ModelSteering {
    /// Starts the configured runtime, which may turn out to be of another model. The own one starts when it is needed.
    fn start_runtime(&self) -> Result<(), CliError> {
        #[cfg(target_os = "linux")]
        if let Some(runtime) = &self.shared.config.runtime {
            let started = runtime::configured(&self.shared, runtime, self.parts());
            let controllers = started.map_err(|why| {
                CliError::exit(Exit::Model, format!("controllers.runtime: {why}"))
            })?;
            // Set once, before the first request.
            let _ = self.modules.set(Box::new(controllers));
        }
        Ok(())
    }

    fn model(&self) -> Arc<HostModel> {
        Arc::new(
            host_model(&self.vocabulary, ControlNames::Text)
                .with_constraints(self.constraints.clone()),
        )
    }

    fn step_observer(&self) -> StepObserver {
        let times = Arc::clone(&self.times);
        Arc::new(move |time| times.controller_step(time))
    }

    #[cfg(target_os = "linux")]
    fn parts(&self) -> ModelParts {
        ModelParts {
            model: self.model(),
            truncates: self.truncates,
            step_observer: self.step_observer(),
        }
    }

    fn controllers(&self) -> Box<dyn SteerSource> {
        #[cfg(target_os = "linux")]
        if self.shared.config.isolation == IsolationSetting::Process {
            match runtime::own(&self.shared, self.parts()) {
                Ok(controllers) => return Box::new(controllers),
                Err(why) => {
                    tracing::error!(%why, "controllers cannot be run in a process of their own")
                }
            }
            return Box::new(NoControllers);
        }
        Box::new(self.controllers_here())
    }

    fn controllers_here(&self) -> ModelControllers {
        let shared = Arc::clone(&self.shared);
        let find = move |user: SteerUser<'_>, name: &str| -> Result<Program, SteerRefusal> {
            match shared.opened() {
                Ok(store) => store.find(user, name),
                Err(_) => Err(nothing_stored()),
            }
        };
        model_controllers(
            &self.shared.host,
            Arc::new(find),
            self.model(),
            self.truncates,
            self.shared.config.forks,
        )
        .with_step_observer(self.step_observer())
    }
}

/// The controllers of a model.
fn model_controllers(
    host: &Host,
    programs: Arc<dyn FindProgram>,
    model: Arc<HostModel>,
    truncates: bool,
    forks: u32,
) -> ModelControllers {
    let capabilities = Capabilities {
        // Elsewhere tokens cannot be taken back (AI-822).
        backtrack: truncates,
        ..Capabilities::ALL
    };
    let limits = RequestLimits {
        forks,
        ..RequestLimits::default()
    };
    ModelControllers::new(host.clone(), programs, model, capabilities, limits)
}

/// A source of a model whose controllers cannot be run; the reason is in the log.
#[cfg(target_os = "linux")]
struct NoControllers;

#[cfg(target_os = "linux")]
impl SteerSource for NoControllers {
    fn open(&self, _: SteerCall<'_>) -> Result<Box<dyn Steer>, SteerRefusal> {
        Err(nothing_stored())
    }
}

/// What the names of control tokens become in texts that controllers tokenise.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControlNames {
    /// Text like other text: a controller often tokenises what a user wrote.
    Text,
    /// The tokens, as in the reference runtime, whose controllers write prompts of conversations.
    Tokens,
}

/// A vocabulary as controllers see it.
pub(crate) fn host_model(vocabulary: &SharedVocabulary, names: ControlNames) -> HostModel {
    let ids = 0..Token::try_from(vocabulary.size()).unwrap_or(Token::MAX);
    let entry = |id: Token| {
        if vocabulary.is_special(id) {
            let name = vocabulary.name(id).unwrap_or_else(|| format!("<{id}>"));
            return TokenEntry::special(name);
        }
        TokenEntry::text(vocabulary.bytes(id))
    };
    let tokenizer = Arc::clone(vocabulary);
    HostModel::new(
        ids.map(entry).collect(),
        ends(vocabulary).known,
        move |text: &str| {
            let special = names == ControlNames::Tokens;
            // A vocabulary that cannot spell the text does what it can.
            tokenize_continuation(&*tokenizer, text, special)
                .unwrap_or_else(|| tokenizer.tokenize(text, special))
        },
    )
}

/// The tokens that end a text. The interface of controllers has room for one, which is that with which the model ends its
/// turns.
fn ends(vocabulary: &SharedVocabulary) -> Ends {
    let ids = 0..Token::try_from(vocabulary.size()).unwrap_or(Token::MAX);
    let mut others: Vec<Token> = ids.filter(|&id| vocabulary.is_end(id)).collect();
    let turn = vocabulary.end_of_turn().filter(|end| others.contains(end));
    let known = turn.or_else(|| others.first().copied()).unwrap_or_default();
    others.retain(|&end| end != known);
    Ends { known, others }
}
