//! Spans and histograms as a collector receives them, over gRPC and over HTTP.

use std::collections::BTreeMap;
use std::sync::Mutex;

use axum::body::Bytes;
use axum::http::HeaderMap;
use prost::Message;
use sapwood_engine::Engine;
use sapwood_engine::scripted::{Config as Script, Scripted};
use sapwood_kernel::{Kernel, args, model};
use sapwood_net::otlp::messages::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use sapwood_net::otlp::messages::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use sapwood_net::otlp::messages::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use sapwood_net::otlp::messages::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use sapwood_net::otlp::messages::common::v1::any_value::Value;
use sapwood_net::otlp::messages::metrics::v1::metric::Data;
use sapwood_net::otlp::messages::trace::v1::{Span, Status as SpanStatus};
use sapwood_net::otlp::{CollectorAddress, OtlpProtocol};
use serde_json::json;
use tokio::net::TcpListener;
use tonic::{Request, Response, Status};

use super::histograms::attribute;
use super::span::Generation;
use super::*;
use crate::http::access_log::AccessRecord;
use crate::http::request_id::RequestId;
use crate::http::request_trace::RequestTrace;

/// What a collector was sent, and with which header.
#[derive(Clone, Default)]
struct Received(Arc<Mutex<Got>>);

#[derive(Default)]
struct Got {
    spans: Vec<Span>,
    metrics: Vec<ExportMetricsServiceRequest>,
    keys: Vec<String>,
}

impl Received {
    fn spans(&self, key: Option<&str>, request: ExportTraceServiceRequest) {
        let mut got = self.0.lock().unwrap();
        got.keys.extend(key.map(str::to_owned));
        for resource in request.resource_spans {
            let service = &resource.resource.unwrap().attributes;
            assert!(service.contains(&attribute("service.name", "sapwood")));
            got.spans.extend(
                resource
                    .scope_spans
                    .into_iter()
                    .flat_map(|scope| scope.spans),
            );
        }
    }
}

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let key = request
            .metadata()
            .get("x-key")
            .map(|key| key.to_str().unwrap().to_owned());
        self.spans(key.as_deref(), request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Received {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.0.lock().unwrap().metrics.push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

impl Received {
    /// A collector that speaks `protocol`, and its address.
    async fn serve(&self, protocol: OtlpProtocol) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        if protocol == OtlpProtocol::Grpc {
            let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
            let server = tonic::transport::Server::builder()
                .add_service(TraceServiceServer::new(self.clone()))
                .add_service(MetricsServiceServer::new(self.clone()));
            tokio::spawn(server.serve_with_incoming(incoming));
            return format!("http://{address}");
        }
        let (spans, metrics) = (self.clone(), self.clone());
        let take_spans = move |headers: HeaderMap, body: Bytes| async move {
            assert_eq!(headers["content-type"], "application/x-protobuf");
            let key = headers.get("x-key").map(|key| key.to_str().unwrap());
            spans.spans(key, ExportTraceServiceRequest::decode(body).unwrap());
        };
        let take_metrics = move |body: Bytes| async move {
            let request = ExportMetricsServiceRequest::decode(body).unwrap();
            metrics.0.lock().unwrap().metrics.push(request);
        };
        let routes = axum::Router::new()
            .route("/in/v1/traces", axum::routing::post(take_spans))
            .route("/in/v1/metrics", axum::routing::post(take_metrics));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        format!("http://{address}/in")
    }
}

/// Runs `work` on a kernel with the traced model `parrot`, under `parent`; gives what the collector got.
async fn traced<F: Future<Output = ()>>(
    protocol: OtlpProtocol,
    config: Config,
    parent: &str,
    work: impl FnOnce(Kernel) -> F,
) -> Received {
    let received = Received::default();
    let address = CollectorAddress {
        url: received.serve(protocol).await,
        protocol,
        headers: vec![("X-Key".into(), "hush".into())],
        timeout: Duration::from_secs(60),
    };
    let script = Script {
        name: "parrot".into(),
        ..Script::default()
    };
    let scripted = Box::new(Scripted::new(script).unwrap());
    let engine = Engine::spawn(scripted, sapwood_engine::Config::default()).unwrap();
    let metrics = Arc::new(ServerMetrics::new().unwrap());
    metrics.watch(engine.clone());
    let collector = Collector::new(&address).unwrap();
    let (spans, telemetry) = open(collector, metrics, config);
    let kernel = Kernel::new();
    kernel.add(model("parrot", engine)).unwrap();
    kernel.layer(spans);
    let mut headers = HeaderMap::new();
    headers.insert("traceparent", parent.parse().unwrap());
    let (asked, ()) = http::Request::new(()).into_parts();
    let mut id = HeaderMap::new();
    id.insert(crate::http::request_id::HEADER, "req-7".parse().unwrap());
    let entry = AccessRecord::new(RequestId::of(&id), None, &asked);
    let request_trace = RequestTrace::new(entry, None).within_trace(Parent::of(&headers));
    request_trace.follow(work(kernel)).await;
    // The kernel is gone, and with it the last layer: what was recorded is sent without waiting for more.
    telemetry.run(std::future::pending()).await;
    received
}

/// The attributes of a span; lists joined by commas.
fn attributes(span: &Span) -> BTreeMap<&str, String> {
    fn text(value: &Value) -> String {
        match value {
            Value::StringValue(text) => text.clone(),
            Value::IntValue(number) => number.to_string(),
            Value::DoubleValue(number) => format!("{number:?}"),
            Value::BoolValue(flag) => flag.to_string(),
            Value::ArrayValue(list) => {
                let all = list.values.iter();
                let all: Vec<_> = all.map(|one| text(one.value.as_ref().unwrap())).collect();
                all.join(",")
            }
            other => panic!("{other:?}"),
        }
    }
    let value = |pair: &sapwood_net::otlp::messages::common::v1::KeyValue| {
        text(pair.value.as_ref().unwrap().value.as_ref().unwrap())
    };
    let all = span.attributes.iter();
    all.map(|pair| (pair.key.as_str(), value(pair))).collect()
}

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

async fn ask(kernel: Kernel) {
    let config = json!({"temperature": 0, "max_tokens": 64, "seed": 7, "stop": ["zz"], "prompt_mode": "raw"});
    let run = kernel.run::<String>("parrot", args! { prompt: "hello", config: config });
    assert_eq!(run.await.unwrap(), "hello");
}

#[tokio::test]
async fn oa_803_a_generation_is_a_span_of_the_callers_trace() {
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::Http] {
        let received = traced(protocol, Config::default(), PARENT, ask).await;
        let got = received.0.lock().unwrap();
        let [span] = &got.spans[..] else {
            panic!("{protocol:?}: {:?}", got.spans)
        };
        assert_eq!(got.keys, ["hush"], "{protocol:?}");
        assert_eq!(span.name, "text_completion parrot");
        assert_eq!(span.trace_id[..2], [0x4b, 0xf9]);
        assert_eq!(
            span.parent_span_id,
            [0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]
        );
        assert!(span.span_id.len() == 8 && span.span_id != span.parent_span_id);
        assert!(
            span.start_time_unix_nano > 0 && span.end_time_unix_nano >= span.start_time_unix_nano
        );
        assert_eq!(span.status, Some(SpanStatus::default()));
        let mut attributes = attributes(span);
        let first: f64 = attributes
            .remove("gen_ai.response.time_to_first_chunk")
            .unwrap()
            .parse()
            .unwrap();
        assert!((0.0..60.0).contains(&first));
        let expect = [
            ("gen_ai.operation.name", "text_completion"),
            ("gen_ai.provider.name", "sapwood"),
            ("gen_ai.request.choice.count", "1"),
            ("gen_ai.request.frequency_penalty", "0.0"),
            ("gen_ai.request.max_tokens", "64"),
            ("gen_ai.request.model", "parrot"),
            ("gen_ai.request.presence_penalty", "0.0"),
            ("gen_ai.request.seed", "7"),
            ("gen_ai.request.stop_sequences", "zz"),
            ("gen_ai.request.stream", "true"),
            ("gen_ai.request.temperature", "0.0"),
            ("gen_ai.request.top_k", "0"),
            ("gen_ai.request.top_p", "1.0"),
            ("gen_ai.response.finish_reasons", "stop"),
            ("gen_ai.response.id", "req-7"),
            ("gen_ai.response.model", "parrot"),
            ("gen_ai.usage.cache_read.input_tokens", "0"),
            ("gen_ai.usage.input_tokens", "6"),
            ("gen_ai.usage.output_tokens", "6"),
        ];
        let shown: Vec<_> = attributes
            .iter()
            .map(|(key, value)| (*key, value.as_str()))
            .collect();
        assert_eq!(shown, expect, "{protocol:?}");
        let events: Vec<_> = span
            .events
            .iter()
            .map(|event| event.name.as_str())
            .collect();
        assert_eq!(events, ["queue", "prefill", "first_token"]);
    }
}

/// The same counters that `/metrics` reads.
#[tokio::test]
async fn oa_803_histograms_are_sent_under_their_gen_ai_names() {
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::Http] {
        let received = traced(protocol, Config::default(), PARENT, ask).await;
        let got = received.0.lock().unwrap();
        let last = &got.metrics.last().unwrap().resource_metrics[0].scope_metrics[0].metrics;
        let read = last.iter().map(|metric| {
            let Some(Data::Histogram(histogram)) = &metric.data else {
                panic!("{metric:?}")
            };
            let points = &histogram.data_points;
            for point in points {
                assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
                assert!(point.start_time_unix_nano <= point.time_unix_nano);
            }
            let counts: Vec<_> = points.iter().map(|point| point.count).collect();
            (metric.name.as_str(), metric.unit.as_str(), counts)
        });
        let read: Vec<_> = read.collect();
        assert_eq!(
            read,
            [
                ("gen_ai.server.time_to_first_token", "s", vec![1]),
                ("gen_ai.server.time_per_output_token", "s", vec![5]),
                ("gen_ai.server.request.duration", "s", vec![1]),
                ("gen_ai.client.token.usage", "{token}", vec![1, 1]),
            ],
            "{protocol:?}"
        );
    }
}

#[tokio::test]
async fn oa_803_content_is_exported_only_if_enabled() {
    for content in [false, true] {
        let config = Config {
            content,
            ..Config::default()
        };
        let received = traced(OtlpProtocol::Grpc, config, PARENT, ask).await;
        let got = received.0.lock().unwrap();
        let attributes = attributes(&got.spans[0]);
        assert_eq!(attributes.contains_key("gen_ai.input.messages"), content);
        let output = attributes.get("gen_ai.output.messages").map(String::as_str);
        assert_eq!(output, content.then_some("hello"));
        assert_eq!(format!("{:?}", got.spans).contains("hello"), content);
    }
}

/// What a client sends is not kept in spans without a limit.
#[tokio::test]
async fn oa_803_content_in_spans_is_limited() {
    let config = Config {
        content: true,
        ..Config::default()
    };
    let long = async |kernel: Kernel| {
        // Characters of two bytes, so that a cut may fall into one.
        let prompt = format!("x{}", "é".repeat(100_000));
        let run = kernel.run::<String>("parrot", args! { prompt: prompt });
        drop(run.await);
    };
    let received = traced(OtlpProtocol::Grpc, config, PARENT, long).await;
    let got = received.0.lock().unwrap();
    let attributes = attributes(&got.spans[0]);
    let output = attributes["gen_ai.input.messages"].len();
    assert!((60_000..=70_000).contains(&output), "{output}");
}

/// A span of this name, and nothing else.
fn named(name: String) -> SpanData {
    let generation = Generation {
        parent: None,
        ids: ([1; 16], [1; 8]),
        model: String::new(),
        request: None,
        began: SystemTime::now(),
        took: Duration::ZERO,
        asked: None,
        first_chunk: None,
        finish: Vec::new(),
        usage: None,
        phases: None,
        error: None,
        output: None,
    };
    SpanData {
        name: name.into(),
        attributes: Vec::new(),
        ..generation.into_span()
    }
}

#[test]
fn oa_803_a_delivery_is_limited_in_spans_and_bytes() {
    let until_full = |bytes| {
        let mut batch = SpanBatch::default();
        (1..).find(|_| batch.put(named("x".repeat(bytes)))).unwrap()
    };
    assert_eq!(until_full(1), BATCH_SPANS);
    assert_eq!(until_full(BATCH_BYTES / 4), 4);
}

#[tokio::test]
async fn oa_803_a_call_with_an_unsampled_parent_is_not_recorded() {
    let unsampled = PARENT.replace("-01", "-00");
    for (parent, spans, child) in [
        (unsampled.as_str(), 0, false),
        ("nonsense", 1, false),
        (PARENT, 1, true),
    ] {
        let received = traced(OtlpProtocol::Grpc, Config::default(), parent, ask).await;
        let got = received.0.lock().unwrap();
        assert_eq!(got.spans.len(), spans, "{parent}");
        for span in &got.spans {
            assert_eq!(
                (span.parent_span_id.is_empty(), span.trace_id.len()),
                (!child, 16)
            );
        }
    }
}

#[tokio::test]
async fn oa_803_a_generation_that_ends_early_has_its_error() {
    let received = traced(
        OtlpProtocol::Grpc,
        Config::default(),
        PARENT,
        |kernel| async move {
            let wrong =
                kernel.run::<String>("parrot", args! { prompt: "x", config: json!({"n": 1000}) });
            assert!(wrong.await.is_err());
            use futures::StreamExt;
            let mut dropped = kernel.run::<String>("parrot", args! { prompt: "hello there" });
            dropped.next().await.unwrap().unwrap();
        },
    );
    let received = received.await;
    let got = received.0.lock().unwrap();
    let how = |span: &Span| {
        let error = attributes(span).remove("error.type").unwrap();
        assert_eq!(span.status.as_ref().unwrap().message, error);
        (span.name.clone(), error)
    };
    let ends: Vec<_> = got.spans.iter().map(how).collect();
    let expect = [
        ("chat parrot", "invalid-request"),
        ("chat parrot", "cancelled"),
    ];
    assert_eq!(
        ends,
        expect.map(|(name, error)| (name.to_owned(), error.to_owned()))
    );
}

#[test]
fn oa_803_spans_that_find_no_room_are_dropped_and_counted() {
    let (spans, mut queue) = mpsc::channel(QUEUE_SPANS);
    let outlet = SpanSender {
        spans,
        dropped: Arc::default(),
    };
    for _ in 0..QUEUE_SPANS {
        outlet.put(named(String::new()));
    }
    assert_eq!(outlet.dropped.load(Ordering::Relaxed), 0);
    outlet.put(named(String::new()));
    assert_eq!(outlet.dropped.load(Ordering::Relaxed), 1);
    assert!(queue.try_recv().is_ok());
    outlet.put(named(String::new()));
    assert_eq!(outlet.dropped.load(Ordering::Relaxed), 1);
}
