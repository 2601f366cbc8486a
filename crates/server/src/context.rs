//! The handles that every face gets: metrics, keys, drain, registries. Cheap to clone.

use std::sync::Arc;

use crate::auth::Authenticator;
use crate::faces::socket_dispatch::SocketProtocol;
use crate::http::route::Route;
use crate::ops::drain::Drain;
use crate::ops::health::Health;
use crate::ops::metrics::{self, ServerMetrics};

/// The handles a face works with. The caller of a request ([`crate::auth::caller::Caller`]) and its id
/// ([`crate::http::request_id::RequestId`]) stand in the request's extensions.
#[derive(Clone)]
pub struct ServerContext {
    /// Keys and scopes. The middleware has checked the scope of the route; a face asks for finer ones.
    pub auth: Arc<Authenticator>,
    /// The counters of every face.
    pub metrics: Arc<ServerMetrics>,
    /// Admits work, and signals when it has to end.
    pub drain: Drain,
    /// Readiness of the models.
    pub health: Arc<Health>,
}

/// What a face adds to the server. Each face has one function `face(ServerContext, its Config) -> Face`.
pub struct Face {
    /// Its label in metrics and in the access log.
    pub name: metrics::FaceLabel,
    /// Its routes, each with the access that it requires.
    pub routes: Vec<Route>,
    /// Its protocol over WebSockets on `/`, where the subprotocol or the first message decides which face serves (D-32).
    pub(crate) root: Option<Arc<dyn SocketProtocol>>,
    /// Encoded file descriptor sets of its gRPC services, for reflection.
    pub descriptors: Vec<&'static [u8]>,
    /// Full names of its gRPC services, for `grpc.health.v1`.
    pub services: Vec<&'static str>,
}
