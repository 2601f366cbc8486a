//! Which web pages may use the server: none by default, so that none drives a server on somebody's own machine (OA-908,
//! OA-909).
//!
//! Owns: which origins and hosts a browser may name, and what a browser is told about it (CORS). Refuses to know: everybody who is no browser; other clients may
//! send any `Host`.

use std::net::IpAddr;

use axum::body::Body;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use sapwood_proto::code::Code;

use crate::refusal::Refusal;

/// What browsers may name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Origins (`https://app.example`) that may call although they are not this host; `*` allows all.
    pub origins: Vec<String>,
    /// Host names under which browsers may reach the server; empty allows loopback names on a loopback listener and
    /// every name elsewhere.
    pub hosts: Vec<String>,
    /// The listener is reachable from this machine only.
    pub loopback: bool,
}

impl Config {
    /// Whether a request may come in.
    ///
    /// # Errors
    /// `permission-denied`, reason `origin_not_allowed`.
    pub fn check(&self, request: &Parts) -> Result<(), Refusal> {
        let headers = &request.headers;
        let origin = text(headers, header::ORIGIN.as_str());
        if origin.is_none() && !headers.contains_key("sec-fetch-site") {
            return Ok(());
        }
        let authority = request.uri.authority().map(http::uri::Authority::as_str);
        let host = authority
            .or_else(|| text(headers, header::HOST.as_str()))
            .unwrap_or_default();
        if !self.knows_host(without_port(host)) {
            return Err(refused(
                "This host name is not served to browsers: see `hosts`.",
            ));
        }
        match origin {
            Some(origin) if !same_host(origin, host) && !self.allows(origin) => Err(refused(
                "This origin may not call the server: see `origins`.",
            )),
            _ => Ok(()),
        }
    }

    /// The answer to a preflight, for which no key is needed (OA-908); none if the request is none, or CORS is off.
    #[must_use]
    pub fn preflight(&self, request: &Parts) -> Option<Response<Body>> {
        let asked = request.headers.get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
        if request.method != Method::OPTIONS || self.origins.is_empty() {
            return None;
        }
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = StatusCode::NO_CONTENT;
        let headers = answer.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, asked.clone());
        if let Some(names) = request.headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_SECONDS);
        Some(answer)
    }

    /// Tells the browser that the page of an allowed origin may read this answer. Credentials of the browser are never
    /// asked for: keys are sent by the page itself.
    pub fn share(&self, asked: &HeaderMap, answer: &mut HeaderMap) {
        let Some(origin) = asked.get(header::ORIGIN) else {
            return;
        };
        if !origin.to_str().is_ok_and(|origin| self.allows(origin)) {
            return;
        }
        answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        answer.append(header::VARY, HeaderValue::from_static("origin"));
        answer.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }

    fn allows(&self, origin: &str) -> bool {
        self.origins
            .iter()
            .any(|allowed| allowed == "*" || allowed == origin)
    }

    fn knows_host(&self, name: &str) -> bool {
        if self.hosts.is_empty() {
            return !self.loopback || is_loopback(name);
        }
        self.hosts
            .iter()
            .any(|host| host.eq_ignore_ascii_case(name))
    }
}

fn refused(message: &str) -> Refusal {
    Refusal::new(Code::PermissionDenied, "origin_not_allowed", message)
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// `http://localhost:8000` and `localhost:8000` name the same host; `null` names none.
fn same_host(origin: &str, host: &str) -> bool {
    let rest = origin.split_once("://").map(|(_, rest)| rest);
    rest.is_some_and(|rest| rest.eq_ignore_ascii_case(host))
}

fn without_port(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    }
}

/// Whether this names the machine itself.
#[must_use]
pub fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || name
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// How long a browser may remember a preflight's answer.
const PREFLIGHT_SECONDS: HeaderValue = HeaderValue::from_static("600");
/// The headers that a page may read: request id, rate limits, waiting times, streams.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, retry-after, retry-after-ms, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, \
     x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, \
     x-stream-id, sapwood-stream-id, sapwood-error, evergreen-extensions, grpc-status, grpc-message",
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oa_909_a_web_page_cannot_drive_a_local_server() {
        let local = Config {
            loopback: true,
            ..Config::default()
        };
        let open = Config {
            origins: vec!["https://app.example".into()],
            ..Config::default()
        };
        let any = Config {
            origins: vec!["*".into()],
            hosts: vec!["me.example".into()],
            loopback: true,
        };
        // Origin, Sec-Fetch-Site, host, allowed; an empty word is an absent header.
        let table = [
            (&local, "", "", "whatever.example", true),
            (&local, "http://localhost:8000", "", "localhost:8000", true),
            (
                &local,
                "http://127.0.0.1:8000",
                "same-origin",
                "127.0.0.1:8000",
                true,
            ),
            (&local, "http://[::1]:8000", "", "[::1]:8000", true),
            (&local, "https://evil.example", "", "127.0.0.1:8000", false),
            (&local, "null", "", "127.0.0.1:8000", false),
            (
                &local,
                "http://evil.example:8000",
                "",
                "evil.example:8000",
                false,
            ),
            (&local, "", "none", "127.0.0.1:8000", true),
            (&local, "", "cross-site", "evil.example", false),
            (&open, "https://app.example", "", "api.example", true),
            (&open, "https://app.example.evil", "", "api.example", false),
            (&any, "https://x.example", "", "me.example", true),
            (&any, "https://x.example", "", "localhost", false),
        ];
        for (config, origin, site, host, allowed) in table {
            let mut request = http::Request::get("/").header(header::HOST, host);
            for (name, value) in [("origin", origin), ("sec-fetch-site", site)] {
                if !value.is_empty() {
                    request = request.header(name, value);
                }
            }
            let (parts, ()) = request.body(()).unwrap().into_parts();
            assert_eq!(
                config.check(&parts).is_ok(),
                allowed,
                "{origin} {site} {host}"
            );
        }
    }
}
