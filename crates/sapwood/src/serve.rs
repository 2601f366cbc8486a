//! [`Serve`]: serves a program's own functions on one port, over every face. The command `sapwood serve` is in the
//! binary.

use std::future::Future;
use std::io;
use std::net::SocketAddr;

use sapwood_kernel::Kernel;
use sapwood_proto::secret::Secret;
use sapwood_server::Config;
use sapwood_server::Server;
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::charge_layer::AllowanceLayer;
use sapwood_server::auth::rate_limit::{RateLimits, TokenMeter};
use sapwood_server::auth::scopes::{KeyFingerprint, Scopes};
use sapwood_server::faces::evergreen;
use sapwood_server::faces::generate;
use sapwood_server::faces::lmtp;
use sapwood_server::faces::lmtp::LmtpService;
use sapwood_server::http::origin;
use sapwood_server::ops::call_metrics::CallMetricsLayer;
use sapwood_server::ops::metrics::FaceLabel;
use sapwood_server::server::BuildError;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// A server of a program's own functions: the kernel and the address.
#[derive(Clone)]
pub struct Serve {
    kernel: Kernel,
    listen: String,
    key: Option<Secret>,
}

/// The errors of [`Serve`].
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {cause}")]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        cause: io::Error,
    },
    /// Other machines could call, and no key is required.
    #[error("{0} can be reached from other machines: give a key")]
    Open(SocketAddr),
    /// The server cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The system provides no runtime, or no signals.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// A server that is bound and does not answer yet.
pub struct BoundServer {
    server: Server,
    listener: TcpListener,
    address: SocketAddr,
}

impl Serve {
    /// Serves the functions of `kernel` on 127.0.0.1:8000, for this machine alone.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        Self {
            kernel,
            listen: "127.0.0.1:8000".into(),
            key: None,
        }
    }

    /// Listens on another `HOST:PORT`. One that other machines can reach needs a key.
    #[must_use]
    pub fn listen(mut self, address: impl Into<String>) -> Self {
        self.listen = address.into();
        self
    }

    /// Requires this key from callers.
    #[must_use]
    pub fn key(mut self, key: impl Into<Secret>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Serves until SIGTERM or SIGINT, with a runtime of its own, and drains running calls.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn run(self) -> Result<(), ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            // Before the address is bound, so that a signal during the start is not the default one, which kills.
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            let bound = self.bind().await?;
            bound
                .run_until(async {
                    // Both arms may be cancelled: one signal is enough.
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                    }
                })
                .await;
            Ok(())
        })
    }

    /// Binds the address, within a runtime.
    ///
    /// # Errors
    /// [`ServeError`].
    pub async fn bind(self) -> Result<BoundServer, ServeError> {
        let failed = |cause| ServeError::Listen {
            address: self.listen.clone(),
            cause,
        };
        let listener = TcpListener::bind(&self.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        // The bound address and not the given one, which may be a name. `::ffff:127.0.0.1` is loopback too.
        let loopback = address.ip().to_canonical().is_loopback();
        if !loopback && self.key.is_none() {
            return Err(ServeError::Open(address));
        }
        let config = Config {
            origin: origin::Config {
                loopback,
                ..origin::Config::default()
            },
            ..Config::default()
        };
        let server = built(&self.kernel, config, self.key.as_ref())?;
        Ok(BoundServer {
            server,
            listener,
            address,
        })
    }
}

impl BoundServer {
    /// The bound address.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown` resolves, and drains running calls.
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) {
        self.server.serve(self.listener, shutdown).await;
    }
}

/// Builds a server with every face over the functions of `kernel`.
fn built(kernel: &Kernel, config: Config, key: Option<&Secret>) -> Result<Server, BuildError> {
    let keys = key.map(|key| ApiKey {
        name: "default".into(),
        fingerprint: Some(KeyFingerprint::of(key.expose())),
        certificate: None,
        scopes: Scopes::ALL,
        // A meter without limits, as `auth.key` of the configuration has.
        allowance: Some(TokenMeter::new("default", RateLimits::default()).into()),
    });
    let builder = Server::builder(config, keys.into_iter().collect())?;
    let shared = builder.shared().clone();
    shared.metrics.watch_kernel(kernel.clone());
    // A scope for each face, so that the functions are shared and the layers are not.
    let counted = |face| {
        let kernel = kernel.scope();
        kernel.layer(AllowanceLayer);
        kernel.layer(CallMetricsLayer::new(&shared.metrics, face));
        kernel
    };
    let evergreen = evergreen::face(
        shared.clone(),
        counted(FaceLabel::Evergreen),
        evergreen::Config::default(),
    );
    let lmtp = LmtpService::new(
        shared.clone(),
        counted(FaceLabel::Lmtp),
        lmtp::Config::default(),
    );
    let generate = generate::face(
        shared.clone(),
        counted(FaceLabel::Generate),
        generate::Config::default(),
    );
    builder
        .face(evergreen)
        .face(lmtp.face())
        .face(generate)
        .build()
}
