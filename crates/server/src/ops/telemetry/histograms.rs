//! The engines' histograms under their `gen_ai` names (OA-803), from the counters that `/metrics` reads.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::ops::metrics::WatchedEngine;
use sapwood_engine::stats::{EngineStats, Histogram as Counted};
use sapwood_net::otlp::messages::collector::metrics::v1::ExportMetricsServiceRequest;
use sapwood_net::otlp::messages::common::v1::any_value::Value;
use sapwood_net::otlp::messages::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use sapwood_net::otlp::messages::metrics::v1::metric::Data;
use sapwood_net::otlp::messages::metrics::v1::{
    AggregationTemporality, Histogram, HistogramDataPoint, Metric, ResourceMetrics, ScopeMetrics,
};
use sapwood_net::otlp::messages::resource::v1::Resource;

/// Name, unit, the kind of token if it counts tokens, and how to read it.
type HistogramRow = (
    &'static str,
    &'static str,
    Option<&'static str>,
    fn(&EngineStats) -> &Counted,
);

#[rustfmt::skip]
const ROWS: &[HistogramRow] = &[
    ("gen_ai.server.time_to_first_token", "s", None, |stats| &stats.first_token_seconds),
    ("gen_ai.server.time_per_output_token", "s", None, |stats| &stats.inter_token_seconds),
    ("gen_ai.server.request.duration", "s", None, |stats| &stats.request_seconds),
    ("gen_ai.client.token.usage", "{token}", Some("input"), |stats| &stats.request_prompt_tokens),
    ("gen_ai.client.token.usage", "{token}", Some("output"), |stats| &stats.request_generation_tokens),
];

/// The export of all of them with their present counts; `None` without engines.
pub(super) fn request(
    engines: &[WatchedEngine],
    began: SystemTime,
    resource: Resource,
) -> Option<ExportMetricsServiceRequest> {
    if engines.is_empty() {
        return None;
    }
    let (start, now) = (nanos(began), nanos(SystemTime::now()));
    let mut metrics: Vec<Metric> = Vec::new();
    for (name, unit, kind, pick) in ROWS {
        let points = engines.iter().map(|engine| {
            let mut point = point(pick(engine.stats()), start, now);
            point.attributes = vec![
                attribute("gen_ai.provider.name", "sapwood"),
                attribute("gen_ai.request.model", &*engine.name),
            ];
            let kind = kind.map(|kind| attribute("gen_ai.token.type", kind));
            point.attributes.extend(kind);
            point
        });
        match metrics.last_mut() {
            // Input and output tokens are one metric with an attribute, and `ROWS` has them next to each other: two metrics of
            // one name in an export are an error.
            Some(Metric {
                name: last,
                data: Some(Data::Histogram(histogram)),
                ..
            }) if last == name => {
                histogram.data_points.extend(points);
            }
            _ => metrics.push(Metric {
                name: (*name).into(),
                unit: (*unit).into(),
                data: Some(Data::Histogram(Histogram {
                    data_points: points.collect(),
                    // Cumulative, because the counters never reset: a lost export loses nothing.
                    aggregation_temporality: AggregationTemporality::Cumulative.into(),
                })),
                ..Metric::default()
            }),
        }
    }
    Some(ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(resource),
            scope_metrics: vec![ScopeMetrics {
                scope: Some(InstrumentationScope {
                    name: "sapwood".into(),
                    version: crate::VERSION.into(),
                    ..InstrumentationScope::default()
                }),
                metrics,
                schema_url: String::new(),
            }],
            schema_url: String::new(),
        }],
    })
}

fn point(counted: &Counted, start: u64, now: u64) -> HistogramDataPoint {
    let bucket_counts: Vec<u64> = counted.counts().collect();
    HistogramDataPoint {
        start_time_unix_nano: start,
        time_unix_nano: now,
        count: bucket_counts.iter().sum(),
        sum: Some(counted.sum()),
        bucket_counts,
        explicit_bounds: counted.bounds().to_vec(),
        ..HistogramDataPoint::default()
    }
}

pub(super) fn attribute(key: &str, value: impl Into<String>) -> KeyValue {
    let value = Some(Value::StringValue(value.into()));
    KeyValue {
        key: key.into(),
        value: Some(AnyValue { value }),
        ..KeyValue::default()
    }
}

/// Nanoseconds since 1970.
fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
