//! Addresses of LMTP servers (LM-701, D-40).

use std::fmt;
use std::path::PathBuf;

use http::Uri;
use percent_encoding::percent_decode_str;
use sapwood_proto::lmtp::{LmtpError, LmtpReason};
use sapwood_proto::secret::Secret;

use crate::address;

/// The address of a peer.
#[derive(Clone)]
pub struct PeerAddress {
    pub(super) target: LmtpTarget,
    pub(super) key: Option<Secret>,
    pub(super) authorities: Option<Vec<u8>>,
}

/// The kind of connection of an address.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum LmtpTarget {
    WebSocket(Uri),
    /// Lines in the request and response bodies of one HTTP request.
    Post(Uri),
    Unix(PathBuf),
    /// A program and its arguments.
    Stdio(String, Vec<String>),
}

impl PeerAddress {
    /// Parses `host:port`, `ws://`, `wss://` and their `http` spellings, `post+http://` and `post+https://`, all with
    /// path and query; `unix:/path`; or `stdio:COMMAND ARGS`, split at white space.
    ///
    /// # Errors
    /// `invalid_value` for anything else.
    pub fn parse(url: &str) -> Result<Self, LmtpError> {
        Ok(Self {
            target: target(url)?,
            key: None,
            authorities: None,
        })
    }

    /// Parses `lmtp://host:port/MODEL`: the peer at `ws://host:port/`, and one of its models. Several hosts, separated
    /// by commas, serve the same model (LM-801). A query is added to the address of each.
    ///
    /// # Errors
    /// `invalid_value` for anything else.
    pub fn of_model(url: &str) -> Result<(Vec<Self>, String), LmtpError> {
        let rest = url.strip_prefix("lmtp://");
        let rest = rest.ok_or_else(|| bad("it must begin with lmtp://"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        // At the first slash, because the name of a model may contain further ones.
        let parts = rest.split_once('/').filter(|(_, model)| !model.is_empty());
        let (hosts, model) =
            parts.ok_or_else(|| bad("it must name a model: lmtp://host:port/MODEL"))?;
        let model = percent_decode_str(model).decode_utf8();
        let model = model
            .map_err(|_| bad("its model is not UTF-8"))?
            .into_owned();
        let question = if query.is_empty() { "" } else { "?" };
        let peers = hosts
            .split(',')
            .map(|host| Self::parse(&format!("ws://{host}/{question}{query}")));
        let peers: Result<_, LmtpError> = peers.collect();
        Ok((peers?, model))
    }

    /// Sets a key that is sent to the peer; over WebSockets only.
    #[must_use]
    pub fn with_key(mut self, key: impl Into<Secret>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Returns whether a key of this address, set or part of its query, would be sent unencrypted to another machine.
    #[must_use]
    pub fn exposes_key(&self) -> bool {
        // A Unix socket or a pipe has no network at all.
        let uri = self.target.uri();
        uri.is_some_and(|uri| address::exposes_key(uri, self.key.is_some()))
    }

    /// Returns whether its query contains a key (LM-108).
    #[must_use]
    pub fn has_own_key(&self) -> bool {
        self.target.uri().is_some_and(address::has_own_key)
    }

    /// Sets authorities (PEM) that are trusted beside the well-known ones.
    #[must_use]
    pub fn with_authorities(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authorities = Some(pem.into());
        self
    }
}

impl LmtpTarget {
    /// Returns the URL of the server, if it is reached by one.
    pub(super) const fn uri(&self) -> Option<&Uri> {
        match self {
            Self::WebSocket(uri) | Self::Post(uri) => Some(uri),
            Self::Unix(_) | Self::Stdio(..) => None,
        }
    }
}

impl fmt::Debug for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.target.fmt(f)
    }
}

/// Omits the query, and the arguments of a program, because both may contain credentials.
impl fmt::Debug for LmtpTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WebSocket(uri) | Self::Post(uri) => {
                write!(f, "{}", uri.authority().map_or("", |a| a.as_str()))
            }
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Stdio(program, _) => write!(f, "stdio:{program}"),
        }
    }
}

fn target(url: &str) -> Result<LmtpTarget, LmtpError> {
    // Before the URL forms: neither a path nor a command line is a URL.
    if let Some(path) = url.strip_prefix("unix:") {
        if !path.starts_with('/') {
            return Err(bad(
                "a Unix socket is named by its whole path, as in unix:/run/lmtp.sock",
            ));
        }
        return Ok(LmtpTarget::Unix(path.into()));
    }
    if let Some(command) = url.strip_prefix("stdio:") {
        // Started without a shell, so there is nothing to quote, and an address cannot run a second command.
        let mut words = command.split_whitespace().map(str::to_owned);
        let program = words.next().ok_or_else(|| bad("it has no command"))?;
        return Ok(LmtpTarget::Stdio(program, words.collect()));
    }
    let (scheme, rest) = url.split_once("://").unwrap_or(("ws", url));
    let scheme = match scheme {
        "ws" | "http" => "ws",
        "wss" | "https" => "wss",
        "post+http" => "http",
        "post+https" => "https",
        _ => {
            return Err(bad(
                "it must be host:port, or begin with ws://, wss://, http://, https://, post+http://, post+https://, unix: or stdio:",
            ));
        }
    };
    let uri: Uri = format!("{scheme}://{rest}")
        .parse()
        .map_err(|_| bad("it is not a URL"))?;
    address::without_credentials(&uri).map_err(bad)?;
    match (uri.host(), scheme) {
        (None | Some(""), _) => Err(bad("it has no host")),
        (_, "http" | "https") => Ok(LmtpTarget::Post(uri)),
        _ => Ok(LmtpTarget::WebSocket(uri)),
    }
}

fn bad(why: &'static str) -> LmtpError {
    LmtpError::new(
        LmtpReason::InvalidValue,
        format!("the address of an LMTP peer cannot be used: {why}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lm_701_addresses_are_parsed() {
        let web = |uri: &str| Some(LmtpTarget::WebSocket(uri.parse().unwrap()));
        for (url, expect) in [
            ("localhost:8080", web("ws://localhost:8080/")),
            (
                "http://localhost:8080/lmtp?key=x",
                web("ws://localhost:8080/lmtp?key=x"),
            ),
            ("ws://[::1]:1/", web("ws://[::1]:1/")),
            ("https://models.example", web("wss://models.example/")),
            ("wss://models.example/a", web("wss://models.example/a")),
            ("unix:/run/s", Some(LmtpTarget::Unix("/run/s".into()))),
            (
                "stdio:sapwood lmtp  --quiet",
                Some(LmtpTarget::Stdio(
                    "sapwood".into(),
                    vec!["lmtp".into(), "--quiet".into()],
                )),
            ),
            ("unix:run/s", None),
            ("stdio: ", None),
            ("ftp://x", None),
            ("ws://", None),
            ("ws://key@host:1", None),
            (
                "post+https://host:1/lmtp?key=x",
                Some(LmtpTarget::Post(
                    "https://host:1/lmtp?key=x".parse().unwrap(),
                )),
            ),
            ("post+http://", None),
            ("post+ws://host:1", None),
            ("", None),
            ("a b", None),
        ] {
            let read = PeerAddress::parse(url);
            let refused = read.as_ref().err().map(|error| error.reason);
            assert_eq!(
                refused,
                expect.is_none().then_some(LmtpReason::InvalidValue),
                "{url}"
            );
            assert_eq!(read.ok().map(|address| address.target), expect, "{url}");
        }
    }

    #[test]
    fn lm_701_a_model_url_names_peers_and_a_model() {
        for (url, expect) in [
            ("lmtp://host:1/tiny", Some((&["ws://host:1/"][..], "tiny"))),
            (
                "lmtp://host/org/name%20x?key=k",
                Some((&["ws://host/?key=k"][..], "org/name x")),
            ),
            (
                "lmtp://a:1,b:2/tiny",
                Some((&["ws://a:1/", "ws://b:2/"][..], "tiny")),
            ),
            ("lmtp://a:1,/tiny", None),
            ("lmtp://host:1/", None),
            ("lmtp://host:1", None),
            ("lmtp:///tiny", None),
            ("ws://host:1/tiny", None),
        ] {
            let read = PeerAddress::of_model(url).ok();
            let expect = expect.map(|(uris, model)| {
                let target = |uri: &&str| LmtpTarget::WebSocket(uri.parse().unwrap());
                (
                    uris.iter().map(target).collect::<Vec<_>>(),
                    model.to_owned(),
                )
            });
            let read = read.map(|(peers, model)| {
                let positions = peers.into_iter().map(|peer| peer.target);
                (positions.collect::<Vec<_>>(), model)
            });
            assert_eq!(read, expect, "{url}");
        }
    }

    #[test]
    fn d_46_a_key_sent_unencrypted_is_detected() {
        for (url, key, exposed) in [
            ("ws://host:1/", Some("k"), true),
            ("host:1", Some("k"), true),
            ("ws://host:1/?key=k", None, true),
            ("post+http://10.0.0.1:1/", Some("k"), true),
            ("ws://host:1/", None, false),
            ("wss://host:1/?key=k", Some("k"), false),
            ("post+https://host:1/", Some("k"), false),
            ("ws://127.0.0.1:1/?key=k", Some("k"), false),
            ("ws://[::1]:1/", Some("k"), false),
            ("ws://localhost/", Some("k"), false),
            ("unix:/run/s", Some("k"), false),
        ] {
            let address = PeerAddress::parse(url).unwrap();
            let address = match key {
                Some(key) => address.with_key(key),
                None => address,
            };
            assert_eq!(address.exposes_key(), exposed, "{url}");
        }
    }

    #[test]
    fn lm_701_debug_output_omits_keys() {
        let address = PeerAddress::parse("ws://host:1/p?key=secret").unwrap();
        let shown = format!("{:?}", address.with_key("secret"));
        assert_eq!(shown, "host:1");
    }
}
