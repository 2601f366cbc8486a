//! Evergreen: sessions of a kernel's functions, over gRPC (`service`) and over WebSockets (`socket`).

mod context;
mod detached;
mod options;
mod recorder;
mod service;
mod socket;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use axum::body::Body;
use http::Request;
use sapwood_kernel::Kernel;
use sapwood_kernel::session::reference::ReferenceFetch;
use sapwood_kernel::session::{self, VisibleModels};
use sapwood_net::evergreen::grpc;
use sapwood_proto::evergreen::{Dialect, Reason, SessionLimits, Status};
use sapwood_proto::generated::DESCRIPTORS;
use sapwood_proto::session::RetentionPolicy;

use self::context::EvergreenContext;
use self::options::RequestedOptions;
use self::service::EvergreenService;
use self::socket::EvergreenSockets;
use crate::auth::caller::Caller;
use crate::auth::rate_limit::TokenMeter;
use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::context::{Face, ServerContext};
use crate::faces::socket_dispatch::{self, SocketProtocol};
use crate::http::rejection::Rejection;
use crate::http::route::Route;
use crate::ops::metrics;

/// The status of a session whose message was lost to a panic of the decoder. The panic was counted where it was caught.
fn unread() -> Status {
    Status::new(Reason::Function, "the server could not read a message")
}

/// The settings of this face.
#[derive(Clone, Debug)]
pub struct Config {
    /// Sessions at a time; above it a call is refused with UNAVAILABLE.
    pub sessions: usize,
    /// How many of them one key may have, or one network address where no key is needed.
    pub sessions_each: usize,
    /// Bytes that all sessions together may retain; a session that needs more ends with `RETAINED_LIMIT` (EV-801).
    pub retained_bytes: u64,
    /// Bytes that the sessions of one key, or of one address without a key, may retain together.
    pub retained_bytes_each: u64,
    /// The limits of one session.
    pub limits: Arc<SessionLimits>,
    /// The target of GENERATE where an action names none (EV-503).
    pub default_target: Option<String>,
    /// Fetches external references; without it only `data:` is resolved (EV-410).
    pub references: Option<Arc<dyn ReferenceFetch>>,
    /// Sessions at a time that can be resumed after their connection was lost (EV-940), with or without one now; those
    /// above are sessions without resume. 0 turns that off.
    pub resumable_sessions: usize,
    /// How many of those one key may have, or one network address where no key is needed, so that no caller takes all.
    pub resumable_sessions_each: usize,
    /// Ready fragments are joined into messages (EV-706); off for the gated bench alone (D-33).
    pub coalesce: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            sessions: 20_000,
            sessions_each: 10_000,
            retained_bytes: 4 << 30,
            retained_bytes_each: 2 << 30,
            limits: Arc::default(),
            default_target: None,
            references: None,
            resumable_sessions: 1_000,
            resumable_sessions_each: 250,
            coalesce: true,
        }
    }
}

impl Config {
    /// The extensions that are enabled in a dialect.
    fn extensions(&self, dialect: Dialect) -> &'static [&'static str] {
        // Either limit at 0 turns resuming off, and a client must not be offered what no session can get.
        let positions = self.resumable_sessions.min(self.resumable_sessions_each);
        let resume = dialect.resumes() && positions > 0;
        session::extensions(resume, dialect != Dialect::Msgpack)
    }

    fn session(&self, dialect: Dialect, options: RequestedOptions) -> session::SessionOptions {
        session::SessionOptions {
            dialect,
            limits: Arc::clone(&self.limits),
            metadata: options.metadata.unwrap_or_else(|| dialect.metadata()),
            // Its clients know no other behaviour: a failed action ends by itself, and the session goes on (EV-107,
            // EV-737).
            partial_failure: options.partial_failure || dialect == Dialect::Msgpack,
            coalesce: self.coalesce,
            retain: options.retain.unwrap_or_else(|| retain(dialect)),
            timeout: options.timeout,
            default_target: self.default_target.clone(),
            // Set where the session opens, as the token is: both depend on the caller.
            models: VisibleModels::default(),
            references: self.references.clone(),
            token: None,
            extensions: self.extensions(dialect),
            // `proto` has no randomness of its own. The standard library seeds every hasher from the system's.
            entropy: RandomState::new().hash_one(0_u8),
        }
    }
}

/// The models that a caller may use. Looked up at each use, so that a reloaded key changes its open sessions.
fn known_models(allowance: Option<Arc<TokenMeter>>) -> VisibleModels {
    let Some(allowance) = allowance else {
        return VisibleModels::default();
    };
    VisibleModels::by(move || allowance.limits().models.clone())
}

/// The retention of a session whose client has not asked for one (EV-955).
const fn retain(dialect: Dialect) -> RetentionPolicy {
    match dialect {
        // Its clients know no options and keep one session for as long as they run, and the nodes of a finished action
        // are released with it anyway (D-55, EV-741).
        Dialect::Msgpack => RetentionPolicy::Unread,
        Dialect::Grpc | Dialect::Protobuf | Dialect::Json => RetentionPolicy::Session,
    }
}

/// The face over the functions of `kernel`.
#[must_use]
pub fn face(shared: ServerContext, kernel: Kernel, config: Config) -> Face {
    let options = config.session(Dialect::Grpc, RequestedOptions::default());
    let listed = kernel.clone();
    // The same listing as LIST_ACTIONS, without a session, so that a client can look before it opens one.
    let listing = move |request: Request<Body>| async move {
        let models = known_models(Caller::of(request.extensions())?.allowance.clone());
        let options = session::SessionOptions { models, ..options };
        Ok::<_, Rejection>(axum::Json(session::listing(&listed, &options)))
    };
    let drain = shared.drain.clone();
    let context = Arc::new(EvergreenContext::new(shared, kernel, config));
    let sockets: Arc<dyn SocketProtocol> = Arc::new(EvergreenSockets(Arc::clone(&context)));
    let upgrades = socket_dispatch::route(vec![Arc::clone(&sockets)], socket::KEEPALIVE, drain);
    let access = RouteAccess::Needs(KeyScope::Infer);
    let routes = vec![
        Route::http("/evergreen/v2/actions", access, axum::routing::get(listing)),
        Route::http("/evergreen", access, upgrades),
        Route::grpc(grpc::PATH, access, EvergreenService(Arc::clone(&context))),
    ];
    Face {
        name: metrics::FaceLabel::Evergreen,
        routes,
        root: Some(sockets),
        descriptors: vec![DESCRIPTORS],
        services: vec![grpc::SERVICE],
    }
}
