//! Deliveries over HTTP/1.1: one connection each, since there is one every few seconds.
//!
//! Owns: the connection and the request. Refuses to know: what is in the body.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use http::uri::Uri;
use http_body_util::Full;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{Address, BadAddress, Undelivered};
use crate::tls;

/// A collector, and how to be let in.
#[derive(Clone)]
pub(super) struct Place {
    host: String,
    port: u16,
    secure: bool,
    /// Ends with a slash.
    path: String,
    headers: HeaderMap,
    timeout: Duration,
}

impl Place {
    pub(super) fn new(uri: &Uri, secure: bool, address: &Address) -> Result<Self, BadAddress> {
        let authority = uri.authority().ok_or(BadAddress::Url)?;
        let mut headers = HeaderMap::new();
        let host = HeaderValue::from_str(authority.as_str()).map_err(|_| BadAddress::Url)?;
        for (name, value) in &address.headers {
            let wrong = |_| BadAddress::Header(name.clone());
            let key = HeaderName::try_from(name).map_err(|_| BadAddress::Header(name.clone()))?;
            let mut value = HeaderValue::from_str(value.expose()).map_err(wrong)?;
            value.set_sensitive(true);
            headers.insert(key, value);
        }
        headers.insert(HOST, host);
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/x-protobuf"),
        );
        let brackets = |c| c == '[' || c == ']';
        Ok(Self {
            host: authority.host().trim_matches(brackets).to_owned(),
            port: authority
                .port_u16()
                .unwrap_or(if secure { 443 } else { 80 }),
            secure,
            path: format!("{}/", uri.path().trim_end_matches('/')),
            headers,
            timeout: address.timeout,
        })
    }

    pub(super) async fn post(&self, signal: &str, body: Vec<u8>) -> Result<(), Undelivered> {
        let late = |_| Undelivered("no answer in time".into());
        tokio::time::timeout(self.timeout, self.deliver(signal, body))
            .await
            .map_err(late)?
    }

    async fn deliver(&self, signal: &str, body: Vec<u8>) -> Result<(), Undelivered> {
        let tcp = TcpStream::connect((self.host.as_str(), self.port)).await;
        let tcp = tcp.map_err(|error| gone(&error))?;
        if !self.secure {
            return self.send(tcp, signal, body).await;
        }
        let config = tls::client(None).map_err(|error| gone(&error))?;
        let name = ServerName::try_from(self.host.clone()).map_err(|error| gone(&error))?;
        let tls = TlsConnector::from(Arc::new(config))
            .connect(name, tcp)
            .await;
        self.send(tls.map_err(|error| gone(&error))?, signal, body)
            .await
    }

    async fn send<S>(&self, socket: S, signal: &str, body: Vec<u8>) -> Result<(), Undelivered>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let io = TokioIo::new(socket);
        let handshake = hyper::client::conn::http1::handshake::<_, Full<Bytes>>(io).await;
        let (mut sender, connection) = handshake.map_err(|error| gone(&error))?;
        let mut request = http::Request::post(format!("{}{signal}", self.path))
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| gone(&error))?;
        *request.headers_mut() = self.headers.clone();
        let asking = sender.send_request(request);
        tokio::pin!(asking, connection);
        // The connection is what moves the request: it is polled beside it, and ends with it.
        let answer = tokio::select! {
            answer = &mut asking => answer,
            // A server that closes right after its answer ends both.
            _ = &mut connection => asking.await,
        };
        let status = answer.map_err(|error| gone(&error))?.status();
        if status.is_success() {
            return Ok(());
        }
        Err(Undelivered(format!("the collector answered {status}")))
    }
}

fn gone(error: &dyn std::fmt::Display) -> Undelivered {
    Undelivered(error.to_string())
}
