//! Keeps web pages from driving a server on somebody's own machine (OA-909).
//!
//! Owns: which origins and hosts a browser may name. Refuses to know: everybody who is no browser; other clients may
//! send any `Host`.

use std::net::IpAddr;

use http::request::Parts;
use http::{HeaderMap, header};
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
