//! Exports telemetry to an OpenTelemetry collector, over gRPC or HTTP (OA-803).
//!
//! Spans go out through `opentelemetry-otlp`, which tries again what a collector could not take, and reads `OTEL_SERVICE_NAME`,
//! `OTEL_RESOURCE_ATTRIBUTES` and the `OTEL_EXPORTER_OTLP_*` that an address does not set. Metrics use its transport without
//! its exporter: that takes only what its own SDK has counted, and engines count for themselves.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use ::http::uri::Uri;
use bytes::Bytes;
use hyper_rustls::HttpsConnectorBuilder;
use opentelemetry_http::HttpClient;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{
    ExporterBuildError, SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig,
};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{
    EnvResourceDetector, ResourceDetector, SdkProvidedResourceDetector,
};
use opentelemetry_sdk::trace::SpanExporter as _;
use prost::Message;
use sapwood_proto::secret::Secret;
use tonic::Request;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;

use crate::address::{exposes_key, without_credentials};
use crate::connection::grpc_endpoint;
use crate::tls;

/// Attributes and ids of spans.
pub use opentelemetry as api;
/// The messages of the protocol.
pub use opentelemetry_proto::tonic as messages;
/// A finished span.
pub use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

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
        let uri = self.url.parse();
        uri.is_ok_and(|uri| exposes_key(&uri, !self.headers.is_empty()))
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
    /// A variable `OTEL_*` that cannot be used.
    #[error("{0}")]
    Variable(String),
}

/// Why an export failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeliveryError(String);

/// A collector. A connection is established when something is exported.
pub struct Collector {
    spans: SpanExporter,
    metrics: MetricsTransport,
    resource: Resource,
}

enum MetricsTransport {
    Grpc(MetricsServiceClient<Channel>, MetadataMap),
    Http(Arc<dyn HttpClient>, Uri, HeaderMap),
}

// Not derived: headers may be credentials.
impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Collector").finish_non_exhaustive()
    }
}

impl Collector {
    /// Creates a client of the collector at `address`. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`BadAddress`].
    pub fn new(address: &CollectorAddress) -> Result<Self, BadAddress> {
        let uri: Uri = address.url.parse().map_err(|_| BadAddress::Url)?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(BadAddress::Url);
        }
        // Credentials belong in a header.
        without_credentials(&uri).map_err(|_| BadAddress::Url)?;
        let (spans, metrics) = match address.protocol {
            OtlpProtocol::Grpc => over_grpc(uri, address)?,
            OtlpProtocol::Http => over_http(address)?,
        };
        let resource = Resource::builder_empty().build();
        Ok(Self {
            spans,
            metrics,
            resource,
        })
    }

    /// The same for what this service exports. Variables `OTEL_*` that name the service or describe it win.
    #[must_use]
    pub fn with_service(mut self, name: &'static str, version: &'static str) -> Self {
        const NAME: &str = "service.name";
        let attributes = [("service.version", version), (NAME, name)];
        let attributes = attributes.map(|(key, value)| api::KeyValue::new(key, value));
        let mut resource = Resource::builder_empty()
            .with_attributes(attributes)
            .with_detector(Box::new(EnvResourceDetector::new()));
        let detected = SdkProvidedResourceDetector.detect();
        // Without a variable it is the name of the program's file, which is less useful than the name set above.
        let named = detected.get(&NAME.into());
        if let Some(named) = named.filter(|it| !it.as_str().starts_with("unknown_service")) {
            resource = resource.with_attribute(api::KeyValue::new(NAME, named));
        }
        self.resource = resource.build();
        self.spans.set_resource(&self.resource);
        self
    }

    /// What is exported with metrics to say whose they are; spans have it already.
    #[must_use]
    pub fn resource(&self) -> messages::resource::v1::Resource {
        messages::resource::v1::Resource {
            attributes: ResourceAttributesWithSchema::from(&self.resource)
                .attributes
                .0,
            ..Default::default()
        }
    }

    /// Exports spans. What a collector has no room for is sent again as long as the address's timeout allows.
    ///
    /// # Errors
    /// [`DeliveryError`], if the collector did not accept them.
    pub async fn traces(&self, spans: Vec<SpanData>) -> Result<(), DeliveryError> {
        self.spans.export(spans).await.map_err(failed)
    }

    /// Exports metrics, without a retry: counters are cumulative, so the next export contains them.
    ///
    /// # Errors
    /// [`DeliveryError`], if the collector did not accept them.
    pub async fn metrics(&self, metrics: ExportMetricsServiceRequest) -> Result<(), DeliveryError> {
        match &self.metrics {
            MetricsTransport::Grpc(client, metadata) => {
                // One attempt: counters are cumulative, so the next export contains what this one would have said.
                let request = Request::from_parts(metadata.clone(), Default::default(), metrics);
                client.clone().export(request).await.map_err(failed)?;
            }
            MetricsTransport::Http(client, uri, headers) => {
                let body = Bytes::from(metrics.encode_to_vec());
                let mut request = ::http::Request::new(body);
                *request.method_mut() = ::http::Method::POST;
                *request.uri_mut() = uri.clone();
                *request.headers_mut() = headers.clone();
                let answer = client.send_bytes(request).await.map_err(failed)?;
                if !answer.status().is_success() {
                    let why = format!("the collector answered {}", answer.status());
                    return Err(DeliveryError(why));
                }
            }
        }
        Ok(())
    }
}

fn over_grpc(
    uri: Uri,
    address: &CollectorAddress,
) -> Result<(SpanExporter, MetricsTransport), BadAddress> {
    let endpoint = grpc_endpoint(uri, None).map_err(|_| BadAddress::Url)?;
    let endpoint = endpoint
        .connect_timeout(address.timeout)
        .timeout(address.timeout);
    // Lazily, so that a collector that is away does not keep the server from starting.
    let channel = endpoint.connect_lazy();
    let metadata = MetadataMap::from_headers(headers(address)?);
    let spans = SpanExporter::builder()
        .with_tonic()
        .with_channel(channel.clone())
        .with_metadata(metadata.clone())
        .with_timeout(address.timeout)
        .build();
    let metrics = MetricsTransport::Grpc(MetricsServiceClient::new(channel), metadata);
    Ok((spans.map_err(variable)?, metrics))
}

fn over_http(address: &CollectorAddress) -> Result<(SpanExporter, MetricsTransport), BadAddress> {
    let mut headers = headers(address)?;
    // Our own TLS settings, so that there is one list of authorities and one provider.
    let config = tls::client(None).map_err(|_| BadAddress::Url)?;
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_or_http()
        .enable_http1()
        .build();
    let client = Arc::new(HyperClient::new(connector, address.timeout, None));
    let base = address.url.trim_end_matches('/');
    let shown = address.headers.iter();
    let spans = SpanExporter::builder()
        .with_http()
        .with_shared_http_client(Arc::clone(&client) as Arc<dyn HttpClient>)
        .with_endpoint(format!("{base}/v1/traces"))
        .with_headers(
            shown
                .map(|(name, value)| (name.clone(), value.expose().to_owned()))
                .collect::<HashMap<_, _>>(),
        )
        .with_timeout(address.timeout)
        .build();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/x-protobuf"),
    );
    let uri = format!("{base}/v1/metrics");
    let uri = uri.parse().map_err(|_| BadAddress::Url)?;
    let metrics = MetricsTransport::Http(client, uri, headers);
    Ok((spans.map_err(variable)?, metrics))
}

fn headers(address: &CollectorAddress) -> Result<HeaderMap, BadAddress> {
    let headers = address.headers.iter().map(|(name, value)| {
        let wrong = || BadAddress::Header(name.clone());
        let key: HeaderName = name.parse().map_err(|_| wrong())?;
        let mut value: HeaderValue = value.expose().parse().map_err(|_| wrong())?;
        // Or the debug output of a request would show credentials.
        value.set_sensitive(true);
        Ok((key, value))
    });
    headers.collect()
}

fn variable(error: ExporterBuildError) -> BadAddress {
    BadAddress::Variable(error.to_string())
}

fn failed(error: impl std::fmt::Display) -> DeliveryError {
    DeliveryError(error.to_string())
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
