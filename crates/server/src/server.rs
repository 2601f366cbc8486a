//! The server: faces and operational routes behind one middleware, on one common port and on ports that serve a part.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio_util::task::AbortOnDropHandle;

use crate::auth::{ApiKey, Authenticator};
use crate::context::{Face, ServerContext};
use crate::faces::socket_dispatch;
use crate::http::MiddlewareContext;
use crate::http::body_budget::{self, BodyBudget};
use crate::http::origin;
use crate::http::route::Route;
use crate::http::timeouts;
use crate::listener;
use crate::listener::descriptors::DescriptorCheck;
use crate::listener::port_purpose::PortPurpose;
use crate::listener::socket::ListeningSocket;
use crate::listener::tls::Tls;
use crate::ops;
use crate::ops::drain::{self, Drain, DrainOutcome};
use crate::ops::grpc;
use crate::ops::health::Health;
use crate::ops::metrics::{self, ServerMetrics};

/// The settings of the server, with their defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// Limits of the listener.
    pub listener: listener::Config,
    /// Times of the drain.
    pub drain: drain::Config,
    /// Allowed origins and hosts.
    pub origin: origin::Config,
    /// Timeouts of requests.
    pub timeouts: timeouts::Config,
    /// Limits of the byte budget.
    pub body_budget: body_budget::Config,
    /// Bytes of a refused request's body that are read before its answer is sent; at most 1 MiB without a valid key.
    pub drain_bytes: u64,
    /// A busy engine that makes no step for this long is stuck.
    pub engine_watchdog: Duration,
    /// `/metrics` needs no key.
    pub metrics_public: bool,
    /// A WebSocket handshake may have its key as `?key=` (EV-704).
    pub query_key: bool,
    /// TLS on the listener; without it, plain HTTP. Shared, so that its owner can reload it.
    pub tls: Option<Arc<Tls>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listener: listener::Config::default(),
            drain: drain::Config::default(),
            origin: origin::Config::default(),
            timeouts: timeouts::Config::default(),
            body_budget: body_budget::Config::default(),
            drain_bytes: 128 << 20,
            engine_watchdog: Duration::from_secs(30),
            metrics_public: false,
            query_key: false,
            tls: None,
        }
    }
}

/// Why a server could not be built; each is a bug of the program and not an error of the configuration.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// Two metrics of one name.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// A file descriptor set that cannot be decoded.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Collects the faces of a server.
pub struct Builder {
    config: Config,
    shared: ServerContext,
    faces: Vec<Face>,
}

impl Builder {
    /// Begins with the handles that faces are given.
    ///
    /// # Errors
    /// [`BuildError::Metrics`].
    pub fn new(config: Config, keys: Vec<ApiKey>) -> Result<Self, BuildError> {
        let drain = Drain::new(config.drain);
        let shared = ServerContext {
            auth: Arc::new(auth(&config, keys)),
            metrics: Arc::new(ServerMetrics::new()?),
            health: Arc::new(Health::new(drain.clone(), config.engine_watchdog)),
            drain,
        };
        Ok(Self {
            config,
            shared,
            faces: Vec::new(),
        })
    }

    /// What faces are given.
    #[must_use]
    pub const fn shared(&self) -> &ServerContext {
        &self.shared
    }

    /// Adds a face.
    #[must_use]
    pub fn face(mut self, face: Face) -> Self {
        self.faces.push(face);
        self
    }

    /// The server, ready to serve.
    ///
    /// # Errors
    /// [`BuildError::Reflection`].
    pub fn build(self) -> Result<Server, BuildError> {
        let Self {
            config,
            shared,
            mut faces,
        } = self;
        // While the faces are whole: they are taken apart below.
        let (grpc, reporter) = grpc::routes(&faces, &shared.metrics)?;
        let services = faces
            .iter()
            .flat_map(|face| &face.services)
            .copied()
            .collect();
        let sockets = faces.iter_mut().filter_map(|face| face.root.take());
        let sockets: Vec<_> = sockets.collect();
        let root = (!sockets.is_empty()).then(|| {
            socket_dispatch::route(sockets, socket_dispatch::LONG_WAIT, shared.drain.clone())
        });
        let bodies = BodyBudget::new(
            config.body_budget,
            shared.metrics.body_bytes.clone(),
            shared.metrics.rejected.with_label_values(&["body"]),
        );
        let middleware = Arc::new(MiddlewareContext {
            bodies: Arc::new(bodies),
            shared: shared.clone(),
            origin: config.origin.clone(),
            timeouts: config.timeouts,
            headers: config.listener.headers,
            drain_bytes: config.drain_bytes,
        });
        let ours = ops::routes(shared.clone(), root, config.metrics_public);
        let ours = ours.into_iter().chain(grpc);
        let ours = ours.map(|route| (metrics::FaceLabel::Http, route));
        let theirs = faces.into_iter().flat_map(|face| {
            let routes = face.routes.into_iter();
            routes.map(move |route| (face.name, route))
        });
        let table: Vec<(metrics::FaceLabel, Route)> = ours.chain(theirs).collect();
        // The table as it is served, for the test that walks every route without a key (D-45).
        let listed = table.iter().map(|(_, route)| route.clone()).collect();
        let routes = table
            .into_iter()
            // Each route is a router of its own with the middleware inside. One layer around all of them would not know which
            // route was matched, and so not which scope it needs.
            .fold(middleware.fallback(), |all, (face, route)| {
                all.merge(middleware.around(face, route))
            });
        Ok(Server {
            config,
            shared,
            routes,
            listed,
            reporter,
            services,
            also: Vec::new(),
        })
    }
}

fn auth(config: &Config, keys: Vec<ApiKey>) -> Authenticator {
    let certificates = config.tls.as_ref().is_some_and(|tls| tls.asks_clients());
    Authenticator::new(keys)
        .with_query_key(config.query_key)
        .with_certificates(certificates)
}

/// A server that can be run.
pub struct Server {
    config: Config,
    shared: ServerContext,
    routes: Router,
    listed: Vec<Route>,
    reporter: grpc::Reporter,
    services: Vec<&'static str>,
    also: Vec<(ListeningSocket, PortPurpose)>,
}

impl Server {
    /// Begins to build a server; see [`Builder::new`].
    ///
    /// # Errors
    /// [`BuildError`].
    pub fn builder(config: Config, keys: Vec<ApiKey>) -> Result<Builder, BuildError> {
        Builder::new(config, keys)
    }

    /// The shared handles of this server, for code that loads models beside it.
    #[must_use]
    pub const fn shared(&self) -> &ServerContext {
        &self.shared
    }

    /// All routes: the table that the router was built from.
    #[must_use]
    pub fn routes(&self) -> &[Route] {
        &self.listed
    }

    /// Serves on this socket as well, for one purpose (TR-908).
    #[must_use]
    pub fn also(mut self, socket: impl Into<ListeningSocket>, purpose: PortPurpose) -> Self {
        self.also.push((socket.into(), purpose));
        self
    }

    /// Serves until `shutdown` resolves and the drain that follows is over.
    pub async fn serve(
        mut self,
        socket: impl Into<ListeningSocket>,
        shutdown: impl Future<Output = ()>,
    ) -> DrainOutcome {
        // Before the listener is made, whose limit of connections this may lower.
        self.fit_descriptors();
        let shared = self.shared.clone();
        let departing = async {
            shutdown.await;
            shared.metrics.draining.set(1);
            tracing::info!(open = shared.drain.open(), "draining");
            let outcome = shared.drain.run().await;
            tracing::info!(cut = outcome.cut, "drained");
            outcome
        };
        let following = self
            .config
            .tls
            .clone()
            .map(|tls| tokio::spawn(tls.follow()));
        // It never ends by itself; it is aborted when this function returns.
        let _following = following.map(AbortOnDropHandle::new);
        let mut sockets = self.also;
        sockets.insert(0, (socket.into(), PortPurpose::Everything));
        let accepting = listener::run(
            sockets,
            self.routes,
            shared.drain.clone(),
            Arc::clone(&shared.metrics),
            self.config.tls,
            self.config.listener,
        );
        let reporting = grpc::follow(self.reporter, self.services, shared.clone());
        let watching = shared.health.watch();
        // Joined and not raced: `departing` moves the drain through its phases, and the others end by themselves when they see
        // them. The sockets stay open until `Over`, so that late clients get a 503 instead of a refused connection.
        let (outcome, (), (), ()) = futures::join!(departing, accepting, reporting, watching);
        outcome
    }

    /// Lowers the limit of connections to the file descriptors that the process may have (D-31).
    fn fit_descriptors(&mut self) {
        // Not an error: fewer connections than configured are better than no server.
        let wanted = self.config.listener.connections;
        let found = DescriptorCheck::raise_for(wanted);
        let allowed = found.fit(wanted);
        self.config.listener.connections = allowed;
        // At info level for the default, which nobody has asked for and which is more than most servers need.
        if allowed < wanted && wanted == listener::Config::default().connections {
            tracing::info!(
                allowed,
                wanted,
                "limited the connections to the available file descriptors"
            );
        } else if allowed < wanted {
            tracing::warn!(
                wanted,
                allowed,
                soft = found.soft,
                hard = found.hard,
                "too few file descriptors for the connections wanted: raise the limit (`ulimit -Hn`, LimitNOFILE=) \
                 or lower `limits.connections`"
            );
        }
    }
}

#[cfg(test)]
mod tests;
