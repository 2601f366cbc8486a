//! Exports telemetry to an OpenTelemetry collector, over gRPC or HTTP (OA-803).

mod http;

use std::time::Duration;

use ::http::uri::{Scheme, Uri};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use prost::Message;
use sapwood_proto::secret::Secret;
use tonic::Request;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use crate::connection::is_loopback;

/// The messages of the protocol.
pub use opentelemetry_proto::tonic as messages;

/// The protocol of a collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtlpProtocol {
    /// gRPC, usually on port 4317.
    #[default]
    Grpc,
    /// Protobuf over HTTP/1.1, usually on port 4318; `/v1/traces` and `/v1/metrics` are appended to the address.
    Http,
}

/// The address of a collector, and how to use it.
#[derive(Clone)]
pub struct CollectorAddress {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub url: String,
    /// The protocol.
    pub protocol: OtlpProtocol,
    /// Sent with each export; may contain credentials, so they are never logged.
    pub headers: Vec<(String, Secret)>,
    /// The time limit of an export.
    pub timeout: Duration,
}

impl CollectorAddress {
    /// Returns whether the headers would be sent unencrypted to another machine.
    #[must_use]
    pub fn exposes_headers(&self) -> bool {
        let uri: Option<Uri> = self.url.parse().ok();
        let clear = uri.filter(|uri| uri.scheme() == Some(&Scheme::HTTP));
        let other = clear.and_then(|uri| uri.host().map(|host| !is_loopback(host)));
        !self.headers.is_empty() && other.unwrap_or(false)
    }
}

/// Why an address cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAddress {
    /// It is not the URL of a server.
    #[error("write http://HOST:PORT or https://HOST:PORT")]
    Url,
    /// A header that cannot be sent.
    #[error("the header `{0}` cannot be sent")]
    Header(String),
}

/// Why an export failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeliveryError(String);

/// A collector. A connection is established when something is exported.
#[derive(Clone, Debug)]
pub struct Collector(CollectorTransport);

#[derive(Clone)]
enum CollectorTransport {
    Grpc {
        channel: Channel,
        headers: Vec<(AsciiMetadataKey, AsciiMetadataValue)>,
    },
    Http(http::CollectorTarget),
}

impl std::fmt::Debug for CollectorTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Grpc { .. } => "Grpc",
            Self::Http(_) => "Http",
        })
    }
}

impl Collector {
    /// Creates a client of the collector at `address`. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`BadAddress`].
    pub fn new(address: &CollectorAddress) -> Result<Self, BadAddress> {
        let uri: Uri = address.url.parse().map_err(|_| BadAddress::Url)?;
        let secure = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTP => false,
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            _ => return Err(BadAddress::Url),
        };
        // A URL is shown and logged, so credentials belong in a header.
        if uri.authority().is_some_and(|it| it.as_str().contains('@')) {
            return Err(BadAddress::Url);
        }
        if address.protocol == OtlpProtocol::Http {
            return Ok(Self(CollectorTransport::Http(http::CollectorTarget::new(
                &uri, secure, address,
            )?)));
        }
        let mut endpoint = Endpoint::from(uri)
            .connect_timeout(address.timeout)
            .timeout(address.timeout);
        if secure {
            endpoint = endpoint
                .tls_config(ClientTlsConfig::new().with_webpki_roots())
                .map_err(|_| BadAddress::Url)?;
        }
        let headers = address.headers.iter().map(|(name, value)| {
            let wrong = || BadAddress::Header(name.clone());
            let key: AsciiMetadataKey = name.to_ascii_lowercase().parse().map_err(|_| wrong())?;
            let mut value: AsciiMetadataValue = value.expose().parse().map_err(|_| wrong())?;
            value.set_sensitive(true);
            Ok((key, value))
        });
        Ok(Self(CollectorTransport::Grpc {
            channel: endpoint.connect_lazy(),
            headers: headers.collect::<Result<_, BadAddress>>()?,
        }))
    }

    /// Exports spans.
    ///
    /// # Errors
    /// [`DeliveryError`], if the collector did not accept them.
    pub async fn traces(&self, spans: ExportTraceServiceRequest) -> Result<(), DeliveryError> {
        match &self.0 {
            CollectorTransport::Http(target) => {
                target.post("v1/traces", spans.encode_to_vec()).await
            }
            CollectorTransport::Grpc { channel, .. } => {
                let mut client = TraceServiceClient::new(channel.clone());
                let sent = client.export(self.asked(spans)).await;
                sent.map(drop).map_err(|status| refused(&status))
            }
        }
    }

    /// Exports metrics.
    ///
    /// # Errors
    /// [`DeliveryError`], if the collector did not accept them.
    pub async fn metrics(&self, metrics: ExportMetricsServiceRequest) -> Result<(), DeliveryError> {
        match &self.0 {
            CollectorTransport::Http(target) => {
                target.post("v1/metrics", metrics.encode_to_vec()).await
            }
            CollectorTransport::Grpc { channel, .. } => {
                let mut client = MetricsServiceClient::new(channel.clone());
                let sent = client.export(self.asked(metrics)).await;
                sent.map(drop).map_err(|status| refused(&status))
            }
        }
    }

    fn asked<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let CollectorTransport::Grpc { headers, .. } = &self.0 {
            for (key, value) in headers {
                request.metadata_mut().insert(key.clone(), value.clone());
            }
        }
        request
    }
}

fn refused(status: &tonic::Status) -> DeliveryError {
    DeliveryError(format!("{}: {}", status.code(), status.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn oa_803_an_address_is_a_url_of_a_server_without_credentials() {
        for (url, good) in [
            ("http://127.0.0.1:4317", true),
            ("https://collector.example", true),
            ("http://[::1]:4318/in", true),
            ("https://name:secret@collector.example", false),
            ("ftp://collector.example", false),
            ("collector.example:4317", false),
            ("", false),
        ] {
            for protocol in [OtlpProtocol::Grpc, OtlpProtocol::Http] {
                let address = CollectorAddress {
                    url: url.into(),
                    protocol,
                    headers: Vec::new(),
                    timeout: Duration::from_secs(1),
                };
                let made = Collector::new(&address);
                assert_eq!(made.err(), (!good).then_some(BadAddress::Url), "{url}");
            }
        }
    }
}
