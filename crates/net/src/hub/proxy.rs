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
    /// Hosts that are reached without one, separated by commas: names with all names below them, IP addresses, networks
    /// (`10.0.0.0/8`), or `*` for all (`no_proxy`).
    pub except: String,
}

/// The proxies, as far as they can be used.
pub(super) struct Proxies(Matcher);

/// The proxy that a request goes through.
pub(super) struct Proxy(Intercept);

impl Proxies {
    /// # Errors
    /// [`HubError::Proxy`]: what is no address. It is not quoted, because it may have a password.
    pub(super) fn new(settings: &ProxySettings) -> Result<Self, HubError> {
        let mut matcher = Matcher::builder().no(&settings.except);
        let chosen = |own: &Option<Secret>| own.clone().or_else(|| settings.all.clone());
        if let Some(http) = usable(chosen(&settings.http), "http:")? {
            matcher = matcher.http(http.expose());
        }
        if let Some(https) = usable(chosen(&settings.https), "https:")? {
            matcher = matcher.https(https.expose());
        }
        Ok(Self(matcher.build()))
    }

    /// The proxy for this address.
    ///
    /// # Errors
    /// [`HubError::Proxy`]: it does not speak HTTP.
    pub(super) fn of(&self, uri: &Uri) -> Result<Option<Proxy>, HubError> {
        let Some(found) = self.0.intercept(uri) else {
            return Ok(None);
        };
        match found.uri().scheme_str() {
            Some("http" | "https") => Ok(Some(Proxy(found))),
            // Not refused earlier: a proxy for everything that speaks SOCKS may have exceptions.
            _ => Err(HubError::Proxy(
                "a proxy that speaks SOCKS is not supported, only one of HTTP".into(),
            )),
        }
    }
}

/// The text of a proxy, unless it is empty.
fn usable(proxy: Option<Secret>, scheme: &str) -> Result<Option<Secret>, HubError> {
    let Some(proxy) = proxy.filter(|proxy| !proxy.is_empty()) else {
        return Ok(None);
    };
    // The matcher ignores what it cannot read, and the requests would go past the proxy.
    let alone = Matcher::builder().all(proxy.expose()).build();
    match alone.intercept(&Uri::from_static("http://host/")) {
        Some(_) => Ok(Some(proxy)),
        None => Err(HubError::Proxy(format!(
            "the proxy for {scheme} addresses is no http://HOST:PORT"
        ))),
    }
}

impl Proxy {
    /// Its host and port, without credentials.
    pub(super) fn name(&self) -> String {
        let authority = self.0.uri().authority();
        format!("the proxy {}", authority.map_or("", |it| it.as_str()))
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

/// The maximum of bytes of the head of a proxy's answer.
const HEAD_BYTES_MAX: usize = 16 * 1024;

#[cfg(test)]
mod tests;
