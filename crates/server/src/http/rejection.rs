//! A refused request, encoded as a JSON error object over HTTP and as trailers over gRPC.

use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use sapwood_net::evergreen::grpc::to_grpc;
use sapwood_proto::code::{Code, RetryAdvice};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::evergreen::{Reason, Status};
use sapwood_proto::generate::error_body;

/// The error of a request that is refused before a face sees it, or by a route of no face.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The closed code; it decides the HTTP and gRPC status.
    pub code: Code,
    /// The finer name, in the lower case that HTTP clients read (`invalid_api_key`, `draining` …).
    pub reason: ErrorReason,
    /// What is wrong and what to do; contains nothing confidential.
    pub message: String,
    /// Replaces the HTTP status of the code, where a specification names another one.
    pub http_status: Option<StatusCode>,
    /// When to retry; `None` is one second for codes that are worth a retry.
    pub retry_after: Option<Duration>,
}

impl Rejection {
    /// A refusal with the code's usual status.
    pub fn new(code: Code, reason: ErrorReason, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            http_status: None,
            retry_after: None,
        }
    }

    /// The same with another HTTP status.
    #[must_use]
    pub const fn with_status(mut self, status: StatusCode) -> Self {
        self.http_status = Some(status);
        self
    }

    /// The same with the time after which to retry.
    #[must_use]
    pub const fn after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// A method that a route does not have.
    pub(crate) fn wrong_method(method: &Method) -> Self {
        let message = format!("{method} is not allowed here.");
        Self::new(
            Code::InvalidRequest,
            ErrorReason::METHOD_NOT_ALLOWED,
            message,
        )
        .with_status(StatusCode::METHOD_NOT_ALLOWED)
    }

    /// A request for gRPC that is none. Answered as HTTP: a client of another protocol cannot read gRPC's trailers.
    pub(crate) fn not_grpc(message: &str) -> Self {
        Self::new(Code::InvalidRequest, ErrorReason::NOT_GRPC, message)
            .with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE)
    }

    /// A gRPC service that is not here: UNIMPLEMENTED, as every gRPC server answers.
    pub(crate) fn unknown_service() -> Self {
        let message = "This gRPC service is not served here.";
        Self::new(Code::Unimplemented, ErrorReason::UNKNOWN_URL, message)
    }

    /// The `type` member of OA-201.
    const fn kind(&self) -> &'static str {
        match self.code {
            Code::Unauthenticated => "authentication_error",
            Code::PermissionDenied => "permission_error",
            Code::RateLimited => "rate_limit_error",
            code if code.http() >= 500 => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The response for a client that sent these headers: gRPC trailers, or JSON.
    #[must_use]
    pub fn answer(&self, asked: &HeaderMap) -> Response<Body> {
        if is_grpc(asked) {
            self.grpc()
        } else {
            self.json()
        }
    }

    /// The same as a gRPC status.
    pub(crate) fn to_status(&self) -> tonic::Status {
        let mut status = Status::other(self.code, self.wire_reason(), self.message.clone());
        // `Status::other` has decided by the code whether a retry is worth while; when, this rejection knows better.
        if status.retry_after.is_some() {
            status.retry_after = Some(self.wait());
        }
        to_grpc(&status)
    }

    fn grpc(&self) -> Response<Body> {
        let answer = self.to_status().into_http::<tonic::body::Body>();
        answer.map(Body::new)
    }

    /// The reason as Evergreen names it (D-30); others are written in capitals, as gRPC's error details have them.
    fn wire_reason(&self) -> String {
        match self.reason {
            ErrorReason::DRAINING => Reason::GoingAway.name().to_owned(),
            ErrorReason::SERVER_OVERLOADED => Reason::EngineBusy.name().to_owned(),
            other => other.name().to_ascii_uppercase(),
        }
    }

    /// When to retry, within what clients accept.
    fn wait(&self) -> Duration {
        let wait = self.retry_after.unwrap_or(LEAST_WAIT);
        wait.clamp(LEAST_WAIT, MOST_WAIT)
    }

    /// The response for a request to this path, in the format of the face whose path it is.
    #[must_use]
    pub fn answer_at(&self, path: &str, asked: &HeaderMap) -> Response<Body> {
        let theirs = path
            .strip_prefix("/v2")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if !is_grpc(asked) && is_of_controllers(path) {
            // AI-901: the client `aici` prints that member.
            return self.json_with(|body| body["message"] = self.message.as_str().into());
        }
        let answer = self.answer(asked);
        if !theirs || is_grpc(asked) {
            return answer;
        }
        // TR-205, TR-206: the text alone, and the code in a header. The other headers stay, `Retry-After` among them.
        let (mut head, _) = answer.into_parts();
        let code = HeaderValue::from_static(self.code.name());
        head.headers.insert("sapwood-error", code);
        // That of the body that is replaced; hyper sets the new one.
        head.headers.remove(header::CONTENT_LENGTH);
        Response::from_parts(head, Body::from(error_body(&self.message)))
    }

    fn json(&self) -> Response<Body> {
        self.json_with(|_| ())
    }

    /// The response, with members added to its body.
    fn json_with(&self, add: impl FnOnce(&mut serde_json::Value)) -> Response<Body> {
        let status = self.http_status.unwrap_or_else(|| {
            StatusCode::from_u16(self.code.http()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
        });
        let mut body = serde_json::json!({"error": {
            "message": self.message, "type": self.kind(), "param": null, "code": self.reason.name(),
        }});
        add(&mut body);
        let mut answer = (status, axum::Json(body)).into_response();
        let headers = answer.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.code.retry() == RetryAdvice::Later {
            let wait = self.wait();
            // OA-202: whole seconds, and the finer header that official clients prefer.
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            let milliseconds = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
            headers.insert("retry-after-ms", HeaderValue::from(milliseconds));
        }
        answer
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> axum::response::Response {
        self.json()
    }
}

/// OA-202. Below it, clients fall back to their own back-off; when asked to wait for minutes, official ones give up.
const LEAST_WAIT: Duration = Duration::from_secs(1);
const MOST_WAIT: Duration = Duration::from_secs(60);

/// Whether the path is one of the controllers' face.
fn is_of_controllers(path: &str) -> bool {
    // Its routes are mirrored below the prefix of each model.
    let own = ["/v1/controllers", "/v1/run", "/proxy/info"];
    let below = path.starts_with("/aici/");
    below
        || own.iter().any(|own| {
            let rest = path.strip_prefix(own);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
}

/// Whether this is a gRPC call, by its content type (with or without `+proto`).
#[must_use]
pub fn is_grpc(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD_NO_PAD;

    use super::*;

    #[tokio::test]
    async fn oa_201_every_error_body_has_the_four_members() {
        let rejection = Rejection::new(
            Code::Unavailable,
            ErrorReason::DRAINING,
            "The server is shutting down.",
        );
        let answer = rejection.answer(&HeaderMap::new());
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.headers()[header::RETRY_AFTER], "1");
        let body = axum::body::to_bytes(answer.into_body(), 4096)
            .await
            .unwrap();
        let json: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"error": {"message": "The server is shutting down.",
                "type": "server_error", "param": null, "code": "draining"}})
        );
    }

    #[tokio::test]
    async fn ai_901_errors_of_controllers_have_their_message_at_the_top_as_well() {
        for (path, has) in [
            ("/v1/controllers", true),
            ("/v1/controllers/tags", true),
            ("/v1/run", true),
            ("/aici/m/v1/models", true),
            ("/v1/runs", false),
            ("/v1/models", false),
        ] {
            let rejection = Rejection::new(Code::NotFound, ErrorReason::NONE, "no such tag");
            let answer = rejection.answer_at(path, &HeaderMap::new());
            assert_eq!(answer.status(), StatusCode::NOT_FOUND);
            let body = axum::body::to_bytes(answer.into_body(), 4096)
                .await
                .unwrap();
            let json: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(json["error"]["message"], "no such tag");
            assert_eq!(json.get("message").is_some(), has, "{path}");
        }
    }

    /// OA-910: what a queue estimates reaches the client.
    #[test]
    fn oa_202_retry_after_is_sent_in_whole_seconds_and_in_milliseconds() {
        for (wait, seconds, milliseconds) in [
            (None, "1", "1000"),
            (Some(Duration::from_millis(1)), "1", "1000"),
            (Some(Duration::from_millis(11_200)), "12", "11200"),
            (Some(Duration::from_secs(600)), "60", "60000"),
        ] {
            let mut rejection =
                Rejection::new(Code::Overloaded, ErrorReason::SERVER_OVERLOADED, "later");
            rejection.retry_after = wait;
            let headers = rejection.answer(&HeaderMap::new());
            let headers = headers.headers();
            assert_eq!(headers[header::RETRY_AFTER], seconds);
            assert_eq!(headers["retry-after-ms"], milliseconds);
        }
    }

    #[test]
    fn a_grpc_client_reads_trailers() {
        let mut asked = HeaderMap::new();
        asked.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/grpc+proto"),
        );
        let answer = Rejection::new(Code::Unauthenticated, ErrorReason::INVALID_API_KEY, "no")
            .answer(&asked);
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["grpc-status"], "16");
    }

    #[test]
    fn ev_902_a_grpc_client_reads_the_reason_and_when_to_retry() {
        let grpc = HeaderValue::from_static("application/grpc");
        let asked = HeaderMap::from_iter([(header::CONTENT_TYPE, grpc)]);
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for (code, reason, wait, reported) in [
            (
                Code::Unauthenticated,
                "invalid_api_key",
                None,
                ("INVALID_API_KEY", None),
            ),
            (
                Code::Unavailable,
                "draining",
                None,
                ("GOING_AWAY", seconds(1)),
            ),
            (
                Code::Overloaded,
                "server_overloaded",
                seconds(7),
                ("ENGINE_BUSY", seconds(7)),
            ),
            (
                Code::RateLimited,
                "rate_limited",
                seconds(600),
                ("RATE_LIMITED", seconds(60)),
            ),
        ] {
            let mut rejection = Rejection::new(code, reason.into(), "why");
            rejection.retry_after = wait;
            let answer = rejection.answer(&asked);
            let headers = answer.headers();
            assert_eq!(headers["grpc-status"], code.grpc().to_string());
            let details = headers["grpc-status-details-bin"].as_bytes();
            let details = STANDARD_NO_PAD.decode(details.trim_ascii_end()).unwrap();
            let status = Status::decode(&details).unwrap().unwrap();
            assert_eq!((&*status.reason, status.retry_after), reported);
            assert_eq!((status.code.grpc(), &*status.message), (code.grpc(), "why"));
        }
    }
}
