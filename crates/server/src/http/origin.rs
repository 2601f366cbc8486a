//! Which web origins may use the server (CORS): none by default, so that no web page can drive a server on a
//! developer's machine (OA-908, OA-909).
//!
//! Not `tower_http::cors`: it only adds headers and refuses no origin (OA-909), answers a preflight 200 where OA-908 has 204,
//! and takes every OPTIONS for a preflight, so that none would reach the checks behind it (D-45).
//!
//! Without keys on loopback, every request must name an allowed host, and not only those of browsers: a browser sends a plain
//! GET to a rebound name without any header that shows it to be a browser's (D-45).

use std::net::IpAddr;

use axum::body::Body;
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version, header};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use crate::http::rejection::Rejection;
use crate::listener::peer::PeerInfo;

/// Allowed origins and hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Other origins (`https://app.example`) that may call the server; `*` allows all.
    pub origins: Vec<String>,
    /// Host names under which browsers may reach the server; empty allows loopback names on a loopback listener and every
    /// name on others. On a loopback listener without keys, other clients are held to this list and loopback names too.
    pub hosts: Vec<String>,
    /// The listener can be reached from this machine only.
    pub loopback: bool,
}

impl Config {
    /// Checks that a request names its host exactly once, and on loopback without keys an allowed one. `keyed`: callers need
    /// keys, which a page under a rebound name does not have.
    ///
    /// # Errors
    /// `invalid-request`, reason `bad_host`; `permission-denied`, reason `host_not_allowed`.
    pub fn check_host(&self, request: &Parts, keyed: bool) -> Result<(), Rejection> {
        let mut named = request.headers.get_all(header::HOST).iter();
        let (first, more) = (named.next(), named.next().is_some());
        // RFC 9112, section 3.2: exactly one. With two, a proxy could check one and this server compare the other. HTTP/1.0
        // needs none, and HTTP/2 has `:authority` in its place.
        if more || first.is_none() && request.version == Version::HTTP_11 {
            let message = "A request must name its host exactly once, in the header Host.";
            return Err(bad_host(message));
        }
        let authority = request.uri.authority().map(Authority::as_str);
        // A name that is not text becomes the empty one, which is on no list.
        let sent = first.map(|first| first.to_str().unwrap_or_default());
        if let (Some(authority), Some(sent)) = (authority, sent)
            && !authority.eq_ignore_ascii_case(sent)
        {
            let message = "The header Host differs from the host in the request target.";
            return Err(bad_host(message));
        }
        let named = authority.or(sent).unwrap_or_default();
        // A web page cannot reach a Unix socket, and its clients send any name, or a path, as the host.
        let reachable = request.extensions.get::<PeerInfo>().is_some();
        if reachable && !named.is_empty() && !is_host(named) {
            let message = "The header Host must be a host name with an optional port.";
            return Err(bad_host(message));
        }
        let host = without_port(named);
        if keyed || !self.loopback || !reachable || is_loopback(host) || self.lists(host) {
            return Ok(());
        }
        let message =
            "Without keys this server accepts loopback host names only: see `browser.hosts`.";
        Err(Rejection::new(
            Code::PermissionDenied,
            ErrorReason::HOST_NOT_ALLOWED,
            message,
        ))
    }

    /// Checks the origin of a request that comes from a browser (OA-909).
    ///
    /// # Errors
    /// `permission-denied`, reason `origin_not_allowed`.
    pub fn check(&self, request: &Parts) -> Result<(), Rejection> {
        let headers = &request.headers;
        let origin = text(headers, header::ORIGIN.as_str());
        // Only browsers send these, and a page can neither set nor remove them; other clients may name any host.
        if !headers.contains_key(header::ORIGIN) && !headers.contains_key("sec-fetch-site") {
            return Ok(());
        }
        let authority = request.uri.authority().map(Authority::as_str);
        let host = authority
            .or_else(|| text(headers, header::HOST.as_str()))
            .unwrap_or_default();
        // Against DNS rebinding: a page of `evil.example` whose name resolves to this machine is same-origin with it.
        if !self.knows_host(without_port(host)) {
            return Err(refused(
                "This host name is not served to browsers: see `browser.hosts`.",
            ));
        }
        match origin {
            Some(origin) if !same_host(origin, host) && !self.allows(origin) => Err(refused(
                "This origin may not call the server: see `browser.origins`.",
            )),
            // The first of two is the one checked above, and a proxy may have checked the other.
            Some(_) if headers.get_all(header::ORIGIN).iter().count() > 1 => {
                Err(refused("A request must have only one header Origin."))
            }
            // Present but not text: it must not pass as a request without an origin.
            None if headers.contains_key(header::ORIGIN) => {
                Err(refused("The header Origin is not a valid origin."))
            }
            _ => Ok(()),
        }
    }

    /// The answer to a preflight of an origin that passed [`Self::check`], for which no key is needed (OA-908); `None` if the
    /// request is no preflight. A preflight never reaches a handler, whatever is configured.
    ///
    /// # Errors
    /// `permission-denied` for a preflight without an origin, which no browser sends.
    pub fn preflight(&self, request: &Parts) -> Result<Option<Response<Body>>, Rejection> {
        let headers = &request.headers;
        let Some(asked) = headers.get(header::ACCESS_CONTROL_REQUEST_METHOD) else {
            return Ok(None);
        };
        if request.method != Method::OPTIONS {
            return Ok(None);
        }
        let Some(origin) = text(headers, header::ORIGIN.as_str()) else {
            return Err(refused("A preflight must have the header Origin."));
        };
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = StatusCode::NO_CONTENT;
        if self.allows(origin) {
            // Whatever was asked for is allowed: the origin is trusted, and the checks of a request do not depend on CORS.
            let reported = answer.headers_mut();
            reported.insert(header::ACCESS_CONTROL_ALLOW_METHODS, asked.clone());
            if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
                reported.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
            }
            reported.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_SECONDS);
        }
        Ok(Some(answer))
    }

    /// Adds the headers by which the page of an allowed origin may read this response. There is no
    /// `Access-Control-Allow-Credentials`: pages send keys themselves, and `*` must not go with credentials (OA-908).
    pub fn share(&self, asked: &HeaderMap, answer: &mut HeaderMap) {
        let Some(origin) = asked.get(header::ORIGIN) else {
            return;
        };
        if !origin.to_str().is_ok_and(|origin| self.allows(origin)) {
            return;
        }
        answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        // The origin is echoed even for `*`, so that a cache must not give one page the response of another.
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
        self.lists(name)
    }

    fn lists(&self, name: &str) -> bool {
        self.hosts
            .iter()
            .any(|host| host.eq_ignore_ascii_case(name))
    }
}

fn bad_host(message: &str) -> Rejection {
    Rejection::new(Code::InvalidRequest, ErrorReason::BAD_HOST, message)
}

fn refused(message: &str) -> Rejection {
    Rejection::new(
        Code::PermissionDenied,
        ErrorReason::ORIGIN_NOT_ALLOWED,
        message,
    )
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// `http://localhost:8000` and `localhost:8000` name the same host; `null` names none.
fn same_host(origin: &str, host: &str) -> bool {
    let rest = origin.split_once("://").map(|(_, rest)| rest);
    // The scheme is not compared: behind a proxy that ends TLS the server does not know its own.
    rest.is_some_and(|rest| rest.eq_ignore_ascii_case(host))
}

/// Whether this is a host with an optional port. User names (`user@`) and parts of a path are refused, so that no other parser
/// finds another host in it.
fn is_host(sent: &str) -> bool {
    // `Authority` does not check that a port is a number.
    let port = |authority: &Authority| {
        let rest = &authority.as_str()[authority.host().len()..];
        rest.is_empty() || authority.port_u16().is_some()
    };
    !sent.contains('@') && sent.parse().is_ok_and(|authority| port(&authority))
}

fn without_port(host: &str) -> &str {
    // IPv6 first, whose address has colons of its own.
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    }
}

/// Whether this names the machine itself.
#[must_use]
pub fn is_loopback(name: &str) -> bool {
    // `*.localhost` is reserved for loopback (RFC 6761), so no public name that could be rebound ends in it.
    name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || name
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// How long a browser may cache a preflight's answer.
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

    #[test]
    fn oa_909_a_request_has_at_most_one_origin() {
        for (origins, expect) in [
            (&["http://a"][..], true),
            (&["http://a", "http://b"], false),
        ] {
            let mut request = http::Request::get("/").header(header::HOST, "a");
            for origin in origins {
                request = request.header(header::ORIGIN, *origin);
            }
            let (parts, ()) = request.body(()).unwrap().into_parts();
            assert_eq!(Config::default().check(&parts).is_ok(), expect);
        }
    }

    #[test]
    fn d_45_a_host_is_named_once_and_on_loopback_without_keys_it_is_an_allowed_one() {
        let local = Config {
            loopback: true,
            hosts: vec!["proxy.example".into()],
            ..Config::default()
        };
        let open = Config::default();
        let peer = PeerInfo(([127, 0, 0, 1], 7).into());
        for (config, keyed, version, uri, hosts, expect) in [
            (&local, false, 11, "/", &["localhost:8000"][..], None),
            (&local, false, 11, "/", &["127.0.0.1"], None),
            (&local, false, 11, "/", &["[::1]:8000"], None),
            (&local, false, 11, "/", &["PROXY.example:80"], None),
            (&local, false, 11, "/", &["evil.example:8000"], Some(403)),
            (&local, false, 11, "/", &[""], Some(403)),
            (&local, false, 11, "/", &["localhost:80@evil"], Some(400)),
            (&open, true, 11, "/", &["a@b"], Some(400)),
            (&open, true, 11, "/", &["a:b"], Some(400)),
            (&open, true, 11, "/", &["a/b"], Some(400)),
            (&open, true, 11, "/", &["a_b.example:80"], None),
            (&open, true, 20, "http://a@b/", &[], Some(400)),
            (&local, false, 10, "/", &[], Some(403)),
            (&local, false, 20, "http://evil.example/", &[], Some(403)),
            (&local, false, 20, "http://localhost:1/", &[], None),
            (&local, false, 20, "/", &[], Some(403)),
            (&local, true, 11, "/", &["evil.example"], None),
            (&open, false, 11, "/", &["any.example"], None),
            (&open, true, 11, "/", &[], Some(400)),
            (&open, true, 11, "http://a/", &[], Some(400)),
            (&open, true, 11, "/", &["a", "a"], Some(400)),
            (&open, true, 20, "http://a/", &["a", "b"], Some(400)),
            (&open, true, 20, "http://a/", &["b"], Some(400)),
            (&open, true, 20, "http://a/", &["A"], None),
            (&open, true, 10, "/", &[], None),
        ] {
            let version = match version {
                10 => Version::HTTP_10,
                11 => Version::HTTP_11,
                _ => Version::HTTP_2,
            };
            let mut request = http::Request::get(uri).version(version).extension(peer);
            for host in hosts {
                request = request.header(header::HOST, *host);
            }
            let (mut parts, ()) = request.body(()).unwrap().into_parts();
            let reported = config.check_host(&parts, keyed).err();
            let reported = reported.map(|rejection| rejection.code.http());
            assert_eq!(reported, expect, "{keyed} {version:?} {uri} {hosts:?}");
            // A Unix socket accepts any host name.
            parts.extensions.remove::<PeerInfo>();
            let reported = config.check_host(&parts, keyed).err();
            assert!(reported.is_none_or(|rejection| rejection.reason == "bad_host"));
        }
    }

    #[test]
    fn d_45_a_preflight_is_answered_whatever_is_configured() {
        let open = Config {
            origins: vec!["https://app.example".into()],
            ..Config::default()
        };
        for (config, method, origin, asks, expect) in [
            (
                &open,
                "OPTIONS",
                "https://app.example",
                true,
                Ok(Some(true)),
            ),
            (&open, "OPTIONS", "http://a", true, Ok(Some(false))),
            (
                &Config::default(),
                "OPTIONS",
                "http://a",
                true,
                Ok(Some(false)),
            ),
            (&Config::default(), "OPTIONS", "", true, Err(())),
            (&open, "OPTIONS", "https://app.example", false, Ok(None)),
            (&open, "POST", "https://app.example", true, Ok(None)),
        ] {
            let mut request = http::Request::builder().method(method);
            if !origin.is_empty() {
                request = request.header("origin", origin);
            }
            if asks {
                request = request.header("access-control-request-method", "POST");
            }
            let (parts, ()) = request.body(()).unwrap().into_parts();
            let reported = config.preflight(&parts).map_err(drop);
            let reported = reported.map(|answer| {
                let allow = header::ACCESS_CONTROL_ALLOW_METHODS;
                answer.map(|answer| answer.headers().contains_key(allow))
            });
            assert_eq!(reported, expect, "{method} {origin} {asks}");
        }
    }
}
