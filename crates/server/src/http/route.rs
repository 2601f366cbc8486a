//! The table that the router is built from: each route with its kind and the access that it requires (D-45).
//!
//! There is no other way to a handler: [`crate::server`] builds its router from these, each behind the middleware, and
//! publishes the same list, which a test walks.

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::Request;
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, any_service};
use tower::Service;

use crate::auth::scopes::RouteAccess;

/// The protocol of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteKind {
    /// HTTP; the route has its methods.
    Http,
    /// gRPC: POST, and nothing else.
    Grpc,
}

/// One route. It cannot be made without an access, so none is open by mistake.
#[derive(Clone, Debug)]
pub struct Route {
    /// As axum writes paths: `{name}` is a segment, `{*rest}` all that follow.
    pub path: String,
    /// Its protocol.
    pub kind: RouteKind,
    /// The scope that it requires.
    pub access: RouteAccess,
    pub(crate) methods: MethodRouter,
}

impl Route {
    /// A route of HTTP.
    #[must_use]
    pub fn http(path: impl Into<String>, access: RouteAccess, methods: MethodRouter) -> Self {
        Self {
            path: path.into(),
            kind: RouteKind::Http,
            access,
            methods,
        }
    }

    /// A route of a gRPC service.
    #[must_use]
    pub fn grpc<S>(path: impl Into<String>, access: RouteAccess, service: S) -> Self
    where
        S: Service<Request<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
        S::Response: IntoResponse + 'static,
        S::Future: Send + 'static,
    {
        Self {
            path: path.into(),
            kind: RouteKind::Grpc,
            access,
            // Every method: the middleware answers those other than POST, with an error that gRPC clients can read.
            methods: any_service(service),
        }
    }
}
