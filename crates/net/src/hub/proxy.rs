//! Proxies: which one a request goes through, and the way through it.
//!
//! ```text
//!   https: ─► connect to the proxy ─► CONNECT host:443 ─► TLS with the host, which the proxy cannot read
//!   http:  ─► connect to the proxy ─► GET http://host/path, and the proxy answers for the host
//! ```

use bytes::Bytes;
use http::header::{HOST, PROXY_AUTHORIZATION, USER_AGENT};
use http::uri::PathAndQuery;
use http::{HeaderValue, Method, Request, StatusCode, Uri, uri};
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use sapwood_proto::secret::Secret;
use tokio_util::task::AbortOnDropHandle;

use super::error::HubError;
use super::exchange::{AGENT, unreachable};
use crate::connection::{ConnectError, Io, connect, connect_within, is_loopback, is_secure};

/// The proxies of a [`HubClient`](super::HubClient), as curl and pip have them in the environment: `http://HOST:PORT`, or
/// `https:` for one with TLS, also with `USER:PASSWORD@`. Empty: none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxySettings {
    /// For `http:` addresses (`http_proxy`).
    pub http: Option<Secret>,
    /// For `https:` addresses (`https_proxy`).
    pub https: Option<Secret>,
    /// For both, where there is none of their own (`all_proxy`).
    pub all: Option<Secret>,
    /// Hosts that are reached without one, separated by commas or spaces: names with all names below them, IP addresses,
    /// networks (`10.0.0.0/8`), or `*` for all (`no_proxy`). This machine is one, unless the proxy is on it, too.
    pub except: String,
}

/// The proxies, as far as they can be used.
pub(super) struct Proxies {
    http: Chosen,
    https: Chosen,
    /// Intercepts what is no exception.
    except: Matcher,
}

/// The proxy of a scheme. An error is returned only for an address that needs the proxy.
type Chosen = Result<Option<Proxy>, HubError>;

/// The proxy that a request goes through.
#[derive(Clone)]
pub(super) struct Proxy(Intercept);

impl Proxies {
    pub(super) fn new(settings: &ProxySettings) -> Self {
        let all = settings.all.as_ref();
        let chosen = |own: &Option<Secret>, scheme| {
            let own = own.as_ref().filter(|own| !own.is_empty()).or(all);
            let chosen = own.filter(|chosen| !chosen.is_empty());
            chosen.map(|it| usable(it.expose(), scheme)).transpose()
        };
        let except = Matcher::builder().all(ANY).no(exceptions(&settings.except));
        Self {
            http: chosen(&settings.http, "http:"),
            https: chosen(&settings.https, "https:"),
            except: except.build(),
        }
    }

    /// The proxy for this address.
    ///
    /// # Errors
    /// [`HubError::Proxy`]: it cannot be used. It is not quoted, because it may have a password.
    pub(super) fn of(&self, uri: &Uri) -> Result<Option<Proxy>, HubError> {
        let host = uri.host().unwrap_or_default();
        // A dot at the end of a name only says that it is a whole one.
        let host = host.strip_suffix('.').unwrap_or(host);
        let is_here = is_loopback(host);
        let proxy = match &self.http {
            _ if self.is_exception(host) => return Ok(None),
            _ if is_secure(uri) => &self.https,
            http => http,
        };
        match proxy {
            // On another machine this host would be that machine, which must not get what is sent here.
            Ok(Some(proxy)) if is_here && !proxy.is_local() => Ok(None),
            Err(_) if is_here => Ok(None),
            proxy => proxy.clone(),
        }
    }

    fn is_exception(&self, host: &str) -> bool {
        let uri = format!("http://{host}/").parse();
        uri.is_ok_and(|uri: Uri| self.except.intercept(&uri).is_none())
    }
}

/// The exceptions as the matcher reads them, which knows commas alone between them, and no brackets.
fn exceptions(text: &str) -> String {
    let entries = text.split(|c: char| c == ',' || c.is_whitespace());
    let entries = entries.map(|entry| match entry {
        // The matcher has it for names alone.
        "*" => "*,0.0.0.0/0,::/0".to_owned(),
        entry => entry
            .replace(['[', ']'], "")
            .trim_end_matches('.')
            .to_owned(),
    });
    entries.collect::<Vec<_>>().join(",")
}

/// The proxy of this text, which is not empty.
fn usable(text: &str, scheme: &str) -> Result<Proxy, HubError> {
    let wrong = || {
        HubError::Proxy(format!(
            "the proxy for {scheme} addresses is no http://HOST:PORT or http://USER:PASSWORD@HOST:PORT, with %40, %2F, \
             %3F, %23 for @ / ? # in a password"
        ))
    };
    let is_scheme = |it: &str| it.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let rest = match text.split_once("://") {
        Some((before, rest)) if is_scheme(before) => rest,
        _ => text,
    };
    // What is behind these characters is dropped by the matcher. Where they are in a password, that is the host, and
    // the user name would be taken for it.
    if rest
        .strip_suffix('/')
        .unwrap_or(rest)
        .contains(['/', '?', '#'])
    {
        return Err(wrong());
    }
    let alone = Matcher::builder().all(text).build();
    let found = alone.intercept(&Uri::from_static(ANY)).ok_or_else(wrong)?;
    if !matches!(found.uri().scheme_str(), Some("http" | "https")) {
        return Err(HubError::Proxy(
            "a proxy that speaks SOCKS is not supported, only one of HTTP".into(),
        ));
    }
    let authority = found.uri().authority().ok_or_else(wrong)?;
    // A second one: the first was in the password, the rest of which would be taken for the host.
    let has_at = authority.as_str().contains('@');
    // What is no number would be ignored.
    let has_port = authority.port_u16().is_some() || authority.as_str() == authority.host();
    match has_port && !has_at {
        true => Ok(Proxy(found)),
        false => Err(wrong()),
    }
}

impl Proxy {
    /// Its host and port, without credentials.
    pub(super) fn name(&self) -> String {
        let uri = self.0.uri();
        let host = uri.host().unwrap_or_default();
        match uri.port_u16() {
            Some(port) => format!("the proxy {host}:{port}"),
            None => format!("the proxy {host}"),
        }
    }

    /// Whether what is sent to it stays on this machine.
    pub(super) fn is_local(&self) -> bool {
        self.0.uri().host().is_some_and(is_loopback)
    }

    /// Connects to the host of `uri`, or for `http:` to the proxy, which then gets the whole address.
    ///
    /// # Errors
    /// [`HubError`].
    pub(super) async fn connect(
        &self,
        uri: &Uri,
        host: &str,
        authorities: Option<&[u8]>,
    ) -> Result<Box<dyn Io>, HubError> {
        let io = connect(self.0.uri(), authorities).await;
        let io = io.map_err(|error| unreachable(&self.name(), error))?;
        if !is_secure(uri) {
            return Ok(io);
        }
        let io = self.tunnel(io, uri, host).await?;
        let io = connect_within(io, uri, authorities).await;
        io.map_err(|error| unreachable(host, error))
    }

    /// Asks the proxy for a connection to the host of `uri`.
    async fn tunnel(
        &self,
        io: Box<dyn Io>,
        uri: &Uri,
        host: &str,
    ) -> Result<Box<dyn Io>, HubError> {
        let lost = |error: hyper::Error| match error.is_parse() {
            true => HubError::Protocol("the proxy does not speak HTTP"),
            false => unreachable(
                &self.name(),
                ConnectError::Unreachable(std::io::Error::other("the connection was lost")),
            ),
        };
        let bad = || HubError::Address("it cannot be requested".into());
        let name = uri.host().ok_or_else(bad)?;
        let authority = format!("{name}:{}", uri.port_u16().unwrap_or(443));
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.method_mut() = Method::CONNECT;
        *request.uri_mut() = authority.parse().map_err(|_| bad())?;
        let headers = request.headers_mut();
        headers.insert(HOST, HeaderValue::from_str(&authority).map_err(|_| bad())?);
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        if let Some(login) = self.0.basic_auth() {
            headers.insert(PROXY_AUTHORIZATION, login.clone());
        }
        let mut builder = http1::Builder::new();
        builder.max_buf_size(HEAD_BYTES_MAX);
        let (mut sender, connection) = builder.handshake(TokioIo::new(io)).await.map_err(lost)?;
        // Ends by itself when the proxy has agreed, and with this function if it does not.
        let _connection = AbortOnDropHandle::new(tokio::spawn(async move {
            let _shown_by_the_answer = connection.with_upgrades().await;
        }));
        let answer = sender.send_request(request).await.map_err(lost)?;
        if !answer.status().is_success() {
            return Err(self.refused(host, answer.status()));
        }
        let upgraded = hyper::upgrade::on(answer).await.map_err(lost)?;
        Ok(Box::new(TokioIo::new(upgraded)))
    }

    /// Changes a request for an `http:` address to one that the proxy answers.
    pub(super) fn address<B>(&self, request: &mut Request<B>, host: &str) -> http::Result<()> {
        let path = request.uri().path_and_query().cloned();
        // A redirect may have a user name before the host, which the proxy must not get.
        *request.uri_mut() = uri::Builder::new()
            .scheme("http")
            .authority(host)
            .path_and_query(path.unwrap_or_else(|| PathAndQuery::from_static("/")))
            .build()?;
        if let Some(login) = self.0.basic_auth() {
            let headers = request.headers_mut();
            headers.insert(PROXY_AUTHORIZATION, login.clone());
        }
        Ok(())
    }

    /// The error of a status that the proxy itself has sent.
    pub(super) fn refused(&self, host: &str, status: StatusCode) -> HubError {
        HubError::ProxyRefused {
            proxy: self.name(),
            host: host.to_owned(),
            status: status.as_u16(),
        }
    }
}

/// An address that a matcher without exceptions intercepts.
const ANY: &str = "http://host/";
/// The maximum of bytes of the head of a proxy's answer.
const HEAD_BYTES_MAX: usize = 16 * 1024;

#[cfg(test)]
mod tests;
