//! What a port serves: everything, or one thing alone (TR-908, TR-1001).

use http::request::Parts;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use crate::http::rejection::{Rejection, is_grpc};
use crate::http::route::RouteKind;

/// What a port serves. All of it is served on the common port too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PortPurpose {
    /// The common port: every face.
    #[default]
    Everything,
    /// gRPC calls of all faces.
    Grpc,
    /// `/metrics`, and the probes beside it.
    Metrics,
}

impl PortPurpose {
    /// Checks whether this port serves the request.
    pub(crate) fn check(self, kind: RouteKind, request: &Parts) -> Result<(), Rejection> {
        match self {
            Self::Everything => Ok(()),
            Self::Grpc if is_grpc(&request.headers) && kind == RouteKind::Grpc => Ok(()),
            // The fallback is a route of HTTP.
            Self::Grpc if is_grpc(&request.headers) => Err(Rejection::unknown_service()),
            Self::Grpc => Err(Rejection::not_grpc(
                "This port serves gRPC only: send application/grpc over HTTP/2, or use the common port.",
            )),
            Self::Metrics if of_metrics(request.uri.path()) => Ok(()),
            Self::Metrics => {
                let message =
                    "This port serves /metrics only: everything else is on the common port.";
                Err(Rejection::new(
                    Code::NotFound,
                    ErrorReason::UNKNOWN_URL,
                    message,
                ))
            }
        }
    }
}

fn of_metrics(path: &str) -> bool {
    matches!(
        path,
        "/metrics" | "/livez" | "/readyz" | "/health" | "/ping"
    )
}
