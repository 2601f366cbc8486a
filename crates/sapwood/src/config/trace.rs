//! The keys of `[trace]`: where spans and histograms are exported.

use std::time::Duration;

use sapwood_net::otlp::{Collector, CollectorAddress, OtlpProtocol};
use sapwood_proto::secret::{Secret, SecretUrl};
use sapwood_server::ops::telemetry;
use serde::{Deserialize, Serialize, Serializer};

use crate::failure::CliError;

/// Export of spans of generations and of histograms (OA-803). Without an endpoint nothing is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TraceConfig {
    /// `http://HOST:PORT` or `https://HOST:PORT` of an OpenTelemetry collector.
    pub(crate) endpoint: Option<SecretUrl>,
    /// The protocol.
    pub(crate) protocol: TraceProtocol,
    /// Headers of each export, as `name: value`; may contain credentials.
    pub(crate) headers: Vec<TraceHeader>,
    /// Whether spans contain prompts and outputs.
    pub(crate) content: bool,
    /// Interval of exporting histograms.
    #[serde(with = "humantime_serde")]
    pub(crate) metrics_every: Duration,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self {
            endpoint: None,
            protocol: TraceProtocol::default(),
            headers: Vec::new(),
            content: false,
            metrics_every: Duration::from_secs(60),
        }
    }
}

/// The protocol of a collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TraceProtocol {
    #[default]
    Grpc,
    Http,
}

/// A line of `headers`; only the name is shown.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(transparent)]
pub(crate) struct TraceHeader(Secret);

impl TraceHeader {
    fn parts(&self) -> Option<(&str, &str)> {
        let (name, value) = self.0.expose().split_once(':')?;
        Some((name.trim(), value.trim()))
    }
}

impl Serialize for TraceHeader {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.parts() {
            // The name helps to find a mistake, and is no secret.
            Some((name, _)) => to.collect_str(&format_args!("{name}: {}", self.0)),
            None => self.0.serialize(to),
        }
    }
}

impl TraceConfig {
    /// The collector, if one is named. Must be called within a runtime.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the key.
    pub(crate) fn collector(&self) -> Result<Option<Collector>, CliError> {
        let Some(url) = &self.endpoint else {
            return Ok(None);
        };
        let header = |header: &TraceHeader| {
            let (name, value) = header.parts().ok_or_else(|| {
                // The text may be a credential.
                CliError::usage("trace.headers: write each as \"name: value\"")
            })?;
            Ok::<_, CliError>((name.to_owned(), Secret::from(value)))
        };
        let address = CollectorAddress {
            url: url.expose().to_owned(),
            protocol: match self.protocol {
                TraceProtocol::Grpc => OtlpProtocol::Grpc,
                TraceProtocol::Http => OtlpProtocol::Http,
            },
            headers: self.headers.iter().map(header).collect::<Result<_, _>>()?,
            timeout: DELIVERY,
        };
        if address.exposes_headers() {
            tracing::warn!(
                endpoint = %url,
                "trace.headers are sent unencrypted to another machine: use https:// if they hold a credential"
            );
        }
        let collector = Collector::new(&address);
        let wrong = |error| CliError::usage(format!("trace.endpoint: {error}"));
        collector.map(Some).map_err(wrong)
    }

    /// What is exported, and how often.
    pub(crate) fn telemetry(&self) -> telemetry::Config {
        telemetry::Config {
            content: self.content,
            // A shorter interval, 0 above all, would export without pause.
            metrics_every: self.metrics_every.max(Duration::from_secs(1)),
            ..telemetry::Config::default()
        }
    }
}

/// Maximum duration of one export.
const DELIVERY: Duration = Duration::from_secs(10);
