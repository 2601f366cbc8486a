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
    /// Keys and scopes; the gate has checked them already, a face asks for finer scopes.
    pub auth: Arc<Authenticator>,
    /// Where a face counts.
    pub metrics: Arc<ServerMetrics>,
    /// Where a face asks before it takes work, and learns when to end it.
    pub drain: Drain,
    /// Whether models are there.
    pub health: Arc<Health>,
}

/// What a face adds to the server. Each face has one function `face(ServerContext, its Config) -> Face`.
pub struct Face {
    /// Which one it is, in metrics and in the access log.
    pub name: metrics::FaceLabel,
    /// Its routes, each with the access that it requires.
    pub routes: Vec<Route>,
    /// What it speaks over a WebSocket on `/`, where whichever protocol the first message shows is served (D-32).
    pub(crate) root: Option<Arc<dyn SocketProtocol>>,
    /// Encoded file descriptor sets of its gRPC services, for reflection.
    pub descriptors: Vec<&'static [u8]>,
    /// Full names of its gRPC services, for `grpc.health.v1`.
    pub services: Vec<&'static str>,
}
