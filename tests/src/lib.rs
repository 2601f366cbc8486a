//! What the test binaries share: a server, scripted engines, and raw Evergreen calls.
//!
//! The integration tests are one binary, `main.rs`; those that count the allocator's bytes are in `memory/`, because a
//! counting allocator is global. Everything here panics on failure, as tests do.

#![allow(
    clippy::unwrap_used,
    reason = "what a test's harness cannot do without is a failed test"
)]

pub mod gate;
pub mod http;
pub mod proxy;
pub mod raw;
pub mod socket;
pub mod steerers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use sapwood_engine::scripted::{self, Scripted};
use sapwood_engine::{Engine, EngineOwner};
use sapwood_kernel::session::test_functions;
use sapwood_kernel::{Kernel, Targets, model};
use sapwood_net::evergreen::{
    CallRequest, ClientSession, ClientSessionOptions, ServerAddress, SessionNode,
};
use sapwood_proto::evergreen::SessionLimits;
use sapwood_server::Server;
use sapwood_server::ServerContext;
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::charge_layer::AllowanceLayer;
use sapwood_server::auth::scopes::Scopes;
use sapwood_server::faces::controllers;
use sapwood_server::faces::evergreen::{self, Config};
use sapwood_server::faces::generate;
use sapwood_server::faces::lmtp::{self, LmtpService};
use sapwood_server::ops::call_metrics::CallMetricsLayer;
use sapwood_server::ops::drain;
use sapwood_server::ops::metrics::FaceLabel;
use sapwood_server::server;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A server on a port of its own; it stops when this is dropped.
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its handles.
    pub shared: ServerContext,
    /// LMTP over its models, for transports that are not HTTP's.
    pub lmtp: LmtpService,
    serving: JoinHandle<()>,
    _stop: oneshot::Sender<()>,
}

impl Running {
    /// A server over `kernel`'s functions.
    pub async fn start(kernel: Kernel, config: Config, keys: Vec<ApiKey>) -> Self {
        Self::start_with(server::Config::default(), kernel, config, keys).await
    }

    /// The same, with a configuration.
    pub async fn start_with(
        server: server::Config,
        kernel: Kernel,
        config: Config,
        keys: Vec<ApiKey>,
    ) -> Self {
        let faces = Faces {
            evergreen: config,
            ..Faces::default()
        };
        Self::start_faces(server, kernel, faces, keys).await
    }

    /// A server whose Triton face has this configuration.
    pub async fn generating(kernel: Kernel, config: generate::Config) -> Self {
        let faces = Faces {
            generate: config,
            ..Faces::default()
        };
        Self::start_faces(server::Config::default(), kernel, faces, Vec::new()).await
    }

    /// The same, with a configuration for every face.
    pub async fn start_faces(
        server: server::Config,
        kernel: Kernel,
        faces: Faces,
        keys: Vec<ApiKey>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let builder = Server::builder(server, keys).unwrap();
        let shared = builder.shared().clone();
        let kernel = kernel.scope();
        kernel.layer(AllowanceLayer);
        let counted = |face| {
            let kernel = kernel.scope();
            kernel.layer(CallMetricsLayer::new(&shared.metrics, face));
            kernel
        };
        let lmtp = LmtpService::new(shared.clone(), counted(FaceLabel::Lmtp), faces.lmtp);
        let evergreen = evergreen::face(shared.clone(), kernel.clone(), faces.evergreen);
        let generate = generate::face(shared.clone(), counted(FaceLabel::Generate), faces.generate);
        let runs = counted(FaceLabel::Controllers);
        let runs = controllers::face(shared.clone(), runs, faces.controllers);
        let builder = builder.face(evergreen).face(lmtp.face()).face(runs);
        let server = builder.face(generate).build().unwrap();
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(async {
            let departing = async {
                let _ = stopped.await;
            };
            server.serve(listener, departing).await;
        });
        Self {
            address,
            shared,
            lmtp,
            serving,
            _stop: stop,
        }
    }

    /// Ends it without closing connections, like a power cut.
    pub async fn kill(self) {
        self.serving.abort();
        // The error says that the task was aborted, as intended.
        let _ = self.serving.await;
    }

    /// A server with the test functions and those of `kernel`.
    pub async fn over(kernel: Kernel) -> Self {
        kernel.add_all(test_functions()).unwrap();
        Self::start(kernel, Config::default(), Vec::new()).await
    }

    /// A server with the test functions and these limits.
    pub async fn limited(limits: SessionLimits) -> Self {
        let config = Config {
            limits: Arc::new(limits),
            ..Config::default()
        };
        let kernel = Kernel::new();
        kernel.add_all(test_functions()).unwrap();
        Self::start(kernel, config, Vec::new()).await
    }

    /// A server with the test functions, whose drain has no grace.
    pub async fn that_drains_at_once() -> Self {
        let config = server::Config {
            drain: drain::Config {
                grace: Duration::ZERO,
                ..drain::Config::default()
            },
            ..server::Config::default()
        };
        let kernel = Kernel::new();
        kernel.add_all(test_functions()).unwrap();
        Self::start_with(config, kernel, Config::default(), Vec::new()).await
    }

    /// A server with only the test functions.
    pub async fn with_test_functions() -> Self {
        Self::over(Kernel::new()).await
    }

    /// Its address for our client.
    pub fn at(&self) -> ServerAddress {
        ServerAddress::new(format!("http://{}", self.address))
    }

    /// A session of our client.
    pub async fn session(&self) -> ClientSession {
        ClientSession::connect(&self.at(), ClientSessionOptions::default())
            .await
            .unwrap()
    }

    /// The same with partial failure (EV-930).
    pub async fn partial(&self) -> ClientSession {
        let options = ClientSessionOptions {
            partial_failure: true,
            ..ClientSessionOptions::default()
        };
        ClientSession::connect(&self.at(), options).await.unwrap()
    }
}

/// Settings of the faces.
#[derive(Clone, Debug, Default)]
pub struct Faces {
    /// Of Evergreen.
    pub evergreen: Config,
    /// Of LMTP.
    pub lmtp: lmtp::Config,
    /// Of Triton's generate extension.
    pub generate: generate::Config,
    /// Of controllers.
    pub controllers: controllers::Config,
}

/// A key with all scopes.
pub fn key(name: &str, secret: &str) -> ApiKey {
    ApiKey::new(name, secret, Scopes::ALL)
}

/// A model that plays `config`.
pub fn scripted(config: scripted::Config) -> Box<Scripted> {
    Box::new(Scripted::new(config).unwrap())
}

/// A kernel with one scripted model behind GENERATE.
pub fn with_model(engine: Engine) -> Kernel {
    let kernel = Kernel::new();
    kernel.add(model("parrot", engine)).unwrap();
    kernel
        .add(sapwood_kernel::generate(Targets::default()))
        .unwrap();
    kernel
}

/// An engine on a thread of its own.
pub fn spawned(config: scripted::Config) -> Engine {
    Engine::spawn(scripted(config), sapwood_engine::Config::default()).unwrap()
}

/// An engine that the test steps.
pub fn by_hand(config: scripted::Config) -> (EngineOwner, Engine) {
    Engine::by_hand(scripted(config), sapwood_engine::Config::default())
}

/// A call of `name` with these inputs and outputs.
pub fn request(name: &str, inputs: &[(&str, &SessionNode)], outputs: &[&str]) -> CallRequest {
    CallRequest {
        name: name.into(),
        inputs: inputs
            .iter()
            .map(|(name, node)| ((*name).to_owned(), (*node).clone()))
            .collect(),
        outputs: outputs.iter().map(|name| (*name).to_owned()).collect(),
        ..CallRequest::default()
    }
}

/// How long a test waits for something that must happen: only a hang takes so long, also on a busy machine.
pub const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Yields until `holds`; a test that waits longer than [`WAIT_LIMIT`] fails.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(WAIT_LIMIT, waiting)
        .await
        .unwrap_or_else(|_| panic!("{what}: never"));
}

/// The same on a virtual clock, which advances second by second, with a turn for every task at each. Returns how long
/// it took. Only for tests on one thread.
pub async fn in_time(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) -> Duration {
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    while !holds() {
        assert!(began.elapsed() < limit, "{what}: not in {limit:?}");
        tokio::time::advance(Duration::from_secs(1)).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    let took = began.elapsed();
    tokio::time::resume();
    took
}
