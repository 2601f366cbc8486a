//! Controllers over HTTP: uploads, tags and runs, in the form that the client `aici` asks for them (AI-901 to AI-916).
//!
//! ```text
//!   POST /v1/controllers, …/tags ─► the store, on the pool for slow work ─► JSON
//!   POST /v1/run ─► a watched call of the model ─► RunSteps ─► one event for each step
//! ```
//!
//! With several models each has the same routes under `/aici/MODEL/`.

mod body;
mod endpoint;
mod event_stream;
mod live_runs;
mod models;
mod modules;
mod refusals;
mod run;
mod run_request;
mod run_steps;
mod run_variables;
mod upload_turns;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{RawPathParams, Request};
use axum::routing::{MethodFilter, MethodRouter};
use sapwood_kernel::Kernel;
use sapwood_proto::steer::ControllerStore;

use self::endpoint::{Action, ControllersContext};
use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::context::{Face, ServerContext};
use crate::http::route::Route;
use crate::ops::metrics;

/// The settings of this face.
#[derive(Clone)]
pub struct Config {
    /// Where controllers are stored. Without it nothing can be uploaded, and only native constraints run.
    pub store: Option<Arc<dyn ControllerStore>>,
    /// Bytes of a module; over it 413.
    pub module_bytes: usize,
    /// Bytes of any other body; over it 413.
    pub body_bytes: usize,
    /// A stream that has had no event for this long gets an empty line (AI-913).
    pub keep_alive: Duration,
    /// How long a run may take to its first step before its response begins, without knowing whether it is refused.
    pub head_wait: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            store: None,
            module_bytes: 64 << 20,
            body_bytes: 16 << 20,
            keep_alive: Duration::from_secs(15),
            head_wait: Duration::from_secs(15),
        }
    }
}

// By hand, because a `dyn ControllerStore` has no `Debug`.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("store", &self.store.is_some())
            .field("module_bytes", &self.module_bytes)
            .field("body_bytes", &self.body_bytes)
            .finish_non_exhaustive()
    }
}

/// The face over the models of `kernel`.
#[must_use]
pub fn face(shared: ServerContext, kernel: Kernel, config: Config) -> Face {
    let context = Arc::new(ControllersContext::new(shared, kernel, config));
    let on = |methods: &[(MethodFilter, Action)]| {
        let routed = methods.iter().copied();
        routed.fold(MethodRouter::new(), |all, (method, action)| {
            let context = Arc::clone(&context);
            let answer = move |params: RawPathParams, request: Request| {
                // Boxed: what waits in it is large, and a connection holds one for each request.
                Box::pin(endpoint::answer(
                    Arc::clone(&context),
                    action,
                    params,
                    request,
                ))
            };
            all.on(method, answer)
        })
    };
    let info = on(&[(MethodFilter::GET, Action::Info)]);
    let mut routes = vec![Route::http("/proxy/info", CALL, info)];
    // A client is given the prefix of a model, and asks for everything under it.
    for prefix in ["", "/aici/{model}"] {
        let described = ROUTES.iter();
        routes.extend(described.map(|(path, access, methods)| {
            Route::http(format!("{prefix}{path}"), *access, on(methods))
        }));
    }
    Face {
        name: metrics::FaceLabel::Controllers,
        routes,
        root: None,
        descriptors: Vec::new(),
        services: Vec::new(),
    }
}

const CALL: RouteAccess = RouteAccess::Needs(KeyScope::Infer);
const CONTROL: RouteAccess = RouteAccess::Needs(KeyScope::Control);

/// A path, the least access to it, and its methods.
type PathMethods = (&'static str, RouteAccess, &'static [(MethodFilter, Action)]);

/// The routes of a model.
const ROUTES: &[PathMethods] = &[
    ("/v1/models", CALL, &[(MethodFilter::GET, Action::Models)]),
    ("/v1/run", CALL, &[(MethodFilter::POST, Action::Run)]),
    (
        "/v1/run/{name}/vars",
        CALL,
        &[(MethodFilter::GET, Action::RunVariables)],
    ),
    (
        "/v1/run/{name}/vars/{variable}",
        CALL,
        &[
            (MethodFilter::GET, Action::RunVariable),
            (MethodFilter::PUT, Action::SetRunVariable),
        ],
    ),
    // Whoever runs controllers by tag may list tags; the handler asks for more to set them.
    (
        "/v1/controllers/tags",
        CALL,
        &[
            (MethodFilter::GET, Action::Tags),
            (MethodFilter::POST, Action::SetTags),
        ],
    ),
    (
        "/v1/controllers/tags/{name}",
        CONTROL,
        &[(MethodFilter::DELETE, Action::DeleteTag)],
    ),
    (
        "/v1/controllers",
        CONTROL,
        &[
            (MethodFilter::GET, Action::Modules),
            (MethodFilter::POST, Action::Upload),
        ],
    ),
    (
        "/v1/controllers/{name}",
        CONTROL,
        &[
            (MethodFilter::GET, Action::Module),
            (MethodFilter::DELETE, Action::DeleteModule),
        ],
    ),
];
