//! Exports over HTTP/1.1, with one connection for each request, because there is only one request every few seconds.

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

use super::{BadAddress, CollectorAddress, DeliveryError};
use crate::tls;

/// The target of a collector, and the headers to send.
#[derive(Clone)]
pub(super) struct CollectorTarget {
    host: String,
    port: u16,
    secure: bool,
    /// The path prefix; ends with a slash.
    path: String,
    headers: HeaderMap,
    timeout: Duration,
}

impl CollectorTarget {
    pub(super) fn new(
        uri: &Uri,
        secure: bool,
        address: &CollectorAddress,
    ) -> Result<Self, BadAddress> {
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

    pub(super) async fn post(&self, signal: &str, body: Vec<u8>) -> Result<(), DeliveryError> {
        let late = |_| DeliveryError("no answer in time".into());
        tokio::time::timeout(self.timeout, self.deliver(signal, body))
            .await
            .map_err(late)?
    }

    async fn deliver(&self, signal: &str, body: Vec<u8>) -> Result<(), DeliveryError> {
        let tcp = TcpStream::connect((self.host.as_str(), self.port)).await;
        let tcp = tcp.map_err(|error| unreachable(&error))?;
        if !self.secure {
            return self.send(tcp, signal, body).await;
        }
        let config = tls::client(None).map_err(|error| unreachable(&error))?;
        let name = ServerName::try_from(self.host.clone()).map_err(|error| unreachable(&error))?;
        let tls = TlsConnector::from(Arc::new(config))
            .connect(name, tcp)
            .await;
        self.send(tls.map_err(|error| unreachable(&error))?, signal, body)
            .await
    }

    async fn send<S>(&self, socket: S, signal: &str, body: Vec<u8>) -> Result<(), DeliveryError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let io = TokioIo::new(socket);
        let handshake = hyper::client::conn::http1::handshake::<_, Full<Bytes>>(io).await;
        let (mut sender, connection) = handshake.map_err(|error| unreachable(&error))?;
        let mut request = http::Request::post(format!("{}{signal}", self.path))
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| unreachable(&error))?;
        *request.headers_mut() = self.headers.clone();
        let asking = sender.send_request(request);
        tokio::pin!(asking, connection);
        // The connection future drives the request, so both are polled together, and it is dropped with the request.
        let answer = tokio::select! {
            answer = &mut asking => answer,
            // A server may close the connection right after its response.
            _ = &mut connection => asking.await,
        };
        let status = answer.map_err(|error| unreachable(&error))?.status();
        if status.is_success() {
            return Ok(());
        }
        Err(DeliveryError(format!("the collector answered {status}")))
    }
}

fn unreachable(error: &dyn std::fmt::Display) -> DeliveryError {
    DeliveryError(error.to_string())
}
